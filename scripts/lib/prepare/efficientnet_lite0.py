"""Convert EfficientNet-Lite0, a variant with uneven channels, and images to plain files, and print the folders.

    scripts/prepare efficientnet-lite0

The network: model.safetensors and graph.json. Its images have 225 × 225 pixels, for which TensorFlow's SAME
padding is symmetric at every stride of two; its input is (pixel - 127) / 128.

Uneven channels: inputs and outputs of depthwise convolutions are scaled down, channel by channel, by a random
factor (exp of minus the magnitude of a seeded normal number), which the next weights compensate. In floats this
only moves the clipping threshold of ReLU6. Networks that were not designed for int8 have such channels.

The images: safetensors with `pixels` f16 [count, 3, 225, 225].
photographs: 20 ImageNet images, with `labels`. cifar-10: the first 200 test images, enlarged.
scenes: 200 seeded square crops of scikit-image's images: textures, microscopy, stars, text, people.
"""

import json
import shutil

from lib import cached, venv
from lib.graph import builder

venv.enter()

import numpy
import torch
from PIL import Image
from lib.arrays import save_file
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_tensors, save_file as save_tensors

SIZE = 225
# Blocks per stage, kernel size, stride, and expansion.
STAGES = [(1, 3, 1, 1), (2, 3, 2, 6), (2, 5, 2, 6), (3, 3, 2, 6), (3, 5, 1, 6), (4, 5, 2, 6), (1, 3, 1, 6)]


def graph(weights):
    """The graph of the network."""
    nodes, node = builder()

    def layer(convolution, norm, x, stride=1, active=True):
        out, _, window, _ = weights[f"{convolution}.weight"].shape
        groups = out if "depthwise" in convolution else 1
        x = node(f"{convolution}", {"Conv": {"stride": stride, "padding": window // 2, "groups": groups}}, x, f"{convolution}.weight")
        parts = [f"{norm}.{part}" for part in ("weight", "bias", "running_mean", "running_var")]
        x = node(norm, {"BatchNorm": {"epsilon": 1e-3}}, x, *parts)
        return node(f"{convolution}.act", {"Clip": {"min": 0, "max": 6}}, x) if active else x

    x = layer("_conv_stem", "_bn0", "pixels", 2)
    block = 0
    for count, _, stride, expansion in STAGES:
        for i in range(count):
            name, start = f"_blocks.{block}", x
            if expansion > 1:
                x = layer(f"{name}._expand_conv", f"{name}._bn0", x)
            x = layer(f"{name}._depthwise_conv", f"{name}._bn1", x, stride if i == 0 else 1)
            x = layer(f"{name}._project_conv", f"{name}._bn2", x, active=False)
            if i > 0:
                x = node(f"{name}.add", "Add", x, start)
            block += 1
    x = layer("_conv_head", "_bn1", x)
    x = node("mean", "GlobalAveragePool", x)
    x = node("_fc", "Linear", x, "_fc.weight", "_fc.bias")
    inputs = {"pixels": {"element": "float", "shape": ["batch", 3, SIZE, SIZE]}}
    return {"inputs": inputs, "nodes": nodes, "outputs": {"logits": x}}


def network(source, folder):
    weights = torch.load(source / "efficientnet-lite0-57934424.pth", map_location="cpu", weights_only=True)
    weights = {name: tensor.contiguous() for name, tensor in weights.items() if tensor.is_floating_point()}
    save_tensors(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "graph.json").write_text(json.dumps(graph(weights), indent=1) + "\n")


def uneven(source, folder):
    even = cached.fetched("efficientnet-lite0")
    even = even.with_name(f"{even.name}-converted")
    weights = load_tensors(even / "model.safetensors")
    random = torch.Generator().manual_seed(0)
    for block in range(sum(count for count, *_ in STAGES)):
        name = f"_blocks.{block}"
        # The first block has no expansion convolution before the depthwise one.
        for norm, reader, axis in ((f"{name}._bn0" if block else "_bn0", f"{name}._depthwise_conv", 0), (f"{name}._bn1", f"{name}._project_conv", 1)):
            factors = torch.randn(weights[f"{norm}.weight"].shape, generator=random).abs().exp()
            weights[f"{norm}.weight"] /= factors
            weights[f"{norm}.bias"] /= factors
            weights[f"{reader}.weight"] *= factors.reshape([-1 if at == axis else 1 for at in range(4)])
    save_tensors(weights, folder / "model.safetensors", {"format": "pt"})
    shutil.copy(even / "graph.json", folder)


def save(path, images, **more):
    pixels = numpy.stack([numpy.asarray(image.resize((SIZE, SIZE), Image.Resampling.BICUBIC)) for image in images])
    pixels = (pixels.transpose(0, 3, 1, 2).astype(numpy.float32) - 127) / 128
    save_file({"pixels": pixels.astype(numpy.float16), **more}, path)


def square(image, size=None, left=None, top=None):
    """A square crop of an image; by default the largest center crop."""
    size = size or min(image.size)
    left, top = ((all - size) // 2 if at is None else at for at, all in zip((left, top), image.size))
    return image.crop((left, top, left + size, top + size))


def pictures(source, folder):
    names = sorted(source.iterdir())
    images = [square(Image.open(path).convert("RGB")) for path in names]
    save(folder / "photographs.safetensors", images, labels=numpy.array([int(path.stem.split("_")[2]) for path in names]))
    _, small = cached.script("prepare", "cifar-10")
    small = load_file(small / "test.safetensors")["images"][:200].transpose(0, 2, 3, 1)
    save(folder / "cifar-10.safetensors", [Image.fromarray(image) for image in small])
    scenes = [Image.open(path).convert("RGB") for path in sorted(cached.fetched("scenes").iterdir())]
    scenes = [image for image in scenes if min(image.size) >= 128]
    random = numpy.random.default_rng(0)
    squares = []
    for i in range(200):
        image = scenes[i % len(scenes)]
        size = int(random.integers(min(image.size) // 3, min(image.size), endpoint=True))
        squares.append(square(image, size, *(int(random.integers(0, all - size, endpoint=True)) for all in image.size)))
    save(folder / "scenes.safetensors", squares)


print(cached.prepared("efficientnet-lite0", network))
print(cached.prepared("efficientnet-lite0", uneven, "uneven"))
print(cached.prepared("photographs", pictures))
