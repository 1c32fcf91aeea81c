"""Types of recipes.

Generated from `compress schema` by python/generate.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Required, TypeAlias, TypedDict

from ._check import Reusable
from ._data import InMemory
from ._process import Path

ActivationObserver: TypeAlias = Literal["minmax", "moving-average", "percentile", "entropy", "mse"]
"""Method that chooses the range of activations.

- minmax: From the smallest to the largest value
- moving-average: Smallest and largest values of batches, averaged with a weight of 0.01 for each new batch
- percentile: Clips the outermost values; see `percentile`
- entropy: The range with the least Kullback-Leibler divergence
- mse: The range with the least squared error in the outputs of the layers that read the value
"""

ActivationRounding: TypeAlias = Literal["token", "none"]
"""Quantization of the inputs of quantized layers at run time.

- token: Int8, with one scale per token computed at run time (W8A8)
- none: Floats: only weights are int8 (W8A16)
"""

ActivationTarget: TypeAlias = Literal["portable", "vnni", "arm"]
"""Target processors of a quantized model.

- portable: Any x86: weights from -64 to 64, so that sums of two products fit into 16 bits
- vnni: x86 with VNNI (most since 2019) and GPUs: full int8 range
- arm: ARM: full int8 range, signed activations
"""

ActivationType: TypeAlias = Literal["auto", "uint8", "int8"]
"""Integer type of statically quantized activations.

- auto: The type chosen by the quantization pass, otherwise uint8
- uint8: 0 to 255
- int8: -128 to 127
"""

AdapterKind: TypeAlias = Literal["lora", "dora"]
"""Form of the adapters.

- lora: The product of two factors is added to each matrix
- dora: In addition, the norm of the weights of each output is trained separately from their direction
"""

AttentionTarget: TypeAlias = Literal["maps", "relations"]
"""Quantity of an attention layer that is compared.

- maps: Attention maps, head by head
- relations: Self-attention relations of queries, keys and values of the last layer (MiniLMv2)
"""

BatchNorm: TypeAlias = Literal["batch", "fixed"]
"""Statistics that batch normalization uses during training.

- batch: Those of the batch; the running statistics are updated
- fixed: The running statistics, which do not change
"""

CacheFormat: TypeAlias = Literal["fp8", "int8"]
"""Quantization format of cached keys and values.

- fp8: FP8 (E4M3), supported by vLLM
- int8: Int8, symmetric; supported by transformers, but not by vLLM
"""

CacheScales: TypeAlias = Literal["tensor", "head"]
"""Values that share a scale.

- tensor: All keys of a layer, and all values of a layer
- head: The keys of a head, and the values of a head
"""

ChannelOrder: TypeAlias = Literal["rgb", "bgr"]
"""Channel order of images.

- rgb: Red first
- bgr: Blue first (Caffe, OpenCV)
"""

Curve: TypeAlias = Literal["cosine", "linear", "constant"]
"""Decay of the learning rate after the warm-up.

- cosine: Half a cosine period
- linear: Linear
- constant: No decay
"""

Distance: TypeAlias = Literal["mse", "cosine"]
"""Distance between two vectors.

- mse: Mean squared error
- cosine: One minus the cosine similarity
"""

FileType: TypeAlias = Literal["auto", "F32", "F16", "BF16", "Q8_0", "Q6_K", "Q5_K_M", "Q5_K_S", "Q5_1", "Q5_0", "Q4_K_M", "Q4_K_S", "Q4_1", "Q4_0", "IQ4_NL", "IQ4_XS", "Q3_K_L", "Q3_K_M", "Q3_K_S", "IQ3_M", "IQ3_S", "IQ3_XS", "IQ3_XXS", "Q2_K", "Q2_K_S", "IQ2_M", "IQ2_S", "IQ2_XS", "IQ2_XXS", "TQ2_0", "IQ1_M", "TQ1_0", "IQ1_S", "MXFP4_MOE"]
"""File type of a GGUF file, by its name in llama.cpp.

- auto: That of the blocks of `quantize`, or the format of `cast`, otherwise F16
- F32: 32-bit floats
- F16: 16-bit floats
- BF16: bfloat16
- Q8_0: 8 bits, one scale per 32 weights
- Q6_K: 6 bits in blocks of 256 with quantized scales
- Q5_K_M: 5 bits in blocks of 256 with quantized scales; 6 bits for the most sensitive matrices
- Q5_K_S: 5 bits in blocks of 256 with quantized scales
- Q5_1: 5 bits, a scale and a minimum per 32 weights
- Q5_0: 5 bits, one scale per 32 weights
- Q4_K_M: 4 bits in blocks of 256 with quantized scales; 6 bits for the most sensitive matrices
- Q4_K_S: 4 bits in blocks of 256 with quantized scales; 5 bits for the most sensitive matrices
- Q4_1: 4 bits, a scale and a minimum per 32 weights
- Q4_0: 4 bits, one scale per 32 weights
- IQ4_NL: 4-bit indices into a codebook of 16 values, one scale per 32 weights
- IQ4_XS: The codebook of IQ4_NL in blocks of 256 with quantized scales
- Q3_K_L: 3 bits in blocks of 256 with quantized scales; 5 bits for the most sensitive matrices
- Q3_K_M: 3 bits in blocks of 256 with quantized scales; 4 or 5 bits for the most sensitive matrices
- Q3_K_S: 3 bits in blocks of 256 with quantized scales
- IQ3_M: 3 bits as points of a grid; 4 bits for the most sensitive matrices
- IQ3_S: 3 bits as points of a grid
- IQ3_XS: 3 bits as points of grids, of a smaller one for some matrices; needs importance
- IQ3_XXS: 3 bits as points of a smaller grid; needs importance
- Q2_K: 2 bits in blocks of 256 with quantized scales; 3 or 4 bits for the most sensitive matrices
- Q2_K_S: 2 bits in blocks of 256 with quantized scales; needs importance
- IQ2_M: 2 bits as points of a grid; 3 bits for the most sensitive matrices; needs importance
- IQ2_S: 2 bits as points of a smaller grid; 3 bits for the most sensitive matrices; needs importance
- IQ2_XS: 2 bits as points of a smaller grid; needs importance
- IQ2_XXS: 2 bits as points of the smallest grid; needs importance
- TQ2_0: Ternary weights, in 2 bits
- IQ1_M: Ternary weights as points of a grid, with a scale per 16 weights; needs importance
- TQ1_0: Ternary weights, in 1.69 bits
- IQ1_S: Ternary weights as points of a grid, with a scale per 32 weights; needs importance
- MXFP4_MOE: 4-bit floats with a scale per 32 weights for experts, 8 bits for other matrices
"""

FloatFormat: TypeAlias = Literal["f32", "f16", "bf16"]
"""Target format.

- f32: 32 bits
- f16: IEEE half precision: 11 bits of precision, values up to 65504
- bf16: bfloat16: 8 bits of precision, the range of f32
"""

GranularityKind: TypeAlias = Literal["tensor", "channel", "group"]
"""Granularity of scales.

- tensor: One scale per tensor
- channel: One scale per output channel (row)
- group: One scale per `group_size` consecutive inputs of a row
"""

Guide: TypeAlias = Literal["none", "loss"]
"""How errors of layers are weighted.

- none: The errors of all outputs and tokens have the same weight
- loss: By the second moments of the gradients of the loss with respect to the outputs of the layer, found by
  backward passes
"""

ImageLayout: TypeAlias = Literal["nchw", "nhwc"]
"""Axis order of images.

- nchw: Batch, channels, height, width (PyTorch)
- nhwc: Batch, height, width, channels (TensorFlow)
"""

Importance: TypeAlias = Literal["l1", "wanda", "sparsegpt"]
"""Importance criterion of weights.

- l1: Magnitude; needs no data
- wanda: Magnitude times the norm of the input over calibration samples, ranked within each row of a linear
  layer
- sparsegpt: Increase of the output error on calibration samples; the remaining weights of the row are updated
  to compensate
"""

InputImportance: TypeAlias = Literal["auto", "none", "activation"]
"""How errors in weights are weighted.

- auto: `activation` if there is calibration data, otherwise `none`
- none: All weights have the same importance; needs no data
- activation: Weights are more important the larger their inputs are on calibration samples
"""

LabelKind: TypeAlias = Literal["index", "name"]
"""How labels identify classes.

- index: By index, from 0
- name: By name, from id2label or label2id of config.json
"""

Layout: TypeAlias = Literal["auto", "dense", "compressed-tensors", "sparse"]
"""Layout of the weights.

- auto: compressed-tensors if a weight is quantized, otherwise dense
- dense: Plain floats, for any reader
- compressed-tensors: Quantized weights in the format of transformers and vLLM
- sparse: Bitmask and non-zero values if smaller; only compress reads it
"""

LogFormat: TypeAlias = Literal["csv", "tensorboard"]
"""Format of a log file of training steps.

