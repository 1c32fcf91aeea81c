"""Compare `compress quantize-static` of third-party .onnx files with `quantize_static` of ONNX Runtime and
`quantize` of NNCF.

    scripts/compare onnx [--compress BINARY] [--only TEXT] [--samples N] [--limit SECONDS] [--json]
    scripts/compare onnx --turns N [the same options]

Files are those of the packages in scripts/fetch whose names begin with `onnx-`, and EfficientNet-Lite0 as
written by `compress`. All tools run with their defaults on the same samples: photographs for image networks,
rendered lines of text for text detection and recognition, files of this project for magika, first sentences of
STS-B for encoders. ONNX Runtime's tool gets the file in opset 17 and after its `quant_pre_process`, with scales
per channel and unsigned activations; the best of its three methods is printed.

Outputs are compared with those of the float file on samples of another distribution: enlarged CIFAR-10 images,
text in another font, files of Python's library, sentences of the test set. Printed are the mean and the minimum
cosine similarity of the first float output, the size, and milliseconds of CPU time on one thread in ONNX
Runtime, interleaved with the float file.

With `--turns`, only the tools are measured: the time of the whole process, its ratio to ONNX Runtime's with the
method MinMax, and peak memory.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lib import COMPRESS, ROOT, SCRIPTS, cached, venv
from lib.process import Failed, timed

WORKER = SCRIPTS / "lib" / "static.py"
METHODS = ["MinMax", "Percentile", "Entropy"]
ROUNDS = 9
COMPARED = 96
# Memory limit of a tool: for large images, ONNX Runtime's histograms hold all values of all samples.
MEMORY = 8 * 10**9

# Name, package, file, kind of samples.
MODELS = [
    ("opennsfw", "onnx-opennsfw", "open-nsfw.onnx", "bgr"),
    ("u2netp", "onnx-u2netp", "u2netp.onnx", "unit"),
    ("PP-OCRv4 rec", "onnx-ocr", "ch_PP-OCRv4_rec_infer.onnx", "text"),
    ("PP-OCR cls", "onnx-ocr", "ch_ppocr_mobile_v2.0_cls_infer.onnx", "text"),
    ("PP-OCRv4 det", "onnx-ocr", "ch_PP-OCRv4_det_infer.onnx", "text"),
    ("CenterFace", "onnx-centerface", "centerface.onnx", "rgb"),
    ("EfficientNet", None, None, "lite"),
    ("magika", "onnx-magika", "model.onnx", "bytes"),
    ("MiniLM-L6", "onnx-encoders", "all-MiniLM-L6-v2/onnx/model.onnx", "sentences"),
    ("gte-small", "onnx-encoders", "gte-small/onnx/model.onnx", "sentences"),
]
SIZES = {"opennsfw": (224, 224), "u2netp": (320, 320), "PP-OCRv4 rec": (48, 320), "PP-OCR cls": (48, 192), "PP-OCRv4 det": (320, 320), "CenterFace": (320, 320), "EfficientNet": (225, 225)}


def pictures(name, kind, held_out, count):
    """Preprocessed images."""
    import numpy
    from PIL import Image

    height, width = SIZES[name]
    if held_out:
        from safetensors.numpy import load_file

        images = load_file(cached.script("prepare", "cifar-10")[1] / "test.safetensors")["images"][:count].astype("uint8").transpose(0, 2, 3, 1)
        images = [Image.fromarray(image) for image in images]
    else:
        images = [Image.open(path).convert("RGB") for path in sorted(cached.fetched("photographs").glob("*.jpg"))]
        # Also halves of photographs.
        images += [image.crop((0, 0, image.width // 2, image.height)) for image in images]
        images = images[:count]
    pixels = numpy.stack([numpy.asarray(image.resize((width, height), Image.BILINEAR), numpy.float32) for image in images])
    if kind == "bgr":
        return pixels[..., ::-1] - numpy.array([104, 117, 123], numpy.float32)
    if kind == "lite":
        return numpy.ascontiguousarray((pixels.transpose(0, 3, 1, 2) - 127) / 128)
    if kind == "rgb":
        return numpy.ascontiguousarray(pixels.transpose(0, 3, 1, 2))
    pixels = pixels / 255 - numpy.array([0.485, 0.456, 0.406], numpy.float32)
    return numpy.ascontiguousarray((pixels / numpy.array([0.229, 0.224, 0.225], numpy.float32)).transpose(0, 3, 1, 2))


def words(name, held_out, count):
    """Words in a font, dark on light; for the other set in another font, light on dark."""
    import numpy
    from PIL import Image, ImageDraw, ImageFont

    height, width = SIZES[name]
    first, second, _ = sentences("test" if held_out else "train")
    fonts = sorted(Path("/usr/share/fonts").rglob("*.ttf"))
    random = numpy.random.default_rng(int(held_out))
    made = []
    for text in (second if held_out else first)[:count]:
        ink, ground = (230, 60) if held_out else (40, 215)
        image = Image.new("L", (width, height), ground)
        font = ImageFont.truetype(str(fonts[-1 if held_out else 0]), 30) if fonts else ImageFont.load_default(30)
        ImageDraw.Draw(image).text((4, 5), text[:22], fill=ink, font=font)
        made.append(numpy.asarray(image, numpy.float32) + random.normal(0, 6, (height, width)).astype(numpy.float32))
    pixels = numpy.stack(made)[:, None].repeat(3, 1).clip(0, 255)
    return (pixels / 127.5 - 1).astype(numpy.float32)


def beginnings_and_ends(held_out, count):
    """First and last 1,024 bytes of files, padded with 256, as inputs of magika."""
    import sysconfig

    import numpy

    folder = Path(sysconfig.get_path("stdlib")) if held_out else ROOT
    names = [path for path in folder.rglob("*") if path.is_file() and not {"target", ".git", "site-packages", "__pycache__"} & set(path.parts)]
    by_kind = {}
    for path in sorted(path for path in names if path.stat().st_size > 64):
        by_kind.setdefault(path.suffix, []).append(path)
    # One file of each kind, then a second one of each, and so on.
    turns = [files[turn] for turn in range(count) for files in by_kind.values() if turn < len(files)]
    made = numpy.full((count, 2048), 256, numpy.int32)
    for row, path in zip(made, turns):
        content = path.read_bytes()
        first, last = content[:4096].lstrip()[:1024], content[-4096:].rstrip()[-1024:]
        row[: len(first)] = list(first)
        row[2048 - len(last) :] = list(last)
    return made


def sentences(part):
    from lib import onnx_bench

    return onnx_bench.sentences(cached.fetched("sts-b"), part)


def tokens(held_out, count):
    import numpy
    from tokenizers import Tokenizer

    # Both encoders use the vocabulary of BERT.
    tokenizer = Tokenizer.from_file(str(next(cached.fetched("minilm").rglob("tokenizer.json"))))
    tokenizer.no_padding()
    tokenizer.enable_truncation(64)
    first, _, _ = sentences("test" if held_out else "train")
    feeds = []
    for text in list(dict.fromkeys(first))[:count]:
        encoded = tokenizer.encode(text)
        feeds.append({"input_ids": encoded.ids, "attention_mask": encoded.attention_mask, "token_type_ids": encoded.type_ids})
    return [{name: numpy.array([value], numpy.int64) for name, value in feed.items()} for feed in feeds]


def feeds(name, kind, path, held_out, count):
    """Samples one at a time, by input."""
    from lib import onnx_bench

    inputs = [given.name for given in onnx_bench.session(path).get_inputs()]
    if kind == "sentences":
        return [{name: feed[name] for name in inputs} for feed in tokens(held_out, count)]
    if kind == "bytes":
        return [{inputs[0]: row[None]} for row in beginnings_and_ends(held_out, count)]
    pixels = words(name, held_out, count) if kind == "text" else pictures(name, kind, held_out, count)
    return [{inputs[0]: picture[None]} for picture in pixels]


def padded(feeds):
    """Samples as rows of arrays, padded at the end."""
    import numpy

    arrays = {}
    for name in feeds[0]:
        rows = [feed[name][0] for feed in feeds]
        longest = max(row.shape[0] for row in rows)
        arrays[name] = numpy.stack([numpy.pad(row, [(0, longest - row.shape[0])] + [(0, 0)] * (row.ndim - 1)) for row in rows])
    return arrays


def upgraded(path, out):
    """The file in opset 17, preprocessed for ONNX Runtime's tool; older opsets have no scales per channel."""
    import onnx
    from onnx import version_converter
    from onnxruntime.quantization.shape_inference import quant_pre_process

    model = onnx.load(path)
    initializers = {tensor.name for tensor in model.graph.initializer}
    kept = [given for given in model.graph.input if given.name not in initializers]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    model.ir_version = max(model.ir_version, 8)
    if model.opset_import[0].version < 17:
        model = version_converter.convert_version(model, 17)
    onnx.save(model, out)
    try:
        quant_pre_process(str(out), str(out), skip_symbolic_shape=True)
    except Exception as error:
        print(f"not prepared: {error}", file=sys.stderr)


