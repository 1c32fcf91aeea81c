"""A model in PyTorch, run once per line of standard input; scripts/bench interleaves it with compress.

    eager.py make KIND FOLDER                  write a model folder with random weights: llama or resnet18
    eager.py inputs SHAPE FILE                 write inputs of this shape, as tensors by name
    eager.py run FOLDER INPUTS OUTPUTS THREADS respond to every line with milliseconds
"""

import json
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def llama(folder):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072, vocab_size=32000)
    LlamaForCausalLM(config).save_pretrained(folder)


def resnet18(folder):
    from torchvision.models import resnet18

    state = {name: tensor.contiguous() for name, tensor in resnet18().state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model_type": "torchvision", "variant": "resnet18"}))


def make(kind, folder):
    Path(folder).mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    {"llama": llama, "resnet18": resnet18}[kind](Path(folder))


def inputs(shape, file):
    shape = [int(size) for size in shape.split("x")]
    generator = torch.Generator().manual_seed(0)
    if len(shape) == 4:
        tensors = {"pixel_values": torch.randn(shape, generator=generator)}
    else:
        tensors = {"input_ids": torch.randint(1000, 20000, shape, generator=generator), "attention_mask": torch.ones(shape, dtype=torch.int64)}
    save_file(tensors, file)


def opened(folder):
    config = json.loads((Path(folder) / "config.json").read_text())
    if config["model_type"] == "torchvision":
        import torchvision

        model = torchvision.models.get_model(config["variant"])
        model.load_state_dict(load_file(Path(folder) / "model.safetensors"))
        return lambda tensors: {"logits": model(tensors["pixel_values"])}, model
    from transformers import AutoModel, AutoModelForCausalLM

    kind = AutoModelForCausalLM if config["model_type"] == "llama" else AutoModel
    model = kind.from_pretrained(folder, dtype=torch.float32)
    options = {"use_cache": False} if config["model_type"] == "llama" else {}
    return lambda tensors: model(**tensors, **options), model


def run(folder, given, outputs, threads):
    torch.set_num_threads(int(threads))
    call, model = opened(folder)
    model.eval()
    tensors = load_file(given)
    with torch.inference_mode():
        result = call(tensors)
        save_file({name: result[name].float().contiguous() for name in ["logits", "last_hidden_state"] if name in result}, outputs)
        for _ in sys.stdin:
            start = time.perf_counter()
            call(tensors)
            print(f"{1e3 * (time.perf_counter() - start):.3f}", flush=True)


if __name__ == "__main__":
    {"make": make, "inputs": inputs, "run": run}[sys.argv[1]](*sys.argv[2:])
