"""Regenerate files of tests/golden in a copy of the tree and compare them with those that are checked in.

    scripts/check goldens [NAME…]      names of scripts/goldens; all of them by default

Integers, strings (except versions of libraries) and file names must be equal. Floats may differ by rounding,
since the order of summation depends on the processor: by 1e-4 of the largest magnitude of their tensor, or of
the number itself in JSON. The exit code is 1 if a script fails or a file differs.
"""

import argparse
import json
import math
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from lib import ROOT, venv
from lib.launch import names

venv.enter()

import numpy as np

COPY = ROOT / "target" / "check-goldens"
GOLDEN = Path("tests/golden")
TOLERANCE = 1e-4
VERSION = re.compile(r"\d+(\.\d+)+")
FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16}


def copy_tree() -> None:
    """Copies the tracked files: scripts read golden files of other scripts, and the source lists the families."""
    shutil.rmtree(COPY, ignore_errors=True)
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in filter(None, listed.split("\0")):
        (COPY / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, COPY / name)


def safetensors_of(path: Path) -> tuple[dict, dict]:
    """Metadata, and dtype, shape and bytes of each tensor."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    metadata = header.pop("__metadata__", {})
    return metadata, {name: (t["dtype"], t["shape"], content[start + t["data_offsets"][0] : start + t["data_offsets"][1]]) for name, t in header.items()}


def tensors_differ(now: Path, golden: Path) -> str | None:
    (_, ours), (_, theirs) = safetensors_of(now), safetensors_of(golden)
    if ours.keys() != theirs.keys():
        return f"tensors {sorted(ours.keys() ^ theirs.keys())[:5]}"
    for name, (dtype, shape, data) in ours.items():
        if (dtype, shape) != theirs[name][:2]:
            return f"`{name}` is {dtype} {shape} instead of {theirs[name][0]} {theirs[name][1]}"
        if data == theirs[name][2]:
            continue
        if dtype not in FLOATS:
            return f"bytes of `{name}` ({dtype})"
        a, b = (np.frombuffer(bytes_of, FLOATS[dtype]).astype(np.float64) for bytes_of in (data, theirs[name][2]))
        if not np.allclose(a, b, rtol=0, atol=TOLERANCE * np.abs(b[np.isfinite(b)]).max(initial=0), equal_nan=True):
            return f"`{name}`: largest difference {np.abs(a - b).max():.1e}"
    return None


def values_differ(now, golden, place: str = "") -> str | None:
    """The path of the first difference between two JSON values."""
    if isinstance(now, float) or isinstance(golden, float):
        numbers = isinstance(now, (int, float)) and isinstance(golden, (int, float))
        return None if numbers and math.isclose(now, golden, rel_tol=TOLERANCE, abs_tol=TOLERANCE * 1e-3) else f"{place}: {now} instead of {golden}"
    if isinstance(now, dict) and isinstance(golden, dict) and now.keys() == golden.keys():
        return next((found for key in now if (found := values_differ(now[key], golden[key], f"{place}/{key}"))), None)
    if isinstance(now, list) and isinstance(golden, list) and len(now) == len(golden):
        return next((found for i, pair in enumerate(zip(now, golden)) if (found := values_differ(*pair, f"{place}/{i}"))), None)
    if all(isinstance(value, str) and VERSION.fullmatch(value) for value in (now, golden)):
        return None
    return None if now == golden else f"{place or 'the file'}: {str(now)[:60]} instead of {str(golden)[:60]}"


def differs(now: Path, golden: Path) -> str | None:
    if now.read_bytes() == golden.read_bytes():
        return None
    match golden.suffix:
        case ".safetensors":
            return tensors_differ(now, golden)
        case ".json":
            return values_differ(json.loads(now.read_text()), json.loads(golden.read_text()))
        case _:
            return "bytes"


def differences() -> list[str]:
    """Files of the copy that differ from those of the tree."""
    names = {folder: {str(path.relative_to(folder)) for path in (folder / GOLDEN).rglob("*") if path.is_file()} for folder in (COPY, ROOT)}
    found = [f"{name}: is {'new' if name in names[COPY] else 'gone'}" for name in sorted(names[COPY] ^ names[ROOT])]
    pairs = ((name, differs(COPY / name, ROOT / name)) for name in sorted(names[COPY] & names[ROOT]))
    return found + [f"{name}: {difference}" for name, difference in pairs if difference]


def main() -> int:
    every = list(names("goldens"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(every)}")
    args = parser.parse_args()
    unknown = sorted(set(args.names) - set(every))
    if unknown:
        parser.error(f"no script writes {', '.join(unknown)}: {', '.join(every)}")
    copy_tree()
    failed = False
    for name in args.names or every:
        start = time.monotonic()
        result = subprocess.run([COPY / "scripts" / "goldens", name], cwd=COPY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        found = differences() if result.returncode == 0 else [f"exit code {result.returncode}", *result.stdout.splitlines()[-5:]]
        print(f"{name}: {'differs' if found else 'as checked in'} ({time.monotonic() - start:.0f} s)", *found[:20], sep="\n  ", flush=True)
        failed |= bool(found)
        # The next script starts from the files that are checked in.
        shutil.rmtree(COPY / GOLDEN)
        shutil.copytree(ROOT / GOLDEN, COPY / GOLDEN)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
