"""The checks of scripts/gpu-check, which need only Python's standard library; PyTorch runs in separate processes."""

import html
import itertools
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
STEPS = 4
OPTIMIZERS = ["adamw", "adamw8bit", "adafactor", "muon", "sgd"]
# Relative tolerance of losses, compared with the same training on the CPU.
TOLERANCE = {"f32": 1e-3, "bf16": 0.05, "f16": 0.02}
# Quantizers may round a value differently.
QUANTIZED_TOLERANCE = 0.02
# Copies of a step without offloading: the upload of samples and the download of figures.
FIGURES = ("out", "step")
SAMPLES = ("in", "batch")
ROUNDS = 3
# Time limits in seconds, for one program and for the whole run.
PATIENCE, ALL = 240, 600
# Trainings that run at the same time; they are compared, not timed.
WORKERS = max((os.cpu_count() or 1) // 2, 1)


class Checks:
    """The checks and their results."""

    def __init__(self):
        self.rows = []

    def add(self, section, name, ok, **figures):
        self.rows.append({"section": section, "name": name, "ok": ok, **figures})
        print(f"{'ok    ' if ok else 'FAILED'} {section}: {name} {figures if not ok else ''}", flush=True)


def safetensors(path, tensors):
    """Writes integer and float tensors: name to (type, shape, bytes)."""
    header, begin = {}, 0
    for name, (kind, shape, data) in tensors.items():
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, begin + len(data)]}
        begin += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data for *_, data in tensors.values()))


def whole(rows, columns, value):
    """A table of integers."""
    data = b"".join(value(row, column).to_bytes(8, "little") for row in range(rows) for column in range(columns))
    return "I64", [rows, columns] if columns > 1 else [rows], data


def samples(folder):
    """Samples for the small models."""
    import struct

    tokens = whole(24, 9, lambda row, column: 3 + (row * 7 + column * 5) % 20)
    mask = whole(24, 9, lambda row, column: int(column < 4 + row % 6))
    labels = whole(24, 1, lambda row, _: row * 7 % 5 % 3)
    safetensors(folder / "bert.safetensors", {"input_ids": tokens, "attention_mask": mask, "token_type_ids": whole(24, 9, lambda *_: 0), "labels": labels})
    safetensors(folder / "llama.safetensors", {"input_ids": tokens, "attention_mask": mask})
    pixels = [((i * 2654435761) % 1000) / 500 - 1 for i in range(24 * 3 * 32 * 32)]
    images = {"pixel_values": ("F32", [24, 3, 32, 32], struct.pack(f"<{len(pixels)}f", *pixels)), "labels": labels}
    safetensors(folder / "images.safetensors", images)


def output(command):
    """The output of a command; raises with its error output."""
    done = subprocess.run([str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=PATIENCE)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().replace("\n", " ")[-2000:] or f"exit code {done.returncode}")
    return done.stdout


class Trainer:
    """Trains by the binary."""

    def __init__(self, args, folder):
        self.args, self.folder = args, folder
        self.known, self.lock, self.pool = {}, threading.Lock(), ThreadPoolExecutor(WORKERS)

    def train(self, model, passes, device, data, measure=False):
        """The report; raises with the error output of the program."""
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        recipe, out = folder / "recipe.yaml", folder / "out"
        sets = f"train: {{ arrays: {data} }}, calibration: {{ arrays: {data}, task: fidelity }}"
        if any("evaluate_every" in step for step in passes):
            sets += f", evaluation: {{ arrays: {data} }}"
        recipe.write_text(f"model: {model}\nmeasure: {str(measure).lower()}\ndata: {{ {sets} }}\npasses:\n" + "".join(f"  - {step}\n" for step in passes))
        try:
            output([self.args.bin / "compress", "run", recipe, "-o", out, "--no-cache", "--quiet", "--device", device])
            return json.loads((out / "report.json").read_text())
        finally:
            shutil.rmtree(folder)

    def losses(self, report):
        return [row["loss"] for row in details(report)["training"]["curve"]]

    def on_cpu(self, model, passes, data):
        """Losses of the same training on the CPU, computed once."""
        key = (model, *passes)
        with self.lock:
            if key not in self.known:
                self.known[key] = self.pool.submit(self.train, model, passes, "cpu", data)
        return self.losses(self.known[key].result())


def details(report):
    return next(step["details"] for step in report["passes"] if step["name"] in ("distill", "finetune"))


def distance(ours, expected):
    return max(abs(a - b) / max(abs(b), 1e-3) for a, b in zip(ours, expected, strict=True))


