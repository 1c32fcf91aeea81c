"""Check that transformers and llama.cpp run what compress writes, with `compress check --try`.

    scripts/check twin [--compress BINARY] [--only TEXT]

Tiny models are compressed with several schemes, and one by `compress auto` for each runtime. `compress check --loads transformers --try` runs each folder in full
and as a twin of its first layers, with the transformers of the reference environment, and GGUF files run in
llama-perplexity. All must compute the same as the built-in executor, and folders with defects must be reported: a
missing norm, transposed scales, an unknown class, sizes that contradict the tensors.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from lib import COMPRESS, llama_cpp, venv

venv.enter(venv.reference)

import torch
import transformers
from safetensors.torch import load_file, save_file

from lib.check.gguf import vocabulary

SIZES = {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 54, "max_position_embeddings": 128, "initializer_range": 0.2}
MODELS = {
    "llama": ("Llama", {"num_hidden_layers": 4, "tie_word_embeddings": True}),
    "llama bf16": ("Llama", {"num_hidden_layers": 4, "tie_word_embeddings": False}),
    # The fourth layer is the first without rotary embeddings.
    "smollm3": ("SmolLM3", {"num_hidden_layers": 6, "no_rope_layer_interval": 4, "pad_token_id": 0}),
    "gemma2": ("Gemma2", {"num_hidden_layers": 5, "head_dim": 16, "query_pre_attn_scalar": 16}),
    "qwen3": ("Qwen3", {"num_hidden_layers": 3, "head_dim": 16}),
}
SCHEMES = {
    "llama": {
        "floats": ("cast", "--to", "f32"),
        "W8A8": ("quantize", "--scheme", "W8A8"),
        "W4A16": ("quantize", "--scheme", "W4A16", "--group-size", "32"),
        "W4A8": ("quantize", "--scheme", "W4A8", "--group-size", "32"),
        "FP8": ("quantize", "--scheme", "FP8"),
        "FP8-DYNAMIC": ("quantize", "--scheme", "FP8-DYNAMIC"),
        "FP8-BLOCK": ("quantize", "--scheme", "FP8-BLOCK"),
        "int8 embeddings": ("quantize-dynamic", "--embeddings"),
    },
    "llama bf16": {
        "floats": ("cast", "--to", "bf16"),
        "W4A16": ("quantize", "--scheme", "W4A16", "--group-size", "32"),
        "NVFP4A16": ("quantize", "--scheme", "NVFP4A16"),
        "NVFP4": ("quantize", "--scheme", "NVFP4"),
        "MXFP4": ("quantize", "--scheme", "MXFP4"),
        "MXFP8": ("quantize", "--scheme", "MXFP8"),
    },
    "smollm3": {"W8A8": ("quantize", "--scheme", "W8A8")},
    "gemma2": {"W4A16": ("quantize", "--scheme", "W4A16", "--group-size", "32")},
    "qwen3": {"FP8-DYNAMIC": ("quantize", "--scheme", "FP8-DYNAMIC")},
}
GGUF_TYPES = ["F32", "BF16", "Q8_0", "Q4_0"]
# The first layers of each kind: `compress check --try=twin` must name them.
KEPT = {"smollm3": 4}


def save(name, folder):
    torch.manual_seed(0)
    kind, options = MODELS[name]
    config = getattr(transformers, kind + "Config")(**SIZES, **options)
    model = getattr(transformers, kind + "ForCausalLM")(config)
    model.to(torch.bfloat16 if name.endswith("bf16") else torch.float32).save_pretrained(folder)
    vocabulary(folder, json.loads((folder / "config.json").read_text()))


def compress(binary, *command):
    done = subprocess.run([binary, *command, "--quiet"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise RuntimeError(f"compress {command[0]}: {done.stderr}")


def attempt(binary, output, runtime, scope):
    """The exit code and the result of a runtime."""
    path = f"{llama_cpp.tools()}{os.pathsep}{os.environ['PATH']}"
    command = [binary, "check", output, "--loads", runtime, f"--try={scope}", "--python", sys.executable, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PATH": path})
    if not done.stdout:
        raise RuntimeError(done.stderr)
    return done.returncode, json.loads(done.stdout)["loads"][0]


def without_norm(config, tensors):
    del tensors["model.layers.1.input_layernorm.weight"]


def transposed_scales(config, tensors):
    for name in [name for name in tensors if name.endswith("down_proj.weight_scale")]:
        tensors[name] = tensors[name].T.contiguous()


def other_class(config, tensors):
    config["architectures"] = ["UnheardOfForCausalLM"]


def other_shapes(config, tensors):
    config["intermediate_size"] //= 2


DEFECTS = [without_norm, transposed_scales, other_class, other_shapes]


def broken(folder, defect, to):
    shutil.copytree(folder, to)
    config, tensors = json.loads((to / "config.json").read_text()), load_file(to / "model.safetensors")
    defect(config, tensors)
    (to / "config.json").write_text(json.dumps(config))
    save_file(tensors, to / "model.safetensors", {"format": "pt"})


class Table:
    def __init__(self):
        self.failed = []
        print("| model | runtime | scheme | run | result | relative error |\n| --- | --- | --- | --- | --- | ---: |", flush=True)

    def add(self, name, runtime, scheme, scope, found, code, expected):
        trial = found.get("trial", {})
        status = trial.get("status") or ", ".join(sorted({violation["rule"] for violation in found.get("violations", [])})) or found.get("error")
        error = trial.get("relative_error")
        cells = [name, runtime, scheme, trial.get("scope", scope), status, "" if error is None else f"{error:.1e}"]
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
        if not expected(code, trial):
            self.failed.append(f"{name}, {scheme} in {runtime}, {scope}: {trial.get('finding') or found}")


def agrees(code, trial):
    return code == 0 and trial.get("status") == "agrees"


def is_reported(code, _trial):
    return code == 1


def check_transformers(binary, name, source, folder, table, only):
    samples = samples_of(folder)
    for scheme, (verb, *options) in SCHEMES[name].items():
        if only not in f"{name} {scheme} transformers":
            continue
        out = folder / scheme.replace(" ", "-")
        compress(binary, verb, source, "-o", out, *options, *(["--calibration", samples] if verb == "quantize" else []))
        for scope in ["full", "twin"]:
            code, found = attempt(binary, out, "transformers", scope)
            kept = KEPT.get(name, 2)
            is_right = lambda code, trial: agrees(code, trial) and (scope == "full" or f"first {kept} of" in trial["scope"])
            table.add(name, "transformers", scheme, scope, found, code, is_right)
    if name == "llama" and only in "llama defects":
        out = folder / "defects"
        compress(binary, "quantize", source, "-o", out, "--scheme", "W8A8")
        for defect in DEFECTS:
            bad = folder / defect.__name__
            broken(out, defect, bad)
            for scope in ["full", "twin"]:
                code, found = attempt(binary, bad, "transformers", scope)
                table.add(name, "transformers", defect.__name__.replace("_", " "), scope, found, code, is_reported)


def samples_of(folder):
    torch.manual_seed(1)
    ids = torch.randint(0, 48, (16, 16))
    samples = folder / "samples.safetensors"
    save_file({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, samples)
    return samples


def check_auto(binary, name, source, folder, table, only):
    """The mixtures that a search chooses."""
    for runtime, limit, file in [("transformers", "5bits", "auto"), ("llama.cpp", "25%", "auto.gguf")]:
        if only not in f"{name} auto {runtime}":
            continue
        out = folder / file
        compress(binary, "auto", source, "-o", out, "--for", runtime, "--max-size", limit, "--calibration", samples_of(folder))
        for scope in ["full", "twin"]:
            code, found = attempt(binary, out, runtime, scope)
            table.add(name, runtime, f"auto, {limit}", scope, found, code, agrees)


def check_llama_cpp(binary, name, source, folder, table, only):
    for kind in GGUF_TYPES:
        if only not in f"{name} {kind} llama.cpp":
            continue
        out = folder / f"{kind}.gguf"
        recipe = folder / "recipe.yaml"
        recipe.write_text(f"model: {source}\npasses: []\nexport: [{{ gguf: {{ type: {kind} }} }}]\noutput: {out}\n")
        compress(binary, "run", recipe, "--no-measure")
        for scope in ["full", "twin"]:
            code, found = attempt(binary, out, "llama.cpp", scope)
            table.add(name, "llama.cpp", kind, scope, found, code, agrees)
    if name == "llama" and only in "llama defects":
        # A file whose architecture llama.cpp computes otherwise.
        bad, text = folder / "bad.gguf", (folder / "F32.gguf").read_bytes()
        key = b"llama.attention.layer_norm_rms_epsilon"
        at = text.index(key) + len(key)
        bad.write_bytes(text[: at + 4] + b"\xff\xff\xff\xff" + text[at + 8 :])
        code, found = attempt(binary, bad, "llama.cpp", "full")
        table.add(name, "llama.cpp", "no epsilon", "full", found, code, is_reported)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compress", type=Path, default=COMPRESS)
    parser.add_argument("--only", default="", metavar="TEXT", help="only rows whose model, scheme and runtime contain it")
    arguments = parser.parse_args()
    binary = arguments.compress.absolute()
    table = Table()
    for name in MODELS:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            source = folder / "source"
            save(name, source)
            check_transformers(binary, name, source, folder, table, arguments.only)
            if name == "llama":
                check_auto(binary, name, source, folder, table, arguments.only)
            if name in ("llama", "gemma2", "qwen3"):
                check_llama_cpp(binary, name, source, folder, table, arguments.only)
    if table.failed:
        sys.exit("\n".join(["unexpected results:", *table.failed]))


if __name__ == "__main__":
    main()
