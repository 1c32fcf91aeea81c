"""Write tests/golden: what PyTorch and compressed-tensors compute for small inputs.

Every NAME.json lists cases; the tensors of a case are in NAME.safetensors under "CASE/…".
"""

import json
import math
import random
import struct

import compressed_tensors
import torch
import torch.nn.utils.prune as torch_prune
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.compressors.pack_quantized import pack_to_int32, unpack_from_int32
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationArgs, preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save as safetensors_bytes

from lib import GOLDEN

FOLDER = GOLDEN
VERSIONS = {"torch": torch.__version__.split("+")[0], "compressed-tensors": compressed_tensors.__version__}
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def save(name, cases, tensors):
    head = {"made_by": "scripts/goldens passes", "versions": VERSIONS}
    lines = ",\n".join("    " + json.dumps(case) for case in cases)
    text = json.dumps(head, indent=2)[:-2] + ',\n  "cases": [\n' + lines + "\n  ]\n}\n"
    (FOLDER / f"{name}.json").write_text(text)
    content = safetensors_bytes({key: tensor.contiguous() for key, tensor in tensors.items()})
    (FOLDER / f"{name}.safetensors").write_bytes(content)


# Pruning


def distinct(rng, dtype, shapes, subnormal):
    """Random signs, and magnitudes that are distinct, also between tensors."""
    counts = [math.prod(shape) for shape in shapes]
    count = sum(counts)
    if dtype == "F32":
        low, high = (1, 0x007F_FFFF) if subnormal else (0x3A00_0000, 0x4080_0000)
        bits = rng.sample(range(low, high), count)
        values = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    else:
        fraction = 7 if dtype == "BF16" else 10
        one = 127 << 7 if dtype == "BF16" else 15 << 10
        low, high = (1, 1 << fraction) if subnormal else (one - (11 << fraction), one + (3 << fraction))
        bits = rng.sample(range(low, high), count)
        values = torch.tensor(bits, dtype=torch.int16).view(DTYPES[dtype])
    signs = torch.tensor([rng.choice([-1.0, 1.0]) for _ in range(count)], dtype=DTYPES[dtype])
    return [part.reshape(shape) for part, shape in zip((values * signs).split(counts), shapes)]


def masked(tensors, prune):
    """The tensors after `prune`, with +0 for removed weights (PyTorch leaves −0 for negatives)."""
    modules = []
    for tensor in tensors:
        module = torch.nn.Module()
        module.weight = torch.nn.Parameter(tensor.clone())
        modules.append(module)
    prune(modules)
    return [torch.where(module.weight_mask.bool(), tensor, 0) for module, tensor in zip(modules, tensors)]


def keep_n_of_m(tensor, n, m):
    rows = tensor.movedim(1, -1)
    groups = rows.reshape(-1, m)
    keep = torch.zeros_like(groups, dtype=torch.bool).scatter_(1, groups.abs().topk(n, dim=1).indices, True)
    return torch.where(keep, groups, 0).reshape(rows.shape).movedim(-1, 1)


def prune():
    cases, stored = [], {}

    def add(kind, dtype, shapes, amount=None, n=None, m=None, inputs=None, subnormal=False, **extra):
        name = f"{kind}-{dtype.lower()}-{len(cases)}"
        rng = random.Random(name)
        inputs = inputs or distinct(rng, dtype, shapes, subnormal)
        if kind == "tensor":
            outputs = masked(inputs, lambda modules: [torch_prune.l1_unstructured(x, "weight", amount) for x in modules])
        elif kind == "global":
            outputs = masked(
                inputs,
                lambda modules: torch_prune.global_unstructured(
                    [(x, "weight") for x in modules], torch_prune.L1Unstructured, amount=amount
                ),
            )
        else:
            outputs = [keep_n_of_m(x, n, m) for x in inputs]
        for i, (before, after) in enumerate(zip(inputs, outputs)):
            stored[f"{name}/in/{i}"] = before
            stored[f"{name}/out/{i}"] = after
        sizes = {"n": n, "m": m} if kind == "n_m" else {"amount": amount}
        names = [f"{name}/{i}" for i in range(len(inputs))]
        cases.append({"name": name, "kind": kind, "dtype": dtype, **sizes, "tensors": names, **extra})

    for dtype in DTYPES:
        for amount in (0.0, 0.3, 0.5, 0.9, 1.0, 0, 1, 17, 91):
            add("tensor", dtype, [(7, 13)], amount)
        for amount in (0.5, 0.3):
            add("tensor", dtype, [(1, 5)], amount)
            add("tensor", dtype, [(33,)], amount)
            add("tensor", dtype, [(3, 5, 7)], amount)
            add("tensor", dtype, [(4, 3, 3, 3)], amount)
        add("tensor", dtype, [(1, 1)], 0.5)
        add("tensor", dtype, [(1, 1)], 1)
        add("tensor", dtype, [(20, 16)], 0.5)
        add("tensor", dtype, [(5, 9)], 0.5, subnormal=True)
        for amount in (0.0, 0.3, 0.5, 0.9, 1.0, 1, 40):
            add("global", dtype, [(9, 8), (31,), (2, 3, 3, 3)], amount)
        for n, m in ((2, 4), (1, 4), (4, 8), (1, 2)):
            add("n_m", dtype, [(4, 16)], n=n, m=m)
            add("n_m", dtype, [(3, 8, 3, 3)], n=n, m=m)

    rng = random.Random("ties")
    tied = torch.tensor([rng.choice([-1.0, -0.5, 0.0, 0.5, 1.0]) for _ in range(72)]).reshape(8, 9)
    add("tensor", "F32", None, 0.5, inputs=[tied], ties=True)
    save("prune", cases, stored)


