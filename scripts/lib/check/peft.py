"""Check that PEFT loads the low-rank corrections of `quantize`.

    scripts/check peft [--compress BINARY]

Small models are quantized with `--correct`. transformers loads the folder, and PEFT its adapter: no tensor may be
missing, the outputs must equal those of the sum of weights and corrections, and they must be closer to the outputs of
the original model than without the adapter.
"""

import argparse
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


@torch.no_grad()
def check(binary, name, options, folder):
    source, out = GOLDEN / "models" / name, folder / "out"
    torch.manual_seed(3)
    ids = torch.randint(1, 40, (32, 8))
    save_file({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, folder / "ids.safetensors")
    wanted = [] if "--correct" in options else ["--correct", "4"]
    subprocess.run([binary, "quantize", source, "-o", out, *options, *wanted, "--calibration", folder / "ids.safetensors", "--quiet"], check=True)
    # PEFT adapts layers by their weights, which those with packed weights lack.
    dense = lambda path: {"quantization_config": transformers.CompressedTensorsConfig(run_compressed=False)} if path == out else {}
    load = lambda path: transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **dense(path)).eval()
    tokens = torch.randint(1, 40, (4, 8))
    original, base = (load(path)(tokens).logits for path in (source, out))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        adapted = PeftModel.from_pretrained(load(out), out / "adapter").eval()
    problems = [str(each.message) for each in caught if "key" in str(each.message) or "unexpected" in str(each.message)]
    found = adapted(tokens).logits
    merged, factors = load(out), load_file(out / "adapter" / "adapter_model.safetensors")
    modules = dict(merged.named_modules())
    for tensor in factors:
        if tensor.endswith(".lora_A.weight"):
            module = tensor.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            term = factors[tensor.replace("lora_A", "lora_B")].float() @ factors[tensor].float()
            hook = lambda _module, inputs, output, term=term: output + inputs[0] @ term.T
            modules[module].register_forward_hook(hook)
    expected = merged(tokens).logits
    distance = lambda a, b: (a - b).square().mean().item()
    if problems:
        return f"warnings: {problems}"
    if distance(found, expected) > 1e-9:
        return f"differs from the sum of weights and corrections by {distance(found, expected):.2e}"
    before, after = distance(base, original), distance(found, original)
    if after >= before:
        return f"is not closer to the original: {after:.3e}, without the adapter {before:.3e}"
    print(f"{name}: squared error of logits {before:.3e}, with the adapter {after:.3e}")
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compress", type=Path, default=COMPRESS, help="the binary to run")
    binary = parser.parse_args().compress
    failed = {}
    for label, (name, options) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            if problem := check(binary, name, options, Path(folder)):
                failed[label] = problem
    for label, problem in failed.items():
        print(f"{label}: {problem}")
    raise SystemExit(bool(failed))


main()
