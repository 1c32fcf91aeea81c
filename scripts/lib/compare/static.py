"""Compare static int8 by ONNX Runtime's `quantize_static`, NNCF's `quantize` and compress on real models.

    scripts/compare static [--ours NAME=FILE.onnx]… [--only TEXT] [--samples N,N] [--pictures N] [--activations TYPE]
                         [--compress BINARY] [--json]

Float files come from compress (CIFAR-10 network, Fashion-MNIST network) and torch.onnx.export (MiniLM), are
preprocessed by `quant_pre_process`, and are calibrated on the first training samples: images, or first
sentences of the STS-B pairs, one at a time. QDQ, weights int8 per channel, activations int8 by default, with
each method; percentiles are 99.99. Seconds and peak memory are those of the whole quantization process.

All files are evaluated on the test set: accuracy of 10,000 images, or rank correlation of STS-B with sentences
one at a time and 32 together; cosine similarity of logits or embeddings to the float file; milliseconds of CPU
time of a batch on one thread, and the median of the ratio to the float file, interleaved. The model of a file
is recognized by its inputs.

Networks with depthwise convolutions are calibrated on few images (20, or --pictures), and compared with their
float files on these and on images of other distributions: mean cosine similarity of logits, and number of
unchanged top classes. All three tools run with their defaults, except NNCF with its mixed preset on
MobileNetV2, which is calibrated on the first --pictures of 20 photographs and 44 crops of them, and compared on all
photographs.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from lib import COMPRESS, SCRIPTS, cached, venv
from lib.process import Failed, exits, say, timed

WORKER = SCRIPTS / "lib" / "static.py"
METHODS = ["MinMax", "Percentile", "Entropy"]
# Description of the quantized layers, and their operators; an empty string means all.
EVERY = {"all ops": ""}
MODELS = {"cifar-10": EVERY, "fashion-mnist": EVERY, "minilm": {**EVERY, "MatMul and Gemm": "MatMul,Gemm"}}
# Models that are compared on several sets of images, with the file and the number of calibration images.
COMPARISONS = {"efficientnet-lite0": "photographs", "efficientnet-lite0-uneven": "photographs", "mobilenet-v2": "calibration", "cifar-10-depthwise": "train"}


def sources(model):
    """The folder of the model and that of its data."""
    match model:
        case "cifar-10":
            return cached.script("prepare", "cifar-10")
        case "fashion-mnist":
            return [cached.script("prepare", "examples")[1], cached.fetched("fashion-mnist")]
        case "minilm":
            return [cached.fetched("minilm"), cached.fetched("sts-b")]
        case "cifar-10-depthwise":
            return [*cached.script("prepare", "examples", model), cached.script("prepare", "cifar-10")[1]]
        case "mobilenet-v2":
            return [cached.fetched(model), *cached.script("prepare", "mobilenet-v2")]
        case "efficientnet-lite0" | "efficientnet-lite0-uneven":
            even, uneven, pictures = cached.script("prepare", "efficientnet-lite0")
            return [uneven if model.endswith("uneven") else even, pictures]


def quantized(python, model, arguments, scratch):
    """Files of quantize_static by name, with seconds and peak memory."""
    made = {}
    for what, ops in MODELS[model].items():
        for method in METHODS:
            for count in arguments.samples if model != "minilm" else arguments.samples[:1]:
                name = f"{method}, {what}, {count}"
                path = scratch / f"{len(made)}.onnx"
                say(f"{model}: {name}")
                samples = scratch / f"samples-{count}.npz"
                try:
                    command = [python, WORKER, "quantize", scratch / "float.onnx", samples, method, ops, arguments.activations, path]
                    taken = timed(list(map(str, command)))
                except Failed as error:
                    made[name] = {"failed": str(error)}
                    continue
                made[name] = {"path": str(path), "seconds": taken["seconds"], "peak": taken["peak"]}
    return made


def comparison(model, arguments):
    """Files of all three tools, compared on each set of pictures."""
    python, more = venv.reference(), venv.nncf()
    folder, data = sources(model)
    with tempfile.TemporaryDirectory(prefix="compress-static-") as scratch:
        scratch = Path(scratch)
        count = arguments.pictures
        samples = scratch / f"samples-{count}.npz"
        files = {"float32": scratch / "float.onnx", "compress": scratch / "ours" / "model.onnx", "NNCF": scratch / "nncf.onnx"}
        export = [arguments.compress, "chain", folder, "-o", scratch / "exported", "--quiet", "--export", "onnx", "--", "cast", "--to", "f32"]
        calibration = f"{{arrays: {data / COMPARISONS[model]}.safetensors, samples: {count}}}"
        ours = [arguments.compress, "quantize-static", folder, "-o", scratch / "ours", "--quiet", "--export", "onnx", "--calibration", calibration]
        prepare = [python, WORKER, "prepare", model, folder, data, scratch, count]
        commands = [export, prepare, ours, [more, WORKER, "nncf", files["float32"], samples, files["NNCF"], "mixed" if model == "mobilenet-v2" else ""]]
        for method in METHODS:
            files[name := f"ONNX Runtime, {method}"] = scratch / f"{method}.onnx"
            commands.append([python, WORKER, "quantize", files["float32"], samples, method, "", "QUInt8", files[name]])
        for command in commands:
            say(f"{model}: {' '.join(Path(part).name for part in map(str, command[:3]))}")
            subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        paths = json.dumps({name: str(path) for name, path in files.items()})
        compared = json.loads(subprocess.run([python, WORKER, "compare", model, data, str(count), paths], check=True, stdout=subprocess.PIPE).stdout)
    return [{"model": model, "file": name, "sets": sets} for name, sets in compared.items() if name != "float32"]


def measure(model, ours, arguments):
    python = venv.reference()
    folder, data = sources(model)
    with tempfile.TemporaryDirectory(prefix="compress-static-") as scratch:
        scratch = Path(scratch)
        if model != "minilm":
            command = [arguments.compress, "chain", folder, "-o", scratch / "exported", "--quiet", "--export", "onnx", "--", "cast", "--to", "f32"]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        prepare = [python, WORKER, "prepare", model, folder, data, scratch, ",".join(map(str, arguments.samples))]
        subprocess.run(prepare, check=True, stdout=subprocess.DEVNULL)
        files = {"float32": {"path": str(scratch / "float.onnx")}}
        files |= quantized(python, model, arguments, scratch)
        files |= {name: {"path": str(path)} for name, path in ours.items()}
        paths = {name: file["path"] for name, file in files.items() if "path" in file}
        say(f"{model}: evaluating {len(paths)} files")
        judge = [python, WORKER, "judge", model, folder, data, json.dumps(paths)]
        judged = json.loads(subprocess.run(judge, check=True, stdout=subprocess.PIPE).stdout)
    rows = []
    for name, file in files.items():
        file.pop("path", None)
        rows.append({"model": model, "file": name, **file, **judged.get(name, {})})
    return rows


def cells(row):
    if "failed" in row:
        return [row["model"], row["file"], row["failed"][:60]]
    cost = [f"{row['seconds']:.1f}", f"{row['peak'] / 1e6:.0f}"] if "seconds" in row else ["", ""]
    scores = " ".join(f"{score:.4f}" for score in row["scores"])
    likeness = [f"{row['mean']:.4f}", f"{row['min']:.4f}"]
    return [row["model"], row["file"], f"{row['bytes'] / 1e6:.2f}", scores, *likeness, f"{row['milliseconds']:.1f}", f"{row['ratio']:.2f}", *cost]


def show_comparison(rows):
    for row in rows:
        sets = "   ".join(f"{name} {found['cosine']:.3f}, {found['kept']} of {found['of']}" for name, found in row["sets"].items())
        print(f"{row['model']:26} {row['file']:26} {sets}")


def show(rows):
    table = [["model", "file", "MB", "score", "cosine: mean", "min", "CPU ms", "× float32", "seconds", "peak MB"]]
    table += [cells(row) for row in rows]
    widths = [max(len(line[i]) for line in table if len(line) > max(i, 3)) for i in range(len(table[0]))]
    for line in table:
        aligned = [cell.ljust(width) if i < 2 else cell.rjust(width) for i, (cell, width) in enumerate(zip(line, widths))]
        print("  ".join(aligned if len(line) > 3 else [*aligned[:2], line[2]]).rstrip())


def named(text):
    name, separator, path = text.partition("=")
    if not separator or not Path(path).is_file():
        raise argparse.ArgumentTypeError(f"{text} is not NAME=FILE")
    return name, Path(path).absolute()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ours", type=named, action="append", default=[], metavar="NAME=FILE", help="additional file to evaluate")
    parser.add_argument("--only", default="", metavar="TEXT", help="models whose name contains this")
    parser.add_argument("--samples", type=lambda text: [int(count) for count in text.split(",")], default=[128], metavar="N,N", help="number of calibration samples; MiniLM uses only the first number (128)")
    parser.add_argument("--pictures", type=int, default=20, metavar="N", help="number of calibration images for networks with depthwise convolutions (20)")
    parser.add_argument("--activations", choices=["QInt8", "QUInt8"], default="QInt8", help="type of activations (QInt8)")
    parser.add_argument("--compress", type=Path, default=COMPRESS, metavar="BINARY", help="the binary to use")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    arguments = parser.parse_args()
    models = [model for model in [*MODELS, *COMPARISONS] if arguments.only in model]
    if not models:
        parser.error(f"no model matches {arguments.only}; models are {', '.join([*MODELS, *COMPARISONS])}")
    with exits("scripts/compare static"):
        of = {}
        if arguments.ours:
            told = subprocess.run([venv.reference(), WORKER, "models", *(path for _, path in arguments.ours)], check=True, stdout=subprocess.PIPE)
            of = {path: model for (_, path), model in zip(arguments.ours, json.loads(told.stdout))}
            if strange := [str(path) for path, model in of.items() if model is None]:
                sys.exit(f"scripts/compare static: files of unknown models: {', '.join(strange)}")
        rows, compared = [], []
        for model in models:
            if model in COMPARISONS:
                compared += comparison(model, arguments)
                continue
            rows += measure(model, {name: path for name, path in arguments.ours if of[path] == model}, arguments)
    if arguments.json:
        print(json.dumps(rows + compared, indent=2))
    else:
        if rows:
            show(rows)
        show_comparison(compared)


if __name__ == "__main__":
    main()
