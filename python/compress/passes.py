"""One function for each pass.

Generated from `compress schema` by python/generate.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Unpack

from . import recipe
from ._process import Path
from ._run import Settings, run_pass
from .report import Report

__all__ = ["prune_unstructured", "prune_structured", "search_structure", "prune_vocabulary", "decompose", "quantize", "quantize_dynamic", "quantize_static", "palettize", "distill", "finetune", "cast", "dequantize", "split_experts", "extract_language_model", "rotate"]


def prune_unstructured(
    model: Path,
    output: Path,
    *,
    amount: float | int | str | None = None,
    importance: recipe.Importance = "l1",
    scope: recipe.Scope = "tensor",
    pattern: str | None = None,
    targets: Sequence[str] = (),
    ignore: Sequence[str] = (),
    rules: Sequence[recipe.Rule] = (),
    **settings: Unpack[Settings],
) -> Report:
    """Zero the weights that are smallest in absolute value.

    Args:
        model: the model: a folder or a file, or a remote one like hf:org/name.
        output: folder to write.
        amount: Weights to zero: a fraction like 0.5 or 50%, or a count like 1000 or `50 units` [default:
            0.5].
        importance: Importance criterion: magnitude, or a criterion that uses calibration samples.
        scope: Rank weights inside each tensor, or across all of them.
        pattern: Keep N of every M consecutive inputs, like 2:4, instead of an amount.
        targets: Tensors to prune: names with `*`, or `re:` and a regular expression [default: linear and
            convolution weights; with calibration samples, linear weights].
        ignore: Tensors to leave unchanged.
        rules: Another amount for some tensors, which are then ranked separately; the first rule that matches
            applies.
        settings: calibration, evaluation, force and more, as listed in `Settings`.
    """
    step = recipe.PruneUnstructured(amount=amount, importance=importance, scope=scope, pattern=pattern,
        targets=targets, ignore=ignore, rules=rules)
    return run_pass(step, model, output, settings)


def prune_structured(
    model: Path,
    output: Path,
    *,
    dims: Sequence[recipe.PrunedPart] = (),
    amount: float | int | str | recipe.Amounts | None = None,
    target: recipe.CostTarget | None = None,
    importance: recipe.UnitImportance = "auto",
    scope: recipe.Scope | None = None,
    round_to: int = 8,
    minimum: int | None = None,
    uniform: bool | None = None,
    repair: recipe.Repair = "none",
    targets: Sequence[str] = (),
    ignore: Sequence[str] = (),
    **settings: Unpack[Settings],
) -> Report:
    """Remove heads, neurons, channels, width, layers or experts from a model: smaller tensors, less to compute.

    Args:
        model: the model: a folder or a file, or a remote one like hf:org/name.
        output: folder to write.
        dims: Parts to remove [default: heads, mlp and channels, if the model has them].
        amount: Amount to remove from each group: a fraction like 0.25 or 25%, a number of units, or an amount
            per kind: {"heads": 0.25, "mlp": 64} [default: 0.25].
        target: Instead of an amount, the fraction of the cost to keep: {"macs": 0.5} or {"macs": "50%"},
            {"params": 0.5} or {"latency": 0.5}.
        importance: Importance criterion; the least important units are removed.
        scope: Remove the same fraction of every group, or rank all groups jointly [default: tensor; global
            for a target].
        round_to: Remaining widths are multiples of this number; heads are always removed completely.
        minimum: Minimum number of remaining units per group [default: one head, else `round_to`].
        uniform: Prune all layers to the same width [default: true if config.json supports only one width].
        repair: Adjustment of the layers that read removed units.
        targets: Tensors whose units may be removed: names with `*`, or `re:` and a regular expression
            [default: all].
        ignore: Tensors that keep all their units.
        settings: calibration, evaluation, force and more, as listed in `Settings`.
    """
    step = recipe.PruneStructured(dims=dims, amount=amount, target=target, importance=importance, scope=scope,
        round_to=round_to, minimum=minimum, uniform=uniform, repair=repair, targets=targets, ignore=ignore)
    return run_pass(step, model, output, settings)


def search_structure(
    model: Path,
    output: Path,
    *,
    limit: recipe.StructureLimit | None = None,
    widths: Sequence[float | str] = (),
    uniform: bool | None = None,
    round_to: int = 8,
    repair: recipe.Repair = "least-squares",
    steps: int = 0,
    learning_rate: float = 0.0003,
    baselines: bool = False,
    **settings: Unpack[Settings],
) -> Report:
    """Choose the width of each layer, and the parts to remove, for a number of parameters: scores of each option on held-out samples, and the best choice.

    Args:
        model: the model: a folder or a file, or a remote one like hf:org/name.
        output: folder to write.
        limit: Limit of the size: {"layers": 0.5} (fraction of the parameters of all layers), {"params":
            12000000} or {"bytes": "50MB"}.
        widths: Fractions of the neurons and of the heads of a layer that options keep.
        uniform: Choose the same widths for all layers, and remove only whole layers [default: true if
            config.json supports only one width].
        round_to: Numbers of neurons are multiples of this number.
        repair: Adjustment of the layers that read removed units: none or least-squares.
        steps: Training steps of each option with fewer units, on the original outputs of its block.
        learning_rate: Learning rate of the first step, which decreases linearly.
        baselines: Also measure two usual choices of the same size: the least influential layers removed, and
            the same widths for all layers.
        settings: calibration, evaluation, force and more, as listed in `Settings`.
    """
    step = recipe.SearchStructure(limit=limit, widths=widths, uniform=uniform, round_to=round_to,
        repair=repair, steps=steps, learning_rate=learning_rate, baselines=baselines)
    return run_pass(step, model, output, settings)


def prune_vocabulary(
    model: Path,
    output: Path,
    *,
    keep: Path | Sequence[Path] | None = None,
    languages: str | Sequence[str] | None = None,
    text_column: int | str | None = None,
    vocab_size: int | None = None,
    min_count: int = 1,
    multiple_of: int = 1,
    **settings: Unpack[Settings],
) -> Report:
    """Remove tokens that a corpus does not need: smaller embeddings and output heads.

    Args:
        model: the model: a folder or a file, or a remote one like hf:org/name.
        output: folder to write.
        keep: Texts whose tokens remain: .txt, .raw, .csv, .tsv or .jsonl.
        languages: Languages whose tokens remain, such as ["en", "de"]: all tokens in their scripts, and
            digits, punctuation and symbols.
        text_column: Column of the text in .csv, .tsv and .jsonl [default: text, sentence, or messages (chats,
            in .jsonl)].
        vocab_size: Maximum number of tokens: the most frequent ones of the texts; without texts, the first by
            merge rank (BPE), score (Unigram) or id (WordPiece).
        min_count: Number of occurrences below which a token of the texts is removed.
        multiple_of: Round the number of rows up to a multiple of this number, by keeping more tokens, or the
            maximum number of tokens down.
        settings: calibration, evaluation, force and more, as listed in `Settings`.
    """
    step = recipe.PruneVocabulary(keep=keep, languages=languages, text_column=text_column,
        vocab_size=vocab_size, min_count=min_count, multiple_of=multiple_of)
    return run_pass(step, model, output, settings)


def decompose(
    model: Path,
    output: Path,
    *,
    rank: float | int | str = 0.5,
    importance: recipe.InputImportance = "auto",
    targets: Sequence[str] = (),
    ignore: Sequence[str] = (),
    rules: Sequence[recipe.RankRule] = (),
    **settings: Unpack[Settings],
) -> Report:
    """Replace layers by two low-rank layers: fewer parameters, less to compute.

    Args:
        model: the model: a folder or a file, or a remote one like hf:org/name.
        output: folder to write.
        rank: Rank of the two layers: a number, like 64, or the fraction of the parameters of the original
            layer that they have in total, like 0.5 or 50%.
        importance: Weighting of approximation errors.
        targets: Weights to decompose: names with `*`, or `re:` and a regular expression [default: linear
            weights]; convolutions must be listed explicitly.
        ignore: Weights to leave unchanged.
        rules: Another rank for some weights; the first rule that matches applies.
        settings: calibration, evaluation, force and more, as listed in `Settings`.
    """
    step = recipe.Decompose(rank=rank, importance=importance, targets=targets, ignore=ignore, rules=rules)
    return run_pass(step, model, output, settings)


def quantize(
    model: Path,
    output: Path,
    *,
    scheme: recipe.Scheme = "W4A16",
    rules: Sequence[recipe.SchemeRule] = (),
    method: recipe.Method = "best",
    group_size: int | None = None,
    iterations: int | None = None,
    batch: int | None = None,
    guide: recipe.Guide | None = None,
    damping: float | str | None = None,
    propagation: float | str | None = None,
    ordered: bool | None = None,
    sweeps: int | None = None,
    correct: recipe.Correction | None = None,
    kv_cache: recipe.CacheFormat | recipe.CacheOptions | None = None,
    observer: recipe.WeightObserver | None = None,
    targets: Sequence[str] = (),
    ignore: Sequence[str] = (),
    **settings: Unpack[Settings],
) -> Report:
    """Quantize linear weights in a named scheme: W4A16, W8A8, Q4_K_M ….

    Args:
        model: the model: a folder or a file, or a remote one like hf:org/name.
        output: folder to write.
        scheme: Quantization scheme of weights and activations.
        rules: Another scheme for some weights, optionally with a group size; the first rule that matches
            applies.
        method: Quantization algorithm.
        group_size: Consecutive inputs of a row that share a scale: 32, 64, 128 …, or -1 for one scale per row
            [default: depends on the scheme].
        iterations: With `method: autoround`, the number of steps per block [default: 200].
        batch: With `method: autoround`, the number of samples per step [default: 2].
        guide: With `method: gptq` or `autoround`, how the errors of layers are weighted.
        damping: With `method: gptq` or `autoround`, the damping added to the diagonal of the Hessian, as a
            fraction of its mean [default: chosen for each layer input by the error on held-out samples].
        propagation: With `method: gptq` or `autoround`, the fraction of the error of earlier layers that is
            compensated, from 0 to 1; 0 does not run the original model in parallel [default: chosen for each
            layer by the error on held-out samples].
        ordered: With `method: gptq` or `autoround`, quantize columns with large inputs first; groups remain
            those of the stored order [default: true].
        sweeps: With `method: gptq` or `autoround`, the maximum number of sweeps of coordinate descent, which
            improve the integers and the scales after all columns were quantized; 0 disables them [default:
            3].
        correct: Low-rank correction of the quantization error, written as a LoRA adapter in the folder
            `adapter`: {"rank": 32}, or {"rank": 32, "importance": "none"} to ignore calibration samples
            [default: none].
        kv_cache: Format of the KV cache of a decoder, with scales found on calibration samples: fp8 or int8,
            with one scale per layer, or {"type": "fp8", "scales": "head"} with one per head [default:
            floats].
        observer: Method that chooses the range of a scale [default: minmax for eight bits; for fewer bits l4,
            or mse with calibration samples].
        targets: Tensors to quantize: names with `*`, or `re:` and a regular expression [default: linear
            weights].
        ignore: Tensors to leave unchanged.
        settings: calibration, evaluation, force and more, as listed in `Settings`.
    """
    step = recipe.Quantize(scheme=scheme, rules=rules, method=method, group_size=group_size,
        iterations=iterations, batch=batch, guide=guide, damping=damping, propagation=propagation,
        ordered=ordered, sweeps=sweeps, correct=correct, kv_cache=kv_cache, observer=observer,
        targets=targets, ignore=ignore)
    return run_pass(step, model, output, settings)


def quantize_dynamic(
    model: Path,
    output: Path,
    *,
    granularity: recipe.GranularityKind = "channel",
    group_size: int | None = None,
    symmetric: bool = True,
    activations: recipe.ActivationRounding = "token",
    observer: recipe.WeightObserver = "minmax",
    embeddings: bool = False,
    targets: Sequence[str] = (),
    ignore: Sequence[str] = (),
    **settings: Unpack[Settings],
) -> Report:
    """Quantize linear weights to int8; activations are quantized dynamically at run time, or not at all.

    Args:
        model: the model: a folder or a file, or a remote one like hf:org/name.
        output: folder to write.
        granularity: Granularity of scales.
        group_size: Consecutive inputs of a row that share a scale, with `granularity: group` [default: 128].
        symmetric: Symmetric quantization: zero points are fixed at zero.
        activations: Quantization of the inputs of quantized layers at run time.
        observer: Method that chooses the range of a scale.
        embeddings: Quantize embedding tables too (weights only).
        targets: Tensors to quantize: names with `*`, or `re:` and a regular expression [default: linear
            weights].
        ignore: Tensors to leave unchanged.
        settings: calibration, evaluation, force and more, as listed in `Settings`.
    """
    step = recipe.QuantizeDynamic(granularity=granularity, group_size=group_size, symmetric=symmetric,
        activations=activations, observer=observer, embeddings=embeddings, targets=targets, ignore=ignore)
    return run_pass(step, model, output, settings)


def quantize_static(
    model: Path,
    output: Path,
    *,
    observer: recipe.ActivationObserver = "mse",
    percentile: float = 99.99,
    headroom: bool = False,
    symmetric: bool = False,
    granularity: recipe.GranularityKind = "channel",
    weight_observer: recipe.WeightObserver = "minmax",
    embeddings: bool = True,
    target: recipe.ActivationTarget = "vnni",
    smooth: Literal["auto", "free", "none"] | float = "auto",
    bias_correction: bool = True,
    accuracy_goal: recipe.Goal | None = None,
    targets: Sequence[str] = (),
    ignore: Sequence[str] = (),
    **settings: Unpack[Settings],
) -> Report:
    """Quantize weights to int8, and activations with scales found on calibration samples.

    Args:
        model: the model: a folder or a file, or a remote one like hf:org/name.
        output: folder to write.
        observer: Method that chooses ranges of activations.
        percentile: Percentage of values that stay within the range, with `observer: percentile`.
        headroom: Widen ranges for unseen values, by a factor estimated with two-fold cross-validation over
            the samples.
        symmetric: Symmetric activations: zero points are zero, except for values that are never negative.
        granularity: Granularity of weight scales: tensor or channel.
        weight_observer: Method that chooses ranges of weights.
        embeddings: Store embedding tables as int8 too (weights only).
        target: Processors to optimize for.
        smooth: Strength of the migration of scales from activations to weights: auto, free (without
            additional operators), none, or 0 to 1.
        bias_correction: Correct biases for the mean error of rounding the weights.
        accuracy_goal: Required quality, like {"max_drop": 0.01} or {"min_cosine": 0.99}: sensitive layers
            stay in floats until it is met.
        targets: Weights to quantize: names with `*`, or `re:` and a regular expression [default: linear
            layers and convolutions].
        ignore: Weights to leave unchanged; their layers compute in floats.
        settings: calibration, evaluation, force and more, as listed in `Settings`.
    """
    step = recipe.QuantizeStatic(observer=observer, percentile=percentile, headroom=headroom,
        symmetric=symmetric, granularity=granularity, weight_observer=weight_observer, embeddings=embeddings,
        target=target, smooth=smooth, bias_correction=bias_correction, accuracy_goal=accuracy_goal,
        targets=targets, ignore=ignore)
    return run_pass(step, model, output, settings)


def palettize(
    model: Path,
    output: Path,
    *,
    bits: int = 4,
    group_size: int = 64,
    importance: recipe.InputImportance = "auto",
    embeddings: bool = False,
    targets: Sequence[str] = (),
    ignore: Sequence[str] = (),
    **settings: Unpack[Settings],
) -> Report:
    """Store weights as indices into small codebooks (palettes), found by k-means.

    Args:
        model: the model: a folder or a file, or a remote one like hf:org/name.
        output: folder to write.
        bits: Bits per index, 2 to 8: a palette has 2^bits values.
        group_size: Maximum number of rows (output channels) of a weight that share a palette, or -1 for all
            rows.
        importance: Weighting of quantization errors when palettes are computed.
        embeddings: Palettize embedding tables too.
        targets: Tensors to palettize: names with `*`, or `re:` and a regular expression [default: linear
            weights and convolutions].
        ignore: Tensors to leave unchanged.
        settings: calibration, evaluation, force and more, as listed in `Settings`.
    """
    step = recipe.Palettize(bits=bits, group_size=group_size, importance=importance, embeddings=embeddings,
        targets=targets, ignore=ignore)
    return run_pass(step, model, output, settings)


def distill(
    model: Path,
    output: Path,
    *,
    teacher: Path | None = None,
    student: recipe.Student | None = None,
    teacher_cache: Path | None = None,
    teacher_top: int | None = None,
    teacher_logits: Path | Sequence[Path] | None = None,
    more_teachers: Sequence[recipe.MoreTeacher] = (),
    on_policy: recipe.OnPolicy | None = None,
    losses: recipe.Losses | None = None,
    optimizer: recipe.OptimizerKind = "adamw",
    learning_rate: float = 0.0001,
    weight_decay: float = 0.01,
    momentum: float = 0.9,
    betas: Sequence[float] | None = (),
    groups: Sequence[recipe.ParameterGroup] = (),
    schedule: recipe.Schedule | None = None,
    max_steps: int | None = None,
    epochs: int | None = None,
    batch_size: Literal["auto"] | int = "auto",
    gradient_accumulation: int = 1,
    clip_norm: float = 1.0,
    precision: recipe.Precision = "f32",
    gradient_checkpointing: recipe.Checkpointing = "none",
    batch_norm: recipe.BatchNorm = "batch",
    scales: recipe.QuantizerScales = "fixed",
    average: float | None = None,
    offload: recipe.Offload | Sequence[recipe.Offload] | None = None,
    shard: recipe.Shard | None = None,
    shard_optimizer: bool = False,
    memory_limit: str | int | None = None,
    checkpoint_every: recipe.CheckpointInterval | None = None,
    keep_checkpoints: int | None = None,
    final_checkpoint: Path | None = None,
    evaluate_every: int | None = None,
    patience: int | None = None,
    logs: recipe.LogFormat | Sequence[recipe.LogFormat] | None = None,
    targets: Sequence[str] = (),
    ignore: Sequence[str] = (),
    keep_zeros: bool | None = None,
    augment: recipe.Augment | None = None,
    masking: recipe.Masking | None = None,
    dropout: float | None = None,
    attention_dropout: float | None = None,
    adapter: recipe.Adapter | None = None,
    **settings: Unpack[Settings],
) -> Report:
    """Train a student on a teacher's outputs.

    Args:
        model: the model: a folder or a file, or a remote one like hf:org/name.
        output: folder to write.
        teacher: The teacher model [default: the input model, before all passes].
        student: The model to train: {"layers": [0, 2, 4]}, {"every": 2}, {"model": FOLDER}, {"config": FILE}
            (random weights), or {"eagle3": {"vocabulary": FILE}} (a head for speculative decoding, with the
            ids of its tokens) [default: the result of the previous passes].
        teacher_cache: A folder that caches the largest logits of the teacher, so that each sample is computed
            once over all epochs and runs.
        teacher_top: Number of logits per row to cache [default: 64].
        teacher_logits: Files with the logits of a teacher, instead of the teacher: .safetensors, or .jsonl
            with the responses of vLLM.
        more_teachers: Further teachers, whose probabilities are averaged with those of the teacher: {"model":
            FOLDER, "weight": 1, "cache": FOLDER}.
        on_policy: Let the student continue a fraction of the texts itself, and compare it with the teacher on
            its continuations: {"fraction": 0.5, "prompt_tokens": 32, "tokens": 64, "temperature": 1}
            [default: only texts of the data].
        losses: Losses and their weights: soft, hard, hidden, attention, embedding, contrastive [default:
            depends on model and data].
        optimizer: Optimizer.
        learning_rate: Peak learning rate of the schedule.
        weight_decay: Weight decay; biases and norm weights are exempt.
        momentum: Momentum of sgd and muon.
        betas: Decays of the moments of adamw, adamw8bit and muon [default: [0.9, 0.999]].
        groups: Learning rate or weight decay of a part of the tensors: {"targets": [PATTERN, ...],
            "learning_rate": RATE, "weight_decay": DECAY}.
        schedule: Learning rate schedule: { kind: cosine | linear | constant, warmup_steps: N, decay_steps: N
            }.
        max_steps: Number of steps.
        epochs: Passes over the data, instead of a number of steps [default: 1].
        batch_size: Samples per batch: a number, or auto.
        gradient_accumulation: Batches per step (gradient accumulation).
        clip_norm: Maximum global gradient norm; 0 disables clipping.
        precision: Precision of activations and gradients; `f16` uses dynamic loss scaling.
        gradient_checkpointing: Recompute activations in the backward pass instead of storing them: none,
            blocks, or {"every": K} layers.
        batch_norm: Statistics of batch normalization.
        scales: Scales of quantized weights and activations.
        average: Write an exponential moving average of the weights with this decay, such as 0.999.
        offload: Tensors to keep in host memory while training on a GPU; `parameters` also works on the CPU
            and offloads to disk.
        shard: Tensors to shard across processes.
        shard_optimizer: Shard the optimizer state across processes, same as shard: optimizer.
        memory_limit: Device memory limit, such as 8GB; batches that need more are split into micro-batches.
        checkpoint_every: How often to save a checkpoint for `resume`: {"steps": N} or {"minutes": N}
            [default: {"minutes": 10}].
        keep_checkpoints: Number of checkpoints to keep while training, to resume from an earlier one
            [default: 1].
        final_checkpoint: Folder for a checkpoint of the last step, or of the last one before the decay of
            `decay_steps`: `resume` with a larger max_steps or epochs continues from it.
        evaluate_every: Steps between evaluations on the evaluation data; the best weights are kept, which can
            be the initial ones.
        patience: Stop after this many evaluations without improvement.
        logs: Logs of every step, in addition to the CSV table.
        targets: Tensors to train: names with `*`, or `re:` and a regular expression [default: all floats].
        ignore: Tensors to leave unchanged.
        keep_zeros: Keep zeros in float weights that were pruned by another tool; zeros of prune-unstructured
            are always kept.
        augment: Change images randomly in each step: {"flip": True, "shift": PIXELS}.
        masking: Mask random tokens, which a masked language model predicts: {"fraction": 0.15, "mask_token":
            TOKEN}.
        dropout: Set hidden states to zero with this probability: embeddings, and the results of attention and
            feed-forward networks [default: none].
        attention_dropout: Set attention probabilities to zero with this probability [default: none].
        adapter: Train low-rank adapters of linear layers instead of the weights: {"rank": 16, "alpha": 32,
            "targets": [PATTERN, ...], "merge": False} [default: none].
        settings: calibration, evaluation, force and more, as listed in `Settings`.
    """
    step = recipe.Distill(teacher=teacher, student=student, teacher_cache=teacher_cache,
        teacher_top=teacher_top, teacher_logits=teacher_logits, more_teachers=more_teachers,
        on_policy=on_policy, losses=losses, optimizer=optimizer, learning_rate=learning_rate,
        weight_decay=weight_decay, momentum=momentum, betas=betas, groups=groups, schedule=schedule,
        max_steps=max_steps, epochs=epochs, batch_size=batch_size,
        gradient_accumulation=gradient_accumulation, clip_norm=clip_norm, precision=precision,
        gradient_checkpointing=gradient_checkpointing, batch_norm=batch_norm, scales=scales, average=average,
        offload=offload, shard=shard, shard_optimizer=shard_optimizer, memory_limit=memory_limit,
        checkpoint_every=checkpoint_every, keep_checkpoints=keep_checkpoints,
        final_checkpoint=final_checkpoint, evaluate_every=evaluate_every, patience=patience, logs=logs,
        targets=targets, ignore=ignore, keep_zeros=keep_zeros, augment=augment, masking=masking,
        dropout=dropout, attention_dropout=attention_dropout, adapter=adapter)
    return run_pass(step, model, output, settings)


def finetune(
    model: Path,
    output: Path,
    *,
    classes: str | Sequence[str] | None = None,
    labels: int | None = None,
    losses: recipe.Losses | None = None,
    optimizer: recipe.OptimizerKind = "adamw",
    learning_rate: float = 0.0001,
    weight_decay: float = 0.01,
    momentum: float = 0.9,
    betas: Sequence[float] | None = (),
    groups: Sequence[recipe.ParameterGroup] = (),
    schedule: recipe.Schedule | None = None,
    max_steps: int | None = None,
    epochs: int | None = None,
    batch_size: Literal["auto"] | int = "auto",
    gradient_accumulation: int = 1,
    clip_norm: float = 1.0,
    precision: recipe.Precision = "f32",
    gradient_checkpointing: recipe.Checkpointing = "none",
    batch_norm: recipe.BatchNorm = "batch",
    scales: recipe.QuantizerScales = "fixed",
    average: float | None = None,
    offload: recipe.Offload | Sequence[recipe.Offload] | None = None,
    shard: recipe.Shard | None = None,
    shard_optimizer: bool = False,
    memory_limit: str | int | None = None,
    checkpoint_every: recipe.CheckpointInterval | None = None,
    keep_checkpoints: int | None = None,
    final_checkpoint: Path | None = None,
    evaluate_every: int | None = None,
    patience: int | None = None,
    logs: recipe.LogFormat | Sequence[recipe.LogFormat] | None = None,
    targets: Sequence[str] = (),
    ignore: Sequence[str] = (),
    keep_zeros: bool | None = None,
    augment: recipe.Augment | None = None,
    masking: recipe.Masking | None = None,
    dropout: float | None = None,
    attention_dropout: float | None = None,
    adapter: recipe.Adapter | None = None,
    **settings: Unpack[Settings],
) -> Report:
    """Train the model on labels or the next token: recovers accuracy after pruning, trains through quantizers.

    Args:
        model: the model: a folder or a file, or a remote one like hf:org/name.
        output: folder to write.
        classes: Names of the classes of a new classification head, for an encoder or a CNN without one.
        labels: Number of classes of a new classification head, instead of their names.
        losses: Losses and their weights: soft, hard, hidden, attention, embedding, contrastive [default:
            depends on model and data].
        optimizer: Optimizer.
        learning_rate: Peak learning rate of the schedule.
        weight_decay: Weight decay; biases and norm weights are exempt.
        momentum: Momentum of sgd and muon.
        betas: Decays of the moments of adamw, adamw8bit and muon [default: [0.9, 0.999]].
        groups: Learning rate or weight decay of a part of the tensors: {"targets": [PATTERN, ...],
            "learning_rate": RATE, "weight_decay": DECAY}.
        schedule: Learning rate schedule: { kind: cosine | linear | constant, warmup_steps: N, decay_steps: N
            }.
        max_steps: Number of steps.
        epochs: Passes over the data, instead of a number of steps [default: 1].
        batch_size: Samples per batch: a number, or auto.
        gradient_accumulation: Batches per step (gradient accumulation).
        clip_norm: Maximum global gradient norm; 0 disables clipping.
        precision: Precision of activations and gradients; `f16` uses dynamic loss scaling.
        gradient_checkpointing: Recompute activations in the backward pass instead of storing them: none,
            blocks, or {"every": K} layers.
        batch_norm: Statistics of batch normalization.
        scales: Scales of quantized weights and activations.
        average: Write an exponential moving average of the weights with this decay, such as 0.999.
        offload: Tensors to keep in host memory while training on a GPU; `parameters` also works on the CPU
            and offloads to disk.
        shard: Tensors to shard across processes.
        shard_optimizer: Shard the optimizer state across processes, same as shard: optimizer.
        memory_limit: Device memory limit, such as 8GB; batches that need more are split into micro-batches.
        checkpoint_every: How often to save a checkpoint for `resume`: {"steps": N} or {"minutes": N}
            [default: {"minutes": 10}].
        keep_checkpoints: Number of checkpoints to keep while training, to resume from an earlier one
            [default: 1].
        final_checkpoint: Folder for a checkpoint of the last step, or of the last one before the decay of
            `decay_steps`: `resume` with a larger max_steps or epochs continues from it.
        evaluate_every: Steps between evaluations on the evaluation data; the best weights are kept, which can
            be the initial ones.
        patience: Stop after this many evaluations without improvement.
        logs: Logs of every step, in addition to the CSV table.
        targets: Tensors to train: names with `*`, or `re:` and a regular expression [default: all floats].
        ignore: Tensors to leave unchanged.
        keep_zeros: Keep zeros in float weights that were pruned by another tool; zeros of prune-unstructured
            are always kept.
        augment: Change images randomly in each step: {"flip": True, "shift": PIXELS}.
        masking: Mask random tokens, which a masked language model predicts: {"fraction": 0.15, "mask_token":
            TOKEN}.
        dropout: Set hidden states to zero with this probability: embeddings, and the results of attention and
            feed-forward networks [default: none].
        attention_dropout: Set attention probabilities to zero with this probability [default: none].
        adapter: Train low-rank adapters of linear layers instead of the weights: {"rank": 16, "alpha": 32,
            "targets": [PATTERN, ...], "merge": False} [default: none].
        settings: calibration, evaluation, force and more, as listed in `Settings`.
    """
    step = recipe.Finetune(classes=classes, labels=labels, losses=losses, optimizer=optimizer,
        learning_rate=learning_rate, weight_decay=weight_decay, momentum=momentum, betas=betas, groups=groups,
        schedule=schedule, max_steps=max_steps, epochs=epochs, batch_size=batch_size,
        gradient_accumulation=gradient_accumulation, clip_norm=clip_norm, precision=precision,
        gradient_checkpointing=gradient_checkpointing, batch_norm=batch_norm, scales=scales, average=average,
        offload=offload, shard=shard, shard_optimizer=shard_optimizer, memory_limit=memory_limit,
        checkpoint_every=checkpoint_every, keep_checkpoints=keep_checkpoints,
        final_checkpoint=final_checkpoint, evaluate_every=evaluate_every, patience=patience, logs=logs,
        targets=targets, ignore=ignore, keep_zeros=keep_zeros, augment=augment, masking=masking,
        dropout=dropout, attention_dropout=attention_dropout, adapter=adapter)
    return run_pass(step, model, output, settings)


def cast(
    model: Path,
    output: Path,
    *,
    to: recipe.FloatFormat = "bf16",
    overflow: recipe.Overflow = "error",
    targets: Sequence[str] = (),
    ignore: Sequence[str] = (),
    **settings: Unpack[Settings],
) -> Report:
    """Convert floats to another float format.

    Args:
        model: the model: a folder or a file, or a remote one like hf:org/name.
        output: folder to write.
        to: Format to convert to.
        overflow: Treatment of values beyond the range of the format.
        targets: Tensors to convert: names with `*`, or `re:` and a regular expression [default: all floats].
        ignore: Tensors to leave unchanged.
        settings: calibration, evaluation, force and more, as listed in `Settings`.
    """
    step = recipe.Cast(to=to, overflow=overflow, targets=targets, ignore=ignore)
    return run_pass(step, model, output, settings)


def dequantize(
    model: Path,
    output: Path,
    *,
    targets: Sequence[str] = (),
    ignore: Sequence[str] = (),
    **settings: Unpack[Settings],
) -> Report:
    """Dequantize weights, so that later passes can process them.

    Args:
        model: the model: a folder or a file, or a remote one like hf:org/name.
        output: folder to write.
        targets: Tensors to dequantize: names with `*`, or `re:` and a regular expression [default: all
            quantized weights].
        ignore: Tensors to leave quantized; activations then stay quantized too.
        settings: calibration, evaluation, force and more, as listed in `Settings`.
    """
    step = recipe.Dequantize(targets=targets, ignore=ignore)
    return run_pass(step, model, output, settings)


def split_experts(
    model: Path,
    output: Path,
    **settings: Unpack[Settings],
) -> Report:
    """Store the experts of each layer, which are one tensor, as separate linear layers, which passes and runtimes can quantize.

    Args:
        model: the model: a folder or a file, or a remote one like hf:org/name.
        output: folder to write.
        settings: calibration, evaluation, force and more, as listed in `Settings`.
    """
    step = recipe.SplitExperts()
    return run_pass(step, model, output, settings)


def extract_language_model(
    model: Path,
    output: Path,
    **settings: Unpack[Settings],
) -> Report:
    """Keep only the language model of a model with a vision tower, with the configuration and the names of a text model.

    Args:
        model: the model: a folder or a file, or a remote one like hf:org/name.
        output: folder to write.
        settings: calibration, evaluation, force and more, as listed in `Settings`.
    """
    step = recipe.ExtractLanguageModel()
    return run_pass(step, model, output, settings)


def rotate(
    model: Path,
    output: Path,
    *,
    parts: Sequence[recipe.RotatedPart] = (),
    untie: bool = False,
    **settings: Unpack[Settings],
) -> Report:
    """Rotate the residual stream and the values of attention heads by orthogonal matrices, which distribute outliers of activations and weights over all features.

    Args:
        model: the model: a folder or a file, or a remote one like hf:org/name.
        output: folder to write.
        parts: Features to rotate [default: both].
        untie: Store the output head separately if it is tied to the embedding table, which `residual`
            requires, because the factors of the last normalization are folded into the head.
        settings: calibration, evaluation, force and more, as listed in `Settings`.
    """
    step = recipe.Rotate(parts=parts, untie=untie)
    return run_pass(step, model, output, settings)
