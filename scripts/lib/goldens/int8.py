"""Write tests/golden/int8: int8 weights with int8 activations, and the outputs of transformers with
compressed-tensors.

    scripts/goldens int8

`llama-outliers` is a model with outlier channels, as in large language models: a folder that compressed-tensors
reads, with "in/…" and "out/…" in golden.safetensors. `rows.safetensors` has single rows and their values after
per-token rounding, bit for bit.

The largest value of a row is 127.5 steps: a positive one is clipped to 127, a negative one becomes -127 or -128
depending on the last bit of the division. A comparison of whole models can be exact only if the largest values
are positive. The model is constructed that way, and the script checks that noise changes nothing.
"""

import json
import random
import shutil
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from safetensors.torch import load_file, save_file

from lib import GOLDEN

FOLDER = GOLDEN / "int8"
ACTIVATIONS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
OUTLIER, SIZE = 3, 6.0

torch.set_num_threads(1)
torch.set_grad_enabled(False)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def consumer(rows):
    args = QuantizationArgs(**ACTIVATIONS)
    scale, zero = compute_dynamic_scales_and_zp(rows, args, None)
    return fake_quantize(rows, scale, zero, args)


def rows():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 32, generator=generator)
    x[::4, 5] *= 60  # outliers of both signs
    x[1::4] *= 1e-7  # smaller steps than the epsilon of f32
    x[2] = 0
    x[3, ::2] = 0
    x = x.unsqueeze(0)
    return {"in": x, "out": consumer(x)}


def model():
    rng = random.Random("llama-outliers")
    config = transformers.LlamaConfig(
        vocab_size=48,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
        rms_norm_eps=0.01,
    )
    float_model = transformers.LlamaForCausalLM(config).eval()
    for name, tensor in float_model.named_parameters():
        mean, std = (1.0, 0.1) if tensor.dim() == 1 else (0.0, 1 / tensor.shape[1] ** 0.5)
        tensor.copy_(torch.tensor([rng.gauss(mean, std) for _ in range(tensor.numel())]).reshape(tensor.shape))
        if name.endswith("embed_tokens.weight"):
            tensor[:, OUTLIER] = tensor[:, OUTLIER].abs() + SIZE
        if tensor.dim() == 2 and "layers" in name:
            tensor[:, OUTLIER] *= 0.1
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[OUTLIER] = 0  # the outlier is unchanged
        if name.endswith("v_proj.weight"):
            tensor[::8, OUTLIER] = 1.5
        if name.endswith(("gate_proj.weight", "up_proj.weight")):
            tensor[5, OUTLIER] = 1.0
    return float_model


def quantized(tensors):
    """Quantized as by quantize-dynamic."""
    stored = {}
    for name, weight in tensors.items():
        if not name.endswith("proj.weight"):
            stored[name] = weight
            continue
        scale = weight.abs().amax(1, keepdim=True) / 127.5
        scale[scale == 0] = torch.finfo(torch.float32).eps
        stored[name] = (weight / scale).clamp(-128, 127).round().to(torch.int8)
        stored[f"{name}_scale"] = scale
    return stored


def check(condition, text):
    if not condition:
        sys.exit(text)


def write_model():
    folder = FOLDER / "llama-outliers"
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as place:
        model().save_pretrained(place)
        tensors = load_file(Path(place, "model.safetensors"))
        config = json.loads(Path(place, "config.json").read_text())
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": ACTIVATIONS, "format": "int-quantized"}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    stored = quantized(tensors)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})

    ids = torch.tensor([random.Random(f"tokens {row}").choices(range(48), k=11) for row in range(2)])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    loaded = transformers.LlamaForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    logits = loaded(**inputs, use_cache=False).logits
    save_file({**{f"in/{k}": x for k, x in inputs.items()}, "out/logits": logits}, folder / "golden.safetensors")

    scales = {k.removesuffix("_scale"): x for k, x in stored.items() if k.endswith("_scale")}
    plain = {k: x.float() * scales[k] if k in scales else x for k, x in stored.items() if not k.endswith("_scale")}
    how = {"config": model().config, "state_dict": plain, "attn_implementation": "eager"}
    reference = transformers.LlamaForCausalLM.from_pretrained(None, **how).eval()

    def with_rounding(round_rows, head=False):
        def hook(module, arguments):
            return (round_rows(arguments[0]),)

        handles = [
            module.register_forward_pre_hook(hook)
            for name, module in reference.named_modules()
            if isinstance(module, torch.nn.Linear) and (head or name != "lm_head")
        ]
        found = reference(**inputs, use_cache=False).logits
        for handle in handles:
            handle.remove()
        return (found - logits).abs().max().item()

    def steps(x, half_range, lowest, highest):
        scale = x.abs().amax(-1, keepdim=True) / half_range
        return (x / scale).clamp(lowest, highest).round() * scale

    noise = torch.Generator().manual_seed(2)
    for _ in range(5):
        gap = with_rounding(lambda x: consumer(x * (1 + 2e-7 * torch.randn(x.shape, generator=noise))))
        check(gap < 2e-5, f"noise changes {gap}")
    for what, gap in {
        "activations in floats": with_rounding(lambda x: x),
        "steps of the largest value by 127": with_rounding(lambda x: steps(x, 127, -127, 127)),
        "a largest value of 128 steps": with_rounding(lambda x: steps(x, 127.5, -128, 128)),
        "one scale for all tokens": with_rounding(lambda x: consumer(x.reshape(1, 1, -1)).reshape(x.shape)),
        "a rounded head": with_rounding(consumer, head=True),
    }.items():
        check(gap > 1e-3, f"{what} changes only {gap}")
        print(f"{what}: {gap:.4f}")


shutil.rmtree(FOLDER, ignore_errors=True)
write_model()
save_file(rows(), FOLDER / "rows.safetensors")
