"""Write tests/golden/gradients: gradients of PyTorch for single ops and whole models, in f32.

    scripts/goldens gradients [TEXT…]      all models, or those whose name contains one of the texts; others are unchanged

Weights of a loss follow a formula, so that they need not be stored:

    w(i, s) = ((7919 i + 104729 s) mod 2003) / 2003 - 0.5        in f64, then rounded to f32

ops.json lists cases: the op in the notation of graph.json, the number of its inputs, and the inputs that have a
gradient. ops.safetensors has "CASE/in/N", and "CASE/gradient/N": the gradients of the loss Σ output[i] · w(i, 0)
over the flattened output.

models.safetensors has for each folder MODEL of tests/golden/models and each parameter, by its name in
model.safetensors, one f32 vector "MODEL/PARAMETER" of 2 + min(8, n) numbers about the gradient g of its n
elements:

    0       the L2 norm of g
    1       Σ g[i] · w(i, 1000), over the flattened g
    2…      the first elements of the flattened g

The loss for the inputs "in/…" of golden.safetensors is the sum over the outputs "out/…", in the order of their
names and numbered by k from 0, of Σ output[i] · w(i, k) over the flattened output. If an output is [batch,
sequence, width], padding tokens of "in/attention_mask" have the weight zero. Outputs have the stored shape: the
pooled output of a ResNet has two more axes of length 1, which do not change flat indices. Models are in eval
mode: batch norms use their running statistics, and dropout is off. A shared tensor has the sum of the gradients
of its uses, under its name in the file. Parameters that no output depends on are omitted. Gradients that are
zero except for rounding (biases of keys) are stored as computed: compare differences with the largest gradient
of the model, not with that of the tensor.
"""

import json
import math
import random
import sys

import torch
import transformers
from safetensors.torch import load_file, save_file
from sentence_transformers import sentence_transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from torch.nn import functional as F
from torchvision.models.resnet import BasicBlock, Bottleneck
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import mamba2_chunk_scan
from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder
from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2_vl
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule
from transformers.models.rt_detr.modeling_rt_detr import MultiScaleDeformableAttention, RTDetrModel
from transformers.models.swin.modeling_swin import SwinLayer, SwinRelativePositionBias
from transformers.models.t5.modeling_t5 import T5Attention
from transformers.vision_utils import get_vision_position_ids

from lib import GOLDEN
from lib.narrow import NarrowResNet, narrow_efficientnet, narrow_mobilenet, narrow_mobilenet_v3
from lib.towers import model_class

FOLDER = GOLDEN / "gradients"
ONLY = sys.argv[1:]

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def weights(count, series):
    i = torch.arange(count, dtype=torch.int64)
    return (((7919 * i + 104729 * series) % 2003).double() / 2003 - 0.5).float()


def weighed(output, series):
    return output.flatten() * weights(output.numel(), series)


# Single ops


def normal(rng, shape, mean=0.0):
    return torch.tensor([rng.gauss(mean, 1) for _ in range(math.prod(shape))]).reshape(shape)


def batch_norm(x, weight, bias, mean, variance):
    """Written out, because PyTorch's function has no gradient of the statistics."""
    x, weight, bias, mean, variance = (t.reshape(1, -1, 1, 1) if t.dim() == 1 else t for t in (x, weight, bias, mean, variance))
    return (x - mean) / (variance + 1e-5).sqrt() * weight + bias


def batch_norm_of_batch(x, weight, bias, mean, variance):
    return F.batch_norm(x, None, None, weight, bias, True)


def rms_norm(x, weight):
    return F.rms_norm(x, weight.shape, weight, 1e-6)


def layer_norm(x, weight, bias):
    return F.layer_norm(x, weight.shape, weight, bias, 1e-5)


