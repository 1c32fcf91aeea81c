"""Compare GGUF files with those of llama.cpp: bytes, time, memory, and perplexity in both programs.

    scripts/compare gguf [--compress BINARY] [--types TYPE…] [--windows N] [--samples N] [--checkpoint FOLDER]

llama.cpp is built from the source in the package llama-cpp-python (15 minutes on two cores, once).
SmolLM2-135M-Instruct is written as F16, then both tools convert that file to each of --types, in separate
processes with two threads. Rows `by importance` use the first windows of the WikiText-2 training set, of 512
tokens each; for llama.cpp by `llama-imatrix`, whose time is included. `equal` is the number of tensors with
identical bytes, for these rows also with llama.cpp's importance matrix in both programs.

Perplexity is measured on the first windows of the WikiText-2 test set, of 1,024 tokens that overlap by one, for
our file by `compress eval` and `llama-perplexity`, and for llama.cpp's file by the latter. llama.cpp rounds
activations to 8 bits if weights are quantized. --checkpoint also measures time and memory for a folder, for
example one written by `examples/make_checkpoint`.
"""

import argparse
import json
import subprocess
import tempfile
from hashlib import sha256
from pathlib import Path

from lib import COMPRESS, cached, llama_cpp, venv
from lib.process import timed

THREADS = "2"
KINDS = ["Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_0", "IQ4_XS", "Q3_K_M", "Q2_K"]
# Types without a search for scales, which importance does not affect.
UNWEIGHTED = ["F32", "F16", "BF16", "Q8_0"]


def tensors(path):
    """Types of the tensors of a file, and hashes of their bytes."""
    from gguf import GGUFReader

    return {tensor.name: (tensor.tensor_type, sha256(tensor.data).digest()) for tensor in GGUFReader(path).tensors}


class Sides:
    def __init__(self, compress, scratch):
        self.compress, self.scratch = compress, scratch
        self.llama = llama_cpp.tools()
        # llama.cpp's importance matrix.
        self.importance = scratch / "importance.gguf"

    def ours(self, model, kind, out, samples=None, imatrix=None):
        recipe = self.scratch / "recipe.yaml"
        matrix = f", imatrix: {imatrix}" if imatrix else ""
        data = f"data: {{ calibration: {{ text: {samples[0]}, max_length: 512, samples: {samples[1]} }} }}\n" if samples else ""
        recipe.write_text(f"model: {model}\n{data}passes: []\nexport: [{{ gguf: {{ type: {kind}{matrix} }} }}]\noutput: {out}\n")
        return timed([self.compress, "--threads", THREADS, "run", recipe, "--force", "--no-measure", "--quiet"])

    def theirs(self, model, kind, out, samples=None):
        used, matrix = [], []
        if samples:
            used.append(timed([self.llama / "llama-imatrix", "-m", model, "-f", samples[0], "-o", self.importance, "-c", "512", "--chunks", str(samples[1]), "-t", THREADS]))
            matrix = ["--imatrix", self.importance]
        used.append(timed([self.llama / "llama-quantize", *matrix, model, out, kind, THREADS]))
        return {"seconds": sum(each["seconds"] for each in used), "peak": max(each["peak"] for each in used)}

    def score(self, path, text, windows):
        """The perplexity reported by `compress eval`."""
        command = [self.compress, "eval", path, "--text", text, "--max-length", "1024", "--stride", "1023", "--samples", str(windows), "--json", "--quiet"]
        return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)["score"]["value"]

    def score_in_llama(self, path, text, windows):
        """The perplexity reported by `llama-perplexity`."""
        # llama-perplexity adds half of the stride to the window: 513 and 511 are 1,024.
        # Without --no-repack, 0.3.36 crashes with quantized weights on processors with AMX.
        size = ["-c", "513", "-b", "513", "--ppl-stride", "1023", "--chunks", str(windows)]
        done = subprocess.run([self.llama / "llama-perplexity", "-m", path, "-f", text, *size, "-t", THREADS, "--no-repack"], check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("[1]")]
        return float(line.rstrip(",").rsplit("]", 1)[1])


def compare(sides, name, source, kind, samples, judged):
    """Prints a row: `source` converted to one type by both tools."""
    folder, theirs = sides.scratch / "ours", sides.scratch / "theirs.gguf"
    used = sides.ours(source, kind, folder, samples), sides.theirs(source, kind, theirs, samples)
    ours = folder / "model.gguf"
    one, other = tensors(ours), tensors(theirs)
    equal = f"{sum(one[name] == other.get(name) for name in one)} of {len(other)}"
    if samples:
        sides.ours(source, kind, sides.scratch / "weighted", imatrix=sides.importance)
        weighted = tensors(sides.scratch / "weighted/model.gguf")
        equal += f", {sum(weighted[name] == other.get(name) for name in weighted)} with the same importance"
    cells = [f"{each['seconds']:.1f}" for each in used] + [f"{each['peak'] / 1e6:.0f}" for each in used]
    cells += [f"{ours.stat().st_size / 1e6:.0f}", equal]
    if judged:
        cells += [f"{score:.3f}" for score in (sides.score(ours, *judged), sides.score_in_llama(ours, *judged), sides.score_in_llama(theirs, *judged))]
    print(f"| {name} | {' | '.join(cells)} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compress", type=Path, default=COMPRESS)
    parser.add_argument("--types", nargs="+", default=KINDS, metavar="TYPE", help=f"file types by llama.cpp's names (default: {' '.join(KINDS)})")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--checkpoint", type=Path)
    arguments = parser.parse_args()
    venv.enter(venv.gguf)
    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        sides = Sides(arguments.compress.absolute(), scratch)
        print("| file | seconds | llama.cpp | MB of memory | llama.cpp | MB | equal | `compress eval` | llama.cpp | llama.cpp's file |")
        print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
        source = scratch / "f16/model.gguf"
        if arguments.checkpoint:
            sides.ours(arguments.checkpoint.absolute(), "F16", source.parent)
            for kind in arguments.types:
                compare(sides, f"{arguments.checkpoint.name}, `{kind}`", source, kind, None, None)
        model, text = cached.fetched("smollm2"), cached.fetched("wikitext-2")
        judged = text / "test.raw", arguments.windows
        sides.ours(model, "F16", source.parent)
        print(f"| `F16` | | | | | {source.stat().st_size / 1e6:.0f} | | {sides.score(source, *judged):.3f} | {sides.score_in_llama(source, *judged):.3f} | |", flush=True)
        for kind in arguments.types:
            compare(sides, f"`{kind}`", source, kind, None, judged)
        for kind in [kind for kind in arguments.types if kind not in UNWEIGHTED]:
            compare(sides, f"`{kind}` by importance", source, kind, (text / "train.raw", arguments.samples), judged)


if __name__ == "__main__":
    main()
