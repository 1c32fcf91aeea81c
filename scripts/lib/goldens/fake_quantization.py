"""Write tests/golden/fake-quantization.safetensors: values and gradients of fake quantization, by automatic
differentiation of PyTorch in float64.

    scripts/goldens fake-quantization

"weights/in" [8, 64] and "weights/gradient", that of the rounded weight, belong to all formats. "weights/FORMAT/…":
the stored "scales" of consecutive elements (and "global", which divides them), "logarithms" that multiply the
scales by their exponentials, the "rounded" weight, and "scale-gradient", that of the logarithms. Scales are rounded
to their format with a straight-through gradient of their logarithms.

"activations/in" [2, 5, 64] and "activations/gradient", that of the rounded activations, belong to all schemes.
"activations/SCHEME/…": the "rounded" activations, their "gradient", and the "scale" of static schemes. Scales are
constants. A value has no gradient if clipping changes it by more than half of the last step.

The script fails if noise of float32 would change a code, so that float32 computes the same codes.
"""

import torch
from compressed_tensors.quantization import preset_name_to_scheme
from compressed_tensors.quantization.quant_args import FP4_E2M1_DATA, FP6_E2M3_DATA
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from safetensors.torch import save_file

from lib import GOLDEN

NOISE = 1e-6
generator = torch.Generator().manual_seed(5)


def e4m3(x):
    return x.float().clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype)


def integers(bits):
    return lambda x: x.round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


# Nearest numbers of a format, and the range within which rounding is at most half a step.
FORMATS = {
    "e4m3": (e4m3, (-464.0, 464.0)),
    "e2m3": (lambda x: FP6_E2M3_DATA.cast_to_fp6(x.float()).to(x.dtype), (-7.75, 7.75)),
    "e2m1": (lambda x: FP4_E2M1_DATA.cast_to_fp4(x.float().clamp(-6, 6)).to(x.dtype), (-7.0, 7.0)),
    "int4": (integers(4), (-8.5, 7.5)),
    "int8": (integers(8), (-128.5, 127.5)),
}


def unrounded(scale):
    return scale


def nearest_power(scale):
    return torch.exp2(torch.log2(scale).round())


def stable(function, x):
    for factor in (1 - NOISE, 1 + NOISE):
        assert torch.equal(function(x * factor), function(x)), "a value is close to a tie: use another seed"


def fake_quantize(units, name):
    """Rounds with a straight-through gradient, which is zero outside of the range."""
    nearest, (low, high) = FORMATS[name]
    stable(nearest, units.detach())
    inside = torch.where((units >= low) & (units <= high), units, units.detach())
    return inside + (nearest(units) - inside).detach()


def learned(scale, logarithms, to_format):
    """Scales with a straight-through gradient of their logarithms."""
    exact = scale.log() + logarithms
    if to_format is not unrounded:
        stable(to_format, exact.detach().exp())
    return (exact + (to_format(exact.exp()).log() - exact).detach()).exp()