def attention(scale, causal=False, window=None):
    def compute(q, k, v, *extras):
        mask = next((extra for extra in extras if extra.dim() == 2), None)
        bias = next((extra for extra in extras if extra.dim() == 3), None)
        sinks = next((extra for extra in extras if extra.dim() == 1), None)
        sequence, keys = q.shape[2], k.shape[2]
        query, key = torch.arange(sequence)[:, None], torch.arange(keys)[None]
        visible = (key <= query) if causal else torch.ones(sequence, keys, dtype=torch.bool)
        if window:
            visible = visible & (query - key < window) & (key - query < window)
        visible = visible[None, None]
        if mask is not None:
            visible = visible & (mask != 0)[:, None, None]
        if bias is not None:
            visible = torch.zeros(1).where(visible, -torch.inf) + bias
        if sinks is not None:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
            hidden = torch.zeros(1).where(visible, -torch.inf) if visible.dtype is torch.bool else visible
            scores = q @ k.transpose(2, 3) * scale + hidden
            column = sinks[:, None, None].expand(*scores.shape[:3], 1)
            return torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ v
        return F.scaled_dot_product_attention(q, k, v, visible, scale=scale, enable_gqa=True)

    return compute


def deformable_attention(levels, points, scale):
    """As in transformers, whose offsets are of a version without and of one with a configured scale."""

    def compute(values, offsets, scores, boxes):
        batch, queries, heads = *scores.shape[:2], scores.shape[2] // (len(levels) * points)
        offsets = offsets.reshape(batch, queries, heads, len(levels), points, 2)
        center, size = boxes[:, :, None, None, None, :2], boxes[:, :, None, None, None, 2:]
        places = center + offsets / points * size * scale
        weights = scores.reshape(batch, queries, heads, -1).softmax(-1).reshape(batch, queries, heads, len(levels), points)
        values = values.reshape(*values.shape[:2], heads, -1)
        sample = MultiScaleDeformableAttention()
        return sample(values, torch.tensor(levels), [tuple(level) for level in levels], None, places, weights, 64)

    return compute


def causal_conv(x, weight, mask=None, bias=None):
    x = x if mask is None else x * mask[:, :, None]
    return F.conv1d(x.transpose(1, 2), weight, bias, padding=weight.shape[2] - 1, groups=len(weight))[:, :, : x.shape[1]].transpose(1, 2)


def gated_delta(scale=1.0):
    """The recurrent form of transformers, without its normalization and scaling of queries."""

    def compute(q, k, v, decay, rate):
        tokens = lambda x: x.transpose(1, 2)
        q = tokens(q) * q.shape[-1] ** 0.5 * scale
        output, _ = torch_recurrent_gated_delta_rule(q, tokens(k), tokens(v), decay, rate)
        return tokens(output)

    return compute


def state_space(scale):
    """The form of transformers in chunks, whose decays are products with the rates."""

    def compute(q, k, v, decay, rate, mask=None):
        tokens = lambda x: x.transpose(1, 2)
        step = rate if mask is None else rate * mask[:, :, None]
        limits = (-math.inf, math.inf)
        output = mamba2_chunk_scan(tokens(v), step, decay / rate, tokens(k), tokens(q) * scale, chunk_size=4, dt_limit=limits)
        return tokens(output)

    return compute


def rotary(x):
    sequence, width = x.shape[2:]
    frequencies = 10000.0 ** (-torch.arange(0, width, 2).double() / width)
    angles = torch.arange(sequence).double()[:, None] * frequencies
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos().float(), angles.sin().float()
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


def relative_bias(bucket, **options):
    def compute(tokens, table):
        places = torch.arange(tokens.shape[1])
        rows = bucket(places[None] - places[:, None], **options)
        return F.embedding(rows, table).permute(2, 0, 1)

    return compute