def resized(path, sizes, out):
    """Replaces the image size of an input, like the package of the file does."""
    import onnx

    model = onnx.load(path)
    for dim, size in zip(model.graph.input[0].type.tensor_type.shape.dim, (1, 3, *sizes)):
        dim.dim_value = size
    for output in model.graph.output:
        for at, dim in enumerate(output.type.tensor_type.shape.dim):
            dim.dim_param = f"{output.name}_{at}"
    onnx.save(model, out)
    return out


def exported(arguments, scratch):
    """EfficientNet-Lite0 in floats, with unfolded batch normalization."""
    folder, out = cached.script("prepare", "efficientnet-lite0")[0], scratch / "lite.onnx"
    subprocess.run([arguments.compress, "chain", folder, "-o", out, "--quiet", "--", "cast", "--to", "f32"], check=True, stdout=subprocess.DEVNULL)
    return out


def answers(path, feeds):
    from lib import onnx_bench

    opened = onnx_bench.session(path)
    place = next(at for at, given in enumerate(opened.get_outputs()) if given.type == "tensor(float)")
    return [opened.run(None, feed)[place].ravel().astype("float64") for feed in feeds]


def commands_of(model, arguments, scratch):
    """The original file, and commands of both tools, with their options still to add: paths, and a method."""
    import numpy

    name, package, file, kind = model
    path = exported(arguments, scratch) if kind == "lite" else next(path for path in cached.fetched(package).rglob("*.onnx") if str(path).endswith(file))
    if kind == "rgb":
        path = resized(path, SIZES[name], scratch / "resized.onnx")
    calibration = feeds(name, kind, path, False, arguments.samples)
    samples, rows = scratch / "samples.npz", scratch / "rows.npz"
    numpy.savez(samples, **{f"{at}/{given}": value for at, feed in enumerate(calibration) for given, value in feed.items()})
    numpy.savez(rows, **padded(calibration))
    upgraded(path, scratch / "float.onnx")
    given = f"{{arrays: {rows}, samples: {len(calibration)}}}"

    def ours(out, observer="mse"):
        return [arguments.compress, "quantize-static", path, "-o", out, "--quiet", "--force", "--no-measure", "--observer", observer, "--calibration", given]

    def theirs(out, method):
        return [sys.executable, WORKER, "quantize", scratch / "float.onnx", samples, method, "", "QUInt8", out]

    return path, samples, ours, theirs


