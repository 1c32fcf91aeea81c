"""Compare the greedy continuations and the speed of SmolLM2-135M with transformers, with interleaved
measurements.

    scripts/compare generate [--compress BINARY] [--model FOLDER] [--tokens N] [--threads N] [--runs N]
    scripts/compare generate --onnx [--int4] [...]
    scripts/compare generate --llama-cpp [...]

Ten prompts are continued greedily in f32 by both tools, one process at a time; the tokens of a chat must be
equal too. Prompt time ends at the first token; generation time is that of the following tokens. Loading is
excluded. The slowest and the fastest run are printed too. The processor time per token depends little on other
load: for compress it is the time of all tokens after the first, relative to a run that ends there.

With --onnx, files for ONNX Runtime are compared: those of `onnx: { cache: true }`, in optimum's
ORTModelForCausalLM and in onnxruntime-genai, and optimum's own export, quantized by ONNX Runtime. The tokens of
the float file must equal those of optimum's file.

With --llama-cpp, the speed of weights in 16, 8 and 4 bits, embeddings included, is compared with that of the same number
of bits in llama.cpp (`llama-bench`), which is built from its source (15 minutes on two cores, once).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lib import COMPRESS, SCRIPTS, llama_cpp, venv
from lib.process import timed

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived an old fisherman who",
    "Water boils at",
    "def fibonacci(n):\n    \"\"\"The n-th Fibonacci number.\"\"\"\n",
    "In 1905, Albert Einstein published four papers. The first of them",
    "Dear Sir or Madam,\n\nI am writing to you because",
    "The three most important rules of good writing are:\n\n1.",
    "Photosynthesis is the process by which plants",
    "Als der Zug in München ankam,",
    "Question: A farmer has 17 sheep, and all but 9 run away. How many sheep are left?\nAnswer:",
]


def reference(model, tokens, threads):
    """Continues the prompts in transformers, in a separate process."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(int(threads))
    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    chat = tokenizer.apply_chat_template([{"role": "user", "content": PROMPTS[0]}], add_generation_prompt=True, return_dict=True)["input_ids"]
    print(json.dumps({"chat": chat, **continued(tokenizer, lambda ids, count: generated(network, ids, count), int(tokens))}))


def generated(network, ids, count):
    import torch

    with torch.inference_mode():
        ids = torch.tensor([ids])
        found = network.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0)
    return found[0, ids.shape[1] :].tolist()


def continued(tokenizer, generate, tokens):
    """Runs all prompts with a function that continues tokens; returns tokens per second of prompts, of
    generation, and per processor time."""
    found, sums, spent = [], [0, 0.0, 0, 0.0], 0.0
    generate(tokenizer("Hello")["input_ids"], 4)
    for prompt in PROMPTS:
        ids = tokenizer(prompt)["input_ids"]
        timed_runs = []
        for count in (1, tokens):
            start, begun = time.perf_counter(), time.process_time()
            continuation = generate(ids, count)
            timed_runs.append((time.perf_counter() - start, time.process_time() - begun))
        (first, before), (whole, all) = timed_runs
        spent += all - before
        found.append(continuation)
        sums = [a + b for a, b in zip(sums, (len(ids), first, len(continuation) - 1, whole - first))]
    return {"tokens": found, "prefill": sums[0] / sums[1], "decode": sums[2] / sums[3], "processor": sums[2] / spent}


def in_optimum(folder, model, tokens, threads):
    """Continues the prompts with an ONNX file in optimum, in a separate process."""
    import onnxruntime
    from optimum.onnxruntime import ORTModelForCausalLM
    from transformers import AutoTokenizer

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = int(threads)
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    network = ORTModelForCausalLM.from_pretrained(folder, session_options=options, use_cache=True)
    print(json.dumps(continued(AutoTokenizer.from_pretrained(model), lambda ids, count: generated(network, ids, count), int(tokens))))


def in_genai(folder, model, tokens, threads):
    """Continues the prompts with an ONNX file in onnxruntime-genai, in a separate process."""
    import onnxruntime_genai
    from transformers import AutoTokenizer

    config = onnxruntime_genai.Config(folder)
    config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": int(threads), "session.intra_op.allow_spinning": "0"}}}}))
    network = onnxruntime_genai.Model(config)
    tokenizer = AutoTokenizer.from_pretrained(model)

    def generate(ids, count):
        params = onnxruntime_genai.GeneratorParams(network)
        params.set_search_options(max_length=len(ids) + count, do_sample=False)
        generator = onnxruntime_genai.Generator(network, params)
        generator.append_tokens(ids)
        while not generator.is_done():
            generator.generate_next_token()
        found = generator.get_sequence(0)[len(ids) :].tolist()
        # The end-of-sequence token is not included.
        return found if len(found) == count else [*found, tokenizer.eos_token_id]

    print(json.dumps(continued(tokenizer, generate, int(tokens))))


