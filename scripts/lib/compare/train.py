"""Measure seconds per distillation step in PyTorch, on the CPU.

    scripts/compare train [--only minilm|resnet|llama] [--steps N] [--folders FOLDER]

minilm: all-MiniLM-L6-v2, six layers, is distilled to its layers 0, 2 and 4; 32 sequences of 64 random tokens.
The loss is KL divergence of the distributions over six classes of a fixed random head on the first token, plus
the mean squared error of the hidden states after the student's layers and the teacher's layers 1, 3 and 5.
AdamW.

resnet: a residual network of 20 layers for images [1, 28, 28] (16, 32 and 64 channels, nine blocks with random
weights) is distilled to one of half the width; 128 images. The loss is KL divergence at temperature 4 plus
cross-entropy to random labels. SGD with momentum.

llama: a Llama of 160 M random weights (12 layers, width 768, vocabulary 32,000) is distilled to one that is
initialized with every other layer of it; 4 windows of 256 random tokens. The loss is KL divergence at
temperature 2 over the whole vocabulary at all tokens. AdamW.

The teacher runs in evaluation mode, the student in training mode without dropout; two threads. Printed is the
median after three warm-up steps. With --folders, initial teachers and students are written there for compress,
with the batch as batch.safetensors, so that both tools start from the same weights and data.
"""

import argparse
import json
import shutil
import statistics
import time
from pathlib import Path

from lib import cached, venv
from lib.graph import builder

venv.enter()

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional
from transformers import BertForSequenceClassification, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

WARM_UP, THREADS = 3, 2
CLASSES = 6
# Layers of the teacher that initialize the student, and those that its hidden states are compared with.
TAKEN, HELD_TO = [0, 2, 4], [1, 3, 5]
TEMPERATURE = 4


def save(folder, name, tensors):
    save_file({key: tensor.detach().contiguous() for key, tensor in tensors.items()}, folder / name, {"format": "pt"})


# MiniLM


def minilm_models(source):
    """Teacher and student with the same head."""
    teacher = BertForSequenceClassification.from_pretrained(source, num_labels=CLASSES, attn_implementation="sdpa")
    config = type(teacher.config).from_dict({**teacher.config.to_dict(), "num_hidden_layers": len(TAKEN)})
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    student = BertForSequenceClassification(config)
    tensors = {}
    for name, tensor in teacher.state_dict().items():
        parts = name.split(".")
        if "layer" in parts:
            place = parts.index("layer") + 1
            if int(parts[place]) not in TAKEN:
                continue
            parts[place] = str(TAKEN.index(int(parts[place])))
        tensors[".".join(parts)] = tensor.clone()
    student.load_state_dict(tensors)
    return teacher, student


def minilm(folder):
    source = cached.fetched("minilm")
    teacher, student = minilm_models(source)
    ids = torch.randint(1000, 30000, (32, 64))
    ids[:, 0], ids[:, -1] = 101, 102
    feeds = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if folder:
        for name, model in (("teacher", teacher), ("student", student)):
            model.save_pretrained(folder / f"minilm-{name}")
            for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
                shutil.copy(source / file, folder / f"minilm-{name}")
        save(folder, "minilm-batch.safetensors", feeds)

    def loss():
        with torch.no_grad():
            theirs = teacher(**feeds, output_hidden_states=True)
        ours = student(**feeds, output_hidden_states=True)
        value = functional.kl_div(ours.logits.log_softmax(-1), theirs.logits.log_softmax(-1), reduction="batchmean", log_target=True)
        # The first hidden state is the embedding output.
        for own, other in enumerate(HELD_TO):
            value = value + functional.mse_loss(ours.hidden_states[own + 1], theirs.hidden_states[other + 1])
        return value

    return teacher, student, loss, torch.optim.AdamW(student.parameters(), lr=5e-5)


# ResNet


