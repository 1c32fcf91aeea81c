"""Write tests/golden/models: tiny models of every family with random weights, and their outputs in PyTorch.

    scripts/goldens models [TEXT…]      all models, or those whose name contains one of the texts

A folder has config.json, model.safetensors and golden.safetensors with "in/…" and "out/…". Llama-like folders
have config-4.json too: the same configuration in the notation of transformers 4, as in most published files.
Rows of a batch have different lengths and are padded on the right; outputs at padding are stored but undefined.

A folder is accepted only if a wrong implementation would fail on it: every stored tensor, and every option that a
variant tests, must change an output by several times the tolerance of the tests.
"""

import copy
import functools
import json
import math
import random
import shutil
import sys

import torch
import transformers
from safetensors.torch import load_file, save_file
from sentence_transformers.base.modules import Dense, Normalize
from sentence_transformers.sentence_transformer.modules import LayerNorm, Pooling
from torch import nn
from torchvision.models.resnet import BasicBlock, Bottleneck
from transformers.pytorch_utils import Conv1D

from lib import GOLDEN, towers
from lib.narrow import (
    EFFICIENTNET_ROWS,
    MOBILENET_V3_ROWS,
    NarrowResNet,
    narrow_efficientnet,
    narrow_mobilenet,
    narrow_mobilenet_v3,
)

FOLDER = GOLDEN / "models"
CLEAR = 3e-4  # three times the tolerance of the tests
SAME = 2e-5  # tolerance between two ways to compute the same value
ONLY = sys.argv[1:]

torch.set_num_threads(1)
torch.set_grad_enabled(False)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def check(condition, text):
    if not condition:
        sys.exit(text)


# Weights


def normal(rng, shape, std, mean=0.0):
    return torch.tensor([rng.gauss(mean, std) for _ in range(math.prod(shape))]).reshape(shape)


# Classes of norms whose weights are offsets from 1.
CENTERED = ("Gemma", "Qwen3NextRMSNorm", "Qwen3_5RMSNorm", "Qwen3_5MoeRMSNorm")


def random_tensor(rng, module, name, shape):
    """Values for which no layer is close to the identity, and no softmax close to uniform or one-hot."""
    match name:
        case "running_var":
            return torch.tensor([rng.uniform(0.5, 2) for _ in range(math.prod(shape))])
        case "num_batches_tracked":
            return torch.tensor(rng.randint(100, 10_000))
        case "bias" | "running_mean":
            return normal(rng, shape, 0.3)
        case "cls_token" | "position_embeddings" | "probe" | "class_embedding" | "relative_position_bias_table":
            return normal(rng, shape, 0.6)
    if name == "e_score_correction_bias":
        return normal(rng, shape, 0.1)
    if name == "A_log":
        return normal(rng, shape, 0.5, mean=-1.5)  # states that last for several tokens
    if name in ("logit_scale", "logit_bias"):
        return normal(rng, shape, 0.3, mean=1.0)
    if isinstance(module, nn.Embedding):
        return normal(rng, shape, 0.6)
    if len(shape) == 1:
        mean = 0 if type(module).__name__.startswith(CENTERED) else 1
        return normal(rng, shape, 0.25, mean=mean).clamp(mean - 0.6, mean + 0.6)
    # Three axes belong to experts, except for convolutions.
    convolution = isinstance(module, (nn.Conv1d, nn.Conv2d))
    inputs = shape[0] if isinstance(module, Conv1D) else shape[2] if len(shape) == 3 and not convolution else math.prod(shape[1:])
    return normal(rng, shape, (1.4 if convolution else 2) / math.sqrt(inputs))


def randomise(model, seed):
    """Initializes in place; each tensor has a separate generator."""
    for path, module in model.named_modules():
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if name in module._non_persistent_buffers_set or name == "n_points_scale":  # a constant
                continue
            rng = random.Random(f"{seed}/{path}/{name}")
            # The logits of boxes at the border of an image amplify rounding.
            tensor.copy_(random_tensor(rng, module, name, tensor.shape) * (0.5 if "bbox" in path else 1))
    return model.eval()


def forgotten(name, tensor, centered=False):
    """A replacement for the tensor, as if an implementation ignored it; for a matrix, a wrong one."""
    if name.endswith(("bias", "running_mean", "beta")):
        return torch.zeros_like(tensor)
    centered = centered and "norm" in name and not name.endswith("linear_attn.norm.weight")
    return torch.full_like(tensor, 0.0 if centered else 1.0) if tensor.dim() == 1 else -tensor


# A key bias adds one number to all scores of a query, unless a rotary embedding is applied.
WITHOUT_EFFECT = ("attention.self.key.bias", "attention.attention.key.bias", "attention.k_lin.bias", "attention.attn.k.bias")
WITHOUT_EFFECT += ("attention.self.pos_key_proj.bias",)


# Inputs and outputs


def tokens(seed, vocabulary=48, pad=0, lengths=(11, 7, 4), types=False):
    rng = random.Random(f"{seed}/tokens")
    regular = [token for token in range(vocabulary) if token != pad]
    width = max(lengths)
    batch = {
        "input_ids": [[rng.choice(regular) for _ in range(n)] + [pad] * (width - n) for n in lengths],
        "attention_mask": [[1] * n + [0] * (width - n) for n in lengths],
    }
    if types:
        batch["token_type_ids"] = [[0] * (n // 2) + [1] * (n - n // 2) + [0] * (width - n) for n in lengths]
    return {name: torch.tensor(rows) for name, rows in batch.items()}


def decoded(seed, samples=3, length=9, vocabulary=48):
    """Decoder tokens, without padding."""
    return {"decoder_input_ids": tokens(f"{seed}/decoder", vocabulary, lengths=(length,) * samples)["input_ids"]}


def images(seed, height, width, std=1.0):
    return {"pixel_values": normal(random.Random(f"{seed}/images"), (2, 3, height, width), std)}


def run(model, inputs):
    model = copy.deepcopy(model)  # dynamic RoPE stores the maximum length
    if not isinstance(model, transformers.PreTrainedModel):
        return {"logits": model(inputs["pixel_values"])}
    if model.can_generate():
        inputs = {**inputs, "use_cache": False}
    output = model(**inputs)
    found = {name: output[name] for name in OUTPUTS if output.get(name) is not None}
    if "pred_boxes" in found:
        # The states of the queries of a detector are not among the outputs of an export.
        del found["last_hidden_state"]
    return found


# The last ones belong to text and image towers.
OUTPUTS = ("logits", "last_hidden_state", "pooler_output", "pred_boxes")
OUTPUTS += ("logits_per_image", "logits_per_text", "text_embeds", "image_embeds", *towers.DEEPSTACK)


def per_token(name, inputs):
    masked = "attention_mask" in inputs and "decoder_input_ids" not in inputs
    return masked and name in ("logits", "last_hidden_state")


def real(name, tensor, inputs):
    """The outputs without those at padding."""
    return tensor[inputs["attention_mask"].bool()] if per_token(name, inputs) and tensor.dim() == 3 else tensor


def distance(a, b, inputs):
    assert a.keys() == b.keys()
    return max((real(name, a[name], inputs) - real(name, b[name], inputs)).abs().max().item() for name in a)


def row(i, inputs, outputs):
    """Only row i, without its padding."""
    if "attention_mask" not in inputs:
        return {name: x[i : i + 1] for name, x in inputs.items()}, {name: x[i : i + 1] for name, x in outputs.items()}
    end = inputs["attention_mask"][i].sum()

    def cut(name, x):
        return x[i : i + 1, :end] if x.dim() == 3 and per_token(name, inputs) else x[i : i + 1]

    def cut_input(name, x):
        return x[i : i + 1] if name == "decoder_input_ids" else x[i : i + 1, :end]

    return {name: cut_input(name, x) for name, x in inputs.items()}, {name: cut(name, x) for name, x in outputs.items()}


# One folder


def write_json(path, value):
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value, indent=2) + "\n")


def save_golden(path, inputs, outputs):
    tensors = {f"in/{name}": x for name, x in inputs.items()} | {f"out/{name}": x for name, x in outputs.items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def golden(name, folder, model, reload, inputs, *, against={}, compute=run, alone=True, unused=(), more={}):
    """Checks that wrong implementations would fail on a written folder, and stores the outputs.

    `reload` builds the model from other tensors. Each of `against` builds the model of a wrong implementation.
    `more` are additional inputs, each with a separate file.
    """
    outputs = compute(model, inputs)
    save_golden(folder / "golden.safetensors", inputs, outputs)
    for suffix, batch in more.items():
        save_golden(folder / f"golden-{suffix}.safetensors", batch, compute(model, batch))

    for key, tensor in outputs.items():
        check(tensor.isfinite().all() and tensor.abs().max() < 50, f"{name}: {key} is not finite or too large")
    for i in range(len(next(iter(inputs.values())))) if alone else ():
        single, expected = row(i, inputs, outputs)
        gap = distance(compute(model, single), expected, single)
        check(gap < SAME, f"{name}: row {i} without the batch differs by {gap}")
    tensors = load_file(folder / "model.safetensors")
    for key, tensor in tensors.items():
        if not tensor.is_floating_point() or key.endswith(WITHOUT_EFFECT) or any(part in key for part in unused):
            continue
        centered = getattr(getattr(model, "config", None), "model_type", "").startswith(("gemma", "qwen3_next", "qwen3_5"))
        result = compute(reload({**tensors, key: forgotten(key, tensor, centered)}), inputs)
        gap = distance(result, outputs, inputs)
        check(gap > CLEAR, f"{name}: ignoring {key} changes outputs only by {gap}")
    for label, other in against.items():
        gap = distance(compute(other(), inputs), outputs, inputs)
        check(gap > CLEAR, f"{name}: ignoring {label} changes outputs only by {gap}")

    # The similarity of images and texts depends on both.
    longest, expected = (inputs, outputs) if "logits_per_text" in outputs else row(0, inputs, outputs)
    longest = {key: x.double() if x.is_floating_point() else x for key, x in longest.items()}
    gap = distance(compute(copy.deepcopy(model).double(), longest), expected, longest)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"{name:36} {size:6} bytes, {gap:.0e} from f64", flush=True)


