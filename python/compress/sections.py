"""Sections of reports.

Generated from `compress schema` by python/generate.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

SamplesFrom: TypeAlias = Literal["evaluation", "held-out", "synthetic"]
"""Origin of the samples of a [`Fidelity`].

- evaluation: Evaluation data of the recipe
- held-out: Samples of the calibration or training data that no pass has used
- synthetic: Random tokens or numbers: they reveal broken outputs, not the quality on real data
"""

SearchLoss: TypeAlias = Literal["kl-divergence", "cosine-distance", "weight-error"]
"""The loss that a search over formats minimizes.

- kl-divergence: KL divergence of the predictions, in nats per token
- cosine-distance: One minus the mean cosine similarity of the outputs to those of the original model
- weight-error: Sum of the squared errors of the weights relative to their squares, without samples
"""


@dataclass(frozen=True, kw_only=True)
class Tool:
    """Program that wrote the report."""

    name: str
    """`compress`."""

    version: str
    """Version of the crate."""

    commit: str | None = None
    """Commit from which it was built, if known."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Hardware and runtimes of a machine."""

    cores: int
    """Number of cores that this process may use."""

    simd: str
    """Instruction set of the kernels."""

    cpu: str | None = None
    """Name of the CPU."""

    memory_bytes: int | None = None
    """Size of the main memory in bytes."""

    gpu: str | None = None
    """Name of the GPU that was used, otherwise of the first GPU, if there is one."""

    device: str | None = None
    """Device on which models ran: `cpu` or `cuda:N`. Passes over weights run on the CPU."""

    onnxruntime: str | None = None
    """Version of ONNX Runtime, if it was used."""

    onnxruntime_path: str | None = None
    """File name of its library. The full path could contain private information."""

    int8: str = ""
    """Instructions for int8 products: `avx512-vnni`, `avx-vnni`, `dotprod`, or `none` if products are
    accumulated in 16 bits and can saturate."""


@dataclass(frozen=True, kw_only=True)
class ModelId:
    """Input model."""

    source: str
    """Folder or file."""

    blake3: str
    """BLAKE3 over the lines `name dtype shape blake3(values)`, sorted by name. It does not depend on the
    sharding."""

    architecture: str | None = None
    """`model_type` of `config.json`."""


@dataclass(frozen=True, kw_only=True)
class PassReport:
    """An applied pass."""

    name: str
    """Name of the pass."""

    options: Any
    """Its options, including defaults."""

    seconds: float
    """Time spent in the pass in seconds, summed over threads; reading and writing are included only in the
    totals."""

    tensors_changed: int
    """Number of weights that it changed."""

    details: Any
    """Details that are specific to the pass."""

    peak_rss_bytes: int | None = None
    """Peak resident memory of the process up to the end of the pass."""

    peak_vram_bytes: int | None = None
    """Peak GPU memory of the pass; `None` if it did not use a GPU."""

    macs: int | None = None
    """Multiply-accumulates of the models that it ran, counted if a memory trace was recorded; those of a
    backward pass count twice."""

    rule: str = ""
    """How the weights were selected; empty for passes that do not select weights."""

    unselected: Sequence[str] = ()
    """Float weights of two or more dimensions that it did not change, if it selects weights."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Size before and after."""

    before: Size
    """Size of the input."""

    after: Size
    """Size of the output."""

    ratio: float
    """Bytes of the input divided by bytes of the output."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """Size of a checkpoint."""

    parameters: int
    """Elements of all weights."""

    nonzero: int
    """Number of elements that are not zero."""

    tensors: int
    """Number of tensors in the files."""

    bytes: int
    """Bytes of the files."""

    bytes_zstd: int | None = None
    """Bytes of the files after compression with zstd, level 3; `None` in builds without zstd."""

    bytes_zstd_sampled: bool = False
    """Whether `bytes_zstd` was extrapolated from evenly spaced blocks."""


@dataclass(frozen=True, kw_only=True)
class Compute:
    """Computational cost of one run of the input and the output model."""

    sizes: Mapping[str, int]
    """Sizes of the dynamic dimensions."""

    before: Cost
    """Cost of the input model."""

    after: Cost
    """Cost of the output model."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Computational cost of one run."""

    macs: int
    """Multiply-accumulate operations. Zero weights count like other weights."""

    activation_bytes: int
    """Peak memory of the activations in bytes, with four bytes per element."""


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """Metric of the input and the output model, by runtime."""

    task: str
    """Evaluation task: `classification`, `language-modelling`, `embedding`, `fidelity`."""

    data: str
    """Path of the evaluation data."""

    samples: int
    """Number of samples (windows, for perplexity; samples with a label, for accuracy)."""

    before: Mapping[str, float]
    """Value of the input model."""

    after: Mapping[str, float]
    """Value of the output model."""

    more: Mapping[str, tuple[float, float]]
    """Additional metrics for the first runtime, before and after."""

    metric: str | None = None
    """Name of the metric; `None` without labels."""

    data_blake3: str | None = None
    """Hash of the contents of the evaluation data."""

    ci95: tuple[tuple[float, float], tuple[float, float]] | None = None
    """95 % confidence intervals for the first runtime, before and after."""

    drop: float | None = None
    """Difference by which the value of the first runtime is worse after than before; negative if it is
    better."""

    fidelity: Fidelity | None = None
    """Fidelity of the output model to the input model."""


