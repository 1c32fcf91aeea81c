//! Sparse and quantized weights with inconsistent parts.

use super::{Case, case, check};
use crate::cli::support::{METADATA, Tensor, f32s, file, floats, tensor};

const SPARSE: &[(&str, &str)] = &[("format", "pt"), ("compress.sparse", "1")];
const RUN: &str = "densify in.safetensors -o out";

fn of(name: &'static str, metadata: &'static [(&str, &str)], tensors: Vec<Tensor>, message: &'static str, hint: &'static str) -> Case {
    case(name, move |folder| file(&folder.join("in.safetensors"), metadata, &tensors), RUN, 1, message, hint)
}

fn integers(name: &str, values: &[i64]) -> Tensor {
    tensor(name, "I64", &[values.len()], &values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>())
}

fn mask(bytes: &[u8]) -> Tensor {
    tensor("x.bitmask", "U8", &[bytes.len()], bytes)
}

/// `x` of shape `[4, 4]` with three non-zero values, with some parts replaced.
fn sparse(parts: Vec<Tensor>) -> Vec<Tensor> {
    let mut tensors = vec![mask(&[3, 0x80]), integers("x.shape", &[4, 4]), f32s("x.values", &[3], &[1.0, 2.0, 3.0])];
    for part in parts {
        match tensors.iter_mut().find(|t| t.name == part.name) {
            Some(place) => *place = part,
            None => tensors.push(part),
        }
    }
    tensors
}

fn without(part: &str) -> Vec<Tensor> {
    sparse(vec![]).into_iter().filter(|t| t.name != part).collect()
}

#[test]
fn bitmasks_of_other_tools() {
    let parts = vec![mask(&[3, 1]), f32s("x.compressed", &[3], &[1.0, 2.0, 3.0]), integers("x.shape", &[2, 8]), integers("x.row_offsets", &[0, 2])];
    let pt = &[("format", "pt")];
    check([of("sparse-bitmask", pt, parts, "tensor `x`: uses the sparse bitmask format of compressed-tensors", "start from the original checkpoint")]);
}

#[test]
fn the_sparse_layout() {
    let damaged = "`compress verify` shows whether it was damaged";
    let misfit = |name, part, message| of(name, SPARSE, sparse(vec![part]), message, damaged);
    check([
        of("too many bits", SPARSE, sparse(vec![mask(&[7, 0x80])]), "in.safetensors: a sparse mask has more bits set than there are values", ""),
        of("too few bits", SPARSE, sparse(vec![mask(&[1, 0x80])]), "in.safetensors: a sparse mask has fewer bits set than there are values", ""),
        misfit("a short mask", mask(&[7]), "tensor `x`: sparse parts do not match: 16 elements, a mask of 1 bytes, 3 values"),
        misfit("a mask of another type", f32s("x.bitmask", &[2], &[1.0, 2.0]), "tensor `x`: sparse parts do not match"),
        misfit("another shape", integers("x.shape", &[4, 5]), "tensor `x`: sparse parts do not match: 20 elements, a mask of 2 bytes, 3 values"),
        misfit("a shape that is too small", integers("x.shape", &[2]), "tensor `x`: sparse parts do not match: 2 elements"),
        misfit("a negative shape", integers("x.shape", &[-4, -4]), "tensor `x`: sparse parts do not match: negative size"),
        misfit("a shape that overflows", integers("x.shape", &[1 << 62, 1 << 62]), "tensor `x`: sparse parts do not match: the shape overflows"),
        misfit("a shape of another type", f32s("x.shape", &[2], &[4.0, 4.0]), "tensor `x`: sparse parts do not match: the shape is not a short I64 vector"),
        misfit(
            "a shape in two dimensions",
            tensor("x.shape", "I64", &[1, 2], &[4; 16]),
            "tensor `x`: sparse parts do not match: the shape is not a short I64 vector",
        ),
        of("no values", SPARSE, without("x.values"), "tensor `x`: sparse parts do not match: `x.values` is missing", damaged),
        of("no shape", SPARSE, without("x.shape"), "tensor `x`: sparse parts do not match: `x.shape` is missing", damaged),
        of(
            "dense as well",
            SPARSE,
            sparse(vec![floats("x", &[2])]),
            "tensor `x`: is stored twice, as `x.values`, `x.shape`, `x.bitmask` and as `x`",
            "write the file again",
        ),
        of(
            "a later version",
            &[("format", "pt"), ("compress.sparse", "2")],
            sparse(vec![]),
            "in.safetensors: sparse layout version 2 is not supported",
            "this version of compress reads layout 1",
        ),
        of(
            "int8 with too few scales",
            SPARSE,
            sparse(vec![tensor("x.values", "I8", &[3], &[1, 2, 3]), floats("x_scale", &[3, 1])]),
            "tensor `x`: scales of shape [3, 1] for int8 codes of shape [4, 4]",
            "write the file again",
        ),
    ]);
}

