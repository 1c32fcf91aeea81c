"""Write tests/golden/nodes: single-operator cases of ONNX's backend tests, converted to the ops of compress.

nodes.json lists cases: the ONNX operator, the ops in the notation of graph.json, and the number of inputs. The
first op takes all inputs, and each further op the output of the previous one. nodes.safetensors has "CASE/in/N"
and "CASE/out", as ONNX expects them. ONNX inputs that are attributes of our ops (shapes, axes, pads, scales,
bounds) are evaluated here.

Omitted are cases whose results are not 32-bit floats, that are larger than 30 kB (for Erf and Mish, the first
500 elements are kept), in training mode, or that our ops do not support: three spatial dimensions, cubic and
antialiased interpolation, crops, sequence lengths, peepholes, the batch-first layout, and a case whose results
have only four digits. Their number per operator is in "left_out".
"""

import json
from collections import Counter
from pathlib import Path

import numpy
import onnx
from onnx import numpy_helper

from lib import GOLDEN
from lib.arrays import save_file

FOLDER = GOLDEN / "nodes"
NODES = Path(onnx.__file__).parent / "backend" / "test" / "data" / "node"
LARGEST = 30_000


class Unsaid(Exception):
    """The ops of compress do not support this."""


def op(name, **attributes):
    return f"{name}{json.dumps(attributes, separators=(',', ':'))}" if attributes else name


def unsaid_if(condition, why):
    if condition:
        raise Unsaid(why)


class Case:
    def __init__(self, node, opset, inputs, outputs):
        self.node, self.opset, self.inputs, self.outputs = node, opset, inputs, outputs
        self.attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}

    def get(self, name, default=None):
        value = self.attributes.get(name, default)
        return value.decode() if isinstance(value, bytes) else value

    def ints(self, index):
        """A constant input as a list of integers, empty if it is missing."""
        return self.inputs[index].flatten().tolist() if index < len(self.inputs) and self.inputs[index] is not None else None

    @property
    def x(self):
        return self.inputs[0]

    @property
    def rank(self):
        return self.x.ndim


def sides(numbers):
    return numbers[0] if len(set(numbers)) == 1 else list(numbers)


def padding(pads, rank):
    """ONNX's pads, for images or sequences."""
    return sides(pads) if len(set(pads)) == 1 else list(pads)