# Quantization


def weight(name):
    rng = random.Random(name)

    def normal(*shape):
        return torch.tensor([rng.gauss(0, 0.05) for _ in range(math.prod(shape))]).reshape(shape)

    match name:
        case "outliers":
            tensor = normal(4, 32)
            for position in rng.sample(range(4 * 32), 5):
                tensor.view(-1)[position] *= 20
        case "wide":
            tensor = normal(6, 64)
        case "odd":
            tensor = normal(7, 13)
        case "zero-row":
            tensor = normal(4, 32)
            tensor[1] = 0
        case "one":
            tensor = torch.tensor([[-0.3]])
        case "positive":
            tensor = normal(3, 32).abs() + 0.01
        case "grid":
            # Row i is on the grid of the range reduced by i %, except for its largest value.
            tensor = torch.tensor([[rng.randint(-120, 120) * (1 - i / 100) / 127.5 for _ in range(256)] for i in range(5)])
            tensor[:, 100] = 1
        case "tiny":
            tensor = normal(3, 32) * 2.0**-128
        case "tiny-f16":
            tensor = normal(3, 32) * 2.0**-16
    return tensor


# 2^-23 is exact in all three dtypes.
SMALLEST_SCALE = torch.finfo(torch.float32).eps


def by_scale(tensor, args):
    """The weight, reshaped so that the values along the last axis share a scale."""
    match args.strategy:
        case "tensor":
            return tensor.reshape(1, -1)
        case "channel":
            return tensor.unsqueeze(1)
        case "group":
            return tensor.unflatten(-1, (-1, args.group_size))


def scale_and_zero_point(low, high, dtype, args):
    """Computed in f32; the scale is then rounded to `dtype`."""
    scale, zero_point = calculate_qparams(low, high, args)
    scale = scale.to(dtype).float()
    return torch.where(scale == 0, SMALLEST_SCALE, scale), zero_point


def squared_error(tensor, scale, zero_point, args):
    """Error per scale, summed exactly and rounded at the end."""
    back = dequantize(quantize(tensor, scale, zero_point, args, torch.int8), scale, zero_point, args)
    squares = by_scale((tensor.double() - back.double()).square(), args)
    sums = [math.fsum(row.tolist()) for row in squares.reshape(-1, squares.shape[-1])]
    return torch.tensor(sums, dtype=torch.float64).reshape(scale.shape)


def smallest_error(tensor, low, high, dtype, args):
    candidates = []
    for i in range(21):
        shrink = torch.tensor(1 - i / 100, dtype=torch.float32)
        scale, zero_point = scale_and_zero_point(low * shrink, high * shrink, dtype, args)
        candidates.append((scale, zero_point, squared_error(tensor, scale, zero_point, args)))
    scales, zero_points, errors = (torch.stack(parts) for parts in zip(*candidates))

    best = errors.argmin(0, keepdim=True)
    least = errors.gather(0, best)
    assert ((errors == least) | (errors > least * (1 + 1e-9))).all(), "the result would depend on the order of summation"
    first = (errors == least).int().argmax(0, keepdim=True)
    return (x.gather(0, first).squeeze(0) for x in (scales, zero_points, errors))


