"""Check that PEFT loads the low-rank corrections of `quantize`, and the adapters of `finetune` and `distill`.

    scripts/check peft [--compress BINARY]

Small models are quantized with `--correct`, or trained with `--adapter`, also after they were quantized. transformers
loads the folder, and PEFT its adapter: no tensor may be missing, and the outputs must equal those of the weights with
their adapter. With corrections, they must be closer to the outputs of the original model than without the adapter, and
with training, their loss must be lower.
"""

import argparse
import json
import subprocess
import tempfile
import warnings
from pathlib import Path

from lib import COMPRESS, GOLDEN, venv

venv.enter(venv.peft)

import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file, save_file

CASES = {
    "llama, rtn": ("llama", ["--scheme", "W3A16", "--group-size", "8"]),
    "llama, rtn without samples": ("llama", ["--scheme", "W3A16", "--group-size", "8", "--correct", "{rank: 4, importance: none}"]),
    "llama, gptq": ("llama", ["--scheme", "W3A16", "--group-size", "8", "--method", "gptq"]),
    "llama, FP8": ("llama", ["--scheme", "FP8-DYNAMIC"]),
    "qwen3, awq": ("qwen3", ["--scheme", "W3A16", "--group-size", "8", "--method", "awq"]),
    "phi3, rtn": ("phi3", ["--scheme", "W3A16", "--group-size", "8"]),
}


STEPS = ["--max-steps", "20", "--learning-rate", "1e-2"]
LORA = ["--adapter", "{rank: 4, alpha: 6, merge: false}", *STEPS]
DORA = ["--adapter", "{kind: dora, rank: 4, alpha: 6, merge: false}", *STEPS]
W4A16 = ["--scheme", "W4A16", "--group-size", "8"]
# Models, options of `quantize` before training, and the training.
TRAINED = {
    "llama, finetune": ("llama", [], ["finetune", *LORA]),
    "phi3, finetune": ("phi3", [], ["finetune", *LORA]),
    "gpt2, finetune": ("gpt2", [], ["finetune", *LORA]),
    "llama, finetune of W4A16": ("llama", W4A16, ["finetune", *LORA]),
    "llama, distill of W3A16": (
        "llama",
        ["--scheme", "W3A16", "--group-size", "8"],
        ["distill", "--losses", "soft=1", "--teacher", GOLDEN / "models" / "llama", *LORA],
    ),
    "llama, finetune with DoRA": ("llama", [], ["finetune", *DORA]),
    "gpt2, finetune with DoRA": ("gpt2", [], ["finetune", *DORA]),
    "llama, finetune of W4A16 with DoRA": ("llama", W4A16, ["finetune", *DORA]),
    "llama, finetune of FP8 with DoRA": ("llama", ["--scheme", "FP8-DYNAMIC"], ["finetune", *DORA]),
}


def load(path):
    # PEFT adapts layers by their weights, which those with packed weights lack.
    packed = "quantization_config" in json.loads((path / "config.json").read_text())
    dense = {"quantization_config": transformers.CompressedTensorsConfig(run_compressed=False)} if packed else {}
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **dense).eval()


def distance(a, b):
    return (a - b).square().mean().item()


def loss(logits, ids):
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).item()


def samples(folder):
    torch.manual_seed(3)
    ids = torch.randint(1, 40, (32, 8))
    save_file({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, folder / "ids.safetensors")
    return ids


def adapted_logits(out, tokens):
    """Logits of PEFT, and a problem if they are not those of the weights with the adapter."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        adapted = PeftModel.from_pretrained(load(out), out / "adapter").eval()
    problems = [str(each.message) for each in caught if "key" in str(each.message) or "unexpected" in str(each.message)]
    found = adapted(tokens).logits
    merged, factors = load(out), load_file(out / "adapter" / "adapter_model.safetensors")
    modules = dict(merged.named_modules())
    for tensor in factors:
        if tensor.endswith(".lora_A.weight"):
            module = modules[tensor.removeprefix("base_model.model.").removesuffix(".lora_A.weight")]
            term = factors[tensor.replace("lora_A", "lora_B")].float() @ factors[tensor].float()
            norms = factors.get(tensor.replace("lora_A.weight", "lora_magnitude_vector"))
            if norms is not None:
                is_transposed = isinstance(module, transformers.pytorch_utils.Conv1D)
                weight = (module.weight.T if is_transposed else module.weight).float()
                rescaled = (weight + term) * (norms.float() / (weight + term).norm(dim=1))[:, None]
                term = rescaled - weight
            hook = lambda _module, inputs, output, term=term: output + inputs[0] @ term.T
            module.register_forward_hook(hook)
    expected = merged(tokens).logits
    if problems:
        return found, f"warnings: {problems}"
    if distance(found, expected) > 1e-9:
        return found, f"differs from the sum of weights and adapter by {distance(found, expected):.2e}"
    return found, None


@torch.no_grad()
def check_correction(binary, name, options, folder):
    source, out = GOLDEN / "models" / name, folder / "out"
    samples(folder)
    wanted = [] if "--correct" in options else ["--correct", "4"]
    subprocess.run([binary, "quantize", source, "-o", out, *options, *wanted, "--calibration", folder / "ids.safetensors", "--quiet"], check=True)
    tokens = torch.randint(1, 40, (4, 8))
    original, base = (load(path)(tokens).logits for path in (source, out))
    found, problem = adapted_logits(out, tokens)
    if problem:
        return problem
    before, after = distance(base, original), distance(found, original)
    if after >= before:
        return f"is not closer to the original: {after:.3e}, without the adapter {before:.3e}"
    print(f"{name}: squared error of logits {before:.3e}, with the adapter {after:.3e}")
    return None


@torch.no_grad()
def check_training(binary, name, quantization, training, folder):
    source, out = GOLDEN / "models" / name, folder / "out"
    ids = samples(folder)
    base = source
    if quantization:
        base = folder / "base"
        subprocess.run([binary, "quantize", source, "-o", base, *quantization, "--quiet"], check=True)
    data = f"{{arrays: {folder / 'ids.safetensors'}, task: language-modelling}}"
    subprocess.run([binary, training[0], base, "-o", out, *training[1:], "--train", data, "--quiet"], check=True)
    before, after = (load_file(folder / "model.safetensors") for folder in (base, out))
    if before.keys() != after.keys() or any(not torch.equal(tensor, after[tensor_name]) for tensor_name, tensor in before.items()):
        return "the weights of the base changed"
    found, problem = adapted_logits(out, ids)
    if problem:
        return problem
    if training[0] == "finetune":
        before, after = loss(load(base)(ids).logits, ids), loss(found, ids)
    else:
        original = load(source)(ids).logits
        before, after = distance(load(base)(ids).logits, original), distance(found, original)
    if after >= 0.95 * before:
        return f"has learned nothing: {after:.4f}, without the adapter {before:.4f}"
    print(f"{name}: {before:.4f}, with the adapter {after:.4f}")
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compress", type=Path, default=COMPRESS, help="the binary to run")
    binary = parser.parse_args().compress
    checks = {label: (check_correction, *case) for label, case in CASES.items()}
    checks |= {label: (check_training, *case) for label, case in TRAINED.items()}
    failed = {}
    for label, (check, *case) in checks.items():
        with tempfile.TemporaryDirectory() as folder:
            if problem := check(binary, *case, Path(folder)):
                failed[label] = problem
    for label, problem in failed.items():
        print(f"{label}: {problem}")
    raise SystemExit(bool(failed))


main()
