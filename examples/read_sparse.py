#!/usr/bin/env python3
"""Reads a folder that compress wrote with `layout: sparse`, without compress: needs only Python and NumPy.

    examples/read_sparse.py FOLDER                   list the weights
    examples/read_sparse.py --check DENSE SPARSE     compare two folders bit for bit

Programs can call `weights(FOLDER)`, which yields one dense array at a time.

In the files, a weight NAME is stored as either

    NAME                                      the elements
    NAME.bitmask, NAME.values, NAME.shape     bit i % 8 of byte i / 8 is set if element i is stored

If NAME_scale exists too, the elements are int8, and their values are (element - NAME_zero_point) * NAME_scale. Scales
have the shape [1] (per tensor), [rows, 1], or [rows, groups per row].
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
    """Tensors of the files by name, as (dtype, array), and whether they include sparse ones."""
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
        sys.exit(f"{folder}: no tensors in *.safetensors")
    return tensors, sparse


def floats(dtype, array):
    """Converts bfloat16, which NumPy does not support, to float32."""
    return (array.astype("<u4") << 16).view("<f4") if dtype == "BF16" else array


def rounded(dtype, array):
    """Rounds float32 values to `dtype`, ties to even."""
    if dtype == "BF16":
        bits = array.view("<u4")
        return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view("<f4")
    return array.astype(DTYPES[dtype])


def expand(mask, values, shape):
    """Expands a sparse array to a dense one."""
    kept = np.unpackbits(mask, count=int(np.prod(shape)), bitorder="little").view(bool)
    if kept.sum() != values.size:
        raise ValueError(f"{kept.sum()} bits are set, but there are {values.size} values")
    dense = np.zeros(kept.size, values.dtype)
    dense[kept] = values
    return dense.reshape(shape)


def dequantize(integers, scale, zero_point):
    """Dequantizes int8 elements; `scale` is (dtype, array)."""
    dtype, scale = scale[0], floats(*scale).astype("f4")

    def spread(array):
        return array if array.size == 1 else np.repeat(array, integers.shape[1] // array.shape[1], axis=1)

    zero = 0 if zero_point is None else spread(zero_point.astype("f4"))
    return rounded(dtype, (integers.astype("f4") - zero) * spread(scale))


def weights(folder):
    """Yields pairs (name, dense array), in order of names."""
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
    """Describes the first difference, or returns None."""
    pairs = zip(weights(dense), weights(sparse), strict=True)
    try:
        for (name, a), (other, b) in pairs:
            if name != other:
                return f"{min(name, other)} is in only one of them"
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