def export(folder, model):
    """Optimum's own export of a model, and the same quantized by ONNX Runtime, in a separate process."""
    import shutil

    from onnxruntime.quantization import QuantType, quantize_dynamic
    from optimum.onnxruntime import ORTModelForCausalLM

    plain, int8 = Path(folder, "optimum f32"), Path(folder, "optimum int8")
    ORTModelForCausalLM.from_pretrained(model, export=True, use_cache=True).save_pretrained(plain)
    shutil.copytree(plain, int8, ignore=shutil.ignore_patterns("*.onnx*"))
    quantize_dynamic(plain / "model.onnx", int8 / "model.onnx", per_channel=True, weight_type=QuantType.QInt8)


def chat(binary, model):
    """The tokens of the first message of a chat."""
    command = [binary, "generate", model, "--chat", "--tokens", "1", "--json", "--prompt", PROMPTS[0]]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)["prompts"][0]["prompt_tokens"]


def ours(binary, model, tokens, threads):
    prompts = [part for prompt in PROMPTS for part in ("--prompt", prompt)]
    command = [binary, "generate", model, "--threads", str(threads), "--json", *prompts]
    said = json.loads(subprocess.run([*command, "--tokens", str(tokens)], check=True, stdout=subprocess.PIPE, text=True).stdout)
    whole, first = (timed([*command, "--quiet", "--tokens", str(count)])["cpu_seconds"] for count in (tokens, 1))
    tokens = [prompt["continuation"]["tokens"] for prompt in said["prompts"]]
    processor = sum(len(each) - 1 for each in tokens) / (whole - first)
    return {"tokens": tokens, "processor": processor, **{part: said["speed"][part] for part in ("prefill", "decode")}}


# Recipes of the files of compress: passes, and options of `onnx`.
OURS = {
    "compress f32": (["cast", "--to", "f32"], "cache: true"),
    "compress int8": (["quantize-dynamic", "--embeddings"], "cache: true, tied_head: int8"),
    "compress int8, float head": (["quantize-dynamic", "--embeddings"], "cache: true"),
}
INT4 = {"compress int4": (["quantize", "--scheme", "W4A16", "--group-size", "64", "--observer", "minmax"], "opset: 21, cache: true")}