def weights(stored):
    weight = torch.randn(8, 64, generator=generator).double() * torch.logspace(-1, 1, 8).double()[:, None]
    gradient = torch.randn(8, 64, generator=generator).double()
    stored["weights/in"], stored["weights/gradient"] = weight, gradient
    largest_power = {"e2m1": 2, "e2m3": 2, "e4m3": 8}

    def add(name, codes, blocks, scale_of, to_format=unrounded, factor=1.0):
        rows, columns = blocks
        tiles = weight.reshape(8 // rows, rows, 64 // columns, columns)
        largest = tiles.abs().amax((1, 3))
        scale = scale_of(largest).float().double()
        logarithms = (torch.rand(scale.shape, generator=generator).double() * 0.8 - 0.6).float().double().requires_grad_()
        steps = learned(scale, logarithms, to_format) / factor
        steps = steps[:, None, :, None].expand(tiles.shape)
        units = tiles / steps
        rounded = (fake_quantize(units, codes) * steps).reshape(8, 64)
        (rounded * gradient).sum().backward()
        assert (units.abs() > FORMATS[codes][1][1]).any() and (logarithms.grad != 0).all(), name
        # In memory, each row of a block has a scale, unless one scale is for the tensor.
        spread = scale if rows in (1, 8) else scale.repeat_interleave(rows, 0)
        found = {"scales": spread, "logarithms": logarithms, "rounded": rounded, "scale-gradient": logarithms.grad}
        stored.update({f"weights/{name}/{key}": value.detach() for key, value in found.items()})
        for key in ("scales", "logarithms", "scale-gradient"):
            stored[f"weights/{name}/{key}"] = stored[f"weights/{name}/{key}"].flatten()
        if factor != 1.0:
            stored[f"weights/{name}/global"] = torch.tensor([factor]).double()

    add("int4", "int4", (1, 16), lambda largest: largest / 7.5)
    add("int8", "int8", (1, 64), lambda largest: largest / 127.5)
    add("fp8-tensor", "e4m3", (8, 64), lambda largest: largest / 448)
    add("fp8-channel", "e4m3", (1, 64), lambda largest: largest / 448)
    add("fp8-block", "e4m3", (4, 32), lambda largest: largest / 448)
    factor = (448 * 6 / weight.abs().max()).float().item() / 2
    add("nvfp4", "e2m1", (1, 16), lambda largest: e4m3(factor * largest / 6), e4m3, factor)
    for name, codes in (("mxfp4", "e2m1"), ("mxfp6", "e2m3"), ("mxfp8", "e4m3")):
        power = largest_power[codes]
        add(name, codes, (1, 32), lambda largest: torch.exp2(torch.log2(largest).floor() - power), nearest_power)


def activations(stored):
    x = torch.randn(2, 5, 64, generator=generator) * torch.tensor([1e-3, 1.0, 40.0, 0.5, 7.0])[None, :, None]
    x[0, 4, ::17] *= 50
    # A negative largest value is halfway between two int8.
    x[..., 5] = x.abs().amax(-1) * 1.25
    gradient = torch.randn(2, 5, 64, generator=generator).double()
    stored["activations/in"], stored["activations/gradient"] = x, gradient
    largest = x.abs().max()

    def add(name, codes, scale, group, static=None):
        wide = x.double().requires_grad_()
        units = wide.reshape(*x.shape[:-1], -1, group) / scale.double()
        clipped = units.abs() > FORMATS[codes][1][1]
        # Of int8, the largest number of steps is 127.5.
        assert clipped.any() == (static is not None) or codes == "int8", name
        nearest, _ = FORMATS[codes]
        constant = units if codes == "int8" else torch.where(clipped, units.detach(), units)
        stable(nearest, units.detach())
        rounded = ((constant + (nearest(units) - constant).detach()) * scale.double()).reshape(x.shape)
        (rounded * gradient).sum().backward()
        stored.update({f"activations/{name}/rounded": rounded.detach(), f"activations/{name}/gradient": wide.grad})
        if static is not None:
            stored[f"activations/{name}/scale"] = static.reshape(1)

    def dynamic(scheme):
        args = preset_name_to_scheme(scheme, ["Linear"]).input_activations
        return compute_dynamic_scales_and_zp(x, args, None)[0].float()

    add("int8-token", "int8", dynamic("W8A8")[..., None], 64)
    add("fp8-token", "e4m3", dynamic("FP8_DYNAMIC")[..., None], 64)
    static = (largest / 448 / 3).reshape(())
    add("fp8-static", "e4m3", static, 64, static)
    for name, codes, scheme in (("mxfp4", "e2m1", "MXFP4"), ("mxfp8", "e4m3", "MXFP8")):
        add(name, codes, dynamic(scheme).reshape(2, 5, 2, 1), 32)
    # The E4M3 scales of the largest groups are clipped.
    static = (448 * 6 / largest * 3).reshape(())
    scale = e4m3(static * (x.reshape(2, 5, 4, 16).abs().amax(-1, keepdim=True) / 6))
    scale[scale == 0] = 0.125
    add("nvfp4", "e2m1", scale / static, 16, static)


def main():
    stored = {}
    weights(stored)
    activations(stored)
    save_file({key: value.contiguous() for key, value in stored.items()}, GOLDEN / "fake-quantization.safetensors")


main()
