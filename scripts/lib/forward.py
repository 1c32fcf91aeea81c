"""Forward passes of compress and PyTorch, interleaved, and the difference of their outputs."""

import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from lib import venv

HERE = Path(__file__).resolve().parent
# Model, shape of the input.
JOBS = [("minilm", "16x64"), ("llama", "1x256"), ("llama", "4x128"), ("resnet18", "8x3x224x224")]
GOAL = 1.0
TURN = 3


class Side:
    """A process that runs a model for each line of input."""

    def __init__(self, command, threads):
        environment = {**os.environ, "RAYON_NUM_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)}
        self.process = subprocess.Popen(list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)

    def answer(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise subprocess.CalledProcessError(self.process.wait(), self.process.args)
        return answer.split()

    def turn(self):
        """The numbers that each run responds with, milliseconds first."""
        # The threads of the other process may still be spinning, and the caches contain its data.
        time.sleep(0.25)
        self.answer()
        return [[float(number) for number in self.answer()] for _ in range(TURN)]

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def apart(ours, theirs, python):
    """The largest difference of the common outputs."""
    code = (
        "import sys; from safetensors.torch import load_file; a, b = map(load_file, sys.argv[1:]);"
        "print(max(((a[n] - b[n]).abs().max() / b[n].abs().max()).item() for n in a.keys() & b.keys()))"
    )
    return float(subprocess.run([python, "-c", code, ours, theirs], check=True, stdout=subprocess.PIPE, text=True).stdout)


def measure(binary, turns, threads, say):
    """A row per job."""
    python = venv.reference()
    eager = [python, HERE / "eager.py"]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        for kind, shape in JOBS:
            say(f"{kind}, {shape}")
            if kind == "minilm":
                fetch = [HERE.parent / "fetch", kind]
                model = subprocess.run(fetch, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
            else:
                model = folder / kind
                if not model.exists():
                    subprocess.run([*eager, "make", kind, model], check=True)
            inputs, ours, theirs = (folder / f"{name}.safetensors" for name in ["inputs", "ours", "theirs"])
            subprocess.run([*eager, "inputs", shape, inputs], check=True)
            sides = [
                Side([binary, model, "--inputs", inputs, "--outputs", ours, "--on-request"], threads),
                Side([*eager, "run", model, inputs, theirs, threads], threads),
            ]
            try:
                pairs = [[[time for time, *_ in side.turn()] for side in sides] for _ in range(turns)]
            finally:
                for side in sides:
                    side.close()
            ratios = [statistics.median(a) / statistics.median(b) for a, b in pairs]
            middle = [statistics.median(time for pair in pairs for time in pair[i]) for i in range(2)]
            rows.append({"job": f"{kind}, {shape}", "milliseconds": middle, "ratios": ratios, "apart": apart(ours, theirs, python)})
    return rows


def show(rows, threads):
    print(f"forward passes in f32 on {threads} threads, interleaved with PyTorch eager")
    print(f"{'model, input':24}  {'compress':>10}  {'PyTorch':>10}  {'ratio (min–max)':>18}  {'goal':>6}  difference")
    for row in rows:
        ours, theirs = row["milliseconds"]
        ratio = statistics.median(row["ratios"])
        spread = f"{ratio:.2f} ({min(row['ratios']):.2f}–{max(row['ratios']):.2f})"
        missed = "" if ratio <= GOAL else "  missed"
        print(f"{row['job']:24}  {ours:7.1f} ms  {theirs:7.1f} ms  {spread:>18}  ≤ {GOAL:.1f}  {row['apart']:.1e}{missed}")
