"""Measure schemes and methods for the weights of SmolLM2-135M: perplexity, divergence, time and memory.

    scripts/compare weights [--compress BINARY] [--only PATTERN…] [--windows N] [--sampling first|spread] [--peer N] [--bf16]
                            [--same-windows] [--results FILE] [--json]

Calibrated on windows of 512 tokens from the WikiText-2 training set, and measured by `compress eval` on 8 windows of
1,024 tokens from its test set: perplexity, and KL divergence from the original model. Tuned scales are trained once on
four times as many windows of the training set, spread over it, or with `--same-windows` four times on those that
calibrate. Processor seconds and memory are those of the whole run, without measuring its output.

`--peer N` adds auto-round with N iterations on the same windows, for the integer schemes. It is installed in a separate
environment, and computes in f32, or with `--bf16` in bf16, which takes less time on processors with AMX. `--results
FILE` stores the rows, and does not measure those of an earlier run again.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from fnmatch import fnmatch
from pathlib import Path

from lib import COMPRESS, SCRIPTS, cached, venv
from lib.language import save_windows
from lib.process import exits, say, timed

TUNE = """  - distill:
      scales: only
      losses: {{ soft: {{ weight: 1, temperature: 1 }} }}
      ignore: ["*embed*"]
      batch_size: 1
      learning_rate: 1e-3
      weight_decay: 0
      epochs: {epochs}
