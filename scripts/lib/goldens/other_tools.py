"""Write tests/golden/other-tools: tiny models quantized by bitsandbytes and in the format of ModelOpt, and their outputs.

    scripts/goldens other-tools

Each folder contains `model.safetensors`, a description of the weights, and `golden.safetensors`: token ids and mask,
the logits of transformers in float32 for the dequantized weights, and these weights.

- `nf4`: NF4 with quantized scales, in bfloat16. Rows end within blocks, and one matrix has several factors of scales.
- `fp4`: FP4 with scales in float32 and indices in tensors of bfloat16, in float16.
- `int8`: 8 bits, in float16.
- `nvfp4`: NVFP4 of ModelOpt with quantized inputs and KV cache.
- `mixed`: FP8 and NVFP4 weights of ModelOpt, described only by `hf_quant_config.json`.

bitsandbytes quantizes and dequantizes, with its implementation for all devices: version 0.50 reads the wrong scales on
CPUs if blocks span rows. Values in the format of ModelOpt are products of its numbers in float32, as in ModelOpt 0.47.
"""

import json

from lib import GOLDEN

import torch
import transformers
from bitsandbytes.backends.default.ops import _dequantize_4bit_compute
from bitsandbytes.functional import dequantize_blockwise, int8_vectorwise_dequant, int8_vectorwise_quant, quantize_4bit
from safetensors.torch import save_file

FOLDER = GOLDEN / "other-tools"
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
COMMON = {
    "vocab_size": 48,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}
INNER = {"nf4": 288}
DTYPES = {"fp4": torch.float16, "int8": torch.float16}
PRODUCER = {"name": "modelopt", "version": "0.47.0"}
CACHE = {"dynamic": False, "num_bits": 8, "type": "float"}
FLOATS = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
NVFP4 = {"config_groups": {"group_0": {"input_activations": FLOATS, "weights": FLOATS, "targets": ["Linear"]}}, "ignore": ["lm_head"], "quant_algo": "NVFP4"}


def four(name, values, kind, nested, storage):
    """The tensors of a matrix in 4 bits, and its values."""
    codes, state = quantize_4bit(values, quant_type=kind, compress_statistics=nested, quant_storage=storage)
    absmax = state.absmax
    if nested:
        absmax = dequantize_blockwise(absmax, state.state2) + state.offset
    found = _dequantize_4bit_compute(codes.view(torch.uint8).reshape(-1), absmax, state.code, state.blocksize, values.shape, values.dtype)
    assert (found - values).abs().max() < 0.25 * values.abs().max()
    return {name: codes} | {f"{name}.{key}": tensor for key, tensor in state.as_dict(packed=True).items()}, found


