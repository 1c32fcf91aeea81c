"""Test buckets with local servers: a model is compressed from one bucket into another, and the result must
equal a local one.

    scripts/check remote [--compress BINARY] [--copy BINARY] [--megabytes N] [--threads N] [--store s3 | az]

`s3` is moto. `az` is Azurite (`npm install azurite`); --server is the path of its `azurite-blob`. Prints the
time from bucket to bucket, the time of a plain copy by the same code (examples/copy.rs), the number of
measurements, and the memory.
"""

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from lib import ROOT, venv

REQUIREMENTS = ["moto[server,s3]==5.2.5", "boto3"]
SECRET = "averysecretkey"
# The default account of Azurite.
AZURITE = ("devstoreaccount1", "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==")


# Four tensors of 4 MiB. moto reads the whole object for each range request, so large objects would measure
# moto instead of compress.
SHARD = 4


def model(folder, megabytes):
    """A model of random float32 weights in shards with an index."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "bert", "hidden_size": 1024}))
    shards, rows, count = {}, 1024, -(-megabytes // (4 * SHARD))
    for shard in range(count):
        name, header, begin = f"model-{shard + 1:05}-of-{count:05}.safetensors", {}, 0
        names = [f"encoder.layer.{shard * SHARD + layer}.weight" for layer in range(SHARD)]
        for tensor in names:
            header[tensor] = {"dtype": "F32", "shape": [rows, 1024], "data_offsets": [begin, begin + rows * 4096]}
            begin += rows * 4096
            shards[tensor] = name
        text = json.dumps(header).encode()
        with (folder / name).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for _ in names:
                values = os.urandom(8192)
                # Random bits in the low halves, zeros in the high halves: small finite floats.
                block = b"".join(bytes((0, values[i], values[i + 1], 0x3C)) for i in range(0, 8192, 2)) * 4
                for start in range(0, rows * 4096, len(block)):
                    file.write(block[: rows * 4096 - start])
    index = {"metadata": {"total_size": 0}, "weight_map": shards}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


class Checked:
    """Runs the binaries with the environment of the store."""

    def __init__(self, args, environment, folder):
        self.args, self.environment, self.temporary = args, environment, folder / "temporary"
        self.temporary.mkdir()

    def run(self, program, *arguments):
        """Runs a program; returns seconds and its output."""
        start = time.monotonic()
        environment = {**os.environ, **self.environment, "TMPDIR": str(self.temporary)}
        process = subprocess.run([program, *arguments], env=environment, capture_output=True, text=True)
        seconds = time.monotonic() - start
        assert process.returncode == 0, f"{' '.join(arguments)}\n{process.stdout}{process.stderr}"
        secrets = [SECRET, AZURITE[1]]
        assert not any(secret in process.stdout + process.stderr for secret in secrets), "the output contains a secret key"
        assert not any(self.temporary.iterdir()), "temporary files are left"
        return seconds, process.stdout

    def compress(self, *arguments):
        return self.run(self.args.compress, *arguments, *(["--threads", str(self.args.threads)] if self.args.threads else []))


def same(checked, place, bucket, name, read):
    """Compares a folder in a bucket with a local one: the report with the hashes of the weights, and the
    bytes of small files."""
    checked.compress("verify", f"{bucket}/{name}")
    report = lambda told: {output["path"]: output["blake3"] for output in told["outputs"]}
    _, text = checked.compress("report", f"{bucket}/{name}", "--json")
    assert report(json.loads(text)) == report(json.loads((place / name / "report.json").read_text())), f"{name} differs"
    # The report contains the time, and the recipe the location of the model.
    small = [path for path in (place / name).rglob("*") if path.is_file() and path.suffix != ".safetensors" and not path.name.startswith(("report.", "recipe."))]
    assert small, f"{name} has no small files"
    for path in small:
        key = f"{name}/{path.relative_to(place / name)}"
        assert read(key) == path.read_bytes(), f"{key} differs"


def check(args, place, bucket, environment, read):
    checked = Checked(args, environment, place)
    model(place / "in", args.megabytes)
    checked.run(args.copy, str(place / "in"), f"{bucket}/in")
    shards = ["--shard-size", "17MB"]
    commands = {"int8": ["quantize-dynamic", "--no-measure", *shards], "dense": ["densify", *shards]}
    for name, command in commands.items():
        checked.compress(*command, str(place / "in"), "-o", str(place / name))
    times, memory = {"copy": [], **{name: [] for name in commands}}, 0
    for number in range(args.repeat):
        times["copy"].append(checked.run(args.copy, f"{bucket}/in", f"{bucket}/copy{number}")[0])
        for name, command in commands.items():
            seconds, told = checked.compress(*command, f"{bucket}/in", "-o", f"{bucket}/{number}/{name}", "--json")
            times[name].append(seconds)
            memory = max(memory, json.loads(told)["totals"]["peak_rss_bytes"])
    for name in commands:
        shutil.copytree(place / name, place / "0" / name)
        same(checked, place, bucket, f"0/{name}", read)
    least = {name: min(seconds) for name, seconds in times.items()}
    middle = {name: statistics.median(seconds) for name, seconds in times.items()}
    print(f"{args.store}, {args.megabytes} MB from bucket to bucket, minimum and median of {args.repeat}; at most {memory / 1e6:.0f} MB of memory")
    for name in times:
        print(f"  {name}: {least[name]:.1f} s, {middle[name]:.1f} s; {middle[name] / middle['copy']:.2f} of the copy")


def listening(server):
    """Waits until a server responds."""
    for _ in range(600):
        try:
            urllib.request.urlopen(server).close()
            return
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(0.1)
    sys.exit(f"{server} does not respond")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def moto(args, folder, port):
    command = [str(Path(sys.prefix, "bin/moto_server")), "-H", "127.0.0.1", "-p", str(port)]
    endpoint = f"http://127.0.0.1:{port}"

    def begin():
        import boto3

        client = boto3.client("s3", endpoint_url=endpoint, aws_access_key_id="key", aws_secret_access_key=SECRET, region_name="us-east-1")
        client.create_bucket(Bucket="models")
        read = lambda key: client.get_object(Bucket="models", Key=key)["Body"].read()
        return read, lambda: client.list_multipart_uploads(Bucket="models").get("Uploads")

    environment = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "us-east-1", "AWS_ALLOW_HTTP": "true", "AWS_ENDPOINT_URL": endpoint}
    return command, endpoint, begin, "s3://models", environment


def azurite(args, folder, port):
    command = [args.server or "azurite-blob", "--silent", "--disableTelemetry", "--skipApiVersionCheck", "--blobPort", str(port), "--location", str(folder / "azurite")]
    endpoint = f"http://127.0.0.1:{port}"

    def begin():
        import base64
        import hashlib
        import hmac
        from email.utils import formatdate

        account, secret = AZURITE

        def ask(method, path, query=""):
            headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2023-11-03"}
            names = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
            signed = f"{method}\n" + "\n" * 11 + names + f"/{account}/{account}/{path}" + f"\n{query.replace('=', ':')}" * bool(query)
            signature = base64.b64encode(hmac.new(base64.b64decode(secret), signed.encode(), hashlib.sha256).digest()).decode()
            headers["Authorization"] = f"SharedKey {account}:{signature}"
            request = urllib.request.Request(f"{endpoint}/{account}/{path}" + f"?{query}" * bool(query), method=method, headers=headers)
            with urllib.request.urlopen(request) as answer:
                return answer.read()

        ask("PUT", "models", "restype=container")
        return lambda key: ask("GET", f"models/{key}"), None

    environment = {"AZURE_STORAGE_USE_EMULATOR": "true", "AZURITE_BLOB_STORAGE_URL": endpoint, "AZURE_ALLOW_HTTP": "true"}
    return command, endpoint, begin, "az://models", environment


STORES = {"s3": moto, "az": azurite}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compress", type=Path, default=ROOT / "target/debug/compress")
    parser.add_argument("--copy", type=Path, default=ROOT / "target/debug/examples/copy", help="cargo build --example copy")
    parser.add_argument("--megabytes", type=int, default=64, help="size of the model")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, help="threads of compress")
    parser.add_argument("--store", choices=STORES, default="s3")
    parser.add_argument("--server", help="path of the server program")
    args = parser.parse_args()
    if args.store == "s3":
        venv.enter(lambda: venv.prepare("moto", REQUIREMENTS, "150 MB"))
    with tempfile.TemporaryDirectory() as folder:
        command, endpoint, begin, bucket, environment = STORES[args.store](args, Path(folder), free_port())
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            listening(endpoint)
            read, left = begin()
            check(args, Path(folder), bucket, environment, read)
            assert not left or not left(), "an incomplete upload is left"
        finally:
            server.kill()
            server.wait()


main()
