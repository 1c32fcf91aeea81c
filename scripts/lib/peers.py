"""The jobs of scripts/bench in other tools, each in a separate process.

    peers.py JOB MODEL OUT

Linear weights are all matrices except embeddings and the output head, as in compress.
"""

import sys
from pathlib import Path


def shards(model):
    return sorted(Path(model).glob("*.safetensors"))


def is_linear(name, tensor):
    return tensor.ndim == 2 and "embed" not in name and not name.startswith("lm_head")


def layers(tensors):
    """A module per linear weight, as required by torch.nn.utils.prune."""
    import torch

    for name, tensor in tensors.items():
        if is_linear(name, tensor):
            module = torch.nn.Module()
            module.weight = torch.nn.Parameter(tensor, requires_grad=False)
            yield name, module


def prune_tensor(model, out):
    from safetensors.torch import load_file, save_file
    from torch.nn.utils import prune

    for shard in shards(model):
        tensors = load_file(shard)
        for name, module in layers(tensors):
            prune.l1_unstructured(module, "weight", amount=0.5)
            prune.remove(module, "weight")
            tensors[name] = module.weight.data
        save_file(tensors, out / shard.name, metadata={"format": "pt"})


def prune_global(model, out):
    from safetensors.torch import load_file, save_file
    from torch.nn.utils import prune

    files = {shard.name: load_file(shard) for shard in shards(model)}
    modules = [(tensors, name, module) for tensors in files.values() for name, module in layers(tensors)]
    parameters = [(module, "weight") for _, _, module in modules]
    prune.global_unstructured(parameters, pruning_method=prune.L1Unstructured, amount=0.5)
    for tensors, name, module in modules:
        prune.remove(module, "weight")
        tensors[name] = module.weight.data
    for name, tensors in files.items():
        save_file(tensors, out / name, metadata={"format": "pt"})


def int8_loop(model, out):
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    for shard in shards(model):
        tensors = {}
        with safe_open(shard, "pt") as file:
            for name in file.keys():
                tensor = file.get_tensor(name)
                if is_linear(name, tensor):
                    values = tensor.float()
                    scale = (values.abs().amax(dim=1, keepdim=True) / 127.5).clamp(min=1e-12)
                    tensors[f"{name}_scale"] = scale.to(tensor.dtype)
                    tensor = torch.round(values / scale).clamp(-128, 127).to(torch.int8)
                tensors[name] = tensor
        save_file(tensors, out / shard.name, metadata={"format": "pt"})


def llm_compressor(model, out):
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    oneshot(model=loaded, recipe=QuantizationModifier(targets="Linear", scheme="INT8", ignore=["lm_head"]))
    loaded.save_pretrained(out, save_compressed=True)


JOBS = {
    "prune-tensor": prune_tensor,
    "prune-global": prune_global,
    "int8-loop": int8_loop,
    "llm-compressor": llm_compressor,
}

if __name__ == "__main__":
    job, model, out = sys.argv[1:]
    Path(out).mkdir(parents=True)
    JOBS[job](model, Path(out))