@dataclass(frozen=True, kw_only=True)
class Fidelity:
    """Fidelity of the outputs of a model to those of another. All float outputs that both models have are
    compared, and each field holds the value of the output with the worst value."""

    output: str
    """The output with the lowest mean cosine."""

    cosine: float
    """Mean cosine similarity of the rows of an output."""

    cosine_min: float
    """Lowest cosine similarity of any row."""

    max_abs_error: float
    """Largest absolute difference, of the output with the largest difference relative to its values."""

    largest: float
    """Largest absolute value of that output in the first model."""

    sqnr_db: float | None = None
    """Signal to quantization noise ratio in decibels; `None` for equal outputs."""

    kl: float | None = None
    """Mean Kullback-Leibler divergence of the predicted distributions, in nats; only for logits."""

    label_kl: float | None = None
    """Mean Kullback-Leibler divergence of the probability of a label, in nats; only for the logits of
    multi-label classifiers."""

    top1_agreement: float | None = None
    """Fraction of the predictions with the same top class; only for logits."""

    outputs: Mapping[str, OutputFidelity] = field(default_factory=dict)
    """Fidelity of each output."""

    not_compared: Mapping[str, str] = field(default_factory=dict)
    """Outputs that were not compared, with the reasons."""

    equal: Mapping[str, float] = field(default_factory=dict)
    """Fraction of equal values of each output of integers or Booleans."""


@dataclass(frozen=True, kw_only=True)
class OutputFidelity:
    """Fidelity of one output. A row is a token (padding excluded) of a text, a distribution of `logits`,
    or else a sample."""

    cosine: float
    """Mean cosine similarity of the rows."""

    cosine_min: float
    """Lowest cosine similarity of any row."""

    max_abs_error: float
    """Largest absolute difference."""

    largest: float
    """Largest absolute value of the output in the first model; NaN if it has infinite or NaN values."""

    sqnr_db: float | None = None
    """Signal to quantization noise ratio over all rows in decibels; `None` for equal outputs."""

    kl: float | None = None
    """Mean Kullback-Leibler divergence, in nats; only for logits."""

    label_kl: float | None = None
    """Mean Kullback-Leibler divergence of the probability of a label, in nats; only for the logits of
    multi-label classifiers."""

    top1_agreement: float | None = None
    """Fraction of the rows with the same top class; only for logits."""


