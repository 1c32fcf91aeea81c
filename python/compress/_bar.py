"""A progress bar without dependencies."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

from ._process import Progress

INTERVAL = 0.1
WIDTH = 32


class Bar:
    """Shows the progress of a stage on one line, and clears it at the end."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._drawn, self._length = stream, 0.0, 0

    def __call__(self, event: Progress) -> None:
        """Draws an event, at most every tenth of a second."""
        now = time.monotonic()
        if event.finished:
            self.clear()
        elif now - self._drawn >= INTERVAL:
            self._drawn = now
            self._write(describe(event)[: columns(self._stream) - 1])

    def clear(self) -> None:
        """Removes the bar."""
        if self._length:
            self._write("")
            self._stream.write("\r")
            self._stream.flush()
            self._length = 0

    def _write(self, line: str) -> None:
        self._stream.write("\r" + line.ljust(self._length))
        self._stream.flush()
        self._length = len(line)


def columns(stream: TextIO) -> int:
    """The width of a terminal; a large one for other streams."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or 1000
    except (OSError, ValueError, AttributeError):
        return 1000


def describe(event: Progress) -> str:
    """A bar with the stage, the amounts and the message.

    >>> describe(Progress("write", 5_000_000, 20_000_000, "bytes"))
    'write           [========                        ]  25 %  5.0 MB of 20.0 MB'
    """
    fraction = event.fraction
    parts = [f"{event.stage:<15}"]
    if fraction is not None:
        parts.append(f"[{'=' * int(WIDTH * fraction):<{WIDTH}}] {100 * fraction:3.0f} % ")
    of = f" of {amount(event.total, event.unit)}" if event.total else ""
    parts.append(amount(event.done, event.unit) + of)
    return " ".join([*parts, event.message or ""]).rstrip()


def amount(count: int, unit: str) -> str:
    """A number with its unit; sizes in decimal units.

    >>> [amount(count, "bytes") for count in (12, 90_900_000, 2_200_000_000)], amount(3, "steps")
    (['12 B', '90.9 MB', '2.2 GB'], '3 steps')
    """
    if unit != "bytes":
        return f"{count} {unit}"
    size, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while size >= 999.95 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.0f} B" if units[0] == "B" else f"{size:.1f} {units[0]}"


class display:
    """The function that receives progress events. `progress` is as for `run`."""

    def __init__(self, progress: bool | Callable[[Progress], object] | None) -> None:
        # Programs without a terminal, such as those of pythonw, may have no stream for errors.
        stderr: TextIO | None = sys.stderr
        if progress is None:
            progress = stderr is not None and (stderr.isatty() or type(stderr).__module__.startswith("ipykernel."))
        self._bar = Bar(stderr) if stderr and progress and not callable(progress) else None
        self._show: Callable[[Progress], object] = progress if callable(progress) else self._bar or (lambda event: None)

    def __enter__(self) -> Callable[[Progress], object]:
        return self._show

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar:
            self._bar.clear()
