"""Samples in memory, which the program reads from a temporary file."""

from __future__ import annotations

import array
import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias


class SupportsArray(Protocol):
    """Arrays of NumPy and tensors of other libraries that convert to them."""

    def __array__(self) -> Any: ...


ArrayLike: TypeAlias = SupportsArray | Sequence[Any] | float
"""An array, a tensor, or nested lists of numbers, arrays or tensors."""

InMemory: TypeAlias = SupportsArray | Mapping[str, ArrayLike] | Iterable[str] | Iterable[Mapping[str, ArrayLike]]
"""Arrays by input, one row per sample; an array for the only input; texts; or one mapping per sample, of arrays
or of the columns of a text."""

# Data types of safetensors by the format of a buffer, without its byte order.
TYPES = {"?": "BOOL", "b": "I8", "B": "U8", "e": "F16", "f": "F32", "d": "F64"}
INTEGERS = {"h": "I", "i": "I", "l": "I", "q": "I", "H": "U", "I": "U", "L": "U", "Q": "U"}


class Tensor:
    """An array as bytes in row-major order."""

    def __init__(self, kind: str, shape: Sequence[int], data: bytes) -> None:
        self.kind, self.shape, self.data = kind, tuple(shape), data

    @staticmethod
    def of(value: Any, name: str) -> Tensor:
        """Converts an array, a tensor, or nested lists of numbers or of these. `name` is for messages."""
        if holds_arrays(value):
            parts = [Tensor.of(part, name) for part in value]
            for part in parts:
                if (part.kind, part.shape) != (parts[0].kind, parts[0].shape):
                    raise ValueError(f"{name}: a list has arrays of type {parts[0].kind} and shape {parts[0].shape}, and of type {part.kind} and shape {part.shape}")
            return Tensor.stack(parts)
        # A masked array of NumPy converts to an array with the values that are masked.
        if hasattr(value, "filled") and hasattr(value, "mask") and value.mask.any():
            raise TypeError(f"{name} is an array with masked values: replace them, for example with .filled(0)")
        try:
            source = value.__array__() if hasattr(value, "__array__") else value
        except Exception as error:
            raise TypeError(f"{name} does not convert to NumPy: {error}; of PyTorch, pass tensor.detach().float().cpu()") from error
        try:
            view = memoryview(source)
        except (TypeError, ValueError, BufferError):
            if hasattr(source, "dtype"):
                raise unsupported(source.dtype, name) from None
            return from_numbers(source, name)
        order, code = (view.format[0], view.format[1:]) if view.format[:1] in ("<", ">", "=", "@", "!") else ("@", view.format)
        kind = TYPES.get(code) or (f"{INTEGERS[code]}{8 * view.itemsize}" if code in INTEGERS else None)
        if kind is None or order in (">", "!"):
            raise unsupported(getattr(source, "dtype", view.format), name)
        return Tensor(kind, view.shape or (), view.tobytes())

    @staticmethod
    def stack(tensors: Sequence[Tensor]) -> Tensor:
        """One tensor with a new first axis."""
        return Tensor(tensors[0].kind, (len(tensors), *tensors[0].shape), b"".join(tensor.data for tensor in tensors))


def unsupported(dtype: object, name: str) -> TypeError:
    """The error about an array with a type that the program does not read."""
    return TypeError(f"{name} is an array of type {dtype}, which is not supported: convert it, for example with .astype('float32')")


def holds_arrays(value: Any) -> bool:
    """Whether a value is nested lists with arrays, or with numbers of NumPy."""
    return isinstance(value, (list, tuple)) and any(hasattr(part, "__array__") or holds_arrays(part) for part in value)


def from_numbers(value: Any, name: str) -> Tensor:
    """A tensor of a number or of nested lists: integers as int64, others as float32."""

    def shape_of(part: Any) -> tuple[int, ...]:
        if isinstance(part, (list, tuple)):
            shapes = {shape_of(each) for each in part}
            if len(shapes) > 1:
                raise ValueError(f"{name}: the nested lists have different lengths")
            return (len(part), *(shapes.pop() if shapes else ()))
        if isinstance(part, (int, float)):
            return ()
        raise TypeError(f"{name} has a value of type {type(part).__name__}: expected an array, a tensor, or nested lists of numbers")

    def numbers(part: Any) -> Iterator[float]:
        if isinstance(part, (list, tuple)):
            for each in part:
                yield from numbers(each)
        else:
            yield part

    shape, flat = shape_of(value), list(numbers(value))
    kind, code = ("I64", "q") if all(isinstance(number, int) for number in flat) else ("F32", "f")
    try:
        return Tensor(kind, shape, struct.pack(f"<{len(flat)}{code}", *flat))
    except (struct.error, OverflowError) as e:
        raise ValueError(f"{name} has a number that {kind} cannot store: {e}") from e


