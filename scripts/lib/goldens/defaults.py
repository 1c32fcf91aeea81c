"""Write tests/golden/defaults.json: sizes of models whose configurations rely on defaults.

Each row has a configuration, the number of tensors and of elements of the model that transformers builds from
it, and the names of the tensors, with 0 for every number. Buffers other than running statistics are omitted.
"""

import json
import re
import sys

import torch
import transformers

from lib import GOLDEN

CLASSES = [
    ("CLIPModel", {"text_config": {}, "vision_config": {}}),
    ("CLIPModel", {}),
    ("CLIPVisionModelWithProjection", {}),
    ("CLIPVisionModel", {"vision_config": {"patch_size": 16}}),
    ("CLIPTextModelWithProjection", {}),
    ("SiglipModel", {}),
    ("SiglipVisionModel", {}),
    ("SiglipTextModel", {}),
    ("EfficientNetModel", {}),
]


def main():
    rows = []
    for name, fields in CLASSES:
        kind = getattr(transformers, name)
        # The class of a tower has a separate configuration.
        config = kind.config_class(**({} if "vision_config" in fields and name != "CLIPModel" else fields))
        if name == "CLIPVisionModel":
            config = kind.config_class(**fields["vision_config"])
        with torch.device("meta"):
            tensors = kind(config).state_dict()
        tensors = {key: x for key, x in tensors.items() if not key.endswith(("position_ids", "num_batches_tracked"))}
        sizes = [x.numel() for x in tensors.values()]
        names = sorted({re.sub(r"[0-9]+", "0", key) for key in tensors})
        outer = {"CLIPVisionModel": "clip"}.get(name, kind.config_class.model_type)
        given = {"model_type": outer, "architectures": [name], **fields}
        rows.append({"config": given, "tensors": len(sizes), "elements": sum(sizes), "names": names})
        print(name, len(sizes), sum(sizes), file=sys.stderr)
    head = {"made_by": "scripts/goldens defaults", "versions": {"transformers": transformers.__version__}}
    text = json.dumps(head, indent=2)[:-2] + ',\n  "models": [\n' + ",\n".join("    " + json.dumps(row) for row in rows) + "\n  ]\n}\n"
    (GOLDEN / "defaults.json").write_text(text)


main()
