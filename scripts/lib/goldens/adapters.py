"""Write tests/golden/training/adapters*: training of low-rank adapters by PEFT and PyTorch in f32.

    scripts/goldens adapters

Models are those of tests/golden/models. adapters.safetensors has the samples as arrays, and
adapters-initial.safetensors for each case the initial values of the factors A, which are those of `compress` with the
seed SEED (fastrand's WyRand); the factors B are zero. Each case is STEPS steps of AdamW with all samples in each step,
without dropout, warm-up or clipping.

adapters.json has for each case "losses" by step, and checksums (lib/checksums.py) after the last step: "factors" by
their name in adapter_model.safetensors, with the norms of DoRA, where factors B are multiplied by the scale of the
adapter, as `compress` writes them, and "merged", the weights with their adapters, by their name in model.safetensors.
"""

import json
import math
import random

import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from lib import GOLDEN
from lib.checksums import checksums

FOLDER = GOLDEN / "training"
STEPS = 4
RATE = 1e-2
DECAY = 0.1
SEED = 3
RANK = 4
ALPHA = 6
# Fused projections, and weights stored as [in, out].
CASES = {
    "llama": ("llama", {}),
    "llama-rslora": ("llama", {"use_rslora": True}),
    "phi3": ("phi3", {}),
    "gpt2": ("gpt2", {}),
    "llama-dora": ("llama", {"use_dora": True}),
    "gpt2-dora": ("gpt2", {"use_dora": True}),
}
U64 = (1 << 64) - 1

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def uniform(count, bound, state):
    """Numbers between -bound and bound, from fastrand's generator."""
    numbers = []
    for _ in range(count):
        state = (state + 0x2D358DCCAA6C78A5) & U64
        product = state * (state ^ 0x8BB84B93962EACC9)
        number = (product ^ (product >> 64)) & U64
        numbers.append(bound * (2.0 * ((number >> 1) / 2**63) - 1.0))
    return torch.tensor(numbers, dtype=torch.float64).float()


def samples():
    rng = random.Random("training/adapters")
    lengths = (3, 8, 5, 7)
    mask = torch.tensor([[1] * n + [0] * (max(lengths) - n) for n in lengths])
    ids = torch.tensor([[rng.randrange(3, 40) if seen else 0 for seen in row] for row in mask.tolist()])
    labels = ids.masked_fill(mask == 0, -100)
    # Tokens of a prompt.
    labels[1, :4] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def train(case, name, options, inputs, initial):
    kind = getattr(transformers, json.loads((GOLDEN / "models" / name / "config.json").read_text())["architectures"][0])
    base = kind.from_pretrained(GOLDEN / "models" / name, attn_implementation="eager", dtype=torch.float32).eval()
    is_layer = lambda module: isinstance(module, (torch.nn.Linear, transformers.pytorch_utils.Conv1D))
    layers = sorted(name for name, module in base.named_modules() if is_layer(module) and any(part.isdigit() for part in name.split(".")))
    layers.sort(key=lambda name: f"{name}.weight")
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, target_modules=layers, fan_in_fan_out=name == "gpt2", **options)
    model = get_peft_model(base, config).eval()
    scale = ALPHA / (math.sqrt(RANK) if options.get("use_rslora") else RANK)
    factors, vectors = {}, {}
    for number, layer in enumerate(layers):
        a, b = (base.get_submodule(layer).get_submodule(f"{factor}.default").weight for factor in ("lora_A", "lora_B"))
        state = (SEED * 0x9E3779B97F4A7C15 + number) & U64
        with torch.no_grad():
            a.copy_(uniform(a.numel(), 1.0 / math.sqrt(a.shape[1]), state).reshape(a.shape))
        assert not b.any()
        key = f"base_model.model.{layer}"
        if not options:
            initial[f"{case}/{key}.lora_A.weight"] = a.detach().clone()
        factors |= {f"{key}.lora_A.weight": (a, 1.0), f"{key}.lora_B.weight": (b, scale)}
        if "use_dora" in options:
            vectors[f"{key}.lora_magnitude_vector"] = (base.get_submodule(layer).lora_magnitude_vector["default"].weight, 1.0)
    matrices, norms = ([factor for factor, _ in tensors.values()] for tensors in (factors, vectors))
    assert {id(parameter) for parameter in model.parameters() if parameter.requires_grad} == {id(x) for x in matrices + norms}
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=RATE)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(**inputs, use_cache=False).loss
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    print(case, losses)
    found = {name: checksums(scale * factor) for name, (factor, scale) in sorted((factors | vectors).items())}
    merged = model.merge_and_unload().state_dict()
    stored = load_file(GOLDEN / "models" / name / "model.safetensors")
    assert all(f"{layer}.weight" in stored for layer in layers)
    return {"losses": losses, "factors": found, "merged": {f"{layer}.weight": checksums(merged[f"{layer}.weight"]) for layer in layers}}


inputs, initial = samples(), {}
found = {case: train(case, name, options, inputs, initial) for case, (name, options) in CASES.items()}
lines = ",\n".join(f'"{name}": {json.dumps(case)}' for name, case in found.items())
(FOLDER / "adapters.json").write_text(f"{{\n{lines}\n}}\n")
save_file(inputs, FOLDER / "adapters.safetensors")
save_file(initial, FOLDER / "adapters-initial.safetensors")
