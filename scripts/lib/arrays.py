"""NumPy arrays in safetensors files."""

import numpy
from safetensors.numpy import save_file as save


def save_file(arrays, path, metadata=None):
    """Writes arrays in any memory layout. safetensors 0.8 writes the memory of transposed arrays unchanged, which
    scrambles their elements."""
    save({name: numpy.asarray(array, order="C") for name, array in arrays.items()}, path, metadata)
