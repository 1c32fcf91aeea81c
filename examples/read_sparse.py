#!/usr/bin/env python3
"""Read a folder that compress wrote with `layout: sparse`, without compress: Python and NumPy are enough.

    examples/read_sparse.py FOLDER                   list the weights
    examples/read_sparse.py --check DENSE SPARSE     do both folders hold the same values, bit for bit?

A program calls `weights(FOLDER)`, which makes one dense array at a time.

In the files, a weight NAME is one of

    NAME                                      the elements
    NAME.bitmask, NAME.values, NAME.shape     bit i % 8 of byte i / 8 tells whether element i is stored

and when NAME_scale is there too, its elements are int8 and stand for (element - NAME_zero_point) * NAME_scale.
Scales have the shape [1] (one for all), [rows, 1], or [rows, groups of a row].
"""

import argparse
import json
import struct
import sys
from pathlib import Path

import numpy as np

DTYPES = {
    **{"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "BOOL": "?"},
    **{f"{kind.upper()}{8 * size}": f"<{kind}{size}" for kind in "iu" for size in (1, 2, 4, 8)},
}


def stored(folder):
    """What lies in the files, by name: (dtype, array), and whether it includes sparse tensors."""
    tensors, sparse = {}, False
    for path in sorted(Path(folder).glob("*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        sparse |= header.pop("__metadata__", {}).get("compress.sparse") == "1"
        data = np.memmap(path, mode="r")[8 + length :]
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            array = data[begin:end].view(DTYPES[entry["dtype"]]).reshape(entry["shape"])
            tensors[name] = entry["dtype"], array
    if not tensors:
        sys.exit(f"{folder}: no tensors in *.safetensors here")
    return tensors, sparse


def floats(dtype, array):
    """NumPy has no bfloat16; as float32 it keeps its values."""
    return (array.astype("<u4") << 16).view("<f4") if dtype == "BF16" else array


def rounded(dtype, array):
    """float32 values as the nearest of `dtype`, ties to even."""
    if dtype == "BF16":
        bits = array.view("<u4")
        return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view("<f4")
    return array.astype(DTYPES[dtype])


def expand(mask, values, shape):
    """The dense array of a sparse one."""
    kept = np.unpackbits(mask, count=int(np.prod(shape)), bitorder="little").view(bool)
    if kept.sum() != values.size:
        raise ValueError(f"{kept.sum()} bits are set, and there are {values.size} values")
    dense = np.zeros(kept.size, values.dtype)
    dense[kept] = values
    return dense.reshape(shape)


def dequantize(integers, scale, zero_point):
    """Values of int8 elements; `scale` is (dtype, array)."""
    dtype, scale = scale[0], floats(*scale).astype("f4")

    def spread(array):
        return array if array.size == 1 else np.repeat(array, integers.shape[1] // array.shape[1], axis=1)

    zero = 0 if zero_point is None else spread(zero_point.astype("f4"))
    return rounded(dtype, (integers.astype("f4") - zero) * spread(scale))


def weights(folder):
    """Pairs (name, dense array), in order of names."""
    tensors, sparse = stored(folder)
    suffixes = (".bitmask", ".values", ".shape")
    masked = {name.removesuffix(".bitmask") for name in tensors if sparse and name.endswith(".bitmask")}
    masked = {name for name in masked if all(name + suffix in tensors for suffix in suffixes)}
    scaled = {name.removesuffix("_scale") for name in tensors if name.endswith("_scale")}
    parts = {name + suffix for name in masked for suffix in suffixes}
    parts |= {name + suffix for name in scaled & (tensors.keys() | masked) for suffix in ("_scale", "_zero_point")}
    for name in sorted((tensors.keys() | masked) - parts):
        if name in masked:
            mask, values, shape = (tensors[name + suffix] for suffix in suffixes)
            dtype, array = values[0], expand(mask[1], values[1], shape[1])
        else:
            dtype, array = tensors[name]
        if name in scaled and dtype == "I8":
            zero_point = tensors.get(name + "_zero_point")
            yield name, dequantize(array, tensors[name + "_scale"], zero_point and zero_point[1])
        else:
            yield name, floats(dtype, array)


def difference(dense, sparse):
    """The first thing that differs, in words, or None."""
    pairs = zip(weights(dense), weights(sparse), strict=True)
    try:
        for (name, a), (other, b) in pairs:
            if name != other:
                return f"{min(name, other)} is in one of them only"
            if (a.dtype, a.shape) != (b.dtype, b.shape):
                return f"{name}: {a.dtype} {a.shape} and {b.dtype} {b.shape}"
            if a.tobytes() != b.tobytes():
                return f"{name}: {np.count_nonzero(a != b)} of {a.size} values differ"
    except ValueError as error:
        return str(error)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", metavar="DENSE", help="compare with this folder; exit code 1 when they differ")
    parser.add_argument("folder", metavar="FOLDER")
    args = parser.parse_args()
    if args.check:
        found = difference(args.check, args.folder)
        print(found or "equal")
        return 1 if found else 0
    for name, array in weights(args.folder):
        zeros = 1 - np.count_nonzero(array) / max(array.size, 1)
        print(f"{name}  {array.dtype} {list(array.shape)}  {zeros:.1%} zeros")
    return 0


if __name__ == "__main__":
    sys.exit(main())