def fresh(name):
    """An empty folder, or None if the model is not selected."""
    if ONLY and not any(text in name for text in ONLY):
        return None
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def pretrained(name, kind, config, inputs, *, options={}, edit=None, overlook={}, files={}, modules={}, model_type=None, spell=None, **how):
    """A model of transformers.

    `options` are passed to its constructor, `edit` converts the tensors of the file to an older layout, and `spell` the
    values of config.json, `overlook` replaces
    fields of the configuration, `files` are additional files, and `modules` sentence-transformers modules by folder.
    `model_type` is that of a family with the same code.
    """
    if not (folder := fresh(name)):
        return
    randomise(kind(config, **options), name).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if edit:
        save_file(edit(load_file(folder / "model.safetensors")), folder / "model.safetensors", {"format": "pt"})
    if spell:
        write_json(folder / "config.json", spell(json.loads((folder / "config.json").read_text())))
    for path, module in modules.items():
        (folder / path).mkdir()
        randomise(module, f"{name}/{path}").save(str(folder / path), safe_serialization="bin" not in path)
    for path, value in files.items():
        write_json(folder / path, value)

    def load(path, **arguments):
        arguments |= {"attn_implementation": "eager", "output_loading_info": True, **options}
        if hasattr(getattr(config, "text_config", config), "num_experts_per_tok"):
            arguments["experts_implementation"] = "eager"  # the others do not support f64
        model, info = kind.from_pretrained(path, **arguments)
        check(not info["missing_keys"], f"{name}: missing {info['missing_keys']}")
        return model.eval()

    def reload(tensors, fields={}):
        changed = type(config)(**{**config.to_dict(), **fields})
        return load(None, config=changed, state_dict={key: x.clone() for key, x in tensors.items()})

    tensors = load_file(folder / "model.safetensors")
    against = {label: lambda fields=fields: reload(tensors, fields) for label, fields in overlook.items()}
    model = load(folder)
    golden(name, folder, model, reload, inputs, against={**against, **how.pop("against", {})}, **how)

    plain = json.loads((folder / "config.json").read_text())
    # Published files of Ministral 3 are newer, and older ones of vision towers have another `model_type`.
    if "rope_parameters" in plain and config.model_type not in ("ministral3", "qwen2_vl_vision", "qwen2_5_vl_vision", "qwen3_vl_vision"):
        write_json(folder / "config-4.json", old_spelling(plain))
        older = load(folder, config=type(config).from_json_file(folder / "config-4.json"))
        check(distance(run(older, inputs), run(model, inputs), inputs) == 0, f"{name}: config-4.json differs")
    for path in (folder / "config.json", folder / "config-4.json") if model_type else ():
        write_json(path, {**json.loads(path.read_text()), "model_type": model_type})


