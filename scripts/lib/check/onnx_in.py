"""Open ONNX files of other tools, write them again, and compare the result with the original in ONNX Runtime.

    scripts/check onnx-in [--compress BINARY] [--only TEXT] [--kind real|node|light|other]... [--pass NAME[=OPTIONS]]...

Files are those of the packages in scripts/fetch whose names begin with `onnx-`, and the test models of onnx
1.22: single operators (`node`), topologies (`light`), and layers of other frameworks (`other`). Without
`--pass`, outputs must equal those of the original bit for bit, on the inputs of the test or on random ones;
identical files are not run, and `compress inspect` must accept every file. With `--pass`, the pass is applied to real
files, and sizes and the cosine similarity to the original outputs are printed: `--pass quantize-dynamic`,
`--pass "prune-unstructured=--amount 0.5"`. With `--pass` and `--kind node`, the float inputs of a test except for the
first one become initializers, so that its operator has weights; tests without such inputs are omitted.
The last lines count the results of all files, and of those that ONNX Runtime loads.
"""

import argparse
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from lib import ROOT, SCRIPTS, venv

venv.enter()

import numpy
import onnx
import onnxruntime
from onnx import numpy_helper

TYPES = {
    "tensor(float)": "float32", "tensor(float16)": "float16", "tensor(double)": "float64", "tensor(int64)": "int64", "tensor(int32)": "int32",
    "tensor(int16)": "int16", "tensor(int8)": "int8", "tensor(uint8)": "uint8", "tensor(uint16)": "uint16", "tensor(uint32)": "uint32",
    "tensor(uint64)": "uint64", "tensor(bool)": "bool",
}  # fmt: skip
# Symbolic sizes by the name of the file or its folder: batch and others, in the order of axes.
SIZES = {
    "det": {0: 1, 1: 3, 2: 160, 3: 160},
    "rec": {0: 1, 1: 3, 2: 48, 3: 320},
    "cls": {0: 1, 1: 3, 2: 48, 3: 192},
    "silero": {0: 1, 1: 512},
    "nmp": {0: 1},
}
# Recurrent state of silero.
STATES = {"state": (2, 1, 128), "h": (2, 1, 64), "c": (2, 1, 64)}
# Initializers that were also graph inputs are folded.
CLOSE = {"centerface.onnx": 1e-5}


