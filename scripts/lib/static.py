"""The parts of scripts/compare static that need the reference environment, each in a separate process.

    static.py prepare MODEL FOLDER DATA SCRATCH N,N    float.onnx, and samples-N.npz for each N
    static.py quantize FLOAT SAMPLES METHOD OPS ACTIVATIONS OUT
    static.py nncf FLOAT SAMPLES OUT PRESET            in the environment with NNCF; "" is its default preset
    static.py judge MODEL FOLDER DATA PATHS            figures of the files of a JSON object, as JSON
    static.py compare MODEL DATA COUNT PATHS           similarity of outputs to those of the first file, by set of images, as JSON
    static.py models FILE…                             the model of each file, as JSON
"""

import json
import logging
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy

from lib import cached, onnx_bench

BATCH = 32
ROUNDS = 20
SHAPES = {"cifar-10": [3, 32, 32], "fashion-mnist": [1, 28, 28]}
# Maximum number of images of a compared set.
COMPARED = 1000
COMPARISONS = ["efficientnet-lite0", "efficientnet-lite0-uneven", "mobilenet-v2", "cifar-10-depthwise"]


def pictures(model, data, part):
    """Preprocessed pixels, and labels."""
    if model == "cifar-10":
        from safetensors.numpy import load_file

        arrays = load_file(data / f"{part}.safetensors")
        return arrays["images"].astype(numpy.float32), arrays["labels"]
    part = "t10k" if part == "test" else part
    pixels = numpy.fromfile(data / f"{part}-images-idx3-ubyte", numpy.uint8)[16:].reshape(-1, 1, 28, 28)
    labels = numpy.fromfile(data / f"{part}-labels-idx1-ubyte", numpy.uint8)[8:]
    return pixels.astype(numpy.float32) / 255, labels


def sets(model, data, count):
    """Calibration images, and images that were not used for calibration. MobileNetV2 is evaluated on all
    photographs."""
    from safetensors.numpy import load_file

    if model == "mobilenet-v2":
        return {name: load_file(data / f"{name}.safetensors")["pixel_values"] for name in ("photographs", "cifar-10")}
    if model.startswith("efficientnet"):
        names = ("photographs", "cifar-10", "scenes")
        calibration, *others = [load_file(data / f"{name}.safetensors")["pixels"].astype(numpy.float32) for name in names]
        return {"calibration": calibration[:count], **dict(zip(names[1:], others))}
    clothes, _ = pictures("fashion-mnist", cached.fetched("fashion-mnist"), "test")
    clothes = numpy.pad(255 * clothes[:COMPARED], ((0, 0), (0, 0), (2, 2), (2, 2))).repeat(3, 1)
    return {"calibration": pictures("cifar-10", data, "train")[0][:count], "test": pictures("cifar-10", data, "test")[0][:COMPARED], "fashion-mnist": clothes}


def feeds(model, folder, data, count):
    """Calibration samples."""
    if model == "mobilenet-v2":
        from safetensors.numpy import load_file

        return [{"pixel_values": picture[None]} for picture in load_file(data / "calibration.safetensors")["pixel_values"][:count]]
    if model in COMPARISONS:
        return [{"pixels": picture[None]} for picture in next(iter(sets(model, data, count).values()))[:count]]
    if model == "minilm":
        first, _, _ = onnx_bench.sentences(data, "train")
        return list(onnx_bench.batches(folder, first[:count], 1))
    pixels, _ = pictures(model, data, "train")
    return [{"pixels": pixels[start : min(start + BATCH, count)]} for start in range(0, count, BATCH)]


def prepare(model, folder, data, scratch, counts):
    from onnxruntime.quantization.shape_inference import quant_pre_process

    folder, data, scratch = map(Path, (folder, data, scratch))
    exported = scratch / "exported" / "model.onnx"
    if model == "minilm":
        exported.parent.mkdir()
        onnx_bench.export_torch(folder, exported)
    quant_pre_process(str(exported), str(scratch / "float.onnx"), skip_symbolic_shape=True)
    for count in map(int, counts.split(",")):
        arrays = {f"{i}/{name}": value for i, feed in enumerate(feeds(model, folder, data, count)) for name, value in feed.items()}
        numpy.savez(scratch / f"samples-{count}.npz", **arrays)


