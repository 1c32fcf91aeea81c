"""Reports of runs."""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import html
import json
import os
import sys
import tempfile
import types
import typing
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from . import sections
from ._bar import amount
from ._errors import CompressError
from ._process import Path, command, positional

if TYPE_CHECKING:
    import pandas


class Report(sections.Fields):
    """The report of a run, as in `report.json`. Notebooks show it as a page.

    >>> report = Report.open("out/int8")
    >>> report.size.ratio > 1
    True
    """

    _document: dict[str, Any]

    @classmethod
    def open(cls, path: Path) -> Report:
        """Reads the report of an output folder or file, local or remote, or a `report.json`.

        Raises:
            CompressError: there is no report.
        """
        return cls.from_dict(command("report", positional(path)))

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Report:
        """The report with the contents of a `report.json`. Keys of newer versions are preserved by `to_dict`."""
        try:
            report = cls(**values(cls, document))
        except (TypeError, KeyError, AttributeError) as error:
            raise CompressError(f"not a report: {error}", "use the program and the package of the same version") from error
        object.__setattr__(report, "_document", dict(document))
        return report

    def to_dict(self) -> dict[str, Any]:
        """The contents of `report.json`."""
        return self._document

    def to_html(self) -> str:
        """The report as one self-contained page."""
        with tempfile.TemporaryDirectory(prefix="compress-") as folder:
            with open(os.path.join(folder, "report.json"), "w", encoding="utf-8") as file:
                json.dump(self._document, file)
            page = os.path.join(folder, "page.html")
            command("report", folder, "--output", page)
            with open(page, encoding="utf-8") as file:
                return file.read()

    def to_pandas(self) -> pandas.DataFrame:
        """A table with one row per weight: name, shape, encoding, bytes, zeros, signal-to-noise ratio.

        Needs pandas.
        """
        import pandas

        columns = [field.name for field in dataclasses.fields(sections.Layer)]
        return pandas.DataFrame([dataclasses.asdict(layer) for layer in self.layers], columns=columns)

    def _repr_html_(self) -> str:
        # A frame keeps the styles of the page from those of the notebook.
        return f'<iframe srcdoc="{html.escape(self.to_html())}" sandbox="allow-scripts" style="width: 100%; height: 600px; border: 0"></iframe>'

    def __repr__(self) -> str:
        before, after = (amount(size.bytes, "bytes") for size in (self.size.before, self.size.after))
        ratio = self.size.ratio
        change = f"{1 / ratio:.2f} x larger" if ratio < 0.995 else f"{ratio:.2f} x smaller"
        return f"<Report: {', '.join(step.name for step in self.passes) or 'no passes'}: {before} -> {after}, {change}>"


@functools.cache
def hints(kind: type) -> dict[str, Any]:
    """Types of the fields of a class."""
    return typing.get_type_hints(kind)


def values(kind: type, document: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a class that a document has."""
    return {key: convert(hint, document[key]) for key, hint in hints(kind).items() if key in document and key != "_document"}


def convert(kind: Any, value: Any) -> Any:
    """A JSON value as a value of a type."""
    if value is None:
        return None
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return convert(next(each for each in arguments if each is not type(None)), value)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return kind(**values(kind, value))
    if origin is collections.abc.Sequence:
        return [convert(arguments[0], each) for each in value]
    if origin is tuple:
        return tuple(convert(argument, each) for argument, each in zip(arguments, value, strict=True))
    if origin is collections.abc.Mapping:
        return {key: convert(arguments[1], each) for key, each in value.items()}
    return value


class Module(types.ModuleType):
    """This module, with an error if it is called like the command `compress report`."""

    def __call__(self, *_: Any) -> Any:
        raise TypeError("`compress.report` is a module: read a report with `compress.Report.open(path)`")


sys.modules[__name__].__class__ = Module
