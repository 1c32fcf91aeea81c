//! Ops of object detectors: anchors, selection of queries, deformable attention.

use super::super::proto::AttributeProto;
use super::Lowering;
use crate::error::Result;
use crate::ir::ops::{AnchorUse, Anchors, DeformableAttention, GridPositions, TopK};

/// Applies an operator to the current node's input and 32-bit constants `[1, places, width]`.
fn with_constants(op: &str, key: &str, values: &[f32], shape: [i64; 3], n: &mut Lowering) -> Result<()> {
    let x = n.wide(&n.input(0))?;
    let values = n.share(&format!("{key} {shape:?}"), |n| {
        let (flat, shape) = (n.own_floats("values", values), n.ints(&shape));
        Ok(n.emit("Reshape", "by_place", &[&flat, &shape], vec![]))
    })?;
    n.finish_wide(op, &[&x, &values], vec![]);
    Ok(())
}

pub(super) fn grid_positions(op: &GridPositions, n: &mut Lowering) -> Result<()> {
    let width = n.width(0)?;
    let shape = [1, n.fixed(0, 1)?, width];
    with_constants("Add", &format!("grid_positions|{op:?}"), &op.embeddings(usize::try_from(width).unwrap_or(0)), shape, n)
}

pub(super) fn anchors(op: &Anchors, n: &mut Lowering) -> Result<()> {
    let (operator, width) = if op.apply == AnchorUse::Add { ("Add", 4) } else { ("Mul", 1) };
    with_constants(operator, &format!("anchors|{op:?}"), &op.numbers(), [1, n.fixed(0, 1)?, width], n)
}

pub(super) fn top_k(op: TopK, n: &mut Lowering) -> Result<()> {
    // Of 16-bit floats, ONNX Runtime has no kernel on a CPU.
    let (x, count) = (n.wide(&n.input(0))?, n.ints(&[op.count as i64]));
    let [_, indices] = n.emit_many("TopK", ["values", "indices"], &[&x, &count], vec![AttributeProto::int("axis", -1)]);
    n.finish("Identity", &[&indices], vec![]);
    Ok(())
}

pub(super) fn gather_tokens(n: &mut Lowering) -> Result<()> {
    let last = n.ints(&[2]);
    let indices = n.emit("Unsqueeze", "indices", &[&n.input(1), &last], vec![]);
    n.finish("GatherND", &[&n.input(0), &indices], vec![AttributeProto::int("batch_dims", 1)]);
    Ok(())
}

/// One `GridSample` for each feature map, in 32 bits: ONNX Runtime has no kernel for 16-bit floats on a CPU.
pub(super) fn deformable_attention(op: &DeformableAttention, n: &mut Lowering) -> Result<()> {
    let (queries, width, samples) = (n.fixed(2, 1)?, n.width(0)?, op.samples() as i64);
    let heads = n.width(2)? / samples.max(1);
    let (head_dim, levels) = (width / heads.max(1), op.levels.len());
    let mut inputs = Vec::with_capacity(4);
    for input in 0..4 {
        inputs.push(n.wide(&n.input(input))?);
    }
    let reshape = |n: &mut Lowering, part: &str, x: &str, shape: &[i64]| {
        let shape = n.ints(shape);
        n.emit("Reshape", part, &[x, &shape], vec![])
    };
    let transpose =
        |n: &mut Lowering, part: &str, x: &str, perm: &[i64]| n.emit("Transpose", part, &[x], vec![AttributeProto::ints("perm", perm.iter().copied())]);
    let perm = [0, 2, 1, 3, 4];

    // Positions from -1 to 1: twice the center minus one, plus twice the offset.
    let axes = n.ints(&[2, 3]);
    let boxes = n.emit("Unsqueeze", "boxes", &[&inputs[3], &axes], vec![]);
    let (last, [zero, two, four]) = (n.ints(&[-1]), [0, 2, 4].map(|at| n.ints(&[at])));
    let center = n.emit("Slice", "center", &[&boxes, &zero, &two, &last], vec![]);
    let size = n.emit("Slice", "size", &[&boxes, &two, &four, &last], vec![]);
    let offsets = reshape(n, "offsets", &inputs[1], &[-1, queries, heads, samples, 2]);
    let moved = n.emit("Mul", "relative_offsets", &[&offsets, &size], vec![]);
    let step = n.float_wide(2.0 * op.step());
    let moved = n.emit("Mul", "doubled_offsets", &[&moved, &step], vec![]);
    let (twice, one) = (n.float_wide(2.0), n.float_wide(1.0));
    let center = n.emit("Mul", "doubled_center", &[&center, &twice], vec![]);
    let center = n.emit("Sub", "grid_center", &[&center, &one], vec![]);
    let grid = n.emit("Add", "grid", &[&center, &moved], vec![]);
    let grid = transpose(n, "grid_of_heads", &grid, &perm);

    let places = n.fixed(0, 1)?;
    let values = reshape(n, "values", &inputs[0], &[-1, places, heads, head_dim]);
    let values = transpose(n, "values_of_heads", &values, &[0, 2, 3, 1]);
    let mut sampled = Vec::with_capacity(levels);
    let (mut first, three) = (0, n.ints(&[3]));
    for (level, [rows, columns]) in op.levels.iter().map(|sides| sides.map(|side| side as i64)).enumerate() {
        let part = |name: &str| format!("level_{level}/{name}");
        let cut = |n: &mut Lowering, name: &str, x: &str, from: i64, to: i64| {
            let [from, to] = [from, to].map(|at| n.ints(&[at]));
            n.emit("Slice", &part(name), &[x, &from, &to, &three], vec![])
        };
        let places = cut(n, "places", &values, first, first + rows * columns);
        let image = reshape(n, &part("image"), &places, &[-1, head_dim, rows, columns]);
        let (level, points) = (level as i64, op.points as i64);
        let positions = cut(n, "positions", &grid, level * points, (level + 1) * points);
        let positions = reshape(n, &part("grid"), &positions, &[-1, queries, points, 2]);
        let mode = if n.opset >= 20 { "linear" } else { "bilinear" };
        let attributes = vec![AttributeProto::text("mode", mode), AttributeProto::text("padding_mode", "zeros"), AttributeProto::int("align_corners", 0)];
        sampled.push(n.emit("GridSample", &part("sampled"), &[&image, &positions], attributes));
        first += rows * columns;
    }
    let sampled = n.emit("Concat", "sampled", &sampled.iter().map(String::as_str).collect::<Vec<_>>(), vec![AttributeProto::int("axis", 3)]);

    let scores = reshape(n, "scores", &inputs[2], &[-1, queries, heads, samples]);
    let weights = n.emit("Softmax", "weights", &[&scores], vec![AttributeProto::int("axis", -1)]);
    let weights = transpose(n, "weights_of_heads", &weights, &perm[..4]);
    let weights = reshape(n, "weights_of_samples", &weights, &[-1, 1, queries, samples]);
    let weighted = n.emit("Mul", "weighted", &[&sampled, &weights], vec![]);
    let context = n.reduce("ReduceSum", "context_of_heads", &weighted, -1, false);
    let context = reshape(n, "context", &context, &[-1, width, queries]);
    n.finish_wide("Transpose", &[&context], vec![AttributeProto::ints("perm", [0, 2, 1])]);
    Ok(())
}
