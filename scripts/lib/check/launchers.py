"""Test distributed training and calibration with the launchers that are installed: torchrun, Open MPI's mpirun, and Slurm's srun.

    scripts/check launchers                               # launchers on PATH, with target/debug/compress
    scripts/check launchers --torchrun PATH --binary PATH

For each launcher and 2 and 3 processes on this machine: training a network with batch normalization, sharded
optimizer state and early stopping, and GPTQ of a language model, produce the same weights as with plain environment
variables, bit for bit.
If one process is killed, all of them stop, and the run that resumes from the checkpoint produces the same
weights as an uninterrupted one. With `torchrun --max-restarts`, it resumes automatically.
"""

import argparse
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lib import GOLDEN, ROOT

MODEL = GOLDEN / "models" / "torchvision-resnet18"
SAMPLES = 50


def arrays(path):
    """Images and labels in a safetensors file."""
    pixels = [(i * 7919 % 1009) / 500 - 1 for i in range(SAMPLES * 3 * 33 * 17)]
    write(path, {
        "pixel_values": ("F32", [SAMPLES, 3, 33, 17], struct.pack(f"<{len(pixels)}f", *pixels)),
        "labels": ("I64", [SAMPLES], struct.pack(f"<{SAMPLES}q", *(i % 2 for i in range(SAMPLES)))),
    })


def tokens(path):
    """Texts of eight tokens in a safetensors file."""
    ids = [i * i * 7 % 41 % 40 for i in range(SAMPLES * 8)]
    columns = {"input_ids": ids, "attention_mask": [1] * len(ids)}
    write(path, {name: ("I64", [SAMPLES, 8], struct.pack(f"<{len(values)}q", *values)) for name, values in columns.items()})


def write(path, data):
    """Writes tensors, given by dtype, shape and bytes, to a safetensors file."""
    header, body = {}, b""
    for name, (dtype, shape, values) in data.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(values)]}
        body += values
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def recipe(folder, name, options):
    data = "{ train: { arrays: train.safetensors }, evaluation: { arrays: train.safetensors } }"
    text = f"model: {MODEL}\ndata: {data}\npasses:\n  - finetune: {{ batch_size: 4, shard_optimizer: true, {options} }}\n"
    (folder / f"{name}.yaml").write_text(text)
    return name


def calibrated(folder):
    """The recipe of a pass whose samples and layers the processes share."""
    data = "{ calibration: { arrays: tokens.safetensors, batch_size: 4 } }"
    text = f"model: {MODEL.with_name('llama')}\ndata: {data}\npasses:\n  - quantize: {{ method: gptq, group_size: 4 }}\n"
    (folder / "calibrated.yaml").write_text(text)


def environment(**more):
    """The environment without variables of other launchers."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "OMPI_", "PMIX_", "SLURM_", "TORCHELASTIC_")
    return {name: value for name, value in os.environ.items() if not name.startswith(names)} | {"OMP_NUM_THREADS": "1"} | more


def plain(args, count):
    """Starts the processes with plain environment variables, one by one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    at = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [(args, environment(RANK=str(rank), LOCAL_RANK=str(rank), **at)) for rank in range(count)]


def launchers(options):
    """The command of each launcher for a number of processes."""
    found = {"plain": plain}
    torchrun, mpirun, srun = (shutil.which(name) for name in (options.torchrun, options.mpirun, options.srun))
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    for more in ([], ["--standalone"], ["--max-restarts", "2"]) if torchrun else []:
        def launch(args, n, more=more):
            return [([torchrun, *more, "--nproc-per-node", str(n), "--no-python", *args], environment())]

        found[" ".join(["torchrun", *more])] = launch
    if mpirun:
        found["mpirun"] = lambda args, n: [([mpirun, *root, "--oversubscribe", "-n", str(n), *args], environment())]
    if srun:
        found["srun"] = lambda args, n: [([srun, "--ntasks", str(n), *args], environment())]
    return found