def old_spelling(config):
    rope = {**config.pop("rope_parameters")}
    old = {**config, "transformers_version": "4.44.0"}
    old["torch_dtype"] = old.pop("dtype")
    if config["model_type"] == "modernbert":
        for kind, key in {"full_attention": "global_rope_theta", "sliding_attention": "local_rope_theta"}.items():
            old[key] = rope[kind]["rope_theta"]
        if old["layer_types"][0] == "full_attention":
            old["global_attn_every_n_layers"] = len(old.pop("layer_types"))
        return dict(sorted(old.items()))
    if config["model_type"] == "olmo3":
        rope = {**rope["full_attention"]}  # the other layers have the default base
    if "full_attention" in rope:
        local = rope["sliding_attention"]
        old["rope_local_base_freq"] = local["rope_theta"]
        rope = {**rope["full_attention"]}
    old["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        old["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    if config["model_type"] == "qwen3_moe":
        old["num_experts"] = old.pop("num_local_experts")
    if config["model_type"] == "gpt_neox":
        old["rotary_emb_base"], old["rotary_pct"] = old.pop("rope_theta"), old.pop("partial_rotary_factor")
    if rope["rope_type"] in ("linear", "dynamic") and "rope_local_base_freq" not in old:
        rope["type"] = rope.pop("rope_type")
    old["rope_scaling"] = rope if rope.get("rope_type") != "default" else None
    keeps_layer_types = {"gemma3_text": "sliding_window_pattern" not in config, "qwen2_moe": True, "olmo3": True, "cohere2": True, "gpt_oss": True, "llama4_text": True}
    keeps_layer_types |= {name: True for name in ("granitemoehybrid", "lfm2", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")}
    if config["model_type"] == "granitemoehybrid":
        old["layer_types"] = [{"linear_attention": "mamba", "full_attention": "attention"}[kind] for kind in old["layer_types"]]
    if not keeps_layer_types.get(config["model_type"]):
        old.pop("layer_types", None)
    if old.get("use_sliding_window") is False:
        old["sliding_window"] = 4
    if old.get("head_dim") == old["hidden_size"] // old["num_attention_heads"]:
        del old["head_dim"]
    return dict(sorted(old.items()))


# BERT and derived models

ENCODER = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 28,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
}
OTHER_EPS = {"layer_norm_eps": {"layer_norm_eps": 1e-12}}
OTHER_GELU = {"the variant of GELU": {"hidden_act": "gelu_new"}}


def bert():
    def add(name, kind, *, options={}, edit=None, unused=(), **fields):
        config = transformers.BertConfig(**{**ENCODER, "layer_norm_eps": 0.01, **fields})
        inputs = tokens(name, types=True)
        overlook = {**OTHER_EPS, **(OTHER_GELU if config.hidden_act == "gelu" else {})}
        pretrained(name, kind, config, inputs, options=options, edit=edit, overlook=overlook, unused=unused)

    def as_first_published(tensors):
        """The layout of 2018: other names of norm parameters, and the heads of both training tasks."""
        rng = random.Random("as first published")
        renamed = {
            key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): x
            for key, x in tensors.items()
        }
        return renamed | {
            "bert.pooler.dense.weight": normal(rng, (16, 16), 0.3),
            "bert.pooler.dense.bias": normal(rng, (16,), 0.3),
            "cls.seq_relationship.weight": normal(rng, (2, 16), 0.3),
            "cls.seq_relationship.bias": normal(rng, (2,), 0.3),
        }

    def untied(tensors):
        """An untied head despite a configuration with tied weights, and a bias under both names."""
        rng = random.Random("untied")
        own = {"weight": normal(rng, (48, 16), 0.4), "bias": normal(rng, (48,), 0.3)}
        return tensors | {f"cls.predictions.decoder.{part}": x for part, x in own.items()}

    add("bert", transformers.BertModel)
    add("bert-no-pooler", transformers.BertModel, options={"add_pooling_layer": False}, num_attention_heads=4)
    add("bert-sequence-classification", transformers.BertForSequenceClassification, num_labels=3)
    add("bert-masked-lm", transformers.BertForMaskedLM)
    add("bert-masked-lm-untied", transformers.BertForMaskedLM, edit=untied, unused=("cls.predictions.bias",))
    add("bert-first-published", transformers.BertForMaskedLM, edit=as_first_published, unused=("pooler", "seq_relationship"), hidden_act="gelu_new")


def roberta():
    def add(name, kind, **fields):
        published = {"type_vocab_size": 1, "layer_norm_eps": 0.01}
        config = kind.config_class(**ENCODER, **published, **fields)
        pretrained(name, kind, config, tokens(name, pad=1), overlook={**OTHER_EPS, **OTHER_GELU})

    add("roberta", transformers.RobertaModel)
    add("roberta-sequence-classification", transformers.RobertaForSequenceClassification, num_labels=3)
    add("roberta-masked-lm", transformers.RobertaForMaskedLM)
    add("xlm-roberta", transformers.XLMRobertaModel)


def distilbert():
    def add(name, kind, **fields):
        shape = {"vocab_size": 48, "dim": 16, "hidden_dim": 28, "n_layers": 2, "n_heads": 2}
        config = transformers.DistilBertConfig(**shape, max_position_embeddings=16, **fields)
        pretrained(name, kind, config, tokens(name), overlook={"the variant of GELU": {"activation": "gelu_new"}})

    add("distilbert", transformers.DistilBertModel)
    add("distilbert-sequence-classification", transformers.DistilBertForSequenceClassification, num_labels=3)
    add("distilbert-masked-lm", transformers.DistilBertForMaskedLM)


def mpnet():
    def add(name, kind, unused=(), **fields):
        config = transformers.MPNetConfig(**{**ENCODER, "layer_norm_eps": 0.01, "max_position_embeddings": 40, **fields})
        # Rows of distances beyond these lengths are never read; the sign of the others has an effect.
        inputs = tokens(name, pad=1, lengths=(31, 17, 4))
        pretrained(name, kind, config, inputs, overlook={**OTHER_EPS, **OTHER_GELU}, unused=unused)

    add("mpnet", transformers.MPNetModel)
    add("mpnet-sequence-classification", transformers.MPNetForSequenceClassification, num_labels=3, num_attention_heads=4)
    add("mpnet-masked-lm", transformers.MPNetForMaskedLM, relative_attention_num_buckets=34)


def modernbert():
    shape = {**ENCODER, "num_hidden_layers": 3, "norm_eps": 0.01, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    shape |= {"cls_token_id": 1, "sep_token_id": 2}
    rope = {
        "full_attention": {"rope_type": "default", "rope_theta": 1000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
    }

    def add(name, kind, overlook={}, **fields):
        fields = {**shape, "rope_parameters": rope, "local_attention": 4, **fields}
        overlook = {
            "norm_eps": {"norm_eps": 1e-5},
            "the variant of GELU": {"hidden_activation": "gelu_new"},
            "the RoPE base of global layers": {"rope_parameters": {**rope, "full_attention": rope["sliding_attention"]}},
            "the RoPE base of local layers": {"rope_parameters": {**rope, "sliding_attention": rope["full_attention"]}},
            "the window size": {"local_attention": 6},
            "the global layers": {"layer_types": ["sliding_attention"] * 3},
            **overlook,
        }
        pretrained(name, kind, transformers.ModernBertConfig(**fields), tokens(name), overlook=overlook)

    add("modernbert", transformers.ModernBertModel)
    add(
        "modernbert-masked-lm",
        transformers.ModernBertForMaskedLM,
        attention_bias=True,
        mlp_bias=True,
        norm_bias=True,
        classifier_bias=True,
        overlook={"the variant of GELU in the head": {"classifier_activation": "gelu_new"}},
    )
    add(
        "modernbert-sequence-classification",
        transformers.ModernBertForSequenceClassification,
        num_labels=3,
        classifier_pooling="mean",
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        overlook={"the pooling": {"classifier_pooling": "cls"}},
    )


def deberta():
    """Distances with separate rows, with shared rows, and beyond the maximum."""

    def add(name, kind, overlook={}, lengths=(31, 17, 4), unused=(), **fields):
        relative = {"relative_attention": True, "position_biased_input": False, "pos_att_type": ["p2c", "c2p"]}
        config = transformers.DebertaV2Config(**{**ENCODER, "layer_norm_eps": 0.01, **relative, **fields})
        overlook = {
            **OTHER_EPS,
            **OTHER_GELU,
            "one term of disentangled attention": {"pos_att_type": []},
            **overlook,
        }
        inputs = tokens(name, lengths=lengths, types=config.type_vocab_size > 0)
        pretrained(name, kind, config, inputs, overlook=overlook, unused=unused)

    add(
        "deberta",
        transformers.DebertaV2Model,
        share_att_key=True,
        norm_rel_ebd="layer_norm",
        position_buckets=8,
        overlook={
            "the maximum distance": {"max_relative_positions": 24},
            "the other term of disentangled attention": {"pos_att_type": ["c2p"]},
            "the norm of position embeddings": {"norm_rel_ebd": "none"},
        },
    )
    add(
        "deberta-sequence-classification",
        transformers.DebertaV2ForSequenceClassification,
        max_relative_positions=9,
        max_position_embeddings=40,
        position_biased_input=True,
        type_vocab_size=2,
        num_attention_heads=4,
        num_labels=3,
        overlook={"the activation of the pooler": {"pooler_hidden_act": "tanh"}},
    )
    add(
        "deberta-masked-lm",
        transformers.DebertaV2ForMaskedLM,
        pos_att_type="c2p",
        position_buckets=6,
        max_relative_positions=20,
        embedding_size=12,
        unused=("key_proj.bias",),
    )
    add("deberta-masked-lm-own-head", transformers.DebertaV2ForMaskedLM, pos_att_type="p2c", position_buckets=4, legacy=False, hidden_act="gelu_new", overlook={"the variant of GELU": {"hidden_act": "gelu"}})


def t5():
    def add(name, kind, config, **fields):
        shape = {"vocab_size": 48, "d_model": 16, "d_kv": 6, "d_ff": 28, "num_layers": 2, "num_heads": 4}
        shape |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 20, "layer_norm_epsilon": 0.01}
        overlook = {
            "the epsilon": {"layer_norm_epsilon": 1e-6},
            "the activation": {"dense_act_fn": "silu"},
            "the maximum distance": {"relative_attention_max_distance": 128},
        }
        pretrained(name, kind, config(**{**shape, **fields}), tokens(name, lengths=(31, 17, 4)), overlook=overlook, unused=("decoder",))

    add("t5-encoder", transformers.T5EncoderModel, transformers.T5Config)
    add("t5-encoder-gated", transformers.T5EncoderModel, transformers.T5Config, feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    add("mt5-encoder", transformers.MT5EncoderModel, transformers.MT5Config, feed_forward_proj="gated-gelu")

    def whole(name, kind, config, overlook={}, own_head=False, **fields):
        shape = {"vocab_size": 48, "d_model": 16, "d_kv": 6, "d_ff": 28, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4}
        shape |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 12, "layer_norm_epsilon": 0.01}
        shape |= {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
        overlook = {"the maximum distance": {"relative_attention_max_distance": 128}, **overlook}
        inputs = {**tokens(name, lengths=(21, 17, 4)), **decoded(name, length=17)}
        config, how = config(**{**shape, **fields}), {}
        if own_head:
            # In the notation of transformers 4: version 5 always stores that the head is tied, and has a
            # separate key for the scale.
            said = {**config.to_diff_dict(), "architectures": [kind.__name__], "transformers_version": "4.44.0", "tie_word_embeddings": False}
            said.pop("scale_decoder_outputs", None)
            head = normal(random.Random(f"{name}/lm_head"), (48, 16), 0.3)
            how = {"files": {"config.json": said}, "edit": lambda tensors: tensors | {"lm_head.weight": head}}
        pretrained(name, kind, config, inputs, overlook=overlook, **how)

    scaled = {"the scale before the head": {"scale_decoder_outputs": False}}
    whole("t5", transformers.T5ForConditionalGeneration, transformers.T5Config, overlook=scaled)
    # Gated products amplify rounding errors from layer to layer.
    gated = {"feed_forward_proj": "gated-gelu", "num_layers": 1, "num_decoder_layers": 2}
    whole("t5-gated", transformers.T5ForConditionalGeneration, transformers.T5Config, tie_word_embeddings=False, **gated)
    unscaled = {"the missing scale before the head": {"scale_decoder_outputs": True}}
    one = {"num_layers": 1, "num_decoder_layers": 1, "tie_word_embeddings": False}
    whole("t5-own-head", transformers.T5ForConditionalGeneration, transformers.T5Config, overlook=unscaled, own_head=True, **one)
    whole("t5-headless", transformers.T5Model, transformers.T5Config)
    whole("mt5", transformers.MT5ForConditionalGeneration, transformers.MT5Config, **{**gated, "num_decoder_layers": 1})


def whisper():
    shape = {"vocab_size": 48, "d_model": 16, "num_mel_bins": 6, "max_source_positions": 10, "max_target_positions": 24}
    shape |= {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    shape |= {"encoder_ffn_dim": 28, "decoder_ffn_dim": 20, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "decoder_start_token_id": 2}
    shape |= {"suppress_tokens": None, "begin_suppress_tokens": None}

    def add(name, kind, **fields):
        config = transformers.WhisperConfig(**{**shape, **fields})
        features = normal(random.Random(f"{name}/features"), (3, 6, 20), 1.0)
        overlook = {"the activation": {"activation_function": "relu"}}
        pretrained(name, kind, config, {"input_features": features, **decoded(name)}, overlook=overlook)

    add("whisper", transformers.WhisperForConditionalGeneration)
    add("whisper-headless", transformers.WhisperModel, decoder_layers=1, decoder_attention_heads=4)


def sentence_transformers():
    """Both have a pooler that the embedding does not use; the first also has the position ids of older files."""

    def mean(hidden, mask):
        mean = (hidden * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
        return nn.functional.normalize(mean, dim=-1)

    def cls(hidden, mask):
        return hidden[:, 0]

    def add(name, embed, files, edit=None):
        def compute(model, inputs):
            hidden = run(model, inputs)["last_hidden_state"]
            return {"last_hidden_state": hidden, "sentence_embedding": embed(hidden, inputs["attention_mask"])}

        config = transformers.BertConfig(**ENCODER)
        how = {"files": files, "edit": edit, "compute": compute, "unused": ("pooler",)}
        pretrained(name, transformers.BertModel, config, tokens(name), **how)

    def modules(**types):
        paths = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
        entries = enumerate(types.items())
        return [{"idx": i, "name": str(i), "path": paths[kind], "type": path} for i, (kind, path) in entries]

    old = "sentence_transformers.models."
    old_files = {
        "modules.json": modules(**{kind: old + kind for kind in ("Transformer", "Pooling", "Normalize")}),
        "1_Pooling/config.json": {
            "word_embedding_dimension": 16,
            "pooling_mode_cls_token": False,
            "pooling_mode_mean_tokens": True,
            "pooling_mode_max_tokens": False,
            "pooling_mode_mean_sqrt_len_tokens": False,
        },
        "sentence_bert_config.json": {"max_seq_length": 12, "do_lower_case": False},
    }
    new_files = {
        "modules.json": modules(
            Transformer="sentence_transformers.base.modules.transformer.Transformer",
            Pooling="sentence_transformers.sentence_transformer.modules.pooling.Pooling",
        ),
        "1_Pooling/config.json": {"embedding_dimension": 16, "pooling_mode": "cls", "include_prompt": True},
        "sentence_bert_config.json": {
            "transformer_task": "feature-extraction",
            "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
            "module_output_name": "token_embeddings",
        },
    }
    position_ids = torch.arange(16).reshape(1, -1)
    add("sentence-mean", mean, old_files, edit=lambda tensors: {**tensors, "embeddings.position_ids": position_ids})
    add("sentence-cls", cls, new_files)

    def pooled(files):
        pooling = Pooling(**files["1_Pooling/config.json"])
        return lambda hidden, mask: pooling({"token_embeddings": hidden, "attention_mask": mask})["sentence_embedding"]

    several = ["lasttoken", "mean_sqrt_len_tokens", "max", "weightedmean", "mean", "cls"]
    several = {**new_files, "1_Pooling/config.json": {"embedding_dimension": 16, "pooling_mode": several}}
    add("sentence-several", pooled(several), several)
    switches = {**old_files["1_Pooling/config.json"], "pooling_mode_weightedmean_tokens": True, "pooling_mode_max_tokens": True}
    switches = {**new_files, "1_Pooling/config.json": {**switches, "pooling_mode_lasttoken": False}}
    add("sentence-switches", pooled(switches), switches)


def sentence_modules():
    """The modules before or after pooling, as loaded by the library."""

    def add(name, modules, overlook):
        config = transformers.BertConfig(**{**ENCODER, "intermediate_size": 20, "num_hidden_layers": 1})
        kinds = [(path, type(module)) for path, module in modules.items()]

        def compute(model, inputs):
            hidden = run(model, inputs)["last_hidden_state"]
            found = {"token_embeddings": hidden, "attention_mask": inputs["attention_mask"]}
            for path, kind in kinds:
                module = kind.load(str(FOLDER / name), subfolder=path).to(hidden.dtype)
                found = getattr(model, "changed", {}).get(path, lambda module: module)(module)(found)
            return {"last_hidden_state": hidden, "sentence_embedding": found["sentence_embedding"]}

        def wrong(path, change):
            def changed(module):
                change(module)
                return module

            model = transformers.BertModel.from_pretrained(FOLDER / name, attn_implementation="eager").eval()
            model.changed = {path: changed}
            return model

        def forget(key):
            def change(module):
                tensor = module.get_parameter(key)
                tensor.copy_(forgotten(key, tensor))

            return change

        against = {f"{path}/{key}": lambda path=path, key=key: wrong(path, forget(key)) for path, module in modules.items() for key, _ in module.named_parameters()}
        against |= {label: lambda path=path, change=change: wrong(path, change) for label, (path, change) in overlook.items()}
        entries = [("", "sentence_transformers.base.modules.transformer.Transformer")]
        entries += [(path, f"{kind.__module__}.{kind.__name__}") for path, kind in kinds]
        entries = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (path, kind) in enumerate(entries)]
        how = {"files": {"modules.json": entries}, "modules": modules, "compute": compute, "unused": ("pooler",), "against": against}
        pretrained(name, transformers.BertModel, config, tokens(name), **how)

    def function(other):
        return lambda module: setattr(module, "activation_function", other)

    modules = {
        "1_Pooling": Pooling(16, "mean"),
        "2_Dense": Dense(16, 12),
        "3_LayerNorm": LayerNorm(12),
        "4_Dense": Dense(12, 12, bias=False, activation_function=nn.GELU(), use_residual=True),
        "5_Normalize": Normalize(),
    }
    overlook = {
        "tanh": ("2_Dense", function(nn.Identity())),
        "gelu": ("4_Dense", function(nn.ReLU())),
        "a residual": ("4_Dense", lambda module: setattr(module, "use_residual", False)),
        "the epsilon of a norm": ("3_LayerNorm", lambda module: setattr(module.norm, "eps", 1e-2)),
    }
    add("sentence-dense", modules, overlook)
    modules = {
        "1_Dense_bin": Dense(16, 10, bias=False, activation_function=nn.ReLU(), module_input_name="token_embeddings"),
        "2_Pooling": Pooling(10, "max"),
        "3_Dense_bin": Dense(10, 14, activation_function=None, use_residual=True),
    }
    overlook = {"relu": ("1_Dense_bin", function(nn.Identity()))}
    add("sentence-dense-of-tokens", modules, overlook)


# Decoders


def gpt2():
    def add(name, **how):
        shape = {"vocab_size": 48, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
        fields = {"layer_norm_epsilon": 0.01, "bos_token_id": 0, "eos_token_id": 0, **how.pop("fields", {})}
        overlook = {
            "the variant of GELU": {"activation_function": "gelu"},
            "layer_norm_epsilon": {"layer_norm_epsilon": 1e-5},
            **how.pop("overlook", {}),
        }
        config = transformers.GPT2Config(**shape, **fields)
        pretrained(name, transformers.GPT2LMHeadModel, config, tokens(name), overlook=overlook, **how)

    def as_first_published(tensors):
        """Without a prefix, and with the stored causal mask of each layer."""
        mask = torch.ones(16, 16).tril().reshape(1, 1, 16, 16)
        stored = {key.removeprefix("transformer."): x for key, x in tensors.items()}
        return stored | {f"h.{layer}.attn.bias": mask.clone() for layer in range(2)}

    add("gpt2")
    add("gpt2-first-published", edit=as_first_published, unused=(".attn.bias",))
    add(
        "gpt2-inverse-layer-scale",
        fields={"n_inner": 24, "scale_attn_by_inverse_layer_idx": True},
        overlook={"scale_attn_by_inverse_layer_idx": {"scale_attn_by_inverse_layer_idx": False}},
    )


DECODER = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "rms_norm_eps": 0.01,
}
GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 100.0}


def decoder(name, kind, *, overlook={}, lengths=(11, 7, 4), alone=True, more={}, edit=None, model_type=None, **fields):
    config = kind.config_class(**{**DECODER, "rope_parameters": copy.deepcopy(PLAIN_ROPE), **fields})
    overlook = {
        "rms_norm_eps": {"rms_norm_eps": 1e-6},
        "rope_theta": {"rope_parameters": {**config.rope_parameters, "rope_theta": 10000.0}},
        **overlook,
    }
    how = {"alone": alone, "more": more, "edit": edit, "model_type": model_type}
    pretrained(name, kind, config, tokens(name, lengths=lengths), overlook=overlook, **how)


def llama():
    def add(name, **how):
        decoder(name, transformers.LlamaForCausalLM, **how)

    def rope(kind, overlook={}, **how):
        parameters = how.pop("parameters")
        scaled = {"rope_parameters": {"rope_type": kind, "rope_theta": 100.0, **parameters}}
        plain = {"rope scaling": {"rope_parameters": PLAIN_ROPE}}
        other = {f"{key}": {"rope_parameters": {**scaled["rope_parameters"], **x}} for key, x in overlook.items()}
        add(how.pop("name", f"llama-rope-{kind}"), **scaled, overlook={**plain, **other}, **how)

    add("llama")
    add("llama-grouped-tied", **GROUPED, tie_word_embeddings=True)
    add("llama-biases", attention_bias=True, mlp_bias=True)
    add("llama-head-dim", num_key_value_heads=1, head_dim=12)
    rope("linear", parameters={"factor": 4.0})
    rope(
        "dynamic",
        parameters={"factor": 4.0},
        max_position_embeddings=8,
        alone=False,  # the longest row of a batch sets the frequencies of all
        more={"short": tokens("llama-rope-dynamic-short", lengths=(7, 5))},
    )
    bands = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    rope(
        "llama3",
        parameters={"factor": 8.0, **bands},
        max_position_embeddings=256,
        overlook={"the middle band of RoPE scaling": {"low_freq_factor": 3.999}},
    )
    trained = {"original_max_position_embeddings": 32}
    rope(
        "yarn",
        parameters={"factor": 4.0, **trained},
        max_position_embeddings=128,
        overlook={"the attention factor": {"attention_factor": 1.0}, "rounding of the ramp": {"truncate": False}},
    )
    rope(
        "yarn",
        name="llama-rope-yarn-options",
        parameters={
            "factor": 4.0,
            "beta_fast": 4.0,
            "beta_slow": 0.5,
            "mscale": 1.5,
            "mscale_all_dim": 0.5,
            "truncate": False,
            **trained,
        },
        max_position_embeddings=128,
        overlook={
            "beta_fast": {"beta_fast": 32.0},
            "beta_slow": {"beta_slow": 1.0},
            "mscale": {"mscale": None},
            "truncate": {"truncate": True},
        },
    )
    longrope = {"short_factor": [1.0, 1.1, 1.3, 1.5], "long_factor": [1.0, 2.0, 3.0, 4.0]}
    rope(
        "longrope",
        parameters={"factor": 4.0, "original_max_position_embeddings": 8, **longrope},
        max_position_embeddings=32,
        alone=False,  # as for dynamic
        more={"short": tokens("llama-rope-longrope-short", lengths=(7, 5))},
        overlook={"the long factors": {"long_factor": longrope["short_factor"]}},
    )


def descendants_of_llama():
    window = {"sliding_window": {"sliding_window": None}, "the window size": {"sliding_window": 5}}
    decoder("mistral", transformers.MistralForCausalLM, **GROUPED, sliding_window=4, overlook=window)
    decoder(
        "mistral-no-window", transformers.MistralForCausalLM, num_key_value_heads=1, head_dim=12, sliding_window=None
    )
    decoder("qwen2", transformers.Qwen2ForCausalLM, **GROUPED, tie_word_embeddings=True)
    decoder(
        "qwen2-sliding",
        transformers.Qwen2ForCausalLM,
        num_key_value_heads=1,
        use_sliding_window=True,
        sliding_window=4,
        max_window_layers=1,
        overlook={
            "the full layer": {"layer_types": ["sliding_attention"] * 2},
            "the sliding layer": {"layer_types": ["full_attention"] * 2},
        },
    )
    decoder("qwen3", transformers.Qwen3ForCausalLM, **GROUPED, head_dim=8, tie_word_embeddings=True)


def of_gpt_neox():
    """Layers of Pythia, and of a model without parallel residuals."""
    shape = {key: DECODER[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings")}
    rope = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}

    def add(name, overlook={}, **fields):
        fields = {
            **shape,
            "intermediate_size": 28,
            "num_attention_heads": 2,
            "layer_norm_eps": 0.01,
            "rope_parameters": rope,
            **fields,
        }
        overlook = {
            **OTHER_EPS,
            **OTHER_GELU,
            "rope_theta": {"rope_parameters": {**rope, "rope_theta": 10000.0}},
            "the rotary dimensions": {"rope_parameters": {**rope, "partial_rotary_factor": 1.0}},
            "the residual": {"use_parallel_residual": not fields.get("use_parallel_residual", True)},
            **overlook,
        }
        config = transformers.GPTNeoXConfig(**fields)
        unused = ("query_key_value.bias",) if fields.get("attention_bias") is False else ()
        pretrained(name, transformers.GPTNeoXForCausalLM, config, tokens(name), overlook=overlook, unused=unused)

    add("gpt-neox")
    add("gpt-neox-sequential", use_parallel_residual=False, attention_bias=False)


def opt():
    """The standard layers, and those of the model with 350 M parameters."""
    shape = {key: DECODER[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings")}

    def add(name, overlook={}, left=False, **fields):
        fields = {**shape, "ffn_dim": 28, "num_attention_heads": 2, **fields}
        overlook = {"relu": {"activation_function": "gelu"}, **overlook}
        inputs = tokens(name, pad=1)
        more = {"short": {key: x.flip(1) for key, x in inputs.items()}} if left else {}
        config = transformers.OPTConfig(**fields)
        pretrained(name, transformers.OPTForCausalLM, config, inputs, overlook=overlook, unused=("k_proj.bias",), more=more)

    add("opt", left=True, overlook={"the last norm": {"_remove_final_layer_norm": True}})
    add(
        "opt-narrow-embeddings",
        word_embed_proj_dim=12,
        do_layer_norm_before=False,
        overlook={"the position of norms": {"do_layer_norm_before": True, "_remove_final_layer_norm": True}},
    )


def phi3():
    fields = {**GROUPED, "original_max_position_embeddings": 32}
    window = {"sliding_window": {"sliding_window": None}, "the window size": {"sliding_window": 5}}
    partial = {**PLAIN_ROPE, "partial_rotary_factor": 0.5}
    whole = {"the rotary dimensions": {"rope_parameters": PLAIN_ROPE}}
    how = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True, "rope_parameters": partial}
    decoder("phi3", transformers.Phi3ForCausalLM, **fields, sliding_window=4, overlook=window, pad_token_id=0)
    decoder("phi3-tied-partial", transformers.Phi3ForCausalLM, **how, overlook=whole, pad_token_id=0)
    longrope = {"rope_type": "longrope", "short_factor": [1.0, 1.2, 1.6], "long_factor": [1.0, 2.0, 4.0]}
    longrope |= {"rope_theta": 100.0, "partial_rotary_factor": 0.75}
    decoder(
        "phi3-longrope",
        transformers.Phi3ForCausalLM,
        num_key_value_heads=1,
        original_max_position_embeddings=8,
        rope_parameters=longrope,
        pad_token_id=0,
        alone=False,  # the longest row of a batch sets the frequencies of all
        more={"short": tokens("phi3-longrope-short", lengths=(7, 5))},
        overlook={"the long factors": {"rope_parameters": {**longrope, "long_factor": longrope["short_factor"]}}},
    )


def olmo2():
    decoder("olmo2", transformers.Olmo2ForCausalLM, **GROUPED, pad_token_id=0)


WINDOWS = {
    "the full layer": {"layer_types": ["sliding_attention"] * 2},
    "the sliding layer": {"layer_types": ["full_attention"] * 2},
    "the window size": {"sliding_window": 5},
}


def olmo3():
    plain = {"rope_type": "default", "rope_theta": 500000.0}
    yarn = {"rope_type": "yarn", "rope_theta": 500000.0, "factor": 4.0, "original_max_position_embeddings": 8}
    rope = {"full_attention": yarn, "sliding_attention": plain}
    decoder(
        "olmo3",
        transformers.Olmo3ForCausalLM,
        **GROUPED,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters=rope,
        pad_token_id=0,
        eos_token_id=2,
        overlook={
            **WINDOWS,
            "rope_theta": {"rope_parameters": {**rope, "sliding_attention": {**plain, "rope_theta": 50.0}}},
            "the scaling": {"rope_parameters": {kind: plain for kind in rope}},
            "the layers with scaling": {"rope_parameters": {kind: yarn for kind in rope}},
        },
    )


def glm():
    partial = {**PLAIN_ROPE, "partial_rotary_factor": 0.5}
    whole = {"the rotary dimensions": {"rope_parameters": {**PLAIN_ROPE, "partial_rotary_factor": 1.0}}}
    fields = {**GROUPED, "head_dim": 8, "rope_parameters": partial, "overlook": whole, "pad_token_id": 0, "eos_token_id": 2}
    decoder("glm", transformers.GlmForCausalLM, **fields)
    decoder("glm4", transformers.Glm4ForCausalLM, **fields, attention_bias=False, tie_word_embeddings=True)


def ernie4_5():
    decoder("ernie4_5", transformers.Ernie4_5ForCausalLM, **GROUPED, head_dim=8)
    decoder("ernie4_5-biases", transformers.Ernie4_5ForCausalLM, num_key_value_heads=1, head_dim=12, use_bias=True, tie_word_embeddings=False)


def hunyuan():
    alpha = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 1.0, "alpha": 8.0}
    decoder("hunyuan", transformers.HunYuanDenseV1ForCausalLM, **GROUPED, head_dim=8, tie_word_embeddings=True)
    decoder(
        "hunyuan-alpha",
        transformers.HunYuanDenseV1ForCausalLM,
        num_key_value_heads=1,
        head_dim=12,
        attention_bias=True,
        rope_parameters=alpha,
        overlook={"alpha": {"rope_parameters": {**alpha, "alpha": 1.0}}},
    )


# Decoders with layer normalization instead of RMS normalization.


def normalized(name, kind, epsilon, *, overlook={}, **fields):
    without = {key: value for key, value in DECODER.items() if key != "rms_norm_eps"}
    config = kind.config_class(**{**without, "rope_parameters": copy.deepcopy(PLAIN_ROPE), **fields, epsilon: 0.01})
    overlook = {
        epsilon: {epsilon: 1e-6},
        "rope_theta": {"rope_parameters": {**config.rope_parameters, "rope_theta": 10000.0}},
        **overlook,
    }
    pretrained(name, kind, config, tokens(name), overlook=overlook)


def starcoder2():
    window = {"sliding_window": {"sliding_window": None}, "the window size": {"sliding_window": 5}}
    gelu = {"the variant of GELU": {"hidden_act": "gelu"}}
    add = functools.partial(normalized, kind=transformers.Starcoder2ForCausalLM, epsilon="norm_epsilon")
    add("starcoder2", **GROUPED, sliding_window=4, overlook={**window, **gelu})
    add("starcoder2-no-biases", num_key_value_heads=1, use_bias=False, tie_word_embeddings=False)


def stablelm():
    partial = {**PLAIN_ROPE, "partial_rotary_factor": 0.5}
    whole = {"the rotary dimensions": {"rope_parameters": {**PLAIN_ROPE, "partial_rotary_factor": 1.0}}}
    add = functools.partial(normalized, kind=transformers.StableLmForCausalLM, epsilon="layer_norm_eps", overlook=whole)
    add("stablelm", num_key_value_heads=1, rope_parameters=partial)
    add("stablelm-parallel", num_key_value_heads=2, rope_parameters=partial, use_qkv_bias=True, use_parallel_residual=True)


def phi():
    partial = {**PLAIN_ROPE, "partial_rotary_factor": 0.5}
    overlook = {
        "the rotary dimensions": {"rope_parameters": {**PLAIN_ROPE, "partial_rotary_factor": 1.0}},
        "the variant of GELU": {"hidden_act": "gelu"},
    }
    add = functools.partial(normalized, kind=transformers.PhiForCausalLM, epsilon="layer_norm_eps", overlook=overlook)
    add("phi", rope_parameters=partial)
    add("phi-head-norms", num_key_value_heads=1, rope_parameters=partial, qk_layernorm=True)


def cohere():
    scale = {"logit_scale": {"logit_scale": 1.0}}
    add = functools.partial(normalized, epsilon="layer_norm_eps")
    add("cohere", kind=transformers.CohereForCausalLM, **GROUPED, logit_scale=0.5, attention_bias=True, overlook=scale)
    add(
        "cohere2",
        kind=transformers.Cohere2ForCausalLM,
        **GROUPED,
        logit_scale=0.5,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
        overlook={**scale, **WINDOWS},
    )


def smollm3():
    rope = {"no_rope_layers": [1, 0]}
    other = {"the layers with RoPE": {"no_rope_layers": [0, 1]}, "the layer without RoPE": {"no_rope_layers": [1, 1]}}
    decoder("smollm3", transformers.SmolLM3ForCausalLM, **GROUPED, **rope, overlook=other, pad_token_id=0)
    decoder(
        "smollm3-sliding",
        transformers.SmolLM3ForCausalLM,
        num_key_value_heads=1,
        no_rope_layer_interval=2,
        use_sliding_window=True,
        sliding_window=4,
        tie_word_embeddings=False,
        overlook={"the window": {"layer_types": ["full_attention"] * 2}, **other},
        pad_token_id=0,
    )


def granite():
    multipliers = {"embedding_multiplier": 3.0, "attention_multiplier": 0.6, "residual_multiplier": 0.4, "logits_scaling": 1.7}
    neutral = {f"the {key}": {key: 1.0} for key in multipliers}
    add = functools.partial(decoder, kind=transformers.GraniteForCausalLM)
    scale = {"the scale of attention scores": {"attention_multiplier": 0.5}}
    add("granite", **GROUPED, **multipliers, tie_word_embeddings=True, overlook={**neutral, **scale})
    add("granite-biases", head_dim=12, attention_bias=True, mlp_bias=True, overlook={"the default scale": {"attention_multiplier": 12**-0.5}})


def granite_moe():
    multipliers = {"embedding_multiplier": 3.0, "attention_multiplier": 0.6, "residual_multiplier": 0.4, "logits_scaling": 1.7}
    routing = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 12}
    top = {"the number of experts per token": {"num_experts_per_tok": 1}}
    how = {**GROUPED, **multipliers, **routing, "overlook": {**{f"the {key}": {key: 1.0} for key in multipliers}, **top}}
    decoder("granite-moe", transformers.GraniteMoeForCausalLM, **how, tie_word_embeddings=True)
    decoder("granite-moe-shared", transformers.GraniteMoeSharedForCausalLM, **how, shared_intermediate_size=20, attention_bias=True)


def granite_hybrid():
    """Layers of Mamba 2, with one head of keys or two."""

    def add(name, overlook={}, **fields):
        layers = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
        mamba = {"mamba_n_heads": 4, "mamba_d_state": 6, "mamba_d_conv": 3, "mamba_chunk_size": 4, "shared_intermediate_size": 20}
        rope = {"rope_parameters": copy.deepcopy(PLAIN_ROPE)}
        multipliers = {"embedding_multiplier": 3.0, "attention_multiplier": 0.6, "residual_multiplier": 0.4, "logits_scaling": 1.7}
        config = transformers.GraniteMoeHybridConfig(**{**DECODER, **GROUPED, **layers, **mamba, **rope, **multipliers, **fields})
        neutral = {f"the {key}": {key: 1.0} for key in multipliers}
        overlook = {"rms_norm_eps": {"rms_norm_eps": 1e-6}, **neutral, **overlook}
        pretrained(name, transformers.GraniteMoeHybridForCausalLM, config, tokens(name), overlook=overlook)

    top = {"the number of experts per token": {"num_experts_per_tok": 1}}
    add("granite-hybrid", num_local_experts=4, num_experts_per_tok=2, overlook=top)
    add(
        "granite-hybrid-dense",
        num_local_experts=0,
        position_embedding_type="rope",
        mamba_n_groups=2,
        mamba_conv_bias=False,
        mamba_proj_bias=True,
        attention_bias=True,
        tie_word_embeddings=True,
        time_step_limit=(0.4, 2.0),
        overlook={
            "the rotary embedding": {"position_embedding_type": None},
            "the lower limit": {"time_step_limit": (0.0, 2.0)},
            "the upper limit": {"time_step_limit": (0.4, float("inf"))},
        },
    )


def mamba2():
    def add(name, overlook={}, **fields):
        shape = {"vocab_size": 48, "hidden_size": 16, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 8, "state_size": 6, "conv_kernel": 3, "chunk_size": 4}
        config = transformers.Mamba2Config(**{**shape, "layer_norm_epsilon": 0.01, **fields})
        overlook = {"layer_norm_epsilon": {"layer_norm_epsilon": 1e-6}, **overlook}
        pretrained(name, transformers.Mamba2ForCausalLM, config, tokens(name), overlook=overlook)

    add("mamba2", n_groups=2)
    limits = {"the lower limit": {"time_step_limit": (0.0, 2.0)}, "the upper limit": {"time_step_limit": (0.4, 100.0)}}
    add("mamba2-tied", n_groups=1, use_bias=True, use_conv_bias=False, tie_word_embeddings=True, time_step_limit=(0.4, 2.0), overlook=limits)


def nemotron_h():
    """Layers of one part each: of Mamba 2, experts, attention or a dense network."""

    def add(name, overlook={}, **fields):
        shape = {key: DECODER[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings")}
        attention = {**GROUPED, "head_dim": 4}
        mamba = {"mamba_num_heads": 4, "mamba_head_dim": 6, "ssm_state_size": 5, "conv_kernel": 3, "chunk_size": 4, "n_groups": 2}
        routing = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "moe_shared_expert_intermediate_size": 20}
        layers = {"layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"]}
        config = transformers.NemotronHConfig(**{**shape, **attention, **mamba, **routing, **layers, "layer_norm_epsilon": 0.01, **fields})
        overlook = {
            "layer_norm_epsilon": {"layer_norm_epsilon": 1e-6},
            "the number of experts per token": {"num_experts_per_tok": 1},
            "the activation": {"mlp_hidden_act": "relu"},
            **overlook,
        }
        pretrained(name, transformers.NemotronHForCausalLM, config, tokens(name), overlook=overlook)

    scaling = {"the scaling of experts": {"routed_scaling_factor": 1.0}, "the normalization of router weights": {"norm_topk_prob": True}}
    add("nemotron-h", routed_scaling_factor=0.7, norm_topk_prob=False, overlook=scaling)
    latent = {"moe_latent_size": 8, "mlp_bias": True, "use_bias": True, "use_conv_bias": False, "n_groups": 1}
    add("nemotron-h-latent", **latent, time_step_min=0.4, overlook={"the lower limit": {"time_step_min": 0.001}})


def lfm2():
    def add(name, overlook={}, **fields):
        shape = {key: value for key, value in DECODER.items() if key != "rms_norm_eps"}
        layers = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}
        rope = {"rope_parameters": copy.deepcopy(PLAIN_ROPE)}
        config = transformers.Lfm2Config(**{**shape, **layers, **rope, **GROUPED, "norm_eps": 0.01, **fields})
        other = {"rope_theta": {"rope_parameters": {**PLAIN_ROPE, "rope_theta": 10000.0}}}
        overlook = {"norm_eps": {"norm_eps": 1e-6}, **other, **overlook}
        pretrained(name, transformers.Lfm2ForCausalLM, config, tokens(name), overlook=overlook)

    # 28 neurons.
    add("lfm2", intermediate_size=32, block_ffn_dim_multiplier=1.3, block_multiple_of=4)
    add("lfm2-biases", conv_bias=True, conv_L_cache=4, block_auto_adjust_ff_dim=False, tie_word_embeddings=False)


GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "head_dim": 8, "query_pre_attn_scalar": 6, **GROUPED}


def gemma():
    decoder(
        "gemma",
        transformers.GemmaForCausalLM,
        **GROUPED,
        head_dim=8,
        overlook={"the variant of GELU": {"hidden_act": "silu"}},
    )


def gemma2():
    decoder(
        "gemma2",
        transformers.Gemma2ForCausalLM,
        **GEMMA,
        sliding_window=4,
        attn_logit_softcapping=1.5,
        final_logit_softcapping=2.0,
        overlook={
            "the variant of GELU": {"hidden_activation": "gelu"},
            "the scale": {"query_pre_attn_scalar": 8},
            "the cap of attention scores": {"attn_logit_softcapping": None},
            "the cap of logits": {"final_logit_softcapping": None},
            "the full layer": {"layer_types": ["sliding_attention"] * 2},
            "the sliding layer": {"layer_types": ["full_attention"] * 2},
            "the window size": {"sliding_window": 5},
        },
    )


def gemma3():
    rope = {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    }
    decoder(
        "gemma3",
        transformers.Gemma3ForCausalLM,
        **GEMMA,
        sliding_window=4,
        sliding_window_pattern=2,
        rope_parameters=rope,
        overlook={
            "rope_theta": {"rope_parameters": {**rope, "full_attention": {**rope["full_attention"], "rope_theta": 50.0}}},
            "the other rope_theta": {"rope_parameters": {kind: rope["full_attention"] for kind in rope}},
            "the scaling": {"rope_parameters": {**rope, "full_attention": {"rope_type": "default", "rope_theta": 1000.0}}},
            "the scale": {"query_pre_attn_scalar": 8},
            "the full layer": {"layer_types": ["sliding_attention"] * 2},
            "the sliding layer": {"layer_types": ["full_attention"] * 2},
            "the window size": {"sliding_window": 5},
        },
    )
    decoder(
        "gemma3-capped",
        transformers.Gemma3ForCausalLM,
        **{**GEMMA, "num_key_value_heads": 1},
        layer_types=["full_attention", "sliding_attention"],
        sliding_window=3,
        final_logit_softcapping=2.0,
        tie_word_embeddings=False,
        rope_parameters=rope,
        overlook={
            "rope_theta": {"rope_parameters": {**rope, "full_attention": {**rope["full_attention"], "rope_theta": 50.0}}},
            "the cap of logits": {"final_logit_softcapping": None},
        },
    )


def experts():
    """Router weights for which each expert gets some of about ten tokens."""

    def fused(tensors):
        """The in-memory layout of transformers 5: one tensor for all experts."""
        found, stacks = {}, {}
        for key, x in tensors.items():
            match key.split(".experts."):
                case [module, rest]:
                    number, part, _ = rest.split(".")
                    stacks.setdefault(module, {}).setdefault(part, {})[int(number)] = x
                case _:
                    found[key] = x
        for module, parts in stacks.items():
            names = ("w1", "w3", "w2") if "w1" in parts else ("gate_proj", "up_proj", "down_proj")
            gate, up, down = ([parts[name][e] for e in range(len(parts[name]))] for name in names)
            found[f"{module}.experts.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(gate, up)])
            found[f"{module}.experts.down_proj"] = torch.stack(down)
        return {key.replace(".block_sparse_moe.", ".mlp."): x for key, x in found.items()}

    top = {"the number of experts per token": {"num_experts_per_tok": 1}}
    window = {"the window size": {"sliding_window": 5}}
    mixtral = {**GROUPED, "intermediate_size": 12, "num_local_experts": 4}
    decoder("mixtral", transformers.MixtralForCausalLM, **mixtral, sliding_window=4, overlook={**top, **window})
    decoder("mixtral-fused", transformers.MixtralForCausalLM, **mixtral, edit=fused, overlook=top)
    qwen = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, **GROUPED}
    parts = {**top, "the normalization of router weights": {"norm_topk_prob": True}}
    decoder(
        "qwen2-moe",
        transformers.Qwen2MoeForCausalLM,
        **qwen,
        shared_expert_intermediate_size=20,
        overlook=parts,
    )
    decoder(
        "qwen2-moe-fused",
        transformers.Qwen2MoeForCausalLM,
        **qwen,
        shared_expert_intermediate_size=20,
        use_sliding_window=True,
        sliding_window=4,
        max_window_layers=1,
        norm_topk_prob=True,
        edit=fused,
        overlook={"the normalization of router weights": {"norm_topk_prob": False}, **window},
    )
    decoder(
        "qwen3-moe",
        transformers.Qwen3MoeForCausalLM,
        **qwen,
        head_dim=8,
        norm_topk_prob=True,
        mlp_only_layers=[1],
        tie_word_embeddings=True,
        overlook={**top, "the normalization of router weights": {"norm_topk_prob": False}},
    )
    latent = {
        "kv_lora_rank": 10,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "moe_intermediate_size": 12,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    decoder(
        "deepseek-v2-lite",
        transformers.DeepseekV2ForCausalLM,
        **latent,
        q_lora_rank=None,
        first_k_dense_replace=1,
        overlook=top,
    )
    yarn = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.9, "original_max_position_embeddings": 32}
    groups = {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1}
    decoder(
        "deepseek-v2",
        transformers.DeepseekV2ForCausalLM,
        **{**latent, "n_routed_experts": 8},
        **groups,
        q_lora_rank=6,
        n_shared_experts=1,
        attention_bias=True,
        routed_scaling_factor=2.5,
        max_position_embeddings=128,
        rope_parameters=yarn,
        overlook={
            "grouped routing": {"topk_method": "greedy"},
            "the number of groups per token": {"topk_group": 2},
            "the scale of router weights": {"routed_scaling_factor": 1.0},
            "mscale": {"rope_parameters": {**yarn, "mscale": 0.9}},
            "mscale_all_dim": {"rope_parameters": {**yarn, "mscale_all_dim": 0.7}},
        },
    )


def qwen3_next():
    """Gated delta networks, with several value heads for each key head."""
    partial = {**PLAIN_ROPE, "partial_rotary_factor": 0.5}
    delta = {
        **GROUPED,
        "head_dim": 8,
        "rope_parameters": partial,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 6,
        "linear_value_head_dim": 5,
        "linear_conv_kernel_dim": 3,
    }
    rotary = {"the rotary dimensions": {"rope_parameters": {**partial, "partial_rotary_factor": 1.0}}}
    top = {"the number of experts per token": {"num_experts_per_tok": 1}}
    routing = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 20}
    decoder(
        "qwen3-next",
        transformers.Qwen3NextForCausalLM,
        **delta,
        **routing,
        mlp_only_layers=[1],
        overlook={**top, **rotary, "the normalization of router weights": {"norm_topk_prob": False}},
    )
    decoder("qwen3_5", transformers.Qwen3_5ForCausalLM, **delta, attention_bias=True, tie_word_embeddings=True, overlook=rotary)
    decoder("qwen3_5-moe", transformers.Qwen3_5MoeForCausalLM, **delta, **routing, overlook={**top, **rotary})