def relative_products(scale, span, max_distance=None, of_keys=False):
    def compute(heads, table):
        places, (_, count, _, width) = torch.arange(heads.shape[2]), heads.shape
        steps = places[:, None] - places[None]
        if max_distance:
            steps = make_log_bucket_position(steps, span, max_distance + 1).long()
        rows = (steps + span).clamp(0, 2 * span - 1)
        vectors = table.reshape(-1, count, width)[rows]
        return scale * torch.einsum("bhkd,qkhd->bhqk" if of_keys else "bhqd,qkhd->bhqk", heads, vectors)

    return compute


def window_bias(window, windows, shift):
    height, width = (window * count for count in windows)
    config = transformers.SwinConfig(window_size=window)
    layer = SwinLayer(config, config.embed_dim, (height, width), 1, shift_size=shift)
    count = windows[0] * windows[1]

    def compute(table):
        bias = SwinRelativePositionBias(table.shape[1], (window, window))
        rows = table[bias.relative_position_index].reshape(window**2, window**2, -1).permute(2, 0, 1)
        mask = layer.get_attn_mask(height, width, table.dtype, table.device)
        return (rows[:, None] + (torch.zeros(count, 1, 1) if mask is None else mask)).flatten(0, 1)

    return compute


def grid_rotary(theta, grid, block):
    positions = get_vision_position_ids(torch.tensor([[1, *grid]]), block)

    def compute(heads):
        width = heads.shape[3]
        config = qwen2_vl.Qwen2VLVisionConfig(embed_dim=width, num_heads=1, rope_parameters={"rope_theta": theta})
        tables = qwen2_vl.Qwen2VLVisionRotaryEmbedding(config)(heads, positions)
        rows = [sample.transpose(0, 1) for sample in heads]
        return torch.stack([qwen2_vl.apply_rotary_pos_emb_vision(x, x, *tables)[0].transpose(0, 1) for x in rows])

    return compute


def token_pool(mode):
    pooling = Pooling(4, mode)
    return lambda x, mask: pooling({"token_embeddings": x, "attention_mask": mask})["sentence_embedding"]


def masked_mean(x, mask):
    return (x * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)


def conv(**how):
    return lambda x, weight, bias=None: F.conv2d(x, weight, bias, **how)


INTEGERS = object()


