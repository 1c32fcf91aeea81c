"""Write tests/golden/layers.safetensors: one layer, quantized and pruned by the functions of llm-compressor.

    scripts/goldens layers

Weights are [8, 144], with Gram matrices of 400 correlated rows, and groups of 48, so that neither groups nor
patterns are aligned with the blocks of 128.
"""

import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.utils import calculate_qparams
from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight
from llmcompressor.modifiers.pruning.sparsegpt import sgpt_sparsify
from llmcompressor.modifiers.pruning.wanda import wanda_sparsify
from safetensors.torch import save_file

from lib import GOLDEN

ROWS, COLUMNS, GROUP, SAMPLES = 8, 144, 48, 400
torch.manual_seed(7)
mixing = torch.randn(COLUMNS, COLUMNS) / 12 + torch.eye(COLUMNS)
inputs = torch.randn(SAMPLES, COLUMNS) @ mixing * torch.linspace(0.5, 2, COLUMNS)[torch.randperm(COLUMNS)]
layer = torch.nn.Linear(COLUMNS, ROWS, bias=False)
layer.weight.data = torch.randn(ROWS, COLUMNS)
products = inputs.T @ inputs
tensors = {"weight": layer.weight.data.clone(), "products": products.clone()}
groups = layer.weight.data.reshape(ROWS, COLUMNS // GROUP, GROUP)
for symmetric in (True, False):
    name = "symmetric" if symmetric else "asymmetric"
    arguments = QuantizationArgs(num_bits=4, type="int", symmetric=symmetric, strategy="group", group_size=GROUP)
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), arguments)
    for order in (None, "weight"):
        arguments = arguments.model_copy(update={"actorder": order})
        rounded, _, fallback = quantize_weight(layer.weight.data[None].clone(), products[None].clone(), scale[None], zero[None], None, arguments)
        assert not fallback.any()
        tensors[f"{name}.{'ordered' if order else 'plain'}"] = rounded[0]
# The functions use modules as dictionary keys.
_, tensors["sparsegpt.2:4"] = sgpt_sparsify.sparsify_weight(layer, {layer: products.clone()}, 0.5, 2, 4, 128, 0.01, False)
norms = inputs.square().sum(0)
tensors["wanda.2:4"] = wanda_sparsify.sparsify_weight(layer, {layer: norms.clone()}, 0.5, 2, 4)
tensors["wanda.half"] = wanda_sparsify.sparsify_weight(layer, {layer: norms.clone()}, 0.5, 0, 0)
path = GOLDEN / "layers.safetensors"
save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path, {"format": "pt"})
print(f"{path.name}: {path.stat().st_size} bytes")
