"""Write tests/golden/observers.json: the ranges that the calibration observers choose for synthetic samples.

    scripts/goldens observers

Everything is computed here from its definition, in float64. The samples of a case are generated from its seed:
state = state × 6364136223846793005 + 1442695040888963407 modulo 2⁶⁴, then u = (state >> 40) / 2²⁴; n is the sum
of twelve u, from the left, minus 6. A sample uses its random numbers in the order of the formula, is computed
in float64, and is stored as float32:

    normal      n
    gelu        m = n × 2; m × min(max(0.5 + 0.3 × m, 0), 1)
    heavy       n × n × n, times 30 if the next u is below 0.001
    relu        max(n, 0)
    uniform     (u × 2 - 1) × 0.0001
    zero        0
    constant    3

Histogram: R is the smallest power of two, from 2⁻¹⁰⁰ up, that no |x| exceeds; w = R / 4096; x is counted in bin
floor(x / w) + 4096 of 8192, or in the last one. The smallest and largest sample are stored exactly. All ranges
include zero; candidates are compared by `<` in the order listed.

minmax: the smallest and the largest sample.

moving-average: of batches of 1,000; the first sets both ends, every other moves them by 0.01 of the difference.

percentile: tail = (1 - p / 100) / 2; the values below which tail × count and
(1 - tail) × count samples are. Each is in the first bin whose cumulative count reaches that number, interpolated
linearly inside the bin, and clipped to the smallest and largest sample.

entropy: for T = i × w, with i from 128 in steps of 32 up to the first step not below the largest |x|, the range
from max(smallest, -T) to min(largest, T). The bins floor(low / w) + 4096 up to floor(high / w) + 4096 are
inside; the bin of zero, 4096, counts as empty, because clipped activations are in it and are exact in any
range. P: their counts, with those of all bins below added to the first, and of all bins above added to the
last. Q: bin j of the n inside belongs to level j × 255 // n, or to a separate one if n is below 255; the count
of a level is distributed evenly over its non-empty bins. Of P and Q, divided by their sums, the divergence Σ p
× ln(p / q) where p > 0, with q at least 1e-12; the minimum is chosen.

mse: for a = 1.00, 0.98 … 0.20, both ends of minmax times a; then from the best, only low times each a; then
from the best, only high. The minimum of the sum of count × (c - Q(c))² is chosen, where c is the center of a
bin, Q(c) = (q - zero) × scale, scale = (high - low) / 255, zero = -low / scale rounded, q = c / scale rounded +
zero; both clipped to 0 to 255, with round half to even.
"""

import json

import numpy

from lib import GOLDEN

FILE = GOLDEN / "observers.json"
# With 20,000, percentiles would be exactly between two samples, and the result would depend on the last bit.
COUNT = 21_000
BATCH, WEIGHT = 1000, 0.01
HALF = 4096
# Different candidates must differ by this much; otherwise the result would depend on the order of summation.
APART = 1e-9


class Source:
    def __init__(self, seed):
        self.state = seed

    def u(self):
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (self.state >> 40) / 2**24

    def n(self):
        return sum(self.u() for _ in range(12)) - 6


def gelu(source):
    m = source.n() * 2
    return m * min(max(0.5 + 0.3 * m, 0), 1)


def heavy(source):
    n = source.n()
    return n * n * n * (30 if source.u() < 0.001 else 1)


SAMPLES = {
    "normal": Source.n,
    "gelu": gelu,
    "heavy": heavy,
    "relu": lambda source: max(source.n(), 0),
    "uniform": lambda source: (source.u() * 2 - 1) * 0.0001,
    "zero": lambda source: 0,
    "constant": lambda source: 3,
}


class Histogram:
    def __init__(self, samples):
        self.low, self.high = float(samples.min()), float(samples.max())
        self.largest = max(abs(self.low), abs(self.high))
        self.radius = 2.0**-100
        while self.radius < self.largest:
            self.radius *= 2
        self.width = self.radius / HALF
        bins = numpy.floor(samples.astype(numpy.float64) / self.width).astype(numpy.int64) + HALF
        self.counts = numpy.bincount(numpy.clip(bins, 0, 2 * HALF - 1), minlength=2 * HALF)
        self.middles = (numpy.arange(2 * HALF) - HALF + 0.5) * self.width


def with_zero(low, high):
    return min(float(low), 0.0), max(float(high), 0.0)


def least(candidates, cost):
    """The first candidate with the minimum cost."""
    costs = {}
    for candidate in candidates:
        if candidate not in costs:
            costs[candidate] = cost(*candidate)
    best = min(costs, key=costs.get)
    assert all(c == best or value > costs[best] * (1 + APART) or value == costs[best] for c, value in costs.items()), costs
    return best


