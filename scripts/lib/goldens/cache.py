"""Write tests/golden/cache.safetensors: an 8-bit KV cache, with the scales and the rounding of
compressed-tensors.

Small models of tests/golden/models run on a few tokens. Scales are those that llm-compressor stores: the range
of keys (after the rotary embedding) and of values over all samples, converted to a scale by
`calculate_qparams`. Outputs are those of a model that rounds both.
"""



import torch
import transformers
from compressed_tensors.modeling import register_key_hook, register_value_hook
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, apply_quantization_config
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file

from lib import GOLDEN

MODELS = ["llama-grouped-tied", "qwen3"]
FORMATS = {"fp8": "float", "int8": "int"}

ids = torch.randint(1, 48, (3, 11), generator=torch.Generator().manual_seed(3))
stored = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@torch.no_grad()
def make(name, kind, prefix, strategy="tensor"):
    model = transformers.AutoModelForCausalLM.from_pretrained(GOLDEN / "models" / name, dtype=torch.float32).eval()
    arguments = QuantizationArgs(num_bits=8, type=kind, strategy=strategy, symmetric=True, dynamic=False)
    apply_quantization_config(model, QuantizationConfig(config_groups={}, kv_cache_scheme=arguments))
    attentions = {module: part for module, part in model.named_modules() if module.endswith("self_attn")}
    seen, hooks = {}, []

    def see(name):
        def hook(_module, tensor):
            seen.setdefault(name, []).append(tensor)

        return hook

    for module, part in attentions.items():
        part.quantization_enabled = False
        hooks += [register_key_hook(part, see(f"{module}.k_scale")), register_value_hook(part, see(f"{module}.v_scale"))]
    model(**{key: stored[key] for key in ("input_ids", "attention_mask")})
    for hook in hooks:
        hook.remove()
    for module, part in attentions.items():
        part.quantization_enabled = True
        for which in ("k_scale", "v_scale"):
            # [batch, heads, tokens, size]
            values = torch.cat(seen[f"{module}.{which}"])
            if strategy == "tensor":
                scale, _ = calculate_qparams(values.min(), values.max(), arguments)
                assert getattr(part, which).shape == (1,), getattr(part, which).shape
            else:
                # With the exact range, the largest value of a head is halfway between two integers, and the last
                # bit of a sum decides.
                scale, _ = calculate_qparams(1.01 * values.amin((0, 2, 3)), 1.01 * values.amax((0, 2, 3)), arguments)
                assert getattr(part, which).shape == (values.shape[1], 1, 1), getattr(part, which).shape
            getattr(part, which).data.copy_(scale.reshape(getattr(part, which).shape))
            stored[f"{prefix}/{module}.{which}"] = getattr(part, which).data.clone()
    stored[f"{prefix}/logits"] = model(**{key: stored[key] for key in ("input_ids", "attention_mask")}).logits.contiguous()


for name in MODELS:
    for format, kind in FORMATS.items():
        make(name, kind, f"{name}/{format}")
        make(name, kind, f"{name}/{format}-head", "attn_head")
save_file(stored, GOLDEN / "cache.safetensors")
