"""Checks of parameters, so that messages name the function and the parameter instead of a line of a recipe."""

from __future__ import annotations

import collections.abc
import dataclasses
import difflib
import os
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

# Names of other tools for parameters.
ALIASES = {
    "bits": "scheme",
    "corpus": "keep",
    "data": "calibration",
    "dataset": "calibration",
    "eval": "evaluation",
    "exclude": "ignore",
    "format": "export",
    "lr": "learning_rate",
    "overwrite": "force",
    "ratio": "amount",
    "sparsity": "amount",
    "steps": "max_steps",
}


class Reusable:
    """Base of recipes and passes, which can run several times: replaces iterators by lists."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, Iterator):
                object.__setattr__(self, name, list(value))


def require_known(function: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raises TypeError for a parameter that a function does not have."""
    known = list(known)
    for name in names:
        if name in known:
            continue
        near = [ALIASES[name]] if ALIASES.get(name) in known else difflib.get_close_matches(name, known, 1)
        suggestion = f"; did you mean `{near[0]}`?" if near else f"; the parameters are {', '.join(sorted(known))}"
        raise TypeError(f"{function}() has no parameter `{name}`{suggestion}")


def require_types(function: str, values: Mapping[str, Any], kinds: Mapping[str, Any]) -> None:
    """Raises TypeError for a value that does not have the type of its parameter."""
    for name, value in values.items():
        if name in kinds and not matches(value, kinds[name]):
            found = "None" if value is None else f"{type(value).__name__} {value!r:.60}"
            raise TypeError(f"{function}(): `{name}`: expected {description(kinds[name])}, not {found}")


def matches(value: Any, kind: Any) -> bool:
    """Whether a value has a type. The program checks the values of texts and the keys of mappings."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return any(matches(value, each) for each in arguments)
    if origin is typing.Literal:
        return isinstance(value, str) or value in arguments
    # Numbers of NumPy, and arrays without axes.
    if kind in (int, float, bool) and hasattr(value, "item") and not getattr(value, "ndim", 0):
        value = value.item()
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if kind is types.NoneType:
        return value is None
    if origin is os.PathLike:
        return isinstance(value, os.PathLike)
    if origin is collections.abc.Callable:
        return callable(value)
    if origin in (collections.abc.Sequence, list):
        is_list = isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping))
        return is_list and (not isinstance(value, (list, tuple)) or all(matches(each, arguments[0]) for each in value))
    if origin is collections.abc.Mapping or typing.is_typeddict(kind):
        return isinstance(value, Mapping)
    if dataclasses.is_dataclass(kind):
        return isinstance(value, (typing.cast(type, kind), Mapping))
    return isinstance(value, kind) if kind in (str, bool) else True


def description(kind: Any) -> str:
    """A type in words."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(dict.fromkeys(map(description, arguments)))
    if origin is typing.Literal:
        return "one of " + ", ".join(map(repr, arguments))
    if kind is types.NoneType:
        return "None"
    if origin is os.PathLike:
        return "a path"
    if origin is collections.abc.Callable:
        return "a function"
    if origin in (collections.abc.Sequence, list):
        return f"a list of {'values' if arguments[0] is object else description(arguments[0])}"
    if origin is collections.abc.Mapping or typing.is_typeddict(kind):
        return "a dict"
    return f"recipe.{kind.__name__}" if dataclasses.is_dataclass(kind) and isinstance(kind, type) else getattr(kind, "__name__", str(kind))


def hints(kind: Any) -> dict[str, Any]:
    """Types of the fields of a class, without class variables, or of the parameters of a function."""
    return {name: hint for name, hint in typing.get_type_hints(kind).items() if typing.get_origin(hint) is not typing.ClassVar}
