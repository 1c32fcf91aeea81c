"""Write tests/golden/config-keys.json: the effect of each key of transformers' configurations on the models of
tests/golden/models.

    scripts/goldens keys [TEXT…]      all models, or those whose name contains one of the texts; others are unchanged

For a base model and heads of every family, each key of its configuration in transformers 5 and in transformers
4, and a few more, gets another value, and each key of the model's config.json is removed. The result is three
sums of each output, or "fails" if the class rejects the value or a weight is missing or does not fit. `same`
lists the keys, with their other value, without an effect, and `beyond` those that the class does not define.
Removing a key that is not listed has no effect either.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from lib import GOLDEN, SCRIPTS, venv

OLD = ["transformers==4.57.6", "huggingface_hub<1", "tokenizers<0.23", "requests", "urllib3", "idna", "certifi", "charset-normalizer"]
MODELS = [
    ("bert", "BertModel"),
    ("bert-masked-lm", "BertForMaskedLM"),
    ("bert-masked-lm", "BertLMHeadModel"),
    ("bert-sequence-classification", "BertForSequenceClassification"),
    ("roberta", "RobertaModel"),
    ("roberta-masked-lm", "RobertaForMaskedLM"),
    ("roberta-masked-lm", "RobertaForCausalLM"),
    ("xlm-roberta", "XLMRobertaModel"),
    ("distilbert", "DistilBertModel"),
    ("distilbert-sequence-classification", "DistilBertForSequenceClassification"),
    ("mpnet", "MPNetModel"),
    ("mpnet-sequence-classification", "MPNetForSequenceClassification"),
    ("mpnet-masked-lm", "MPNetForMaskedLM"),
    ("modernbert", "ModernBertModel"),
    ("modernbert-masked-lm", "ModernBertForMaskedLM"),
    ("modernbert-sequence-classification", "ModernBertForSequenceClassification"),
    ("deberta", "DebertaV2Model"),
    ("deberta-sequence-classification", "DebertaV2ForSequenceClassification"),
    ("deberta-masked-lm", "DebertaV2ForMaskedLM"),
    ("deberta-masked-lm-own-head", "DebertaV2ForMaskedLM"),
    ("t5-encoder", "T5EncoderModel"),
    ("t5-encoder-gated", "T5EncoderModel"),
    ("mt5-encoder", "MT5EncoderModel"),
    ("t5", "T5ForConditionalGeneration"),
    ("t5-gated", "T5ForConditionalGeneration"),
    ("t5-headless", "T5Model"),
    ("mt5", "MT5ForConditionalGeneration"),
    ("whisper", "WhisperForConditionalGeneration"),
    ("whisper-headless", "WhisperModel"),
    ("gpt2", "GPT2LMHeadModel"),
    ("llama", "LlamaForCausalLM"),
    ("llama-biases", "LlamaForCausalLM"),
    ("llama-grouped-tied", "LlamaForCausalLM"),
    ("mistral", "MistralForCausalLM"),
    ("qwen2", "Qwen2ForCausalLM"),
    ("qwen2-sliding", "Qwen2ForCausalLM"),
    ("qwen3", "Qwen3ForCausalLM"),
    ("gpt-neox", "GPTNeoXForCausalLM"),
    ("opt", "OPTForCausalLM"),
    ("opt-narrow-embeddings", "OPTForCausalLM"),
    ("phi3", "Phi3ForCausalLM"),
    ("phi3-tied-partial", "Phi3ForCausalLM"),
    ("olmo2", "Olmo2ForCausalLM"),
    ("olmo3", "Olmo3ForCausalLM"),
    ("glm", "GlmForCausalLM"),
    ("glm4", "Glm4ForCausalLM"),
    ("ernie4_5", "Ernie4_5ForCausalLM"),
    ("hunyuan", "HunYuanDenseV1ForCausalLM"),
    ("hunyuan-alpha", "HunYuanDenseV1ForCausalLM"),
    ("starcoder2", "Starcoder2ForCausalLM"),
    ("stablelm", "StableLmForCausalLM"),
    ("stablelm-parallel", "StableLmForCausalLM"),
    ("phi", "PhiForCausalLM"),
    ("phi-head-norms", "PhiForCausalLM"),
    ("cohere", "CohereForCausalLM"),
    ("cohere2", "Cohere2ForCausalLM"),
    ("smollm3", "SmolLM3ForCausalLM"),
    ("smollm3-sliding", "SmolLM3ForCausalLM"),
    ("granite", "GraniteForCausalLM"),
    ("granite-biases", "GraniteForCausalLM"),
    ("granite-moe", "GraniteMoeForCausalLM"),
    ("granite-moe-shared", "GraniteMoeSharedForCausalLM"),
    ("granite-hybrid", "GraniteMoeHybridForCausalLM"),
    ("granite-hybrid-dense", "GraniteMoeHybridForCausalLM"),
    ("mamba2", "Mamba2ForCausalLM"),
    ("mamba2-tied", "Mamba2ForCausalLM"),
    ("nemotron-h", "NemotronHForCausalLM"),
    ("nemotron-h-latent", "NemotronHForCausalLM"),
    ("lfm2", "Lfm2ForCausalLM"),
    ("lfm2-biases", "Lfm2ForCausalLM"),
    ("gemma", "GemmaForCausalLM"),
    ("gemma2", "Gemma2ForCausalLM"),
    ("gemma3", "Gemma3ForCausalLM"),
    ("gemma3-capped", "Gemma3ForCausalLM"),
    ("mixtral", "MixtralForCausalLM"),
    ("qwen2-moe", "Qwen2MoeForCausalLM"),
    ("qwen3-moe", "Qwen3MoeForCausalLM"),
    ("qwen3-next", "Qwen3NextForCausalLM"),
    ("qwen3_5", "Qwen3_5ForCausalLM"),
    ("qwen3_5-moe", "Qwen3_5MoeForCausalLM"),
    ("deepseek-v2-lite", "DeepseekV2ForCausalLM"),
    ("deepseek-v2", "DeepseekV2ForCausalLM"),
    ("deepseek-v3", "DeepseekV3ForCausalLM"),
    ("deepseek-v3-halves", "DeepseekV3ForCausalLM"),
    ("glm4-moe-lite", "Glm4MoeLiteForCausalLM"),
    ("glm4-moe", "Glm4MoeForCausalLM"),
    ("glm4-moe-plain", "Glm4MoeForCausalLM"),
    ("minimax-m2", "MiniMaxM2ForCausalLM"),
    ("gpt-oss", "GptOssForCausalLM"),
    ("ministral3", "Ministral3ForCausalLM"),
    ("ministral3-window", "Ministral3ForCausalLM"),
    ("llama4", "Llama4ForCausalLM"),
    ("llama4-plain", "Llama4ForCausalLM"),
    ("vit", "ViTModel"),
    ("vit-image-classification", "ViTForImageClassification"),
    ("swin", "SwinModel"),
    ("swin-image-classification", "SwinForImageClassification"),
    ("dinov2", "Dinov2Model"),
    ("dinov2-gated", "Dinov2Model"),
    ("dinov2-image-classification", "Dinov2ForImageClassification"),
    ("clip", "CLIPModel"),
    ("clip-text", "CLIPTextModelWithProjection"),
    ("clip-vision", "CLIPVisionModel"),
    ("siglip", "SiglipModel"),
    ("siglip-text", "SiglipTextModel"),
    ("siglip-vision", "SiglipVisionModel"),
    ("qwen2-vl-vision", "Qwen2VisionTransformerPretrainedModel"),
    ("qwen2_5-vl-vision", "Qwen2_5_VisionTransformerPretrainedModel"),
    ("qwen3-vl-vision", "Qwen3VLVisionModel"),
    ("convnext", "ConvNextModel"),
    ("convnext-image-classification", "ConvNextForImageClassification"),
    ("efficientnet", "EfficientNetModel"),
    ("efficientnet-image-classification", "EfficientNetForImageClassification"),
    ("resnet-basic", "ResNetForImageClassification"),
]
# Keys that no version of the classes defines, but that some code reads.
MORE = [
    "auto_map",
    "is_causal",
    "partial_rotary_factor",
    "per_layer_config",
    "position_embedding_type",
    "sliding_window",
]
# Keys for the returned values; some classes reject other values only in combination.
UNTRIED = ["num_return_sequences", "out_features", "out_indices", "return_dict", "torchscript"]
# Other values of keys for which none can be derived from the default.
OTHER = {
    "classifier_dropout": 0.3,
    "auto_map": {"AutoModel": "modeling.Other"},
    "begin_suppress_tokens": [5],
    "suppress_tokens": [5, 6],
    "head_dim": 4,
    "hidden_act": "relu",
    "hidden_activation": "relu",
    "classifier_activation": "relu",
    "classifier_pooling": "cls",
    "global_rope_theta": 20.0,
    "local_rope_theta": 1000.0,
    "global_attn_every_n_layers": 2,
    "local_attention": 6,
    "layerscale_value": 0.5,
    "layer_scale_init_value": 1.0,
    "pooling_type": "max",
    "text_config_dict": {"hidden_act": "relu"},
    "vision_config_dict": {"hidden_act": "relu"},
    "activation": "relu",
    "feed_forward_proj": "gated-silu",
    "dense_act_fn": "silu",
    "activation_function": "relu",
    "intermediate_size": 20,
    "is_causal": False,
    "layer_type": "bottleneck",
    "layer_types": ["full_attention", "full_attention"],
    "max_window_layers": 0,
    "n_inner": 20,
    "num_key_value_heads": 1,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "partial_rotary_factor": 0.5,
    "per_layer_config": {"0": {"hidden_act": "relu"}},
    "pooler_act": "relu",
    "pooler_output_size": 12,
    "position_embedding_type": "relative_key",
    "problem_type": "regression",
    "pruned_heads": {"0": [1]},
    "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50.0},
    "rope_scaling": {"type": "linear", "factor": 4.0},
    "rope_theta": 50.0,
    "sliding_window": 3,
    "task_specific_params": {"summary": {"max_length": 3}},
    "torch_dtype": "float32",
    "dtype": "float32",
}
# Keys that identify the model or the version.
FIXED = ("model_type", "architectures", "id2label", "label2id", "transformers_version")


# Models whose weight names have a prefix in transformers 4 but not in transformers 5.
NEWER = {"clip-vision": "vision_model.", "siglip-text": "text_model.", "siglip-vision": "vision_model."}
# Models with features that transformers 4 does not support: attention types per layer; a head into whose
# first layer it copies the embeddings; image positions, of which it has one too many; unscaled tied
# embeddings; a scale of the attention scores; entire families; another clamp of experts; biases of attention.
UNKNOWN_TO_4 = ("modernbert-sequence-classification", "deberta-masked-lm-own-head", "swin-image-classification", "t5-gated", "mt5", "deepseek-v2", "minimax-m2", "glm4-moe-lite", "gpt-oss", "qwen3_5", "qwen3_5-moe", "granite-hybrid-dense", "mamba2", "nemotron-h", "nemotron-h-latent", "llama4-plain", "ministral3", "ministral3-window", "qwen2-vl-vision", "qwen2_5-vl-vision", "qwen3-vl-vision")
# Buffers that transformers 4 stores although they depend only on sizes.
STORED_BY_4 = "relative_position_index"
# Nested configurations: their keys follow a dot.
TOWERS = ("text_config", "vision_config")


def flat(config):
    found = {}
    for key, value in config.items():
        inner = value if key in TOWERS and isinstance(value, dict) else None
        found |= {key: value} if inner is None else {f"{key}.{name}": x for name, x in inner.items()}
    return found


def put(config, key, value):
    group, dot, name = key.partition(".")
    return {**config, group: {**config[group], name: value} if dot else value}


def dropped(config, key):
    group, dot, name = key.partition(".")
    if dot:
        return {**config, group: dropped(config[group], name)}
    return {k: v for k, v in config.items() if k != key}


def changed(key, value):
    key = key.rpartition(".")[2]
    if key in OTHER:
        return OTHER[key]
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case float():
            return value + 0.5
        case None:
            return 3 if key.endswith(("_id", "_size", "_length")) else "other"
        case str():
            return "other"
        case list():
            return value[:-1]
        case dict():
            return {"other": 1}


def numbers(tensor):
    """Three sums over the first sample, which detect differences."""
    flat = tensor[0].double().flatten()
    places = torch.arange(len(flat), dtype=torch.double)
    return [round((flat * torch.cos(pitch * places)).sum().item(), 5) for pitch in (0.7, 1.0, 2.3)]


def compute(kind, config, tensors, inputs):
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        try:
            loaded = kind.config_class.from_pretrained(folder)
            how = {"attn_implementation": "eager", "output_loading_info": True}
            state = {key: x.clone() for key, x in tensors.items()}
            model, info = kind.from_pretrained(None, config=loaded, state_dict=state, **how)
            if info["missing_keys"] or info.get("mismatched_keys"):
                return "fails"
            outputs = model.eval()(**inputs)
            names = ("logits", "last_hidden_state", "pooler_output")
            names += ("logits_per_image", "logits_per_text", "text_embeds", "image_embeds", *DEEPSTACK)
            return {name: numbers(outputs[name]) for name in names if name in outputs and outputs[name] is not None}
        except Exception:
            return "fails"


def walk():
    """The results of the current version of transformers."""
    found = []
    for name, architecture in MODELS:
        if (ONLY and not any(text in name for text in ONLY)) or (OLDER and name in UNKNOWN_TO_4):
            continue
        kind, folder = model_class(architecture), GOLDEN / "models" / name
        older = folder / "config-4.json"
        config = json.loads((older if OLDER and older.exists() else folder / "config.json").read_text())
        config["architectures"] = [architecture]
        golden, tensors = load_file(folder / "golden.safetensors"), load_file(folder / "model.safetensors")
        inputs = {key.removeprefix("in/"): x for key, x in golden.items() if key.startswith("in/")}
        if OLDER and name in NEWER:
            tensors = {NEWER[name] + key: x for key, x in tensors.items()}
        if OLDER:
            made = kind(kind.config_class.from_dict(config)).state_dict()
            tensors |= {key: x for key, x in made.items() if key.endswith(STORED_BY_4)}
        usual = compute(kind, config, tensors, inputs)
        if usual == "fails":
            sys.exit(f"{name}: cannot be run unchanged")
        given = flat(config)
        keys = {**{key: None for key in MORE}, **flat(kind.config_class().to_dict()), **given}

        def answer(fields):
            outputs = compute(kind, fields, tensors, inputs)
            if outputs == "fails":
                return outputs
            if outputs.keys() != usual.keys():
                return outputs
            gap = max(abs(a - b) for output in usual for a, b in zip(outputs[output], usual[output]))
            if 1e-4 < gap < 16e-4:
                sys.exit(f"{name}: a difference of {gap} is too small to be significant")
            return outputs if gap > 1e-4 else None

        same, other, absent = {}, {}, {}
        for key in sorted(key for key in keys if key.rpartition(".")[2] not in FIXED):
            value = changed(key, given.get(key, keys[key]))
            untried = key.rpartition(".")[2] in UNTRIED
            outputs = None if untried else answer(put(config, key, value))
            if outputs is None:
                same[key] = value
            else:
                other[key] = [value, outputs]
            # The default padding token is outside the vocabulary of these models.
            if key in given and not untried and key != "pad_token_id":
                outputs = answer(dropped(config, key))
                if outputs is not None:
                    absent[key] = outputs
        beyond = sorted(set(MORE) - kind.config_class().to_dict().keys() - config.keys())
        answers = {"beyond": beyond, "usual": usual, "same": same, "other": other, "absent": absent}
        found.append({"model": name, "class": architecture, **answers})
    return found


def older():
    """The same in transformers 4, whose packages precede the others in the path."""
    folder = venv.cache() / "transformers-4"
    if not folder.exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", f"--target={folder}", *OLD]
        subprocess.run(command, check=True, stdout=sys.stderr)
    environment = {**os.environ, "PYTHONPATH": str(folder), "GOLDENS_KEYS": "4"}
    run = subprocess.run([sys.executable, SCRIPTS / "goldens", "keys", *ONLY], env=environment, check=True, stdout=subprocess.PIPE)
    return json.loads(run.stdout)


ONLY = sys.argv[1:]
OLDER = os.environ.get("GOLDENS_KEYS") == "4"
import torch
import transformers
from safetensors.torch import load_file

from lib.towers import DEEPSTACK, model_class

torch.set_num_threads(1)
torch.set_grad_enabled(False)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

if OLDER:
    print(json.dumps(walk()))
else:
    found = {"5": walk(), "4": older()}
    table = GOLDEN / "config-keys.json"
    kept = json.loads(table.read_text()) if ONLY else []
    lines = []
    for version, models in found.items():
        made = {(model["model"], model["class"]): {"transformers": version, **model} for model in models}
        made |= {(old["model"], old["class"]): old for old in kept if old["transformers"] == version and (old["model"], old["class"]) not in made}
        lines += [json.dumps(made[model]) for model in MODELS if model in made]
    table.write_text("[\n" + ",\n".join(lines) + "\n]\n")