def op_cases():
    """Op, its PyTorch function, and the shapes of its inputs; for integer inputs followed by the maximum."""

    def text(name, **attributes):
        return name + (json.dumps(attributes, separators=(",", ":")) if attributes else "")

    image = (2, 4, 7, 6)
    channels = [(4,)] * 4
    mask = (INTEGERS, 2, 2, 5)
    yield text("Linear"), F.linear, [(2, 3, 6), (4, 6), (4,)]
    yield text("Linear", input_major=True), lambda x, w, b: x @ w + b, [(2, 3, 6), (6, 4), (4,)]
    for groups, stride, padding, dilation, weight in [
        (1, 1, 1, 1, (6, 4, 3, 3)),
        (1, 2, 1, 1, (6, 4, 3, 3)),
        (1, 2, 0, 1, (6, 4, 1, 1)),
        (2, 2, 1, 1, (6, 2, 3, 3)),
        (4, 1, 1, 1, (4, 1, 3, 3)),
        (4, 2, 1, 1, (4, 1, 3, 3)),
        (1, 1, 2, 2, (6, 4, 3, 3)),
    ]:
        how = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
        yield text("Conv", **how), conv(**how), [image, weight, weight[:1]]
    yield text("BatchNorm"), batch_norm, [image, *channels]
    yield text("BatchNorm", batch=True), batch_norm_of_batch, [image, *channels]
    yield text("LayerNorm"), layer_norm, [(2, 3, 6), (6,), (6,)]
    yield text("RmsNorm"), rms_norm, [(2, 3, 6), (6,)]
    yield text("Relu"), F.relu, [(3, 20)]
    yield text("Gelu"), F.gelu, [(3, 20)]
    yield text("Gelu", tanh=True), lambda x: F.gelu(x, approximate="tanh"), [(3, 20)]
    yield text("Silu"), F.silu, [(3, 20)]
    yield text("Sigmoid"), torch.sigmoid, [(3, 20)]
    yield text("Tanh"), torch.tanh, [(3, 20)]
    yield text("Clip", min=0.0, max=1.0), lambda x: F.hardtanh(x, 0, 1), [(3, 20)]
    rounded = lambda x: torch.fake_quantize_per_tensor_affine(x, 0.01, 20, -128, 127)
    yield text("FakeQuantize", scale=0.01, zero_point=20), rounded, [(3, 20)]
    yield text("Softmax"), lambda x: x.softmax(-1), [(2, 3, 7)]
    yield text("Add"), torch.add, [(2, 3, 5), (3, 1)]
    yield text("Mul"), torch.mul, [(2, 3, 5), (1, 3, 5)]
    yield text("Embedding"), F.embedding, [(INTEGERS, 9, 2, 6), (9, 5)]
    yield text("Rotary"), rotary, [(2, 3, 5, 6)]
    heads = [(2, 4, 5, 3), (2, 2, 5, 3), (2, 2, 5, 6)]
    yield text("Attention", scale=0.5), attention(0.5), heads
    yield text("Attention", scale=0.5, causal=True), attention(0.5, True), heads
    yield text("Attention", scale=0.5, causal=True, window=2), attention(0.5, True, 2), heads
    yield text("Attention", scale=0.5), attention(0.5), [*heads, mask]
    yield text("MaxPool", kernel=3, stride=2, padding=1), lambda x: F.max_pool2d(x, 3, 2, 1), [image]
    yield text("GlobalAveragePool"), lambda x: x.mean((2, 3)), [image]
    yield text("MaskedMean"), masked_mean, [(2, 5, 4), mask]
    yield text("Normalize"), lambda x: F.normalize(x, dim=-1), [(2, 3, 4)]
    quantized = torch._fake_quantize_learnable_per_tensor_affine
    learned = lambda x, logarithm: quantized(x, 0.01 * logarithm.exp(), torch.tensor([20.0]), -128, 127, 1.0)
    yield text("LearnedFakeQuantize", scale=0.01, zero_point=20), learned, [(3, 20), (1,)]
    bias = (4, 5, 5)
    yield text("Attention", scale=0.5, window=2), attention(0.5, window=2), heads
    yield text("Attention", scale=0.5), attention(0.5), [*heads, bias]
    yield text("Attention", scale=0.5, window=3), attention(0.5, window=3), [*heads, mask, bias]
    tokens = (INTEGERS, 9, 2, 150)
    both, back = MPNetEncoder.relative_position_bucket, T5Attention._relative_position_bucket
    yield text("RelativeBias"), relative_bias(both), [tokens, (32, 3)]
    yield text("RelativeBias", both_ways=False), relative_bias(back, bidirectional=False), [tokens, (33, 2)]
    few = {"num_buckets": 8, "max_distance": 20}
    yield text("RelativeBias", buckets=8, max_distance=20), relative_bias(both, **few), [tokens, (8, 2)]
    for mode, choice in {"max": "max", "mean_sqrt_len_tokens": "root_mean", "weightedmean": "weighted_mean", "lasttoken": "last"}.items():
        yield text("TokenPool", choice=choice), token_pool(mode), [(2, 5, 4), mask]
    at = lambda place: lambda x, tokens: x[torch.arange(len(x)), place(tokens).int().argmax(-1)]
    yield text("TokenPool", choice="largest"), at(lambda tokens: tokens), [(2, 9, 4), (INTEGERS, 4, 2, 9)]
    yield text("TokenPool", choice={"named": 2}), at(lambda tokens: tokens == 2), [(2, 9, 4), (INTEGERS, 4, 2, 9)]

    for how in [{"span": 6, "max_distance": 14}, {"span": 6, "max_distance": 14, "of_keys": True}, {"span": 9}, {"span": 9, "of_keys": True}]:
        how = {"scale": 0.5, **how}
        yield text("RelativeProducts", **how), relative_products(**how), [(2, 3, 25, 4), (2 * how["span"], 12)]
    yield text("WindowBias", window=3, windows=[2, 3], shift=1), window_bias(3, [2, 3], 1), [(25, 4)]
    yield text("WindowBias", window=4, windows=[1, 2]), window_bias(4, [1, 2], 0), [(49, 3)]
    yield text("CumSum"), lambda x: x.cumsum(-1), [(2, 3, 7)]
    yield text("CumSum", axis=1, reverse=True), lambda x: x.flip(1).cumsum(1).flip(1), [(2, 6, 3)]
    yield text("CumSum", axis=0, exclusive=True), lambda x: x.cumsum(0) - x, [(5, 3)]
    sinks = (4,)
    yield text("Attention", scale=0.5, causal=True, window=3), attention(0.5, True, 3), [*heads, sinks]
    yield text("Attention", scale=0.5), attention(0.5), [*heads, mask, bias, sinks]
    yield text("CausalConv"), causal_conv, [(2, 6, 5), (5, 1, 3)]
    yield text("CausalConv"), causal_conv, [(2, 3, 4), (4, 1, 4), (INTEGERS, 2, 2, 3), (4,)]
    for groups, sequence, how in [(4, 5, {}), (2, 9, {"scale": 0.5})]:
        rows, numbers = (2, groups, sequence, 3), (2, sequence, 4)
        yield text("GatedDelta", **how), gated_delta(**how), [rows, rows, (2, 4, sequence, 6), numbers, numbers]
    for groups, sequence, masked in [(4, 5, False), (2, 9, True)]:
        rows, numbers = (2, groups, sequence, 3), (2, sequence, 4)
        mask = [(INTEGERS, 2, 2, sequence)] if masked else []
        yield text("GatedDelta", scale=0.5, additive=True), state_space(0.5), [rows, rows, (2, 4, sequence, 6), numbers, numbers, *mask]
    # As in Qwen3NextGatedDeltaNet of transformers.
    yield text("Decay"), lambda x, bias, rates: -rates.exp() * torch.nn.functional.softplus(x + bias), [(2, 5, 4), (4,), (4,)]
    limited = lambda x, bias, rates: -rates.exp() * torch.nn.functional.softplus(x + bias).clamp(0.5, 0.9)
    yield text("Decay", min=0.5, max=0.9), limited, [(2, 5, 4), (4,), (4,)]
    scaled = lambda x: x * get_llama_4_attn_scale(torch.arange(x.shape[2])[None], 0.4, 3)
    yield text("PositionScale", interval=3, factor=0.4, offset=0), scaled, [(2, 2, 8, 4)]
    yield text("GridRotary", theta=100.0, grid=[4, 6], block=2), grid_rotary(100.0, (4, 6), 2), [(2, 3, 24, 8)]
    # RT-DETR.
    for how in [{"levels": [[3, 4], [2, 1]], "points": 3, "scale": 0.5}, {"levels": [[5, 2]], "points": 2, "scale": 1.5}]:
        places, samples = sum(rows * columns for rows, columns in how["levels"]), 2 * len(how["levels"]) * how["points"]
        yield text("DeformableAttention", **how), deformable_attention(**how), [(2, places, 6), (2, 5, 2 * samples), (2, 5, samples), (2, 5, 4)]
    by_token = lambda x, indices: x.gather(1, indices[..., None].expand(-1, -1, x.shape[2]))
    yield text("GatherTokens"), by_token, [(2, 5, 3), (INTEGERS, 5, 2, 8)]
    _, valid = RTDetrModel._cached_generate_anchors(((1, 64), (2, 3)), 0.05)
    yield text("Anchors", levels=[[1, 64], [2, 3]], apply="mask"), lambda x: x * valid, [(2, 70, 3)]


