"""Check signatures with OpenSSF's model_signing, and bills of materials with CycloneDX's library.

    scripts/check signatures [--compress BINARY]

A small model is compressed and signed with keys of every kind: model_signing and `compress verify` must accept the
output, and refuse it after each kind of change. `compress verify` must accept folders that model_signing has signed.
Bills of materials must be valid according to the schema of CycloneDX, and their hashes those of the files.
"""

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from lib import GOLDEN, ROOT, venv

MODEL = GOLDEN / "models/bert-sequence-classification"
EVALUATION = GOLDEN / "evaluation"


def keys(folder):
    """Writes private keys of every kind that is supported, and their public keys. Returns pairs of paths."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

    pairs = []
    for curve in (ec.SECP256R1(), ec.SECP384R1()):
        for name, format in (("pkcs8", PrivateFormat.PKCS8), ("sec1", PrivateFormat.TraditionalOpenSSL)):
            key = ec.generate_private_key(curve)
            private, public = (folder / f"{curve.name}-{name}.{part}" for part in ("pem", "pub.pem"))
            private.write_bytes(key.private_bytes(Encoding.PEM, format, NoEncryption()))
            public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
            pairs.append((private, public))
    return pairs


def execute(*command):
    return subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def accepted(compress, folder, public):
    """Whether model_signing and compress accept the signature of a folder."""
    signing = [sys.executable, "-m", "model_signing", "verify", "key", "--public_key", public, "--signature", folder / "model.sig", folder]
    results = [execute(*signing), execute(compress, "verify", folder, "--key", public)]
    return [result.returncode == 0 for result in results], "\n".join(result.stdout for result in results)


def change_byte(folder):
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def change_report(folder):
    path = folder / "report.json"
    path.write_text(path.read_text().replace('"seed": 0', '"seed": 1'))


def change_statement(folder):
    import base64

    path = folder / "model.sig"
    bundle = json.loads(path.read_text())
    payload = base64.b64decode(bundle["dsseEnvelope"]["payload"])
    changed = payload.replace(b'"sha256"', b'"sha257"', 1)
    assert changed != payload
    bundle["dsseEnvelope"]["payload"] = base64.b64encode(changed).decode()
    path.write_text(json.dumps(bundle))


CHANGES = {
    "a byte of the weights": change_byte,
    "a value of the report": change_report,
    "the signed statement": change_statement,
    "an additional file": lambda folder: (folder / "more.txt").write_text("more"),
    "an additional file in a folder": lambda folder: ((folder / "more").mkdir(), (folder / "more/more.txt").write_text("more")),
    "a missing file": lambda folder: (folder / "config.json").unlink(),
    "a renamed file": lambda folder: (folder / "config.json").rename(folder / "other.json"),
}


def check_signature(compress, folder, public, other):
    """The signature of a folder is accepted with its key, and refused with another or after a change."""
    results, text = accepted(compress, folder, public)
    assert all(results), f"{folder.name}: {results}\n{text}"
    results, text = accepted(compress, folder, other)
    assert not any(results), f"{folder.name}: accepted with another key: {results}\n{text}"
    count = 0
    for name, change in CHANGES.items():
        if change is change_report and not (folder / "report.json").exists():
            continue
        copy = folder.with_name("changed")
        shutil.copytree(folder, copy)
        change(copy)
        results, text = accepted(compress, copy, public)
        assert not any(results), f"{folder.name}: accepted after this change: {name}: {results}\n{text}"
        shutil.rmtree(copy)
        count += 1
    return count


def check_bill(folder):
    """A bill of materials is valid, and lists all files with their hashes. Returns the numbers of files and metrics."""
    from cyclonedx.model.bom import Bom
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    path = folder / "bom.cdx.json"
    error = JsonStrictValidator(SchemaVersion.V1_6).validate_str(path.read_text())
    assert error is None, f"{path}: {error}"
    bill = json.loads(path.read_text())
    Bom.from_json(json.loads(path.read_text()))
    listed = {part["name"]: {each["alg"]: each["content"] for each in part["hashes"]} for part in bill["components"] if part["type"] == "file"}
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    assert listed.keys() == files.keys() - {"bom.cdx.json", "report.json", "model.sig"}, sorted(listed.keys() ^ files.keys())
    for name, hashes in listed.items():
        assert hashes["SHA-256"] == hashlib.sha256(files[name].read_bytes()).hexdigest(), name
    card = bill["metadata"]["component"]["modelCard"]
    references = {part["bom-ref"] for part in bill["components"]}
    assert {data["ref"] for data in card["modelParameters"]["datasets"]} <= references
    return len(listed), len(card["quantitativeAnalysis"]["performanceMetrics"])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compress", type=Path, default=ROOT / "target/debug/compress")
    args = parser.parse_args()
    venv.enter(venv.provenance)
    compress = args.compress.absolute()
    with tempfile.TemporaryDirectory() as place:
        place = Path(place)
        pairs, changes = keys(place), 0
        model = place / "in"
        shutil.copytree(MODEL, model, ignore=shutil.ignore_patterns("golden.safetensors"))
        shutil.copy2(EVALUATION / "word-pieces.json", model / "tokenizer.json")
        evaluation = {"text": str(EVALUATION / "labelled.csv"), "label_column": "label"}
        recipe = {"model": "in", "passes": ["quantize-dynamic"], "sbom": "cyclonedx", "data": {"evaluation": evaluation}}
        (place / "recipe.yaml").write_text(json.dumps(recipe))
        for (private, public), (_, other) in zip(pairs, pairs[1:] + pairs[:1]):
            folder = place / f"out-{private.stem}"
            run = execute(compress, "run", place / "recipe.yaml", "-o", folder, "--sign", private, "--quiet")
            assert run.returncode == 0, run.stdout
            report = (folder / "report.json").read_text()
            assert str(private) not in report and private.read_text().splitlines()[1] not in report, "the report contains the key"
            changes += check_signature(compress, folder, public, other)
        files, metrics = check_bill(folder)
        unsigned = place / "unsigned"
        shutil.copytree(folder, unsigned)
        (unsigned / "model.sig").unlink()
        report = json.loads((unsigned / "report.json").read_text())
        del report["signature"]
        (unsigned / "report.json").write_text(json.dumps(report))
        plain = place / "plain"
        shutil.copytree(model, plain)
        for folder in (unsigned, plain):
            private, public = pairs[0]
            signed = execute(sys.executable, "-m", "model_signing", "sign", "key", "--private_key", private, "--signature", folder / "model.sig", folder)
            assert signed.returncode == 0, signed.stdout
            changes += check_signature(compress, folder, public, pairs[1][1])
        print(f"model_signing and compress accept {len(pairs) + 2} signatures of each other, and refuse {changes} changes and other keys")
        print(f"CycloneDX accepts a bill of {files} files and {metrics} metrics, whose hashes are those of the files")


main()
