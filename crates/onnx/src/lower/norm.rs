//! Normalization layers.

use super::super::proto::AttributeProto;
use super::Lowering;
use crate::error::Result;
use crate::ir::ops::{BatchNorm, LayerNorm, Normalize, RmsNorm};

pub(super) fn batch_norm(op: &BatchNorm, n: &mut Lowering) -> Result<()> {
    if op.batch {
        return Err(n.node_error("normalizes by batch statistics, as in training, but a file for inference requires fixed ones".into()));
    }
    let [x, weight, bias, mean, variance] = [0, 1, 2, 3, 4].map(|i| n.input(i));
    n.finish("BatchNormalization", &[&x, &weight, &bias, &mean, &variance], vec![AttributeProto::float("epsilon", op.epsilon)]);
    Ok(())
}

pub(super) fn layer_norm(op: &LayerNorm, n: &mut Lowering) -> Result<()> {
    let attributes = vec![AttributeProto::int("axis", -1), AttributeProto::float("epsilon", op.epsilon)];
    let inputs: Vec<String> = (0..n.inputs()).map(|i| n.input(i)).collect();
    n.finish("LayerNormalization", &inputs.iter().map(String::as_str).collect::<Vec<_>>(), attributes);
    Ok(())
}

/// ONNX Runtime fuses exactly this pattern. If the input is a difference, it would fuse the mean minus the
/// value like the value minus the mean, so the square is then a product.
pub(super) fn rms_norm(op: &RmsNorm, n: &mut Lowering) -> Result<()> {
    let (x, mut weight) = (n.wide(&n.input(0))?, n.input(1));
    if op.offset != 0.0 {
        let offset = n.float(op.offset);
        weight = n.emit("Add", "factors", &[&weight, &offset], vec![]);
    }
    let epsilon = n.float_wide(op.epsilon);
    let square = if n.reads_difference() {
        n.emit("Mul", "square", &[&x, &x], vec![])
    } else {
        let two = n.float_wide(2.0);
        n.emit("Pow", "square", &[&x, &two], vec![])
    };
    let mean = n.reduce("ReduceMean", "mean", &square, -1, true);
    let sum = n.emit("Add", "sum", &[&mean, &epsilon], vec![]);
    let root = n.emit("Sqrt", "root", &[&sum], vec![]);
    let normed = n.emit("Div", "normed", &[&x, &root], vec![]);
    let normed = n.narrow("narrow", normed);
    n.finish("Mul", &[&normed, &weight], vec![]);
    Ok(())
}

pub(super) fn normalize(op: &Normalize, n: &mut Lowering) -> Result<()> {
    let (x, least) = (n.wide(&n.input(0))?, n.float_wide(1e-12));
    let norm = if op.epsilon == 0.0 {
        n.reduce("ReduceL2", "norm", &x, -1, true)
    } else {
        let epsilon = n.float_wide(op.epsilon);
        let sum = n.reduce("ReduceSumSquare", "sum", &x, -1, true);
        let sum = n.emit("Add", "squares", &[&sum, &epsilon], vec![]);
        n.emit("Sqrt", "norm", &[&sum], vec![])
    };
    let norm = n.emit("Clip", "positive", &[&norm, &least], vec![]);
    n.finish_wide("Div", &[&x, &norm], vec![]);
    Ok(())
}
