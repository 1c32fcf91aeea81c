"""Vision towers of multimodal models in transformers, as models of images of one size: the classes have the names of
those of transformers, which take patches and their grid."""

import transformers
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen2_5_vl
from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2_vl
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3_vl


# The outputs of Qwen3-VL after single layers.
DEEPSTACK = ("deepstack_features_0", "deepstack_features_1")


class Images:
    def forward(self, pixel_values):
        config = self.config
        patch = Qwen2VLImageProcessor.patchify
        patches, rows, columns = patch(None, pixel_values, config.patch_size, config.spatial_merge_size, config.temporal_patch_size)
        grid = pixel_values.new_tensor([[1, rows, columns]] * len(pixel_values)).long()
        outputs = super().forward(patches.flatten(0, 1), grid_thw=grid)
        found = {"image_embeds": outputs.pooler_output, **dict(zip(DEEPSTACK, outputs.get("deepstack_features", [])))}
        return {name: x.unflatten(0, (len(pixel_values), -1)) for name, x in found.items()}


class Qwen2VisionTransformerPretrainedModel(Images, qwen2_vl.Qwen2VisionTransformerPretrainedModel):
    pass


class Qwen2_5_VisionTransformerPretrainedModel(Images, qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel):
    pass


class Qwen3VLVisionModel(Images, qwen3_vl.Qwen3VLVisionModel):
    pass


TOWERS = {kind.__name__: kind for kind in Images.__subclasses__()}


def model_class(name):
    """The class with this name, of a tower or of transformers."""
    return TOWERS[name] if name in TOWERS else getattr(transformers, name)
