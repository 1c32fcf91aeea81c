"""Write tests/golden/training/dropout.safetensors: dropout in a residual branch, by PyTorch in f32.

    scripts/goldens dropout

With "x" [4, 3] and "w" [3, 3], y = x w^T with dropout, and u = (x + y) w^T. "u" is the result, and "gradient" that of
"w" if sin(u) is the gradient of u. Dropout is native_dropout of PyTorch and its backward pass, with the mask that the
seed, the node and the numbers of the samples determine: "mask" has 1 where an element remains. RATE, SEED, NODE and
FIRST are those of the test.

With "q" [2, 4, 6, 3], and "k" and "v" of two heads, "attended" is causal attention with dropout of its probabilities,
with the mask "probabilities", and "q_gradient", "k_gradient" and "v_gradient" are the gradients if sin("attended") is
that of the output.
"""

import functools

import torch
from safetensors.torch import save_file

from lib import GOLDEN

RATE, SEED, NODE, FIRST = 0.4, 5, 0, 2
MASK = (1 << 64) - 1


def mix(state):
    """The output function of SplitMix64."""
    state = (state + 0x9E3779B97F4A7C15) & MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return state ^ (state >> 31)


def row(numbers, width):
    """Which elements remain of the stream with these numbers."""
    key = functools.reduce(lambda key, number: mix(key ^ number), numbers, SEED)
    return [(mix((key + at) & MASK) >> 11) / 2**53 >= RATE for at in range(width)]


def kept(rows, width):
    return torch.tensor([row([NODE, FIRST + number], width) for number in range(rows)])


def kept_probabilities(batch, heads, tokens):
    rows = [row([NODE, FIRST + number, head, query], tokens) for number in range(batch) for head in range(heads) for query in range(tokens)]
    return torch.tensor(rows).reshape(batch, heads, tokens, tokens)


class Dropout(torch.autograd.Function):
    """Dropout with a given mask."""

    @staticmethod
    def forward(ctx, value, mask):
        ctx.save_for_backward(mask)
        return value * mask / (1 - RATE)

    @staticmethod
    def backward(ctx, gradient):
        return torch.ops.aten.native_dropout_backward(gradient, *ctx.saved_tensors, 1 / (1 - RATE)), None


def attention():
    number = lambda seed, *shape: torch.tensor([((at * at * 7919 + 31 * at + seed) % 1013) / 506 - 1 for at in range(torch.Size(shape).numel())]).reshape(shape)
    q, k, v = (number(seed, 2, heads, 6, width).requires_grad_() for seed, (heads, width) in enumerate([(4, 3), (2, 3), (2, 5)]))
    mask = kept_probabilities(2, 4, 6)
    scores = 0.5 * q @ k.repeat_interleave(2, 1).transpose(2, 3) + torch.full((6, 6), float("-inf")).triu(1)
    output = Dropout.apply(scores.softmax(-1), mask) @ v.repeat_interleave(2, 1)
    output.backward(output.detach().sin())
    tensors = {"q": q, "k": k, "v": v, "probabilities": mask.float(), "attended": output}
    return tensors | {f"{name}_gradient": tensors[name].grad for name in "qkv"}


def main():
    x, w = (torch.tensor([(at * 5 % 7) / 3 - 1 for at in range(count * 3)]).reshape(count, 3) for count in (4, 3))
    w.requires_grad_()
    mask = kept(4, 3)
    u = (x + Dropout.apply(x @ w.T, mask)) @ w.T
    u.backward(u.detach().sin())
    tensors = {"x": x, "w": w, "mask": mask.float(), "u": u, "gradient": w.grad, **attention()}
    save_file({name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}, GOLDEN / "training" / "dropout.safetensors")


if __name__ == "__main__":
    main()