def minmax(histogram):
    return with_zero(histogram.low, histogram.high)


def moving_average(samples):
    low = high = None
    for batch in samples.astype(numpy.float64).reshape(-1, BATCH):
        if low is None:
            low, high = batch.min(), batch.max()
        else:
            low += WEIGHT * (batch.min() - low)
            high += WEIGHT * (batch.max() - high)
    return with_zero(low, high)


def percentile(histogram, p):
    until = numpy.cumsum(histogram.counts)
    tail = (1 - p / 100) / 2

    def at(fraction):
        wanted = fraction * until[-1]
        assert abs(wanted - round(wanted)) > 1e-6
        bin = int(numpy.searchsorted(until, wanted))
        inside = (wanted - (until[bin] - histogram.counts[bin])) / histogram.counts[bin]
        return min(max((bin - HALF + inside) * histogram.width, histogram.low), histogram.high)

    return with_zero(at(tail), at(1 - tail))


def divergence(histogram, low, high):
    first = int(numpy.floor(low / histogram.width)) + HALF
    behind = min(int(numpy.floor(high / histogram.width)) + HALF + 1, 2 * HALF)
    inside = histogram.counts[first:behind].astype(numpy.float64)
    inside[HALF - first] = 0
    p = inside.copy()
    p[0] += histogram.counts[:first].sum()
    p[-1] += histogram.counts[behind:].sum()
    q = numpy.zeros_like(inside)
    levels = numpy.arange(len(inside))
    if len(inside) >= 255:
        levels = levels * 255 // len(inside)
    for level in numpy.unique(levels):
        filled = (levels == level) & (inside > 0)
        q[filled] = inside[levels == level].sum() / max(filled.sum(), 1)
    p /= max(p.sum(), 1)
    q /= max(q.sum(), 1)
    seen = p > 0
    return float((p[seen] * numpy.log(p[seen] / numpy.maximum(q[seen], 1e-12))).sum())


def entropy(histogram):
    if histogram.largest == 0:
        return 0.0, 0.0
    last = int(numpy.ceil(histogram.largest / histogram.width / 32)) * 32
    limits = [i * histogram.width for i in range(min(128, last), last + 1, 32)]
    ranges = [with_zero(max(histogram.low, -limit), min(histogram.high, limit)) for limit in limits]
    return least(ranges, lambda low, high: divergence(histogram, low, high))


def squared_error(histogram, low, high):
    scale = (high - low) / 255
    zero = numpy.clip(numpy.round(-low / scale), 0, 255)
    q = numpy.clip(numpy.round(histogram.middles / scale) + zero, 0, 255)
    return float((histogram.counts * (histogram.middles - (q - zero) * scale) ** 2).sum())


def mse(histogram):
    low, high = minmax(histogram)
    if low == high:
        return low, high
    factors = [(100 - 2 * k) / 100 for k in range(41)]

    def best(candidates):
        return least(candidates, lambda low, high: squared_error(histogram, low, high))

    low, high = best([(low * a, high * a) for a in factors])
    low, high = best([(low * a, high) for a in factors])
    return best([(low, high * a) for a in factors])


def made(name, seed):
    source = Source(seed)
    samples = numpy.array([SAMPLES[name](source) for _ in range(COUNT)], dtype=numpy.float32)
    histogram = Histogram(samples)
    ranges = {
        "minmax": minmax(histogram),
        "moving-average": moving_average(samples),
        "percentile": percentile(histogram, 99.99),
        "percentile-99.9": percentile(histogram, 99.9),
        "entropy": entropy(histogram),
        "mse": mse(histogram),
    }
    assert all(low <= 0 <= high for low, high in ranges.values())
    first = [float(sample) for sample in samples[:3]]
    return {"name": name, "seed": seed, "count": COUNT, "first": first, "radius": histogram.radius, "ranges": ranges}


def main():
    cases = [made(name, seed) for seed, name in enumerate(SAMPLES, 1)]
    head = {"made_by": "scripts/goldens observers", "versions": {"numpy": numpy.__version__}}
    lines = ",\n".join("    " + json.dumps(case) for case in cases)
    FILE.write_text(json.dumps(head, indent=2)[:-2] + ',\n  "cases": [\n' + lines + "\n  ]\n}\n")
    for case in cases:
        print(case["name"])
        for observer, (low, high) in case["ranges"].items():
            print(f"  {observer:16} {low:12.6g} {high:12.6g}")


main()
