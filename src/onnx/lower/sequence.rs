//! Tokens, their positions, and what is taken out of sequences.

use super::super::proto::{AttributeProto, DataType};
use super::{Lowering, integer};
use crate::error::Result;
use crate::ir::ops::{Positions, Select};

pub(super) fn embedding(n: &mut Lowering) -> Result<()> {
    if n.place(1).is_some_and(|place| place.integers.is_some()) {
        return integer::embedding(n);
    }
    n.finish("Gather", &[&n.input(1), &n.input(0)], vec![AttributeProto::int("axis", 0)]);
    Ok(())
}

pub(super) fn positions(op: &Positions, n: &mut Lowering) -> Result<()> {
    let tokens = n.input(0);
    let Some(padding) = op.padding else {
        let mut range = n.range(0, 1)?;
        if op.offset != 0 {
            let offset = n.int(op.offset);
            range = n.emit("Add", "moved", &[&range, &offset], vec![]);
        }
        let shape = n.emit("Shape", "shape", &[&tokens], vec![]);
        n.finish("Expand", &[&range, &shape], vec![]);
        return Ok(());
    };
    let (padding, first, one) = (n.int(padding), n.int(padding.saturating_add(op.offset)), n.int(1));
    let padded = n.emit("Equal", "padded", &[&tokens, &padding], vec![]);
    let real = n.emit("Not", "real", &[&padded], vec![]);
    let real = n.cast("ones", &real, DataType::Int64);
    let counted = n.emit("CumSum", "counted", &[&real, &one], vec![]);
    let counted = n.emit("Mul", "places", &[&counted, &real], vec![]);
    n.finish("Add", &[&counted, &first], vec![]);
    Ok(())
}

pub(super) fn prepend(n: &mut Lowering) -> Result<()> {
    let (token, x) = (n.input(0), n.input(1));
    let rest = n.ints(&[n.fixed(0, 1)?, n.fixed(0, 2)?]);
    let batch = n.emit("Shape", "batch", &[&x], vec![AttributeProto::int("start", 0), AttributeProto::int("end", 1)]);
    let shape = n.emit("Concat", "shape", &[&batch, &rest], vec![AttributeProto::int("axis", 0)]);
    let tokens = n.emit("Expand", "tokens", &[&token, &shape], vec![]);
    n.finish("Concat", &[&tokens, &x], vec![AttributeProto::int("axis", 1)]);
    Ok(())
}

pub(super) fn select(op: &Select, n: &mut Lowering) -> Result<()> {
    let index = n.int(op.index as i64);
    n.finish("Gather", &[&n.input(0), &index], vec![AttributeProto::int("axis", 1)]);
    Ok(())
}

pub(super) fn masked_mean(n: &mut Lowering) -> Result<()> {
    let (x, mask) = (n.wide(&n.input(0))?, n.input(1));
    let (last, least) = (n.ints(&[2]), n.float_wide(1e-9));
    let mask = n.cast("mask", &mask, DataType::Float);
    let mask = n.emit("Unsqueeze", "column", &[&mask, &last], vec![]);
    let masked = n.emit("Mul", "masked", &[&x, &mask], vec![]);
    let sum = n.reduce("ReduceSum", "sum", &masked, 1, false);
    let count = n.reduce("ReduceSum", "count", &mask, 1, false);
    let count = n.emit("Clip", "positive", &[&count, &least], vec![]);
    n.finish_wide("Div", &[&sum, &count], vec![]);
    Ok(())
}
