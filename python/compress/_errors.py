"""Exceptions."""

from __future__ import annotations


class CompressError(Exception):
    """A run that failed.

    >>> error = CompressError("tensor `w` holds 3 NaN or infinite values", "set allow_nonfinite", 1)
    >>> print(error)
    tensor `w` holds 3 NaN or infinite values
    hint: set allow_nonfinite
    """

    message: str
    """The problem, with the name of the file, tensor, option or line."""

    hint: str | None
    """How to fix it, if known."""

    exit_code: int | None
    """Exit code of the program; negative for a signal, None if it did not start."""

    def __init__(self, message: str, hint: str | None = None, exit_code: int | None = None) -> None:
        super().__init__(message, hint, exit_code)
        self.message, self.hint, self.exit_code = message, hint, exit_code

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class UsageError(CompressError, ValueError):
    """An option, a recipe or data that is invalid: a retry cannot help."""


class Cancelled(CompressError):
    """A run that `Job.cancel` stopped. Nothing was written, except checkpoints of a training."""


class ProgramNotFound(CompressError, FileNotFoundError):
    """The program is not installed in this environment."""