def sigmoid_routers():
    """Routers with a bias for the selection of experts."""
    routing = {
        "moe_intermediate_size": 12,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "pad_token_id": 0,
        "lengths": (17, 11, 6),
    }
    parts = {
        "the number of experts per token": {"num_experts_per_tok": 1},
        "the number of groups per token": {"topk_group": 2},
        "the normalization of router weights": {"norm_topk_prob": False},
        "the scale of router weights": {"routed_scaling_factor": 1.0},
    }
    partial = {**PLAIN_ROPE, "partial_rotary_factor": 0.5}
    decoder(
        "glm4-moe",
        transformers.Glm4MoeForCausalLM,
        **{**routing, **GROUPED, "num_experts_per_tok": 3, "lengths": (24, 13, 6)},
        head_dim=8,
        attention_bias=True,
        use_qk_norm=True,
        routed_scaling_factor=1.5,
        rope_parameters=partial,
        overlook={**parts, "the rotary dimensions": {"rope_parameters": {**partial, "partial_rotary_factor": 1.0}}},
    )
    decoder(
        "glm4-moe-plain",
        transformers.Glm4MoeForCausalLM,
        **{**routing, "n_routed_experts": 4, "n_group": 1, "norm_topk_prob": False, "first_k_dense_replace": 0},
        num_key_value_heads=1,
        rope_parameters=partial,
        n_shared_experts=2,
        overlook={"the normalization of router weights": {"norm_topk_prob": True}},
    )
    latent = {
        "kv_lora_rank": 10,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    yarn = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.9, "original_max_position_embeddings": 32}
    decoder(
        "deepseek-v3",
        transformers.DeepseekV3ForCausalLM,
        **{**latent, **routing},
        q_lora_rank=6,
        attention_bias=True,
        max_position_embeddings=128,
        rope_parameters=yarn,
        overlook={
            **parts,
            "the order of rotated elements": {"rope_interleave": False},
            "mscale": {"rope_parameters": {**yarn, "mscale": 0.9}},
            "mscale_all_dim": {"rope_parameters": {**yarn, "mscale_all_dim": 0.7}},
        },
    )
    decoder(
        "deepseek-v3-halves",
        transformers.DeepseekV3ForCausalLM,
        **{**latent, **routing},
        q_lora_rank=None,
        rope_interleave=False,
        overlook={"the order of rotated elements": {"rope_interleave": True}},
    )
    lite = {key: value for key, value in {**latent, **routing}.items() if key != "first_k_dense_replace"}
    decoder(
        "glm4-moe-lite",
        transformers.Glm4MoeLiteForCausalLM,
        **{**lite, "num_experts_per_tok": 3},
        q_lora_rank=6,
        mlp_layer_types=["sparse", "dense"],
        routed_scaling_factor=1.5,
        overlook={**parts, "the order of rotated elements": {"rope_interleave": False}},
    )
    decoder(
        "kimi-k2",
        transformers.DeepseekV3ForCausalLM,
        **{**latent, **routing, "n_routed_experts": 4, "n_group": 1},
        q_lora_rank=6,
        model_type="kimi_k2",
        overlook={"the normalization of router weights": {"norm_topk_prob": False}},
    )


