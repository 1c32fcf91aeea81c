"""The program: its location, its process, and the events that it reports."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any, Literal, TypeAlias

from ._errors import Cancelled, CompressError, ProgramNotFound, UsageError

Path: TypeAlias = str | os.PathLike[str]

Unit: TypeAlias = Literal["bytes", "samples", "steps"]

PROGRAM_VARIABLE = "COMPRESS_PROGRAM"


def find_program() -> str:
    """The path of the program: $COMPRESS_PROGRAM, or else the file that pip installed with this package."""
    if named := os.environ.get(PROGRAM_VARIABLE):
        return named
    user = sysconfig.get_preferred_scheme("user")
    folders = [sysconfig.get_path("scripts"), sysconfig.get_path("scripts", user), next_to_package()]
    for folder in folders:
        if folder and (found := shutil.which("compress", path=folder)):
            return found
    raise ProgramNotFound(
        f"the program `compress` is not in {', '.join(folder for folder in folders if folder)}",
        f"install the package again, or set {PROGRAM_VARIABLE} to the path of the program",
    )


def next_to_package() -> str | None:
    """The folder `bin` of an installation by `pip install --target` or `--prefix`."""
    package = os.path.dirname(os.path.abspath(__file__))
    for levels in ((), ("..", "..", "..")):
        folder = os.path.normpath(os.path.join(package, "..", *levels, "bin"))
        if os.path.isdir(folder):
            return folder
    return None


@dataclass(frozen=True)
class Progress:
    """Progress of a run. Each stage begins with an event in which `done` is 0.

    >>> Progress("write", done=25, total=100, unit="bytes").fraction
    0.25
    """

    stage: str
    """Name of the stage."""

    done: int = 0
    """Completed units."""

    total: int | None = None
    """Number of units, if it is known."""

    unit: Unit = "steps"
    """Unit of `done` and `total`."""

    message: str | None = None
    """Remark, such as the loss of a training."""

    finished: bool = False
    """Whether the stage has ended."""

    @property
    def fraction(self) -> float | None:
        """Completed fraction of the stage, if its size is known."""
        return min(self.done / self.total, 1.0) if self.total else None


class Process:
    """A running program. Iterating yields its progress.

    The program runs in a process group of its own, so that Ctrl-C reaches only Python, which then asks the program to
    stop once: a second signal would end it without removing its unfinished files.
    """

    def __init__(self, arguments: Sequence[str], recipe: Mapping[str, Any] | None = None, files: contextlib.ExitStack | None = None) -> None:
        """Starts the program. `recipe` is passed on standard input; `files` is closed when the program ends."""
        self._cleanup = contextlib.ExitStack()
        self._cancelled = False
        self._failure: tuple[str, str | None] | None = None
        self._text: list[str] = []
        self._in_memory = recipe is not None
        with contextlib.ExitStack() as stack:
            if files is not None:
                stack.push(files)
            self._output: IO[bytes] = stack.enter_context(tempfile.TemporaryFile())
            text = json.dumps(recipe, indent=1).encode() if recipe is not None else b""
            with tempfile.TemporaryFile() as source:
                source.write(text)
                source.seek(0)
                command = [find_program(), *arguments, "--json", "--log-format", "json"]
                self._process = start(command, source, self._output)
            self._cleanup = stack.pop_all()
        self._events = self._read()

    def __iter__(self) -> Iterator[Progress]:
        return self._events

    def __enter__(self) -> Process:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.cancel()
        try:
            self._finish()
        except BaseException:
            self._process.kill()
            self._finish()
            raise
        if isinstance(error, KeyboardInterrupt) and self._failure:
            error.add_note(str(CompressError(*self._failure)))

    def cancel(self) -> None:
        """Asks the program to stop. It removes unfinished files and ends within a moment; `output` then raises `Cancelled`."""
        if not self._cancelled and self._process.poll() is None:
            self._cancelled = True
            self._process.send_signal(signal.SIGINT)

    def output(self) -> Any:
        """Waits for the program, and returns the JSON that it printed.

        Raises:
            CompressError: the program failed.
        """
        self._finish()
        code = self._process.returncode
        if code == 0:
            return self._result
        message, hint = self._failure or plain_failure(self._text, code)
        if self._cancelled:
            raise Cancelled("interrupted; nothing was written" if code == -signal.SIGINT else message, hint, code)
        raise (UsageError if code == 2 else CompressError)(message, hint, code)

    def advice(self, text: str) -> str:
        """A message or a hint of the program for the caller."""
        return text

    def _finish(self) -> None:
        """Waits for the end of the program, and releases all files."""
        if self._process.stderr is None or self._process.stderr.closed:
            return
        for _ in self._events:
            pass
        # Only if iterating failed are lines left.
        for line in self._process.stderr:
            self._note(line)
        self._process.wait()
        self._process.stderr.close()
        self._output.seek(0)
        text = self._output.read()
        self._cleanup.close()
        self._result: Any = json.loads(text) if text.strip() and self._process.returncode == 0 else None

    def _note(self, line: str) -> dict[str, Any]:
        """The event of a line. Keeps errors, and lines that are not events."""
        try:
            event: dict[str, Any] = json.loads(line)
            kind = event["event"]
        except (ValueError, TypeError, KeyError):
            self._text.append(line.rstrip())
            return {"event": "text"}
        if kind == "error":
            message, hint = self.advice(event["message"]), event.get("hint") and self.advice(event["hint"])
            self._failure = without_file(message, hint) if self._in_memory else (message, hint)
        return event

    def _read(self) -> Iterator[Progress]:
        now: Progress | None = None
        assert self._process.stderr is not None
        for line in self._process.stderr:
            event = self._note(line)
            kind = event["event"]
            if kind == "begin":
                now = begin(event)
            elif now is None:
                continue
            elif kind == "progress":
                now = Progress(now.stage, event["done"], now.total, now.unit, now.message)
            elif kind == "message":
                now = Progress(now.stage, now.done, now.total, now.unit, event["text"])
            elif kind == "end":
                now = Progress(now.stage, now.total or now.done, now.total, now.unit, now.message, finished=True)
            else:
                continue
            yield now
            if now.finished:
                now = None


def without_file(message: str, hint: str | None) -> tuple[str, str | None]:
    """A message and its hint without the lines of the recipe, which the caller has not written as a file."""
    lines = re.sub(r"^recipe: (line \d+ column \d+: )?", "", message).splitlines()
    message = "\n".join(line for line in lines if not re.match(r" *(-->|\d* *\|)", line))
    return message, None if hint and hint.startswith("`compress init") else hint


def begin(event: Mapping[str, Any]) -> Progress:
    """The first event of a stage."""
    unit: Unit = "bytes" if "bytes" in event else "samples" if "samples" in event else "steps"
    return Progress(event["stage"], 0, event[unit] or None, unit)


def start(command: Sequence[str], source: IO[bytes], output: IO[bytes]) -> subprocess.Popen[str]:
    """Starts a program with a process group of its own."""
    environment = dict(os.environ)
    if sys.prefix != sys.base_prefix:
        # The program finds ONNX Runtime in the environment of this Python, even if it is not activated.
        environment["VIRTUAL_ENV"] = sys.prefix
    try:
        return subprocess.Popen(
            command, stdin=source, stdout=output, stderr=subprocess.PIPE, text=True, encoding="utf-8", errors="replace", process_group=0, env=environment
        )
    except OSError as error:
        raise ProgramNotFound(f"cannot start {command[0]}: {error.strerror}", f"install the package again, or correct {PROGRAM_VARIABLE}") from error


def plain_failure(lines: Sequence[str], code: int) -> tuple[str, str | None]:
    """Message and hint of a program that failed without an error event: invalid arguments, a crash, a signal."""
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        hint = "the system ends processes if memory runs out: set `memory`, or use smaller batches" if -code == signal.SIGKILL else None
        return "\n".join([f"the program was ended by {name}", *lines]), hint
    text = "\n".join(lines).strip().removeprefix("error: ")
    message, _, rest = text.partition("\n\n")
    tips = [line.strip().removeprefix("tip: ") for line in rest.splitlines() if line.strip().startswith("tip: ")]
    return message or f"the program failed with exit code {code}", tips[0] if tips else None


def command(*arguments: Path) -> Any:
    """Runs any other command, and returns its output: `inspect`, `verify`, `check`, `diff`, `eval`, `doctor` and more.

    Raises:
        CompressError: the command failed; for `check`, a budget was exceeded.

    >>> command("inspect", "minilm")["parameters"] > 0
    True
    """
    with Process([os.fspath(argument) for argument in arguments] + ["--quiet"]) as process:
        return process.output()