def spatial(case, kernel, transposed=False):
    """Stride, padding and dilation of a window."""
    places = case.rank - 2
    unsaid_if(places > 2, "three dimensions")
    stride, dilation = list(case.get("strides", [1] * places)), list(case.get("dilations", [1] * places))
    pads, auto = list(case.get("pads", [0] * 2 * places)), case.get("auto_pad", "NOTSET")
    if auto.startswith("SAME"):
        pads = [0] * 2 * places
        for axis in range(places):
            size, extent = case.x.shape[axis + 2], dilation[axis] * (kernel[axis] - 1) + 1
            wanted = (size * stride[axis]) if transposed else -(-size // stride[axis])
            total = (stride[axis] * (size - 1) + extent - wanted) if transposed else (wanted - 1) * stride[axis] + extent - size
            total = max(total, 0)
            small, large = total // 2, total - total // 2
            pads[axis], pads[axis + places] = (small, large) if auto == "SAME_UPPER" else (large, small)
    return {"stride": sides(stride), "padding": padding(pads, case.rank), "dilation": sides(dilation)}


def conv(case):
    found = spatial(case, case.inputs[1].shape[2:])
    return [op("Conv", **found, groups=case.get("group", 1))], len(case.inputs)


def conv_transpose(case):
    kernel = case.inputs[1].shape[2:]
    found = spatial(case, kernel, transposed=True)
    places = case.rank - 2
    if shape := case.get("output_shape"):
        more = case.get("output_padding", [0] * places)
        stride, dilation = case.get("strides", [1] * places), case.get("dilations", [1] * places)
        totals = [stride[a] * (case.x.shape[a + 2] - 1) + more[a] + dilation[a] * (kernel[a] - 1) + 1 - shape[a] for a in range(places)]
        unsaid_if(min(totals) < 0, "negative total padding")
        found["padding"] = padding([t // 2 for t in totals] + [t - t // 2 for t in totals], case.rank)
    if more := case.get("output_padding"):
        found["output_padding"] = sides(more)
    return [op("ConvTranspose", **found, groups=case.get("group", 1))], len(case.inputs)


def pool(case):
    kernel = case.get("kernel_shape")
    found = {"kernel": sides(kernel), **spatial(case, kernel)}
    if found["dilation"] == 1:
        del found["dilation"]
    if case.get("ceil_mode"):
        found["ceil"] = True
    if case.get("count_include_pad"):
        found["count_padding"] = True
    return [op(case.node.op_type, **found)], 1


def reshape(case):
    """The shape of the output, with one symbolic size if that is unambiguous."""
    shape = list(case.outputs[0].shape)
    wanted = case.ints(1) if case.node.op_type == "Reshape" else None
    unsaid_if(0 in case.x.shape, "no elements")
    if wanted:
        return [op("Reshape", shape=["rest" if w == -1 else {"copy": i} if w == 0 else w for i, w in enumerate(wanted)])], 1
    return [op("Reshape", shape=shape)], 1


def slices(case):
    starts, ends, axes, steps = (case.ints(i) for i in range(1, 5))
    axes = axes or list(range(len(starts)))
    made = []
    for start, end, axis, step in zip(starts, ends, axes, steps or [1] * len(starts)):
        chosen = range(case.x.shape[axis])[slice(start, end if abs(end) < 2**31 else None, step)]
        unsaid_if(len(chosen) == 0, "no elements")
        one = {"start": chosen[0], "length": len(chosen)}
        if step != 1:
            one["step"] = step
        made.append(op("Slice", **one, axis=axis))
    return made, 1


def split(case, output):
    axis = case.get("axis", 0)
    start = sum(o.shape[axis] for o in case.outputs[:output])
    unsaid_if(case.outputs[output].shape[axis] == 0, "no elements")
    return [op("Slice", start=start, length=case.outputs[output].shape[axis], axis=axis)], 1


def pad(case):
    pads, rank = case.ints(1), case.rank
    axes = case.ints(3) or list(range(rank))
    whole = [0] * 2 * rank
    for place, axis in enumerate(axes):
        whole[axis % rank], whole[axis % rank + rank] = pads[place], pads[place + len(axes)]
    found = {"pads": whole, "mode": case.get("mode", "constant")}
    if len(case.inputs) > 2 and case.inputs[2] is not None:
        found["value"] = float(case.inputs[2])
    return [op("Pad", **found)], 1


def resize(case):
    mode, coordinates = case.get("mode", "nearest"), case.get("coordinate_transformation_mode", "half_pixel")
    unsaid_if(mode == "cubic" or case.get("antialias"), "cubic or antialiased")
    unsaid_if(coordinates not in ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric"), "a crop")
    # ONNX divides by a fractional width here; ONNX Runtime does not.
    unsaid_if(case.node.op_type == "Resize" and coordinates == "align_corners" and case.outputs[0].shape[3] == 2, "align_corners with a fractional size")
    sizes = list(case.outputs[0].shape)
    if scales := case.ints(2):
        axes = case.get("axes") or list(range(case.rank))
        found = [{"scale": 1.0}] * case.rank
        for axis, scale in zip(axes, scales):
            found[axis] = {"scale": scale}
    else:
        unsaid_if(case.get("keep_aspect_ratio_policy", "stretch") != "stretch", "a preserved aspect ratio")
        found = sizes
    rest = {"nearest": case.get("nearest_mode")} if case.get("nearest_mode") else {}
    return [op("Resize", sizes=found, mode=mode, coordinates=coordinates, **rest)], 1


def reduce(case):
    kinds = {"ReduceMean": "mean", "ReduceSum": "sum", "ReduceMax": "max", "ReduceMin": "min", "ReduceL1": "l1", "ReduceL2": "l2", "ReduceSumSquare": "sum_of_squares"}
    axes = case.ints(1) if len(case.inputs) > 1 else list(case.get("axes", []))
    unsaid_if(0 in case.x.shape, "no elements")
    unsaid_if(not axes and case.get("noop_with_empty_axes"), "nothing is reduced")
    return [op("Reduce", kind=kinds[case.node.op_type], axes=axes or [], keep=bool(case.get("keepdims", 1)))], 1


def cum_sum(case):
    unsaid_if(case.x.dtype != numpy.float32, "not floats")
    return [op("CumSum", axis=int(case.inputs[1]), exclusive=bool(case.get("exclusive")), reverse=bool(case.get("reverse")))], 1


def clip(case):
    bound = lambda index: float(case.inputs[index]) if index < len(case.inputs) and case.inputs[index] is not None else None
    return [op("Clip", min=bound(1), max=bound(2))], 1


def gemm(case):
    unsaid_if(case.get("alpha", 1.0) != 1 or case.get("beta", 1.0) != 1, "factors")
    unsaid_if(case.get("transA", 0), "a transposed input")
    if len(case.inputs) > 2:
        width = case.outputs[0].shape[1]
        unsaid_if(case.inputs[2].size not in (1, width), "a bias that is not a vector")
        case.inputs[2] = numpy.broadcast_to(case.inputs[2].flatten(), (width,))
    return [op("Linear", input_major=not case.get("transB", 0))], len(case.inputs)


def batch_norm(case):
    unsaid_if(case.get("training_mode"), "training")
    return [op("BatchNorm", epsilon=case.get("epsilon", 1e-5))], 5


def norm(name):
    def of(case):
        unsaid_if(case.get("axis", -1) not in (-1, case.rank - 1), "several axes")
        return [op(name, epsilon=case.get("epsilon", 1e-5))], len(case.inputs)

    return of


def binary(kind):
    def of(case):
        unsaid_if(len(case.inputs) != 2 or any(x.dtype != numpy.float32 for x in case.inputs), "not two inputs of floats")
        return [op("Binary", kind=kind)], 2

    return of


def function(name, **defaults):
    """An op with numeric attributes, by their ONNX names."""
    return lambda case: ([op(name, **{key: case.get(key, default) for key, default in defaults.items()})], 1)


def recurrent(case):
    unsaid_if(case.get("layout"), "batch-first layout")
    unsaid_if(len(case.inputs) > 4, "lengths, states and peepholes")
    result = "steps" if case.node.output[0] else "last"
    return [op("Recurrent", kind=case.node.op_type.lower(), result=result)], len(case.inputs)


def two(name):
    def of(case):
        unsaid_if(len(case.inputs) != 2, "not two inputs")
        return [name], 2

    return of


TABLE = {
    "Conv": conv, "ConvTranspose": conv_transpose, "MaxPool": pool, "AveragePool": pool,
    "GlobalAveragePool": lambda case: ([op("GlobalAveragePool", keep=True)], 1),
    "MatMul": two("MatMul"), "Gemm": gemm, "Add": two("Add"), "Mul": two("Mul"), "Sum": two("Add"),
    "Sub": binary("sub"), "Div": binary("div"), "Pow": binary("pow"), "Max": binary("max"), "Min": binary("min"),
    "BatchNormalization": batch_norm, "LayerNormalization": norm("LayerNorm"), "RMSNormalization": norm("RmsNorm"),
    "Relu": function("Relu"), "Sigmoid": function("Sigmoid"), "Tanh": function("Tanh"), "HardSwish": function("HardSwish"),
    "Gelu": lambda case: ([op("Gelu", tanh=case.get("approximate") == "tanh")], 1),
    "Clip": clip, "CumSum": cum_sum, "Softmax": function("Softmax", axis=-1),
    "Sqrt": function("Sqrt"), "Erf": function("Erf"), "Exp": function("Exp"), "Log": function("Log"), "Neg": function("Neg"), "Abs": function("Abs"),
    "Reciprocal": function("Reciprocal"), "Sin": function("Sin"), "Cos": function("Cos"), "Softplus": function("Softplus"), "Mish": function("Mish"),
    "HardSigmoid": function("HardSigmoid", alpha=0.2, beta=0.5), "LeakyRelu": function("LeakyRelu", alpha=0.01), "Elu": function("Elu", alpha=1.0),
    "Slice": slices, "Reshape": reshape, "Flatten": reshape, "Squeeze": reshape, "Unsqueeze": reshape,
    "Transpose": lambda case: ([op("Transpose", perm=list(case.get("perm", [])))], 1),
    "Concat": lambda case: ([op("Concat", axis=case.get("axis"))], len(case.inputs)),
    "Pad": pad, "Resize": resize, "LSTM": recurrent, "GRU": recurrent,
    **{f"Reduce{kind}": reduce for kind in ("Mean", "Sum", "Max", "Min", "L1", "L2", "SumSquare")},
}


def tensor(path):
    proto = onnx.TensorProto()
    proto.ParseFromString(path.read_bytes())
    return numpy_helper.to_array(proto)


def read(folder):
    model = onnx.load(folder / "model.onnx")
    if len(model.graph.node) != 1 or "_expanded" in folder.name or model.graph.node[0].domain:
        return None
    node = model.graph.node[0]
    if node.op_type not in TABLE and node.op_type != "Split":
        return None
    data = folder / "test_data_set_0"
    given = {value.name: tensor(data / f"input_{index}.pb") for index, value in enumerate(model.graph.input)}
    outputs = [tensor(data / f"output_{index}.pb") for index in range(len(model.graph.output))]
    return Case(node, model.opset_import[0].version, [given.get(name) for name in node.input], outputs)


cases, tensors, left_out, counts = [], {}, Counter(), Counter()
for folder in sorted(NODES.iterdir()):
    case = read(folder)
    if case is None:
        continue
    name, kind = folder.name.removeprefix("test_"), case.node.op_type
    try:
        unsaid_if(name == "averagepool_2d_ceil_last_window_starts_on_pad", "four digits")
        if kind in ("Pad", "CumSum"):
            # Ops that only move values are the same for floats, and sums of a few integers too.
            case.inputs[0], case.outputs[0] = case.x.astype(numpy.float32), case.outputs[0].astype(numpy.float32)
        if kind in ("Erf", "Mish"):
            case.inputs[0], case.outputs[0] = case.x.flatten()[:500], case.outputs[0].flatten()[:500]
        floats = all(x.dtype == numpy.float32 for x in [case.x, case.outputs[0]])
        unsaid_if(not floats, "not floats")
        made = [(f"{name}_{k}", split(case, k), out) for k, out in enumerate(case.outputs)] if kind == "Split" else [(name, TABLE[kind](case), case.outputs[0])]
        for name, (ops, count), output in made:
            inputs = case.inputs[:count]
            unsaid_if(any(x is None or x.dtype != numpy.float32 for x in inputs), "not floats")
            unsaid_if(sum(x.nbytes for x in [*inputs, output]) > LARGEST, "too large")
            cases.append({"name": name, "operator": kind, "ops": ops, "inputs": count})
            tensors.update({f"{name}/in/{index}": numpy.asarray(x, order="C") for index, x in enumerate(inputs)})
            tensors[f"{name}/out"] = numpy.asarray(output, order="C")
            counts[kind] += 1
    except Unsaid:
        left_out[kind] += 1

FOLDER.mkdir(exist_ok=True)
lines = ",\n".join("    " + json.dumps(case) for case in cases)
(FOLDER / "nodes.json").write_text(f'{{\n  "left_out": {json.dumps(dict(sorted(left_out.items())))},\n  "cases": [\n{lines}\n  ]\n}}\n')
save_file(tensors, FOLDER / "nodes.safetensors")
print(len(cases), "cases:", ", ".join(f"{kind} {count}" for kind, count in sorted(counts.items())))
print("left out:", ", ".join(f"{kind} {count}" for kind, count in sorted(left_out.items())))
