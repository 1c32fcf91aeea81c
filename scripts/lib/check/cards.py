"""Check model cards and `.eval_results` with huggingface_hub, and run their code for transformers.

    scripts/check cards [--compress BINARY]

Small models are compressed in several formats. huggingface_hub must read the metadata of each card and the scores, the
tags of tasks must be those of transformers, and the code of the cards must load the outputs. The validation of the Hub
itself needs a network, and is not run.
"""

import argparse
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from lib import GOLDEN, ROOT, venv

EVALUATION = GOLDEN / "evaluation"
SOURCE_CARD = "---\nlicense: apache-2.0\nlanguage: [\"no\", en]\nbase_model: org/base\ntags: [conversational]\n---\n# A model\n"
BENCHMARK = {"dataset": "org/questions", "task": "default"}
# Keys of the metadata, and whether their value is a list.
KEYS = {
    "license": False,
    "language": True,
    "base_model": True,
    "base_model_relation": False,
    "library_name": False,
    "pipeline_tag": False,
    "tags": True,
    "datasets": True,
}
RELATIONS = ("quantized", "finetune")


def prepare(place, model, files, card):
    """A model folder with other files from the evaluation data."""
    folder = place / model
    shutil.copytree(GOLDEN / "models" / model, folder, ignore=shutil.ignore_patterns("golden.safetensors"))
    for name, called in files.items():
        shutil.copy2(EVALUATION / name, folder / called)
    if card:
        (folder / "README.md").write_text(card)
    return folder


def compress(program, place, name, recipe):
    """Runs a recipe, and returns the output folder."""
    path, out = place / f"{name}.yaml", place / f"out-{name}"
    path.write_text(json.dumps(recipe))
    run = subprocess.run([program, "run", path, "-o", out, "--quiet"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert run.returncode == 0, run.stdout
    return out


def check_metadata(folder):
    """huggingface_hub reads the metadata of a card, whose values have the types of the Hub."""
    from huggingface_hub import ModelCard
    from transformers.pipelines import SUPPORTED_TASKS

    data = ModelCard.load(folder / "README.md").data.to_dict()
    for key, value in data.items():
        assert key in KEYS, f"{folder.name}: {key}"
        values = value if KEYS[key] else [value]
        assert isinstance(values, list) and all(isinstance(each, str) and each for each in values), f"{folder.name}: {key}: {value!r}"
    if (tag := data.get("pipeline_tag")) is not None:
        assert tag in SUPPORTED_TASKS or tag == "sentence-similarity", tag
    assert data.get("base_model_relation") in (None, *RELATIONS) and ("base_model" in data or "base_model_relation" not in data), data
    return data


def check_scores(folder):
    """huggingface_hub reads the scores, which are those of the report. Returns their number."""
    import yaml
    from huggingface_hub import parse_eval_result_entries

    found = [entry for path in folder.glob(".eval_results/*.yaml") for entry in parse_eval_result_entries(yaml.safe_load(path.read_text()))]
    after = json.loads((folder / "report.json").read_text())["accuracy"]["after"]
    for entry in found:
        assert (entry.dataset_id, entry.task_id) == (BENCHMARK["dataset"], BENCHMARK["task"]) and entry.value in after.values(), entry
    return len(found)


def run_code(folder):
    """Runs the Python code of a card that loads the folder in transformers. Returns the number of blocks."""
    blocks = [block for block in re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL) if "transformers" in block]
    for block in blocks:
        exec(compile(block.replace("path/to/model", str(folder)), str(folder / "README.md"), "exec"), {})
    return len(blocks)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compress", type=Path, default=ROOT / "target/debug/compress")
    args = parser.parse_args()
    venv.enter()
    program = args.compress.absolute()
    with tempfile.TemporaryDirectory() as place:
        place = Path(place)
        encoder = prepare(place, "bert-sequence-classification", {"word-pieces.json": "tokenizer.json"}, None)
        decoder = prepare(place, "llama", {"characters.json": "tokenizer.json"}, SOURCE_CARD)
        data = {"evaluation": {"text": str(EVALUATION / "labelled.csv"), "label_column": "label"}}
        scored = {"model": str(encoder), "passes": ["quantize-dynamic"], "data": data, "evaluate": {"benchmark": BENCHMARK, "latency": False, "runtime": ["candle"]}}
        quantized = {"model": str(decoder), "passes": [{"quantize": {"scheme": "W4A16", "group_size": 8}}]}
        formats = {"model": str(decoder), "passes": [{"cast": {"to": "f32"}}], "export": ["safetensors", "onnx"]}
        folders = [compress(program, place, name, recipe) for name, recipe in (("scored", scored), ("quantized", quantized), ("formats", formats))]
        metadata = [check_metadata(folder) for folder in folders]
        assert metadata[0]["pipeline_tag"] == "text-classification", metadata[0]
        for found in metadata[1:]:
            assert found["license"] == "apache-2.0" and found["base_model"] == ["org/base"] and found["language"] == ["no", "en"], found
        scores, blocks = check_scores(folders[0]), sum(map(run_code, folders))
        assert scores == 1 and blocks == len(folders), f"{scores} scores, {blocks} blocks of code"
        print(f"huggingface_hub reads {len(folders)} cards and {scores} score, and transformers runs {blocks} blocks of their code")


main()
