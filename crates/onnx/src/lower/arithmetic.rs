//! Binary operators and reductions.

use super::super::proto::AttributeProto;
use super::Lowering;
use crate::error::Result;
use crate::ir::Element;
use crate::ir::ops::{Binary, BinaryKind, CumSum, Reduce, ReduceKind};

pub(super) fn binary(op: &Binary, n: &mut Lowering) -> Result<()> {
    let name = match op.kind {
        BinaryKind::Sub => "Sub",
        BinaryKind::Div => "Div",
        BinaryKind::Pow => "Pow",
        BinaryKind::Max => "Max",
        BinaryKind::Min => "Min",
    };
    n.finish(name, &[&n.input(0), &n.input(1)], vec![]);
    Ok(())
}

pub(super) fn reduce(op: &Reduce, n: &mut Lowering) -> Result<()> {
    let (name, wide) = match op.kind {
        ReduceKind::Mean => ("ReduceMean", true),
        ReduceKind::Sum => ("ReduceSum", true),
        ReduceKind::Max => ("ReduceMax", false),
        ReduceKind::Min => ("ReduceMin", false),
        ReduceKind::L1 => ("ReduceL1", true),
        ReduceKind::L2 => ("ReduceL2", true),
        ReduceKind::SumOfSquares => ("ReduceSumSquare", true),
    };
    let x = if wide { n.wide(&n.input(0))? } else { n.input(0) };
    let (axes, attributes) = n.reduction(name, &op.axes, op.keep_dims);
    let inputs: Vec<&str> = [x.as_str()].into_iter().chain(axes.as_deref()).collect();
    if wide {
        n.finish_wide(name, &inputs, attributes)
    } else {
        n.finish(name, &inputs, attributes)
    }
    Ok(())
}

pub(super) fn cum_sum(op: &CumSum, n: &mut Lowering) -> Result<()> {
    let axis = n.int(op.axis);
    let attributes = vec![AttributeProto::int("exclusive", op.exclusive.into()), AttributeProto::int("reverse", op.reverse.into())];
    if n.ty(0)?.element == Element::Int {
        n.finish("CumSum", &[&n.input(0), &axis], attributes);
    } else {
        let x = n.wide(&n.input(0))?;
        n.finish_wide("CumSum", &[&x, &axis], attributes);
    }
    Ok(())
}

/// A unary ONNX operator with float attributes.
pub(super) fn function(op: &str, numbers: &[(&str, f64)], n: &mut Lowering) -> Result<()> {
    n.finish(op, &[&n.input(0)], numbers.iter().map(|(name, value)| AttributeProto::float(name, *value)).collect());
    Ok(())
}

pub(super) fn power(exponent: f64, n: &mut Lowering) -> Result<()> {
    let exponent = n.float(exponent);
    n.finish("Pow", &[&n.input(0), &exponent], vec![]);
    Ok(())
}

pub(super) fn scale(factor: f64, n: &mut Lowering) -> Result<()> {
    let factor = n.float(factor);
    n.finish("Mul", &[&n.input(0), &factor], vec![]);
    Ok(())
}

pub(super) fn mish(n: &mut Lowering) -> Result<()> {
    if n.opset >= 18 {
        return function("Mish", &[], n);
    }
    let x = n.input(0);
    let softplus = n.emit("Softplus", "softplus", &[&x], vec![]);
    let tanh = n.emit("Tanh", "tanh", &[&softplus], vec![]);
    n.finish("Mul", &[&x, &tanh], vec![]);
    Ok(())
}
