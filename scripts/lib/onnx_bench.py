"""Comparison of all-MiniLM-L6-v2 as ONNX with the output of torch.onnx.export and onnxruntime.quantization.

    scripts/bench --onnx

Every session runs once per round, in changing order, so that other load affects all equally; ratios are
computed per round, and their median is printed. Latency is measured with two threads; a goal between the
quartiles of the ratio is marked as within noise. CPU time is measured with one thread and depends little on
other load. Accuracy is that of sentence embeddings, one at a time and 32 together: rank correlation with the
scores of the STS-B test set, and cosine similarity to the embeddings of PyTorch's float32 file.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lib import venv
from lib.cached import fetched

BATCH, LENGTH, THREADS = 16, 64, 2
# All activations of a batch share one scale, so results depend on the batch.
SENTENCES = (1, 32)
# Options of the files of compress; the first is timed.
EXPORTS = {
    "int8": ["--export", "onnx", "--", "quantize-dynamic", "--embeddings", "--observer", "mse"],
    "float32": ["--export", "onnx", "--", "cast", "--to", "f32"],
    "float16": ["--export", "onnx: {precision: float16}", "--", "cast", "--to", "f32"],
}
TORCH, ORT_INT8 = "torch.onnx.export", "ORT quantize_dynamic"
# name, of, to, at least or at most, goal
RATIOS = [
    ("float32 / torch.onnx.export", "float32", TORCH, "≤", 1.0),
    ("int8 / ORT quantize_dynamic", "int8", ORT_INT8, "≤", 1.0),
    ("float32 / int8", "float32", "int8", "≥", 2.0),
]
SECONDS_GOAL, MEMORY_GOAL = 0.5, 300e6


def bench(binary, timed, runs):
    """Writes the files of compress and measures that; everything else runs in the reference environment.
    Returns the exit code."""
    model, data = fetched("minilm"), fetched("sts-b")
    with tempfile.TemporaryDirectory(prefix="compress-onnx-bench-") as scratch:
        scratch = Path(scratch)
        made = []
        for name, arguments in EXPORTS.items():
            for number in range(runs + 1 if name == "int8" else 1):
                out = scratch / f"{name}-{number}"
                done = timed([str(binary), "chain", str(model), "-o", str(out), "--quiet", *arguments])
                made += [done] if name == "int8" and number > 0 else []
            (out / "model.onnx").rename(scratch / f"{name}.onnx")
        python = venv.reference()
        result = subprocess.run([python, __file__, scratch, model, data], check=True, stdout=subprocess.PIPE)
    figures = json.loads(result.stdout)
    show(figures, made)
    return 0


def show(figures, made):
    rows = [["file", "MB", f"ms, {BATCH} × {LENGTH} tokens", "STS-B", "cosine: mean", "min"]]
    for name, row in figures["files"].items():
        rows.append([name, f"{row['bytes'] / 1e6:.1f}", f"{row['milliseconds']:.1f}", " ".join(f"{s:.4f}" for s in row["spearman"]), f"{row['mean']:.4f}", f"{row['min']:.4f}"])
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print("  ".join(cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths))))
    print()
    for name, _, _, sense, goal in RATIOS:
        low, middle, high = figures["ratios"]["latency"][name]
        processor = figures["ratios"]["processor"][name]
        verdict = ""
        if sense == "≤" and middle > goal:
            verdict = ", within noise" if low <= goal else ", missed"
        elif sense == "≥" and middle < goal:
            verdict = ", within noise" if high >= goal else ", missed"
        spread = f"{middle:.3f} ({low:.3f}–{high:.3f}), CPU time {processor[1]:.3f} ({processor[0]:.3f}–{processor[2]:.3f})"
        print(f"{name}: latency {spread}, goal {sense} {goal}{verdict}")
    seconds, peak = statistics.median(run["seconds"] for run in made), max(run["peak"] for run in made)
    reached = seconds <= SECONDS_GOAL and peak <= MEMORY_GOAL
    print(f"folder to int8 file: {seconds:.2f} s, {peak / 1e6:.0f} MB, goal ≤ {SECONDS_GOAL} s and ≤ {MEMORY_GOAL / 1e6:.0f} MB{'' if reached else ', missed'}")
    print(f"\n{figures['machine']}, {THREADS} threads, ONNX Runtime {figures['onnxruntime']}, load {figures['load'][0]:.1f} to {figures['load'][1]:.1f}")


# The following functions run in the reference environment.


def export_torch(model, path):
    import torch
    from transformers import AutoModel

    bert = AutoModel.from_pretrained(model, attn_implementation="eager").eval()

    class Tokens(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bert = bert

        def forward(self, input_ids, attention_mask, token_type_ids):
            return self.bert(input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids).last_hidden_state

    names = ["input_ids", "attention_mask", "token_type_ids"]
    ones = torch.ones(2, 16, dtype=torch.int64)
    # ONNX Runtime is a fifth slower with the file of the exporter with `dynamo=True`.
    options = {"opset_version": 17, "dynamo": False, "dynamic_axes": {name: {0: "batch", 1: "sequence"} for name in names}}
    with open(os.devnull, "w") as quiet:
        stdout, sys.stdout = sys.stdout, quiet
        try:
            torch.onnx.export(Tokens(), (ones, ones, ones * 0), str(path), input_names=names, output_names=["last_hidden_state"], **options)
        finally:
            sys.stdout = stdout


def session(path, threads=THREADS):
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    # Spinning threads of one session would slow the next one.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def sentences(data, part="test"):
    rows = [line.rstrip("\n").split("\t") for line in (data / f"sts-{part}.csv").read_text().splitlines()]
    return [row[5] for row in rows], [row[6] for row in rows], [float(row[4]) for row in rows]


def batches(model, texts, size):
    import numpy
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    for start in range(0, len(texts), size):
        encoded = [text.ids for text in tokenizer.encode_batch(texts[start : start + size])]
        ids = numpy.zeros((len(encoded), max(map(len, encoded))), numpy.int64)
        mask = numpy.zeros_like(ids)
        for row, tokens in enumerate(encoded):
            ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, 1
        yield {"input_ids": ids, "attention_mask": mask, "token_type_ids": numpy.zeros_like(ids)}


def embeddings(opened, model, texts, size):
    import numpy

    found = []
    for feeds in batches(model, texts, size):
        hidden = opened.run(["last_hidden_state"], feeds)[0]
        mask = feeds["attention_mask"][:, :, None].astype(numpy.float32)
        mean = (hidden * mask).sum(1) / mask.sum(1)
        found.append(mean / numpy.linalg.norm(mean, axis=1, keepdims=True))
    return numpy.concatenate(found)


def correlation(vectors, scores):
    """Rank correlation of scores with the cosine similarities of pairs; all second sentences follow all
    first ones."""
    import numpy

    similarity = (vectors[: len(scores)] * vectors[len(scores) :]).sum(1)
    return float(numpy.corrcoef(ranks(similarity), ranks(scores))[0, 1])


def ranks(values):
    """Ranks; equal values have the mean of their ranks."""
    import numpy

    _, inverse, counts = numpy.unique(values, return_inverse=True, return_counts=True)
    last = numpy.cumsum(counts)
    return (last - (counts - 1) / 2)[inverse]


def tokens():
    import numpy

    random = numpy.random.default_rng(0)
    ids = random.integers(1000, 20_000, (BATCH, LENGTH)).astype(numpy.int64)
    return {"input_ids": ids, "attention_mask": numpy.ones_like(ids), "token_type_ids": numpy.zeros_like(ids)}


def timings(sessions, rounds, clock, feeds):
    taken = {name: [] for name in sessions}
    names = list(sessions)
    for opened in sessions.values():
        opened.run(None, feeds)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            start = clock()
            sessions[name].run(None, feeds)
            taken[name].append(clock() - start)
    return taken


def quartiles(taken):
    return {name: statistics.quantiles([a / b for a, b in zip(taken[of], taken[to])], n=4) for name, of, to, _, _ in RATIOS}


def measure(scratch, model, data, rounds=60):
    import logging
    import warnings

    import numpy
    import onnxruntime
    from onnxruntime.quantization import QuantType, quantize_dynamic

    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    load = os.getloadavg()[0]
    files = {TORCH: scratch / "torch.onnx", ORT_INT8: scratch / "torch-int8.onnx", **{name: scratch / f"{name}.onnx" for name in EXPORTS}}
    export_torch(model, files[TORCH])
    quantize_dynamic(str(files[TORCH]), str(files[ORT_INT8]), per_channel=True, weight_type=QuantType.QInt8)
    processor = timings({name: session(path, 1) for name, path in files.items()}, rounds // 2, time.thread_time, tokens())
    sessions = {name: session(path) for name, path in files.items()}
    taken = timings(sessions, rounds, time.perf_counter, tokens())
    first, second, scores = sentences(data)
    rows, plain = {}, None
    for name, opened in sessions.items():
        spearman, cosines = [], []
        for size in SENTENCES:
            vectors = embeddings(opened, model, first + second, size)
            plain = vectors if plain is None else plain
            spearman.append(correlation(vectors, scores))
            cosines.append((vectors * plain).sum(1))
        rows[name] = {
            "bytes": files[name].stat().st_size,
            "milliseconds": 1e3 * statistics.median(taken[name]),
            "spearman": spearman,
            "mean": float(numpy.mean(cosines)),
            "min": float(numpy.min(cosines)),
        }
    ratios = {"latency": quartiles(taken), "processor": quartiles(processor)}
    machine = next((line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), platform.machine())
    return {"files": rows, "ratios": ratios, "machine": machine, "onnxruntime": onnxruntime.__version__, "load": [load, os.getloadavg()[0]]}


if __name__ == "__main__":
    print(json.dumps(measure(*map(Path, sys.argv[1:]))))
