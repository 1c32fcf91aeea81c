"""The program: its location, its process, and the events that it reports."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any, Literal, TypeAlias

from ._errors import Cancelled, CompressError, ProgramNotFound, UsageError

Path: TypeAlias = str | os.PathLike[str]

Unit: TypeAlias = Literal["bytes", "samples", "steps"]

PROGRAM_VARIABLE = "COMPRESS_PROGRAM"

# Number of unread events after which a job keeps only some of them.
MAX_UNREAD = 1000


def positional(path: Path) -> str:
    """A path as an argument of the command line, which does not take it for an option or standard input."""
    text = os.fspath(path)
    return f"./{text}" if text.startswith("-") else text


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
    """Completed units. The last event of a stage has `total`, also if the stage ended early or failed."""

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
        self._cancelled = False
        self._failure: tuple[str, str | None] | None = None
        self._text: list[str] = []
        self._in_memory = recipe is not None
        self._events = Events()
        with contextlib.ExitStack() as stack:
            if files is not None:
                stack.push(files)
            output: IO[bytes] = stack.enter_context(tempfile.TemporaryFile())
            text = json.dumps(recipe, indent=1).encode() if recipe is not None else b""
            with tempfile.TemporaryFile() as source:
                source.write(text)
                source.seek(0)
                self._program = find_program()
                command = [self._program, "--json", "--log-format", "json", *arguments]
                self._process = start(command, source, output)
            self._guard = guard(self._process.pid)
            # A program whose events are not read would stop at a full pipe.
            threading.Thread(target=self._read, args=(output, stack.pop_all()), name="compress", daemon=True).start()

    def __iter__(self) -> Iterator[Progress]:
        return iter(self._events)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.cancel()
        try:
            self._events.wait()
        except BaseException:
            self._process.kill()
            self._events.wait()
            raise
        if isinstance(error, KeyboardInterrupt) and self._failure:
            error.add_note(str(CompressError(*self._failure)))

    def cancel(self) -> None:
        """Asks the program to stop. It removes unfinished files and ends within a moment; `output` then raises `Cancelled`."""
        if not self._cancelled and self._process.poll() is None:
            self._cancelled = True
            # Not SIGINT, which a new program ignores if Python does, as in the background of a shell.
            self._process.terminate()

    def output(self) -> Any:
        """Waits for the program, and returns the JSON that it printed.

        Raises:
            CompressError: the program failed.
        """
        self._events.wait()
        code = self._process.returncode
        if code == 0:
            try:
                return json.loads(self._result)
            except ValueError as error:
                found = self._result.decode(errors="replace").strip().partition("\n")[0]
                advice = f"run it by `subprocess` for help and --version; if it is another program, correct {PROGRAM_VARIABLE}"
                raise CompressError(f"{self._program} printed no JSON, but {found!r}", advice, code) from error
        message, hint = self._failure or plain_failure(self._text, code)
        if self._cancelled:
            raise Cancelled("interrupted; nothing was written" if code == -signal.SIGTERM else message, hint, code)
        raise (UsageError if code == 2 else CompressError)(message, hint, code)

    def advice(self, text: str) -> str:
        """A message or a hint of the program for the caller."""
        return text

    def _read(self, output: IO[bytes], files: contextlib.ExitStack) -> None:
        """Reads the events and the output of the program until it ends, and releases all files."""
        assert self._process.stderr is not None
        with self._events, files:
            now: Progress | None = None
            with self._process.stderr as lines:
                for line in lines:
                    if event := self._event(line, now):
                        self._events.put(event)
                        now = None if event.finished else event
            # Before the identifier of the process can be that of another one.
            if self._guard:
                self._guard.communicate(b"\n")
            self._process.wait()
            output.seek(0)
            self._result = output.read()

    def _event(self, line: str, now: Progress | None) -> Progress | None:
        """The progress that a line reports. Keeps errors, and lines that are not events."""
        try:
            event: dict[str, Any] = json.loads(line)
            kind = event["event"]
            if kind == "error":
                message, hint = self.advice(event["message"]), event.get("hint") and self.advice(event["hint"])
                self._failure = without_samples(*(without_file(message, hint) if self._in_memory else (message, hint)))
            elif kind == "begin":
                return begin(event)
            elif now and kind == "progress":
                return dataclasses.replace(now, done=event["done"])
            elif now and kind == "message":
                return dataclasses.replace(now, message=event["text"])
            elif now and kind == "end":
                return dataclasses.replace(now, done=now.total or now.done, finished=True)
        except (ValueError, TypeError, KeyError):
            self._text.append(line.rstrip())
        return None


class Events:
    """Progress of a run, which one thread reports and others read. Of many unread events of a stage, only some
    are kept.

    >>> with Events() as events:
    ...     for done in range(MAX_UNREAD + 9):
    ...         events.put(Progress("Training", done))
    >>> unread = list(events)
    >>> len(unread) == MAX_UNREAD, unread[0].done, unread[-1].done == MAX_UNREAD + 8
    (True, 0, True)
    """

    def __init__(self) -> None:
        self._unread: collections.deque[Progress] = collections.deque()
        self._changed = threading.Condition()
        self._ended = False

    def put(self, event: Progress) -> None:
        """Adds an event. If many are unread, it replaces the previous one, but not the first of a stage."""
        with self._changed:
            if len(self._unread) >= MAX_UNREAD:
                last = self._unread[-1]
                if (last.done or last.message) and not last.finished:
                    self._unread.pop()
            self._unread.append(event)
            self._changed.notify_all()

    def wait(self) -> None:
        """Waits for the end. Thread.join of Python 3.11 does not wait again after Ctrl-C."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended)

    def __iter__(self) -> Iterator[Progress]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._unread or self._ended)
                if not self._unread:
                    return
                event = self._unread.popleft()
            yield event

    def __enter__(self) -> Events:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the iterations after the events that are unread."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()