- csv: CSV table, which is always written
- tensorboard: TensorBoard event file
"""

LossOn: TypeAlias = Literal["all", "assistant"]
"""Tokens of chats that losses and perplexity predict.

- all: All tokens
- assistant: The text of the assistant: the generation blocks of the chat template, or else the text that its
  messages add
"""

Method: TypeAlias = Literal["rtn", "gptq", "awq", "smoothquant", "autoround", "best"]
"""Quantization algorithm.

- rtn: Round to nearest; needs no data
- gptq: Quantize column by column; later columns compensate for the error on calibration samples
- awq: Scale up the weights of inputs that are salient on calibration samples, then round to nearest
- smoothquant: Migrate scales from activations to weights, then round to nearest; for schemes that quantize
  both
- autoround: Train rounding offsets and scales of each block by signed gradient descent, starting from `gptq`
- best: The method with the smallest error: with calibration samples autoround for integers of two and three
  bits, gptq for fewer than eight bits, and smoothquant for W8A8; otherwise rtn
"""

Offload: TypeAlias = Literal["optimizer", "teacher", "parameters"]
"""Tensors that are kept out of device memory during training.

- optimizer: The optimizer state
- teacher: The teacher, which then runs on the CPU
- parameters: Weights, gradients and optimizer state, except those of the current block: to host memory from a
  GPU, to disk from the CPU. The teacher's weights are streamed from its files, and activations are recomputed
"""

OnnxPrecision: TypeAlias = Literal["float32", "float16"]
"""Precision of weights and arithmetic.

- float32: 32 bits
- float16: 16 bits; inputs, outputs, int8 layers, and operations that need more range stay at 32 bits
"""

OptimizerKind: TypeAlias = Literal["adamw", "adamw8bit", "adafactor", "muon", "sgd"]
"""Optimizer algorithm.

- adamw: Adam with decoupled weight decay
- adamw8bit: AdamW with 8-bit moments
- adafactor: Factored second moments, no first moment
- muon: Orthogonalized momentum for linear layers, AdamW for other parameters
- sgd: Gradient descent, with momentum
"""

Overflow: TypeAlias = Literal["error", "saturate"]
"""Handling of values outside of the range of the format.

- error: Stop, and name the tensor
- saturate: Use the largest finite value
"""

Precision: TypeAlias = Literal["f32", "bf16", "f16"]
"""Floating-point type in which a model is computed.

- f32: 32-bit floats
- bf16: bfloat16
- f16: 16-bit floats
"""

PrunedPart: TypeAlias = Literal["heads", "mlp", "channels", "hidden", "layers", "experts"]
"""Part of a model that can be pruned.

- heads: Attention heads; heads that share keys and values are removed jointly
- mlp: Neurons between two linear layers
- channels: Channels of convolutions
- hidden: The width of the residual stream
- layers: Whole layers of a transformer
- experts: Whole experts of a mixture of experts, ranked by their use on calibration data
"""

QuantizerScales: TypeAlias = Literal["fixed", "learnable", "only"]
"""Whether the scales of quantized weights and activations are trained.

- fixed: Not trained
- learnable: Trained with the weights
- only: Trained instead of the codes of quantized weights, which do not change
"""

Repair: TypeAlias = Literal["none", "bias", "least-squares"]
"""Adjustment of the layers that read removed units.

- none: No adjustment
- bias: Add the mean contribution of removed units to the bias; recompute statistics of batch normalization
- least-squares: Refit the remaining weights by least squares; recompute statistics of batch normalization
"""

RotatedPart: TypeAlias = Literal["residual", "heads"]
"""Features that are rotated.

- residual: The residual stream (R1)
- heads: The values of each attention head (R2)
"""

Runtime: TypeAlias = Literal["candle", "onnxruntime"]
"""Runtime that runs a model.

- candle: The built-in executor
- onnxruntime: ONNX Runtime, for ONNX files
"""

Sbom: TypeAlias = Literal["cyclonedx"]
"""Format of a software bill of materials.

- cyclonedx: CycloneDX 1.6, JSON
"""

Scheme: TypeAlias = Literal["W4A16", "W4A16-ASYM", "W2A16", "W2A16-ASYM", "W3A16", "W3A16-ASYM", "W5A16", "W6A16", "W7A16", "W8A16", "W8A8", "W8A8-STATIC", "W4A8", "W4AFP8", "FP8", "FP8-DYNAMIC", "FP8-BLOCK", "NVFP4A16", "NVFP4", "MXFP4A16", "MXFP4", "MXFP6A16", "MXFP8A16", "MXFP8", "Q8_0", "Q6_K", "Q5_K_M", "Q5_K_S", "Q5_K", "Q5_1", "Q5_0", "Q4_K_M", "Q4_K_S", "Q4_K", "Q4_1", "Q4_0", "IQ4_NL", "IQ4_XS", "Q3_K_L", "Q3_K_M", "Q3_K_S", "Q3_K", "Q2_K"]
"""Quantization scheme of weights and activations. Names are case-insensitive, and `_` is equivalent to `-`.

- W4A16: Weights: int4 in groups of 128, symmetric. Activations: floats
- W4A16-ASYM: Weights: int4 in groups of 128 with zero points. Activations: floats
- W2A16: Weights: int2 in groups of 128, symmetric. Activations: floats
- W2A16-ASYM: Weights: int2 in groups of 128 with zero points. Activations: floats
- W3A16: Weights: int3 in groups of 128, symmetric. Activations: floats
- W3A16-ASYM: Weights: int3 in groups of 128 with zero points. Activations: floats
- W5A16: Weights: int5 in groups of 128, symmetric. Activations: floats
- W6A16: Weights: int6 in groups of 128, symmetric. Activations: floats
- W7A16: Weights: int7 in groups of 128, symmetric. Activations: floats
- W8A16: Weights: int8 in groups of 128, symmetric. Activations: floats
- W8A8: Weights: int8 with a scale per output channel. Activations: int8 with a dynamic scale per token
- W8A8-STATIC: Weights: int8 with a scale per output channel. Activations: int8 with a static scale found on
  calibration samples
- W4A8: Weights: int4 in groups of 128, symmetric. Activations: int8 with a dynamic scale per token
- W4AFP8: Weights: int4 in groups of 128, symmetric. Activations: FP8 with a dynamic scale per token
- FP8: Weights: FP8 with a scale per tensor. Activations: FP8 with a static scale found on calibration samples
- FP8-DYNAMIC: Weights: FP8 with a scale per output channel. Activations: FP8 with a dynamic scale per token
- FP8-BLOCK: Weights: FP8 with a scale per block of 128 x 128. Activations: FP8 in groups of 128 with dynamic
  scales
- NVFP4A16: Weights: FP4 in groups of 16 with FP8 scales. Activations: floats
- NVFP4: Weights and activations: FP4 in groups of 16 with FP8 scales and a global scale, which for
  activations is found on calibration samples
- MXFP4A16: Weights: FP4 in groups of 32 with power-of-two scales. Activations: floats
- MXFP4: Weights and activations: FP4 in groups of 32 with power-of-two scales, which for activations are
  dynamic
- MXFP6A16: Weights: FP6 in groups of 32 with power-of-two scales. Activations: floats
- MXFP8A16: Weights: FP8 in groups of 32 with power-of-two scales. Activations: floats
- MXFP8: Weights and activations: FP8 in groups of 32 with power-of-two scales, which for activations are
  dynamic
- Q8_0: Blocks of a GGUF file: 8 bits with a scale per 32 weights
- Q6_K: Blocks of a GGUF file: 6 bits in blocks of 256 with quantized scales
- Q5_K_M: Blocks of a GGUF file: Q5_K, and Q6_K for the most sensitive matrices
- Q5_K_S: Blocks of a GGUF file: Q5_K
- Q5_K: Blocks of a GGUF file: 5 bits in blocks of 256 with quantized scales and minima
- Q5_1: Blocks of a GGUF file: 5 bits with a scale and a minimum per 32 weights
- Q5_0: Blocks of a GGUF file: 5 bits with a scale per 32 weights
- Q4_K_M: Blocks of a GGUF file: Q4_K, and Q6_K for the most sensitive matrices
- Q4_K_S: Blocks of a GGUF file: Q4_K, and Q5_K for the most sensitive matrices
- Q4_K: Blocks of a GGUF file: 4 bits in blocks of 256 with quantized scales and minima
- Q4_1: Blocks of a GGUF file: 4 bits with a scale and a minimum per 32 weights
- Q4_0: Blocks of a GGUF file: 4 bits with a scale per 32 weights
- IQ4_NL: Blocks of a GGUF file: indices into a codebook of 16 values, with a scale per 32 weights
- IQ4_XS: Blocks of a GGUF file: the codebook of IQ4_NL in blocks of 256 with quantized scales
- Q3_K_L: Blocks of a GGUF file: Q3_K, and Q5_K for the most sensitive matrices
- Q3_K_M: Blocks of a GGUF file: Q3_K, and Q4_K or Q5_K for the most sensitive matrices
- Q3_K_S: Blocks of a GGUF file: Q3_K
- Q3_K: Blocks of a GGUF file: 3 bits in blocks of 256 with quantized scales
- Q2_K: Blocks of a GGUF file: 2 bits in blocks of 256 with quantized scales and minima, and Q3_K or Q4_K for
  the most sensitive matrices
