"""Compare mixtures of `compress auto` for a language model with fixed recipes of the same size.

    scripts/compare auto-language [--compress BINARY] [--model FOLDER] [--only llama.cpp|transformers] [--time TIME]
                                  [--reference TYPE] [--bits N…] [--windows N] [--json]

Calibrated on 32 windows of 512 tokens, spread over the WikiText-2 training set, and measured on the first windows of
the validation set. For llama.cpp: a file in a fixed type, by the importance from the same windows, and the mixture of
the same size. Both are measured as written: KL divergence on the validation set, and perplexity of the test set in
`llama-perplexity`, with that of F16. For transformers: the mixture of each size and the best uniform scheme that is not
larger, both rounded to nearest, and the divergence of the written mixture (`gptq`, or with `--time` the best method).

The default model is SmolLM2-135M-Instruct, whose weights were stored as Q4_1: this type is excluded. One checkpoint of
each runtime has the scores, so that only the first search computes them; its time is that of the front.
"""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

from lib import COMPRESS, cached, llama_cpp
from lib.process import exits, say, timed

TYPES = "Q2_K,Q3_K,IQ4_XS,IQ4_NL,Q4_K,Q5_0,Q5_K,Q5_1,Q6_K,Q8_0,F16"
SAMPLES = "samples: 32, max_length: 512"


class Searches:
    """Searches for a model, with the data of all of them."""

    def __init__(self, arguments, scratch):
        self.binary, self.scratch = arguments.compress.absolute(), scratch
        self.model = (arguments.model or cached.fetched("smollm2")).absolute()
        self.text = cached.fetched("wikitext-2")
        self.data = ["--calibration", f"{{text: {self.text / 'train.raw'}, {SAMPLES}, sampling: spread}}"]
        self.data += ["--eval", f"{{text: {self.text / 'valid.raw'}, samples: 16, max_length: 512}}"]

    def run(self, runtime, *options):
        """The result of `compress auto`, and its seconds."""
        say(f"{runtime}: {' '.join(map(str, options))}")
        formats = ["--formats", TYPES] if runtime == "llama.cpp" else []
        front = self.scratch / "front.json"
        command = [self.binary, "auto", self.model, "--for", runtime, "--checkpoint", self.scratch / f"{runtime}.json", "--front", front, "--force", "--quiet", *self.data, *formats, *options]
        taken = timed(list(map(str, command)))
        return json.loads(front.read_text()), taken["seconds"]

    def fixed(self, kind, out):
        """A GGUF file in a fixed type."""
        say(f"llama.cpp: {kind}")
        recipe = self.scratch / "recipe.yaml"
        calibration, evaluation = self.data[1], self.data[3]
        recipe.write_text(f"model: {self.model}\ndata: {{ calibration: {calibration}, evaluation: {evaluation} }}\npasses: []\nexport: [{{ gguf: {{ type: {kind} }} }}]\noutput: {out}\n")
        subprocess.run([self.binary, "run", recipe, "--quiet"], check=True, stdout=subprocess.DEVNULL)


def divergence(out):
    """The KL divergence of a written output in its report."""
    folder = out if out.is_dir() else out.with_name(f"{out.name}.report")
    report = json.loads((folder / "report.json").read_text())
    found = (report.get("accuracy") or {}).get("fidelity") or report.get("fidelity") or {}
    return found.get("kl")


def perplexity(path, text, windows):
    command = [llama_cpp.tools() / "llama-perplexity", "-m", path, "-f", text / "test.raw", "-c", "512", "--chunks", windows, "--no-repack"]
    done = subprocess.run(list(map(str, command)), check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    (line,) = [line for line in done.stdout.splitlines() if "Final estimate" in line]
    return float(line.rsplit("=", 1)[1].split("+/-")[0])


def gguf(searches, arguments):
    """Rows of the fixed type, of the mixture of its size, and of F16."""
    fixed, mixture, plain = (searches.scratch / f"{name}.gguf" for name in ("fixed", "mixture", "plain"))
    searches.fixed("F16", plain)
    searches.fixed(arguments.reference, fixed)
    size = fixed.stat().st_size
    _, front = searches.run("llama.cpp", "--points", "6")
    _, seconds = searches.run("llama.cpp", "--max-size", f"{size}B", "-o", mixture)
    for name, path, taken in [("F16", plain, None), (arguments.reference, fixed, None), ("mixture", mixture, front + seconds)]:
        yield {"file": name, "bytes": path.stat().st_size, "kl": divergence(path), "perplexity": perplexity(path, searches.text, arguments.windows), "seconds": taken}
    yield {"file": "front", "seconds": front}


def folders(searches, arguments):
    """Rows of each size: the uniform scheme and the mixture."""
    _, front = searches.run("transformers", "--points", "6")
    yield {"file": "front", "seconds": front}
    for bits in arguments.bits:
        out = searches.scratch / f"{bits}"
        options = ["--time", arguments.time] if arguments.time else []
        found, seconds = searches.run("transformers", "--max-size", f"{bits}bits", "-o", out, *options)
        uniform = [point for point in found["points"] if point["reference"] and point["bits"] <= bits]
        best = min(uniform, key=lambda point: point["measured"], default=None)
        if best:
            yield {"file": f"{bits} bits: {best['reference']}", "bytes": best["bytes"], "rounded": best["measured"]}
        chosen = found["chosen"]
        yield {"file": f"{bits} bits: mixture", "bytes": chosen["bytes"], "rounded": chosen["measured"], "kl": divergence(out), "seconds": seconds}


def show(row):
    def cell(key, form):
        return format(row[key], form) if row.get(key) is not None else ""

    size = f"{row['bytes'] / 1e6:.2f}" if "bytes" in row else ""
    print(f"| {row['runtime']} | {row['file']} | {size} | {cell('rounded', '.4f')} | {cell('kl', '.4f')} | {cell('perplexity', '.3f')} | {cell('seconds', '.0f')} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compress", type=Path, default=COMPRESS, metavar="BINARY", help="the binary to use")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="another language model")
    parser.add_argument("--only", choices=["llama.cpp", "transformers"], help="one runtime")
    parser.add_argument("--time", metavar="TIME", help="time for better methods in transformers, such as 15m")
    parser.add_argument("--reference", default="Q4_K_M", metavar="TYPE", help="fixed type of GGUF files (Q4_K_M)")
    parser.add_argument("--bits", type=float, nargs="+", default=[4.0, 4.5, 5.0, 6.0], metavar="N", help="bits per weight in transformers (4.0 4.5 5.0 6.0)")
    parser.add_argument("--windows", type=int, default=64, metavar="N", help="windows of 512 tokens for perplexity (64)")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    arguments = parser.parse_args()
    rows = []
    if not arguments.json:
        print("| runtime | file | MB | KL, rounded to nearest | KL, written | perplexity in llama.cpp | seconds |\n| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    with exits("scripts/compare auto-language"):
        with tempfile.TemporaryDirectory(prefix="compress-auto-") as scratch:
            searches = Searches(arguments, Path(scratch))
            for runtime, make in [("llama.cpp", gguf), ("transformers", folders)]:
                for row in make(searches, arguments) if arguments.only in (None, runtime) else []:
                    rows.append({"runtime": runtime, **row})
                    if not arguments.json:
                        show(rows[-1])
    if arguments.json:
        print(json.dumps(rows, indent=2))


main()
