"""Check that examples/read_sparse.py reads the output of compress with `layout: sparse`.

    scripts/check sparse

For each model and each sparse variant: the values of the reader must equal those that `compress densify`
writes, bit for bit, and a changed value must be detected.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from lib import ROOT

if importlib.util.find_spec("numpy") is None:
    from lib import venv

    venv.enter()

READER = ROOT / "examples" / "read_sparse.py"
PRUNE = ["--", "prune-unstructured", "--amount", "0.6"]
WAYS = {
    "floats": PRUNE,
    "int8": [*PRUNE, "--", "quantize-dynamic"],
    "int8 tensor": [*PRUNE, "--", "quantize-dynamic", "--granularity", "tensor"],
    "int8 groups": [*PRUNE, "--", "quantize-dynamic", "--granularity", "group", "--group-size", "16"],
    "int8 asymmetric": [*PRUNE, "--", "quantize-dynamic", "--symmetric", "false"],
    "int8 in part": ["--", "prune-unstructured", "--amount", "0.6", "--ignore", "*mlp*", "--", "quantize-dynamic"],
}


def built():
    """The release binaries of the working tree."""
    say = {"cwd": ROOT, "check": True}
    subprocess.run(["cargo", "build", "--release", "--quiet", "--bin", "compress", "--example", "make_checkpoint"], **say)
    metadata = subprocess.run(["cargo", "metadata", "--no-deps", "--format-version=1"], stdout=subprocess.PIPE, **say)
    release = Path(json.loads(metadata.stdout)["target_directory"], "release")
    return release / "compress", release / "examples" / "make_checkpoint"


def reads(dense, sparse):
    """0 if equal, 1 if not, another code if the reader failed."""
    done = subprocess.run([sys.executable, READER, "--check", dense, sparse], capture_output=True, text=True)
    return done.returncode, (done.stdout + done.stderr).strip()


def damage(folder):
    """Flips a bit of the last value of a file."""
    path = sorted(folder.glob("*.safetensors"))[-1]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def check(compress, model, way, scratch):
    sparse, dense = scratch / "sparse", scratch / "dense"

    def run(*command):
        subprocess.run([compress, *command], check=True, stdout=subprocess.DEVNULL)

    export = "safetensors: {layout: sparse, shard_size: 100KB}"
    run("chain", model, "-o", sparse, "--force", "--quiet", "--export", export, *WAYS[way])
    run("densify", sparse, "-o", dense, "--force", "--quiet")
    code, said = reads(dense, sparse)
    if code != 0:
        return said
    if reads(model, sparse)[0] != 1:
        return "the original is reported as equal"
    damage(dense)
    return None if reads(dense, sparse)[0] == 1 else "a changed value is not detected"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    compress, make = built()
    failed = 0
    with tempfile.TemporaryDirectory(prefix="compress-sparse-") as scratch:
        for dtype in ("f32", "bf16", "f16"):
            model = Path(scratch, dtype)
            subprocess.run([make, model, "--size", "pico", "--dtype", dtype], check=True, stdout=subprocess.DEVNULL)
            for way in WAYS:
                found = check(compress, model, way, Path(scratch))
                print(f"{dtype:4}  {way:16} {found or 'ok'}")
                failed += found is not None
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