def minimax_m2():
    partial = {**PLAIN_ROPE, "partial_rotary_factor": 0.5}
    decoder(
        "minimax-m2",
        transformers.MiniMaxM2ForCausalLM,
        **GROUPED,
        head_dim=8,
        intermediate_size=12,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters=partial,
        overlook={
            "the number of experts per token": {"num_experts_per_tok": 1},
            "the rotary dimensions": {"rope_parameters": {**partial, "partial_rotary_factor": 1.0}},
        },
    )


def gpt_oss():
    yarn = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "truncate": False, "original_max_position_embeddings": 8}
    decoder(
        "gpt-oss",
        transformers.GptOssForCausalLM,
        **GROUPED,
        head_dim=8,
        intermediate_size=12,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=4,
        swiglu_limit=1.5,
        rope_parameters=yarn,
        pad_token_id=0,
        overlook={
            **WINDOWS,
            "the number of experts per token": {"num_experts_per_tok": 1},
            "the clamp": {"swiglu_limit": 7.0},
            "the slope of the gate": {"swiglu_alpha": 1.0},
            "the scaling": {"rope_parameters": PLAIN_ROPE},
        },
    )


def llama4():
    """Layers of each kind: chunks with rotary embedding, or neither, and experts or a dense network."""

    def add(name, overlook, **fields):
        fields = {**GROUPED, "head_dim": 8, "intermediate_size": 12, "intermediate_size_mlp": 20, "num_local_experts": 4, "pad_token_id": 0, **fields}
        decoder(name, transformers.Llama4ForCausalLM, attention_chunk_size=4, overlook=overlook, **fields)

    chunks = {"the chunks": {"layer_types": ["full_attention"] * 2}, "the size of chunks": {"attention_chunk_size": 5}}
    add(
        "llama4",
        moe_layers=[0],
        no_rope_layers=[1, 0],
        floor_scale=3,
        attn_scale=0.7,
        num_experts_per_tok=2,
        overlook={
            **chunks,
            "the number of experts per token": {"num_experts_per_tok": 1},
            "the normalization of queries and keys": {"use_qk_norm": False},
            "the scale of queries": {"attn_temperature_tuning": False},
            "the interval of the scale": {"floor_scale": 4},
            "the layer without RoPE": {"no_rope_layers": [1, 1], "layer_types": ["chunked_attention", "full_attention"]},
        },
    )
    add(
        "llama4-plain",
        interleave_moe_layer_step=2,
        no_rope_layer_interval=3,
        use_qk_norm=False,
        attention_bias=True,
        tie_word_embeddings=True,
        overlook=chunks,
    )