def quantize(source, samples, method, ops, activations, out):
    from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod, QuantType, quantize_static

    class Reader(CalibrationDataReader):
        def __init__(self):
            arrays = numpy.load(samples)
            self.feeds = [{} for _ in range(1 + max(int(name.split("/")[0]) for name in arrays.files))]
            for name in arrays.files:
                place, given = name.split("/")
                self.feeds[int(place)][given] = arrays[name]
            self.set_range(0, len(self.feeds))

        def __len__(self):
            return len(self.feeds)

        def set_range(self, start_index, end_index):
            self.places = iter(range(start_index, end_index))

        def get_next(self):
            place = next(self.places, None)
            return None if place is None else self.feeds[place]

    reader = Reader()
    more = {"CalibPercentile": 99.99} if method == "Percentile" else {}
    shapes = {array.shape[1:] for feed in reader.feeds for array in feed.values()}
    if method != "MinMax" and len(shapes) > 1:
        # Histograms of samples with different lengths must be collected one at a time; otherwise it fails.
        more["CalibStridedMinMax"] = 1
    options = {
        "op_types_to_quantize": ops.split(",") if ops else None,
        "per_channel": True,
        "activation_type": QuantType[activations],
        "calibrate_method": CalibrationMethod[method],
        "extra_options": more,
    }
    quantize_static(source, out, reader, **options)


def nncf(source, samples, out, preset):
    import nncf
    import onnx

    arrays = numpy.load(samples)
    feeds = {}
    for name in arrays.files:
        place, given = name.split("/")
        feeds.setdefault(int(place), {})[given] = arrays[name]
    options = {"preset": nncf.QuantizationPreset(preset)} if preset else {}
    onnx.save(nncf.quantize(onnx.load(source), nncf.Dataset([feeds[place] for place in sorted(feeds)]), **options), out)


def cosines(one, other):
    dots, norms = (one * other).sum(1), numpy.linalg.norm(one, axis=1) * numpy.linalg.norm(other, axis=1)
    return dots / numpy.maximum(norms, 1e-12)


def answers(model, opened, folder, data):
    """Scores, and the outputs to compare with those of the float file."""
    if model == "minilm":
        first, second, scores = onnx_bench.sentences(data)
        every = [onnx_bench.embeddings(opened, folder, first + second, size) for size in onnx_bench.SENTENCES]
        return [onnx_bench.correlation(vectors, scores) for vectors in every], numpy.concatenate(every)
    pixels, labels = pictures(model, data, "test")
    logits = numpy.concatenate([opened.run(None, {"pixels": pixels[start : start + 500]})[0] for start in range(0, len(pixels), 500)])
    return [float((logits.argmax(1) == labels).mean())], logits


def judge(model, folder, data, paths):
    folder, data, paths = Path(folder), Path(data), json.loads(paths)
    feed = onnx_bench.tokens() if model == "minilm" else {"pixels": pictures(model, data, "test")[0][:BATCH]}
    taken = onnx_bench.timings({name: onnx_bench.session(path, 1) for name, path in paths.items()}, ROUNDS, time.thread_time, feed)
    rows, plain = {}, None
    for name, path in paths.items():
        scores, found = answers(model, onnx_bench.session(path), folder, data)
        plain = found if plain is None else plain
        likeness = cosines(found, plain)
        rows[name] = {
            "bytes": os.path.getsize(path),
            "scores": scores,
            "mean": float(likeness.mean()),
            "min": float(likeness.min()),
            "milliseconds": 1e3 * statistics.median(taken[name]),
            "ratio": statistics.median(a / b for a, b in zip(taken[name], taken["float32"])),
        }
    print(json.dumps(rows))


def compare(model, data, count, paths):
    rows = {}
    for name, images in sets(model, Path(data), int(count)).items():
        plain = None
        for file, path in json.loads(paths).items():
            opened = onnx_bench.session(path)
            given = opened.get_inputs()[0].name
            found = numpy.concatenate([opened.run(None, {given: images[start : start + BATCH]})[0] for start in range(0, len(images), BATCH)])
            plain = found if plain is None else plain
            kept = int((found.argmax(1) == plain.argmax(1)).sum())
            rows.setdefault(file, {})[name] = {"cosine": float(cosines(found, plain).mean()), "kept": kept, "of": len(images)}
    print(json.dumps(rows))


def models(*paths):
    def one(path):
        inputs = onnx_bench.session(path).get_inputs()
        if any(given.name == "input_ids" for given in inputs):
            return "minilm"
        return next((model for model, shape in SHAPES.items() if inputs[0].shape[1:] == shape), None)

    print(json.dumps([one(path) for path in paths]))


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    job, *arguments = sys.argv[1:]
    {"prepare": prepare, "quantize": quantize, "nncf": nncf, "judge": judge, "compare": compare, "models": models}[job](*arguments)
