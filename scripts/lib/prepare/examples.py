"""Train the models for measurements and examples, and print their folders.

    scripts/prepare examples [NAME…]

minilm-trec-6: all-MiniLM-L6-v2 with a layer for the six question classes of TREC-6, trained for three epochs.
Its test set is test.csv of `scripts/fetch trec-6`, columns `text` and `label-coarse`.

fashion-mnist-cnn: convolutions of 3×3, each followed by BatchNorm and ReLU, with a residual block between two
pools, trained for eight epochs on Fashion-MNIST. Its input is a pixel from 0 to 1; graph.json describes it.

fashion-mnist-perceptron: two linear layers with a ReLU between them, trained for ten epochs on the same pixels,
in 153 kB: the folder examples/build_script/model.

cifar-10-depthwise: blocks as in MobileNetV2, a depthwise convolution between two of 1×1, with ReLU6, trained
for two epochs on CIFAR-10. Its input is a pixel from 0 to 255.

Takes about fifteen minutes on two cores, once. Seeds, order and number of threads are fixed, so machines of the
same kind produce the same weights.
"""

import csv
import json
import shutil
import sys

from lib import cached, onnx_bench, venv
from lib.graph import builder
from lib.process import say

venv.enter()

import numpy
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional
from transformers import BertForSequenceClassification
from transformers.utils import logging

MODELS = venv.cache() / "models"
QUESTIONS = ["description", "entity", "abbreviation", "person", "number", "place"]
CLOTHES = ["T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot"]


def epochs(count, samples, size):
    """Step, and indices of the samples, of every batch."""
    order = numpy.random.default_rng(0)
    step = 0
    for _ in range(count):
        shuffled = order.permutation(samples)
        # The remainder at the end is too small for batch statistics.
        for start in range(0, samples - size + 1, size):
            yield step, shuffled[start : start + size]
            step += 1