def ops():
    cases, tensors = [], {}
    for number, (op, compute, shapes) in enumerate(op_cases()):
        name = f"{number:02}"
        rng = random.Random(f"gradients/{name}")
        inputs = []
        for index, shape in enumerate(shapes):
            if shape[0] is INTEGERS:
                values = torch.tensor([rng.randrange(shape[1]) for _ in range(math.prod(shape[2:]))]).reshape(shape[2:])
                if shape[1] == 2:
                    values[:, 0] = 1  # the gradient of a fully masked query is undefined
                inputs.append(values)
            elif op.startswith("BatchNorm") and index == 4:
                inputs.append((normal(rng, shape).abs() + 0.5).requires_grad_())
            else:
                inputs.append(normal(rng, shape).requires_grad_())
        output = compute(*inputs)
        loss = weighed(output, 0).sum()
        loss.backward()
        wanted = [index for index, x in enumerate(inputs) if x.grad is not None]
        cases.append({"name": name, "op": op, "inputs": len(inputs), "gradients": wanted})
        tensors |= {f"{name}/in/{index}": x.detach() for index, x in enumerate(inputs)}
        tensors |= {f"{name}/gradient/{index}": inputs[index].grad for index in wanted}
    head = {"made_by": "scripts/goldens gradients", "versions": {"torch": torch.__version__.split("+")[0]}}
    lines = ",\n".join("    " + json.dumps(case) for case in cases)
    (FOLDER / "ops.json").write_text(json.dumps(head, indent=2)[:-2] + ',\n  "cases": [\n' + lines + "\n  ]\n}\n")
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, FOLDER / "ops.safetensors")