def quantization():
    cases, stored = [], {}

    def add(source, dtype, strategy, group_size, symmetric, observer):
        group = f"{strategy}{group_size or ''}"
        name = f"{source}-{dtype.lower()}-{group}-{'symmetric' if symmetric else 'asymmetric'}-{observer}"
        args = QuantizationArgs(num_bits=8, symmetric=symmetric, strategy=strategy, group_size=group_size)
        original = weight(source).to(DTYPES[dtype])
        tensor = original.float()
        low, high = torch.aminmax(by_scale(tensor, args), dim=-1)
        if observer == "minmax":
            scale, zero_point = scale_and_zero_point(low, high, DTYPES[dtype], args)
        else:
            scale, zero_point, stored[f"{name}/error"] = smallest_error(tensor, low, high, DTYPES[dtype], args)
        q = quantize(tensor, scale, zero_point, args, torch.int8)
        stored[f"{name}/weight"] = original
        stored[f"{name}/q"] = q
        stored[f"{name}/scale"] = scale.to(DTYPES[dtype])
        if not symmetric:
            stored[f"{name}/zero_point"] = zero_point.to(torch.int8)
        stored[f"{name}/dequantized"] = dequantize(q, scale, zero_point, args)
        case = {"name": name, "dtype": dtype, "strategy": strategy}
        if group_size:
            case["group_size"] = group_size
        cases.append({**case, "symmetric": symmetric, "observer": observer})

    whole = [("tensor", None), ("channel", None)]
    grouped = [*whole, ("group", 32), ("group", 8)]
    plan = [
        ("outliers", ["F32", "BF16", "F16"], grouped),
        ("wide", ["F32"], [("channel", None), ("group", 32)]),
        ("grid", ["F32"], [("channel", None)]),
        ("odd", ["F32"], whole),
        ("zero-row", ["F32", "BF16"], [("channel", None), ("group", 8)]),
        ("one", ["F32"], whole),
        ("positive", ["F32"], [("tensor", None), ("group", 8)]),
        ("tiny", ["F32", "BF16"], whole),
        ("tiny-f16", ["F16"], whole),
    ]
    for source, dtypes, strategies in plan:
        for dtype in dtypes:
            for strategy, group_size in strategies:
                for symmetric in (True, False):
                    for observer in ("mse",) if source == "grid" else ("minmax", "mse"):
                        add(source, dtype, strategy, group_size, symmetric, observer)
    save("quantize", cases, stored)


# Casts