def without_file(message: str, hint: str | None) -> tuple[str, str | None]:
    """A message and its hint without the lines of the recipe, which the caller has not written as a file."""
    message = without_excerpt(re.sub(r"^recipe: (line \d+ column \d+: )?", "", message))
    return message, None if hint and hint.startswith("`compress init") else hint


def without_excerpt(message: str) -> str:
    """A message without the lines that it shows of a file."""
    return "\n".join(line for line in message.splitlines() if not re.match(r" *(-->|\d* *\|)", line))


def without_samples(message: str, hint: str | None) -> tuple[str, str | None]:
    """A message and its hint with the names of samples in place of the temporary files that contain them."""
    message, count = re.subn(rf"{re.escape(tempfile.gettempdir())}/compress-\w+/([\w-]+)(/\d+)?\.(safetensors|jsonl)", r"\1", message)
    return message, None if count and hint and hint.startswith("the file is damaged") else hint


def begin(event: Mapping[str, Any]) -> Progress:
    """The first event of a stage."""
    unit: Unit = "bytes" if "bytes" in event else "samples" if "samples" in event else "steps"
    return Progress(event["stage"], event.get("done", 0), event[unit] or None, unit)


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


def guard(process: int) -> subprocess.Popen[bytes] | None:
    """Starts a shell that stops a process if this one ends, even by SIGKILL, before it has sent a line to it."""
    command = ["/bin/sh", "-c", 'read -r line || kill "$0"', str(process)]
    try:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, process_group=0)
    except OSError:
        # An image of a container without a shell.
        return None


def plain_failure(lines: Sequence[str], code: int) -> tuple[str, str | None]:
    """Message and hint of a program that failed without an error event: invalid arguments, a crash, a signal."""
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        hint = "the system ends processes if memory runs out: set `memory`, or use smaller batches" if -code == signal.SIGKILL else None
        return "\n".join([f"the program was ended by {name}", *lines]), hint
    text = "\n".join(lines).strip().removeprefix("error: ")
    message, _, rest = text.partition("\n\n")
    # An argument that Python has written.
    if re.match(r"invalid value '\{", message):
        message = without_excerpt(re.sub(r"^invalid value '\{.*\}' for '--(\w+) <\w+>': (line \d+ column \d+: )?", r"\1: ", message))
    tips = [line.strip().removeprefix("tip: ") for line in rest.splitlines() if line.strip().startswith("tip: ")]
    return message or f"the program failed with exit code {code}", tips[0] if tips else None


def command(*arguments: Path) -> Any:
    """Runs any other command, and returns its JSON: `inspect`, `verify`, `check`, `diff`, `eval`, `doctor` and more.
    Commands that print text, such as `help`, are errors.

    Raises:
        CompressError: the command failed; for `check`, a budget was exceeded.

    >>> command("inspect", "minilm")["parameters"] > 0
    True
    """
    with Process(["--quiet", *(os.fspath(argument) for argument in arguments)]) as process:
        return process.output()
