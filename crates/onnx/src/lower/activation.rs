//! Element-wise functions and softmax.

use std::f64::consts::{FRAC_2_PI, SQRT_2};

use super::super::proto::AttributeProto;
use super::Lowering;
use crate::error::Result;
use crate::ir::ops::{Clip, Gelu, Softmax};

/// An op for which ONNX has an operator of the same name.
pub(super) fn plain(op: &str, n: &mut Lowering) -> Result<()> {
    n.finish(op, &[&n.input(0)], vec![]);
    Ok(())
}

pub(super) fn gelu(op: &Gelu, n: &mut Lowering) -> Result<()> {
    let x = n.input(0);
    if n.opset >= 20 {
        let attributes = if op.tanh { vec![AttributeProto::text("approximate", "tanh")] } else { vec![] };
        n.finish("Gelu", &[&x], attributes);
        return Ok(());
    }
    let (one, half) = (n.float(1.0), n.float(0.5));
    let inner = if op.tanh {
        let (three, cubic, factor) = (n.float(3.0), n.float(0.044715), n.float(FRAC_2_PI.sqrt()));
        let cube = n.emit("Pow", "cube", &[&x, &three], vec![]);
        let cube = n.emit("Mul", "cubic", &[&cube, &cubic], vec![]);
        let sum = n.emit("Add", "sum", &[&x, &cube], vec![]);
        let scaled = n.emit("Mul", "scaled", &[&sum, &factor], vec![]);
        n.emit("Tanh", "tanh", &[&scaled], vec![])
    } else {
        // A division, not a multiplication: runtimes match only this pattern.
        let root = n.float(SQRT_2);
        let scaled = n.emit("Div", "scaled", &[&x, &root], vec![]);
        n.emit("Erf", "erf", &[&scaled], vec![])
    };
    let sum = n.emit("Add", "plus_one", &[&inner, &one], vec![]);
    let product = n.emit("Mul", "product", &[&x, &sum], vec![]);
    n.finish("Mul", &[&product, &half], vec![]);
    Ok(())
}

pub(super) fn silu(n: &mut Lowering) -> Result<()> {
    let x = n.input(0);
    let gate = n.emit("Sigmoid", "sigmoid", &[&x], vec![]);
    n.finish("Mul", &[&x, &gate], vec![]);
    Ok(())
}

pub(super) fn clip(op: &Clip, n: &mut Lowering) -> Result<()> {
    let x = n.input(0);
    let is_wide = n.is_wide(&x);
    let bound = |value: f64, n: &mut Lowering| match value.is_finite() {
        true if is_wide => n.float_wide(value),
        true => n.float(value),
        false => String::new(),
    };
    let (min, max) = (bound(op.min, n), bound(op.max, n));
    let inputs = [x.as_str(), &min, &max];
    n.finish("Clip", if max.is_empty() { &inputs[..2] } else { &inputs }, vec![]);
    Ok(())
}

pub(super) fn softmax(op: &Softmax, n: &mut Lowering) -> Result<()> {
    n.finish("Softmax", &[&n.input(0)], vec![AttributeProto::int("axis", op.axis)]);
    Ok(())
}
