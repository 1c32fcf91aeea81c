"""Write tests/golden/low-rank.json: minimum errors of low-rank matrices and palettes, and factors of layers, by NumPy.

Matrices: squares of the omitted singular values (Eckart and Young), of a matrix and of its outputs for given
inputs.
Factors: those of a layer with a residual connection and of the next layer, whose inputs it changes.
Corrections of quantized layers: the error, whitened by a root of the second moments of the inputs, truncated and
multiplied by the inverse of the root (EoRA), and the truncated error itself.
Palettes: clusters of sorted values by dynamic programming over all of them.
"""

import json

import numpy as np

from lib import GOLDEN

rng = np.random.default_rng(7)


def numbers(*shape):
    # Exact in float32, with few digits.
    return np.round(rng.standard_normal(shape) * 64) / 64


def left_out(matrix):
    squares = np.linalg.svd(matrix, compute_uv=False) ** 2
    return [float(squares[rank:].sum()) for rank in range(1, len(squares))]


def matrix_case(rows, size, samples):
    matrix = numbers(rows, size)
    inputs = numbers(samples, size) * np.where(np.arange(size) % 5 == 2, 16, 1)
    return {
        "rows": rows,
        "size": size,
        "matrix": matrix.ravel().tolist(),
        "inputs": inputs.ravel().tolist(),
        "errors": left_out(matrix),
        "output_errors": left_out(matrix @ inputs.T)[: min(rows, size) - 1],
    }


# Damping of second moments, and fraction of the correction for changed inputs, of `decompose`.
DAMPING, CORRECTION_DAMPING, CORRECTION = 1e-6, 0.01, 0.25


def damped(moments, damping):
    return moments + damping * moments.diagonal().mean() * np.eye(len(moments))


def factors(matrix, inputs, rank):
    """Leading directions of the outputs, and the projection of a matrix onto them, with balanced norms."""
    moments = damped(inputs.T @ inputs, DAMPING)
    outer = np.linalg.eigh(matrix @ moments @ matrix.T)[1][:, ::-1][:, :rank]
    inner = outer.T @ matrix
    scale = np.sqrt(np.linalg.norm(inner, axis=1))
    return outer * scale, inner / scale[:, None]


def corrected(matrix, original, inputs):
    """Moves a weight towards the least-squares solution for the outputs of the original model."""
    moments = damped(inputs.T @ inputs, CORRECTION_DAMPING)
    products = matrix @ (original - inputs).T @ inputs
    return matrix + CORRECTION * np.linalg.solve(moments, products.T).T


def residual_case(samples, size, outputs, rank):
    first, second = numbers(size, size) / 4, numbers(outputs, size) / 4
    # The last rows are not calibration samples.
    rows = numbers(samples + 8, size) * np.where(np.arange(size) % 5 == 2, 4, 1)
    inputs = rows[:samples]
    outer, inner = factors(first, inputs, rank)
    original, changed = (inputs + inputs @ weight.T for weight in (first, outer @ inner))
    parts = [(outer, inner), factors(corrected(second, original, changed), changed, rank)]
    return {
        "rank": rank,
        "size": size,
        "weights": [weight.ravel().tolist() for weight in (first, second)],
        "samples": samples,
        "inputs": rows.ravel().tolist(),
        "factors": [{"outer": outer.ravel().tolist(), "inner": inner.ravel().tolist()} for outer, inner in parts],
    }


def truncated(matrix, rank):
    left, values, right = np.linalg.svd(matrix)
    return (left[:, :rank] * values[:rank]) @ right[:rank]


def correction_case(rows, size, samples, rank):
    matrix = numbers(rows, size)
    quantized = np.round(matrix * 2) / 2
    inputs = numbers(samples, size) * np.where(np.arange(size) % 5 == 2, 16, 1)
    values, vectors = np.linalg.eigh(inputs.T @ inputs)
    root, inverse = vectors * np.sqrt(values), (vectors / np.sqrt(values)).T
    return {
        "rank": rank,
        "size": size,
        "matrix": matrix.ravel().tolist(),
        "quantized": quantized.ravel().tolist(),
        "inputs": inputs.ravel().tolist(),
        "term": (truncated((matrix - quantized) @ root, rank) @ inverse).ravel().tolist(),
        "term_without_inputs": truncated(matrix - quantized, rank).ravel().tolist(),
    }


def least_error(values, weights, count):
    order = np.argsort(values)
    values, weights = values[order], weights[order]
    n = len(values)
    cost = np.zeros((n + 1, n + 1))
    for start in range(n):
        for end in range(start + 1, n + 1):
            v, w = values[start:end], weights[start:end]
            cost[start, end] = (w * (v - (w * v).sum() / w.sum()) ** 2).sum()
    best = cost[0].copy()
    for _ in range(count - 1):
        best = np.array([min(best[start] + cost[start, end] for start in range(end + 1)) for end in range(n + 1)])
    return float(best[n])


def palette_case(values, count):
    weights = np.round(rng.uniform(0.25, 2, len(values)) * 64) / 64
    ones = np.ones(len(values))
    return {
        "count": count,
        "values": values.tolist(),
        "weights": weights.tolist(),
        "error": least_error(values, ones, count),
        "weighted_error": least_error(values, weights, count),
    }


golden = {
    "made_by": "scripts/goldens low-rank",
    "numpy": np.__version__,
    "matrices": [matrix_case(9, 14, 40), matrix_case(14, 9, 40), matrix_case(10, 10, 6)],
    "palettes": [palette_case(numbers(80), 4), palette_case(numbers(80) ** 3, 16), palette_case(np.round(numbers(90)), 8)],
    "residual": residual_case(96, 12, 18, 5),
    "corrections": [correction_case(9, 14, 60, 3), correction_case(14, 9, 60, 3)],
}
path = GOLDEN / "low-rank.json"
path.write_text(json.dumps(golden) + "\n")