/// As dense tensors, the codes would be taken for values.
#[test]
fn codes_whose_scales_are_missing() {
    let hint = "save it again, or start from the original checkpoint";
    let bytes = |name: &str, dtype, shape: &[usize]| tensor(name, dtype, shape, &vec![1; shape.iter().product()]);
    let words = |name: &str, shape: &[usize]| tensor(name, "I32", shape, &vec![1; 4 * shape.iter().product::<usize>()]);
    let of = |name, tensors: Vec<Tensor>, message| of(name, METADATA, tensors, message, hint);
    check([
        of("words", vec![words("x.weight_packed", &[2, 1]), integers("x.weight_shape", &[2, 8])], "tensor `x.weight_scale`: is missing"),
        of("FP4", vec![bytes("x.weight_packed", "U8", &[2, 8])], "tensor `x.weight_scale`: is missing"),
        of(
            "packed codes of another type",
            vec![bytes("x.weight_packed", "I8", &[2, 8]), floats("x.weight_scale", &[2, 1])],
            "tensor `x.weight_packed`: contains codes of type I8, which is not supported",
        ),
        of("GPTQ without scales", vec![words("x.qweight", &[1, 8]), words("x.qzeros", &[1, 1])], "tensor `x.scales`: is missing"),
        of("GPTQ without zero points", vec![words("x.qweight", &[1, 8]), floats("x.scales", &[1, 8])], "tensor `x.qzeros`: is missing"),
        of("a palette without indices", vec![floats("x.weight_palette", &[1, 16])], "tensor `x.weight_packed`: is missing"),
        of(
            "FP8 with scales of DeepSeek",
            vec![bytes("x.weight", "F8_E4M3", &[2, 8]), floats("x.weight_scale_inv", &[1, 1])],
            "tensor `x.weight`: is of type F8_E4M3 with scales in `x.weight_scale_inv`, which is not supported",
        ),
        of(
            "E5M2",
            vec![bytes("x.weight", "F8_E5M2", &[2, 8]), floats("x.weight_scale", &[2, 1])],
            "tensor `x.weight`: is of type F8_E5M2 with scales in `x.weight_scale`, which is not supported",
        ),
    ]);
}

#[test]
fn words_of_gptq_and_awq() {
    let words = |name: &str, shape: &[usize]| tensor(name, "I32", shape, &vec![0x88; 4 * shape.iter().product::<usize>()]);
    let scales = |shape: &[usize]| tensor("x.scales", "F16", shape, &vec![0x3C; 2 * shape.iter().product::<usize>()]);
    let hint = "start from the original checkpoint, or save it again with GPTQModel or AutoAWQ";
    let gptq = |more: Vec<Tensor>| [vec![words("x.qweight", &[1, 8]), words("x.qzeros", &[1, 1]), scales(&[1, 8])], more].concat();
    check([
        of(
            "words of three bits",
            METADATA,
            vec![words("x.qweight", &[3, 32]), words("x.qzeros", &[1, 3]), scales(&[1, 32])],
            "tensor `x.weight`: is packed neither as GPTQ of 2, 4 or 8 bits nor as AWQ (GEMM): qweight I32 [3, 32], qzeros I32 [1, 3]",
            hint,
        ),
        of(
            "fewer zero points than groups",
            METADATA,
            vec![words("x.qweight", &[1, 8]), words("x.qzeros", &[1, 1]), scales(&[2, 8])],
            "tensor `x.weight`: its parts do not match",
            hint,
        ),
        of("words in a row", METADATA, vec![words("x.qweight", &[8]), words("x.qzeros", &[1, 1]), scales(&[1, 8])], "its parts are not matrices", hint),
        of(
            "groups that there are not",
            METADATA,
            gptq(vec![words("x.g_idx", &[8])]),
            "tensor `x.weight`: its g_idx I32 [8] does not assign a group to each input",
            hint,
        ),
        of(
            "activations with scales",
            METADATA,
            gptq(vec![floats("mlp.act.scales", &[8])]),
            "tensor `mlp.act.scales`: contains scales by which AutoAWQ divides the activations of a layer, which is not supported",
            "start from the original checkpoint",
        ),
        of("a weight twice", METADATA, gptq(vec![floats("x.weight", &[8, 8])]), "tensor `x.weight`: is stored twice", "write the file again"),
    ]);
}