"""

Scope: TypeAlias = Literal["tensor", "global"]
"""Set of weights that are ranked jointly.

- tensor: Each tensor separately: all tensors have the same sparsity
- global: All selected tensors jointly
"""

Shard: TypeAlias = Literal["optimizer", "parameters"]
"""Tensors that are sharded across processes.

- optimizer: The optimizer state
- parameters: Weights, gradients and optimizer state: each tensor is owned by one process, and is broadcast
  when its block is computed. Activations are recomputed
"""

SoftDivergence: TypeAlias = Literal["forward", "reverse", "jensen-shannon", "total-variation", "acceptance"]
"""Divergence of the student's distribution from the teacher's.

- forward: KL(teacher ‖ student): the student covers every token that the teacher considers possible
- reverse: KL(student ‖ teacher): the student concentrates on the teacher's likely tokens
- jensen-shannon: Generalized Jensen–Shannon divergence (GKD)
- total-variation: Total variation distance: the rejection rate of speculative decoding
- acceptance: KL divergence and total variation, weighted by the acceptance rate: for drafts of speculative
  decoding
"""

Task: TypeAlias = Literal["classification", "language-modelling", "embedding", "contrastive", "fidelity"]
"""Task that a data set is used for.

- classification: Single-label classification: accuracy, F1
- language-modelling: Next-token prediction: perplexity
- embedding: Semantic textual similarity: Spearman correlation of the cosine similarity with a score
- contrastive: Pairs of matching texts, for the contrastive loss of a training
- fidelity: No labels: outputs are compared only with those of another model
"""

TensorType: TypeAlias = Literal["F32", "F16", "BF16", "Q8_0", "Q6_K", "Q5_1", "Q5_0", "Q5_K", "Q4_1", "Q4_0", "Q4_K", "IQ4_NL", "IQ4_XS", "MXFP4", "Q3_K", "IQ3_S", "IQ3_XXS", "Q2_K", "IQ2_S", "IQ2_XS", "IQ2_XXS", "TQ2_0", "IQ1_M", "TQ1_0", "IQ1_S"]
"""Type of a tensor in a GGUF file, by its name in llama.cpp.

- F32: 32-bit floats
- F16: 16-bit floats
- BF16: bfloat16
- Q8_0: 8.5 bits per weight: one scale per 32 weights
- Q6_K: 6.56 bits per weight: blocks of 256 with quantized scales
- Q5_1: 6 bits per weight: a scale and a minimum per 32 weights
- Q5_0: 5.5 bits per weight: one scale per 32 weights
- Q5_K: 5.5 bits per weight: blocks of 256 with quantized scales and minima
- Q4_1: 5 bits per weight: a scale and a minimum per 32 weights
- Q4_0: 4.5 bits per weight: one scale per 32 weights
- Q4_K: 4.5 bits per weight: blocks of 256 with quantized scales and minima
- IQ4_NL: 4.5 bits per weight: indices into a codebook of 16 values, one scale per 32 weights
- IQ4_XS: 4.25 bits per weight: the codebook of IQ4_NL in blocks of 256 with quantized scales
- MXFP4: 4.25 bits per weight: 4-bit floats (E2M1), one power of two per 32 weights
- Q3_K: 3.44 bits per weight: blocks of 256 with quantized scales
- IQ3_S: 3.44 bits per weight: points of a grid of four values in blocks of 256 with quantized scales
- IQ3_XXS: 3.06 bits per weight: points of a smaller grid of four values
- Q2_K: 2.63 bits per weight: blocks of 256 with quantized scales and minima
- IQ2_S: 2.56 bits per weight: points of a grid of eight values in blocks of 256 with quantized scales
- IQ2_XS: 2.31 bits per weight: points of a smaller grid of eight values
- IQ2_XXS: 2.06 bits per weight: points of the smallest grid of eight values
- TQ2_0: 2.06 bits per weight: ternary values, one scale per 256 weights
- IQ1_M: 1.75 bits per weight: shifted points of a ternary grid of eight values, scales per 16 weights
- TQ1_0: 1.69 bits per weight: ternary values, five in a byte
- IQ1_S: 1.56 bits per weight: shifted points of a ternary grid of eight values, scales per 32 weights
"""

TiedHead: TypeAlias = Literal["float32", "int8"]
"""Representation of an output head that shares its weight with an int8 embedding table.

- float32: A float matrix product; the weights are dequantized when the file is loaded
- int8: An integer matrix product, as in layers with dynamic activations; reads a quarter of the bytes
"""

UnitImportance: TypeAlias = Literal["auto", "l1", "l2", "taylor", "activation"]
"""Importance criterion of units.

- auto: `activation` for transformers if the recipe has calibration or training data; else `l1`
- l1: Sum of the magnitudes of the weights of a unit, over all layers that write or read it
- l2: Sum of squares
- taylor: First-order change of the loss on calibration data
- activation: Magnitude of the activations of a unit on calibration data, times the weights of the layers that
  read it
"""

WeightObserver: TypeAlias = Literal["minmax", "mse", "l4"]
"""Method that chooses the range of a weight scale.

- minmax: From the smallest to the largest value
- mse: The range with the least squared error, among 80 % to 100 % of minmax (with calibration samples from 40
  %, with errors weighted by the inputs); for symmetric integers also the range with its largest value at a
  whole number of steps, and for floats the ranges whose largest value is stored as the second largest number
  of the format (for FP4, four instead of six)
- l4: Like mse with fourth powers of errors, which clips less: for integers without calibration samples
"""

WeightOnly: TypeAlias = Literal["dequantize", "matmul-nbits"]
"""Representation of layers with integer weights and float activations.

- dequantize: `DequantizeLinear` and a matrix product; group scales and packed 4-bit weights require opset 21
- matmul-nbits: `MatMulNBits` of ONNX Runtime, for per-row scales and group sizes that are multiples of 16
"""

WindowSampling: TypeAlias = Literal["first", "spread"]
"""Which windows of a text are taken if `samples` limits them.