@dataclass(frozen=True, kw_only=True)
class MeasuredFidelity:
    """[`Fidelity`] of the output model to the input model, with the samples it was measured on."""

    samples_from: SamplesFrom
    """Origin of the samples."""

    samples: int
    """Number of samples."""

    output: str
    """The output with the lowest mean cosine."""

    cosine: float
    """Mean cosine similarity of the rows of an output."""

    cosine_min: float
    """Lowest cosine similarity of any row."""

    max_abs_error: float
    """Largest absolute difference, of the output with the largest difference relative to its values."""

    largest: float
    """Largest absolute value of that output in the first model."""

    data: str | None = None
    """Path of the data; `None` for synthetic samples."""

    first_sample: str | None = None
    """Hash of the inputs of the first held-out sample; `None` for other samples, and for models with other
    tokens."""

    sqnr_db: float | None = None
    """Signal to quantization noise ratio in decibels; `None` for equal outputs."""

    kl: float | None = None
    """Mean Kullback-Leibler divergence of the predicted distributions, in nats; only for logits."""

    label_kl: float | None = None
    """Mean Kullback-Leibler divergence of the probability of a label, in nats; only for the logits of
    multi-label classifiers."""

    top1_agreement: float | None = None
    """Fraction of the predictions with the same top class; only for logits."""

    outputs: Mapping[str, OutputFidelity] = field(default_factory=dict)
    """Fidelity of each output."""

    not_compared: Mapping[str, str] = field(default_factory=dict)
    """Outputs that were not compared, with the reasons."""

    equal: Mapping[str, float] = field(default_factory=dict)
    """Fraction of equal values of each output of integers or Booleans."""


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """Continuations of a prompt by both models, with greedy decoding."""

    prompt: str
    """The prompt."""

    before: str
    """Continuation by the input model."""

    after: str
    """Continuation by the output model."""

    first_difference: int | None = None
    """Index of the first generated token that differs; `None` if all are equal."""


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Latency of one batch for the input and the output model, measured in alternation."""

    runtime: str
    """Runtime that ran the models."""

    threads: int
    """Threads per operator."""

    batch: Sequence[int]
    """Shape of the first input."""

    runs: int
    """Measured runs per model."""

    before_ms: Quantiles
    """Latency of the input model."""

    after_ms: Quantiles
    """Latency of the output model."""

    speedup: float
    """Median of the ratios of consecutive runs, which other load on the machine affects least."""

    speedup_quartiles: tuple[float, float] | None = None
    """First and third quartile of the ratios of consecutive runs."""


@dataclass(frozen=True, kw_only=True)
class Quantiles:
    """Median and 95th percentile of the latency in milliseconds."""

    p50: float
    """The median."""

    p95: float
    """The 95th percentile."""


@dataclass(frozen=True, kw_only=True)
class FormatSearch:
    """A search over the formats of weights, as by `compress auto`."""

    runtime: str
    """The runtime that loads the output."""

    chosen: SearchPoint
    """The mixture that was written."""

    points: Sequence[SearchPoint]
    """Mixtures that were measured, by ascending size."""

    front: Sequence[SearchPoint]
    """The predicted front by ascending size, thinned to at most 200 points."""

    units: Sequence[SearchUnit]
    """The format of each unit."""

    measured_on: str | None = None
    """The samples on which points were measured."""

    max_kl: float | None = None
    """The limit of the KL divergence, in nats per token, if the search had one."""

    max_loss: float | None = None
    """The limit of the relative loss of the score in percent, if the search had one; without labels, of
    the cosine distance."""

    max_latency_ms: float | None = None
    """The limit of the latency in milliseconds, if the search had one."""

    loss: SearchLoss = "kl-divergence"
    """The loss that was minimized."""

    metric: SearchMetric | None = None
    """The metric of the task, if the limit is one of its score."""

    times: LatencyTable | None = None
    """The measured times, if the limit is one of the latency."""

    methods: Sequence[SearchMethod] = ()
    """Methods that were tried for the mixture that was written, if a time was specified for them."""

    larger: SearchPoint | None = None
    """The mixture for 5 % more bytes, or for 5 % more time if the limit is one of the latency. Absent if
    it has no less expected loss."""


@dataclass(frozen=True, kw_only=True)
class SearchMetric:
    """The metric of the task, which a search has measured."""

    name: str
    """`accuracy`, `perplexity`, `spearman`."""

    original: float
    """Score of the original model."""

    measured_on: str
    """Description of the samples."""


@dataclass(frozen=True, kw_only=True)
class LatencyTable:
    """Latencies of a model and of mixtures of its formats, on one machine. `compress auto --times` reads
    and writes them."""

    runtime: str
    """The runtime and its version."""

    parameters: int
    """Number of parameters of the model."""

    threads: int
    """Threads per operator."""

    inputs: Mapping[str, Sequence[int]]
    """Shape of each input."""

    formats: Sequence[str]
    """Names of the formats."""

    units: Sequence[str]
    """Names of the units; empty as long as only the original model has been measured."""

    original_ms: float
    """Median latency of the original model in milliseconds."""

    mixtures: Sequence[MixtureLatency]
    """Measured mixtures."""


@dataclass(frozen=True, kw_only=True)
class MixtureLatency:
    """The latency of a mixture of formats, measured in alternation with the original model."""

    options: Sequence[int]
    """Index of the format of each unit."""

    ratio: float
    """Latency relative to that of the original model in the same measurement."""

    uncertainty: float
    """Uncertainty of the ratio: half the width of its 95 % confidence interval."""


@dataclass(frozen=True, kw_only=True)
class SearchMethod:
    """A method of quantization that was tried for a mixture."""

    method: str
    """Its options."""

    seconds: float
    """Time that it took."""

    chosen: bool
    """Whether the output was written with it."""

    measured: float | None = None
    """Loss on held-out samples; absent if the time was too short."""

    failed: str | None = None
    """The error that ended it; the output is written with another method."""


@dataclass(frozen=True, kw_only=True)
class SearchPoint:
    """A mixture of formats."""

    bits: float
    """Mean bits of the searched weights, with scales."""

    bytes: int
    """Size of all weights, or of the file if the output is a single file."""

    predicted: float
    """Expected loss."""

    name: str | None = None
    """Name of a common mixture, such as Q4_K_M; absent for points of the front."""

    measured: float | None = None
    """Loss on held-out samples with weights rounded to nearest."""

    score: float | None = None
    """Score on data with labels, if the limit is one of the score."""

    predicted_ms: float | None = None
    """Expected latency in milliseconds, if the limit is one of the latency."""

    measured_ms: float | None = None
    """Measured latency in milliseconds, if the limit is one of the latency."""


@dataclass(frozen=True, kw_only=True)
class SearchUnit:
    """Weights that have the same format."""

    name: str
    """Name of the fused layer or tensor."""

    format: str
    """Its format."""

    bytes: int
    """Its size in this format."""

    loss: float
    """Its expected loss in this format."""

    larger: str | None = None
    """Its format in the mixture for 5 % more bytes or time, if it differs."""

    milliseconds: float | None = None
    """Expected difference from the latency of the layer in the original model in milliseconds, if the
    limit is one of the latency."""


@dataclass(frozen=True, kw_only=True)
class DraftQuality:
    """Measurements of a draft with the model that verifies its proposals, as by `compress draft`."""

    prompts: int
    """Number of held-out prompts."""

    prompts_from: str
    """File of the prompts."""

    tokens: int
    """Maximum number of generated tokens per prompt."""

    runs: Sequence[DraftRun]
    """Measurements with each number of draft tokens."""

    tokens_per_second: float | None = None
    """Generated tokens per second of the model without the draft, after the first token."""

    recommended: int | None = None
    """The number of draft tokens with the most tokens per second."""


@dataclass(frozen=True, kw_only=True)
class DraftRun:
    """Greedy decoding with a number of draft tokens."""

    draft_tokens: int
    """Maximum number of tokens that the draft proposes per step."""

    acceptance_by_position: Sequence[float]
    """The same by the position of a proposal in its step."""

    same_texts: int
    """Number of prompts with the same text as without the draft."""

    tokens_per_step: float | None = None
    """Mean number of tokens per forward pass of the model."""

    acceptance_rate: float | None = None
    """Share of the proposals that the model accepted."""

    tokens_per_second: float | None = None
    """Generated tokens per second, after the first token."""


@dataclass(frozen=True, kw_only=True)
class RuntimeCheck:
    """A runtime whose rules the output complies with."""

    runtime: str
    """Name of the runtime."""

    version: str
    """Version of the runtime."""

    rules: int
    """Number of rules, all of which were checked on the written files. The runtime was not run."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One weight."""

    name: str
    """Name in the checkpoint."""

    shape: Sequence[int]
    """Sizes, outermost first."""

    encoding: str
    """Description of how it is stored."""

    bytes_before: int
    """Stored bytes before, including scales."""

    bytes_after: int
    """Stored bytes after, including scales and masks."""

    zeros: int
    """Number of zeros after."""

    sqnr_db: float | None = None
    """Signal-to-noise ratio relative to the input in dB; `None` if the values did not change."""


