"""Convert the CIFAR-10 network and its images to plain files, and print the two folders.

    scripts/prepare cifar-10

The network: model.safetensors. Six times convN (valid, 3×3, stride 1), ReLU, bnN; after bn2 and bn4 a 2×2 max
pool with stride 2. The result is 1×1×64, followed by fc1, fc2, fc3, each with a ReLU, including the last. The
input is the raw pixel, 0 to 255; batch norms have epsilon 0.001.

The images: train.safetensors and test.safetensors with `images` u8 [count, 3, 32, 32] and `labels` i64 [count].
"""

import json

from lib import cached, venv
from lib.graph import builder

venv.enter()

import h5py
import numpy
from PIL import Image
from lib.arrays import save_file


def network(source, folder):
    tensors = {}

    def take(name, layer, **parts):
        for part, (key, order) in parts.items():
            value = numpy.asarray(file[f"model_weights/{layer}/{layer}/{key}:0"])
            tensors[f"{name}.{part}"] = value.transpose(order) if order else value

    with h5py.File(source / "cnn_model.h5") as file:
        for i in range(6):
            suffix = f"_{i}" if i else ""
            # [height, width, in, out] to [out, in, height, width]
            take(f"conv{i + 1}", f"conv2d{suffix}", weight=("kernel", (3, 2, 0, 1)), bias=("bias", None))
            take(
                f"bn{i + 1}",
                f"batch_normalization{suffix}",
                weight=("gamma", None),
                bias=("beta", None),
                running_mean=("moving_mean", None),
                running_var=("moving_variance", None),
            )
        for i in range(3):
            suffix = f"_{i}" if i else ""
            take(f"fc{i + 1}", f"dense{suffix}", weight=("kernel", (1, 0)), bias=("bias", None))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "graph.json").write_text(json.dumps(graph(), indent=1) + "\n")


def graph():
    """The graph of the network: each convolution is followed by ReLU, then by BatchNorm."""
    nodes, node = builder()

    x = "pixels"
    for i in range(1, 7):
        x = node(f"conv{i}", "Conv", x, f"conv{i}.weight", f"conv{i}.bias")
        x = node(f"relu{i}", "Relu", x)
        parts = [f"bn{i}.{part}" for part in ("weight", "bias", "running_mean", "running_var")]
        x = node(f"bn{i}", {"BatchNorm": {"epsilon": 1e-3}}, x, *parts)
        if i in (2, 4):
            x = node(f"pool{i // 2}", "MaxPool", x)
    x = node("flatten", "Flatten", x)
    for i in range(1, 4):
        x = node(f"fc{i}", "Linear", x, f"fc{i}.weight", f"fc{i}.bias")
        x = node(f"fc{i}.relu", "Relu", x)
    inputs = {"pixels": {"element": "float", "shape": ["batch", 3, 32, 32]}}
    return {"inputs": inputs, "nodes": nodes, "outputs": {"logits": x}}


def images(source, folder):
    parts = {"train": [f"data_batch_{i}.png" for i in range(1, 6)], "test": ["test_batch.png"]}
    for part, files in parts.items():
        # Each row of the PNG is one image, with its pixels in row-major order.
        rows = numpy.concatenate([numpy.asarray(Image.open(source / file)) for file in files])
        pixels = rows.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2)
        labels = numpy.array(json.loads((source / f"{part}_lables.json").read_text()), dtype=numpy.int64)
        assert len(pixels) == len(labels)
        save_file({"images": pixels, "labels": labels}, folder / f"{part}.safetensors")


print(cached.prepared("cifar-10-model", network))
print(cached.prepared("cifar-10", images))
