"""Peak resident memory of a whole GPTQ run of SmolLM2-135M, measured from outside the process.

    scripts/check memory [--compress BINARY] [--windows 2,8,16] [--limit MB]

Quantizes to 4 bits in groups of 64 with the first windows of 512 tokens of the WikiText-2 training set, and
measures the fidelity on held-out windows, as a run without options does. Fails if a run exceeds the limit.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from lib import COMPRESS
from lib.cached import fetched
from lib.process import timed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compress", default=COMPRESS)
    parser.add_argument("--windows", default="2,8,16")
    parser.add_argument("--limit", type=float, default=400, metavar="MB")
    arguments = parser.parse_args()
    model, text = fetched("smollm2"), fetched("wikitext-2") / "train.raw"
    exceeded = 0
    print(f"{'windows':>7} {'seconds':>7} {'peak MB':>7}")
    for windows in map(int, arguments.windows.split(",")):
        with tempfile.TemporaryDirectory(prefix="memory-") as folder:
            data = f"{{text: {text}, samples: {windows}, max_length: 512}}"
            options = ["--scheme", "W4A16", "--group-size", 64, "--method", "gptq", "--calibration", data, "--threads", 2]
            run = timed([arguments.compress, "quantize", model, "-o", Path(folder) / "out", *options])
        exceeded += run["peak"] > 1e6 * arguments.limit
        print(f"{windows:7} {run['seconds']:7.1f} {run['peak'] / 1e6:7.1f}", flush=True)
    if exceeded:
        sys.exit(f"{exceeded} of these runs need more than {arguments.limit:.0f} MB")


if __name__ == "__main__":
    main()
