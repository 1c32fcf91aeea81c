"""Compare `compress auto --for onnxruntime --max-loss` with NNCF's accuracy control on the same samples.

    scripts/compare auto [--only TEXT] [--time TIME] [--latency] [--threads N] [--compress BINARY]
                         [--results FILE] [--json]

MiniLM: calibrated on 128 first sentences of STS-B's training set, limited to 0.1 % of the rank correlation on its
development set, in rows of 32 sentences. CIFAR-10 network: 128 training images, 0.2 % of the accuracy on 5,000 test
images. MobileNetV2: 64 photographs, 0.2 % of the top classes of the float network on 500 enlarged CIFAR-10 images.
Each file is evaluated on those samples and on others: the test set of STS-B, or as many other images.

Prints size, scores, and the latency relative to the float file, interleaved: MiniLM with 16 texts of 64 tokens, the
others with one image. NNCF has its mixed preset for images, and its type for transformers for MiniLM; without a limit,
both tools also write their default static int8. `--latency` adds, for images, the file with the least loss that takes at most 60 % of
the latency of the float file. The rows of a model are printed when all its files are measured. `--results FILE` stores
them, and does not measure the models of an earlier run again.
"""

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path

from lib import COMPRESS, SCRIPTS, cached, venv
from lib.process import Failed, exits, say, timed

STATIC, WORKER = SCRIPTS / "lib" / "static.py", SCRIPTS / "lib" / "accuracy_control.py"
# Models with their limits in percent.
MODELS = {"minilm": 0.1, "cifar-10": 0.2, "mobilenet-v2": 0.2}
PAIRS = r'header: false, delimiter: "\t", quoting: false, text_column: 5, pair_column: 6, label_column: 4'


def sources(model):
    """The folder of the model, and those of its data."""
    match model:
        case "minilm":
            return cached.fetched("minilm"), [cached.fetched("sts-b")]
        case "cifar-10":
            folder, pictures = cached.script("prepare", "cifar-10")
            return folder, [pictures]
        case "mobilenet-v2":
            return cached.fetched(model), [*cached.script("prepare", "mobilenet-v2"), cached.script("prepare", "cifar-10")[1]]


def output(command):
    return subprocess.run(list(map(str, command)), check=True, stdout=subprocess.PIPE, text=True).stdout


def measure(model, arguments, scratch):
    """Rows of all files of a model."""
    python, others = venv.reference(), venv.nncf()
    folder, data = sources(model)
    if model != "minilm":
        output([arguments.compress, "chain", folder, "-o", scratch / "exported", "--quiet", "--export", "onnx", "--", "cast", "--to", "f32"])
    # Few samples: only the float file is needed.
    output([python, STATIC, "prepare", model, folder, data[-1] if model == "cifar-10" else data[0], scratch, "1"])
    output([python, WORKER, "data", model, folder, os.pathsep.join(map(str, data)), scratch])
    if model == "minilm":
        calibration, evaluation = scratch / "calibration.txt", f"{{text: {data[0] / 'sts-dev.csv'}, {PAIRS}, batch_size: 32}}"
    else:
        calibration, evaluation = scratch / "calibration.safetensors", scratch / "validation.safetensors"
    percent = MODELS[model]
    auto = [arguments.compress, "auto", folder, "--quiet", "--for", "onnxruntime", "--calibration", calibration, "--eval", evaluation]
    static = [arguments.compress, "quantize-static", folder, "--quiet", "--no-measure", "--export", "onnx", "--calibration", calibration]
    commands = {
        f"compress auto --max-loss {percent}%": [*auto, "--max-loss", f"{percent}%", "-o", scratch / "auto"],
        "compress quantize-static": [*static, "-o", scratch / "static"],
        f"NNCF, accuracy control {percent}%": [others, WORKER, "nncf", scratch, scratch / "nncf.onnx", percent / 100],
        "NNCF, without a limit": [others, WORKER, "nncf", scratch, scratch / "nncf-free.onnx", 1],
    }
    paths = dict(zip(commands, [scratch / "auto" / "model.onnx", scratch / "static" / "model.onnx", scratch / "nncf.onnx", scratch / "nncf-free.onnx"]))
    if arguments.time:
        name = f"compress auto --max-loss {percent}% --time {arguments.time}"
        commands[name] = [*auto, "--max-loss", f"{percent}%", "--time", arguments.time, "-o", scratch / "finished"]
        paths[name] = scratch / "finished" / "model.onnx"
    files, taken, failed = {"float32": scratch / "float.onnx"}, {}, []
    # The limit is that of one sample, and the latencies of MiniLM are those of 16 texts.
    if arguments.latency and model != "minilm":
        plain = figures(python, scratch, files, arguments)["float32"]["milliseconds"]
        limit = f"{0.6 * plain:.3f}ms"
        commands[name := f"compress auto --latency {limit}"] = [*auto, "--latency", limit, "--threads", arguments.threads, "-o", scratch / "fast"]
        paths[name] = scratch / "fast" / "model.onnx"
    for name, command in commands.items():
        say(f"{model}: {name}")
        try:
            taken[name] = {"seconds": timed(list(map(str, command)))["seconds"]}
            files[name] = paths[name]
        except Failed as error:
            failed.append({"model": model, "file": name, "failed": str(error).strip().splitlines()[-1][:100]})
    found = figures(python, scratch, files, arguments)
    return [{"model": model, "file": name, **found[name], **taken.get(name, {})} for name in files] + failed


