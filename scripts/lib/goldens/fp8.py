"""Write tests/golden/fp8: tiny models with FP8 weights (`quant_method: fp8`), and their outputs by transformers.

    scripts/goldens fp8

Each folder contains `model.safetensors`, `config.json`, and `golden.safetensors`: token ids and mask, the logits of
transformers in float32 for the dequantized weights, and these weights.

- `blocks`: Qwen3 with one float32 scale per block. transformers dequantizes the folder itself, to the same values.
- `ragged`: Qwen3-MoE whose rows and columns are not multiples of the block size, which transformers does not
  dequantize when it loads a folder, with bfloat16 scales.
- `tensor`: Llama with one bfloat16 scale per matrix, and static scales of activations.
- `stacked`: Qwen3-MoE with the experts and their scales in one tensor each.
"""

import json

from lib import GOLDEN

import torch
import transformers
from safetensors.torch import save_file
from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

FOLDER = GOLDEN / "fp8"
FP8 = torch.float8_e4m3fn
BLOCK = [32, 32]
COMMON = {
    "vocab_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}
MIXTURE = COMMON | {"num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1}
MODELS = {
    "blocks": transformers.Qwen3Config(**COMMON, hidden_size=64, intermediate_size=96),
    "ragged": transformers.Qwen3MoeConfig(**MIXTURE, hidden_size=72, intermediate_size=80, moe_intermediate_size=40),
    "tensor": transformers.LlamaConfig(**COMMON, hidden_size=64, intermediate_size=96),
    "stacked": transformers.Qwen3MoeConfig(**MIXTURE, hidden_size=72, intermediate_size=80, moe_intermediate_size=40),
}
SCALES = {"ragged": torch.bfloat16, "tensor": torch.bfloat16}


def is_quantized(name):
    return name.endswith("_proj.weight") or name.endswith(("experts.gate_up_proj", "experts.down_proj"))


def quantized(tensor, block, dtype):
    """Random codes, and scales of a dtype that have the size of a matrix of weights near 0.3."""
    codes = (100 * torch.randn(tensor.shape)).to(FP8)
    sizes = [] if block is None else [*tensor.shape[:-2], *(-(-size // side) for size, side in zip(tensor.shape[-2:], block))]
    return codes, (0.003 * (0.5 + torch.rand(sizes))).to(dtype)


def separate(tensors):
    """Experts in separate tensors, as published."""
    found = {}
    for name, tensor in tensors.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            for expert, matrix in enumerate(tensor):
                base = name.rsplit(".", 1)[0] + f".{expert}"
                parts = zip(("gate_proj", "up_proj"), matrix.chunk(2)) if "gate_up" in name else [("down_proj", matrix)]
                found |= {f"{base}.{part}.weight": values.contiguous() for part, values in parts}
        else:
            found[name] = tensor
    return found


def stacked(tensors):
    """The parameters of transformers from experts in separate tensors."""
    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name or tensor.ndim == 3}
    for layer in range(COMMON["num_hidden_layers"]):
        base = f"model.layers.{layer}.mlp.experts"
        of = lambda part: [tensors[f"{base}.{expert}.{part}.weight"] for expert in range(MIXTURE["num_experts"])]
        if f"{base}.0.down_proj.weight" in tensors:
            pairs = zip(of("gate_proj"), of("up_proj"))
            found |= {f"{base}.gate_up_proj": torch.stack([torch.cat(pair) for pair in pairs]), f"{base}.down_proj": torch.stack(of("down_proj"))}
    return found


@torch.no_grad()
def write(name, config):
    torch.manual_seed(0)
    folder = FOLDER / name
    folder.mkdir(parents=True, exist_ok=True)
    block = None if name == "tensor" else BLOCK
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    state = model.state_dict()
    state = separate(state) if name == "ragged" else state
    tensors, values = {}, {}
    for key, tensor in state.items():
        if is_quantized(key):
            codes, scales = quantized(tensor, block, SCALES.get(name, torch.float32))
            tensors |= {key: codes, f"{key}_scale_inv": scales}
            if name == "tensor":
                tensors[key.removesuffix("weight") + "activation_scale"] = torch.tensor(0.02, dtype=torch.bfloat16)
            values[key] = _dequantize_fp8_weight(codes, scales.to(torch.float32), block, torch.float32).to(torch.bfloat16)
        else:
            tensors[key] = ((1.0 if "norm" in key else 0.0) + 0.3 * torch.randn_like(tensor)).to(torch.bfloat16)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    exempt = ["lm_head"] + ([f"model.layers.{layer}.mlp.gate" for layer in range(COMMON["num_hidden_layers"])] if "Moe" in type(config).__name__ else [])
    quantization = {
        "activation_scheme": "static" if name == "tensor" else "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": exempt,
        "quant_method": "fp8",
        "weight_block_size": block,
    }
    settings = config.to_dict() | {"architectures": [type(model).__name__], "dtype": "bfloat16", "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    floats = {key: tensor.to(torch.float32) for key, tensor in (tensors | values).items() if not key.endswith("scale_inv")}
    model.load_state_dict(stacked({key: floats[key] for key in state}))
    if name in ("blocks", "tensor"):
        dequantize = transformers.FineGrainedFP8Config(dequantize=True)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=dequantize)
        for key, tensor in values.items():
            torch.testing.assert_close(loaded.state_dict()[key], tensor, rtol=0, atol=0)
    ids, mask = torch.randint(0, 48, (2, 9)), torch.ones(2, 9, dtype=torch.int64)
    mask[1, 6:] = 0
    logits = model(input_ids=ids, attention_mask=mask).logits
    golden = {"in/input_ids": ids, "in/attention_mask": mask, "out/logits": logits}
    save_file(golden | {key: tensor.contiguous() for key, tensor in values.items()}, folder / "golden.safetensors")


for name, config in MODELS.items():
    write(name, config)
