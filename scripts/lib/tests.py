"""Builds and runs all tests of the workspace, without its documentation.

    PYTHONPATH=scripts python3 -m lib.tests build FILE    builds them, and writes the list of programs
    PYTHONPATH=scripts python3 -m lib.tests run FILE      runs them, and some again for the code paths of other processors

Programs run without cargo, which would wait for other commands in the same target folder. A run prints its time and
the number of its tests; a failed one prints its whole output, and the others still run.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from lib import ROOT

# Tests whose results depend on the code path: kernels and what is computed with them.
KERNELS = [("compress_kernels", []), ("it", ["ops::", "laws::"])]
CPUINFO = Path("/proc/cpuinfo")
FEATURES = CPUINFO.read_text() if CPUINFO.exists() else ""
# The first run has tested the default path: AMX with tile registers, otherwise AVX-512, otherwise AVX2.
HAS_TILES, HAS_AVX512 = (f" {name} " in FEATURES for name in ("amx_bf16", "avx512bw"))
# Environment, and tests with their filters.
AGAIN = [
    *([({"COMPRESS_SIMD": "avx512"}, KERNELS)] if HAS_TILES else []),
    *([({"COMPRESS_SIMD": "avx2"}, KERNELS)] if HAS_AVX512 else []),
    ({"COMPRESS_SIMD": "baseline"}, KERNELS),
    ({"COMPRESS_KERNELS": "off"}, [("it", ["ops::", "tape::", "parity::", "generation::"])]),
]
# More tests at a time than processors, because tests wait for the disk and for other programs.
THREADS = {"RUST_TEST_THREADS": str((os.cpu_count() or 1) + 2)}
GPU_CHECK = ["scripts/gpu-check", "run", "--device", "cpu:strict", "--small", "--out", "target/tmp/gpu-check"]


def build(listing: Path) -> int:
    # No examples, which `cargo test` compiles and links otherwise: clippy checks their types.
    command = ["cargo", "test", "--workspace", "--tests", "--no-run", "--message-format=json-render-diagnostics"]
    built = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    messages = [json.loads(line) for line in built.stdout.splitlines() if line.startswith("{")]
    artifacts = [message for message in messages if message["reason"] == "compiler-artifact" and message["executable"]]
    programs = {each["target"]["name"]: [str(Path(each["manifest_path"]).parent), each["executable"]] for each in artifacts if each["profile"]["test"]}
    listing.parent.mkdir(parents=True, exist_ok=True)
    listing.write_text(json.dumps(programs, indent=1) + "\n")
    return built.returncode


def passes(title: str, command: list[str], folder: str, environment: dict[str, str]) -> bool:
    """Runs a command, and prints its last line, or everything if it fails."""
    start = time.monotonic()
    done = subprocess.run(command, cwd=folder, env={**THREADS, **os.environ, **environment}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    lines = done.stdout.strip().splitlines() or [""]
    seconds = time.monotonic() - start
    print(*(lines if done.returncode else []), f"{title} ({seconds:.0f} s): {'FAILED' if done.returncode else lines[-1].split('; finished')[0]}", sep="\n", flush=True)
    return done.returncode == 0


def run(listing: Path) -> int:
    programs = json.loads(listing.read_text())
    runs = [({}, [(name, []) for name in programs]), *AGAIN]
    failed = 0
    for environment, tests in runs:
        for name, filters in tests:
            folder, program = programs[name]
            title = " ".join([*(f"{key}={value}" for key, value in environment.items()), name, *filters])
            failed += not passes(title, [program, *filters], folder, environment)
    binaries = Path(programs["it"][1]).parent.parent
    failed += not passes("GPU checks on the CPU", [*GPU_CHECK, "--bin", str(binaries)], str(ROOT), {})
    if failed:
        print(f"{failed} of the test programs failed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit({"build": build, "run": run}[sys.argv[1]](Path(sys.argv[2])))