def real_files():
    names = [line.split()[0] for line in subprocess.run([SCRIPTS / "fetch", "--list"], check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[1:]]
    for name in filter(lambda name: name.startswith("onnx-"), names):
        found = subprocess.run([SCRIPTS / "fetch", name], stdout=subprocess.PIPE, text=True)
        if found.returncode != 0:
            yield Path(name), None
            continue
        for path in sorted(Path(found.stdout.strip()).rglob("*.onnx")):
            yield path, None


def test_files(kinds):
    data = Path(onnx.__file__).parent / "backend/test/data"
    folders = {"node": ["node"], "light": [], "other": ["simple", "pytorch-converted", "pytorch-operator"]}
    for kind in kinds:
        for folder in folders[kind]:
            for path in sorted((data / folder).glob("*/model.onnx")):
                yield path, path.parent / "test_data_set_0"
        if kind == "light":
            for path in sorted((data / "light").glob("light_*.onnx")):
                yield path, None


def session(path):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 2, 4
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def is_loaded(path):
    try:
        return bool(session(path))
    except Exception:
        return False


def given(path, folder, inputs):
    """Inputs for a file: those of its test, otherwise random numbers."""
    if folder and folder.is_dir():
        fed = {}
        model = onnx.load(path, load_external_data=False)
        for number, port in enumerate(model.graph.input):
            file = folder / f"input_{number}.pb"
            if not file.exists():
                break
            tensor = onnx.TensorProto()
            tensor.ParseFromString(file.read_bytes())
            fed[port.name] = numpy_helper.to_array(tensor)
        return {port.name: fed[port.name] for port in inputs}
    random = numpy.random.default_rng(0)
    sizes = next((sizes for name, sizes in SIZES.items() if name in str(path)), {0: 1, 1: 16, 2: 224, 3: 224})
    fed = {}
    for port in inputs:
        shape = [size if isinstance(size, int) and size > 0 else sizes.get(axis, 16) for axis, size in enumerate(port.shape)]
        kind = TYPES[port.type]
        if "mask" in port.name:
            fed[port.name] = numpy.ones(shape, kind)
        elif port.name in STATES:
            fed[port.name] = numpy.zeros(STATES[port.name], kind)
        elif port.name == "sr":
            fed[port.name] = numpy.array(16000, kind)
        elif kind == "bool":
            fed[port.name] = numpy.zeros(shape, kind)
        elif kind.startswith("float"):
            fed[port.name] = random.random(shape).astype(kind)
        else:
            fed[port.name] = random.integers(0, 2 if "type" in port.name else 100, shape).astype(kind)
    return fed


def answers(path, folder, like=None):
    run = session(path)
    fed = like or given(path, folder, run.get_inputs())
    fed = {port.name: fed[port.name] for port in run.get_inputs()}
    return fed, run.run(None, fed)


def same(one, other):
    if isinstance(one, numpy.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def compress(binary, arguments):
    begun = time.monotonic()
    done = subprocess.run([binary, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return done.returncode, done.stderr.strip().splitlines(), time.monotonic() - begun


def with_weights(path, folder, scratch):
    """A copy of a test whose float inputs except for the first one are initializers; `None` if it has no such inputs."""
    model = onnx.load(path)
    weights = [port for number, port in enumerate(model.graph.input) if number > 0 and port.type.tensor_type.elem_type in (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16)]
    for port in weights:
        tensor = onnx.TensorProto()
        file = folder / f"input_{list(model.graph.input).index(port)}.pb"
        if not file.exists():
            return None
        tensor.ParseFromString(file.read_bytes())
        tensor.name = port.name
        model.graph.initializer.append(tensor)
    kept = [port for port in model.graph.input if port not in weights]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    model.ir_version = max(model.ir_version, 4)
    onnx.save(model, scratch / "in.onnx")
    return scratch / "in.onnx" if weights else None


def again(binary, path, folder, scratch):
    """The result for a file that is opened and written without changes."""
    out, recipe = scratch / "out.onnx", scratch / "recipe.yaml"
    code, talk, seconds = compress(binary, ["inspect", path])
    if code != 0:
        return "refused", "inspect: " + " ".join(talk), seconds
    recipe.write_text(f"model: {str(path)!r}\nmeasure: false\n")
    code, talk, seconds = compress(binary, ["run", recipe, "-o", out, "--force", "--quiet"])
    if code != 0:
        return "refused", " ".join(talk), seconds
    if out.read_bytes() == path.read_bytes():
        return "same bytes", "", seconds
    try:
        fed, before = answers(path, folder)
    except Exception as error:
        return "original does not run", str(error).splitlines()[0][:200], seconds
    _, after = answers(out, folder, fed)
    if same(before, after):
        return "same answers", "", seconds
    largest = max(float(numpy.abs(a.astype("float64") - b).max()) for a, b in zip(before, after) if a.size)
    if largest <= CLOSE.get(path.name, 0):
        return "close, as expected", f"largest difference {largest:.1e}", seconds
    return "DIFFERENT", f"largest difference {largest:.1e}", seconds


def cosine(before, after):
    floats = [(a.ravel().astype("float64"), b.ravel().astype("float64")) for a, b in zip(before, after) if a.dtype.kind == "f" and a.size]
    lengths = [(numpy.linalg.norm(a) * numpy.linalg.norm(b), a @ b) for a, b in floats]
    return min((product / length for length, product in lengths if length > 0), default=float("nan"))


def passed(binary, path, folder, what, scratch):
    """The result of a pass: sizes, and similarity of outputs."""
    if folder and not (path := with_weights(path, folder, scratch)):
        return "without weights", "", 0
    out = scratch / "out.onnx"
    name, _, options = what.partition("=")
    code, talk, seconds = compress(binary, [name, path, "-o", out, "--force", "--quiet", *shlex.split(options)])
    if code != 0:
        return "refused", " ".join(talk)[:300], seconds
    try:
        fed, before = answers(path, None)
    except Exception as error:
        return "original does not run", str(error).splitlines()[0][:300], seconds
    try:
        _, after = answers(out, None, fed)
    except Exception as error:
        return "DOES NOT RUN", str(error).splitlines()[0][:300], seconds
    before_bytes, after_bytes = path.stat().st_size, out.stat().st_size
    return "runs", f"{before_bytes:,} -> {after_bytes:,} bytes, cosine {cosine(before, after):.6f}", seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compress", default=ROOT / "target/debug/compress", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--kind", action="append", choices=["real", "node", "light", "other"])
    parser.add_argument("--pass", dest="passes", action="append", default=[])
    arguments = parser.parse_args()
    kinds = arguments.kind or (["real"] if arguments.passes else ["real", "node", "light", "other"])
    files = list(real_files() if "real" in kinds else []) + list(test_files([kind for kind in kinds if kind != "real"]))
    counts, loaded, bad = Counter(), Counter(), 0
    with tempfile.TemporaryDirectory() as scratch:
        for path, folder in files:
            shown = "/".join(path.parts[-3:])
            if arguments.only not in shown:
                continue
            if not path.is_file():
                counts["not fetched"] += 1
                print(f"{shown}: not fetched")
                continue
            loads = is_loaded(path)
            for what in arguments.passes or [None]:
                check = passed if what else again
                found, reason, seconds = check(arguments.compress, path, folder, *([what] if what else []), Path(scratch))
                counts[found] += 1
                loaded[found] += loads
                bad += found in ("DIFFERENT", "DOES NOT RUN") or (found == "refused" and not what)
                if folder is None or found not in ("same bytes", "same answers", "without weights"):
                    print(f"{shown}: {f'{what}: ' if what else ''}{found}, {seconds:.2f} s {reason}", flush=True)
    for what, counted in (("all files", counts), ("files that ONNX Runtime loads", loaded)):
        print(f"{counted.total()} results of {what}: " + ", ".join(f"{count} {found}" for found, count in counted.most_common() if count))
    sys.exit(bad > 0)


main()