def f32(bits):
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def f32_around(fraction, exponents):
    """For a target with `fraction` bits: exact values, ties in both directions, and their neighbors, with
    both signs."""
    step = 1 << (23 - fraction)
    for exponent in exponents:
        base = (exponent + 127) << 23
        for mantissa in (0, step, 2 * step, (1 << 23) - step):
            for nudge in (0, step // 2 - 1, step // 2, step // 2 + 1, step - 1):
                yield f32(base + mantissa + nudge)
                yield -f32(base + mantissa + nudge)


def f16_ties_below_normal():
    unit = 2.0**-24
    for k in (0, 1, 2, 3, 511, 512, 1022, 1023):
        for part in (0.0, 0.25, 0.5, 0.5000001, 0.4999999, 0.75):
            yield (k + part) * unit
            yield -(k + part) * unit


def sixteen_bit(dtype):
    """Every exponent except that of infinity, with representative fractions, with both signs."""
    fraction, exponents = (7, 255) if dtype is torch.bfloat16 else (10, 31)
    full = (1 << fraction) - 1
    bits = [
        sign << 15 | exponent << fraction | part
        for sign in (0, 1)
        for exponent in range(exponents)
        for part in sorted({0, 1, 3, full // 2 + 1, 8, 12, full})
    ]
    return torch.tensor([b - (b >> 15 << 16) for b in bits], dtype=torch.int16).view(dtype)


def cast():
    cases, stored = [], {}

    def add(name, source, target):
        result = source.to(target)
        names = {dtype: name for name, dtype in DTYPES.items()}
        for suffix, mask in (("", result.isfinite()), ("-overflow", ~result.isfinite())):
            if not mask.any():
                continue
            stored[f"{name}{suffix}/in"] = source[mask]
            stored[f"{name}{suffix}/out"] = result[mask]
            case = {"name": name + suffix, "from": names[source.dtype], "to": names[target]}
            cases.append({**case, "overflow": bool(suffix)})

    plain = [0.0, -0.0, 1.0, -1.0, 0.1, math.pi, f32(0x7F7F_FFFF), f32(1), f32(0x007F_FFFF), f32(0x0080_0000)]
    to_f16 = [*plain, *f16_ties_below_normal(), *f32_around(10, (-26, -25, -24, -15, -14, -1, 0, 1, 14, 15, 16, 127))]
    to_bf16 = [*plain, *f32_around(7, (-127, -126, -125, -24, -1, 0, 1, 16, 126, 127))]
    add("f32-to-f16", torch.tensor(to_f16, dtype=torch.float32), torch.float16)
    add("f32-to-bf16", torch.tensor(to_bf16, dtype=torch.float32), torch.bfloat16)
    half, brain = sixteen_bit(torch.float16), sixteen_bit(torch.bfloat16)
    add("f16-to-f32", half, torch.float32)
    add("f16-to-bf16", half, torch.bfloat16)
    add("bf16-to-f32", brain[::3], torch.float32)
    add("bf16-to-f16", brain, torch.float16)
    save("cast", cases, stored)


# Packing


def packed():
    cases, stored = [], {}
    rng = random.Random("packed")
    for rows, columns, groups in ((1, 1, 1), (2, 4, 1), (3, 5, 1), (5, 7, 1), (4, 34, 1), (9, 64, 2), (6, 33, 3)):
        name = f"{rows}x{columns}"
        q = torch.tensor([rng.randint(-128, 127) for _ in range(rows * columns)], dtype=torch.int8).reshape(rows, -1)
        zero_point = torch.tensor([rng.randint(-128, 127) for _ in range(rows * groups)], dtype=torch.int8).reshape(rows, -1)
        q.view(-1)[: min(4, q.numel())] = torch.tensor([-128, -1, 127, 0], dtype=torch.int8)[: q.numel()]
        words = pack_to_int32(q, 8)
        assert torch.equal(unpack_from_int32(words, 8, q.shape), q)
        stored[f"{name}/q"] = q
        stored[f"{name}/weight_packed"] = words
        stored[f"{name}/weight_shape"] = torch.tensor(q.shape)
        stored[f"{name}/zero_point"] = zero_point
        stored[f"{name}/weight_zero_point"] = pack_to_int32(zero_point, 8, packed_dim=0)
        cases.append({"name": name, "bits": 8})
    save("packed", cases, stored)


# Schemes


def schemes():
    """Weights as compressed-tensors writes them in a scheme, and the values that it reads back."""
    cases, stored = [], {}

    def add(preset, rows, columns, group_size=None, symmetric=True):
        scheme = preset_name_to_scheme(preset, ["Linear"])
        args = scheme.weights
        if args.type == "int":
            strategy = "group" if group_size else "channel"
            args = args.model_copy(update={"group_size": group_size, "symmetric": symmetric, "strategy": strategy})
        scheme = scheme.model_copy(update={"weights": args})
        name = f"{preset}-{rows}x{columns}-{group_size or 'row'}-{'symmetric' if symmetric else 'asymmetric'}"
        # MX formats are dequantized to bfloat16.
        dtype = torch.float32 if args.type == "int" else torch.bfloat16
        weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(columns)).to(dtype)
        weight[0, :3] = torch.tensor([0.0, 40.0, -40.0])
        low, high = torch.aminmax(by_scale(weight.float(), args), dim=-1)
        scale, zero_point = calculate_qparams(low, high, args)
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero_point}
        packs = args.type == "int"
        form = CompressionFormat("pack-quantized") if packs else infer_module_format(torch.nn.Linear, scheme)
        compressor = BaseCompressor.get_value_from_registry(form.value)
        compressed = compressor.compress(state, scheme)
        back = compressor.decompress(compressed, scheme)
        stored[f"{name}/in"] = weight
        stored.update({f"{name}/out/{part}": value.contiguous() for part, value in compressed.items()})
        stored[f"{name}/dequantized"] = back["weight"]
        case = {"name": name, "scheme": preset if symmetric else f"{preset}-ASYM", "asymmetric": not symmetric}
        case |= {"format": form.value, "bits": args.num_bits}
        if packs:
            case |= {"group_size": group_size or -1}
        cases.append(case)

    for bits in (2, 3, 5, 6, 7):
        for rows, columns, group_size in ((3, 8, 8), (5, 33, None), (9, 96, 32), (2, 20, 4)):
            for symmetric in (True, False):
                add(f"W{bits}A16", rows, columns, group_size, symmetric)
    for preset in ("MXFP6A16", "MXFP8A16"):
        for rows, columns in ((1, 32), (5, 96)):
            add(preset, rows, columns)
    save("schemes", cases, stored)


FOLDER.mkdir(parents=True, exist_ok=True)
prune()
quantization()
cast()
packed()
schemes()