#[test]
fn narrow_floats() {
    let fp8 = |more: Vec<Tensor>| [vec![tensor("x", "F8_E4M3", &[2, 2], &[1, 2, 3, 4])], more].concat();
    let again = "write the file again with a tool that follows compressed-tensors";
    check([
        of(
            "FP8 with zero points",
            METADATA,
            fp8(vec![floats("x_scale", &[1]), tensor("x_zero_point", "I8", &[1], &[0])]),
            "tensor `x`: zero points for fp8",
            again,
        ),
        of("FP8 with scales of another type", METADATA, fp8(vec![tensor("x_scale", "F64", &[1], &[0; 8])]), "tensor `x`: scales of type F64 for fp8", again),
        of(
            "FP8 with blocks that do not divide",
            METADATA,
            fp8(vec![floats("x_scale", &[1, 3])]),
            "tensor `x`: scales of shape [1, 3] for fp8 codes of shape [2, 2]",
            again,
        ),
        of(
            "NVFP4 without its global scale",
            METADATA,
            vec![tensor("x_packed", "U8", &[1, 8], &[0; 8]), tensor("x_scale", "F8_E4M3", &[1, 1], &[0x38])],
            "tensor `x`: the global scale of FP4 is missing",
            again,
        ),
        of(
            "NVFP4 with a global scale of nothing",
            METADATA,
            vec![tensor("x_packed", "U8", &[1, 8], &[0; 8]), tensor("x_scale", "F8_E4M3", &[1, 1], &[0x38]), tensor("x_global_scale", "F32", &[1], &[0; 4])],
            "tensor `x_global_scale`: is not a positive number",
            again,
        ),
    ]);
}

#[test]
fn quantized_weights() {
    let packed = |shape: &[i64]| vec![tensor("x_packed", "I32", &[2, 1], &[0x80; 8]), integers("x_shape", shape), floats("x_scale", &[2, 1])];
    let int8 = |more: Vec<Tensor>| [vec![tensor("x", "I8", &[2, 2], &[1, 2, 3, 4])], more].concat();
    let again = "write the file again with a tool that follows compressed-tensors";
    let newer = "write the file again with compressed-tensors 0.18 or newer";
    check([
        of("too many scales", METADATA, int8(vec![floats("x_scale", &[3])]), "tensor `x`: scales of shape [3] for int8 codes of shape [2, 2]", again),
        of(
            "groups that do not divide",
            METADATA,
            int8(vec![floats("x_scale", &[2, 3])]),
            "tensor `x`: scales of shape [2, 3] for int8 codes of shape [2, 2]",
            again,
        ),
        of("scales of another type", METADATA, int8(vec![tensor("x_scale", "F64", &[1], &[0; 8])]), "tensor `x`: scales of type F64", again),
        of(
            "too few zero points",
            METADATA,
            int8(vec![floats("x_scale", &[2, 1]), tensor("x_zero_point", "I8", &[1], &[0])]),
            "tensor `x`: zero points I8 [1] do not fit scales [2, 1]",
            again,
        ),
        of(
            "zero points of another type",
            METADATA,
            int8(vec![floats("x_scale", &[1]), floats("x_zero_point", &[1])]),
            "tensor `x`: zero points F32 [1] do not fit scales [1]",
            again,
        ),
        of(
            "integers that are not a matrix",
            METADATA,
            vec![tensor("x", "I8", &[4], &[0; 4]), floats("x_scale", &[1])],
            "tensor `x`: int8 codes of shape [4], not a matrix",
            again,
        ),
        of(
            "more than words hold",
            METADATA,
            packed(&[2, 17]),
            "tensor `x`: packed words of shape [2, 1] do not hold integers of 2 to 8 bits of the stated shape [2, 17]",
            newer,
        ),
        of("words of a negative shape", METADATA, packed(&[-2, 3]), "tensor `x`: packed words of shape [2, 1] do not hold", newer),
        of("words of one size too many, a negative one", METADATA, packed(&[-5, 2, 3]), "tensor `x`: packed words of shape [2, 1] do not hold", newer),
        of(
            "words without a shape",
            METADATA,
            packed(&[2, 3]).into_iter().filter(|t| t.name != "x_shape").collect(),
            "tensor `x`: packed weight without `weight_shape`",
            newer,
        ),
        of(
            "words beside floats",
            METADATA,
            [packed(&[2, 3]), vec![floats("x", &[2])]].concat(),
            "tensor `x`: is stored twice, as `x_scale`, `x_packed`, `x_shape` and as `x`",
            "write the file again",
        ),
    ]);
}
