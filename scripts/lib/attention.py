"""The attention op, forward and with gradients, interleaved with PyTorch's scaled_dot_product_attention.

    attention.py SHAPE THREADS [--causal] [--backward]    PyTorch: responds to every line with milliseconds and the growth of its peak memory
"""

import statistics
import sys
import time

TOKENS = [512, 1024, 2048, 4096, 8192]
SHAPE = "1x12x{tokens}x64"
GOAL = 1.0


def peak():
    """Peak memory in bytes. `ru_maxrss` would be inherited from the parent."""
    with open("/proc/self/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith("VmHWM:"))


def torch_side(shape, threads, *flags):
    import torch

    torch.set_num_threads(int(threads))
    backward = "--backward" in flags
    sizes = [int(size) for size in shape.split("x")]
    inputs = [torch.randn(sizes, requires_grad=backward) for _ in range(3)]
    gradient = torch.randn(sizes)
    # Excludes what the library allocates at its first call.
    small = [torch.randn(1, 1, 16, 16, requires_grad=backward) for _ in range(3)]
    result = torch.nn.functional.scaled_dot_product_attention(*small)
    if backward:
        torch.autograd.grad(result.sum(), small)
    before = peak()
    for _ in sys.stdin:
        start = time.perf_counter()
        output = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal="--causal" in flags)
        if backward:
            torch.autograd.grad(output, inputs, gradient)
        print(1e3 * (time.perf_counter() - start), peak() - before, flush=True)


def measure(binary, python, turns, threads, say):
    """A row per job: milliseconds and bytes of both tools."""
    from lib.forward import Side

    rows = []
    for flags in (["--causal"], ["--causal", "--backward"], ["--backward"]):
        for tokens in TOKENS:
            shape = SHAPE.format(tokens=tokens)
            say(f"{shape} {' '.join(flags)}")
            sides = [Side([binary, "--shape", shape, *flags], threads), Side([python, __file__, shape, threads, *flags], threads)]
            try:
                pairs = [[side.turn() for side in sides] for _ in range(turns)]
                milliseconds = [[statistics.median(time for time, _ in pair[side]) for pair in pairs] for side in (0, 1)]
                peaks = [max(bytes for pair in pairs for _, bytes in pair[side]) for side in (0, 1)]
            finally:
                for side in sides:
                    side.close()
            rows.append({"tokens": tokens, "flags": flags, "milliseconds": milliseconds, "bytes": peaks})
    return rows


def show(rows, threads):
    print(f"attention of 12 heads of 64 in f32 on {threads} threads, interleaved with PyTorch's scaled_dot_product_attention")
    print(f"{'tokens':>6}  {'job':22}  {'compress':>10}  {'PyTorch':>10}  {'ratio (min to max)':>20}  {'goal':>6}  peak memory, both")
    for row in rows:
        ratios = [a / b for a, b in zip(*row["milliseconds"])]
        ours, theirs = map(statistics.median, row["milliseconds"])
        job = ", ".join(flag[2:] for flag in row["flags"]) if "--backward" in row["flags"] else "causal, forward"
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        memory = " and ".join(f"{bytes / 1e6:.0f} MB" for bytes in row["bytes"])
        print(f"{row['tokens']:>6}  {job:22}  {ours:7.1f} ms  {theirs:7.1f} ms  {spread:>20}  ≤ {GOAL:.1f}  {memory}")


if __name__ == "__main__":
    torch_side(*sys.argv[1:])