@dataclass(frozen=True, kw_only=True)
class WeightHistogram:
    """Histograms of a sample of the values of a weight before and after, with bins of equal width."""

    name: str
    """Name in the checkpoint."""

    low: float
    """Lower end of the first bin, which also counts smaller values."""

    high: float
    """Upper end of the last bin, which also counts larger values."""

    before: Sequence[int]
    """Counts of the input's values."""

    after: Sequence[int]
    """Counts of the written values."""


@dataclass(frozen=True, kw_only=True)
class OutputFile:
    """A file of the output."""

    format: str
    """Format that it belongs to."""

    path: str
    """Name in the folder."""

    bytes: int
    """Size in bytes."""

    blake3: str
    """BLAKE3 of the file, as `b3sum` prints it."""

    verified: Verified
    """Result of the verification."""


@dataclass(frozen=True, kw_only=True)
class Verified:
    """Verification of a written file."""

    how: str
    """Description of the verification."""

    max_abs_error: float
    """Largest absolute difference to the expected values; 0 if compared bit for bit."""

    ok: bool
    """Whether it passed."""


@dataclass(frozen=True, kw_only=True)
class CarriedFile:
    """A file in addition to the outputs of formats."""

    path: str
    """Name in the folder."""

    bytes: int
    """Size in bytes."""

    blake3: str
    """BLAKE3 of the file, as `b3sum` prints it."""