def figures(python, scratch, files, arguments):
    paths = json.dumps({name: str(path) for name, path in files.items()})
    return json.loads(output([python, WORKER, "judge", scratch, paths, arguments.threads]).splitlines()[-1])


HEAD = f"{'model':14} {'file':44} {'MB':>8} {'limited':>9} {'other':>9} {'ms':>8} {'x float32':>9} {'seconds':>8}"


def show(rows):
    for row in rows:
        if "failed" in row:
            print(f"{row['model']:14} {row['file']:44} {row['failed']}", flush=True)
            continue
        seconds = f"{row['seconds']:.0f}" if "seconds" in row else ""
        print(
            f"{row['model']:14} {row['file']:44} {row['bytes'] / 1e6:8.2f} {row['validation']:9.4f} {row['test']:9.4f} {row['milliseconds']:8.2f} {row['ratio']:9.3f} {seconds:>8}",
            flush=True,
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="models whose name contains this")
    parser.add_argument("--time", metavar="TIME", help="also with this time for better options, such as 10m")
    parser.add_argument("--latency", action="store_true", help="also with a limit of the latency")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="threads of the measured latencies (2)")
    parser.add_argument("--compress", type=Path, default=COMPRESS, metavar="BINARY", help="the binary to use")
    parser.add_argument("--results", type=Path, metavar="FILE", help="keep the rows of earlier runs")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    arguments = parser.parse_args()
    models = [model for model in MODELS if arguments.only in model]
    if not models:
        parser.error(f"no model matches {arguments.only}; models are {', '.join(MODELS)}")
    done = json.loads(arguments.results.read_text()) if arguments.results and arguments.results.exists() else {}
    setting = f"{arguments.threads} threads, time {arguments.time}, latency {arguments.latency}"
    with exits("scripts/compare auto"):
        if not arguments.json:
            print(HEAD, flush=True)
        for model in models:
            key = f"{model}: {setting}"
            if key not in done:
                with tempfile.TemporaryDirectory(prefix="compress-auto-") as scratch:
                    done[key] = measure(model, arguments, Path(scratch))
                if arguments.results:
                    # Models with a failed row are measured again.
                    stored = {key: rows for key, rows in done.items() if not any("failed" in row for row in rows)}
                    arguments.results.write_text(json.dumps(stored, indent=2) + "\n")
            if not arguments.json:
                show(done[key])
    if arguments.json:
        print(json.dumps([row for model in models for row in done[f"{model}: {setting}"]], indent=2))


main()