def measure(model, arguments, scratch):
    import numpy

    from lib import onnx_bench

    name, _, _, kind = model
    path, samples, ours, theirs = commands_of(model, arguments, scratch)
    compared = feeds(name, kind, path, True, COMPARED)
    files = {"float": path, "compress": scratch / "ours.onnx", "NNCF": scratch / "nncf.onnx"}
    commands = {"compress": ours(files["compress"]), "NNCF": [venv.nncf(), WORKER, "nncf", scratch / "float.onnx", samples, files["NNCF"]]}
    for method in METHODS:
        files[f"ONNX Runtime, {method}"] = scratch / f"{method}.onnx"
        commands[f"ONNX Runtime, {method}"] = theirs(scratch / f"{method}.onnx", method)
    failed, taken = {}, {}
    for what, command in commands.items():
        print(f"{name}: {what}", file=sys.stderr, flush=True)
        try:
            taken[what] = timed(list(map(str, command)), MEMORY, arguments.limit)["seconds"]
        except Failed as error:
            failed[what] = str(error).strip().splitlines()[-1][:100]
    files = {what: path for what, path in files.items() if what not in failed}
    plain, likeness = answers(path, compared), {}
    for what, made in list(files.items()):
        try:
            found = answers(made, compared)
            likeness[what] = [float(a @ b / max(numpy.linalg.norm(a) * numpy.linalg.norm(b), 1e-12)) for a, b in zip(found, plain)]
        except Exception as error:
            failed[what] = str(error).splitlines()[0][:100]
            del files[what]
    theirs = [what for what in likeness if what.startswith("ONNX Runtime")]
    best = max(theirs, key=lambda what: statistics.mean(likeness[what]), default=None)
    shown = [what for what in files if what in ("float", "compress", "NNCF", best)]
    times = onnx_bench.timings({what: onnx_bench.session(files[what], 1) for what in shown}, ROUNDS, time.thread_time, compared[0])
    found = []
    for what in shown:
        found.append({
            "model": name, "file": what, "bytes": files[what].stat().st_size, "mean": statistics.mean(likeness[what]), "least": min(likeness[what]),
            "milliseconds": 1e3 * statistics.median(times[what]), "ratio": statistics.median(a / b for a, b in zip(times["float"], times[what])), "seconds": taken.get(what),
        })  # fmt: skip
    found += [{"model": name, "file": what, "failed": reason} for what, reason in failed.items()]
    return found


