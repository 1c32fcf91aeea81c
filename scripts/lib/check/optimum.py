"""Check that optimum generates with encoder-decoder models that compress writes as ONNX files with caches.

    scripts/check optimum [--compress BINARY]

Exports the encoder-decoder models of tests/golden/models with `onnx: {cache: true}`, and generates with
ORTModelForSeq2SeqLM and ORTModelForSpeechSeq2Seq, greedily and with beams. The tokens and their scores must be
those of transformers.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from lib import COMPRESS, GOLDEN, venv

venv.enter(venv.decoders)

import torch
from optimum.onnxruntime import ORTModelForSeq2SeqLM, ORTModelForSpeechSeq2Seq
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq

# The transformers that optimum supports does not read `scale_decoder_outputs`, which t5-gated and mt5 set.
MODELS = ["t5", "t5-own-head", "whisper"]
TOKENS = 14
TOLERANCE = 1e-4


def generated(model, inputs, beams):
    """Tokens and scores of the next token after each."""
    options = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "num_beams": beams, "do_sample": False}
    # The golden models have no settings of generation.
    model.generation_config.decoder_start_token_id = model.config.decoder_start_token_id
    with torch.no_grad():
        result = model.generate(**inputs, **options, output_scores=True, return_dict_in_generate=True)
    return result.sequences, torch.stack(result.scores)


def difference(ours, theirs):
    finite = torch.isfinite(theirs)
    return (ours[finite] - theirs[finite]).abs().max().item() / max(theirs[finite].abs().max().item(), 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compress", default=COMPRESS)
    arguments = parser.parse_args()
    failures = 0
    with tempfile.TemporaryDirectory(prefix="optimum-") as folder:
        for name in MODELS:
            out, model = Path(folder, name), Path(GOLDEN, "models", name)
            command = [arguments.compress, "cast", model, "--to", "f32", "-o", out, "--export", "onnx: {cache: true}", "--quiet"]
            subprocess.run(command, check=True)
            stored = load_file(model / "golden.safetensors")
            inputs = {key[3:]: tensor for key, tensor in stored.items() if key.startswith("in/") and "decoder" not in key}
            classes = (ORTModelForSpeechSeq2Seq, AutoModelForSpeechSeq2Seq) if name == "whisper" else (ORTModelForSeq2SeqLM, AutoModelForSeq2SeqLM)
            ours, theirs = (each.from_pretrained(place) for each, place in zip(classes, (out, model)))
            # transformers 4.57 gives the cache as many layers as the encoder, fewer than these decoders have.
            theirs.generation_config.use_cache = False
            for beams in (1, 3):
                (tokens, scores), (expected, their_scores) = (generated(each, inputs, beams) for each in (ours, theirs))
                apart = difference(scores, their_scores) if torch.equal(tokens, expected) else float("inf")
                failures += apart > TOLERANCE
                print(f"{name}, {beams} beams: {tokens.shape[1]} tokens, scores differ by {apart:.1e}", flush=True)
    sys.exit(failures and f"{failures} comparisons failed")


main()
