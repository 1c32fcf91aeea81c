"""Check that ONNX and ONNX Runtime load the exports of compress, and that their outputs equal those of PyTorch.

    scripts/check onnx [--int8 | --float16 | --pruned] [--compress BINARY] [--only TEXT] [--opsets 17,18,19,20,21,22,23,24]

Every model in tests/golden/models is exported, checked by onnx.checker (full check, strict shape inference),
and run in ONNX Runtime on the golden inputs. Outputs must equal those of PyTorch, except at padding: up to
rounding in float32 and float16, approximately with `--int8`.

With `--int8`, every variant of int8 weights is exported. ONNX Runtime must compute the same as onnx's reference
evaluator for the same file. In the graph that ONNX Runtime has optimized and saved, every quantized layer must
be one integer kernel: none may be left unfused, and none may be a float product of dequantized weights. A layer
whose inputs are constants may be folded.

Another order of summation can move a value across a rounding boundary. If outputs differ, the script searches
for such values: some of those that are close to a boundary must, when rounded to the other side, lead to ONNX
Runtime's outputs.

With `--pruned`, models first lose heads, neurons, channels, width and layers, and outputs are compared with
onnx's reference evaluator on the same file.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from lib import GOLDEN, ROOT, venv

venv.enter()

import numpy
import onnx
import onnxruntime
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from lib.arrays import save_file
from safetensors.numpy import load_file

TOLERANCE = 1e-4
# Mean error relative to PyTorch's float32, as a fraction of the spread of the values.
FLOAT16_TOLERANCE, INT8_TOLERANCE = 0.002, 0.1
# Tolerance relative to the reference, as a fraction of the spread of the values; distance from a rounding
# boundary, in steps, within which both sides are valid; and maximum number of runs of the reference.
REFERENCE_TOLERANCE, EDGE, TRIES = 1e-4, 2e-3, 300
KERNELS = {"DynamicQuantizeMatMul", "MatMulIntegerToFloat", "MatMulNBits", "QLinearMatMul", "QGemm", "QLinearConv"}
LAYERS = {"MatMulInteger", "ConvInteger", "MatMul", "Gemm", "Conv"}
STORED = {onnx.TensorProto.INT8, onnx.TensorProto.UINT8}
FLOATS = {"MatMul", "Gemm", "FusedMatMul", "FusedGemm", "Conv", "FusedConv"}
INT8 = {
    "channel": {},
    "embeddings": {"embeddings": True},
    "asymmetric": {"embeddings": True, "symmetric": False},
    "tensor": {"granularity": "tensor"},
    "tensor, asymmetric": {"granularity": "tensor", "symmetric": False},
    "weights only": {"activations": "none", "embeddings": True},
    "weights only, asymmetric": {"activations": "none", "symmetric": False},
    "groups": {"granularity": "group", "group_size": 4, "activations": "none", "embeddings": True},
    "groups, asymmetric": {"granularity": "group", "group_size": 4, "activations": "none", "symmetric": False},
}
# Calibrated on the golden inputs.
STATIC = {
    "static": {"embeddings": False},
    "static, free": {"smooth": "free", "embeddings": True},
    "static, symmetric": {"embeddings": False, "symmetric": True},
    "static, signed": {"embeddings": False, "target": "arm"},
    "static, portable": {"embeddings": False, "target": "portable"},
}
GROUPS_FROM, SMALLEST_GROUP = 21, 16
PRUNED = {
    "heads": {"dims": ["heads"], "amount": 0.5},
    "mlp": {"dims": ["mlp"], "amount": 0.5, "round_to": 2},
    "channels": {"dims": ["channels"], "amount": 0.5, "round_to": 2},
    "heads and hidden": {"dims": ["heads", "hidden"], "amount": 0.5, "round_to": 2},
    "layers": {"dims": ["layers"], "amount": 1},
}


class Failed(Exception):
    pass


class Nothing(Exception):
    """The model does not support the pass."""


def export(binary, model, options, passes, folder, data=None):
    recipe = folder / "recipe.yaml"
    entries = {"model": str(model), "data": data or {}, "export": [{"onnx": options}], "output": str(folder / "out")}
    if passes:
        entries["passes"] = passes
    recipe.write_text(json.dumps(entries))
    done = subprocess.run([binary, "run", recipe], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    nothing = ("no weight is selected", "not a multiple of the group size", "the model has no", "layers would remove all")
    if done.returncode != 0 and passes and any(reason in done.stderr for reason in nothing):
        raise Nothing
    if done.returncode != 0:
        raise Failed(f"compress run exited with {done.returncode}: {done.stderr.strip()}")
    report = json.loads((folder / "out" / "report.json").read_text())
    return folder / "out" / "model.onnx", report


def calibration(model, folder):
    """The golden inputs as a data set."""
    inputs = {name.removeprefix("in/"): value for name, value in load_file(model / "golden.safetensors").items() if name.startswith("in/")}
    path = folder / "samples.safetensors"
    save_file(inputs, path)
    return {"calibration": {"arrays": str(path), "task": "fidelity"}}


def distance(actual, expected, mask, mean):
    if actual.shape != expected.shape:
        raise Failed(f"shape {actual.shape} instead of {expected.shape}")
    difference = numpy.abs(actual - expected)
    if mask is not None and difference.ndim == 3 and difference.shape[:2] == mask.shape:
        difference = difference * mask[:, :, None]
    return float(difference.mean() if mean else difference.max())


def read(golden, inputs):
    """The inputs, and the outputs of PyTorch."""
    tensors = load_file(golden)
    given = {name.removeprefix("in/"): value for name, value in tensors.items() if name.startswith("in/")}
    wanted = {name.removeprefix("out/"): value for name, value in tensors.items() if name.startswith("out/")}
    if any(entry.name == "token_type_ids" for entry in inputs) and "token_type_ids" not in given:
        given["token_type_ids"] = numpy.zeros_like(given["input_ids"])
    kinds = {entry.name: numpy.int64 if "int64" in entry.type else numpy.float32 for entry in inputs}
    # transformers keeps two axes of length 1 after the pooled channels of a ResNet.
    if "pooler_output" in wanted and wanted["pooler_output"].ndim == 4:
        wanted["pooler_output"] = wanted["pooler_output"].reshape(wanted["pooler_output"].shape[:2])
    return {name: given[name].astype(kind) for name, kind in kinds.items()}, wanted


def worst(results, wanted, feeds, tolerance, what, relative=False, mean=False):
    """The largest error of all outputs: relative to the spread of the values (in 16 bits, or to their
    magnitude) with `relative`, the mean over all elements with `mean`."""
    largest = 0.0
    for name, expected in wanted.items():
        if name not in results:
            raise Failed(f"has no output {name}, only {', '.join(results)}")
        error = distance(results[name], expected, feeds.get("attention_mask"), mean)
        if relative:
            # If the magnitude of values is large compared with their spread, the 16-bit rounding error is
            # relative to the magnitude; so is that of PyTorch.
            size = float(numpy.abs(expected).max()) if tolerance == FLOAT16_TOLERANCE else 0.0
            error /= max(float(expected.max() - expected.min()), size, 1e-6)
        if not error <= tolerance:
            raise Failed(f"{name}: error {error:.1e} against {what}")
        largest = max(largest, error)
    return largest


class Rounding:
    """Rounding in the quantizers of the reference: which values are at a rounding boundary, and which of
    those are rounded to the other side."""

    def __init__(self, flipped=frozenset()):
        self.flipped, self.edges = flipped, {}

    def __call__(self, name, steps):
        rounded = numpy.rint(steps)
        distance = numpy.abs(numpy.abs(steps - rounded) - 0.5)
        for at in map(int, numpy.flatnonzero(distance <= EDGE)):
            self.edges[name, at] = float(distance.flat[at])
            if (name, at) in self.flipped:
                rounded.flat[at] += 1 if steps.flat[at] > rounded.flat[at] else -1
        return rounded


def reference_of(path, rounding):
    """onnx's evaluator, with quantizers that use `rounding`, and with negative padding, which NumPy does not
    support."""

    class QuantizeLinear(OpRun):
        def _run(self, x, scale, zero_point, **_):
            if scale.size != 1:
                raise Failed(f"{self.onnx_node.name} has several scales")
            low, high = numpy.iinfo(zero_point.dtype).min, numpy.iinfo(zero_point.dtype).max
            steps = rounding(self.onnx_node.output[0], x / scale)
            return (numpy.clip(steps + zero_point.astype(steps.dtype), low, high).astype(zero_point.dtype),)

    class DynamicQuantizeLinear(OpRun):
        def _run(self, x):
            low, high = min(x.min(), numpy.float32(0)), max(x.max(), numpy.float32(0))
            scale = (high - low) / numpy.float32(255)
            name = self.onnx_node.output[0]
            zero = numpy.clip(rounding(f"{name}, zero point", numpy.array([-low / scale])), 0, 255)[0] if scale > 0 else numpy.float32(0)
            steps = rounding(name, x / scale) if scale > 0 else numpy.zeros_like(x)
            return numpy.clip(steps + zero, 0, 255).astype(numpy.uint8), numpy.float32(scale), numpy.uint8(zero)

    class Pad(OpRun):
        def _run(self, x, pads, value=None, axes=None, mode="constant", **_):
            axes = range(x.ndim) if axes is None else axes
            widths = [(0, 0)] * x.ndim
            for axis, before, after in zip(axes, pads, pads[len(pads) // 2 :]):
                widths[axis] = (int(before), int(after))
            kept = tuple(slice(max(-before, 0), size - max(-after, 0)) for size, (before, after) in zip(x.shape, widths))
            widths = [(max(before, 0), max(after, 0)) for before, after in widths]
            given = {"constant_values": 0 if value is None or value.size == 0 else value.item()} if mode == "constant" else {}
            return (numpy.pad(x[kept], widths, mode, **given).astype(x.dtype),)

    return ReferenceEvaluator(str(path), new_ops=[QuantizeLinear, DynamicQuantizeLinear, Pad])


def against_reference(path, names, results, feeds, what):
    """The error relative to the reference, which may round some boundary values to the other side, and the
    number of these values."""

    def error_of(flipped):
        rounding = Rounding(flipped)
        exact = dict(zip(names, reference_of(path, rounding).run(None, feeds)))
        return worst(results, exact, feeds, float("inf"), what, relative=True), rounding.edges

    flipped, tries = frozenset(), 1
    error, edges = error_of(flipped)
    first, count = error, len(edges)
    while error > REFERENCE_TOLERANCE:
        # Later values depend on a value that is rounded to the other side, so the search proceeds in order
        # and keeps the first improvement.
        found = None
        for edge in sorted(edges.keys() - flipped, key=edges.get):
            if tries == TRIES:
                break
            tries += 1
            tried = error_of(flipped | {edge})
            if found is None or tried[0] < found[1]:
                found = (edge, *tried)
        if found is None or found[1] >= error:
            raise Failed(f"error {first:.1e} against {what}, {error:.1e} with {len(flipped)} of {count} boundary values rounded to the other side")
        flipped, error, edges = flipped | {found[0]}, found[1], found[2]
    return error, len(flipped)


def quantized_layers(graph):
    """The number of layers that multiply by stored integers: with variable inputs, and with constant inputs."""
    makers = {name: node for node in graph.node for name in node.output}
    integers = {tensor.name for tensor in graph.initializer if len(tensor.dims) >= 2 and tensor.data_type in STORED}
    varies = {value.name for value in graph.input}
    for node in graph.node:
        if any(name in varies for name in node.input):
            varies.update(node.output)

    def stored(name):
        if name in integers:
            return True
        return name not in varies and name in makers and any(stored(read) for read in makers[name].input)

    layers = [node for node in graph.node if node.op_type in LAYERS and stored(node.input[1])]
    changing = sum(node.input[0] in varies for node in layers)
    return changing, len(layers) - changing


def held_to_kernels(path, optimized, quantized):
    """Checks that every quantized layer is one integer kernel of the optimized graph."""
    nodes = onnx.load(optimized, load_external_data=False).graph.node
    counts = Counter(node.op_type for node in nodes)
    found = sum(counts[kernel] for kernel in KERNELS)
    changing, constant = quantized_layers(onnx.load(path, load_external_data=False).graph)
    if quantized is not None and changing + constant < quantized:
        raise Failed(f"{quantized} weights were quantized, {changing + constant} layers multiply by integers")
    if quantized is not None and not changing <= found <= changing + constant:
        raise Failed(f"{changing} layers with variable and {constant} with constant inputs were quantized; {found} became integer kernels: {dict(counts)}")
    computed = {name: node for node in nodes for name in node.output}
    for node in nodes:
        sources = [computed[name].op_type for name in node.input if name in computed]
        if node.op_type == "MatMulInteger" or (node.op_type in FLOATS and "DequantizeLinear" in sources):
            raise Failed(f"{node.name} ({node.op_type} of {', '.join(sources)}) is not an integer kernel")
    stored = {tensor.name: tensor for tensor in onnx.load(path).graph.initializer}
    if not any(tensor.data_type == onnx.TensorProto.INT8 and len(tensor.dims) >= 2 for tensor in stored.values()):
        raise Failed("has no int8 weights")


def session_options():
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = 1
    # ONNX Runtime warns about saved graphs that depend on the processor.
    settings.log_severity_level = 3
    # Sums of byte products saturate on x86 without VNNI.
    if "vnni" not in Path("/proc/cpuinfo").read_text():
        settings.add_session_config_entry("session.x64quantprecision", "1")
    return settings


def check(binary, folder, options, quantize=None, prune=None):
    with tempfile.TemporaryDirectory(prefix="compress-onnx-") as scratch:
        static = quantize is not None and any(quantize is kind for kind in STATIC.values())
        verb = "quantize-static" if static else "quantize-dynamic"
        passes = [{name: chosen} for name, chosen in (("prune-structured", prune), (verb, quantize)) if chosen is not None]
        data = calibration(folder, Path(scratch)) if static else {}
        path, report = export(binary, folder, options, passes, Path(scratch), data)
        onnx.checker.check_model(path, full_check=True)
        onnx.shape_inference.infer_shapes(onnx.load(path), check_type=True, strict_mode=True, data_prop=True)
        settings = session_options()
        settings.optimized_model_filepath = str(Path(scratch, "optimized.onnx"))
        session = onnxruntime.InferenceSession(path, settings, providers=["CPUExecutionProvider"])
        reference = False
        if quantize is not None:
            # With embedding tables, a tied head counts as a layer too: then only unfused layers are reported.
            layers = [layer for layer in report["layers"] if layer["encoding"].startswith("int8")]
            layers = None if quantize.get("embeddings") else len(layers)
            # Kernels need groups of at least 16, which the small models do not have.
            # On x86, there are no kernels for signed activations that several layers share.
            if quantize.get("group_size", SMALLEST_GROUP) >= SMALLEST_GROUP and quantize.get("target") != "arm":
                held_to_kernels(path, settings.optimized_model_filepath, layers)
            # The reference supports DequantizeLinear from opset 19.
            reference = options["opset"] >= 19 or all(node.op_type != "DequantizeLinear" for node in onnx.load(path).graph.node)
            if "activations" in quantize or quantize.get("embeddings"):
                # Weight-only layers and embedding tables: let the kernel compute in floats, as the file
                # specifies.
                settings = session_options()
                settings.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
                session = onnxruntime.InferenceSession(path, settings, providers=["CPUExecutionProvider"])
        if prune is not None:
            reference = ReferenceEvaluator(str(path))
        tolerance = INT8_TOLERANCE if quantize is not None else FLOAT16_TOLERANCE if "precision" in options else TOLERANCE
        rough = tolerance != TOLERANCE
        largest, edges = 0.0, 0
        names = [entry.name for entry in session.get_outputs()]
        for golden in sorted(folder.glob("golden*.safetensors")):
            feeds, wanted = read(golden, session.get_inputs())
            results = dict(zip(names, session.run(None, feeds)))
            error = 0.0
            if prune is None:
                error = worst(results, wanted, feeds, tolerance, f"PyTorch, {golden.name}", rough, rough)
            if reference:
                error, more = against_reference(path, names, results, feeds, f"the reference, {golden.name}")
                edges += more
            largest = max(largest, error)
        return f"{largest:.1e}" + (f" ({edges})" if edges else "")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--compress", default=ROOT / "target" / "debug" / "compress", help="the binary to use")
    parser.add_argument("--only", default="", help="models whose name contains this")
    parser.add_argument("--opsets", default="17,18,19,20,21,22,23,24", help="opsets, separated by commas")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--int8", nargs="?", const=",".join(name.replace(",", "") for name in (INT8 | STATIC)), help="int8 weights; variants, separated by commas")
    kind.add_argument("--pruned", action="store_true", help="pruned models")
    kind.add_argument("--float16", action="store_true", help="float16 weights and arithmetic")
    arguments = parser.parse_args()
    opsets = [int(opset) for opset in arguments.opsets.split(",")]
    kinds = {name.replace(",", ""): options for name, options in (INT8 | STATIC).items()}
    chosen = list(PRUNED) if arguments.pruned else arguments.int8.split(",") if arguments.int8 else [None]
    if unknown := set() if arguments.pruned else set(chosen) - {None} - set(kinds):
        sys.exit(f"unknown variant of int8: {', '.join(unknown)}; variants are {', '.join(kinds)}")
    folders = [f for f in sorted((GOLDEN / "models").iterdir()) if arguments.only in f.name]
    if not folders:
        sys.exit(f"no model's name contains {arguments.only}")
    failures = done = 0
    for kind in chosen:
        print((kind or "model").ljust(40), *(f"opset {opset}".rjust(10) for opset in opsets), flush=True)
        for folder in folders:
            cells, reasons = [], []
            for opset in opsets:
                options = {"opset": opset, **({"precision": "float16"} if arguments.float16 else {})}
                try:
                    if kind and "groups" in kind and opset < GROUPS_FROM:
                        raise Nothing
                    quantize = kinds[kind] if arguments.int8 else None
                    cell = check(arguments.compress, folder, options, quantize, PRUNED[kind] if arguments.pruned else None)
                    cells.append(cell)
                    done += 1
                except Nothing:
                    cells.append("–")
                except Exception as error:
                    cells.append("failed")
                    reasons.append(f"  opset {opset}: {type(error).__name__}: {error}")
            print(folder.name.ljust(40), *(cell.rjust(10) for cell in cells), flush=True)
            for reason in reasons:
                print(reason)
            failures += len(reasons)
    print(f"{failures} exports failed, {done} passed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