def peers(binary, model, options):
    """Compares ONNX files."""
    python = venv.decoders()
    with tempfile.TemporaryDirectory(prefix="compress-decoders-") as scratch:
        subprocess.run([python, SCRIPTS / "compare", "generate", "--export", scratch, model], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        made = OURS | (INT4 if options.int4 else {})
        for name, (step, told) in made.items():
            command = [binary, "chain", model, "-o", Path(scratch, name), "--no-measure", "--export", f"onnx: {{{told}}}", "--", *step]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        rows = [("--optimum", name) for name in ("optimum f32", "optimum int8", *made)] + [("--genai", name) for name in made]
        found = {row: [] for row in rows}
        for _ in range(options.runs):
            for how, name in rows:
                command = [python, SCRIPTS / "compare", "generate", how, Path(scratch, name), model, str(options.tokens), str(options.threads)]
                found[how, name].append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout.splitlines()[-1]))
        sizes = {name: sum(file.stat().st_size for file in Path(scratch, name).glob("model.onnx*")) / 1e6 for _, name in rows}
    wanted = found["--optimum", "optimum f32"][0]["tokens"]
    base = {part: statistics.median(run[part] for run in found["--optimum", "optimum int8"]) for part in ("decode", "processor")}
    print("| file | runtime | MB | tokens per second | relative to optimum int8 | the same, processor time | same tokens as float |\n| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for how, name in rows:
        runs = found[how, name]
        rate = {part: statistics.median(run[part] for run in runs) for part in ("decode", "processor")}
        same = sum(a == b for have, want in zip(runs[0]["tokens"], wanted) for a, b in zip(have, want)) / sum(map(len, wanted))
        print(f"| {name} | {how[2:]} | {sizes[name]:.1f} | {rate['decode']:.1f} | {rate['decode'] / base['decode']:.2f} | {rate['processor'] / base['processor']:.2f} | {100 * same:.0f} % |")
    for how in ("--optimum", "--genai"):
        if found[how, "compress f32"][0]["tokens"] != wanted:
            sys.exit(f"tokens of the float file differ from those of optimum's file in {how[2:]}")


WEIGHTS = "re:.*(proj|embed_tokens).weight"
# Steps to the folder of compress, and to the file of llama.cpp.
BITS = {
    "16 bits": (["cast", "--to", "bf16"], ["cast", "--to", "f16"]),
    "8 bits": (["quantize", "--scheme", "W8A16", "--method", "rtn", "--targets", WEIGHTS], ["quantize", "--scheme", "Q8_0", "--method", "rtn"]),
    "4 bits": (["quantize", "--scheme", "W4A16", "--group-size", "32", "--method", "rtn", "--targets", WEIGHTS], ["quantize", "--scheme", "Q4_0", "--method", "rtn"]),
}


def llama(binary, model, options):
    """Compares the speed with that of llama.cpp, in turns."""
    bench = llama_cpp.tools() / "llama-bench"
    with tempfile.TemporaryDirectory(prefix="compress-llama-") as scratch:
        made = {name: (Path(scratch, name), Path(scratch, f"{name}.gguf")) for name in BITS}
        for name, outs in made.items():
            for out, step in zip(outs, BITS[name]):
                subprocess.run([binary, *step, model, "-o", out, "--no-measure"], check=True, stdout=subprocess.DEVNULL)
        found = {name: [] for name in BITS}
        for _ in range(options.runs):
            for name, (folder, file) in made.items():
                command = [bench, "-m", file, "-t", str(options.threads), "-p", "0", "-n", str(options.tokens), "-r", str(len(PROMPTS)), "-o", "json"]
                said = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout)
                found[name].append((ours(binary, folder, options.tokens, options.threads)["decode"], said[0]["avg_ts"]))
    print("| weights | compress | llama.cpp | ratio |\n| --- | ---: | ---: | ---: |")
    for name, turns in found.items():
        rates = [statistics.median(side) for side in zip(*turns)]
        print(f"| {name} | {rates[0]:.1f} | {rates[1]:.1f} | {rates[0] / rates[1]:.2f} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compress", default=COMPRESS)
    parser.add_argument("--model")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--onnx", action="store_true")
    parser.add_argument("--int4", action="store_true")
    parser.add_argument("--llama-cpp", action="store_true")
    options = parser.parse_args()
    binary = str(Path(options.compress).resolve())
    model = options.model or subprocess.run([SCRIPTS / "fetch", "smollm2"], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    if options.onnx:
        os.environ.update(TOKENIZERS_PARALLELISM="false")
        return peers(binary, model, options)
    if options.llama_cpp:
        return llama(binary, model, options)
    python = venv.reference()
    os.environ.update(OMP_NUM_THREADS=str(options.threads), OMP_WAIT_POLICY="passive", TOKENIZERS_PARALLELISM="false")
    theirs = lambda: json.loads(subprocess.run([python, SCRIPTS / "compare", "generate", "--reference", model, str(options.tokens), str(options.threads)], check=True, stdout=subprocess.PIPE, text=True).stdout)
    turns = [(ours(binary, model, options.tokens, options.threads), theirs()) for _ in range(options.runs)]
    if chat(binary, model) != turns[0][1]["chat"]:
        sys.exit("the tokens of the chat differ")
    wrong = 0
    for index, prompt in enumerate(PROMPTS):
        have, want = turns[0][0]["tokens"][index], turns[0][1]["tokens"][index]
        if have != want:
            at = next((at for at, (a, b) in enumerate(zip(have, want)) if a != b), min(len(have), len(want)))
            print(f"{prompt!r}: token {at + 1} differs")
            wrong += 1
    print(f"{len(PROMPTS) - wrong} of {len(PROMPTS)} continuations of {options.tokens} tokens are equal\n")
    print("tokens per second     compress              transformers          ratio")
    for part, name in (("prefill", "prefill"), ("decode", "decode"), ("processor", "decode, processor's")):
        rates = [[turn[side][part] for turn in turns] for side in (0, 1)]
        shown = [f"{statistics.median(side):6.1f} ({min(side):.1f}..{max(side):.1f})" for side in rates]
        print(f"{name:20}  {shown[0]:<22}{shown[1]:<22}{statistics.median(rates[0]) / statistics.median(rates[1]):.2f}")
    if wrong or any(turn[0]["tokens"] != turns[0][0]["tokens"] for turn in turns):
        sys.exit("continuations differ")


if __name__ == "__main__":
    part = {"--reference": reference, "--optimum": in_optimum, "--genai": in_genai, "--export": export}.get(sys.argv[1] if len(sys.argv) > 1 else "")
    part(*sys.argv[2:]) if part else main()