"""
INTEGERS = ["W4A16", "W4A16-ASYM", "W3A16", "W3A16-ASYM", "W2A16", "W2A16-ASYM"]
METHODS = {
    "rtn": "method: rtn",
    "gptq": "method: gptq",
    "gptq, guided": "method: gptq, guide: loss",
    "autoround, 20 steps": "method: autoround, iterations: 20",
    "autoround": "method: autoround",
    "autoround, guided": "method: autoround, guide: loss",
}
OTHERS = {"NVFP4A16": ["rtn", "gptq"], "MXFP4A16": ["rtn", "gptq"], "W8A8": ["rtn", "gptq", "smoothquant"]}
# Written to GGUF files, whose embeddings have the type of the file.
GGUF = ["Q4_K_M", "Q4_0", "Q3_K_M", "Q2_K"]
TUNED = ", tuned"
# Options of `quantize` by the name of a row. Each of them can also be tuned.
ROWS = {
    **{f"{name}, {method}": f"scheme: {name}, group_size: 64, {options}" for name in INTEGERS for method, options in METHODS.items()},
    **{f"{name}, {method}": f"scheme: {name}, method: {method}" for name, methods in OTHERS.items() for method in methods},
    **{f"{name}, {method}": f"scheme: {name}, {options}" for name in GGUF for method, options in METHODS.items()},
}


def arrays(folder, sampling, count):
    """Windows to calibrate on, to tune on, and to measure."""
    tokenizer, text = cached.fetched("smollm2") / "tokenizer.json", cached.fetched("wikitext-2")
    for name, part, length, wanted, spread in [
        ("known", "train.raw", 512, count, sampling == "spread"),
        ("train", "train.raw", 512, 4 * count, True),
        ("judged", "test.raw", 1024, 8, False),
    ]:
        save_windows(Path(folder, f"{name}.npz"), tokenizer, (text / part).read_text(), length, wanted, spread)


def peer(known, out, scheme, iterations, precision):
    """Weights rounded by auto-round, as a folder of floats."""
    import numpy
    import torch
    from auto_round import AutoRound
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(2)
    model = cached.fetched("smollm2")
    network, tokenizer = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), AutoTokenizer.from_pretrained(model)
    rows = torch.from_numpy(numpy.load(known)["input_ids"])
    samples = [{"input_ids": row[None], "attention_mask": torch.ones_like(row[None])} for row in rows]
    rounding = AutoRound(network, tokenizer, scheme=scheme[:5], group_size=64, sym=not scheme.endswith("-ASYM"), iters=int(iterations), seqlen=rows.shape[1], nsamples=len(rows), batch_size=8, dataset=samples, device_map="cpu", amp=precision == "bf16", enable_torch_compile=False)
    rounding.quantize()
    # Saved as `fake`, a model in bf16 would have its original values.
    rounded = dict(rounding.model.named_parameters())
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if name.endswith("proj.weight"):
                weight.copy_(rounded[name])
    network.save_pretrained(out)


class Rows:
    def __init__(self, arguments, scratch):
        self.binary, self.scratch, self.model = arguments.compress.absolute(), scratch, cached.fetched("smollm2")
        python = venv.reference()
        subprocess.run([python, SCRIPTS / "compare", "weights", "--arrays", scratch, arguments.sampling, str(arguments.windows)], check=True)
        self.known, self.train, self.judged = (scratch / f"{name}.npz" for name in ("known", "train", "judged"))
        self.tune = TUNE.format(epochs=4 if arguments.same_windows else 1)
        if arguments.same_windows:
            self.train = self.known
        self.out = scratch / "out"

    def ours(self, name):
        recipe, tuned = self.scratch / "recipe.yaml", name.endswith(TUNED)
        data = f"calibration: {{ arrays: {self.known} }}" + (f", train: {{ arrays: {self.train} }}" if tuned else "")
        options = ROWS[name.removesuffix(TUNED)]
        out = self.out.with_suffix(".gguf") if name.split(",")[0] in GGUF else self.out
        recipe.write_text(f"model: {self.model}\ndata: {{ {data} }}\npasses:\n  - quantize: {{ {options} }}\n{self.tune if tuned else ''}output: {out}\n")
        return self.measured(timed([self.binary, "run", recipe, "--force", "--quiet", "--no-measure"]), out)

    def peer(self, scheme, iterations, precision):
        out = self.scratch / "peer"
        command = [venv.auto_round(), SCRIPTS / "compare", "weights", "--peer-row", self.known, out, scheme, iterations, precision]
        taken = timed(command)
        (folder,) = [config.parent for config in out.rglob("config.json")]
        return self.measured(taken, folder)

    def measured(self, taken, out):
        command = [self.binary, "eval", out, "--arrays", self.judged, "--task", "language-modelling", "--against", self.model, "--json", "--quiet"]
        found = json.loads(subprocess.run(list(map(str, command)), check=True, stdout=subprocess.PIPE, text=True).stdout)
        return {"perplexity": found["score"]["value"], "original": found["against"]["value"], "kl": found["fidelity"]["kl"], **taken}


def show(name, row):
    print(f"| {name} | {row['perplexity']:.2f} | {row['perplexity'] / row['original']:.3f} | {row['kl']:.4f} | {row['cpu_seconds']:.0f} | {row['peak'] / 1e9:.2f} |", flush=True)


def main():
    if sys.argv[1:2] == ["--arrays"]:
        return arrays(*sys.argv[2:4], int(sys.argv[4]))
    if sys.argv[1:2] == ["--peer-row"]:
        return peer(*sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compress", type=Path, default=COMPRESS, metavar="BINARY", help="the binary to use")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="rows whose name matches one of these, such as 'W3A16*'")
    parser.add_argument("--windows", type=int, default=32, metavar="N", help="windows to calibrate on (32)")
    parser.add_argument("--sampling", choices=["first", "spread"], default="spread", help="which windows of the training set (spread)")
    parser.add_argument("--peer", type=int, metavar="N", help="also auto-round with N iterations")
    parser.add_argument("--bf16", action="store_true", help="auto-round computes in bf16")
    parser.add_argument("--same-windows", action="store_true", help="tune on the windows that calibrate")
    parser.add_argument("--results", type=Path, metavar="FILE", help="keep the rows of earlier runs")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    arguments = parser.parse_args()
    done = json.loads(arguments.results.read_text()) if arguments.results and arguments.results.exists() else {}
    setting = f"{arguments.windows} {arguments.sampling} windows" + ", also to tune on" * arguments.same_windows
    found = {}
    with exits("scripts/compare weights"), tempfile.TemporaryDirectory(prefix="compress-weights-") as scratch:
        names = [name + tuned for name in ROWS for tuned in ("", TUNED)]
        jobs = {name: lambda name=name: rows.ours(name) for name in names}
        if arguments.peer:
            precision = "bf16" if arguments.bf16 else "f32"
            jobs |= {f"{name}, auto-round {arguments.peer} {precision}": lambda name=name: rows.peer(name, arguments.peer, precision) for name in INTEGERS}
        chosen = {name: job for name, job in jobs.items() if any(fnmatch(name.lower(), pattern.lower()) for pattern in arguments.only)}
        if not chosen:
            raise SystemExit(f"no row matches {arguments.only}; the rows are:\n" + "\n".join(jobs))
        rows = Rows(arguments, Path(scratch))
        if not arguments.json:
            print(f"{setting}\n\n| scheme, method | perplexity | × original | KL | CPU seconds | GB |\n| --- | ---: | ---: | ---: | ---: | ---: |", flush=True)
        for name, job in chosen.items():
            key = f"{setting}: {name}"
            if key not in done:
                say(name)
                done[key] = job()
                if arguments.results:
                    arguments.results.write_text(json.dumps(done, indent=2) + "\n")
            found[name] = done[key]
            if not arguments.json:
                show(name, found[name])
    if arguments.json:
        print(json.dumps(found, indent=2))


main()
