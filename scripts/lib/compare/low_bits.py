"""Measure low-bit weights in ONNX Runtime: floats, dynamic int8, and both forms of W4A16 and W8A16.

    scripts/compare low-bits [--compress BINARY] [--model stories15m|smollm2] [--group N] [--rounds N]

All files of a model are measured round by round in one process: 1 × 128 tokens, and 1 × 1 as in decoding. The
table has the median CPU time of one thread, which depends little on other load, and the difference of the last
token's logits from those of the float file (relative to the largest). ONNX Runtime computes DequantizeLinear
layers with int8 activations unless the session requests floats ("exact").
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lib import COMPRESS, SCRIPTS, venv

venv.enter()

import numpy as np
import onnxruntime

EXACT = ("session.qdq_matmulnbits_accuracy_level", "1")


def files(group):
    w4, w8 = (["quantize", "--scheme", scheme, "--group-size", str(group), "--observer", "minmax"] for scheme in ("W4A16", "W8A16"))
    plain = "onnx: {opset: 21}"
    blocks = "onnx: {weight_only: matmul-nbits}"
    return {
        "float32": (["cast", "--to", "f32"], "onnx", None),
        "int8, dynamic": (["quantize-dynamic"], "onnx", None),
        "W8A16, DequantizeLinear": (w8, plain, None),
        "W8A16, DequantizeLinear, exact": (w8, plain, EXACT),
        "W8A16, MatMulNBits": (w8, blocks, None),
        "W4A16, DequantizeLinear": (w4, plain, None),
        "W4A16, DequantizeLinear, exact": (w4, plain, EXACT),
        "W4A16, MatMulNBits": (w4, blocks, None),
    }


def session(path, entry):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    if entry:
        options.add_session_config_entry(*entry)
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compress", default=COMPRESS, metavar="BINARY")
    parser.add_argument("--model", default="stories15m", choices=["stories15m", "smollm2"])
    parser.add_argument("--group", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    fetch = [sys.executable, SCRIPTS / "fetch", args.model]
    model = subprocess.run(fetch, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    ids = np.random.default_rng(0).integers(3, 30_000, (1, 128))
    sessions, sizes, last = {}, {}, {}
    with tempfile.TemporaryDirectory(prefix="compress-onnx-") as scratch:
        made = {}
        for name, (command, export, entry) in files(args.group).items():
            key = (*command, export)
            if key not in made:
                made[key] = Path(scratch, str(len(made)))
                call = [args.compress, "chain", model, "-o", made[key], "--no-measure", "--export", export, "--", *command]
                subprocess.run(call, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            sizes[name] = sum(file.stat().st_size for file in made[key].glob("model.onnx*")) / 1e6
            sessions[name] = session(made[key] / "model.onnx", entry)

        def run(name, tokens):
            names = {entry.name for entry in sessions[name].get_inputs()}
            feeds = {"input_ids": tokens, "attention_mask": np.ones_like(tokens)}
            return sessions[name].run(None, {key: value for key, value in feeds.items() if key in names})[0]

        times = {(name, length): [] for name in sessions for length in (128, 1)}
        for name in sessions:
            last[name] = run(name, ids)[0, -1]
        for _ in range(args.rounds):
            for name, length in times:
                begin = time.process_time()
                run(name, ids[:, :length])
                times[name, length].append(time.process_time() - begin)
    wanted = last["float32"]
    print(f"{Path(model).name}, groups of {args.group}, one thread, ONNX Runtime {onnxruntime.__version__}\n")
    print("| file | MB | 1 × 128 tokens, ms | 1 token, ms | change of logits |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name in sessions:
        many, one = (1e3 * statistics.median(times[name, length]) for length in (128, 1))
        change = np.abs(last[name] - wanted).max() / np.abs(wanted).max()
        print(f"| {name} | {sizes[name]:.1f} | {many:.1f} | {one:.2f} | {change:.4f} |")


if __name__ == "__main__":
    main()
