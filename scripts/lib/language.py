"""Processor time of language models per window of tokens, interleaved with PyTorch.

    language.py THREADS MODEL TEXT LENGTH WINDOWS    perplexity of the first windows in PyTorch, as a process to measure
"""

import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

LENGTH = 1024
RECIPE = """model: {model}
data: {{ calibration: {{ text: {text}, max_length: {length}, samples: {windows} }} }}
passes:
  - prune-structured: {{ dims: [mlp], amount: 0.25, importance: {importance}, repair: {repair} }}
output: {output}
"""
# Name, and the goal relative to the evaluation in PyTorch.
JOBS = {"eval": 1.0, "importance: activation": 1.2, "repair: least-squares": None}


def save_windows(path, tokenizer, text, length, count, spread=False):
    """Writes windows of a text as arrays, its first ones or spread over it, and returns their number."""
    import numpy
    from tokenizers import Tokenizer

    ids = numpy.array(Tokenizer.from_file(str(tokenizer)).encode(text, add_special_tokens=False).ids, dtype=numpy.int64)
    count = min(count, len(ids) // length)
    last = len(ids) - length if spread else (count - 1) * length
    rows = numpy.stack([ids[last * number // max(count - 1, 1) :][:length] for number in range(count)])
    numpy.savez(path, input_ids=rows, attention_mask=numpy.ones_like(rows))
    return count


def torch_perplexity(threads, model, text, length, windows):
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(int(threads))
    length, windows = int(length), int(windows)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    ids = Tokenizer.from_file(f"{model}/tokenizer.json").encode(Path(text).read_text()).ids[: length * windows]
    total = 0.0
    with torch.inference_mode():
        for window in torch.tensor(ids).reshape(windows, length):
            logits = network(window[None], use_cache=False).logits[0]
            total += torch.nn.functional.cross_entropy(logits[:-1], window[1:], reduction="sum").item()
    print(total / windows / (length - 1))


def command(job, binary, model, text, windows, folder):
    if job == "eval":
        return [binary, "eval", model, "--text", text, "--max-length", LENGTH, "--samples", windows]
    importance, repair = ("activation", "none") if job.startswith("importance") else ("l1", "least-squares")
    recipe = folder / "recipe.yaml"
    values = {"model": model, "text": text, "length": LENGTH, "windows": windows, "importance": importance, "repair": repair, "output": folder / "out"}
    recipe.write_text(RECIPE.format(**values))
    return [binary, "run", recipe, "--force", "--no-cache"]


def measure(binary, python, model, text, windows, runs, threads, say):
    """Seconds of processor time per window, by job: the time of several windows minus that of one, which
    excludes loading."""
    from lib.process import timed

    # Spinning threads must not count as work.
    os.environ.update(RAYON_NUM_THREADS=str(threads), OMP_NUM_THREADS=str(threads), OMP_WAIT_POLICY="passive")
    rows = {job: [] for job in ["PyTorch", *JOBS]}

    def seconds(make):
        few, many = (timed(list(map(str, make(count))))["cpu_seconds"] for count in (1, windows))
        return (many - few) / (windows - 1)

    with tempfile.TemporaryDirectory() as folder:
        text = shutil.copy(text, Path(folder, "text.txt"))
        for number in range(runs):
            for job in rows:
                say(f"run {number + 1} of {runs}: {job}")
                if job == "PyTorch":
                    rows[job].append(seconds(lambda count: [python, __file__, threads, model, text, LENGTH, count]))
                else:
                    rows[job].append(seconds(lambda count: command(job, binary, model, text, count, Path(folder))))
    return rows


def show(rows, threads):
    print(f"windows of {LENGTH:,} tokens in f32 on {threads} threads: seconds of processor time per window, compared with the evaluation in PyTorch")
    print(f"{'job':24}  {'seconds':>8}  {'ratio (min to max)':>22}  {'goal':>6}")
    for job, seconds in rows.items():
        ratios = [ours / theirs for ours, theirs in zip(seconds, rows["PyTorch"])]
        ratio, goal = statistics.median(ratios), JOBS.get(job)
        spread = f"{ratio:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        missed = "  missed" if goal and ratio > goal else ""
        print(f"{job:24}  {statistics.median(seconds):8.2f}  {spread:>22}  {f'≤ {goal}' if goal else '':>6}{missed}")


if __name__ == "__main__":
    torch_perplexity(*sys.argv[1:])
