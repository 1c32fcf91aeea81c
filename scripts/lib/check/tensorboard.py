"""Check that TensorBoard reads the events of a training run: every step once, with the figures of the CSV file.

    scripts/check tensorboard [--compress BINARY]

A small model is distilled twice, once without interruption, and once killed and resumed.
"""

import argparse
import csv
import json
import subprocess
import tempfile
import time
from pathlib import Path

from lib import GOLDEN, ROOT, venv

REQUIREMENTS = ["tensorboard==2.21.0"]
STEPS = 400


def samples(path):
    """Writes token ids for a language model, as safetensors."""
    rows, length = 64, 8
    tokens = b"".join((3 + (row * 7 + column * 5) % 20).to_bytes(8, "little") for row in range(rows) for column in range(length))
    mask = (1).to_bytes(8, "little") * (rows * length)

    def entry(begin, values):
        return {"dtype": "I64", "shape": [rows, length], "data_offsets": [begin, begin + len(values)]}

    header = json.dumps({"input_ids": entry(0, tokens), "attention_mask": entry(len(tokens), mask)}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + tokens + mask)


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def train(compress, folder, *options, kill_behind=None):
    """Trains; kills the process when the CSV file has a number of steps."""
    model = GOLDEN / "models/llama-grouped-tied"
    command = [compress, "distill", model, "-o", folder / "out", "--student", "layers=0", "--losses", "soft=1,hidden=0.1", "--logs", "tensorboard"]
    command += ["--batch-size", "8", "--max-steps", str(STEPS), "--checkpoint-every", "steps=20", "--train", f"{{arrays: {folder / 'samples.safetensors'}}}"]
    process = subprocess.Popen([*map(str, command), "--quiet", *options], stdout=subprocess.DEVNULL)
    while kill_behind and process.poll() is None:
        if any(len(rows(table)) > kill_behind for table in folder.glob("out.unfinished/*/training.csv")):
            process.kill()
        time.sleep(0.01)
    return process.wait()


def check(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    table = rows(folder / "out" / "distill.csv")
    events = EventAccumulator(str(folder / "out"), size_guidance={"scalars": 0})
    events.Reload()
    columns = {"loss": "loss", "loss/soft": "soft", "loss/hidden": "hidden", "learning_rate": "learning_rate", "gradient_norm": "gradient_norm", "epoch": "epoch"}
    assert [int(row["step"]) for row in table] == list(range(1, STEPS + 1)), "steps in the CSV file are missing or duplicated"
    for tag, column in columns.items():
        scalars = events.Scalars(f"distill/{tag}")
        assert [scalar.step for scalar in scalars] == list(range(1, STEPS + 1)), f"{tag}: steps {[scalar.step for scalar in scalars]}"
        for scalar, row in zip(scalars, table):
            expected = float(row[column])
            assert abs(scalar.value - expected) <= 1e-6 * abs(expected), f"{tag}, step {scalar.step}: {scalar.value} and {expected}"
    return len(columns)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compress", type=Path, default=ROOT / "target/debug/compress")
    args = parser.parse_args()
    venv.enter(lambda: venv.prepare("tensorboard", REQUIREMENTS, "60 MB"))
    with tempfile.TemporaryDirectory() as folder:
        whole, parts = Path(folder, "whole"), Path(folder, "parts")
        for place in (whole, parts):
            place.mkdir()
            samples(place / "samples.safetensors")
        assert train(args.compress, whole) == 0
        assert train(args.compress, parts, kill_behind=50) != 0, "the training ended before it could be killed"
        assert train(args.compress, parts, "--resume") == 0
        tags = [check(place) for place in (whole, parts)]
        print(f"TensorBoard reads {tags[0]} figures of {STEPS} steps, uninterrupted and resumed, equal to those of the CSV file")


main()
