"""Benchmark training on the CPU: steps compared with PyTorch, and the cost and benefit of each memory option.

    scripts/compare train-steps [--compress BINARY] [--rounds N] [--only steps|memory] [--jobs NAME ...]

steps: the three distillations of scripts/compare train, interleaved with PyTorch, from the same weights and
batches; the median of the ratios of seconds per step, and the loss of the first step in both.
memory: an encoder of twelve layers with all-MiniLM-L6-v2's width, random weights, 16 sequences of 64 tokens:
activations and time with and without gradient_checkpointing, optimizer state and last loss of adamw and
adamw8bit.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from lib import COMPRESS, SCRIPTS, venv
from lib.cached import SCRIPTS, fetched

STEPS = 6
JOBS = {
    "minilm": "losses: { soft: { temperature: 1 }, hidden: { weight: 3, layers: [[0, 1], [1, 3], [2, 5]] } }, learning_rate: 5e-5, batch_size: 32",
    "resnet": "losses: { soft: { temperature: 4 }, hard: 1 }, optimizer: sgd, weight_decay: 0, learning_rate: 0.05, batch_size: 128",
    "llama": "losses: { soft: { temperature: 2 } }, learning_rate: 5e-5, batch_size: 4",
}
BATCHES = {"minilm": 32, "resnet": 128, "llama": 4}


def training(binary, folder, text):
    """The report of the last pass of a recipe."""
    recipe = folder / "recipe.yaml"
    recipe.write_text(text)
    run = subprocess.run([binary, "run", recipe, "-o", folder / "out", "--force", "--quiet"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if run.returncode:
        sys.exit(f"{text}\n{run.stderr}")
    return json.loads((folder / "out" / "report.json").read_text())["passes"][-1]["details"]


def seconds(details, batch):
    return statistics.median(batch / row["samples_per_second"] for row in details["training"]["curve"][2:])


def steps(binary, folder, rounds, jobs):
    print("| job | compress | PyTorch | ratio | first loss, compress and PyTorch |\n| --- | ---: | ---: | ---: | ---: |")
    for name, options in JOBS.items():
        if jobs and name not in jobs:
            continue
        pairs, losses = [], None
        for _ in range(rounds):
            peer = subprocess.run([SCRIPTS / "compare", "train", "--only", name, "--steps", str(STEPS), "--folders", folder / "peers"], stdout=subprocess.PIPE, text=True, check=True)
            theirs = json.loads(peer.stdout.strip().splitlines()[-1])
            model = folder / "peers" / f"{name}-student"
            details = training(
                binary,
                folder,
                f"model: {model}\ndata: {{ train: {{ arrays: {folder}/peers/{name}-batch.safetensors }} }}\npasses:\n"
                f"  - distill: {{ teacher: {folder}/peers/{name}-teacher, {options}, max_steps: {STEPS + 2}, clip_norm: 0, schedule: {{ kind: constant }} }}\n",
            )
            pairs.append((seconds(details, BATCHES[name]), theirs["seconds"]))
            losses = details["training"]["curve"][0]["loss"], theirs["first_loss"]
        ours, other = (statistics.median(pair[side] for pair in pairs) for side in (0, 1))
        ratio = statistics.median(a / b for a, b in pairs)
        print(f"| {name} | {ours:.3f} s | {other:.3f} s | {ratio:.2f} | {losses[0]:.4f}, {losses[1]:.4f} |", flush=True)


def memory(binary, folder):
    model = fetched("minilm")
    config = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 12}))
    (folder / "text.txt").write_text("\n".join(f"sentence {i} of a text that is long enough to fill its row " * 8 for i in range(256)) + "\n")
    print("| 12 layers | activations | optimizer | step | last loss |\n| --- | ---: | ---: | ---: | ---: |")
    variants = ["gradient_checkpointing: none", "gradient_checkpointing: blocks", "gradient_checkpointing: { every: 3 }", "optimizer: adamw8bit"]
    for options in variants:
        details = training(
            binary,
            folder,
            f"model: {model}\ndata: {{ train: {{ text: {folder}/text.txt, max_length: 64 }} }}\npasses:\n"
            f"  - distill: {{ student: {{ config: {folder}/config.json }}, losses: {{ embedding: 1 }}, {options}, batch_size: 16, max_steps: 12, learning_rate: 1e-4 }}\n",
        )
        phases = {phase["name"]: phase["measured_bytes"] for phase in details["memory"]["phases"]}
        loss = details["training"]["curve"][-1]["loss"]
        print(f"| {options} | {phases['activations'] / 1e6:.0f} MB | {phases['optimizer'] / 1e6:.0f} MB | {seconds(details, 16):.2f} s | {loss:.4f} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compress", default=COMPRESS, help="the binary to use")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of both tools")
    parser.add_argument("--only", default="", choices=["", "steps", "memory"], help="one part")
    parser.add_argument("--jobs", nargs="*", choices=JOBS, help="subset of the distillations of `steps`")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="compress-train-") as scratch:
        if arguments.only in ("", "steps"):
            steps(arguments.compress, Path(scratch), arguments.rounds, arguments.jobs)
        if arguments.only in ("", "memory"):
            memory(arguments.compress, Path(scratch))


if __name__ == "__main__":
    venv.enter()
    main()