def train(model, loss, samples, size, count, rate, decay):
    """AdamW with one cycle of the learning rate."""
    steps = count * (samples // size)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.2)
    model.train()
    sum_of_losses = 0.0
    for step, places in epochs(count, samples, size):
        optimizer.zero_grad()
        value = loss(places)
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        sum_of_losses += value.item()
        if (step + 1) % 100 == 0:
            say(f"step {step + 1} of {steps}, loss {sum_of_losses / 100:.4f}")
            sum_of_losses = 0.0
    model.eval()


# Questions


def questions(data, part):
    with open(data / f"{part}.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    return [row["text"] for row in rows], numpy.array([int(row["label-coarse"]) for row in rows])


def minilm_trec_6(folder):
    source, data = cached.fetched("minilm"), cached.fetched("trec-6")
    names = {"id2label": dict(enumerate(QUESTIONS)), "label2id": {name: i for i, name in enumerate(QUESTIONS)}}
    torch.manual_seed(0)
    model = BertForSequenceClassification.from_pretrained(source, num_labels=len(QUESTIONS), **names)

    def logits(texts):
        (feeds,) = onnx_bench.batches(source, texts, len(texts))
        return model(**{name: torch.from_numpy(value) for name, value in feeds.items()}).logits

    texts, labels = questions(data, "train")

    def loss(places):
        return functional.cross_entropy(logits([texts[i] for i in places]), torch.from_numpy(labels[places]))

    say(f"minilm-trec-6: {len(texts)} questions")
    train(model, loss, len(texts), 32, 3, 2e-4, 0.01)
    texts, labels = questions(data, "test")
    with torch.inference_mode():
        found = numpy.array([logits([text]).argmax().item() for text in texts])
    say(f"minilm-trec-6: accuracy {(found == labels).mean():.4f} on {len(texts)} questions")
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
        shutil.copy(source / name, folder)


# Images of clothes


class Clothes(nn.Module):
    WIDTHS = [(1, 32), (32, 64), (64, 64), (64, 64), (64, 128)]

    def __init__(self):
        super().__init__()
        for i, (before, after) in enumerate(self.WIDTHS, 1):
            self.add_module(f"conv{i}", nn.Conv2d(before, after, 3, padding=1, bias=False))
            self.add_module(f"bn{i}", nn.BatchNorm2d(after))
        self.fc = nn.Linear(self.WIDTHS[-1][1], len(CLOTHES))

    def normed(self, i, x):
        return self.get_submodule(f"bn{i}")(self.get_submodule(f"conv{i}")(x))

    def forward(self, x):
        x = self.normed(2, self.normed(1, x).relu()).relu()
        x = functional.max_pool2d(x, 2)
        x = (self.normed(4, self.normed(3, x).relu()) + x).relu()
        x = functional.max_pool2d(x, 2)
        x = self.normed(5, x).relu()
        return self.fc(x.mean((2, 3)))


def graph():
    """The graph of the network."""
    nodes, node = builder()

    def normed(i, x):
        x = node(f"conv{i}", {"Conv": {"padding": 1}}, x, f"conv{i}.weight")
        return node(f"bn{i}", "BatchNorm", x, *(f"bn{i}.{part}" for part in ("weight", "bias", "running_mean", "running_var")))

    def relu(i, x):
        return node(f"relu{i}", "Relu", x)

    x = relu(2, normed(2, relu(1, normed(1, "pixels"))))
    x = node("pool1", "MaxPool", x)
    x = relu(4, node("add", "Add", normed(4, relu(3, normed(3, x))), x))
    x = node("pool2", "MaxPool", x)
    x = node("mean", "GlobalAveragePool", relu(5, normed(5, x)))
    x = node("fc", "Linear", x, "fc.weight", "fc.bias")
    inputs = {"pixels": {"element": "float", "shape": ["batch", 1, 28, 28]}}
    return {"inputs": inputs, "nodes": nodes, "outputs": {"logits": x}}


def clothes(data, part):
    """Pixels from 0 to 1, and labels, without the headers of the IDX files."""
    pixels = numpy.fromfile(data / f"{part}-images-idx3-ubyte", numpy.uint8)[16:].reshape(-1, 1, 28, 28)
    labels = numpy.fromfile(data / f"{part}-labels-idx1-ubyte", numpy.uint8)[8:].astype(numpy.int64)
    assert len(pixels) == len(labels)
    return torch.from_numpy(pixels.astype(numpy.float32) / 255), torch.from_numpy(labels)


def train_on_pictures(name, model, training, test, count, rate):
    """Trains on pixels and labels, and prints the accuracy on the test set."""
    pixels, labels = training

    def loss(places):
        batch = pixels[places].contiguous(memory_format=torch.channels_last)
        return functional.cross_entropy(model(batch), labels[places])

    say(f"{name}: {len(pixels)} images")
    train(model, loss, len(pixels), 128, count, rate, 0.05)
    pixels, labels = test
    with torch.inference_mode():
        found = torch.cat([model(batch).argmax(1) for batch in pixels.split(500)])
    say(f"{name}: accuracy {(found == labels).double().mean():.4f} on {len(pixels)} images")


def saved(model, folder, graph, names):
    """Writes a model; `names` are its class names."""
    # The number of batches is only needed for training.
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if tensor.is_floating_point()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "graph.json").write_text(json.dumps(graph, indent=1) + "\n")
    if names:
        (folder / "config.json").write_text(json.dumps({"id2label": dict(enumerate(names))}, indent=1) + "\n")


def train_on_clothes(name, folder, model, graph, count, rate):
    data = cached.fetched("fashion-mnist")
    train_on_pictures(name, model, clothes(data, "train"), clothes(data, "t10k"), count, rate)
    saved(model, folder, graph, CLOTHES)


def fashion_mnist_cnn(folder):
    torch.manual_seed(0)
    train_on_clothes("fashion-mnist-cnn", folder, Clothes().to(memory_format=torch.channels_last), graph(), 8, 3e-3)


def fashion_mnist_perceptron(folder):
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("flat", nn.Flatten())
    model.add_module("fc1", nn.Linear(784, 48))
    model.add_module("relu", nn.ReLU())
    model.add_module("fc2", nn.Linear(48, len(CLOTHES)))
    nodes = [
        {"name": "hidden", "op": "Linear", "inputs": ["pixels", "fc1.weight", "fc1.bias"]},
        {"name": "relu", "op": "Relu", "inputs": ["hidden"]},
        {"name": "fc2", "op": "Linear", "inputs": ["relu", "fc2.weight", "fc2.bias"]},
    ]
    inputs = {"pixels": {"element": "float", "shape": ["batch", 784]}}
    train_on_clothes("fashion-mnist-perceptron", folder, model, {"inputs": inputs, "nodes": nodes, "outputs": {"logits": "fc2"}}, 10, 3e-3)


# Small images


class Depthwise(nn.Module):
    # Output channels of a block, and its stride.
    BLOCKS = [(24, 1), (24, 1), (40, 2), (40, 1), (80, 2), (80, 1)]
    EXPANSION, STEM, HEAD = 4, 16, 256

    def __init__(self):
        super().__init__()
        self.layer("stem", 3, self.STEM, 3, 2)
        channels = self.STEM
        for i, (out, stride) in enumerate(self.BLOCKS):
            wide = channels * self.EXPANSION
            self.layer(f"block{i}.expand", channels, wide, 1)
            self.layer(f"block{i}.depthwise", wide, wide, 3, stride, wide)
            self.layer(f"block{i}.project", wide, out, 1)
            channels = out
        self.layer("head", channels, self.HEAD, 1)
        self.fc = nn.Linear(self.HEAD, 10)

    def layer(self, name, channels, out, window, stride=1, groups=1):
        convolution = nn.Conv2d(channels, out, window, stride, window // 2, groups=groups, bias=False)
        self.add_module(name.replace(".", "_"), nn.ModuleDict({"conv": convolution, "bn": nn.BatchNorm2d(out)}))

    def run(self, name, x):
        part = self.get_submodule(name.replace(".", "_"))
        return part["bn"](part["conv"](x))

    def forward(self, x):
        # Weights of the stem are written with this name.
        x = functional.relu6(self.run("stem", x / 128))
        for i in range(len(self.BLOCKS)):
            start = x
            x = functional.relu6(self.run(f"block{i}.expand", x))
            x = functional.relu6(self.run(f"block{i}.depthwise", x))
            x = self.run(f"block{i}.project", x)
            x = x + start if x.shape == start.shape else x
        return self.fc(functional.relu6(self.run("head", x)).mean((2, 3)))

    def graph(self):
        """The graph of the network."""
        nodes, node = builder()

        def layer(name, x, active=True):
            name = name.replace(".", "_")
            part = self.get_submodule(name)["conv"]
            attributes = {"stride": part.stride[0], "padding": part.padding[0], "groups": part.groups}
            x = node(f"{name}.conv", {"Conv": attributes}, x, f"{name}.conv.weight")
            x = node(f"{name}.bn", "BatchNorm", x, *(f"{name}.bn.{part}" for part in ("weight", "bias", "running_mean", "running_var")))
            return node(f"{name}.act", {"Clip": {"min": 0, "max": 6}}, x) if active else x

        x, channels = layer("stem", "pixels"), self.STEM
        for i, (out, stride) in enumerate(self.BLOCKS):
            start = x
            x = layer(f"block{i}.project", layer(f"block{i}.depthwise", layer(f"block{i}.expand", x)), active=False)
            x = node(f"block{i}.add", "Add", x, start) if stride == 1 and out == channels else x
            channels = out
        x = node("mean", "GlobalAveragePool", layer("head", x))
        x = node("fc", "Linear", x, "fc.weight", "fc.bias")
        inputs = {"pixels": {"element": "float", "shape": ["batch", 3, 32, 32]}}
        return {"inputs": inputs, "nodes": nodes, "outputs": {"logits": x}}


def cifar_10_depthwise(folder):
    _, data = cached.script("prepare", "cifar-10")
    parts = {part: load_file(data / f"{part}.safetensors") for part in ("train", "test")}
    torch.manual_seed(0)
    model = Depthwise().to(memory_format=torch.channels_last)
    train_on_pictures("cifar-10-depthwise", model, *((part["images"].float(), part["labels"]) for part in parts.values()), 2, 5e-3)
    with torch.no_grad():
        model.stem["conv"].weight /= 128
    saved(model, folder, model.graph(), [])


torch.set_num_threads(2)
torch.use_deterministic_algorithms(True)
torch.utils.deterministic.fill_uninitialized_memory = False
logging.set_verbosity_error()
logging.disable_progress_bar()
for make in (minilm_trec_6, fashion_mnist_cnn, fashion_mnist_perceptron, cifar_10_depthwise):
    name = make.__name__.replace("_", "-")
    if not sys.argv[1:] or name in sys.argv[1:]:
        print(cached.made(MODELS / name, make), flush=True)
