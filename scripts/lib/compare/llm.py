"""Compare low-bit and sparse language models with llm-compressor: perplexity, time and memory, with the same
samples.

    scripts/compare llm [--compress BINARY] [--model stories15m|smollm2] [--length N] [--samples N] [--windows N]
                      [--only PATTERN] [--ours] [--transformers]

Calibration samples are the first windows of a separate text: the WikiText-2 training set for smollm2, the rest
of Bryant's stories for stories15m. Perplexity is measured by `compress eval` for both tools, over the first
windows of the test set, or of the first stories; it is the exponential of the mean over all predicted tokens.
Each tool runs in a separate process with two threads. Time and memory of compress include measuring the
fidelity of the output, as by default. --ours skips llm-compressor. --transformers adds the perplexity of our
folder in transformers. "plain" rows have the options of llm-compressor: a fixed damping, no correction for earlier
layers, no coordinate descent, and scales of the largest values. llm-compressor is installed in a separate
environment (about 6 GB, once).
"""

import argparse
import json
import subprocess
import sys
import tempfile
from fnmatch import fnmatch
from pathlib import Path

from lib import COMPRESS, SCRIPTS, venv
from lib.cached import fetched
from lib.language import save_windows
from lib.process import Failed, timed

ENDS = "re:.*lm_head"
PLAIN = ["--damping", "0.01", "--propagation", "0", "--sweeps", "0", "--observer", "minmax"]
# Name of a row: options of `compress`, and a recipe for llm-compressor.
W4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
ROWS = {
    "RTN W4A16 g128": (["quantize", "--scheme", "W4A16"], ("rtn", 128)),
    "RTN W4A16 g64": (["quantize", "--scheme", "W4A16", "--group-size", "64"], ("rtn", 64)),
    "GPTQ W4A16 g128": (["quantize", "--scheme", "W4A16", "--method", "gptq"], ("gptq", 128)),
    "GPTQ W4A16 g128, plain": (["quantize", "--scheme", "W4A16", "--method", "gptq", *PLAIN], ("gptq", 128)),
    "GPTQ W4A16 g64": (["quantize", "--scheme", "W4A16", "--method", "gptq", "--group-size", "64"], ("gptq", 64)),
    "AWQ W4A16 g128": (["quantize", "--scheme", "W4A16", "--method", "awq"], ("awq", 128)),
    "AWQ W4A16 g64": (["quantize", "--scheme", "W4A16", "--method", "awq", "--group-size", "64"], ("awq", 64)),
    "W8A8 RTN": (["quantize", "--scheme", "W8A8"], ("rtn", "W8A8")),
    "W8A8 SmoothQuant": (["quantize", "--scheme", "W8A8", "--method", "smoothquant"], ("smoothquant", "W8A8")),
    "W8A8 GPTQ": (["quantize", "--scheme", "W8A8", "--method", "gptq"], ("gptq", "W8A8")),
    "FP8-DYNAMIC": (["quantize", "--scheme", "FP8-DYNAMIC"], ("rtn", "FP8_DYNAMIC")),
    "magnitude 50 %": (["prune-unstructured"], None),
    "Wanda 50 %": (["prune-unstructured", "--importance", "wanda"], ("wanda", "0:0")),
    "SparseGPT 50 %": (["prune-unstructured", "--importance", "sparsegpt"], ("sparsegpt", "0:0")),
    "magnitude 2:4": (["prune-unstructured", "--pattern", "2:4"], None),
    "Wanda 2:4": (["prune-unstructured", "--importance", "wanda", "--pattern", "2:4"], ("wanda", "2:4")),
    "SparseGPT 2:4": (["prune-unstructured", "--importance", "sparsegpt", "--pattern", "2:4"], ("sparsegpt", "2:4")),
}


def reference(model, windows, out, method, what):
    """One row with llm-compressor, as a process to measure."""
    import numpy
    import torch
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.awq import AWQModifier
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.pruning import SparseGPTModifier, WandaPruningModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(2)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = numpy.load(windows)["input_ids"]
    data = Dataset.from_dict({"input_ids": ids.tolist(), "attention_mask": numpy.ones_like(ids).tolist()})
    if what.isdigit():
        rows = [network.get_parameter(name).shape[1] for name, _ in network.named_parameters() if name.endswith("proj.weight")]
        sizes = {f"group_{size}": size for size in {next(g for g in (int(what), 64, 32) if row % g == 0) for row in rows}}
        groups = {}
        for name, size in sizes.items():
            names = [n.removesuffix(".weight") for n, p in network.named_parameters() if n.endswith("proj.weight") and next(g for g in (int(what), 64, 32) if p.shape[1] % g == 0) == size]
            groups[name] = QuantizationScheme(targets=names, weights=QuantizationArgs(**W4, group_size=size))
        scheme = {"config_groups": groups}
    else:
        scheme = {"scheme": what, "targets": "Linear"}
    modifiers = {
        "rtn": lambda: [QuantizationModifier(**scheme, ignore=[ENDS])],
        "gptq": lambda: [GPTQModifier(**scheme, ignore=[ENDS])],
        "awq": lambda: [AWQModifier(**scheme, ignore=[ENDS])],
        "smoothquant": lambda: [SmoothQuantModifier(smoothing_strength=0.8), QuantizationModifier(**scheme, ignore=[ENDS])],
        "wanda": lambda: [WandaPruningModifier(sparsity=0.5, mask_structure=what, targets=["Linear"], ignore=[ENDS])],
        "sparsegpt": lambda: [SparseGPTModifier(sparsity=0.5, mask_structure=what, targets=["Linear"], ignore=[ENDS])],
    }
    needs = {} if method == "rtn" else {"dataset": data, "num_calibration_samples": len(ids), "max_seq_length": ids.shape[1]}
    oneshot(model=network, recipe=modifiers[method](), **needs)
    network.save_pretrained(out, **({} if method in ("wanda", "sparsegpt") else {"save_compressed": True}))


