"""The parts of scripts/compare auto that need other environments, each in a separate process.

    accuracy_control.py data MODEL FOLDER DATA SCRATCH    samples of all tools; SCRATCH has float.onnx
    accuracy_control.py nncf SCRATCH OUT DROP             in the environment with NNCF: its accuracy control
    accuracy_control.py judge SCRATCH PATHS THREADS       figures of the files of a JSON object, as JSON

A set of samples is SET.npz: inputs N/NAME of each batch, and `targets`, which are classes, or scores of pairs whose
second sentences follow all first ones.
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

from lib import onnx_bench

BATCH = 32
ROUNDS = 40
# Samples for calibration, and images of each other set.
CALIBRATION, IMAGES = 128, {"cifar-10": 5000, "mobilenet-v2": 500}


def save(path, feeds, targets):
    arrays = {f"{number}/{name}": value for number, feed in enumerate(feeds) for name, value in feed.items()}
    numpy.savez(path, targets=numpy.asarray(targets), **arrays)


def load(path):
    arrays = numpy.load(path)
    feeds = {}
    for name in arrays.files:
        number, separator, given = name.partition("/")
        if separator:
            feeds.setdefault(int(number), {})[given] = arrays[name]
    return [feeds[number] for number in sorted(feeds)], arrays["targets"]


def outputs(opened, feed):
    """Embeddings of texts, or logits of images."""
    if "input_ids" not in feed:
        return opened.run(None, feed)[0]
    hidden = opened.run(["last_hidden_state"], feed)[0]
    mask = feed["attention_mask"][:, :, None].astype(numpy.float32)
    mean = (hidden * mask).sum(1) / mask.sum(1)
    return mean / numpy.linalg.norm(mean, axis=1, keepdims=True)


def scores(opened, feeds, targets):
    """Rank correlation of pairs, or accuracy; and a mean score of each batch: for pairs, closeness to the targets."""
    found = [outputs(opened, feed) for feed in feeds]
    borders = numpy.cumsum([len(part) for part in found])[:-1]
    found = numpy.concatenate(found)
    if "input_ids" in feeds[0]:
        similarity = (found[: len(targets)] * found[len(targets) :]).sum(1)
        closeness = -numpy.abs(similarity - targets / 5)
        every = numpy.split(numpy.concatenate([closeness, closeness]), borders)
        return onnx_bench.correlation(found, targets), [float(part.mean()) for part in every]
    right = (found.argmax(1) == targets).astype(numpy.float64)
    return float(right.mean()), [float(part.mean()) for part in numpy.split(right, borders)]


def sentences(folder, data, scratch):
    """STS-B: first sentences of the training set calibrate, the development set is the limit's."""
    first, _, _ = onnx_bench.sentences(data, "train")
    step = len(first) // CALIBRATION
    calibration = first[: step * CALIBRATION : step]
    save(scratch / "calibration.npz", onnx_bench.batches(folder, calibration, 1), [])
    (scratch / "calibration.txt").write_text("".join(text + "\n" for text in calibration))
    for name, part in [("validation", "dev"), ("test", "test")]:
        first, second, scores = onnx_bench.sentences(data, part)
        save(scratch / f"{name}.npz", onnx_bench.batches(folder, first + second, BATCH), scores)


def enlarged(images):
    """Images as torchvision's MobileNetV2 takes them."""
    from PIL import Image

    mean, deviation = (numpy.float32(values) for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    for image in images.transpose(0, 2, 3, 1):
        large = Image.fromarray(image).resize((256, 256), Image.Resampling.BILINEAR).crop((16, 16, 240, 240))
        yield ((numpy.asarray(large, numpy.float32) / 255 - mean) / deviation).transpose(2, 0, 1)


def images(model, data, scratch):
    """CIFAR-10 with its labels; MobileNetV2 is calibrated on photographs, and its own classes of enlarged CIFAR-10
    images are the labels. Half of the compared images are the limit's."""
    from safetensors.numpy import load_file

    from lib.arrays import save_file

    opened = onnx_bench.session(scratch / "float.onnx")
    name = opened.get_inputs()[0].name
    folders = [Path(path) for path in data.split(os.pathsep)]
    small, count = load_file(folders[-1] / "test.safetensors"), IMAGES[model]
    compared = small["images"][: 2 * count]
    if model == "mobilenet-v2":
        calibration = load_file(folders[0] / "calibration.safetensors")["pixel_values"]
        compared = numpy.stack(list(enlarged(compared)))
        parts = [compared[start : start + BATCH] for start in range(0, len(compared), BATCH)]
        labels = numpy.concatenate([opened.run(None, {name: part})[0].argmax(1) for part in parts])
    else:
        calibration = load_file(folders[-1] / "train.safetensors")["images"][:CALIBRATION].astype(numpy.float32)
        compared, labels = compared.astype(numpy.float32), small["labels"][: 2 * count]
    save(scratch / "calibration.npz", [{name: image[None]} for image in calibration], [])
    save_file({name: calibration}, scratch / "calibration.safetensors")
    for part, begin in [("validation", 0), ("test", count)]:
        own, targets = compared[begin : begin + count], labels[begin : begin + count].astype(numpy.int64)
        save(scratch / f"{part}.npz", [{name: own[start : start + BATCH]} for start in range(0, count, BATCH)], targets)
        save_file({name: own, "labels": targets}, scratch / f"{part}.safetensors")


def data(model, folder, data, scratch):
    scratch = Path(scratch)
    if model == "minilm":
        sentences(Path(folder), Path(data), scratch)
    else:
        images(model, data, scratch)


def nncf(scratch, out, drop):
    """Accuracy control with a drop relative to the score of the float file, as of `compress auto --max-loss`."""
    import nncf
    import onnx
    import onnxruntime

    scratch = Path(scratch)
    calibration, _ = load(scratch / "calibration.npz")
    feeds, targets = load(scratch / "validation.npz")

    def measured(model, given):
        given = list(given)
        if len(given) < len(feeds):
            # NNCF reads only the types of the results of one batch; it ranks layers on up to 300 batches.
            return 0.0, [0.0] * len(given)
        return scores(onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]), given, targets)

    is_text = "input_ids" in feeds[0]
    options = {"model_type": nncf.ModelType.TRANSFORMER} if is_text else {"preset": nncf.QuantizationPreset.MIXED}
    made = nncf.quantize_with_accuracy_control(
        onnx.load(scratch / "float.onnx"), nncf.Dataset(calibration), nncf.Dataset(feeds), measured, max_drop=float(drop), drop_type=nncf.DropType.RELATIVE, **options
    )
    onnx.save(made, out)


def judge(scratch, paths, threads):
    scratch, paths = Path(scratch), json.loads(paths)
    sets = {name: load(scratch / f"{name}.npz") for name in ("validation", "test")}
    feeds, _ = sets["test"]
    one = onnx_bench.tokens() if "input_ids" in feeds[0] else {name: value[:1] for name, value in feeds[0].items()}
    sessions = {name: onnx_bench.session(path, int(threads)) for name, path in paths.items()}
    taken = onnx_bench.timings(sessions, ROUNDS, time.perf_counter, one)
    rows = {}
    for name, path in paths.items():
        rows[name] = {
            "bytes": os.path.getsize(path),
            **{part: scores(sessions[name], *found)[0] for part, found in sets.items()},
            "milliseconds": 1e3 * statistics.median(taken[name]),
            "ratio": statistics.median(a / b for a, b in zip(taken[name], taken["float32"])),
        }
    print(json.dumps(rows))


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    job, *arguments = sys.argv[1:]
    {"data": data, "nncf": nncf, "judge": judge}[job](*arguments)