def eight(name, values):
    codes, scales, _ = int8_vectorwise_quant(values)
    module = name.removesuffix("weight")
    tensors = {name: codes, f"{module}SCB": scales, f"{module}weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, int8_vectorwise_dequant(codes, scales).to(values.dtype)


def nvfp4(name, values, has_inputs):
    """Random codes, and scales that have the size of a matrix of weights near 0.3."""
    rows, row = values.shape
    codes = torch.randint(0, 16, (rows, row), dtype=torch.uint8)
    scales = (100 * (0.5 + torch.rand(rows, row // 16))).to(torch.float8_e4m3fn)
    factor = 0.001 * (1 + torch.rand(()))
    tensors = {name: codes[:, ::2] | (codes[:, 1::2] << 4), f"{name}_scale": scales, f"{name}_scale_2": factor}
    if has_inputs:
        tensors[name.removesuffix("weight") + "input_scale"] = torch.tensor(0.0007)
    numbers = E2M1[(codes & 7).long()] * torch.where(codes > 7, -1.0, 1.0)
    found = (numbers.reshape(rows, -1, 16) * (scales.float() * factor).unsqueeze(-1)).reshape(rows, row).to(values.dtype)
    # compressed-tensors divides by the reciprocal of the factor.
    assert torch.equal(found, (numbers.reshape(rows, -1, 16) * (scales.float() / (1 / factor)).unsqueeze(-1)).reshape(rows, row).to(values.dtype))
    return tensors, found


def fp8(name, values):
    codes, scale = (100 * torch.randn(values.shape)).to(torch.float8_e4m3fn), torch.tensor(0.003)
    tensors = {name: codes, f"{name}_scale": scale, name.removesuffix("weight") + "input_scale": torch.tensor(0.02)}
    return tensors, (codes.float() * scale).to(values.dtype)


def quantized(folder, name, values):
    match folder:
        case "nf4":
            return four(name, values, "nf4", True, torch.uint8)
        case "fp4":
            return four(name, values, "fp4", False, torch.bfloat16)
        case "int8":
            return eight(name, values)
        case "nvfp4":
            return nvfp4(name, values, True)
        case "mixed":
            return fp8(name, values) if "self_attn" in name else nvfp4(name, values, False)


def describe(folder, names):
    """The value of `quantization_config`, and the contents of `hf_quant_config.json`."""
    bits = {"nf4": "4bit", "fp4": "4bit", "int8": "8bit"}
    if folder in bits:
        settings = {"load_in_4bit": False, "load_in_8bit": False, f"load_in_{bits[folder]}": True, "bnb_4bit_quant_type": folder if folder != "int8" else "fp4"}
        return transformers.BitsAndBytesConfig(**settings, bnb_4bit_use_double_quant=folder == "nf4").to_dict(), None
    if folder == "nvfp4":
        separate = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"]}
        return NVFP4 | {"quant_method": "modelopt", "kv_cache_scheme": CACHE, "producer": PRODUCER}, {"producer": PRODUCER, "quantization": separate}
    algorithm = lambda name: {"quant_algo": "FP8"} if "self_attn" in name else {"quant_algo": "W4A16_NVFP4", "group_size": 16}
    layers = {name.removesuffix(".weight"): algorithm(name) for name in names}
    separate = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None, "quantized_layers": layers}
    return None, {"producer": PRODUCER, "quantization": separate}


@torch.no_grad()
def write(folder):
    torch.manual_seed(0)
    path = FOLDER / folder
    path.mkdir(parents=True, exist_ok=True)
    config = transformers.LlamaConfig(**COMMON, intermediate_size=INNER.get(folder, 96))
    dtype = DTYPES.get(folder, torch.bfloat16)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tensors, values, plain = {}, {}, {}
    for name, tensor in model.state_dict().items():
        random = ((1.0 if "norm" in name else 0.0) + 0.3 * torch.randn_like(tensor)).to(dtype)
        if name.endswith("_proj.weight"):
            parts, values[name] = quantized(folder, name, random)
            tensors |= parts
        else:
            tensors[name] = plain[name] = random
    if folder == "nvfp4":
        tensors |= {f"model.layers.0.self_attn.{part}_proj.{part}_scale": torch.tensor(1.0) for part in "kv"}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors", metadata={"format": "pt"})
    described, separate = describe(folder, list(values))
    settings = config.to_dict() | {"architectures": ["LlamaForCausalLM"], "dtype": str(dtype).removeprefix("torch.")}
    if described:
        settings["quantization_config"] = described
    (path / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    if separate:
        (path / "hf_quant_config.json").write_text(json.dumps(separate, indent=2) + "\n")
    model.load_state_dict({name: tensor.to(torch.float32) for name, tensor in (plain | values).items()})
    ids, mask = torch.randint(0, 48, (2, 9)), torch.ones(2, 9, dtype=torch.int64)
    mask[1, 6:] = 0
    golden = {"in/input_ids": ids, "in/attention_mask": mask, "out/logits": model(input_ids=ids, attention_mask=mask).logits}
    save_file(golden | {name: tensor.contiguous() for name, tensor in values.items()}, path / "golden.safetensors")


for folder in ("nf4", "fp4", "int8", "nvfp4", "mixed"):
    write(folder)