def write_safetensors(path: str, tensors: Mapping[str, Tensor]) -> None:
    """Writes a file in the safetensors format: the size of the header, the header as JSON, the data."""
    header, end = {}, 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": tensor.kind, "shape": tensor.shape, "data_offsets": [end, end + len(tensor.data)]}
        end += len(tensor.data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(tensor.data)


def unbatch(batches: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The samples of batches, such as those of a data loader: one mapping for each row of the first axis.

    >>> list(unbatch([{"input_ids": [[101, 102], [101, 103]]}]))
    [{'input_ids': [101, 102]}, {'input_ids': [101, 103]}]
    """
    for batch in batches:
        if not isinstance(batch, Mapping) or not batch:
            raise TypeError(f"unbatch(): expected batches that are mappings of arrays, like {{'input_ids': ids}}; found {type(batch).__name__} {batch!r:.60}")
        for name, values in batch.items():
            if not hasattr(values, "__len__"):
                raise TypeError(f"unbatch(): `{name}` is no array with one row per sample, but {type(values).__name__} {values!r:.60}")
        counts = {name: len(values) for name, values in batch.items()}
        if len(set(counts.values())) > 1:
            raise ValueError(f"unbatch(): the arrays of a batch have different numbers of rows: {', '.join(f'`{name}` {count}' for name, count in counts.items())}")
        for row in range(min(counts.values())):
            # A Series of pandas selects by label, unlike its `iloc`.
            yield {name: getattr(values, "iloc", values)[row] for name, values in batch.items()}


def write_samples(samples: Any, name: str, folder: str) -> dict[str, str]:
    """Writes samples to a folder, and returns the options of a recipe that read them."""
    path = os.path.join(folder, name)
    if isinstance(samples, Mapping):
        return write_arrays(path, name, {key: Tensor.of(value, f"{name}: `{key}`") for key, value in samples.items()})
    if hasattr(samples, "__array__") or isinstance(samples, (memoryview, array.array)):
        return write_arrays(path, name, {"input": Tensor.of(samples, f"{name}: the array")})
    if not isinstance(samples, Iterable):
        raise TypeError(f"{name}: expected Data, a file, arrays, texts, or an iterable of mappings; found {type(samples).__name__}")
    texts: list[Mapping[str, Any]] = []
    rows: list[dict[str, Tensor]] = []
    for sample in samples:
        if isinstance(sample, str):
            texts.append({"text": sample})
        elif isinstance(sample, Mapping) and any(map(is_text, sample.values())):
            texts.append(sample)
        elif isinstance(sample, Mapping):
            # Converted now, because iterators may reuse the memory of their arrays.
            rows.append({key: Tensor.of(value, f"{name}: `{key}`") for key, value in sample.items()})
        if not isinstance(sample, (str, Mapping)) or (texts and rows):
            raise TypeError(f"{name}: expected texts, or one mapping of arrays for each sample; found a sample of type {type(sample).__name__}")
    if rows:
        return write_rows(path, name, rows)
    if not texts:
        raise ValueError(f"{name}: there are no samples")
    return write_texts(path, name, texts)


def is_text(value: Any) -> bool:
    """Whether a value of a sample is a text, or a chat: a list of messages."""
    return isinstance(value, str) or (isinstance(value, (list, tuple)) and bool(value) and isinstance(value[0], Mapping))


def write_texts(path: str, name: str, texts: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Writes one object per text, with its label and other columns."""
    try:
        lines = [json.dumps(dict(text), default=lambda value: value.tolist()) for text in texts]
    except (AttributeError, TypeError, ValueError) as error:
        raise TypeError(f"{name}: a sample with a text has a value that is not a text, a number or a list of messages: {error}") from error
    with open(path + ".jsonl", "w", encoding="utf-8") as file:
        file.writelines(line + "\n" for line in lines)
    labels = [key for key in ("label", "labels") if key in texts[0]]
    return {"text": path + ".jsonl", **({"label_column": labels[0]} if labels else {})}


def write_arrays(path: str, name: str, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Writes arrays with one row per sample."""
    if not tensors:
        raise ValueError(f"{name}: there are no arrays")
    for key, tensor in tensors.items():
        if not tensor.shape:
            raise ValueError(f"{name}: `{key}` is a number: pass an array with one row per sample")
    if len({tensor.shape[0] for tensor in tensors.values()}) > 1:
        counts = ", ".join(f"`{key}` {tensor.shape[0]}" for key, tensor in tensors.items())
        raise ValueError(f"{name}: the arrays have different numbers of rows: {counts}")
    write_safetensors(path + ".safetensors", tensors)
    return {"arrays": path + ".safetensors"}


def write_rows(path: str, name: str, samples: Sequence[Mapping[str, Tensor]]) -> dict[str, str]:
    """Writes one mapping per sample: as arrays, or as one file for each sample if their shapes differ."""
    keys = list(samples[0])
    for index, sample in enumerate(samples):
        if set(sample) != set(keys):
            raise ValueError(f"{name}: sample {index} has the arrays {sorted(sample)}, but sample 0 has {sorted(keys)}")
    for key in keys:
        if kinds := {sample[key].kind for sample in samples} - {samples[0][key].kind}:
            raise TypeError(f"{name}: `{key}` has values of type {samples[0][key].kind} and {kinds.pop()}")
    if all(sample[key].shape == samples[0][key].shape for sample in samples for key in keys):
        return write_arrays(path, name, {key: Tensor.stack([sample[key] for sample in samples]) for key in keys})
    os.mkdir(path)
    for index, sample in enumerate(samples):
        write_safetensors(os.path.join(path, f"{index:08}.safetensors"), {key: Tensor.stack([tensor]) for key, tensor in sample.items()})
    return {"arrays": path}