# Whole models


def sentence_modules(folder):
    """The modules after the transformer, by folder, as loaded by the library."""
    found = {}
    for entry in json.loads((folder / "modules.json").read_text())[1:]:
        kind = getattr(sentence_transformer.modules, entry["type"].rsplit(".", 1)[1])
        config = folder / entry["path"] / "config.json"
        found[entry["path"]] = kind.load(str(folder), subfolder=entry["path"]) if config.exists() else kind()
    return found


def load_model(folder, config, wanted):
    """The model, and the function that computes its outputs."""
    if config["model_type"] == "torchvision":
        if config["variant"] == "mobilenet_v3_small":
            model = narrow_mobilenet_v3()
        elif config["variant"] == "efficientnet_b0":
            model = narrow_efficientnet()
        elif config["variant"] == "mobilenet_v2":
            fields = ("width_mult", "round_nearest", "inverted_residual_setting", "last_channel", "num_classes")
            model = narrow_mobilenet(**{key: config[key] for key in fields})
        else:
            block = BasicBlock if config["variant"] == "resnet18" else Bottleneck
            model = NarrowResNet(block, config["layers"], config["width"], config["num_classes"])
        model.load_state_dict(load_file(folder / "model.safetensors"))
        return model.eval(), lambda inputs: {"logits": model(inputs["pixel_values"])}
    kind = model_class(config["architectures"][0])
    pooler = "last_hidden_state" in wanted and "pooler_output" not in wanted and kind.__name__ in ("BertModel", "ViTModel")
    options = {"add_pooling_layer": False} if pooler else {}
    if config["model_type"] == "kimi_k2":
        # Names of tensors are converted for the family with the same code.
        options["config"] = kind.config_class.from_dict({**config, "model_type": kind.config_class.model_type})
    model = kind.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32, **options).eval()
    model.beside = modules = sentence_modules(folder) if "sentence_embedding" in wanted else {}

    def compute(inputs):
        if model.can_generate():
            inputs = {**inputs, "use_cache": False}
        outputs = model(**inputs)
        found = {name: outputs[name] for name in wanted if name in outputs}
        if "sentence_embedding" in wanted:
            hidden, mask = outputs["last_hidden_state"], inputs["attention_mask"]
            given = {"token_embeddings": hidden, "attention_mask": mask}
            for module in modules.values():
                given = module(given)
            found["sentence_embedding"] = given["sentence_embedding"]
        return found

    return model, compute


