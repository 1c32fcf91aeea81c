"""Write tests/golden/images-in-texts: logits of transformers for texts with images, with the models of
tests/golden/models that have a vision tower of Qwen-VL.

    scripts/goldens images-in-texts

Each text has one image of 8 x 16 pixels, and the second one is padded. The id of the image token is changed to one in
the vocabulary, and the axes of positions to those in the metadata.
"""

import json

import torch
import transformers
from safetensors.torch import save_file

from lib import GOLDEN

TOKEN = 40
SECTIONS = {"qwen2-vl": [0, 1, 1], "qwen2_5-vl": [0, 1, 1], "qwen3-vl": [2, 1, 1], "qwen3-vl-moe": [2, 1, 1], "qwen3_5-vl": [1, 1, 0], "qwen3_5-moe-vl": [1, 0, 1]}
PATCH, MERGE, SIZE = 2, 2, (8, 16)

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()


def patches(pixels):
    """The input of transformers: rows of two equal frames, with patches to be merged next to each other."""
    rows, columns = (side // PATCH // MERGE for side in SIZE)
    x = pixels.unflatten(2, (rows, MERGE, PATCH)).unflatten(5, (columns, MERGE, PATCH))
    x = x.permute(0, 2, 5, 3, 6, 1, 4, 7).unsqueeze(6).expand(-1, -1, -1, -1, -1, -1, 2, -1, -1)
    return x.flatten(5).flatten(0, 4)


folder = GOLDEN / "images-in-texts"
folder.mkdir(exist_ok=True)
for name, sections in SECTIONS.items():
    config = transformers.AutoConfig.from_pretrained(GOLDEN / "models" / name)
    config.image_token_id = TOKEN
    config.text_config.rope_parameters["mrope_section"] = sections
    arguments = {"config": config, "dtype": torch.float32, "attn_implementation": "eager"}
    if "moe" in name:
        arguments["experts_implementation"] = "eager"  # the others do not support f64
    model = transformers.AutoModelForImageTextToText.from_pretrained(GOLDEN / "models" / name, **arguments).eval().double()
    random = torch.Generator().manual_seed(len(name))
    pixels = torch.randn(2, 3, *SIZE, generator=random)
    image = [TOKEN] * (SIZE[0] * SIZE[1] // (PATCH * MERGE) ** 2)
    ids = torch.tensor([[3, 17, *image, 9, 21, 5, 30], [7, *image, 11, 2, 0, 0, 0]])
    mask = torch.ones_like(ids)
    mask[1, -3:] = 0
    grid = torch.tensor([[1, SIZE[0] // PATCH, SIZE[1] // PATCH]] * 2)
    with torch.no_grad():
        inputs = {"input_ids": ids, "attention_mask": mask, "mm_token_type_ids": (ids == TOKEN).long()}
        logits = model(**inputs, pixel_values=patches(pixels.double()), image_grid_thw=grid).logits
        other = model(**inputs, pixel_values=patches(pixels.double().flip(3)), image_grid_thw=grid).logits
    assert (logits - other).abs().max() > 1e-3, f"{name}: the image has no effect"
    tensors = {"in/input_ids": ids, "in/attention_mask": mask, "in/pixel_values": pixels, "out/logits": logits.float()}
    save_file({key: x.contiguous() for key, x in tensors.items()}, folder / f"{name}.safetensors", {"token": str(TOKEN), "sections": json.dumps(sections)})
    print(name, tuple(logits.shape))