def in_transformers(model, judged):
    """Perplexity of a folder in transformers with compressed-tensors."""
    import numpy
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(2)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    losses = []
    with torch.no_grad():
        for row in torch.from_numpy(numpy.load(judged)["input_ids"]):
            logits = network(row[None]).logits[0, :-1]
            losses.append(torch.nn.functional.cross_entropy(logits, row[1:]).item())
    print("perplexity", numpy.exp(numpy.mean(losses)))


def windows(tokenizer, text, part, length, count, path):
    """The first windows of a part of a text, as arrays."""
    text, (start, end) = Path(text).read_text(), map(float, part.split(":"))
    print(save_windows(path, tokenizer, text[int(start * len(text)) : int(end * len(text))], int(length), int(count)))


def main():
    if sys.argv[1:2] == ["--reference"]:
        return reference(*sys.argv[2:])
    if sys.argv[1:2] == ["--perplexity"]:
        return in_transformers(*sys.argv[2:])
    if sys.argv[1:2] == ["--arrays"]:
        return windows(*sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compress", default=COMPRESS)
    parser.add_argument("--model", choices=["stories15m", "smollm2"], default="smollm2")
    parser.add_argument("--length", type=int)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--only", default="*")
    parser.add_argument("--ours", action="store_true")
    parser.add_argument("--transformers", action="store_true")
    arguments = parser.parse_args()
    venv.enter(venv.llm)
    python = sys.executable
    if arguments.model == "smollm2":
        model, data = fetched("smollm2"), fetched("wikitext-2")
        texts, length = [(data / "train.raw", "0:1"), (data / "test.raw", "0:1")], 1024
    else:
        model, data = fetched("stories15m"), fetched("stories")
        texts, length = [(data / "bryant-stories.txt", part) for part in ("0.17:1", "0:0.17")], 256
    length = arguments.length or length
    with tempfile.TemporaryDirectory(prefix="llm-peers-") as folder:
        folder = Path(folder)
        counts = []
        # In separate processes: the memory of tokenization would count as that of processes started later.
        for (text, part), wanted, name in zip(texts, (arguments.samples, arguments.windows), ("known", "judged")):
            command = [python, SCRIPTS / "compare", "llm", "--arrays", model / "tokenizer.json", text, part, length, wanted, folder / f"{name}.npz"]
            counts.append(subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, text=True, check=True).stdout.strip())
        samples, count = counts
        print(f"{arguments.model}: calibrated on {samples} and evaluated on {count} windows of {length} tokens")

        def perplexity(path):
            command = [arguments.compress, "eval", path, "--arrays", folder / "judged.npz", "--task", "language-modelling", "--json", "--quiet"]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
            return json.loads(done.stdout)["score"]["value"] if done.returncode == 0 else float("nan")

        print(f"{'':24} {'perplexity':>22} {'seconds':>17} {'GB':>13}" + " in transformers" * arguments.transformers)
        print(f"{'float':24} {perplexity(model):11.4f}")
        for name, (options, theirs) in ROWS.items():
            if not fnmatch(name.lower(), arguments.only.lower()):
                continue
            out = folder / "out"
            calibration = ["--calibration", f"{{arrays: {folder / 'known.npz'}}}"] if {"--method", "--importance"} & set(options) else []
            ours = timed([arguments.compress, options[0], model, "-o", out, "--force", "--quiet", *options[1:], *calibration])
            figures = [(perplexity(out), ours)]
            again = ""
            if arguments.transformers:
                command = list(map(str, [python, SCRIPTS / "compare", "llm", "--perplexity", out, folder / "judged.npz"]))
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
                again = f"{float(done.stdout.split()[-1]):16.4f}" if done.returncode == 0 else "failed".rjust(16)
            if theirs and not arguments.ours:
                try:
                    peer = timed([python, SCRIPTS / "compare", "llm", "--reference", model, folder / "known.npz", folder / "peer", *map(str, theirs)])
                    figures.append((perplexity(folder / "peer"), peer))
                except Failed as failed:
                    print(f"{name}: {failed}", file=sys.stderr)
            columns = [" ".join(f"{value:{width}}" for value in values) for values, width in (
                ([p for p, _ in figures], "11.4f"),
                ([f["seconds"] for _, f in figures], "8.1f"),
                ([f["peak"] / 1e9 for _, f in figures], "6.2f"),
            )]
            print(f"{name:24} {columns[0]:23} {columns[1]:17} {columns[2]:13}{again}", flush=True)


if __name__ == "__main__":
    main()
