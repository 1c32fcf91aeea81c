"""Write tests/golden/mxfp4: a tiny gpt-oss with experts in MXFP4, as published, and its outputs by transformers.

    scripts/goldens mxfp4

- `model.safetensors`, `config.json`: the folder. The experts have random blocks and scales; other tensors are
  bfloat16.
- `golden.safetensors`: token ids and mask, the logits of transformers in float32, and the dequantized experts.
"""

import json

from lib import GOLDEN

import torch
import transformers
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

FOLDER = GOLDEN / "mxfp4"
HIDDEN, INNER, EXPERTS = 64, 32, 4
CONFIG = transformers.GptOssConfig(
    vocab_size=48,
    hidden_size=HIDDEN,
    intermediate_size=INNER,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    num_local_experts=EXPERTS,
    num_experts_per_tok=2,
    sliding_window=4,
    max_position_embeddings=32,
    tie_word_embeddings=False,
    rope_parameters={"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 8, "truncate": False, "beta_fast": 32.0, "beta_slow": 1.0},
)
NOT_QUANTIZED = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


def packed(rows, width):
    """Random codes and scales near 2^-5 of all experts, for projections with this many outputs and inputs."""
    blocks = torch.randint(0, 256, (EXPERTS, rows, width // 32, 16), dtype=torch.uint8)
    return blocks, torch.randint(120, 124, (EXPERTS, rows, width // 32), dtype=torch.uint8)


@torch.no_grad()
def main():
    torch.manual_seed(0)
    FOLDER.mkdir(exist_ok=True)
    model = transformers.GptOssForCausalLM(CONFIG).eval()
    tensors, experts = {}, {}
    for name, tensor in model.state_dict().items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            blocks, scales = packed(*((2 * INNER, HIDDEN) if "gate_up" in name else (HIDDEN, INNER)))
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            experts[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
        else:
            around = 1.0 if "norm" in name else 0.0
            tensors[name] = (around + 0.3 * torch.randn_like(tensor)).to(torch.bfloat16)
    save_file(tensors, FOLDER / "model.safetensors", metadata={"format": "pt"})
    config = CONFIG.to_dict() | {"architectures": ["GptOssForCausalLM"], "dtype": "bfloat16"}
    config["quantization_config"] = {"modules_to_not_convert": NOT_QUANTIZED, "quant_method": "mxfp4"}
    (FOLDER / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    quantization = transformers.Mxfp4Config(dequantize=True)
    options = {"dtype": torch.float32, "attn_implementation": "eager", "quantization_config": quantization}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, **options).eval()
    for name, tensor in experts.items():
        torch.testing.assert_close(loaded.state_dict()[name], tensor, rtol=0, atol=0)
    ids, mask = torch.randint(0, 48, (2, 9)), torch.ones(2, 9, dtype=torch.int64)
    mask[1, 6:] = 0
    logits = loaded(input_ids=ids, attention_mask=mask).logits
    save_file({"in/input_ids": ids, "in/attention_mask": mask, "out/logits": logits, **experts}, FOLDER / "golden.safetensors")


main()
