"""Prepare pictures as torchvision's MobileNetV2 takes them, and print the folder.

    scripts/prepare mobilenet-v2

safetensors with `pixel_values` f32 [count, 3, 224, 224]: the shorter side resized to 256 pixels, center crop of 224,
mean and standard deviation of ImageNet.
photographs: 20 pictures of ImageNet. calibration: these, and 44 random crops of them (a tenth to all of the area,
seed 0). cifar-10: the first 200 test images, enlarged.
"""

from lib import cached, venv

venv.enter()

import numpy
from PIL import Image
from lib.arrays import save_file
from safetensors.numpy import load_file

RESIZED, CROP = 256, 224
CROPS = 44
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def prepared(image):
    scale = RESIZED / min(image.size)
    image = image.resize([round(side * scale) for side in image.size], Image.Resampling.BILINEAR)
    left, top = ((side - CROP) // 2 for side in image.size)
    pixels = numpy.asarray(image.crop((left, top, left + CROP, top + CROP)), numpy.float32) / 255
    return ((pixels - numpy.float32(MEAN)) / numpy.float32(DEVIATION)).transpose(2, 0, 1)


def crops(images, count):
    """Square crops of random sizes and positions."""
    random = numpy.random.default_rng(0)
    for number in range(count):
        image = images[number % len(images)]
        side = round(min(image.size) * random.uniform(0.1, 1) ** 0.5)
        left, top = (int(random.integers(0, whole - side + 1)) for whole in image.size)
        yield image.crop((left, top, left + side, top + side))


def pictures(source, folder):
    _, small = cached.script("prepare", "cifar-10")
    small = load_file(small / "test.safetensors")["images"][:200].transpose(0, 2, 3, 1)
    photographs = [Image.open(path).convert("RGB") for path in sorted(source.iterdir())]
    sets = {
        "photographs": photographs,
        "calibration": [*photographs, *crops(photographs, CROPS)],
        "cifar-10": [Image.fromarray(image) for image in small],
    }
    for name, images in sets.items():
        save_file({"pixel_values": numpy.stack([prepared(image) for image in images])}, folder / f"{name}.safetensors")


print(cached.prepared("photographs", pictures, "224-crops"))
