"""Write tests/golden/families.json: the weights of families without a graph, as transformers describes them.

For each `model_type`: the model class, its tied weights, and the names of its matrices by the module that contains
them. Layers with equal names except for their number are listed once.
"""

import json
import logging
import re

import torch
import transformers
from transformers.models.auto import modeling_auto as auto

from lib import GOLDEN

TYPES = (
    "albert audio-spectrogram-transformer bamba bart beit bloom camembert codegen ctrl decision_transformer "
    "deepseek_v32 deit dinov2_with_registers electra ernie4_5_moe falcon falcon_h1 falcon_mamba flaubert gemma3 "
    "gpt_bigcode gptj ijepa imagegpt jamba jetmoe kimi_linear lfm2_moe llama4 m2m_100 mamba marian mbart minimax "
    "mistral3 mpt olmo olmoe openai-gpt pegasus phimoe qwen2_5_vl qwen2_vl qwen3_5 qwen3_5_moe qwen3_vl qwen3_vl_moe "
    "rwkv segformer vit_mae vit_msn vivit xlm xlnet"
).split()
MULTIMODAL = [auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES]
MAPPINGS = [
    auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    auto.MODEL_FOR_PRETRAINING_MAPPING_NAMES,
    auto.MODEL_FOR_CAUSAL_IMAGE_MODELING_MAPPING_NAMES,
    auto.MODEL_MAPPING_NAMES,
]
DEPTHS = ["num_hidden_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers", "depth"]


def model(name):
    config = transformers.AutoConfig.for_model(name)
    parts = [config, *(getattr(config, key) for key in ("text_config", "vision_config") if hasattr(config, key))]
    for part in parts:
        for key in DEPTHS:
            # Hybrid models have layers of each kind among the first five.
            if isinstance(getattr(part, key, None), int):
                setattr(part, key, min(getattr(part, key), 5))
        if name == "lfm2_moe":  # without a default
            part.layer_types = ["conv", "full_attention", "conv", "full_attention", "conv"]
    mappings = (MULTIMODAL if len(parts) > 1 else []) + MAPPINGS
    named = next(mapping[name] for mapping in mappings if name in mapping)
    with torch.device("meta"):
        return getattr(transformers, named if isinstance(named, str) else named[0])(config)


def described(name):
    built = model(name)
    head = built.get_output_embeddings()
    groups = {"tables": [], "heads": [], "routers": [], "others": []}
    seen = set()
    for path, parameter in built.named_parameters(remove_duplicate=False):
        pattern = re.sub(r"\.\d+\.", ".N.", path)
        if parameter.dim() != 2 or not path.endswith(".weight") or pattern in seen:
            continue
        seen.add(pattern)
        module = built.get_submodule(path.removesuffix(".weight"))
        if module is head:
            group = "heads"
        elif isinstance(module, torch.nn.Embedding):
            group = "tables"
        elif "router" in type(module).__name__.lower() or ".router." in path or path.endswith("shared_expert_gate.weight"):
            group = "routers"
        else:
            group = "others"
        groups[group].append(path)
    tied = built._tied_weights_keys or {}
    ties = [[alias, original] for alias, original in tied.items() if alias.endswith(".weight") and alias in groups["heads"]]
    return {"model_type": name, "class": type(built).__name__, "tied": ties, **groups}


def main():
    logging.disable(logging.WARNING)
    head = {"made_by": "scripts/goldens families", "versions": {"transformers": transformers.__version__}}
    families = ",\n".join("    " + json.dumps(described(name)) for name in TYPES)
    text = json.dumps(head, indent=2)[:-2] + ',\n  "families": [\n' + families + "\n  ]\n}\n"
    (GOLDEN / "families.json").write_text(text)


main()
