//! Images to smaller images, vectors and sequences.

use super::super::proto::AttributeProto;
use super::Lowering;
use crate::error::Result;
use crate::ir::ops::{Flatten, MaxPool};

pub(super) fn max_pool(op: &MaxPool, n: &mut Lowering) -> Result<()> {
    let attributes = vec![
        AttributeProto::ints("kernel_shape", [op.kernel as i64; 2]),
        AttributeProto::ints("strides", [op.stride as i64; 2]),
        AttributeProto::ints("pads", [op.padding as i64; 4]),
    ];
    n.finish("MaxPool", &[&n.input(0)], attributes);
    Ok(())
}

pub(super) fn global_average_pool(n: &mut Lowering) -> Result<()> {
    let x = n.wide(&n.input(0))?;
    let mean = n.emit("GlobalAveragePool", "mean", &[&x], vec![]);
    n.finish_wide("Flatten", &[&mean], vec![AttributeProto::int("axis", 1)]);
    Ok(())
}

pub(super) fn flatten(op: &Flatten, n: &mut Lowering) -> Result<()> {
    let mut x = n.input(0);
    if op.channels_last {
        x = n.emit("Transpose", "channels_last", &[&x], vec![AttributeProto::ints("perm", [0, 2, 3, 1])]);
    }
    n.finish("Flatten", &[&x], vec![AttributeProto::int("axis", 1)]);
    Ok(())
}

pub(super) fn tokens(n: &mut Lowering) -> Result<()> {
    let shape = n.ints(&[0, n.fixed(0, 1)?, n.fixed(0, 2)? * n.fixed(0, 3)?]);
    let flat = n.emit("Reshape", "flat", &[&n.input(0), &shape], vec![]);
    n.finish("Transpose", &[&flat], vec![AttributeProto::ints("perm", [0, 2, 1])]);
    Ok(())
}
