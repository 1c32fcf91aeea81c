"""Write tests/golden/generation.json: greedy search of transformers for short prompts, with the models of
tests/golden/models.

    scripts/goldens generate [TEXT…]      all models, or those whose name contains one of the texts; others are unchanged

Search runs without a cache, because rotary embeddings whose angles depend on the length of a text then use the
whole text at each step. For all other models, the cache of transformers must produce the same tokens. A prompt
is used only if the most likely token is clearly ahead at every step; among several prompts, the one with the
most distinct generated tokens is chosen. For speech models, `row` is the index into "in/input_features" in
golden.safetensors.
"""

import json
import random
import sys

import torch
import transformers
from safetensors.torch import load_file

from lib import GOLDEN

MODELS = (
    "llama-grouped-tied mistral gemma2 gemma3 gpt2 gpt-neox opt qwen2-moe mixtral deepseek-v2-lite phi3-longrope smollm3-sliding granite "
    "olmo3 glm4 ernie4_5 hunyuan-alpha starcoder2 stablelm-parallel phi cohere2 gemma glm4-moe deepseek-v3 gpt-oss minimax-m2 lfm2-biases granite-hybrid mamba2 nemotron-h "
    "qwen3-next qwen3_5 llama4 ministral3 gemma3-vl qwen2-vl"
).split()
TEXT_TO_TEXT = ["t5", "t5-gated", "mt5"]
# The cache of transformers 5.23 has as many layers as the encoder.
WITHOUT_CACHE = ["phi3-longrope", *TEXT_TO_TEXT]
SPEECH = ["whisper"]
CLEAR = 2e-3
NEW = 12
TRIES = 12
ONLY = sys.argv[1:]

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def greedy(model, prompt, cached):
    """The generated tokens, and the margin of each over the next most likely token."""
    ids = prompt if isinstance(prompt, torch.Tensor) else torch.tensor([prompt])
    first = 1 if model.config.is_encoder_decoder else len(prompt)
    settings = {"do_sample": False, "max_new_tokens": NEW, "use_cache": cached, "output_scores": True, "return_dict_in_generate": True}
    settings |= {} if model.main_input_name == "input_features" else {"attention_mask": torch.ones_like(ids)}
    # Whisper's `generate` expects the files of published models.
    found = transformers.GenerationMixin.generate(model, ids, eos_token_id=None, pad_token_id=0, **settings)
    two = torch.stack([scores[0].topk(2).values for scores in found.scores])
    return found.sequences[0, first:].tolist(), (two[:, 0] - two[:, 1]).min().item()


def loaded(kind, name):
    model = kind.from_pretrained(GOLDEN / "models" / name, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return model


def of_speech(name):
    model = loaded(transformers.AutoModelForSpeechSeq2Seq, name)
    found = []
    for row, features in enumerate(load_file(GOLDEN / "models" / name / "golden.safetensors")["in/input_features"]):
        tokens, margin = greedy(model, features[None], False)
        if margin > CLEAR:
            assert greedy(model, features[None], True)[0] == tokens, f"{name}: the cache produces different tokens"
            found.append({"row": [row], "tokens": tokens})
    if not found:
        sys.exit(f"{name}: no recording has clear margins")
    return found


def goldens(name):
    if name in SPEECH:
        return of_speech(name)
    other = transformers.AutoModelForImageTextToText if name.endswith("-vl") else transformers.AutoModelForCausalLM
    model = loaded(transformers.AutoModelForSeq2SeqLM if name in TEXT_TO_TEXT else other, name)
    found = []
    for length in (2, 4):
        best = []
        for seed in range(TRIES):
            rng = random.Random(f"{name}/{length}/{seed}")
            prompt = [rng.randrange(3, 48) for _ in range(length)]
            tokens, margin = greedy(model, prompt, False)
            if margin > CLEAR and len(set(tokens)) > len(set(best)):
                chosen, best = prompt, tokens
        if not best:
            sys.exit(f"{name}: no prompt of {length} tokens has clear margins")
        prompt, tokens = chosen, best
        if name not in WITHOUT_CACHE and greedy(model, prompt, True)[0] != tokens:
            sys.exit(f"{name}: the cache produces different tokens")
        found.append({"prompt": prompt, "tokens": tokens})
    return found


path = GOLDEN / "generation.json"
kept = json.loads(path.read_text()) if ONLY else {}
found = {name: kept[name] if ONLY and not any(text in name for text in ONLY) else goldens(name) for name in MODELS + TEXT_TO_TEXT + SPEECH}
rows = ",\n".join(f'"{name}": {json.dumps(row)}' for name, row in found.items())
path.write_text(f"{{\n{rows}\n}}\n")
print(f"{path.name}: {path.stat().st_size} bytes")