class Run:
    """The processes of one run, started in a folder."""

    def __init__(self, folder, binary, launch, count, name, out, *more):
        args = [str(binary), "run", f"{name}.yaml", "-o", out, "--quiet", *more]
        self.out, self.folder = out, folder.resolve()
        self.log = open(folder / f"{out}.log", "a+b")
        commands = launch(args, count)
        self.children = [subprocess.Popen(command, env=env, cwd=folder, stdout=self.log, stderr=self.log) for command, env in commands]

    def wait(self, seconds=300):
        """Exit codes of the started processes."""
        end = time.monotonic() + seconds
        return [child.wait(max(1, end - time.monotonic())) for child in self.children]

    def workers(self):
        """The training processes; those of Slurm are not children of srun."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                args = (entry / "cmdline").read_bytes().split(b"\0")
                if args[1:2] == [b"run"] and self.out.encode() in args and (entry / "cwd").resolve() == self.folder:
                    found.append(int(entry.name))
            except (OSError, ValueError):
                continue
        return sorted(found)

    def said(self):
        self.log.seek(0)
        return self.log.read().decode(errors="replace")


def killed(folder, binary, launch, count, *more):
    """Kills a process of a run after its first checkpoint; returns the run, and an error if that was not
    possible."""
    run = Run(folder, binary, launch, count, "long", "parts", *more)
    checkpoint = folder / "parts.unfinished" / "1-finetune" / "checkpoint.safetensors"
    while not checkpoint.exists() and all(child.poll() is None for child in run.children):
        time.sleep(0.01)
    workers = run.workers()
    if len(workers) != count:
        return run, f"{len(workers)} processes train, not {count}: {run.said()}"
    os.kill(workers[-1], signal.SIGKILL)
    return run, None


def check(folder, binary, name, launch, count, expected):
    """Errors of one launcher with a number of processes; `expected` has the weights of all recipes."""
    def weights(out):
        return (folder / out / "model.safetensors").read_bytes()

    if "--max-restarts" in name:
        run, complaint = killed(folder, binary, launch, count, "--resume")
        if complaint or any(run.wait()):
            return complaint or run.said()
        return None if weights("parts") == expected["long", count] else "the restarted run has different weights"

    for kind in ("short", "long", "calibrated"):
        run = Run(folder, binary, launch, count, kind, kind)
        if any(run.wait()):
            return f"{kind}: {run.said()}"
        if expected.setdefault((kind, count), weights(kind)) != weights(kind):
            return f"{kind}: the weights differ from those of plain processes"
    report = json.loads((folder / "short" / "report.json").read_text())
    if "stopped early" not in json.dumps(report):
        return "early stopping was not triggered"
    run, complaint = killed(folder, binary, launch, count)
    if complaint:
        return complaint
    begin = time.monotonic()
    if not any(run.wait(60)):
        return "a process was killed, but no process reports that"
    while run.workers():
        time.sleep(0.05)
        if time.monotonic() - begin > 60:
            return "a process was killed, but others continue"
    run = Run(folder, binary, launch, count, "long", "parts", "--resume")
    if any(run.wait()):
        return f"resume: {run.said()}"
    if weights("parts") != expected["long", count]:
        return "the resumed run has different weights than the uninterrupted one"
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", type=Path, default=ROOT / "target" / "debug" / "compress")
    parser.add_argument("--torchrun", default="torchrun")
    parser.add_argument("--mpirun", default="mpirun")
    parser.add_argument("--srun", default="srun")
    options = parser.parse_args()
    found, expected, failed = launchers(options), {}, 0
    for count in (2, 3):
        for name, launch in found.items():
            with tempfile.TemporaryDirectory() as folder:
                folder = Path(folder)
                arrays(folder / "train.safetensors")
                tokens(folder / "tokens.safetensors")
                calibrated(folder)
                recipe(folder, "short", "max_steps: 40, learning_rate: 1e-12, evaluate_every: 1, patience: 3")
                recipe(folder, "long", "max_steps: 50, learning_rate: 1e-3, checkpoint_every: { steps: 10 }")
                begin = time.monotonic()
                complaint = check(folder, options.binary.resolve(), name, launch, count, expected)
                failed += complaint is not None
                print(f"{name}, {count} processes: {complaint or 'ok'}, {time.monotonic() - begin:.0f} s", flush=True)
    missing = [name for name in ("torchrun", "mpirun", "srun") if name not in found]
    print(f"not installed, skipped: {', '.join(missing)}" if missing else "all launchers were tested")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
