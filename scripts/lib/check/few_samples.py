"""Perplexity of 4-bit weights on other text, by the number of calibration windows: never above `rtn`.

    scripts/check few-samples [--compress BINARY] [--model stories15m|smollm2] [--windows 2,4,8,16] [--seeds 0]
                        [--judge test|valid] [--threads N]

Calibrates on the first windows of 512 tokens of the WikiText-2 training set (smollm2) or of 256 tokens of
Bryant's stories after the first 17 % (stories15m). Evaluates on 8 windows of 1,024 tokens, or of 256. Prints
processor seconds of the quantization without measuring. Fails if a result is worse than `rtn`.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from lib import COMPRESS
from lib.cached import fetched



def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compress", default=COMPRESS)
    parser.add_argument("--model", choices=["stories15m", "smollm2"], default="stories15m")
    parser.add_argument("--windows", default="2,4,8,16")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--judge", choices=["test", "valid"], default="valid")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="few-samples-") as folder:
        folder = Path(folder)
        if arguments.model == "smollm2":
            model, data = fetched("smollm2"), fetched("wikitext-2")
            known, judged, lengths = data / "train.raw", data / f"{arguments.judge}.raw", (512, 1024)
        else:
            model, text = fetched("stories15m"), (fetched("stories") / "bryant-stories.txt").read_text()
            known, judged, lengths = folder / "known.txt", folder / "judged.txt", (256, 256)
            end = int(0.17 * len(text))
            judged.write_text(text[:end])
            known.write_text(text[end:])

        def run(*options):
            command = [arguments.compress, *options, "--threads", str(arguments.threads), "--quiet"]
            before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            return done.stdout, resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before

        def perplexity(path):
            data = f"{{text: {judged}, max_length: {lengths[1]}, samples: 8}}"
            return json.loads(run("eval", path, "--data", data, "--json")[0])["score"]["value"]

        def quantized(method, seed=0, **data):
            quantize = {"scheme": "W4A16", "group_size": 64, "method": method}
            recipe = {"model": str(model), "seed": seed, "data": data, "passes": [{"quantize": quantize}]}
            (folder / "recipe.yaml").write_text(json.dumps(recipe))
            _, seconds = run("run", folder / "recipe.yaml", "-o", folder / "out", "--force", "--no-measure")
            return perplexity(folder / "out"), seconds

        rtn, _ = quantized("rtn")
        print(f"{arguments.model}, {arguments.judge}: float {perplexity(model):.3f}, rtn {rtn:.3f}")
        print(f"{'windows':>7} {'seed':>4} {'gptq':>8} {'CPU s':>6}")
        worse = 0
        for windows in map(int, arguments.windows.split(",")):
            for seed in map(int, arguments.seeds.split(",")):
                calibration = {"text": str(known), "max_length": lengths[0], "samples": windows}
                value, seconds = quantized("gptq", seed, calibration=calibration)
                worse += value > rtn
                print(f"{windows:7} {seed:4} {value:8.3f} {seconds:6.0f}", flush=True)
        if worse:
            sys.exit(f"{worse} results are worse than rtn")


if __name__ == "__main__":
    main()