class Block(nn.Module):
    def __init__(self, before, after, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        if before != after:
            self.conv3 = nn.Conv2d(before, after, 1, stride, bias=False)
            self.bn3 = nn.BatchNorm2d(after)

    def forward(self, x):
        y = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        return (y + (self.bn3(self.conv3(x)) if hasattr(self, "conv3") else x)).relu()


class ResNet20(nn.Module):
    CLASSES = 10

    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(width)
        widths = [width] * 4 + [2 * width] * 3 + [4 * width] * 3
        pairs = zip(widths, widths[1:])
        self.blocks = nn.Sequential(*(Block(before, after, 1 if before == after else 2) for before, after in pairs))
        self.fc = nn.Linear(widths[-1], self.CLASSES)

    def forward(self, x):
        return self.fc(self.blocks(self.bn(self.conv(x)).relu()).mean((2, 3)))

    def graph(self):
        """The graph of the network."""
        nodes, node = builder()

        def normed(prefix, number, x, stride=1, padding=1):
            conv, bn = f"{prefix}conv{number}", f"{prefix}bn{number}"
            x = node(conv, {"Conv": {"stride": stride, "padding": padding}}, x, f"{conv}.weight")
            return node(bn, "BatchNorm", x, *(f"{bn}.{part}" for part in ("weight", "bias", "running_mean", "running_var")))

        x = node("relu", "Relu", normed("", "", "pixels"))
        for i, block in enumerate(self.blocks):
            prefix, stride = f"blocks.{i}.", block.conv1.stride[0]
            y = node(f"{prefix}relu1", "Relu", normed(prefix, 1, x, stride))
            y = normed(prefix, 2, y)
            x = normed(prefix, 3, x, stride, 0) if hasattr(block, "conv3") else x
            x = node(f"{prefix}relu2", "Relu", node(f"{prefix}add", "Add", y, x))
        x = node("fc", "Linear", node("mean", "GlobalAveragePool", x), "fc.weight", "fc.bias")
        inputs = {"pixels": {"element": "float", "shape": ["batch", 1, 28, 28]}}
        return {"inputs": inputs, "nodes": nodes, "outputs": {"logits": x}}

    def write(self, folder):
        folder.mkdir(parents=True, exist_ok=True)
        save(folder, "model.safetensors", {name: tensor for name, tensor in self.state_dict().items() if tensor.is_floating_point()})
        (folder / "graph.json").write_text(json.dumps(self.graph(), indent=1) + "\n")
        (folder / "config.json").write_text("{}\n")


def resnet(folder):
    teacher, student = ResNet20(16), ResNet20(8)
    pixels, labels = torch.rand(128, 1, 28, 28), torch.randint(ResNet20.CLASSES, (128,))
    if folder:
        teacher.write(folder / "resnet-teacher")
        student.write(folder / "resnet-student")
        save(folder, "resnet-batch.safetensors", {"pixels": pixels, "labels": labels})
    for model in (teacher, student):
        model.to(memory_format=torch.channels_last)
    batch = pixels.contiguous(memory_format=torch.channels_last)

    def loss():
        with torch.no_grad():
            theirs = (teacher(batch) / TEMPERATURE).log_softmax(-1)
        ours = student(batch)
        soft = functional.kl_div((ours / TEMPERATURE).log_softmax(-1), theirs, reduction="batchmean", log_target=True)
        return soft * TEMPERATURE**2 + functional.cross_entropy(ours, labels)

    return teacher, student, loss, torch.optim.SGD(student.parameters(), lr=0.05, momentum=0.9)


# Llama


def llama(folder):
    temperature, words = 2, 32_000
    config = LlamaConfig(vocab_size=words, hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12, use_cache=False)
    teacher = LlamaForCausalLM(config)
    student = LlamaForCausalLM(LlamaConfig.from_dict({**config.to_dict(), "num_hidden_layers": 6}))
    kept = {f"model.layers.{layer}.": f"model.layers.{2 * layer}." for layer in range(6)}
    theirs = teacher.state_dict()
    student.load_state_dict({name: theirs[next((name.replace(own, other) for own, other in kept.items() if name.startswith(own)), name)] for name in student.state_dict()})
    ids = torch.randint(0, words, (4, 256))
    if folder:
        for name, model in (("teacher", teacher), ("student", student)):
            model.save_pretrained(folder / f"llama-{name}")
        save(folder, "llama-batch.safetensors", {"input_ids": ids, "attention_mask": torch.ones_like(ids)})

    def loss():
        with torch.no_grad():
            theirs = (teacher(input_ids=ids).logits / temperature).log_softmax(-1)
        ours = (student(input_ids=ids).logits / temperature).log_softmax(-1)
        return functional.kl_div(ours, theirs, reduction="sum", log_target=True) * temperature**2 / ids.numel()

    return teacher, student, loss, torch.optim.AdamW(student.parameters(), lr=5e-5)


def measure(made, steps):
    teacher, student, loss, optimizer = made
    teacher.eval()
    student.train()
    seconds, losses = [], []
    for _ in range(WARM_UP + steps):
        start = time.perf_counter()
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
        losses.append(value.item())
    return {"seconds": round(statistics.median(seconds[WARM_UP:]), 4), "first_loss": losses[0], "last_loss": losses[-1]}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=["minilm", "resnet", "llama"])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--folders", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(THREADS)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if arguments.folders:
        arguments.folders.mkdir(parents=True, exist_ok=True)
    for make in (minilm, resnet, llama):
        if arguments.only in (None, make.__name__):
            torch.manual_seed(0)
            print(json.dumps({"model": make.__name__, "by": f"torch {torch.__version__}", **measure(make(arguments.folders), arguments.steps)}), flush=True)


main()
