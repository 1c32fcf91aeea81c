"""Evaluation of models, and the search for a mixture of formats."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ._check import hints, require_types
from ._process import Path, positional
from ._run import Job, ShowProgress, data_options, plain, watch, with_warnings
from .recipe import Method, Precision, Samples
from .report import Report, convert
from .sections import Fidelity


@dataclass(frozen=True, kw_only=True)
class Score:
    """A score of a model on a data set."""

    metric: str
    """Name of the metric, like accuracy or perplexity."""

    value: float
    """The score."""

    ci95: tuple[float, float] | None = None
    """95 % confidence interval, if it is known."""

    more: Mapping[str, float] = field(default_factory=dict)
    """Other figures, like the number of tokens."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Scores of a model on a data set."""

    model: str
    """The model."""

    data: str
    """The data."""

    task: str
    """The task: classification, language-modelling, embedding or fidelity."""

    runtime: str
    """The runtime that ran the model."""

    samples: int
    """Number of samples."""

    seconds: float
    """Time that the evaluation took."""

    score: Score | None = None
    """Score of the model, for data with labels and for texts of language models."""

    against: Score | None = None
    """Score of the model to compare with."""

    fidelity: Fidelity | None = None
    """Fidelity of the outputs to those of the model to compare with."""

    notes: Sequence[str] = ()
    """Assumptions about the data to verify, and samples that were not used."""


def evaluate(
    model: Path,
    data: str | Samples,
    *,
    against: Path | None = None,
    runtime: Literal["candle", "onnxruntime"] | None = None,
    precision: Precision = "f32",
    memory: str | int | None = None,
    device: str = "auto",
    threads: int | None = None,
    progress: ShowProgress = None,
) -> Evaluation:
    """Measures a model on data: accuracy, perplexity, rank correlation, and the fidelity to another model.

    Args:
        model: the model: a folder or a file, or a remote one like hf:org/name.
        data: a file or folder, samples in memory, or `Data` with columns, labels and the task.
        against: another model, usually the original, to compare with.
        runtime: runtime of the model [default: the built-in executor for folders, ONNX Runtime for .onnx files].
        precision: floating-point precision of the built-in executor.
        memory: memory limit of running models, like 8GB [default: three quarters of the free memory].
        device: device to run models on: auto, cpu, cuda or cuda:N.
        threads: number of threads [default: all cores].
        progress: whether to show a progress bar [default: on terminals and in notebooks], or a function to call for each
            `Progress` event.

    Raises:
        CompressError: the evaluation failed.
        UsageError: an option is invalid, or the data does not match the model.

    >>> evaluate("llama", "book.txt").score.metric
    'perplexity'
    """
    require_types("evaluate", locals(), hints(evaluate))
    arguments = options(against=against, runtime=runtime, precision=precision, memory=memory, device=device, threads=threads)
    result: Evaluation = convert(Evaluation, execute(["eval", positional(model), *arguments], {"data": data}, progress))
    return result


def auto(
    model: Path,
    output: Path,
    *,
    calibration: str | Samples | None = None,
    max_size: str | float | int | None = None,
    max_kl: float | None = None,
    max_loss: str | float | None = None,
    latency: str | None = None,
    runtime: Literal["vllm", "transformers", "llama.cpp", "onnxruntime"] | None = None,
    formats: Sequence[str] = (),
    evaluation: str | Samples | None = None,
    method: Method | None = None,
    time: str | None = None,
    times: Path | None = None,
    checkpoint: Path | None = None,
    points: int = 4,
    force: bool = False,
    resume: bool = False,
    memory: str | int | None = None,
    device: str = "auto",
    threads: int | None = None,
    progress: ShowProgress = None,
) -> Report:
    """Finds the best mixture of formats within a limit, and writes the model. Exactly one limit is required: `max_size`,
    `max_kl`, `max_loss` or `latency`.

    Args:
        model: the model: a folder or a file, or a remote one like hf:org/name.
        output: folder to write, or a .gguf file for llama.cpp or an .onnx file for ONNX Runtime.
        calibration: samples on which the loss of each format of each layer is predicted. Without them, the errors of the
            weights are compared, and only `max_size` can be limited.
        max_size: largest size: bits per quantized weight (4.5bits), the size of all weights or of the file (300MB,
            or an integer from 2 in bytes), or a fraction of the size of the input (0.25, 25%).
        max_kl: largest KL divergence of the predictions from those of the original model, in nats per token.
        max_loss: largest loss of the score relative to the original model, like 0.5%.
        latency: largest latency of one calibration sample in ONNX Runtime, like 5ms, measured on this machine with
            `threads`.
        runtime: the runtime that loads the output, which determines the formats [default: llama.cpp for .gguf files,
            onnxruntime for .onnx files, otherwise vllm].
        formats: formats to choose from [default: all that the runtime loads].
        evaluation: data on which mixtures are measured, with labels for `max_loss` [default: calibration samples that are
            not used otherwise].
        method: algorithm that quantizes the output, for vLLM and transformers [default: gptq; rtn without samples].
        time: time for better methods, like 10m, which quantize the chosen point and are kept if the loss on held-out
            samples falls [default: gptq only; for llama.cpp and ONNX Runtime, the default options].
        times: file of the times that `latency` measures, which is read first if it exists: with the same times, the
            choice is the same.
        checkpoint: file of the scores and measurements, which is read first if it exists: an interrupted search continues.
        points: number of points of the front that are measured.
        force: replace the output of an earlier run. Files that its report does not list are never deleted.
        resume: continue the quantization that follows the search from its finished blocks, after an interruption.
        memory: memory limit of running models, like 8GB [default: three quarters of the free memory].
        device: device to run models on: auto, cpu, cuda or cuda:N.
        threads: number of threads [default: all cores].
        progress: whether to show a progress bar [default: on terminals and in notebooks], or a function to call for each
            `Progress` event.

    Raises:
        CompressError: the search failed, or no mixture is within the limit.
        UsageError: an option is invalid, or the data does not match the model.

    >>> auto("llama", "out/auto", calibration="book.txt", max_size="6bits").size.ratio > 1
    True
    """
    require_types("auto", locals(), hints(auto))
    arguments = options(
        output=output,
        max_size=f"{max_size}B" if isinstance(max_size, int) and max_size > 1 else max_size,
        max_kl=max_kl,
        max_loss=max_loss,
        latency=latency,
        method=method,
        time=time,
        times=times,
        checkpoint=checkpoint,
        points=points,
        memory=memory,
        device=device,
        threads=threads,
        formats=",".join(formats) or None,
    )
    arguments += [*([] if runtime is None else [f"--for={runtime}"]), *(["--force"] if force else []), *(["--resume"] if resume else [])]
    samples = {name: data for name, data in {"calibration": calibration, "evaluation": evaluation}.items() if data is not None}
    return with_warnings(Report.from_dict(execute(["auto", positional(model), *arguments], samples, progress)["report"]))


def options(**values: Any) -> list[str]:
    """The arguments of the command line for options that are not None."""
    return [f"--{name.replace('_', '-')}={os.fspath(value) if isinstance(value, os.PathLike) else value}" for name, value in values.items() if value is not None]


def execute(arguments: Sequence[str], samples: Mapping[str, Any], progress: ShowProgress) -> Any:
    """Runs a command with samples, by parameter, and returns its output."""
    with contextlib.ExitStack() as files:
        data = [f"--{'eval' if name == 'evaluation' else name}={json.dumps(plain(data_options(each, name, files)))}" for name, each in samples.items()]
        with Job([*arguments, *data], None, files.pop_all()) as job:
            watch(job, progress)
            return job.output()
