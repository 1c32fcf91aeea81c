"""Check that the package `speculators` loads the EAGLE-3 heads of `compress draft`, and proposes the same tokens.

    scripts/check drafts [--compress BINARY]

A head of a small Llama is trained for a few steps. The package must find all its tensors, and read no others. It
proposes a token after each token of texts that the model generates, from hidden states that transformers computes. The
accepted ones must be those that `compress generate --draft` counts. (Logits of the package are compared with those of
`compress` in tests/it/draft_heads.rs.)
"""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

from lib import COMPRESS, GOLDEN, venv

venv.enter(venv.speculators)

import torch
import transformers
from safetensors.torch import load_file
from speculators import SpeculatorModelConfig
from speculators.models.eagle3 import Eagle3DraftModel

PROMPTS = ["the cat", "a red hat", "rain, rain", "our old barn", "my big wet hat", "small drops", "no mat", "we sat"]
DRAFT_TOKENS = 3


def prepared(folder):
    model = folder / "in"
    model.mkdir()
    for file in ("config.json", "model.safetensors"):
        (model / file).write_bytes((GOLDEN / "models" / "llama" / file).read_bytes())
    (model / "tokenizer.json").write_bytes((GOLDEN / "evaluation" / "characters.json").read_bytes())
    (folder / "prompts.txt").write_text("\n".join(PROMPTS))


def loaded(path):
    """The head of a folder, as the package loads it, with a check of its tensors."""
    config = SpeculatorModelConfig.from_pretrained(path)
    assert config.speculators_config.verifier.architectures == ["LlamaForCausalLM"]
    config.transformer_layer_config._attn_implementation = "eager"
    head, stored = Eagle3DraftModel(config), load_file(path / "model.safetensors")
    maps = {name: stored.pop(name) for name in ("t2d", "d2t")}
    found = head.load_state_dict(stored, strict=False)
    assert not found.unexpected_keys and all(name.startswith("verifier") or name in maps for name in found.missing_keys), found
    head.load_vocab_mappings(maps["t2d"], maps["d2t"])
    return head.eval(), config


def steps(head, config, target, ids):
    """The tokens that the package proposes after each token of a text but the first."""
    last = {}
    hook = target.model.norm.register_forward_pre_hook(lambda _, inputs: last.update(state=inputs[0]))
    with torch.no_grad():
        states = list(target(ids, output_hidden_states=True).hidden_states)
    hook.remove()
    states[-1] = last["state"]
    hidden = torch.cat([states[layer] for layer in config.eagle_aux_hidden_state_layer_ids], dim=-1)
    proposals = []
    for end in range(2, ids.shape[1] + 1):
        text, logits = ids[:, :end], []
        handle = head.lm_head.register_forward_hook(lambda _, __, output: logits.append(output))
        with torch.no_grad():
            head(hidden[:, : end - 1], text[:, 1:], torch.zeros((1, end - 1), dtype=torch.long), position_ids=torch.arange(1, end)[None], ttt_steps=1)
        handle.remove()
        token = logits[0][0, -1].argmax().item()
        proposals.append(token + head.d2t[token].item())
    return proposals


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--compress", default=COMPRESS, type=Path)
    compress = parser.parse_args().compress
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        prepared(folder)
        run = lambda *arguments: subprocess.run([compress, *arguments], cwd=folder, check=True, stdout=subprocess.PIPE, text=True).stdout
        options = ["--samples", "24", "--tokens", "8", "--steps", "30", "--learning-rate", "1e-2", "--no-measure", "--quiet"]
        run("draft", "in", "-o", "head", "--method", "eagle3", "--vocabulary", "24", "--prompts", "prompts.txt", *options)
        head, config = loaded(folder / "head")
        target = transformers.AutoModelForCausalLM.from_pretrained(folder / "in", attn_implementation="eager", dtype=torch.float32).eval()
        accepted = total = 0
        for prompt in PROMPTS:
            arguments = ["generate", "in", "--draft", "head", "--draft-tokens", "1", "--tokens", "12", "--json", "--prompt", prompt]
            report = json.loads(run(*arguments))
            found = report["prompts"][0]
            ids = torch.tensor([found["prompt_tokens"] + found["continuation"]["tokens"]])
            proposals = steps(head, config, target, ids)
            # The steps of a generation with one proposal each: accepted proposals are followed by another token.
            at, count, hits = len(found["prompt_tokens"]), report["draft"]["proposed"], 0
            for _ in range(count):
                hit = proposals[at - 1] == ids[0, at + 1].item()
                hits, at = hits + hit, at + 1 + hit
            assert hits == report["draft"]["accepted"], (prompt, hits, report["draft"])
            accepted, total = accepted + hits, total + count
        assert 0 < accepted < total
        print(f"{accepted} of {total} proposals are accepted, with the package and with compress")


main()
