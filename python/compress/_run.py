"""Runs of recipes and passes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypedDict, Unpack, cast

from ._bar import display
from ._check import hints, require_known, require_types
from ._data import write_samples
from ._errors import UsageError
from ._process import Path, Process, Progress, positional
from .recipe import Data, Recipe, RecipeSettings, Step
from .report import Report

# Extensions of files of samples.
TEXTS = (".txt", ".raw", ".csv", ".tsv", ".jsonl")
ARRAYS = (".safetensors", ".npz", ".npy")

RecipeLike: TypeAlias = Recipe | Mapping[str, Any] | Path
"""A recipe: a `Recipe`, a mapping with its keys, or the path of a YAML file."""

ShowProgress: TypeAlias = bool | Callable[[Progress], object] | None
"""Whether to show a progress bar (None: on terminals and in notebooks), or a function to call for each event."""


class StartOptions(TypedDict, total=False):
    """Options of a run that do not change its result."""

    force: bool
    """Replace the output of an earlier run. Files that its report does not list are never deleted."""

    resume: bool
    """Continue an earlier run after the last pass with a cached result, or from the last checkpoint of a training."""

    cache: bool
    """Cache the results of slow passes, for `resume`."""

    device: str
    """Device to run models on: auto, cpu, cuda or cuda:N."""

    threads: int | None
    """Number of threads [default: all cores]."""

    memory_trace: bool
    """Write memory-trace.json: the allocations over time, for ui.perfetto.dev."""


class RunOptions(StartOptions, total=False):
    """Options of functions that wait for the end of a run."""

    progress: ShowProgress
    """Whether to show a progress bar, or a function to call for each event."""


class Settings(RunOptions, RecipeSettings, total=False):
    """Parameters that all passes have: data, export, seed and other keys of a recipe, and the options of `run`."""


# Parameters of functions, by the arguments of the command line that messages name.
KEYWORDS = {
    "-o": "output",
    "--eval": "evaluation",
    "--task": "Data(task=…)",
    **{f"--{name}": name for name in ("against", "calibration", "data", "formats", "points", "train", "export", "loads", "memory", "sbom")},
    **{f"--{name.replace('_', '-')}": f"{name}=True" for name in ("force", "resume", "allow_nonfinite")},
}


class Job(Process):
    """A run in another process. Iterating yields its progress.

    Leaving the `with` block stops the run if it has not ended.
    """

    def __enter__(self) -> Job:
        return self

    def advice(self, text: str) -> str:
        """The text with parameters of functions in place of arguments of the command line and keys of recipes."""
        text = re.sub(r"labels of a file for each run are not read: .*", "labels of samples with different shapes are not read: pad the arrays, with 0 in `attention_mask`", text)
        text = re.sub(r"add `data: \{ (\w+): \.\.\. \}`, or `--\w+ FILE` on the command line", r"pass `\1`", text)
        return re.sub(r"`?(?<![\w-])(-o|--[a-z-]+)`?", lambda found: f"`{KEYWORDS[found[1]]}`" if found[1] in KEYWORDS else found[0], text)

    def result(self) -> Report:
        """Waits for the run, and returns its report.

        Raises:
            CompressError: the run failed.
            Cancelled: `cancel` was called.
        """
        output = self.output()
        if "schema" not in output:
            raise UsageError("the recipe has a `sweep`, so there is no single report", "its runs are finished; read them with Report.open, or use compress.sweep")
        return with_warnings(Report.from_dict(output))


def with_warnings(report: Report) -> Report:
    """The report, whose warnings are also warnings of Python, at the line that called the package."""
    level, frame = 1, sys._getframe()
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(f"{__package__}."):
        level, frame = level + 1, frame.f_back
    for note in report.notes:
        if note.startswith("warning: "):
            warnings.warn(note.removeprefix("warning: "), stacklevel=level)
    return report


def run(
    recipe: RecipeLike,
    output: Path | None = None,
    *,
    overrides: Mapping[str, object] | None = None,
    force: bool = False,
    resume: bool = False,
    cache: bool = True,
    device: str = "auto",
    threads: int | None = None,
    memory_trace: bool = False,
    progress: ShowProgress = None,
) -> Report:
    """Runs a recipe, writes the output folder, and returns the report.

    Args:
        recipe: a `Recipe`, a mapping with the keys of a recipe, or the path of a YAML file. Paths in a file are relative
            to it, others to the working directory.
        output: output folder, instead of the recipe's.
        overrides: values of the recipe to change, like {"seed": 1, "quantize.scheme": "W8A16"}.
        force: replace the output of an earlier run. Files that its report does not list are never deleted.
        resume: continue an earlier run after the last pass with a cached result, or from the last checkpoint of a training.
        cache: cache the results of slow passes, for `resume`.
        device: device to run models on: auto, cpu, cuda or cuda:N.
        threads: number of threads [default: all cores]. Results do not depend on it.
        memory_trace: write memory-trace.json: the allocations over time, for ui.perfetto.dev.
        progress: whether to show a progress bar [default: on terminals and in notebooks], or a function to call for each
            `Progress` event.

    Raises:
        CompressError: the run failed. Nothing was written.
        UsageError: the recipe or an option is invalid.
        KeyboardInterrupt: Ctrl-C. The program has stopped, and nothing was written.

    >>> report = run({"model": "minilm", "passes": [{"cast": {"to": "bf16"}}]}, "out/bf16")
    >>> report.passes[0].name
    'cast'
    """
    require_types("run", locals(), hints(run))
    options = StartOptions(force=force, resume=resume, cache=cache, device=device, threads=threads, memory_trace=memory_trace)
    with launch("run", recipe, output, overrides, options) as job:
        watch(job, progress)
        return job.result()


def start(recipe: RecipeLike, output: Path | None = None, *, overrides: Mapping[str, object] | None = None, **options: Unpack[StartOptions]) -> Job:
    """Starts a run like `run`, and returns a job that yields its progress.

    >>> with start(Recipe(model="minilm", passes=["cast"]), "out/started") as job:
    ...     stages = {event.stage for event in job}
    ...     report = job.result()
    >>> report.size.ratio > 1
    True
    """
    require_types("start", locals(), hints(start))
    return launch("start", recipe, output, overrides, options)


def sweep(
    recipe: RecipeLike,
    output: Path,
    values: Mapping[str, Sequence[object]],
    *,
    overrides: Mapping[str, object] | None = None,
    progress: ShowProgress = None,
    **options: Unpack[StartOptions],
) -> dict[str, Report]:
    """Runs a recipe with each combination of values, each in a subfolder of `output`, and returns the reports by name.

    `comparison.html` in `output` compares the runs. `values` has keys like those of `overrides`.

    >>> recipe = {"model": "minilm", "passes": [{"prune-unstructured": {"amount": 0.5}}]}
    >>> reports = sweep(recipe, "out/swept", {"amount": [0.25, 0.5]})
    >>> {name: report.size.after.nonzero < report.size.before.nonzero for name, report in reports.items()}
    {'amount=0.25': True, 'amount=0.5': True}
    """
    require_types("sweep", locals(), hints(sweep))
    require_types("sweep", values, dict.fromkeys(values, Sequence[object]))
    if not values:
        raise ValueError("sweep(): `values` is empty: pass keys with lists of values, or use `run`")
    more = [part for key, each in values.items() for part in ("--sweep", f"{key}={json.dumps([plain(value) for value in each])}")]
    with launch("sweep", recipe, output, overrides, options, more) as job:
        watch(job, progress)
        names = [run["name"] for run in job.output()["runs"]]
    return {name: with_warnings(Report.open(os.path.join(output, name))) for name in names}


def plan(recipe: RecipeLike, *, overrides: Mapping[str, object] | None = None) -> dict[str, Any]:
    """Predicts what a recipe does: the weights that each pass selects, files, size, memory. Reads no weights.

    >>> plan(Recipe(model="minilm", passes=["quantize-dynamic"]))["passes"][0]["name"]
    'quantize-dynamic'
    """
    require_types("plan", locals(), hints(plan))
    with contextlib.ExitStack() as files:
        path, document = resolve(recipe, files)
        with Process(["plan", path, *set_values(overrides)], document) as process:
            planned: dict[str, Any] = process.output()
    return planned


def run_pass(step: Step, model: Path, output: Path, settings: Settings) -> Report:
    """Runs one pass with its parameters."""
    check_pass(step, model, output, settings)
    rest: dict[str, Any] = dict(settings)
    options = {key: rest.pop(key) for key in (*StartOptions.__annotations__, "progress") if key in rest}
    data = {key: rest.pop(key) for key in ("calibration", "train", "evaluation") if rest.get(key) is not None}
    return run(Recipe(model=model, passes=[step], data=cast(Any, data), **rest), output, **options)


def check_pass(step: Step, model: Path, output: Path, settings: Settings) -> None:
    """Checks the names and types of the parameters of the function of a pass."""
    if isinstance(step, str):
        return
    function = step.NAME.replace("-", "_")
    own = {each.name: getattr(step, each.name) for each in dataclasses.fields(step)}
    kinds = {**hints(type(step)), **hints(Settings), "model": Path, "output": Path}
    require_known(function, settings, [*own, *hints(Settings)])
    # Samples may have many types, which are checked when they are written.
    given = {name: value for name, value in settings.items() if name not in ("calibration", "train", "evaluation")}
    require_types(function, {"model": model, "output": output, **own, **given}, kinds)


def watch(job: Job, progress: ShowProgress) -> None:
    """Shows the progress of a job until it ends."""
    with display(progress) as show:
        for event in job:
            show(event)


def set_values(overrides: Mapping[str, object] | None) -> list[str]:
    """The arguments that change values of a recipe."""
    return [f"--set={key}={json.dumps(plain(value))}" for key, value in (overrides or {}).items()]


def launch(
    function: str, recipe: RecipeLike, output: Path | None, overrides: Mapping[str, object] | None, options: StartOptions, more: Sequence[str] = ()
) -> Job:
    """Starts `compress run`."""
    require_known(function, options, hints(StartOptions))
    require_types(function, options, hints(StartOptions))
    threads = options.get("threads")
    arguments = [
        *([] if output is None else [f"--output={os.fspath(output)}"]),
        *(["--force"] if options.get("force") else []),
        *(["--resume"] if options.get("resume") else []),
        *([] if options.get("cache", True) else ["--no-cache"]),
        *(["--memory-trace"] if options.get("memory_trace") else []),
        f"--device={options.get('device', 'auto')}",
        *([] if threads is None else [f"--threads={threads}"]),
        *set_values(overrides),
        *more,
    ]
    with contextlib.ExitStack() as files:
        path, document = resolve(recipe, files)
        if document and output is None and not document.get("output") and "output" not in (overrides or {}):
            raise UsageError("there is no output folder", "pass `output`, or set it in the recipe")
        return Job(["run", path, *arguments], document, files.pop_all())


def resolve(recipe: RecipeLike, files: contextlib.ExitStack) -> tuple[str, dict[str, Any] | None]:
    """The path of a recipe; `-` and the document for a recipe in memory. Samples in memory are written to files."""
    if isinstance(recipe, (str, os.PathLike)):
        return positional(recipe), None
    document = dict(recipe) if isinstance(recipe, Mapping) else fields(recipe)
    require_types("Recipe", {"data": document.get("data")}, hints(Recipe))
    data = {name: samples for name, samples in (document.get("data") or {}).items() if samples is not None}
    if data:
        document["data"] = {name: data_options(samples, name, files) for name, samples in data.items()}
    result: dict[str, Any] = plain(document)
    return "-", result


def is_in_memory(samples: Any) -> bool:
    """Whether samples are neither a file nor options of a recipe, which name files or a source."""
    if isinstance(samples, Mapping):
        mix = samples.get("mix")
        is_mixture = isinstance(mix, (list, tuple)) and all(isinstance(part, (str, os.PathLike, Mapping, Data)) for part in mix)
        return not is_mixture and not any(isinstance(samples.get(kind), (str, os.PathLike)) for kind in ("text", "images", "arrays", "source"))
    return not isinstance(samples, (str, os.PathLike, Data))


def data_options(samples: Any, name: str, files: contextlib.ExitStack) -> Any:
    """The options of a recipe that read samples. Those in memory are written to a folder that `files` deletes."""
    if is_in_memory(samples):
        return write_samples(samples, name, files.enter_context(tempfile.TemporaryDirectory(prefix="compress-")))
    if not isinstance(samples, (str, os.PathLike)):
        options = samples if isinstance(samples, Mapping) else fields(samples)
        parts = [data_options(part, f"{name}-{index}", files) for index, part in enumerate(options.get("mix") or ())]
        return {**options, "mix": parts} if parts else options
    path = os.fspath(samples)
    ending = os.path.splitext(path)[1].lower()
    if ending in TEXTS:
        return {"text": path}
    if ending in ARRAYS:
        return {"arrays": path}
    if not os.path.exists(path):
        advice = f"pass a file of texts ({', '.join(TEXTS)}) or arrays ({', '.join(ARRAYS)}), a folder of images, or samples in memory, like a list of texts"
        raise UsageError(f"{name}: {path!r} is not a file or folder; data sets are not downloaded", advice)
    entries = [entry for entry in os.listdir(path) if not entry.startswith(".")] if os.path.isdir(path) else [path]
    if not entries:
        raise UsageError(f"{name}: the folder {path!r} is empty")
    texts = [entry for entry in entries if entry.endswith(TEXTS)]
    if os.path.isdir(path) and len(texts) == len(entries):
        raise UsageError(f"{name}: {path!r} is a folder of texts, which are not read together", f"pass one file, like {os.path.join(path, min(texts))!r}")
    return {"arrays" if any(entry.endswith(ARRAYS) for entry in entries) else "images": path}


def fields(value: Any) -> dict[str, Any]:
    """The fields of a dataclass that do not have their default."""
    require_types(type(value).__name__, {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}, hints(type(value)))
    found = {}
    for each in dataclasses.fields(value):
        current = getattr(value, each.name)
        # 1 and 1.0 are equal, but a count and a fraction.
        is_default = type(current) is type(each.default) and current == each.default
        if current is not None and not is_default:
            found[each.name] = current
    return found


def plain(value: Any) -> Any:
    """A value of a recipe as JSON: passes and formats as mappings from their name to their options."""
    if dataclasses.is_dataclass(value):
        options = {key: plain(each) for key, each in fields(value).items()}
        name = getattr(value, "NAME", None)
        return {name: options} if name else options
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, (str, bool, int, float)) or value is None:
        return value
    # Numbers of NumPy, and arrays without axes, which have a method to iterate.
    if hasattr(value, "item") and not getattr(value, "ndim", 0):
        return value.item()
    if isinstance(value, Iterator):
        raise TypeError(f"a recipe can run several times, but it contains a {type(value).__name__}, which has its values once: pass a list")
    if isinstance(value, Iterable):
        return [plain(each) for each in value]
    raise UsageError(f"a recipe cannot contain a value of type {type(value).__name__}")