def take_turns(model, arguments, scratch):
    """Time and peak memory of the tools, each run after one of ONNX Runtime's."""
    _, _, ours, theirs = commands_of(model, arguments, scratch)
    commands = {"ONNX Runtime, MinMax": theirs(scratch / "theirs.onnx", "MinMax"), "compress, minmax": ours(scratch / "ours.onnx", "minmax"), "compress, default": ours(scratch / "ours.onnx")}
    taken = {what: [] for what in commands}
    for number in range(arguments.turns):
        for what, command in commands.items():
            print(f"{model[0]}: {what}, turn {number + 1}", file=sys.stderr, flush=True)
            taken[what].append(timed(command, MEMORY, arguments.limit))
    seconds = {what: [turn["seconds"] for turn in turns] for what, turns in taken.items()}
    ratios = {what: [a / b for a, b in zip(turns, seconds["ONNX Runtime, MinMax"])] for what, turns in seconds.items()}
    return [
        {"model": model[0], "file": what, "seconds": statistics.median(seconds[what]), "ratios": ratios[what], "peak": max(turn["peak"] for turn in turns)}
        for what, turns in taken.items()
    ]


def show(row):
    if "ratios" in row:
        ratio = f"{statistics.median(row['ratios']):.2f} ({min(row['ratios']):.2f} to {max(row['ratios']):.2f})"
        print(f"{row['model']:14} {row['file']:26} {row['seconds']:8.2f} s {ratio:>24} {row['peak'] / 1e6:8.0f} MB", flush=True)
        return
    if "failed" in row:
        print(f"{row['model']:14} {row['file']:26} {row['failed']}", flush=True)
        return
    seconds = f"{row['seconds']:.0f} s" if row["seconds"] else ""
    print(f"{row['model']:14} {row['file']:26} {row['mean']:.4f} {row['least']:.4f} {row['bytes'] / 1e6:8.2f} MB {row['milliseconds']:8.1f} ms {row['ratio']:5.2f} x {seconds}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compress", type=Path, default=COMPRESS, metavar="BINARY", help="the binary to use")
    parser.add_argument("--only", default="", metavar="TEXT", help="models whose name contains this")
    parser.add_argument("--samples", type=int, default=32, metavar="N", help="number of calibration samples (32)")
    parser.add_argument("--limit", type=int, default=600, metavar="SECONDS", help="limit of processor time per tool and file (600)")
    parser.add_argument("--turns", type=int, default=0, metavar="N", help="only measure time and memory of the tools, N times in turns")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    arguments = parser.parse_args()
    venv.enter()
    rows = []
    for model in MODELS:
        if arguments.only not in model[0]:
            continue
        with tempfile.TemporaryDirectory(prefix="compress-onnx-") as scratch:
            found = (take_turns if arguments.turns else measure)(model, arguments, Path(scratch))
        rows += found
        if not arguments.json:
            for row in found:
                show(row)
    if arguments.json:
        print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
