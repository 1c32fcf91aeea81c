//! Pooling, resizing and flattening of images.

use super::super::proto::AttributeProto;
use super::Lowering;
use super::shape::sizes_of;
use crate::error::Result;
use crate::ir::ops::{AveragePool, Coordinates, Extent, Flatten, GlobalAveragePool, Interpolation, MaxPool, NearestMode, Padding, PerAxis, Resize};

/// An attribute with one number per spatial axis of a value of this rank.
pub(super) fn per_axis(name: &str, numbers: PerAxis, rank: usize) -> AttributeProto {
    AttributeProto::ints(name, numbers.0.into_iter().skip(4usize.saturating_sub(rank)).map(|n| n as i64))
}

/// The padding of an image or a sequence.
pub(super) fn pads(padding: Padding, rank: usize) -> AttributeProto {
    let [_, left, _, right] = padding.0;
    let sides = if rank == 3 { vec![left, right] } else { padding.0.to_vec() };
    AttributeProto::ints("pads", sides.into_iter().map(|n| n as i64))
}

/// Attributes of a pooling operator.
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
        return Err(n.node_error(format!("has a dilation, which AveragePool supports from opset 19 on, but the file has opset {}: set `opset: 19`", n.opset)));
    }
    let mut attributes = pool([op.kernel, op.stride, op.dilation], op.padding, op.ceil, n.ty(0)?.shape.len());
    attributes.extend(op.count_padding.then(|| AttributeProto::int("count_include_pad", 1)));
    let x = n.wide(&n.input(0))?;
    n.finish_wide("AveragePool", &[&x], attributes);
    Ok(())
}

pub(super) fn global_average_pool(op: &GlobalAveragePool, n: &mut Lowering) -> Result<()> {
    let x = n.wide(&n.input(0))?;
    if op.keep_dims {
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

pub(super) fn resize(op: &Resize, n: &mut Lowering) -> Result<()> {
    let mode = if op.mode == Interpolation::Linear { "linear" } else { "nearest" };
    let coordinates = match op.coordinates {
        Coordinates::HalfPixel => "half_pixel",
        Coordinates::PytorchHalfPixel => "pytorch_half_pixel",
        Coordinates::AlignCorners => "align_corners",
        Coordinates::Asymmetric => "asymmetric",
    };
    let nearest = match op.nearest {
        NearestMode::RoundPreferFloor => "round_prefer_floor",
        NearestMode::RoundPreferCeil => "round_prefer_ceil",
        NearestMode::Floor => "floor",
        NearestMode::Ceil => "ceil",
    };
    let mut attributes = vec![AttributeProto::text("mode", mode), AttributeProto::text("coordinate_transformation_mode", coordinates)];
    attributes.extend((op.mode == Interpolation::Nearest).then(|| AttributeProto::text("nearest_mode", nearest)));
    let (x, shape) = (n.input(0), &n.ty(0)?.shape);
    let scales: Option<Vec<f64>> = op.sizes.iter().map(|extent| if let Extent::Scale(scale) = extent { Some(*scale) } else { None }).collect();
    if let Some(mut scales) = scales {
        scales.resize(shape.len(), 1.0);
        let text = scales.iter().map(f64::to_string).collect::<Vec<_>>().join(",");
        let scales = n.floats(&format!("floats/{text}"), &scales);
        n.finish("Resize", &[&x, "", &scales], attributes);
        return Ok(());
    }
    let mut sizes = Vec::with_capacity(shape.len());
    for (axis, (extent, size)) in op.sizes.iter().zip(shape).enumerate() {
        sizes.push(match extent {
            Extent::Size(size) => Ok(*size as i64),
            Extent::Scale(scale) if *scale == 1.0 => size.fixed().map(|size| size as i64).ok_or(axis),
            Extent::Scale(_) => return Err(n.node_error("scales one axis and sets the size of another one, which ONNX cannot express in one operator".into())),
        });
    }
    let known: Option<Vec<i64>> = sizes.iter().map(|size| size.ok()).collect();
    let sizes = match known {
        Some(numbers) => n.ints(&numbers),
        None => sizes_of(&x, &sizes, n),
    };
    n.finish("Resize", &[&x, "", "", &sizes], attributes);
    Ok(())
}