- first: The first ones
- spread: Windows that start at lines spread evenly over a file of plain text
"""


class Adapter(TypedDict, total=False):
    """Low-rank adapters (Hu et al., *LoRA*, 2021; Liu et al., *DoRA*, 2024), which are trained instead of
    the weights of the model."""

    kind: AdapterKind
    """Form of the adapters."""

    rank: int
    """Rank of the factors of each layer."""

    alpha: float
    """Scale of the product of the factors, which is multiplied by alpha / rank."""

    rslora: bool
    """Multiply the product by alpha / √rank instead."""

    targets: Sequence[str]
    """Weights of linear layers that get an adapter: names with `*`, or `re:` and a regular expression
    [default: all linear layers of the repeated layers]."""

    merge: bool
    """Add the adapters to the weights; otherwise the weights do not change, and the adapters are written
    in the format of PEFT to the folder `adapter`."""

    absorb: bool
    """With merge: train the product through the rounding of the quantized weights, whose codes absorb it;
    their scales do not change."""


class Amounts(TypedDict, total=False):
    """Options by name."""

    heads: float | int | str

    mlp: float | int | str

    channels: float | int | str

    hidden: float | int | str

    layers: float | int | str

    experts: float | int | str


class AttentionLoss(TypedDict, total=False):
    """Attention, layer by layer, or relations of the last layer."""

    weight: float
    """Factor on the loss."""

    target: AttentionTarget
    """Quantity that is compared."""

    layers: Sequence[tuple[int, int]]
    """Pairs of student and teacher layers, numbered from 0 [default: evenly spread; relations: the last
    layers]."""

    relation_heads: int | None
    """Number of relation heads, a divisor of the columns of all queries, keys and values [default: the
    largest one up to the teacher's number of heads]."""


class Augment(TypedDict, total=False):
    """Random changes of training images, in each step anew."""

    flip: bool
    """Flip each image horizontally with a probability of one half."""

    shift: int
    """Shift each image by up to this many pixels in each direction; pixels at the border are repeated."""


class Benchmark(TypedDict, total=False):
    """A benchmark on the Hugging Face Hub."""

    dataset: Required[str]
    """Repository of the data set: `org/name`."""

    task: Required[str]
    """Task in the `eval.yaml` of the data set."""


class CacheOptions(TypedDict, total=False):
    """Format and scales of a quantized KV cache."""

    type: Required[CacheFormat]
    """Format of keys and values."""

    scales: CacheScales
    """Values that share a scale."""


class CheckpointIntervalMinutes(TypedDict, total=False):
    """Number of minutes."""

    minutes: Required[float]


class CheckpointIntervalSteps(TypedDict, total=False):
    """Number of steps."""

    steps: Required[int]


class CheckpointingEvery(TypedDict, total=False):
    """Those inside segments of this many layers."""

    every: Required[int]


class ContrastiveLoss(TypedDict, total=False):
    """Matching texts of a batch, each of which is compared with all others."""

    weight: float
    """Factor on the loss."""

    temperature: float
    """Temperature that the cosine similarities are divided by."""

    symmetric: bool
    """Whether the texts of `pair_column` are compared with those of `text_column` too."""

    output: str | None
    """Name of the embedding output [default: the only output with one vector per sample]."""


class Correction(TypedDict, total=False):
    """Low-rank correction of the quantization error, written as a LoRA adapter."""

    rank: Required[int]
    """Rank of the correction of each layer."""

    importance: InputImportance
    """Weighting of errors."""


class CostTargetLatency(TypedDict, total=False):
    """Latency of the built-in executor on synthetic samples."""

    latency: Required[float | str]


class CostTargetMacs(TypedDict, total=False):
    """Multiply-accumulate operations for one sample: a text of 128 tokens, or an image of 224 x 224 if the
    size is dynamic."""

    macs: Required[float | str]


class CostTargetParams(TypedDict, total=False):
    """Number of parameters."""

    params: Required[float | str]


class DataSets(TypedDict, total=False):
    """The data sets of a recipe."""

    evaluation: str | Samples | None
    """Evaluation data, for accuracy and other metrics."""

    calibration: str | Samples | None
    """Calibration data, for passes that collect activation statistics; labels are ignored."""

    train: str | Samples | None
    """Training data."""


class DraftHead(TypedDict, total=False):
    """An EAGLE-3 head."""

    vocabulary: Path | None
    """File with the ids of the tokens that the head proposes, one per line [default: all tokens]."""

    layers: Sequence[int]
    """Layers of the input model whose inputs the head reads [default: 2, the middle, and the third last]."""

    steps: int
    """Number of steps in training: in each one but the first, the head reads its own hidden states."""

    decay: float
    """Factor on the loss of a step, relative to that of the step before."""


class EmbeddingLoss(TypedDict, total=False):
    """Embeddings of whole samples."""

    weight: float
    """Factor on the loss."""

    distance: Distance
    """Distance measure."""

    output: str | None
    """Name of the embedding output [default: the only output with one vector per sample]."""


class Goal(TypedDict, total=False):
    """Required quality of the quantized model: one of `max_drop` and `min_cosine`."""

    max_drop: float | str | None
    """Maximum drop of the score on the evaluation data (0.01: one point of accuracy)."""

    min_cosine: float | str | None
    """Minimum mean cosine similarity of the outputs to those of the original, on the evaluation data or
    else the calibration data."""

    max_trials: int
    """Maximum number of models to try."""

    max_minutes: float | None
    """Time limit in minutes."""

    strict: bool
    """Fail if the goal is not met; otherwise the best model is written with a warning."""


class HardLoss(TypedDict, total=False):
    """Hard targets: labels, or the next token."""

    weight: float
    """Factor on the loss."""

    label_smoothing: float
    """Probability mass that is distributed uniformly over all classes."""


class HiddenLoss(TypedDict, total=False):
    """Hidden states, layer by layer."""

    weight: float
    """Factor on the loss."""

    distance: Distance
    """Distance measure."""

    layers: Sequence[tuple[int, int]]
    """Pairs of student and teacher layers, numbered from 0 [default: evenly spread, last to last]."""

    values: Sequence[tuple[str, str]]
    """Pairs of value names of the two graphs, for models without repeated layers."""


class Losses(TypedDict, total=False):
    """Losses and their weights: a number in place of the options is the weight."""

    soft: float | SoftLoss | None
    """Soft targets: the teacher's distribution over classes or tokens."""

    hard: float | HardLoss | None
    """Hard targets: labels, or the next token."""

    hidden: float | HiddenLoss | None
    """Hidden states."""

    attention: float | AttentionLoss | None
    """Attention."""

    embedding: float | EmbeddingLoss | None
    """Embeddings of whole samples."""

    contrastive: float | ContrastiveLoss | None
    """Matching texts of a batch."""


class Masking(TypedDict, total=False):
    """Randomly masked tokens, which a masked language model predicts; different ones in each step."""

    fraction: float | str
    """Probability of each token to be predicted."""

    mask_token: int | str | None
    """Token that replaces predicted tokens, by its text or its id [default: `mask_token` of the
    tokenizer]."""


class MoreTeacher(TypedDict, total=False):
    """A further teacher."""

    model: Required[Path]
    """Folder of the model."""

    weight: float
    """Weight of its probabilities; that of `teacher` is 1."""

    cache: Path | None
    """Folder that caches its largest logits, like `teacher_cache`."""


class OnPolicy(TypedDict, total=False):
    """Samples that the student continues from their prompts, with its weights at the time of the step."""

    fraction: float | str
    """Fraction of the samples that the student continues."""

    prompt_tokens: int | None
    """Minimum length of a prompt in tokens [default: up to the first token with a loss, or 32 if all
    tokens have a loss]."""

    tokens: int | None
    """Maximum length of a continuation in tokens [default: up to the length of the sample]."""

    temperature: float
    """Sampling temperature."""


class ParameterGroup(TypedDict, total=False):
    """Learning rate and weight decay for a part of the trained tensors."""

    targets: Required[Sequence[str]]
    """Tensors: names with `*`, or `re:` and a regular expression."""

    learning_rate: float | None
    """Peak learning rate of these tensors; 0 freezes them [default: that of the training]."""

    weight_decay: float | None
    """Weight decay of these tensors, also of biases and norm weights [default: that of the training]."""


class RankRule(TypedDict, total=False):
    """Different rank for some layers."""

    targets: Required[Sequence[str]]
    """Weights that the rule applies to."""

    rank: Required[float | int | str]
    """Rank of these layers, written like `rank` of the pass."""


class Rule(TypedDict, total=False):
    """Different amount for some tensors."""

    targets: Required[Sequence[str]]
    """Tensors that the rule applies to."""

    amount: Required[float | int | str]
    """Amount to zero in them."""


class Schedule(TypedDict, total=False):
    """Linear warm-up followed by a decay, as in transformers' `get_cosine_schedule_with_warmup`,
    `get_linear_schedule_with_warmup`, `get_constant_schedule_with_warmup` and, with `decay_steps`,
    `get_wsd_schedule`. The warm-up always begins at 0."""

    kind: Curve
    """Decay of the rate after the warm-up."""

    warmup_steps: int
    """Number of warm-up steps."""

    decay_steps: int | None
    """Number of steps at the end in which the rate decays, after a constant rate [default: all steps after
    the warm-up]."""

    min_rate: float | str
    """Final rate, as a fraction of the peak rate."""


class SchemeRule(TypedDict, total=False):
    """Another scheme for some of the weights."""

    targets: Required[Sequence[str]]
    """Weights that the rule applies to."""

    scheme: Required[Scheme]
    """Quantization scheme of these weights."""

    group_size: int | None
    """Inputs that share a scale, like `group_size` of the pass [default: depends on the scheme]."""


class SoftLoss(TypedDict, total=False):
    """Soft targets: the teacher's distribution over classes or tokens."""

    weight: float
    """Factor on the loss."""

    temperature: float
    """Temperature that the logits are divided by."""

    divergence: SoftDivergence
    """Divergence of the student's distribution from the teacher's."""

    mix: float | None
    """Share of the teacher in the mean distribution of `jensen-shannon`, between 0 and 1 [default: 0.5]."""


class StructureLimitBytes(TypedDict, total=False):
    """Size of all weights of the model."""

    bytes: Required[str | int]


class StructureLimitLayers(TypedDict, total=False):
    """Fraction of the parameters of the layers that remain."""

    layers: Required[float | str]


class StructureLimitParams(TypedDict, total=False):
    """Number of parameters of the model."""

    params: Required[int]


class StudentConfig(TypedDict, total=False):
    """Random weights for a configuration: a config.json, or a folder with one."""

    config: Required[Path]


class StudentEagle3(TypedDict, total=False):
    """An EAGLE-3 head of the input model, for speculative decoding."""

    eagle3: Required[DraftHead]


class StudentEvery(TypedDict, total=False):
    """Every n-th layer of the input model, starting with the first."""

    every: Required[int]


class StudentLayers(TypedDict, total=False):
    """Indices of the layers of the input model to keep, from 0."""

    layers: Required[Sequence[int]]


class StudentModel(TypedDict, total=False):
    """A model folder."""

    model: Required[Path]


CheckpointInterval: TypeAlias = CheckpointIntervalSteps | CheckpointIntervalMinutes
"""Interval between checkpoints."""


Checkpointing: TypeAlias = Literal["none", "blocks"] | CheckpointingEvery
"""Activations that are recomputed in the backward pass instead of stored."""


CostTarget: TypeAlias = CostTargetMacs | CostTargetParams | CostTargetLatency
"""Remaining fraction of the cost of the model."""


StructureLimit: TypeAlias = StructureLimitLayers | StructureLimitParams | StructureLimitBytes
"""Limit of the size of the result."""


Student: TypeAlias = StudentLayers | StudentEvery | StudentModel | StudentConfig | StudentEagle3
"""The student: the input model with some of its layers, another model, or random weights."""


@dataclass(frozen=True, kw_only=True)
class PruneUnstructured(Reusable):
    """Zero the weights that are smallest in absolute value."""

    NAME: ClassVar[Literal["prune-unstructured"]] = "prune-unstructured"

    amount: float | int | str | None = None
    """Weights to zero: a fraction like 0.5 or 50%, or a count like 1000 or `50 units` [default: 0.5]."""

    importance: Importance = "l1"
    """Importance criterion: magnitude, or a criterion that uses calibration samples."""

    scope: Scope = "tensor"
    """Rank weights inside each tensor, or across all of them."""

    pattern: str | None = None
    """Keep N of every M consecutive inputs, like 2:4, instead of an amount."""

    targets: Sequence[str] = ()
    """Tensors to prune: names with `*`, or `re:` and a regular expression [default: linear and convolution
    weights; with calibration samples, linear weights]."""

    ignore: Sequence[str] = ()
    """Tensors to leave unchanged."""

    rules: Sequence[Rule] = ()
    """Another amount for some tensors, which are then ranked separately; the first rule that matches
    applies."""


@dataclass(frozen=True, kw_only=True)
class PruneStructured(Reusable):
    """Remove heads, neurons, channels, width, layers or experts from a model."""

    NAME: ClassVar[Literal["prune-structured"]] = "prune-structured"

    dims: Sequence[PrunedPart] = ()
    """Parts to remove [default: heads, mlp and channels, if the model has them]."""

    amount: float | int | str | Amounts | None = None
    """Amount to remove from each group: a fraction like 0.25 or 25%, a number of units, or an amount per
    kind: {"heads": 0.25, "mlp": 64} [default: 0.25]."""

    target: CostTarget | None = None
    """Instead of an amount, the fraction of the cost to keep: {"macs": 0.5} or {"macs": "50%"}, {"params":
    0.5} or {"latency": 0.5}."""

    importance: UnitImportance = "auto"
    """Importance criterion; the least important units are removed."""

    scope: Scope | None = None
    """Remove the same fraction of every group, or rank all groups jointly [default: tensor; global for a
    target]."""

    round_to: int = 8
    """Remaining widths are multiples of this number; heads are always removed completely."""

    minimum: int | None = None
    """Minimum number of remaining units per group [default: one head, else `round_to`]."""

    uniform: bool | None = None
    """Prune all layers to the same width [default: true if config.json supports only one width]."""

    repair: Repair = "none"
    """Adjustment of the layers that read removed units."""

    targets: Sequence[str] = ()
    """Tensors whose units may be removed: names with `*`, or `re:` and a regular expression [default:
    all]."""

    ignore: Sequence[str] = ()
    """Tensors that keep all their units."""


@dataclass(frozen=True, kw_only=True)
class SearchStructure(Reusable):
    """Choose the width of each layer, and the parts to remove, for a number of parameters."""

    NAME: ClassVar[Literal["search-structure"]] = "search-structure"

    limit: StructureLimit | None = None
    """Limit of the size: {"layers": 0.5} (fraction of the parameters of all layers), {"params": 12000000}
    or {"bytes": "50MB"}."""

    widths: Sequence[float | str] = ()
    """Fractions of the neurons and of the heads of a layer that options keep."""

    uniform: bool | None = None
    """Choose the same widths for all layers, and remove only whole layers [default: true if config.json
    supports only one width]."""

    round_to: int = 8
    """Numbers of neurons are multiples of this number."""

    repair: Repair = "least-squares"
    """Adjustment of the layers that read removed units: none or least-squares."""

    steps: int = 0
    """Training steps of each option with fewer units, on the original outputs of its block."""

    learning_rate: float = 0.0003
    """Learning rate of the first step, which decreases linearly."""

    baselines: bool = False
    """Also measure two usual choices of the same size: the least influential layers removed, and the same
    widths for all layers."""


@dataclass(frozen=True, kw_only=True)
class PruneVocabulary(Reusable):
    """Remove tokens that a corpus does not need from the vocabulary."""

    NAME: ClassVar[Literal["prune-vocabulary"]] = "prune-vocabulary"

    keep: Path | Sequence[Path] | None = None
    """Texts whose tokens remain: .txt, .raw, .csv, .tsv or .jsonl."""

    languages: str | Sequence[str] | None = None
    """Languages whose tokens remain, such as ["en", "de"]: all tokens in their scripts, and digits,
    punctuation and symbols."""

    text_column: int | str | None = None
    """Column of the text in .csv, .tsv and .jsonl [default: text, sentence, or messages (chats, in
    .jsonl)]."""

    vocab_size: int | None = None
    """Maximum number of tokens: the most frequent ones of the texts; without texts, the first by merge
    rank (BPE), score (Unigram) or id (WordPiece)."""

    min_count: int = 1
    """Number of occurrences below which a token of the texts is removed."""

    multiple_of: int = 1
    """Round the number of rows up to a multiple of this number, by keeping more tokens, or the maximum
    number of tokens down."""


@dataclass(frozen=True, kw_only=True)
class Decompose(Reusable):
    """Replace layers by two low-rank layers."""

    NAME: ClassVar[Literal["decompose"]] = "decompose"

    rank: float | int | str = 0.5
    """Rank of the two layers: a number, like 64, or the fraction of the parameters of the original layer
    that they have in total, like 0.5 or 50%."""

    importance: InputImportance = "auto"
    """Weighting of approximation errors."""

    targets: Sequence[str] = ()
    """Weights to decompose: names with `*`, or `re:` and a regular expression [default: linear weights];
    convolutions must be listed explicitly."""

    ignore: Sequence[str] = ()
    """Weights to leave unchanged."""

    rules: Sequence[RankRule] = ()
    """Another rank for some weights; the first rule that matches applies."""


@dataclass(frozen=True, kw_only=True)
class Quantize(Reusable):
    """Quantize linear weights in a named scheme of compressed-tensors, or to blocks of GGUF files."""

    NAME: ClassVar[Literal["quantize"]] = "quantize"

    scheme: Scheme = "W4A16"
    """Quantization scheme of weights and activations."""

    rules: Sequence[SchemeRule] = ()
    """Another scheme for some weights, optionally with a group size; the first rule that matches applies."""

    method: Method = "best"
    """Quantization algorithm."""

    group_size: int | None = None
    """Consecutive inputs of a row that share a scale: 32, 64, 128 …, or -1 for one scale per row [default:
    depends on the scheme]."""

    iterations: int | None = None
    """With `method: autoround`, the number of steps per block [default: 200]."""

    batch: int | None = None
    """With `method: autoround`, the number of samples per step [default: 2]."""

    guide: Guide | None = None
    """With `method: gptq` or `autoround`, how the errors of layers are weighted."""

    damping: float | str | None = None
    """With `method: gptq` or `autoround`, the damping added to the diagonal of the Hessian, as a fraction
    of its mean [default: chosen for each layer input by the error on held-out samples]."""

    propagation: float | str | None = None
    """With `method: gptq` or `autoround`, the fraction of the error of earlier layers that is compensated,
    from 0 to 1; 0 does not run the original model in parallel [default: chosen for each layer by the
    error on held-out samples]."""

    ordered: bool | None = None
    """With `method: gptq` or `autoround`, quantize columns with large inputs first; groups remain those of
    the stored order [default: true]."""

    sweeps: int | None = None
    """With `method: gptq` or `autoround`, the maximum number of sweeps of coordinate descent, which
    improve the integers and the scales after all columns were quantized; 0 disables them [default: 3]."""

    correct: Correction | None = None
    """Low-rank correction of the quantization error, written as a LoRA adapter in the folder `adapter`:
    {"rank": 32}, or {"rank": 32, "importance": "none"} to ignore calibration samples [default: none]."""

    kv_cache: CacheFormat | CacheOptions | None = None
    """Format of the KV cache of a decoder, with scales found on calibration samples: fp8 or int8, with one
    scale per layer, or {"type": "fp8", "scales": "head"} with one per head [default: floats]."""

    observer: WeightObserver | None = None
    """Method that chooses the range of a scale [default: minmax for eight bits; for fewer bits l4, or mse
    with calibration samples]."""

    targets: Sequence[str] = ()
    """Tensors to quantize: names with `*`, or `re:` and a regular expression [default: linear weights]."""

    ignore: Sequence[str] = ()
    """Tensors to leave unchanged."""


@dataclass(frozen=True, kw_only=True)
class QuantizeDynamic(Reusable):
    """Quantize linear weights to int8."""

    NAME: ClassVar[Literal["quantize-dynamic"]] = "quantize-dynamic"

    granularity: GranularityKind = "channel"
    """Granularity of scales."""

    group_size: int | None = None
    """Consecutive inputs of a row that share a scale, with `granularity: group` [default: 128]."""

    symmetric: bool = True
    """Symmetric quantization: zero points are fixed at zero."""

    activations: ActivationRounding = "token"
    """Quantization of the inputs of quantized layers at run time."""

    observer: WeightObserver = "minmax"
    """Method that chooses the range of a scale."""

    embeddings: bool = False
    """Quantize embedding tables too (weights only)."""

    targets: Sequence[str] = ()
    """Tensors to quantize: names with `*`, or `re:` and a regular expression [default: linear weights]."""

    ignore: Sequence[str] = ()
    """Tensors to leave unchanged."""


@dataclass(frozen=True, kw_only=True)
class QuantizeStatic(Reusable):
    """Quantize weights to int8, and activations with scales found on calibration samples."""

    NAME: ClassVar[Literal["quantize-static"]] = "quantize-static"

    observer: ActivationObserver = "mse"
    """Method that chooses ranges of activations."""

    percentile: float = 99.99
    """Percentage of values that stay within the range, with `observer: percentile`."""

    headroom: bool = False
    """Widen ranges for unseen values, by a factor estimated with two-fold cross-validation over the
    samples."""

    symmetric: bool = False
    """Symmetric activations: zero points are zero, except for values that are never negative."""

    granularity: GranularityKind = "channel"
    """Granularity of weight scales: tensor or channel."""

    weight_observer: WeightObserver = "minmax"
    """Method that chooses ranges of weights."""

    embeddings: bool = True
    """Store embedding tables as int8 too (weights only)."""

    target: ActivationTarget = "vnni"
    """Processors to optimize for."""

    smooth: Literal["auto", "free", "none"] | float = "auto"
    """Strength of the migration of scales from activations to weights: auto, free (without additional
    operators), none, or 0 to 1."""

    bias_correction: bool = True
    """Correct biases for the mean error of rounding the weights."""

    accuracy_goal: Goal | None = None
    """Required quality, like {"max_drop": 0.01} or {"min_cosine": 0.99}: sensitive layers stay in floats
    until it is met."""

    targets: Sequence[str] = ()
    """Weights to quantize: names with `*`, or `re:` and a regular expression [default: linear layers and
    convolutions]."""

    ignore: Sequence[str] = ()
    """Weights to leave unchanged; their layers compute in floats."""


@dataclass(frozen=True, kw_only=True)
class Palettize(Reusable):
    """Store weights as indices into small codebooks (palettes)."""

    NAME: ClassVar[Literal["palettize"]] = "palettize"

    bits: int = 4
    """Bits per index, 2 to 8: a palette has 2^bits values."""

    group_size: int = 64
    """Maximum number of rows (output channels) of a weight that share a palette, or -1 for all rows."""

    importance: InputImportance = "auto"
    """Weighting of quantization errors when palettes are computed."""

    embeddings: bool = False
    """Palettize embedding tables too."""

    targets: Sequence[str] = ()
    """Tensors to palettize: names with `*`, or `re:` and a regular expression [default: linear weights and
    convolutions]."""

    ignore: Sequence[str] = ()
    """Tensors to leave unchanged."""


@dataclass(frozen=True, kw_only=True)
class Distill(Reusable):
    """Train a student on a teacher's outputs."""

    NAME: ClassVar[Literal["distill"]] = "distill"

    teacher: Path | None = None
    """The teacher model [default: the input model, before all passes]."""

    student: Student | None = None
    """The model to train: {"layers": [0, 2, 4]}, {"every": 2}, {"model": FOLDER}, {"config": FILE} (random
    weights), or {"eagle3": {"vocabulary": FILE}} (a head for speculative decoding, with the ids of its
    tokens) [default: the result of the previous passes]."""

    teacher_cache: Path | None = None
    """A folder that caches the largest logits of the teacher, so that each sample is computed once over
    all epochs and runs."""

    teacher_top: int | None = None
    """Number of logits per row to cache [default: 64]."""

    teacher_logits: Path | Sequence[Path] | None = None
    """Files with the logits of a teacher, instead of the teacher: .safetensors, or .jsonl with the
    responses of vLLM."""

    more_teachers: Sequence[MoreTeacher] = ()
    """Further teachers, whose probabilities are averaged with those of the teacher: {"model": FOLDER,
    "weight": 1, "cache": FOLDER}."""

    on_policy: OnPolicy | None = None
    """Let the student continue a fraction of the texts itself, and compare it with the teacher on its
    continuations: {"fraction": 0.5, "prompt_tokens": 32, "tokens": 64, "temperature": 1} [default: only
    texts of the data]."""

    losses: Losses | None = None
    """Losses and their weights: soft, hard, hidden, attention, embedding, contrastive [default: depends on
    model and data]."""

    optimizer: OptimizerKind = "adamw"
    """Optimizer."""

    learning_rate: float = 0.0001
    """Peak learning rate of the schedule."""

    weight_decay: float = 0.01
    """Weight decay; biases and norm weights are exempt."""

    momentum: float = 0.9
    """Momentum of sgd and muon."""

    betas: Sequence[float] | None = ()
    """Decays of the moments of adamw, adamw8bit and muon [default: [0.9, 0.999]]."""

    groups: Sequence[ParameterGroup] = ()
    """Learning rate or weight decay of a part of the tensors: {"targets": [PATTERN, ...], "learning_rate":
    RATE, "weight_decay": DECAY}."""

    schedule: Schedule | None = None
    """Learning rate schedule: { kind: cosine | linear | constant, warmup_steps: N, decay_steps: N }."""

    max_steps: int | None = None
    """Number of steps."""

    epochs: int | None = None
    """Passes over the data, instead of a number of steps [default: 1]."""

    batch_size: Literal["auto"] | int = "auto"
    """Samples per batch: a number, or auto."""

    gradient_accumulation: int = 1
    """Batches per step (gradient accumulation)."""

    clip_norm: float = 1.0
    """Maximum global gradient norm; 0 disables clipping."""

    precision: Precision = "f32"
    """Precision of activations and gradients; `f16` uses dynamic loss scaling."""

    gradient_checkpointing: Checkpointing = "none"
    """Recompute activations in the backward pass instead of storing them: none, blocks, or {"every": K}
    layers."""

    batch_norm: BatchNorm = "batch"
    """Statistics of batch normalization."""

    scales: QuantizerScales = "fixed"
    """Scales of quantized weights and activations."""

    average: float | None = None
    """Write an exponential moving average of the weights with this decay, such as 0.999."""

    offload: Offload | Sequence[Offload] | None = None
    """Tensors to keep in host memory while training on a GPU; `parameters` also works on the CPU and
    offloads to disk."""

    shard: Shard | None = None
    """Tensors to shard across processes."""

    shard_optimizer: bool = False
    """Shard the optimizer state across processes, same as shard: optimizer."""

    memory_limit: str | int | None = None
    """Device memory limit, such as 8GB; batches that need more are split into micro-batches."""

    checkpoint_every: CheckpointInterval | None = None
    """How often to save a checkpoint for `resume`: {"steps": N} or {"minutes": N} [default: {"minutes":
    10}]."""

    keep_checkpoints: int | None = None
    """Number of checkpoints to keep while training, to resume from an earlier one [default: 1]."""

    final_checkpoint: Path | None = None
    """Folder for a checkpoint of the last step, or of the last one before the decay of `decay_steps`:
    `resume` with a larger max_steps or epochs continues from it."""

    evaluate_every: int | None = None
    """Steps between evaluations on the evaluation data; the best weights are kept, which can be the
    initial ones."""

    patience: int | None = None
    """Stop after this many evaluations without improvement."""

    logs: LogFormat | Sequence[LogFormat] | None = None
    """Logs of every step, in addition to the CSV table."""

    targets: Sequence[str] = ()
    """Tensors to train: names with `*`, or `re:` and a regular expression [default: all floats]."""

    ignore: Sequence[str] = ()
    """Tensors to leave unchanged."""

    keep_zeros: bool | None = None
    """Keep zeros in float weights that were pruned by another tool; zeros of prune-unstructured are always
    kept."""

    augment: Augment | None = None
    """Change images randomly in each step: {"flip": True, "shift": PIXELS}."""

    masking: Masking | None = None
    """Mask random tokens, which a masked language model predicts: {"fraction": 0.15, "mask_token": TOKEN}."""

    dropout: float | None = None
    """Set hidden states to zero with this probability: embeddings, and the results of attention and feed-
    forward networks [default: none]."""

    attention_dropout: float | None = None
    """Set attention probabilities to zero with this probability [default: none]."""

    adapter: Adapter | None = None
    """Train low-rank adapters of linear layers instead of the weights: {"rank": 16, "alpha": 32,
    "targets": [PATTERN, ...], "merge": False} [default: none]."""


@dataclass(frozen=True, kw_only=True)
class Finetune(Reusable):
    """Train the model on labels, or on the next token."""

    NAME: ClassVar[Literal["finetune"]] = "finetune"

    classes: str | Sequence[str] | None = None
    """Names of the classes of a new classification head, for an encoder or a CNN without one."""

    labels: int | None = None
    """Number of classes of a new classification head, instead of their names."""

    losses: Losses | None = None
    """Losses and their weights: soft, hard, hidden, attention, embedding, contrastive [default: depends on
    model and data]."""

    optimizer: OptimizerKind = "adamw"
    """Optimizer."""

    learning_rate: float = 0.0001
    """Peak learning rate of the schedule."""

    weight_decay: float = 0.01
    """Weight decay; biases and norm weights are exempt."""

    momentum: float = 0.9
    """Momentum of sgd and muon."""

    betas: Sequence[float] | None = ()
    """Decays of the moments of adamw, adamw8bit and muon [default: [0.9, 0.999]]."""

    groups: Sequence[ParameterGroup] = ()
    """Learning rate or weight decay of a part of the tensors: {"targets": [PATTERN, ...], "learning_rate":
    RATE, "weight_decay": DECAY}."""

    schedule: Schedule | None = None
    """Learning rate schedule: { kind: cosine | linear | constant, warmup_steps: N, decay_steps: N }."""

    max_steps: int | None = None
    """Number of steps."""

    epochs: int | None = None
    """Passes over the data, instead of a number of steps [default: 1]."""

    batch_size: Literal["auto"] | int = "auto"
    """Samples per batch: a number, or auto."""

    gradient_accumulation: int = 1
    """Batches per step (gradient accumulation)."""

    clip_norm: float = 1.0
    """Maximum global gradient norm; 0 disables clipping."""

    precision: Precision = "f32"
    """Precision of activations and gradients; `f16` uses dynamic loss scaling."""

    gradient_checkpointing: Checkpointing = "none"
    """Recompute activations in the backward pass instead of storing them: none, blocks, or {"every": K}
    layers."""

    batch_norm: BatchNorm = "batch"
    """Statistics of batch normalization."""

    scales: QuantizerScales = "fixed"
    """Scales of quantized weights and activations."""

    average: float | None = None
    """Write an exponential moving average of the weights with this decay, such as 0.999."""

    offload: Offload | Sequence[Offload] | None = None
    """Tensors to keep in host memory while training on a GPU; `parameters` also works on the CPU and
    offloads to disk."""

    shard: Shard | None = None
    """Tensors to shard across processes."""

    shard_optimizer: bool = False
    """Shard the optimizer state across processes, same as shard: optimizer."""

    memory_limit: str | int | None = None
    """Device memory limit, such as 8GB; batches that need more are split into micro-batches."""

    checkpoint_every: CheckpointInterval | None = None
    """How often to save a checkpoint for `resume`: {"steps": N} or {"minutes": N} [default: {"minutes":
    10}]."""

    keep_checkpoints: int | None = None
    """Number of checkpoints to keep while training, to resume from an earlier one [default: 1]."""

    final_checkpoint: Path | None = None
    """Folder for a checkpoint of the last step, or of the last one before the decay of `decay_steps`:
    `resume` with a larger max_steps or epochs continues from it."""

    evaluate_every: int | None = None
    """Steps between evaluations on the evaluation data; the best weights are kept, which can be the
    initial ones."""

    patience: int | None = None
    """Stop after this many evaluations without improvement."""

    logs: LogFormat | Sequence[LogFormat] | None = None
    """Logs of every step, in addition to the CSV table."""

    targets: Sequence[str] = ()
    """Tensors to train: names with `*`, or `re:` and a regular expression [default: all floats]."""

    ignore: Sequence[str] = ()
    """Tensors to leave unchanged."""

    keep_zeros: bool | None = None
    """Keep zeros in float weights that were pruned by another tool; zeros of prune-unstructured are always
    kept."""

    augment: Augment | None = None
    """Change images randomly in each step: {"flip": True, "shift": PIXELS}."""

    masking: Masking | None = None
    """Mask random tokens, which a masked language model predicts: {"fraction": 0.15, "mask_token": TOKEN}."""

    dropout: float | None = None
    """Set hidden states to zero with this probability: embeddings, and the results of attention and feed-
    forward networks [default: none]."""

    attention_dropout: float | None = None
    """Set attention probabilities to zero with this probability [default: none]."""

    adapter: Adapter | None = None
    """Train low-rank adapters of linear layers instead of the weights: {"rank": 16, "alpha": 32,
    "targets": [PATTERN, ...], "merge": False} [default: none]."""


@dataclass(frozen=True, kw_only=True)
class Cast(Reusable):
    """Convert floats to another float format."""

    NAME: ClassVar[Literal["cast"]] = "cast"

    to: FloatFormat = "bf16"
    """Format to convert to."""

    overflow: Overflow = "error"
    """Treatment of values beyond the range of the format."""

    targets: Sequence[str] = ()
    """Tensors to convert: names with `*`, or `re:` and a regular expression [default: all floats]."""

    ignore: Sequence[str] = ()
    """Tensors to leave unchanged."""


@dataclass(frozen=True, kw_only=True)
class Dequantize(Reusable):
    """Dequantize weights, so that later passes can process them."""

    NAME: ClassVar[Literal["dequantize"]] = "dequantize"

    targets: Sequence[str] = ()
    """Tensors to dequantize: names with `*`, or `re:` and a regular expression [default: all quantized
    weights]."""

    ignore: Sequence[str] = ()
    """Tensors to leave quantized; activations then stay quantized too."""


@dataclass(frozen=True, kw_only=True)
class SplitExperts(Reusable):
    """Store the experts of each layer, which are one tensor, as separate linear layers, which passes and
    runtimes can quantize."""

    NAME: ClassVar[Literal["split-experts"]] = "split-experts"


@dataclass(frozen=True, kw_only=True)
class ExtractLanguageModel(Reusable):
    """Keep only the language model of a model with a vision tower, with the configuration and the names of
    a text model."""

    NAME: ClassVar[Literal["extract-language-model"]] = "extract-language-model"


@dataclass(frozen=True, kw_only=True)
class Rotate(Reusable):
    """Rotate the residual stream and the values of attention heads by orthogonal matrices, which
    distribute outliers of activations and weights over all features."""

    NAME: ClassVar[Literal["rotate"]] = "rotate"

    parts: Sequence[RotatedPart] = ()
    """Features to rotate [default: both]."""

    untie: bool = False
    """Store the output head separately if it is tied to the embedding table, which `residual` requires,
    because the factors of the last normalization are folded into the head."""


@dataclass(frozen=True, kw_only=True)
class Safetensors(Reusable):
    """The safetensors format."""

    NAME: ClassVar[Literal["safetensors"]] = "safetensors"

    layout: Layout = "auto"
    """Layout of the weights."""

    shard_size: str | int = "5GB"
    """Maximum size of a file: larger checkpoints are split; a larger tensor gets a separate file."""


@dataclass(frozen=True, kw_only=True)
class Gguf(Reusable):
    """The GGUF format."""

    NAME: ClassVar[Literal["gguf"]] = "gguf"

    type: FileType = "auto"
    """Type of the matrices; vectors are 32-bit floats."""

    types: Mapping[str, TensorType] | None = None
    """Other types for some matrices, by their names in GGUF files or in the model; the first pattern that
    matches applies."""

    importance: InputImportance = "auto"
    """How errors are weighted in the search for the scales of blocks."""

    imatrix: Path | None = None
    """An importance matrix of llama.cpp (`imatrix`), which is used instead of samples; relative to the
    recipe."""

    write_imatrix: bool | None = None
    """Write the importance computed from samples to imatrix.gguf, which llama.cpp reads."""


@dataclass(frozen=True, kw_only=True)
class Onnx(Reusable):
    """The ONNX format."""

    NAME: ClassVar[Literal["onnx"]] = "onnx"

    opset: int | None = None
    """Opset version, 17 to 24; higher versions need newer runtimes. By default 17, or 21 for weights with
    a scale per group."""

    precision: OnnxPrecision = "float32"
    """Floating-point precision of weights and arithmetic; int8 weights stay int8, and their layers compute
    in float32."""

    activations: ActivationType = "auto"
    """Integer type of statically quantized activations: uint8 is best for x86, int8 for ARM and GPUs."""

    weight_only: WeightOnly = "dequantize"
    """How layers with integer weights and float activations are written (W4A16, W8A16)."""

    tied_head: TiedHead = "float32"
    """How an output head that is tied to an int8 embedding is written."""

    float16_weights: bool = False
    """Whether matrices with 16-bit floats, as after `cast`, are stored as such, and converted to 32 bits
    when a runtime loads the file."""

    cache: bool = False
    """Whether a decoder has inputs and outputs for a KV cache, so that each step computes only new tokens;
    encoder-decoder models become three files."""


@dataclass(frozen=True, kw_only=True)
class Data(Reusable):
    """Samples: one of `text`, `images`, `arrays`, `source` and `mix`, and options for reading them."""

    text: Path | None = None
    """Text: .txt or .raw (one sample per line), .csv, .tsv or .jsonl."""

    images: Path | None = None
    """Images: a folder with one subfolder per class, or an IDX file (MNIST format, optionally .gz)."""

    arrays: Path | None = None
    """Arrays with one row per sample: .safetensors, .npz, or a folder with one .npy per input; or a folder
    with one such file per run."""

    mix: Sequence[Samples] = ()
    """Texts to mix, each with its own options and `weight`; other options apply to all of them."""

    weight: float | None = None
    """Probability of a sample of this text in `mix`, relative to the sum of all weights [default: 1]."""

    source: str | None = None
    """Name of a data source that the program has registered."""

    metric: str | None = None
    """Name of a metric that the program has registered [default: the metric of the task]."""

    task: Task | None = None
    """Task [default: chosen from the data and the model's outputs]."""

    text_column: int | str | None = None
    """Column of the text [default: text, sentence, or messages (chats, in .jsonl), or the only one with
    `header: true`]."""

    pair_column: int | str | None = None
    """Column of the second text of a pair; for encoder-decoder models, the target text."""

    negative_column: int | str | None = None
    """Column of a text that does not match the first one (a hard negative), for `task: contrastive`."""

    label_column: int | str | None = None
    """Column or array of the label: a class index or name, a score, or the decoder's target tokens."""

    label_kind: LabelKind | None = None
    """How labels identify classes [default: numbers by index; text by name, or by index if no class has
    this name]."""

    labels: Path | None = None
    """Labels of an IDX file of images."""

    header: bool | None = None
    """Whether the first line of .csv and .tsv contains the column names [default: true]."""

    delimiter: str | None = None
    """Character between columns [default: a comma, in .tsv a tab]."""

    quoting: bool | None = None
    """Whether values may be quoted with `"` [default: true, in .tsv false]."""

    inputs: Mapping[str, str] | None = None
    """Mapping of model inputs to arrays."""

    max_length: int | None = None
    """Maximum sequence length in tokens; longer texts are truncated [default: the model's maximum; 1024
    for perplexity]."""

    stride: int | None = None
    """Stride of the windows in tokens, for perplexity [default: windows do not overlap]."""

    samples: int | None = None
    """Maximum number of samples (windows, for perplexity) [default: all]."""

    sampling: WindowSampling | None = None
    """Which windows of a text to take, for perplexity [default: first]."""

    loss_on: LossOn | None = None
    """Tokens of chats that losses and perplexity predict [default: all]."""

    append_eos: bool | None = None
    """Whether to append the end-of-text token to every text that is split into windows [default: false]."""

    packing: bool | None = None
    """Whether to pack several short texts into a window, as one sample of a training [default: false]."""

    batch_size: int | None = None
    """Samples per batch [default: 32, or 4 windows of a text; fewer if that exceeds 2048 tokens]."""

    resize: int | Sequence[int] | None = None
    """Height and width to resize images to, or the length of the shorter side [default: from
    preprocessor_config.json]."""

    crop: int | Sequence[int] | None = None
    """Height and width of a center crop after resizing, or the side of a square."""

    layout: ImageLayout | None = None
    """Axis order of the model's image input [default: from the shape of the input]."""

    channels: ChannelOrder | None = None
    """Channel order of the model's image input [default: rgb]."""

    rescale: float | None = None
    """Factor on pixels [default: from preprocessor_config.json, otherwise 1 for arrays and integer inputs,
    1/255 for images]."""

    mean: float | Sequence[float] | None = None
    """Mean to subtract from each channel after applying the factor, in the model's channel order."""

    std: float | Sequence[float] | None = None
    """Standard deviation to divide each channel by."""


@dataclass(frozen=True, kw_only=True)
class Evaluate(Reusable):
    """Evaluation of the input model and the output model."""

    runtime: Sequence[Runtime] = ()
    """Runtimes that run the models [default: the built-in executor, and ONNX Runtime when ONNX is
    written]."""

    latency: bool = True
    """Measure the latency of one batch before and after."""

    precision: Precision = "f32"
    """Floating-point type of the built-in executor: 32-bit floats are the most precise, 16-bit floats are
    faster on a GPU."""

    benchmark: Benchmark | None = None
    """The benchmark on the Hugging Face Hub that the evaluation data is: the score is written to
    `.eval_results`, in the form that the Hub reads."""


Step: TypeAlias = Literal["prune-unstructured", "prune-structured", "search-structure", "prune-vocabulary", "decompose", "quantize", "quantize-dynamic", "quantize-static", "palettize", "distill", "finetune", "cast", "dequantize", "split-experts", "extract-language-model", "rotate"] | PruneUnstructured | PruneStructured | SearchStructure | PruneVocabulary | Decompose | Quantize | QuantizeDynamic | QuantizeStatic | Palettize | Distill | Finetune | Cast | Dequantize | SplitExperts | ExtractLanguageModel | Rotate
"""One step of a recipe: a pass with its options, or only its name."""


Export: TypeAlias = Literal["safetensors", "gguf", "onnx"] | Safetensors | Gguf | Onnx
"""One entry of a recipe's `export` list: a name, or a name with options."""


@dataclass(frozen=True, kw_only=True)
class Recipe(Reusable):
    """A recipe. Unknown keys are refused."""

    model: Path
    """The model: a folder, or a safetensors, ONNX or PyTorch file; relative to the recipe."""

    seed: int = 0
    """Seed of all random number generators."""

    allow_nonfinite: bool = False
    """Keep NaN and infinite weights instead of stopping with an error; as integers and FP4, NaN becomes
    zero and infinity the largest value."""

    sizes: Mapping[str, int | Sequence[int]] | None = None
    """Sizes of the dynamic axes of an .onnx file, by the name of the axis or of an input: { sequence: 128,
    input: [1, 512] }; or of the images in the texts of a model with a vision tower: { height: 448,
    width: 448 }."""

    measure: bool = True
    """Measure the fidelity of the outputs to the input model's if no evaluation data is configured."""

    data: DataSets | None = None
    """Data sets for calibration, training and evaluation."""

    memory: str | int | None = None
    """Memory limit of running models, like 8GB; models that exceed it run block by block [default: three
    quarters of the free memory]."""

    passes: Sequence[Step] = ()
    """Passes to apply, in order."""

    evaluate: Evaluate | None = None
    """How to measure before and after; needs `data: { evaluation: ... }`."""

    export: Sequence[Export] = ()
    """Output formats [default: safetensors; ONNX for an .onnx model]."""

    sbom: Sbom | None = None
    """Write a software bill of materials, bom.cdx.json: hashes of all files, the base model, data sets,
    metrics."""

    loads: str | Sequence[str] | None = None
    """Runtimes that must load the output: vllm, sglang, transformers, llama.cpp or onnxruntime; vllm@0.33
    is a version. Their rules are checked before the run starts and on the written files."""

    card: bool = True
    """Write a model card (README.md) to the output folder; otherwise the README.md of the model is copied."""

    output: Path | None = None
    """Output folder, relative to the recipe."""

    sweep: Mapping[str, Sequence[Any]] | None = None
    """Values to try, by key as for `overrides`: one run for each combination of values, each in a separate
    folder."""


class RecipeSettings(TypedDict, total=False):
    """Settings of a recipe with one pass, as parameters of the function of the pass."""

    evaluation: str | Samples | None
    """Evaluation data, for accuracy and other metrics."""

    calibration: str | Samples | None
    """Calibration data, for passes that collect activation statistics; labels are ignored."""

    train: str | Samples | None
    """Training data."""

    seed: int
    """Seed of all random number generators."""

    allow_nonfinite: bool
    """Keep NaN and infinite weights instead of stopping with an error; as integers and FP4, NaN becomes
    zero and infinity the largest value."""

    sizes: Mapping[str, int | Sequence[int]] | None
    """Sizes of the dynamic axes of an .onnx file, by the name of the axis or of an input: { sequence: 128,
    input: [1, 512] }; or of the images in the texts of a model with a vision tower: { height: 448,
    width: 448 }."""

    measure: bool
    """Measure the fidelity of the outputs to the input model's if no evaluation data is configured."""

    memory: str | int | None
    """Memory limit of running models, like 8GB; models that exceed it run block by block [default: three
    quarters of the free memory]."""

    evaluate: Evaluate | None
    """How to measure before and after; needs `data: { evaluation: ... }`."""

    export: Sequence[Export]
    """Output formats [default: safetensors; ONNX for an .onnx model]."""

    sbom: Sbom | None
    """Write a software bill of materials, bom.cdx.json: hashes of all files, the base model, data sets,
    metrics."""

    loads: str | Sequence[str] | None
    """Runtimes that must load the output: vllm, sglang, transformers, llama.cpp or onnxruntime; vllm@0.33
    is a version. Their rules are checked before the run starts and on the written files."""

    card: bool
    """Write a model card (README.md) to the output folder; otherwise the README.md of the model is copied."""


Samples: TypeAlias = Data | Path | InMemory
"""Samples: `Data`, a file or folder, or values in memory."""
