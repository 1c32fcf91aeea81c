"""Write tests/golden/narrow.json: the rounding of bfloat16 values to E4M3, E2M3 and E2M1 in PyTorch and
compressed-tensors.

Codes increase with magnitude, so the smallest bfloat16 value of each code defines the rounding completely.
"""

import json

import torch
from compressed_tensors.compressors.mxfp6.helpers import pack_fp6_to_uint8, unpack_fp6_from_uint8
from compressed_tensors.quantization.quant_args import FP4_E2M1_DATA, FP6_E2M3_DATA

from lib import GOLDEN

bits = torch.arange(0x7F81, dtype=torch.int32).to(torch.int16)
values = bits.view(torch.bfloat16).float()


def e4m3(x):
    return x.clamp(-448, 448).to(torch.float8_e4m3fn)


def both(rounded, codes, table):
    first = [int(torch.nonzero(codes == code)[0]) for code in range(len(table))]
    assert torch.equal(codes, codes.sort().values) and torch.equal(table[codes.long()], rounded)
    return {"first": first, "values": table.tolist()}


# Rounding is the same for both signs.
assert torch.equal(e4m3(-values).float(), -e4m3(values).float())
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
fp4 = FP4_E2M1_DATA.cast_to_fp4(values.clamp(-6, 6))
assert torch.equal(FP4_E2M1_DATA.cast_to_fp4(-values.clamp(-6, 6)), -fp4)
fp6 = FP6_E2M3_DATA.cast_to_fp6(values)
assert torch.equal(FP6_E2M3_DATA.cast_to_fp6(-values), -fp6)
# A code followed by three zeros is the low six bits of the first byte.
fp6_codes = pack_fp6_to_uint8(torch.nn.functional.pad(fp6[:, None], (0, 3)))[:, 0]
fp6_table = unpack_fp6_from_uint8(torch.nn.functional.pad(torch.arange(32, dtype=torch.uint8)[:, None], (0, 2)), 32, 4)[:, 0].float()
table = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
golden = {
    "made_by": "scripts/goldens narrow",
    "torch": torch.__version__.split("+")[0],
    "e4m3": both(e4m3(values).float(), e4m3(values).view(torch.uint8), table),
    "e2m3": both(fp6, fp6_codes, fp6_table),
    "e2m1": both(fp4, (fp4[:, None] == FP4).int().argmax(1), FP4),
}
path = GOLDEN / "narrow.json"
path.write_text(json.dumps(golden) + "\n")

# Activations, rounded as in a runtime that computes in floats.
from compressed_tensors.quantization import QuantizationArgs, preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from safetensors.torch import save_file

torch.manual_seed(0)
rows = torch.randn(1, 5, 256) * torch.tensor([1e-3, 1.0, 40.0, 0.0, 7.0])[None, :, None]
rows[0, 4, ::17] *= 50
stored = {"in": rows}
largest = rows.abs().max()


def arguments(scheme) -> QuantizationArgs:
    return preset_name_to_scheme(scheme, ["Linear"]).input_activations


for scheme in ("FP8_DYNAMIC", "FP8_BLOCK", "MXFP4", "MXFP8"):
    args = arguments(scheme)
    scale, zero_point = compute_dynamic_scales_and_zp(rows, args, None)
    stored[scheme] = fake_quantize(rows, scale, zero_point, args)
stored["FP8_scale"] = (largest / 448).reshape(1)
stored["FP8"] = fake_quantize(rows, stored["FP8_scale"], torch.zeros(1), arguments("FP8"))
stored["NVFP4_scale"] = (448 * 6 / largest).reshape(1)
args = arguments("NVFP4")
scale, zero_point = compute_dynamic_scales_and_zp(rows, args, None, stored["NVFP4_scale"])
stored["NVFP4"] = fake_quantize(rows, scale, zero_point, args, global_scale=stored["NVFP4_scale"])
save_file({key: value.float().contiguous() for key, value in stored.items()}, path.with_name("narrow-rows.safetensors"))
