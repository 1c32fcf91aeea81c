//! Images to smaller images, vectors and sequences.

use super::super::proto::AttributeProto;
use super::Lowering;
use crate::error::Result;
use crate::ir::ops::{AveragePool, Flatten, GlobalAveragePool, MaxPool, Padding, PerAxis};

/// Numbers for each axis, as many as a value of this rank has.
pub(super) fn per_axis(name: &str, numbers: PerAxis, rank: usize) -> AttributeProto {
    AttributeProto::ints(name, numbers.0.into_iter().skip(4usize.saturating_sub(rank)).map(|n| n as i64))
}

/// Places around an image or a sequence.
pub(super) fn pads(padding: Padding, rank: usize) -> AttributeProto {
    let [_, left, _, right] = padding.0;
    let sides = if rank == 3 { vec![left, right] } else { padding.0.to_vec() };
    AttributeProto::ints("pads", sides.into_iter().map(|n| n as i64))
}

/// Attributes of a pool.
fn pool([kernel, stride, dilation]: [PerAxis; 3], padding: Padding, ceil: bool, rank: usize) -> Vec<AttributeProto> {
    let mut attributes = vec![per_axis("kernel_shape", kernel, rank), per_axis("strides", stride, rank), pads(padding, rank)];
    attributes.extend((dilation != 1).then(|| per_axis("dilations", dilation, rank)));
    attributes.extend(ceil.then(|| AttributeProto::int("ceil_mode", 1)));
    attributes
}

pub(super) fn max_pool(op: &MaxPool, n: &mut Lowering) -> Result<()> {
    let attributes = pool([op.kernel, op.stride, op.dilation], op.padding, op.ceil, n.ty(0)?.shape.len());
    n.finish("MaxPool", &[&n.input(0)], attributes);
    Ok(())
}

pub(super) fn average_pool(op: &AveragePool, n: &mut Lowering) -> Result<()> {
    if op.dilation != 1 && n.opset < 19 {
        return Err(n.wrong(format!("has a dilation, which AveragePool has from opset 19 on; this is opset {}: set `opset: 19`", n.opset)));
    }
    let mut attributes = pool([op.kernel, op.stride, op.dilation], op.padding, op.ceil, n.ty(0)?.shape.len());
    attributes.extend(op.count_padding.then(|| AttributeProto::int("count_include_pad", 1)));
    let x = n.wide(&n.input(0))?;
    n.finish_wide("AveragePool", &[&x], attributes);
    Ok(())
}

pub(super) fn global_average_pool(op: &GlobalAveragePool, n: &mut Lowering) -> Result<()> {
    let x = n.wide(&n.input(0))?;
    if op.keep {
        n.finish_wide("GlobalAveragePool", &[&x], vec![]);
        return Ok(());
    }
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