def one_model(folder):
    stored = load_file(folder / "golden.safetensors")
    inputs = {name[3:]: x for name, x in stored.items() if name.startswith("in/")}
    expected = {name[4:]: x for name, x in stored.items() if name.startswith("out/")}
    config = json.loads((folder / "config.json").read_text())
    model, compute = load_model(folder, config, expected)
    outputs = compute(inputs)
    assert outputs.keys() == expected.keys(), (folder.name, outputs.keys(), expected.keys())
    mask = inputs.get("attention_mask")
    loss = 0
    for number, name in enumerate(sorted(outputs)):
        output = outputs[name]
        terms = weighed(output, number)
        real = torch.ones_like(output)
        if mask is not None and output.dim() == 3 and output.shape[:2] == mask.shape:
            real = real * mask.unsqueeze(-1)
        gap = ((output - expected[name]) * real).abs().max().item()
        assert gap < 2e-5, f"{folder.name}: {name} is off by {gap}"
        loss = loss + (terms * real.flatten()).sum()
    loss.backward()
    # The name of a parameter in the file is that of the tensor with the same values.
    file = load_file(folder / "model.safetensors")
    found, halves = {}, {}
    for parameter_name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        for values, gradient in pieces(file, parameter):
            whole = next((key for key, x in file.items() if values.dim() and x.dim() and len(x) == 2 * len(values) and is_half(x, values)), None)
            if whole and not any(torch.equal(x, values) for x in file.values() if x.shape == values.shape):
                # The gate is first.
                halves.setdefault(whole, []).append(gradient)
                if len(halves[whole]) < 2:
                    continue
                values, gradient = file[whole], torch.cat(halves[whole])
            names = [key for key, x in file.items() if x.shape == values.shape and torch.equal(x, values)]
            assert len(names) == 1, f"{folder.name}: {parameter_name} is {names}"
            found[f"{folder.name}/{names[0]}"] = told(gradient)
    for path, module in getattr(model, "beside", {}).items():
        found |= {f"{folder.name}/{path}/{key}": told(parameter.grad) for key, parameter in module.named_parameters()}
    return found


def told(gradient):
    """The norm, a sum, and the first numbers."""
    gradient = gradient.flatten()
    dot = (gradient.double() * weights(gradient.numel(), 1000).double()).sum()
    head = torch.stack([gradient.double().norm(), dot]).float()
    return torch.cat([head, gradient[:8]])


def is_half(x, values):
    return x.dim() and any(part.shape == values.shape and torch.equal(part, values) for part in x.chunk(2))


def pieces(file, parameter):
    """A parameter and its gradient; a fused expert parameter is split into the tensors of the file."""
    values, gradient = parameter.data, parameter.grad
    if values.dim() != 3 or any(x.shape == values.shape for x in file.values()):
        return [(values, gradient)]
    found = []
    for pair in zip(values, gradient):
        stored = any(x.shape == pair[0].shape and torch.equal(x, pair[0]) for x in file.values())
        found += [pair] if stored else list(zip(*(x.chunk(2) for x in pair)))
    return found


def models():
    path = FOLDER / "models.safetensors"
    chosen = [folder for folder in sorted((GOLDEN / "models").iterdir()) if not ONLY or any(text in folder.name for text in ONLY)]
    names = {folder.name for folder in chosen}
    found = {key: x for key, x in load_file(path).items() if key.split("/")[0] not in names} if ONLY else {}
    for folder in chosen:
        found |= one_model(folder)
    save_file(found, path)
    print(f"{len(found)} parameters, {(FOLDER / 'models.safetensors').stat().st_size} bytes")


FOLDER.mkdir(exist_ok=True)
if not ONLY:
    ops()
models()