def ministral3():
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 100.0,
        "factor": 4.0,
        "original_max_position_embeddings": 4,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.7,
    }
    scale = {"the scale of queries": {"rope_parameters": {**yarn, "llama_4_scaling_beta": 0.0}}}
    plain = {**PLAIN_ROPE, "llama_4_scaling_beta": 0.7, "original_max_position_embeddings": 3}
    window = {"the window": {"sliding_window": None}, "the interval": {"rope_parameters": {**plain, "original_max_position_embeddings": 4}}}
    common = {**GROUPED, "head_dim": 8, "pad_token_id": 0}
    decoder("ministral3", transformers.Ministral3ForCausalLM, **common, max_position_embeddings=16, rope_parameters=yarn, overlook=scale)
    decoder("ministral3-window", transformers.Ministral3ForCausalLM, **common, sliding_window=4, rope_parameters=plain, tie_word_embeddings=True, overlook=window)


# Language models with a vision tower, on texts

QWEN_TOWER = {"hidden_size": 8, "intermediate_size": 12, "depth": 1, "num_heads": 2, "patch_size": 2, "out_hidden_size": 16}
SIGLIP = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 4, "patch_size": 2}


def multimodal():
    def add(name, kind, text, vision, overlook={}, **fields):
        text = {**DECODER, **GROUPED, "rope_parameters": PLAIN_ROPE, **text}
        how = {key: fields.pop(key) for key in ("edit", "spell") if key in fields}
        config = kind.config_class(text_config=text, vision_config=vision, **fields)
        others = {"rms_norm_eps": {"rms_norm_eps": 1e-6}, **overlook}
        if "rope_theta" in text["rope_parameters"]:
            others["rope_theta"] = {"rope_parameters": {**text["rope_parameters"], "rope_theta": 1e4}}
        others = {label: {"text_config": {**config.text_config.to_dict(), **other}} for label, other in others.items()}
        towers = ("visual", "vision_tower", "vision_model", "multi_modal_projector")
        pretrained(name, kind, config, tokens(name), overlook=others, unused=towers, **how)

    def older(tensors):
        return {key.replace("model.visual", "visual").replace("model.language_model", "model"): x for key, x in tensors.items()}

    def flat(config):
        text = config.pop("text_config")
        rope = text.pop("rope_parameters")
        text["rope_theta"], text["rope_scaling"] = rope["rope_theta"], {"type": "mrope", "mrope_section": rope["mrope_section"]}
        return {**{key: x for key, x in text.items() if key not in ("layer_types", "model_type")}, **config}

    def terse(config):
        # A published file leaves out what its class specifies.
        config["text_config"].pop("num_key_value_heads")
        return config

    ids = {"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63}
    sections = {**PLAIN_ROPE, "mrope_section": [1, 1]}
    qwen2 = {"embed_dim": 8, "hidden_size": 16, "mlp_ratio": 2, "depth": 1, "num_heads": 2, "patch_size": 2}
    add("qwen2-vl", transformers.Qwen2VLForConditionalGeneration, {"rope_parameters": sections}, qwen2, **ids, edit=older, spell=flat)
    add("qwen2_5-vl", transformers.Qwen2_5_VLForConditionalGeneration, {"rope_parameters": sections}, {**QWEN_TOWER, "fullatt_block_indexes": [0], "window_size": 8}, **ids, tie_word_embeddings=True)
    deep = {**QWEN_TOWER, "num_position_embeddings": 4, "deepstack_visual_indexes": [0]}
    wide = {"head_dim": 8, "rope_parameters": {**PLAIN_ROPE, "mrope_section": [2, 1, 1], "mrope_interleaved": True}}
    add("qwen3-vl", transformers.Qwen3VLForConditionalGeneration, wide, deep, **ids)
    experts = {**wide, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "mlp_only_layers": [1]}
    top = {"the number of experts per token": {"num_experts_per_tok": 1}}
    add("qwen3-vl-moe", transformers.Qwen3VLMoeForConditionalGeneration, experts, deep, top, **ids)
    window = {"the window": {"sliding_window": 5}}
    gemma = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4, "query_pre_attn_scalar": 6, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
    gemma["rope_parameters"] = {"full_attention": PLAIN_ROPE, "sliding_attention": {**PLAIN_ROPE, "rope_theta": 10.0}}
    add("gemma3-vl", transformers.Gemma3ForConditionalGeneration, gemma, SIGLIP, window, image_token_index=60, mm_tokens_per_image=1, spell=terse)
    mistral = {"model_type": "mistral", "head_dim": 12, "sliding_window": None}
    pixtral = {**SIGLIP, "model_type": "pixtral", "head_dim": 4}
    add("mistral3", transformers.Mistral3ForConditionalGeneration, mistral, pixtral, image_token_index=60)
    chunks = {"the size of chunks": {"attention_chunk_size": 5}}
    text = {"head_dim": 8, "intermediate_size": 12, "intermediate_size_mlp": 20, "num_local_experts": 4, "attention_chunk_size": 4, "moe_layers": [0], "no_rope_layers": [1, 0], "pad_token_id": 0}
    tower = {"hidden_size": 8, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 4, "patch_size": 2, "vision_output_dim": 8, "projector_input_dim": 8, "projector_output_dim": 8}
    add("llama4-vl", transformers.Llama4ForConditionalGeneration, text, tower, chunks, image_token_index=60)
    delta = {
        "head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_conv_kernel_dim": 3,
        "linear_key_head_dim": 6,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 5,
        "rope_parameters": {**PLAIN_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0], "mrope_interleaved": True},
    }
    plain = {**QWEN_TOWER, "num_position_embeddings": 4}
    add("qwen3_5-vl", transformers.Qwen3_5ForConditionalGeneration, delta, plain, **ids, tie_word_embeddings=True)
    routing = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 20}
    add("qwen3_5-moe-vl", transformers.Qwen3_5MoeForConditionalGeneration, {**delta, **routing}, plain, top, **ids)