def check_ops(args, checks, _):
    """The tests of ops and kernels, by the test program."""
    device = "cpu" if args.device.startswith("cpu") else args.device
    environment = os.environ | {"COMPRESS_TEST_DEVICE": device} | ({"COMPRESS_KERNELS": "off"} if args.device == "cpu:strict" else {})
    done = subprocess.run([args.ops, "ops::kernels::", "ops::gpu::"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, timeout=PATIENCE)
    results = [line.split() for line in done.stdout.splitlines() if line.startswith("test ops::")]
    for _, name, *_, result in results:
        checks.add("ops", name.split("::", 2)[2].replace("_", " "), result == "ok")
    if done.returncode or len(results) < 8:
        checks.add("ops", "the test program", False, said=done.stdout[-4000:])


def passes(pass_name, options=(), quantized=False):
    common = f"max_steps: {STEPS}, batch_size: 8, learning_rate: 1e-3, schedule: {{ kind: constant }}"
    step = f"{pass_name}: {{ {', '.join([common, *options])} }}"
    return ["quantize-static: {}", step] if quantized else [step]


def check_training(args, checks, trainer):
    """Optimizers, precisions, and the combinations of compatible options."""
    names = ("bert-sequence-classification", "llama-grouped-tied", "torchvision-mobilenet-v2", "efficientnet-image-classification")
    bert, llama, mobilenet, efficientnet = (args.models / name for name in names)
    files = ((bert, "bert"), (llama, "llama"), (mobilenet, "images"), (efficientnet, "images"))
    data = {model: trainer.folder / f"{name}.safetensors" for model, name in files}

    def compare(section, name, model, pass_name, options=(), precision="f32", quantized=False, copies=None):
        tolerance = max(TOLERANCE[precision], QUANTIZED_TOLERANCE if quantized else 0)
        try:
            report = trainer.train(model, passes(pass_name, [*options, f"precision: {precision}"], quantized), args.device, data[model])
            # The storage of values does not change them.
            plain = [option for option in options if not option.startswith("offload")]
            # Half precision is compared with itself: its loss scale skips steps.
            if precision != "f32":
                plain.append(f"precision: {precision}")
            expected = trainer.on_cpu(model, passes(pass_name, plain, quantized), data[model])
            apart = distance(trainer.losses(report), expected)
            checks.add(section, name, apart <= tolerance, apart=apart, tolerance=tolerance)
            if copies:
                check_copies(args, checks, copies, report)
        except (RuntimeError, subprocess.TimeoutExpired, ValueError) as error:
            checks.add(section, name, False, said=str(error)[-2000:])

    workers = ThreadPoolExecutor(WORKERS)
    running = []

    def later(*arguments, **options):
        running.append(workers.submit(compare, *arguments, **options))

    soft = ["losses: { soft: 1, hidden: 1 }", "student: { layers: [0] }"]
    for optimizer in OPTIMIZERS:
        later("optimizers", optimizer, bert, "finetune", [f"optimizer: {optimizer}"])
    # A parameter of at least 4096 elements, whose moments have 8 bits.
    later("optimizers", "adamw8bit, large parameter", efficientnet, "finetune", ["optimizer: adamw8bit"], copies="adamw8bit")
    jobs = [("classifier", bert, "finetune", []), ("language model", llama, "distill", soft), ("depthwise network", mobilenet, "finetune", [])]
    for (name, model, pass_name, options), precision in itertools.product(jobs, ["f32"] if args.small else TOLERANCE):
        later("models", f"{name}, {precision}", model, pass_name, options, precision, copies=name if precision == "f32" else None)
    offloads = ["", "offload: [optimizer]"]
    combinations = itertools.product(offloads, ["", "average: 0.9"], ["", "evaluate_every: 2"], [False, True], ["", "gradient_checkpointing: blocks"])
    for number, (offload, average, evaluation, quantized, checkpointing) in enumerate(combinations):
        # A subset of the 32 that contains every pair of values.
        if args.small and number not in (0, 7, 13, 18, 28, 31):
            continue
        options = [part for part in (average, evaluation, checkpointing, offload) if part]
        name = ", ".join([*options, *(["through quantizers"] if quantized else [])]) or "nothing"
        later("combinations", name, bert, "finetune", options, quantized=quantized)
    for offloaded in ["[teacher]", "[teacher, optimizer]"][: 1 if args.small else 2]:
        later("combinations", f"language model, offload: {offloaded}", llama, "distill", [*soft, f"offload: {offloaded}"])
    for job in running:
        job.result()


def check_copies(args, checks, name, report):
    """The number of copies between host and device per step."""
    copies = {(copy["direction"], copy["cause"]): copy["per_step"] for copy in details(report)["training"]["copies"]}
    if args.device == "cpu":
        return checks.add("copies", f"{name}: none on the CPU", not copies, copies=str(copies))
    few = copies.get(FIGURES) == 1 and SAMPLES in copies and not set(copies) - {FIGURES, SAMPLES}
    return checks.add("copies", name, few, copies={" ".join(key): count for key, count in copies.items()})


def check_report(args, checks, trainer):
    """The description of the machine in the report."""
    report = trainer.train(args.models / "bert-sequence-classification", passes("finetune"), args.device, trainer.folder / "bert.safetensors")
    gpu = not args.device.startswith("cpu")
    measured = trainer.train(args.models / "bert-sequence-classification", ["cast: { to: f16 }"], args.device, trainer.folder / "bert.safetensors", measure=True)
    for job, told in (("training", report), ("measuring alone", measured)):
        environment, peak = told["environment"], told["totals"]["peak_vram_bytes"]
        checks.add("report", f"{job}: environment.device", environment["device"] == args.device, found=environment["device"])
        if gpu:
            checks.add("report", f"{job}: environment.gpu", bool(environment["gpu"]), found=environment["gpu"])
            checks.add("report", f"{job}: totals.peak_vram_bytes", (peak or 0) > 0, found=peak)
    return report["environment"]


def compared(job, tokens, turns):
    """The turns of a job, with the median ratio of their times."""
    ratio = statistics.median(turn["ours"]["seconds"] / turn["theirs"]["seconds"] for turn in turns)
    return {"job": job, "tokens": tokens, "time_ratio": ratio, "turns": turns}


def bench(args, checks, trainer):
    """Distillation, interleaved with PyTorch."""
    gpu = not args.device.startswith("cpu")
    if not gpu:
        return []
    peers = HERE / "gpu_peers.py"
    results = []
    for job in ("minilm", "llama"):
        folder = trainer.folder / job
        output([sys.executable, peers, "make", job, folder])
        options = json.loads((folder / "options.json").read_text())
        turns = []
        for _ in range(ROUNDS):
            try:
                theirs = json.loads(output([sys.executable, peers, "run", job, folder, args.device]).splitlines()[-1])
                report = trainer.train(folder / "student", [f"distill: {{ teacher: {folder / 'teacher'}, {options['recipe']} }}"], args.device, folder / "batch.safetensors")
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                checks.add("beside PyTorch", job, False, said=str(error)[-2000:])
                break
            curve = details(report)["training"]["curve"]
            ours = {"seconds": statistics.median(options["samples"] / row["samples_per_second"] for row in curve[2:]), "first_loss": curve[0]["loss"], "peak": report["totals"]["peak_vram_bytes"]}
            turns.append({"ours": ours, "theirs": theirs})
        if not turns:
            continue
        last = turns[-1]
        same = abs(last["ours"]["first_loss"] - last["theirs"]["first_loss"]) <= 0.02 * abs(last["theirs"]["first_loss"])
        checks.add("beside PyTorch", f"{job}: the same first loss", same, ours=last["ours"]["first_loss"], theirs=last["theirs"]["first_loss"])
        results.append(compared(job, options["tokens"], turns))
    return results


def decoder(args, checks, trainer):
    """GPTQ and evaluation of a decoder of 1.5 B parameters, in turns with llm-compressor and transformers."""
    if args.device.startswith("cpu"):
        return []
    peers, folder = HERE / "gpu_decoder.py", trainer.folder / "large"
    output([sys.executable, peers, "make", folder])
    model, windows, recipe = folder / "decoder", folder / "windows.safetensors", folder / "recipe.yaml"
    sets = f"data: {{ calibration: {{ arrays: {windows}, samples: 16, task: fidelity }} }}"
    compress = args.bin / "compress"

    def quantize(options=""):
        recipe.write_text(f"model: {model}\nmeasure: false\n{sets}\npasses: [quantize: {{ scheme: W4A16, method: gptq{options} }}]\n")
        output([compress, "run", recipe, "-o", folder / "ours", "--force", "--no-cache", "--quiet", "--device", args.device])
        totals = json.loads((folder / "ours" / "report.json").read_text())["totals"]
        return {"seconds": totals["seconds"], "peak": totals["peak_vram_bytes"]}

    def evaluate():
        told = json.loads(output([compress, "eval", model, "--arrays", windows, "--task", "language-modelling", "--precision", "bf16", "--device", args.device, "--json"]))
        return {"seconds": told["seconds"], "peak": None, "loss": told["score"]["more"]["negative_log_likelihood"]}

    def quantize_alike():
        """With the options of llm-compressor: fixed damping, no correction or refinement, and scales of the largest values."""
        return quantize(", damping: 0.01, propagation: 0, sweeps: 0, observer: minmax")

    results = []
    for name, job, ours in (("evaluate", "evaluate", evaluate), ("quantize", "quantize", quantize), ("quantize with the peer's options", "quantize", quantize_alike)):
        try:
            turns = []
            for _ in range(2):
                turns.append({"ours": ours()})
                print(f"       {name}, ours: {turns[-1]['ours']}", flush=True)
                turns[-1]["theirs"] = json.loads(output([sys.executable, peers, job, folder, args.device]).splitlines()[-1])
                print(f"       {name}, theirs: {turns[-1]['theirs']}", flush=True)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            checks.add("1.5 B decoder", name, False, said=str(error))
            continue
        if job == "evaluate":
            losses = [turns[0][side]["loss"] for side in ("ours", "theirs")]
            checks.add("1.5 B decoder", "the same loss", abs(losses[0] - losses[1]) <= 0.01 * losses[1], losses=losses)
        results.append(compared(f"{name}, 1.5 B decoder", 16 * 512, turns))
    return results


def page(result):
    """The result as one page."""
    failed = [row for row in result["checks"] if not row["ok"]]
    escape = lambda value: html.escape(str(value))
    rows = "".join(
        f"<tr class={'ok' if row['ok'] else 'bad'}><td>{escape(row['section'])}<td>{escape(row['name'])}<td>{'ok' if row['ok'] else 'failed'}"
        f"<td>{escape({key: value for key, value in row.items() if key not in ('section', 'name', 'ok')} or '')}"
        for row in [*failed, *(row for row in result["checks"] if row["ok"])]
    )
    megabytes = lambda value: "–" if value is None else f"{value / 1e6:.0f} MB"
    beside = "".join(
        f"<tr><td>{escape(entry['job'])}<td>{entry['tokens'] / turn['ours']['seconds']:.0f} tokens/s, {megabytes(turn['ours']['peak'])}"
        f"<td>{entry['tokens'] / turn['theirs']['seconds']:.0f} tokens/s, {megabytes(turn['theirs']['peak'])}<td>{turn['ours']['seconds'] / turn['theirs']['seconds']:.2f}"
        for entry in result["beside_pytorch"]
        for turn in entry["turns"]
    )
    return f"""<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>gpu-check</title>
<style>body{{font:15px/1.5 system-ui;max-width:70rem;margin:2rem auto;padding:0 1rem}}table{{border-collapse:collapse;width:100%}}td,th{{text-align:left;vertical-align:top;padding:.3rem .6rem;border-bottom:1px solid #ddd;overflow-wrap:anywhere}}.bad td{{background:#fde8e6}}</style>
<h1>{len(result['checks']) - len(failed)} of {len(result['checks'])} checks passed</h1>
<p>{escape(result['machine'])}, device {escape(result['device'])}, {result['seconds']:.0f} s</p>
<h2>Comparison with PyTorch with autocast</h2><table><tr><th>job<th>compress<th>PyTorch<th>time, ratio</tr>{beside or '<tr><td colspan=4>not run'}</table>
<h2>Checks</h2><table>{rows}</table></html>
"""


def machine():
    smi = shutil.which("nvidia-smi")
    gpu = subprocess.run([smi, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"], stdout=subprocess.PIPE, text=True).stdout.strip() if smi else "no GPU"
    return f"{platform.machine()}, {os.cpu_count()} cores, {gpu}"


def libraries():
    """CUDA libraries of the PyTorch environment, for the started programs."""
    folders = [str(folder) for path in sys.path for folder in Path(path).glob("nvidia/*/lib") if Path(path).is_dir()]
    os.environ["LD_LIBRARY_PATH"] = os.pathsep.join([*folders, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])


def run(args):
    start, checks = time.monotonic(), Checks()
    libraries()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        trainer = Trainer(args, Path(scratch))
        samples(trainer.folder)

        def attempt(section, part):
            try:
                return part()
            except Exception as error:
                checks.add(section, "could be run", False, said=f"{type(error).__name__}: {error}"[-2000:])
                return None

        parts = {"ops": check_ops, "report": check_report, "training": check_training, "PyTorch": bench, "decoder": decoder}
        chosen = args.only.split(",") if args.only else [name for name in parts if not (args.small and name in ("PyTorch", "decoder"))]
        results = {name: attempt(name, lambda name=name: parts[name](args, checks, trainer)) for name in chosen}
        environment = results.get("report") or {}
        beside = [*(results.get("PyTorch") or []), *(results.get("decoder") or [])]
    seconds = time.monotonic() - start
    checks.add("everything", f"took less than {ALL} s", seconds < ALL, seconds=seconds)
    result = {"device": args.device, "machine": machine(), "environment": environment, "seconds": seconds, "checks": checks.rows, "beside_pytorch": beside}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "gpu-check.json").write_text(json.dumps(result, indent=1) + "\n")
    (args.out / "gpu-check.html").write_text(page(result))
    failed = sum(not row["ok"] for row in checks.rows)
    print(f"{len(checks.rows) - failed} of {len(checks.rows)} checks passed: {args.out / 'gpu-check.html'}")
    return 1 if failed else 0
