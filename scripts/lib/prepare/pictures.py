"""Make the pictures of the documentation: parts of the reports of real runs.

    scripts/prepare pictures [--compress BINARY] [NAME…]

Runs the commands below with all-MiniLM-L6-v2, stories15M and their data, opens the reports in Chromium, and writes one
PNG file per picture to docs/images. All runs together take about ten minutes on two cores.
"""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

from lib import COMPRESS, ROOT, browser
from lib.cached import fetched

browser.enter()

# STS-B has no header; columns 4 to 6 are the score and the two sentences.
TABLE = {"header": False, "delimiter": "\t", "quoting": False, "text_column": 5}
SCORES = {"pair_column": 6, "label_column": 4}
# Width of the page, and height of a picture of its top.
WIDTH, HEIGHT = 900, 640


def sentences(part, samples, **columns):
    return json.dumps({"text": str(fetched("sts-b") / f"sts-{part}.csv"), **TABLE, **columns, "samples": samples, "max_length": 64})


def windows(part, samples):
    return json.dumps({"text": str(fetched("wikitext-2") / f"{part}.raw"), "samples": samples, "max_length": 256, "sampling": "spread"})


def dynamic():
    return ["quantize-dynamic", fetched("minilm"), "--embeddings", "--eval", sentences("dev", 500, **SCORES)]


def static():
    goal = ["--accuracy-goal", "{min_cosine: 0.9985}", "--observer", "mse"]
    return ["quantize-static", fetched("minilm"), *goal, "--calibration", sentences("train", 128), "--eval", sentences("dev", 500, **SCORES), "--export", "onnx"]


def distilled():
    steps = ["--student", "layers=0,2,4", "--max-steps", "60", "--batch-size", "16", "--learning-rate", "1e-4", "--evaluate-every", "20"]
    return ["distill", fetched("minilm"), *steps, "--train", sentences("train", 2000), "--eval", sentences("dev", 500, **SCORES)]


def searched():
    limit = ["--for", "llama.cpp", "--max-size", "12.5MB", "--points", "8"]
    return ["auto", fetched("stories15m"), *limit, "--calibration", windows("train", 32), "--eval", windows("valid", 8)]


# The command, the output, and the part of the page by CSS selector (its top without one) of each picture.
PICTURES = {
    "report": (dynamic, "dynamic", None),
    "sensitivity": (static, "static", "#sensitivity"),
    "memory": (distilled, "trained", "#memory"),
    "front": (searched, "small.gguf", "figure.pareto"),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compress", type=Path, default=COMPRESS, help="the binary to run")
    parser.add_argument("names", nargs="*", default=list(PICTURES), help=", ".join(PICTURES))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pictures-") as folder, browser.opened() as chromium:
        reports = {}
        for name in arguments.names:
            command, output, part = PICTURES[name]
            if command not in reports:
                out = Path(folder, output)
                subprocess.run([arguments.compress, *command(), "-o", out, "--quiet"], check=True)
                (reports[command],) = Path(folder).rglob(f"{output}*/report.html")
            page = chromium.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
            page.goto(reports[command].as_uri(), wait_until="load")
            target = ROOT / "docs" / "images" / f"{name}.png"
            page.screenshot(path=target) if part is None else page.locator(part).first.screenshot(path=target)
            page.close()
            print(f"{target.relative_to(ROOT)}: {target.stat().st_size / 1e3:.0f} kB")


main()