@dataclass(frozen=True, kw_only=True)
class SignatureFile:
    """The signature of an output."""

    path: str
    """Name in the folder. The signature covers all files of the folder, including the report."""

    public_key_sha256: str
    """SHA-256 of the PEM file of the public key."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Estimated and actual times of a run."""

    stages: Sequence[StageTime]
    """The stages in order."""

    estimated_seconds: float | None = None
    """Sum of the estimated times of the stages."""


@dataclass(frozen=True, kw_only=True)
class StageTime:
    """Estimated and actual time of a stage."""

    name: str
    """Name of the pass, or of the stage."""

    estimated_seconds: float | None = None
    """Estimated time in seconds; `None` if the work was not known in advance."""

    at_most: bool = False
    """Whether the estimate is an upper bound of the work, because the stage may do less."""

    seconds: float | None = None
    """Actual time in seconds; `None` if a result of an earlier run was used."""


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Totals of a run."""

    seconds: float
    """Wall time in seconds."""

    peak_rss_bytes: int | None = None
    """Peak resident memory of the process."""

    peak_vram_bytes: int | None = None
    """Peak GPU memory; `None` if no GPU was used."""


@dataclass(frozen=True, kw_only=True)
class Fields:
    """A report, as serialized to `report.json`."""

    schema: int
    """Version of the schema."""

    tool: Tool
    """Program that wrote the report."""

    environment: Environment
    """Machine on which the run was executed."""

    model: ModelId
    """Input model."""

    seed: int
    """Seed of all random number generators."""

    recipe: Any
    """The recipe, including defaults."""

    passes: Sequence[PassReport]
    """The passes, in order."""

    size: Sizes
    """Stored sizes before and after."""

    layers: Sequence[Layer]
    """The weights."""

    outputs: Sequence[OutputFile]
    """Files that were written and verified."""

    notes: Sequence[str]
    """Notes and warnings: ineffective settings, and skipped steps with the reason."""

    totals: Totals
    """Totals of the run."""

    compute: Compute | None = None
    """Cost of one forward pass, if the model has a graph."""

    accuracy: Accuracy | None = None
    """Scores before and after, if evaluation data was configured."""

    fidelity: MeasuredFidelity | None = None
    """Fidelity of the outputs to the input model's, if the model could be run."""

    continuations: Sequence[Continuation] = ()
    """Continuations of prompts before and after, for language models that were measured on texts."""

    latency: Latency | None = None
    """Latency of one batch, if it was measured."""

    search: FormatSearch | None = None
    """The search that chose the formats, if there was one."""

    draft: DraftQuality | None = None
    """Speculative decoding with the output as the draft of the input, as measured by `compress draft`."""

    loads: Sequence[RuntimeCheck] = ()
    """The runtimes that must load the output, whose rules it complies with."""

    histograms: Sequence[WeightHistogram] = ()
    """Histograms of the values of the weights that changed most."""

    carried: Sequence[CarriedFile] = ()
    """All other files of the folder, except report.json: copied from the input, or written for this run."""

    signature: SignatureFile | None = None
    """The signature of the folder, if the run signed it."""

    timing: Timing | None = None
    """Estimated and actual times, if the rates of the machine were known."""