# Images


def vit():
    def add(name, kind, *, options={}, **fields):
        shape = {key: ENCODER[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers")}
        fields = {
            **shape,
            "num_attention_heads": 2,
            "image_size": 12,
            "patch_size": 4,
            "layer_norm_eps": 0.01,
            **fields,
        }
        overlook = {**OTHER_EPS, **OTHER_GELU}
        pretrained(
            name, kind, transformers.ViTConfig(**fields), images(name, 12, 12), options=options, overlook=overlook
        )

    add("vit", transformers.ViTModel)
    add("vit-no-pooler", transformers.ViTModel, options={"add_pooling_layer": False}, qkv_bias=False)
    add("vit-image-classification", transformers.ViTForImageClassification, num_labels=5)


def swin():
    def add(name, kind, **fields):
        shape = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
        config = transformers.SwinConfig(**{**shape, "mlp_ratio": 2.5, "layer_norm_eps": 0.01, **fields})
        pretrained(name, kind, config, images(name, config.image_size, config.image_size), overlook={**OTHER_EPS, **OTHER_GELU})

    # A last stage with one window, which is not shifted.
    add("swin", transformers.SwinModel)
    # Windows and merged patches that extend beyond the image.
    fields = {"image_size": 18, "num_labels": 3, "use_absolute_embeddings": True, "qkv_bias": False}
    add("swin-image-classification", transformers.SwinForImageClassification, **fields)


def dinov2():
    def add(name, kind, **fields):
        shape = {key: ENCODER[key] for key in ("hidden_size", "num_hidden_layers")}
        fields = {**shape, "num_attention_heads": 2, "mlp_ratio": 2, "image_size": 12, "patch_size": 4, **fields}
        overlook = {} if fields.get("use_swiglu_ffn") else OTHER_GELU
        config = transformers.Dinov2Config(**{"layer_norm_eps": 0.01, **fields})
        unused = ("mask_token",)
        pretrained(name, kind, config, images(name, 12, 12), overlook={**OTHER_EPS, **overlook}, unused=unused)

    add("dinov2", transformers.Dinov2Model)
    add("dinov2-gated", transformers.Dinov2Model, use_swiglu_ffn=True, qkv_bias=False)
    add("dinov2-image-classification", transformers.Dinov2ForImageClassification, num_labels=5)


TOWER = {"hidden_size": 16, "intermediate_size": 28, "num_hidden_layers": 2, "num_attention_heads": 2, "layer_norm_eps": 0.01}
TOWER_TEXT = {**TOWER, "vocab_size": 48, "max_position_embeddings": 11}
TOWER_IMAGE = {**TOWER, "image_size": 12, "patch_size": 4}


def clip():
    def ended(name):
        """Texts whose end token is also the padding token."""
        inputs = tokens(name, pad=47)
        for row, length in zip(inputs["input_ids"], inputs["attention_mask"].sum(1)):
            row[length - 1] = 47
        return inputs

    text = {**TOWER_TEXT, "pad_token_id": 47, "bos_token_id": 1, "eos_token_id": 47}
    overlook = {**OTHER_EPS, "the variant of GELU": {"hidden_act": "gelu"}}

    def both(name, eos):
        config = transformers.CLIPConfig(
            text_config={**text, "eos_token_id": eos}, vision_config={**TOWER_IMAGE, "num_attention_heads": 4}, projection_dim=12
        )
        inputs = {**images(name, 12, 12), **{key: x[:2] for key, x in ended(name).items()}}
        other = {"text_config": {**config.text_config.to_dict(), "hidden_act": "gelu"}}
        pretrained(name, transformers.CLIPModel, config, inputs, overlook={"the variant of GELU": other}, alone=False, unused=KEYS)

    both("clip", 47)
    both("clip-first-published", 2)
    config = transformers.CLIPTextConfig(**text, projection_dim=12)
    kind = transformers.CLIPTextModelWithProjection
    pretrained("clip-text", kind, config, ended("clip-text"), overlook=overlook, unused=KEYS)
    config = transformers.CLIPVisionConfig(**TOWER_IMAGE)
    pretrained("clip-vision", transformers.CLIPVisionModel, config, images("clip-vision", 12, 12), overlook=overlook, unused=KEYS)


# As in WITHOUT_EFFECT.
KEYS = ("k_proj.bias",)


def siglip():
    # Texts of one length, as in training.
    texts = lambda name: {"input_ids": tokens(name, lengths=(11, 11))["input_ids"]}
    config = transformers.SiglipConfig(
        text_config={**TOWER_TEXT, "projection_size": 20}, vision_config={**TOWER_IMAGE, "hidden_size": 20}
    )
    inputs = {**images("siglip", 12, 12), **texts("siglip")}
    other = {"vision_config": {**config.vision_config.to_dict(), "hidden_act": "quick_gelu"}}
    how = {"overlook": {"the variant of GELU": other}, "alone": False, "unused": KEYS}
    pretrained("siglip", transformers.SiglipModel, config, inputs, **how)
    overlook = {**OTHER_EPS, "the variant of GELU": {"hidden_act": "gelu"}}
    config = transformers.SiglipTextConfig(**TOWER_TEXT)
    pretrained("siglip-text", transformers.SiglipTextModel, config, texts("siglip-text"), overlook=overlook, unused=KEYS)
    config = transformers.SiglipVisionConfig(**TOWER_IMAGE)
    pretrained("siglip-vision", transformers.SiglipVisionModel, config, images("siglip-vision", 12, 12), overlook=overlook, unused=KEYS)


def qwen_vl():
    def add(name, kind, **fields):
        # transformers does not read the size of images.
        shape = {"patch_size": 2, "depth": 2, "num_heads": 2, "rope_parameters": {"rope_theta": 100.0}}
        config = kind.config_class(**{**shape, **fields})
        overlook = {"the activation": {"hidden_act": "gelu"}, "the base": {"rope_parameters": {"rope_theta": 1e4}}}
        if "window_size" in fields:
            overlook |= {"windows": {"fullatt_block_indexes": [0, 1]}, "layers without windows": {"fullatt_block_indexes": []}}
        if "deepstack_visual_indexes" in fields:
            overlook |= {"merged layers": {"deepstack_visual_indexes": [0, 1]}}
        pretrained(name, kind, config, images(name, *config.image_size), overlook=overlook)

    shape = {"image_size": [8, 12], "embed_dim": 16, "hidden_size": 20, "mlp_ratio": 2}
    add("qwen2-vl-vision", towers.Qwen2VisionTransformerPretrainedModel, **shape)
    shape = {"image_size": [16, 24], "hidden_size": 16, "out_hidden_size": 20, "intermediate_size": 28}
    windows = {"window_size": 8, "fullatt_block_indexes": [1]}
    add("qwen2_5-vl-vision", towers.Qwen2_5_VisionTransformerPretrainedModel, **shape, **windows)
    shape = {"image_size": [8, 12], "hidden_size": 16, "out_hidden_size": 12, "intermediate_size": 20}
    deep = {"num_position_embeddings": 25, "deepstack_visual_indexes": [1, 0]}
    add("qwen3-vl-vision", towers.Qwen3VLVisionModel, **shape, **deep)


def convnext():
    def add(name, kind, **fields):
        shape = {"hidden_sizes": [6, 8, 12], "depths": [1, 2, 1], "num_stages": 3, "layer_norm_eps": 0.01}
        config = transformers.ConvNextConfig(**{**shape, **fields})
        overlook = {**OTHER_EPS, **OTHER_GELU}
        pretrained(name, kind, config, images(name, 38, 33), overlook=overlook)

    add("convnext", transformers.ConvNextModel)
    add(
        "convnext-image-classification",
        transformers.ConvNextForImageClassification,
        layer_scale_init_value=0.0,
        patch_size=3,
        num_labels=5,
    )


def efficientnet():
    def add(name, kind, **fields):
        fields = {
            "width_coefficient": 0.25,
            "depth_coefficient": 0.6,
            "depth_divisor": 4,
            "kernel_sizes": [3, 5, 3],
            "in_channels": [32, 24, 48],
            "out_channels": [24, 48, 56],
            "strides": [1, 2, 2],
            "num_block_repeats": [1, 3, 2],
            "expand_ratios": [1, 3, 2],
            "hidden_dim": 320,
            "batch_norm_eps": 0.01,
            **fields,
        }
        overlook = {"batch_norm_eps": {"batch_norm_eps": 1e-5}, "the activation": {"hidden_act": "relu"}}
        inputs = images(name, 27, 22)
        pretrained(name, kind, transformers.EfficientNetConfig(**fields), inputs, overlook=overlook)

    add("efficientnet", transformers.EfficientNetModel, depthwise_padding=[3])
    add("efficientnet-image-classification", transformers.EfficientNetForImageClassification, pooling_type="max", num_labels=5)


def resnet():
    def add(name, kind, **fields):
        config = transformers.ResNetConfig(**{"embedding_size": 6, "depths": [2, 1, 2], **fields})
        pretrained(name, kind, config, images(name, 19, 13))

    classifier = transformers.ResNetForImageClassification
    basic = {"layer_type": "basic", "hidden_sizes": [6, 8, 10], "num_labels": 5}
    bottleneck = {"layer_type": "bottleneck", "hidden_sizes": [8, 16, 24]}
    add("resnet-basic", classifier, **basic)
    add("resnet-basic-first-stage", classifier, **basic, downsample_in_first_stage=True)
    add("resnet-bottleneck", classifier, **bottleneck, num_labels=5)
    add("resnet-bottleneck-first-convolution", transformers.ResNetModel, **bottleneck, downsample_in_bottleneck=True)


def rt_detr():
    def add(name, kind, backbone, offsets, overlook={}, **fields):
        """`offsets` of feature maps, by seed and deviation, separate the scores: rounding does not change the queries."""

        def separated(tensors):
            seed, deviation = offsets
            for level in range(fields["num_feature_levels"]):
                rng = random.Random(f"{name}/{seed}/{level}")
                tensors[f"model.decoder_input_proj.{level}.1.bias"] = normal(rng, (config.d_model,), deviation)
            tensors["model.enc_score_head.bias"] = normal(random.Random(f"{name}/{seed}/scores"), (config.num_labels,), 2)
            return tensors

        widths = {"embedding_size": 6, "out_features": ["stage2", "stage3", "stage4"], **backbone}
        backbone = transformers.RTDetrResNetConfig(**widths)
        shape = {"encoder_hidden_dim": 8, "d_model": 12, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "decoder_layers": 2}
        shape |= {"encoder_in_channels": backbone.hidden_sizes[1:], "encoder_ffn_dim": 20, "decoder_ffn_dim": 18, "decoder_n_points": 2}
        shape |= {"num_denoising": 3, "num_labels": 5, "layer_norm_eps": 0.01, "batch_norm_eps": 0.01}
        shape |= {"positional_encoding_temperature": 50, **fields}
        shape["decoder_in_channels"] = [shape["encoder_hidden_dim"]] * 3
        config = kind.config_class(backbone_config=backbone, **shape)
        overlook = {
            **OTHER_EPS,
            "the epsilon of batch norms": {"batch_norm_eps": 1e-5},
            "the temperature": {"positional_encoding_temperature": 10000},
            "the activation of the encoder": {"encoder_activation_function": "relu"},
            "the activation of the decoder": {"decoder_activation_function": "gelu"},
            "the activation of convolutions": {"activation_function": "relu"},
            **overlook,
        }
        # Only heads of the last layer have outputs, and embeddings of classes are for training.
        unused = (*KEYS, "denoising_class_embed", "class_embed.0", "n_points_scale")
        height, width = fields["anchor_image_size"] or fields["image_size"]
        pretrained(name, kind, config, images(name, height, width), edit=offsets and separated, overlook=overlook, unused=unused)

    basic = {"layer_type": "basic", "hidden_sizes": [6, 8, 10, 12], "depths": [1, 2, 1, 1]}
    deep = {"layer_type": "bottleneck", "hidden_sizes": [8, 12, 16, 20], "depths": [2, 1, 1, 1], "downsample_in_bottleneck": True}
    add(
        "rt-detr-bottleneck",
        transformers.RTDetrForObjectDetection,
        deep,
        (80, 6),
        {"the order of norms": {"normalize_before": False}},
        encoder_hidden_dim=12,
        encoder_attention_heads=3,
        hidden_expansion=0.5,
        normalize_before=True,
        num_feature_levels=5,
        encode_proj_layers=[1, 2],
        num_queries=3,
        anchor_image_size=None,
        image_size=[64, 32],
    )
    add(
        "rt-detr-v2",
        transformers.RTDetrV2ForObjectDetection,
        basic,
        None,
        {"the scale of offsets": {"decoder_offset_scale": 0.5}},
        decoder_offset_scale=0.8,
        num_labels=3,
        num_queries=7,
        anchor_image_size=[32, 64],
    )


def torchvision_models():
    """torchvision has no config.json: ours names the variant and the differences from it."""

    def add(name, config, make, inputs, against={}):
        if not (folder := fresh(name)):
            return
        write_json(folder / "config.json", {"model_type": "torchvision", **config})
        model = randomise(make(), name)
        save_file(model.state_dict(), folder / "model.safetensors", {"format": "pt"})

        def reload(tensors):
            other = make()
            other.load_state_dict(tensors)
            return other.eval()

        against = {label: lambda change=change: change(reload(model.state_dict())) for label, change in against.items()}
        golden(name, folder, model, reload, inputs, against=against)

    def resnet_like(name, variant, block, layers):
        config = {"variant": variant, "layers": layers, "width": 2, "num_classes": 5}
        add(name, config, lambda: NarrowResNet(block, layers, 2, 5), images(name, 33, 17))

    def without_upper_bound(model):
        for module in list(model.modules()):
            for key, child in list(module.named_children()):
                if isinstance(child, nn.ReLU6):
                    setattr(module, key, nn.ReLU())
        return model

    resnet_like("torchvision-resnet18", "resnet18", BasicBlock, [1, 2, 1, 1])
    resnet_like("torchvision-resnet50", "resnet50", Bottleneck, [2, 1, 1, 1])
    setting = [[1, 12, 1, 1], [6, 16, 2, 2], [6, 22, 2, 1], [3, 32, 1, 2]]
    mobilenet = {"width_mult": 0.25, "round_nearest": 4, "inverted_residual_setting": setting}
    narrow = {"last_channel": 20, "num_classes": 5}
    add(
        "torchvision-mobilenet-v2",
        {"variant": "mobilenet_v2", **mobilenet, **narrow},
        lambda: narrow_mobilenet(**narrow, **mobilenet),
        images("torchvision-mobilenet-v2", 19, 13, std=4.0),
        against={"the upper bound of ReLU6": without_upper_bound},
    )

    def replaced(kind, other):
        def change(model):
            for module in list(model.modules()):
                for key, child in list(module.named_children()):
                    if isinstance(child, kind):
                        setattr(module, key, other())
            return model

        return change

    name = "torchvision-mobilenet-v3"
    add(
        name,
        {"variant": "mobilenet_v3_small", "blocks": [row[5:] for row in MOBILENET_V3_ROWS], "num_classes": 5},
        narrow_mobilenet_v3,
        images(name, 37, 29, std=2.0),
        against={"hardswish": replaced(nn.Hardswish, nn.ReLU), "the gates of squeeze-and-excitation": replaced(nn.Hardsigmoid, nn.Sigmoid)},
    )
    name = "torchvision-efficientnet"
    add(
        name,
        {"variant": "efficientnet_b0", "blocks": [row[2] for row in EFFICIENTNET_ROWS], "num_classes": 5},
        narrow_efficientnet,
        images(name, 27, 22),
        against={"silu": replaced(nn.SiLU, nn.ReLU)},
    )


for family in (
    bert,
    roberta,
    distilbert,
    mpnet,
    modernbert,
    deberta,
    t5,
    whisper,
    sentence_transformers,
    sentence_modules,
    gpt2,
    llama,
    descendants_of_llama,
    of_gpt_neox,
    opt,
    phi3,
    olmo2,
    olmo3,
    glm,
    ernie4_5,
    hunyuan,
    starcoder2,
    stablelm,
    phi,
    cohere,
    smollm3,
    granite,
    granite_moe,
    granite_hybrid,
    mamba2,
    nemotron_h,
    lfm2,
    gemma,
    gemma2,
    gemma3,
    experts,
    qwen3_next,
    sigmoid_routers,
    minimax_m2,
    gpt_oss,
    llama4,
    ministral3,
    multimodal,
    vit,
    swin,
    dinov2,
    clip,
    siglip,
    qwen_vl,
    convnext,
    efficientnet,
    resnet,
    rt_detr,
    torchvision_models,
):
    family()
