"""Check that llama.cpp computes the same as transformers from GGUF files.

    scripts/check gguf [--compress BINARY] [NAME…]

The tiny models of tests/golden/gguf get a vocabulary of one token for each character. `compress` writes them as GGUF
files of the type F32, and llama-perplexity runs these files and stores its log-probabilities, which must equal those
of transformers. llama.cpp is built from the source in the package llama-cpp-python (15 minutes on two cores, once).
"""

import argparse
import json
import random
import shutil
import string
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

from lib import COMPRESS, GOLDEN, llama_cpp, venv

venv.enter(venv.reference)

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file

from lib.arrays import save_file

FOLDER = GOLDEN / "gguf"
WINDOW = 32
# llama-perplexity stores log-probabilities in steps of up to 16 / 65,535.
TOLERANCE = 3e-4
# llama.cpp computes GELU from a table of 16-bit floats.
TABLE_TOLERANCE = 1e-2
CHARACTERS = string.ascii_letters


def vocabulary(folder, config):
    """Writes a tokenizer of one token for each character, a merge of two of them, and a special token."""
    size = config["vocab_size"]
    characters = CHARACTERS[: size - 2]
    tokens = [*characters, characters[:2], "<s>"]
    special = {"id": size - 1, "content": "<s>", "special": True, "normalized": False, "lstrip": False, "rstrip": False, "single_word": False}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [special],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": {token: number for number, token in enumerate(tokens)}, "merges": [" ".join(characters[:2])]},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "config.json").write_text(json.dumps(config | {"bos_token_id": size - 1, "eos_token_id": size - 1, "pad_token_id": None}))
    # Without the first character, so that nothing is merged.
    return "".join(random.Random(0).choices(characters[1:], k=2 * WINDOW))


def run_llama_cpp(file, text, folder):
    """Tokens in windows, and their log-probabilities in the second half of each window, by llama-perplexity."""
    (folder / "text").write_text(text)
    stored = folder / "log-probabilities"
    size = ["-c", str(WINDOW), "-b", str(WINDOW), "-ctk", "f32", "-ctv", "f32", "-fa", "off", "-t", "2", "--no-repack"]
    command = [llama_cpp.tools() / "llama-perplexity", "-m", file, "-f", folder / "text", *size, "--kl-divergence-base", stored]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode or not stored.exists():
        errors = [line for line in done.stdout.splitlines() if "error" in line]
        raise RuntimeError(errors[0] if errors else done.stdout[-500:])
    data = stored.read_bytes()
    magic, window, size, count = struct.unpack("<8siii", data[:20])
    if magic != b"_logits_" or window != WINDOW:
        raise RuntimeError("unknown format of log-probabilities")
    tokens = np.frombuffer(data, "<i4", window * count, 20).reshape(count, window)
    # A row has its step, its least value, and the steps of each token, padded to an even number.
    rows = np.frombuffer(data, "<u2", offset=20 + 4 * window * count).reshape(count, window - 1 - window // 2, -1)
    limits = np.ascontiguousarray(rows[..., :4]).view("<f4")
    return tokens, rows[..., 4 : 4 + size] * limits[..., :1].astype(np.float64) + limits[..., 1:]


@torch.no_grad()
def run_transformers(folder, tokens):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    scores = torch.log_softmax(model(torch.tensor(tokens.astype(np.int64))).logits.double(), -1)[:, WINDOW // 2 : -1]
    # llama-perplexity stores no lower values.
    return torch.maximum(scores, scores.amax(-1, keepdim=True) - 16).numpy()


def select_equally(path, config):
    """Changes the routers of DeepSeek-V2 so that the second half of the experts of a group has the scores of the first
    half. llama.cpp selects groups by the sum of the two largest scores, transformers by the largest one: the same groups
    if these two scores are equal."""
    tensors = load_file(path)
    for key, tensor in tensors.items():
        if key.endswith("mlp.gate.weight"):
            first, _ = np.split(tensor.reshape(config["n_group"], -1, tensor.shape[-1]), 2, axis=1)
            tensors[key] = np.concatenate([first, first], axis=1).reshape(tensor.shape)
    save_file(tensors, path)


def check(binary, name, folder):
    source, out = folder / "source", folder / "out"
    source.mkdir()
    config = json.loads((FOLDER / f"{name}.json").read_text())
    own = FOLDER / f"{name}.safetensors"
    shutil.copy(own if own.exists() else GOLDEN / "models" / name / "model.safetensors", source / "model.safetensors")
    if config.get("topk_method") == "group_limited_greedy":
        select_equally(source / "model.safetensors", config)
    text = vocabulary(source, config)
    recipe = folder / "recipe.yaml"
    recipe.write_text(f"model: {source}\npasses: []\nexport: [{{ gguf: {{ type: F32 }} }}]\noutput: {out}\n")
    subprocess.run([binary, "run", recipe, "--no-measure", "--quiet"], check=True, stdout=subprocess.DEVNULL)
    tokens, found = run_llama_cpp(out / "model.gguf", text, folder)
    difference = np.abs(found - run_transformers(source, tokens)).max()
    limit = TABLE_TOLERANCE if "gelu" in str(config.get("hidden_act")) + str(config.get("hidden_activation")) else TOLERANCE
    print(f"| `{name}` | {difference:.5f} | {found.std():.2f} |", flush=True)
    return difference <= limit


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compress", type=Path, default=COMPRESS)
    parser.add_argument("names", nargs="*", metavar="NAME", help="golden files without their ending (default: all families)")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    every = sorted(path.stem for path in FOLDER.glob("*.gguf") if path.with_suffix(".json").exists())
    failed = []
    print("| model | largest difference of log-probabilities | their standard deviation |\n| --- | ---: | ---: |")
    for name in arguments.names or every:
        with tempfile.TemporaryDirectory() as folder:
            try:
                if not check(arguments.compress.absolute(), name, Path(folder)):
                    failed.append(name)
            except (RuntimeError, subprocess.CalledProcessError) as error:
                print(f"{name}: {error}", file=sys.stderr)
                failed.append(name)
    if failed:
        sys.exit(f"llama.cpp computes something else: {', '.join(failed)}")


if __name__ == "__main__":
    main()
