//! Rules that convert single operators to typed ops.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use super::super::numbers::Number;
use super::super::proto::DataType;
use super::{NodeContext, TypedNode};
use crate::ir::ops::{
    Abs, Add, AveragePool, BatchNorm, Binary, BinaryKind, Clip, Concat, Conv, ConvTranspose, Coordinates, CumSum, Elu, Embedding, Erf, Exp, Extent, Flatten,
    Gelu, GlobalAveragePool, HardSigmoid, HardSwish, Interpolation, LayerNorm, LeakyRelu, Linear, Log, MatMul, MaxPool, Mish, Mul, NearestMode, Neg, Pad,
    PadMode, Padding, PerAxis, Power, Reciprocal, Reduce, ReduceKind, Relu, Reshape, Resize, RmsNorm, Sigmoid, Silu, Slice, Softmax, Softplus, Sqrt, Tanh,
    TargetSize, ToFloat, Transpose,
};
use crate::ir::{Dim, Element, Op, OpSpec};
use crate::store::Role;

/// Converts a node to a typed op; `None` if it returns its first input unchanged. The graph has only 64-bit
/// integers, so that arithmetic of narrower ones, which can overflow, has no typed form.
type Rule = fn(&NodeContext) -> Result<Option<TypedNode>, String>;

/// The rules, by operator.
pub(super) const RULES: &[(&str, Rule)] = &[
    ("MatMul", matmul),
    ("Gemm", gemm),
    ("Conv", conv),
    ("ConvTranspose", conv_transpose),
    ("BatchNormalization", batch_norm),
    ("LayerNormalization", layer_norm),
    ("RMSNormalization", rms_norm),
    ("Gather", gather),
    ("Add", |at| two(at, Add {}.into())),
    ("Sum", |at| two(at, Add {}.into())),
    ("Mul", |at| two(at, Mul {}.into())),
    ("Sub", |at| two(at, Binary { kind: BinaryKind::Sub }.into())),
    ("Div", |at| two(at, Binary { kind: BinaryKind::Div }.into())),
    ("Max", |at| two(at, Binary { kind: BinaryKind::Max }.into())),
    ("Min", |at| two(at, Binary { kind: BinaryKind::Min }.into())),
    ("Pow", pow),
    ("Relu", |_| first(Relu {})),
    ("Sigmoid", |_| first(Sigmoid {})),
    ("Tanh", |_| first(Tanh {})),
    ("Erf", |_| first(Erf {})),
    ("Exp", |_| first(Exp {})),
    ("Log", |_| first(Log {})),
    ("Sqrt", |_| first(Sqrt {})),
    ("Neg", |_| first(Neg {})),
    ("Abs", |_| first(Abs {})),
    ("Reciprocal", |_| first(Reciprocal {})),
    ("HardSwish", |_| first(HardSwish {})),
    ("Softplus", |_| first(Softplus {})),
    ("Mish", |_| first(Mish {})),
    ("Swish", swish),
    ("LeakyRelu", |at| first(LeakyRelu { alpha: at.float("alpha", 0.01) })),
    ("Elu", |at| first(Elu { alpha: at.float("alpha", 1.0) })),
    ("HardSigmoid", |at| first(HardSigmoid { alpha: at.float("alpha", 0.2), beta: at.float("beta", 0.5) })),
    ("Gelu", |at| first(Gelu { tanh: at.text("approximate").is_some_and(|kind| kind == "tanh") })),
    ("Clip", clip),
    ("Softmax", softmax),
    ("MaxPool", max_pool),
    ("AveragePool", average_pool),
    ("GlobalAveragePool", |_| first(GlobalAveragePool { keep_dims: true })),
    ("Reshape", reshape),
    ("Flatten", flatten),
    ("Expand", expand),
    ("Squeeze", squeeze),
    ("Unsqueeze", unsqueeze),
    ("Transpose", |at| first(Transpose { perm: at.ints("perm").unwrap_or_default().into_iter().map(size).collect::<Result<_, _>>()? })),
    ("Concat", |at| Ok(Some(TypedNode { op: Concat { axis: at.int("axis", 0) }.into(), inputs: at.present_inputs() }))),
    ("Pad", pad),
    ("Resize", resize),
    ("Upsample", resize),
    ("ReduceMean", |at| reduce(at, ReduceKind::Mean)),
    ("ReduceSum", |at| reduce(at, ReduceKind::Sum)),
    ("ReduceMax", |at| reduce(at, ReduceKind::Max)),
    ("ReduceMin", |at| reduce(at, ReduceKind::Min)),
    ("ReduceL2", |at| reduce(at, ReduceKind::L2)),
    ("CumSum", cum_sum),
    ("Identity", |_| Ok(None)),
    ("Dropout", |_| Ok(None)),
    ("Cast", cast),
    ("Slice", slice),
    ("Split", split),
];

/// Operators with several outputs, all of which have a typed form.
pub(super) const MULTI_OUTPUT: [&str; 1] = ["Split"];

fn typed(op: impl Into<Op>, inputs: Vec<usize>) -> Result<Option<TypedNode>, String> {
    Ok(Some(TypedNode { op: op.into(), inputs }))
}

fn first(op: impl Into<Op>) -> Result<Option<TypedNode>, String> {
    typed(op, vec![0])
}

fn two(at: &NodeContext, op: Op) -> Result<Option<TypedNode>, String> {
    // Before opset 7, `axis` aligned the second input with an axis of the first one other than its last
    // axes.
    let aligned = at.node.attribute.iter().find(|attribute| attribute.name() == "axis").map(|attribute| attribute.i.unwrap_or(0));
    if let Some(axis) = aligned.filter(|_| at.opset() < 7 && at.int("broadcast", 0) != 0) {
        let [first, second] = [at.ty(0)?.shape.len(), at.ty(1)?.shape.len()];
        if axes_of(vec![axis], first)? != [first.saturating_sub(second)] {
            return Err(format!("it broadcasts its second input from axis {axis} on"));
        }
    }
    if at.node.input.len() == 2 { typed(op, vec![0, 1]) } else { Err(format!("it has {} inputs, but two are required", at.node.input.len())) }
}

fn size(value: i64) -> Result<usize, String> {
    usize::try_from(value).map_err(|_| format!("{value} is not a valid size"))
}

fn matmul(at: &NodeContext) -> Result<Option<TypedNode>, String> {
    if at.role(1) == Some(Role::Matrix) { typed(Linear { input_major: false }, vec![0, 1]) } else { typed(MatMul {}, vec![0, 1]) }
}

fn gemm(at: &NodeContext) -> Result<Option<TypedNode>, String> {
    if at.int("transA", 0) != 0 || at.float("alpha", 1.0) != 1.0 || (at.has(2) && at.float("beta", 1.0) != 1.0) {
        return Err("it scales or transposes its first input".into());
    }
    if at.role(1) != Some(Role::Matrix) {
        return Err("its second input is not a weight that only matrix products use".into());
    }
    typed(Linear { input_major: false }, at.present_inputs())
}

/// Strides, padding and dilations of a window. Sequences are images of height 1.
fn window(at: &NodeContext, spatial_rank: usize) -> Result<(PerAxis, Padding, PerAxis), String> {
    let per_axis = |name: &str| -> Result<PerAxis, String> {
        let values = at.ints(name).unwrap_or_else(|| vec![1; spatial_rank]).into_iter().map(size).collect::<Result<Vec<_>, _>>()?;
        match values[..] {
            [width] if spatial_rank == 1 => Ok(PerAxis([1, width])),
            [height, width] if spatial_rank == 2 => Ok(PerAxis([height, width])),
            _ => Err(format!("its `{name}` do not fit an image or a sequence")),
        }
    };
    if !matches!(at.text("auto_pad").as_deref(), None | Some("NOTSET" | "VALID" | "")) {
        return Err("its padding depends on the size of its input (`auto_pad`)".into());
    }
    let pads = at.ints("pads").unwrap_or_else(|| vec![0; spatial_rank.saturating_mul(2)]).into_iter().map(size).collect::<Result<Vec<_>, _>>()?;
    let padding = match pads[..] {
        [left, right] if spatial_rank == 1 => Padding([0, left, 0, right]),
        [above, left, below, right] if spatial_rank == 2 => Padding([above, left, below, right]),
        _ => return Err("its `pads` do not fit an image or a sequence".into()),
    };
    Ok((per_axis("strides")?, padding, per_axis("dilations")?))
}

fn spatial_rank(at: &NodeContext) -> Result<usize, String> {
    at.rank()?.checked_sub(2).filter(|spatial_rank| (1..=2).contains(spatial_rank)).ok_or_else(|| "its input is neither an image nor a sequence".to_owned())
}

fn conv(at: &NodeContext) -> Result<Option<TypedNode>, String> {
    let (stride, padding, dilation) = window(at, spatial_rank(at)?)?;
    typed(Conv { stride, padding, dilation, groups: size(at.int("group", 1))? }, at.present_inputs())
}

fn conv_transpose(at: &NodeContext) -> Result<Option<TypedNode>, String> {
    let spatial_rank = spatial_rank(at)?;
    let (stride, padding, dilation) = window(at, spatial_rank)?;
    if at.ints("output_shape").is_some() {
        return Err("its padding depends on the size of its output (`output_shape`)".into());
    }
    let added = at.ints("output_padding").unwrap_or_else(|| vec![0; spatial_rank]).into_iter().map(size).collect::<Result<Vec<_>, _>>()?;
    let output_padding = match added[..] {
        [width] if spatial_rank == 1 => PerAxis([0, width]),
        [height, width] if spatial_rank == 2 => PerAxis([height, width]),
        _ => return Err("its `output_padding` does not fit an image or a sequence".into()),
    };
    typed(ConvTranspose { stride, padding, dilation, groups: size(at.int("group", 1))?, output_padding }, at.present_inputs())
}

fn batch_norm(at: &NodeContext) -> Result<Option<TypedNode>, String> {
    if at.int("training_mode", 0) != 0 || at.int("spatial", 1) != 1 || at.node.output.iter().skip(1).any(|output| !output.is_empty()) {
        return Err("it is in training mode".into());
    }
    typed(BatchNorm { epsilon: at.float("epsilon", 1e-5), batch: false }, vec![0, 1, 2, 3, 4])
}

/// The `epsilon` of a normalization over the last axis.
fn epsilon_of_last_axis(at: &NodeContext) -> Result<f64, String> {
    let axis = at.int("axis", -1);
    if axis != -1 && Ok(axis) != i64::try_from(at.rank()?.saturating_sub(1)) {
        return Err("it normalizes over more axes than the last one".into());
    }
    Ok(at.float("epsilon", 1e-5))
}

fn layer_norm(at: &NodeContext) -> Result<Option<TypedNode>, String> {
    typed(LayerNorm { epsilon: epsilon_of_last_axis(at)? }, at.present_inputs())
}

fn rms_norm(at: &NodeContext) -> Result<Option<TypedNode>, String> {
    typed(RmsNorm { epsilon: epsilon_of_last_axis(at)?, offset: 0.0 }, vec![0, 1])
}

fn swish(at: &NodeContext) -> Result<Option<TypedNode>, String> {
    match at.float("alpha", 1.0) {
        1.0 => first(Silu {}),
        alpha => Err(format!("its `alpha` is {alpha}")),
    }
}

fn gather(at: &NodeContext) -> Result<Option<TypedNode>, String> {
    if at.role(0) == Some(Role::Table) { typed(Embedding {}, vec![1, 0]) } else { Err("its data is not an embedding table".into()) }
}

fn pow(at: &NodeContext) -> Result<Option<TypedNode>, String> {
    match at.scalar(1) {
        // An exponent of higher rank than the base would change the output rank.
        Ok(exponent) if at.ty(1)?.shape.len() <= at.rank()? => first(Power { exponent }),
        _ => two(at, Binary { kind: BinaryKind::Pow }.into()),
    }
}

fn clip(at: &NodeContext) -> Result<Option<TypedNode>, String> {
    let bound = |position: usize, name: &str, none: f64| {
        if at.has(position) {
            return at.scalar(position);
        }
        Ok(if at.opset() < 11 { Some(at.float(name, none as f32)).filter(|bound| bound.abs() < f64::from(f32::MAX)).unwrap_or(none) } else { none })
    };
    first(Clip { min: bound(1, "min", f64::NEG_INFINITY)?, max: bound(2, "max", f64::INFINITY)? })
}

fn softmax(at: &NodeContext) -> Result<Option<TypedNode>, String> {
    if at.opset() >= 13 {
        return first(Softmax { axis: at.int("axis", -1) });
    }
    // Before opset 13, all axes from `axis` on were normalized together.
    let (axis, last) = (at.int("axis", 1), i64::try_from(at.rank()?).unwrap_or(i64::MAX).saturating_sub(1));
    if axis == last || axis == -1 { first(Softmax { axis: -1 }) } else { Err(format!("it normalizes over all axes from {axis} on")) }
}

fn kernel(at: &NodeContext, spatial_rank: usize) -> Result<PerAxis, String> {
    let sides = at.ints("kernel_shape").unwrap_or_default().into_iter().map(size).collect::<Result<Vec<_>, _>>()?;
    match sides[..] {
        [width] if spatial_rank == 1 => Ok(PerAxis([1, width])),
        [height, width] if spatial_rank == 2 => Ok(PerAxis([height, width])),
        _ => Err("its `kernel_shape` does not fit an image or a sequence".into()),
    }
}

fn max_pool(at: &NodeContext) -> Result<Option<TypedNode>, String> {
    let spatial_rank = spatial_rank(at)?;
    let (stride, padding, dilation) = window(at, spatial_rank)?;
    if at.node.output.iter().skip(1).any(|output| !output.is_empty()) {
        return Err("it also returns the indices of the maxima".into());
    }
    first(MaxPool { kernel: kernel(at, spatial_rank)?, stride, padding, dilation, ceil: at.int("ceil_mode", 0) != 0 })
}

fn average_pool(at: &NodeContext) -> Result<Option<TypedNode>, String> {
    let spatial_rank = spatial_rank(at)?;
    let (stride, padding, dilation) = window(at, spatial_rank)?;
    let (ceil, count_padding) = (at.int("ceil_mode", 0) != 0, at.int("count_include_pad", 0) != 0);
    first(AveragePool { kernel: kernel(at, spatial_rank)?, stride, padding, dilation, ceil, count_padding })
}

fn reshape(at: &NodeContext) -> Result<Option<TypedNode>, String> {
    let (copies, shape) = (at.int("allowzero", 0) == 0, at.ty(0)?.shape);
    let target = |(axis, number): (usize, Number)| match number {
        Number::Constant(-1) | Number::Unknown => Ok(TargetSize::Rest),
        Number::Constant(0) if copies => Ok(TargetSize::Copy(axis)),
        Number::Constant(value) => size(value).map(TargetSize::Number),
        // A computed size that is not a size of the input is inferred.
        Number::Size(dim) => Ok(shape.iter().position(|own| *own == dim).map_or(TargetSize::Rest, TargetSize::Copy)),
    };
    let shape = at.some_numbers(1)?.into_iter().enumerate().map(target).collect::<Result<Vec<_>, _>>()?;
    if shape.iter().filter(|size| **size == TargetSize::Rest).count() > 1 {
        return Err("more than one of its sizes is unknown".into());
    }
    let (op, ty) = (Reshape { shape }, at.ty(0)?);
    // A reshape to the current shape is removed.
    if op.infer(&[&ty]).is_ok_and(|same| same == ty) { Ok(None) } else { first(op) }
}

/// Removes an expansion to the current shape.
fn expand(at: &NodeContext) -> Result<Option<TypedNode>, String> {
    let (shape, target) = (at.ty(0)?.shape, at.some_numbers(1)?);
    let extra = shape.len().checked_sub(target.len()).ok_or("it adds axes")?;
    let keeps = |(number, size): (&Number, &Dim)| match number {
        Number::Constant(1) => true,
        Number::Constant(known) => size.fixed().is_some_and(|size| i64::try_from(size) == Ok(*known)),
        Number::Size(dim) => dim == size,
        Number::Unknown => false,
    };
    let same = target.iter().zip(shape.iter().skip(extra)).all(keeps);
    if same { Ok(None) } else { Err("it repeats elements of its input".into()) }
}

/// A slice of one axis with step 1.
fn slice(at: &NodeContext) -> Result<Option<TypedNode>, String> {
    let [starts, ends] = [("starts", 1), ("ends", 2)].map(|(name, position)| at.attribute_or_input(name, position));
    let (starts, ends) = (starts?.unwrap_or_default(), ends?.unwrap_or_default());
    let axes = at.attribute_or_input("axes", 3)?.unwrap_or_else(|| vec![0]);
    let steps = if at.has(4) { at.numbers(4)? } else { vec![1] };
    let ([start], [end], [axis], [1]) = (&starts[..], &ends[..], &axes[..], &steps[..]) else {
        return Err("it does not slice a single axis with step 1".into());
    };
    let shape = at.ty(0)?.shape;
    let place = axes_of(vec![*axis], shape.len())?;
    let known = place.first().and_then(|axis| shape.get(*axis)).and_then(|size| size.fixed()).and_then(|size| i64::try_from(size).ok());
    let (length, rest) = match known {
        Some(all) => {
            let inside = |at: i64| if at < 0 { at.saturating_add(all) } else { at }.clamp(0, all);
            (Some(size(inside(*end).saturating_sub(inside(*start)).max(0))?), 0)
        }
        None if *end > i64::from(i32::MAX) / 2 => (None, 0),
        None if *end < 0 => (None, size(end.saturating_neg())?),
        None => return Err("the size of its axis is unknown".into()),
    };
    first(Slice { start: known.map_or(*start, |all| (*start).clamp(all.saturating_neg(), all)), length, rest, step: 1, axis: *axis })
}

fn split(at: &NodeContext) -> Result<Option<TypedNode>, String> {
    let (axis, shape) = (at.int("axis", 0), at.ty(0)?.shape);
    let place = axes_of(vec![axis], shape.len())?;
    let all = place.first().and_then(|axis| shape.get(*axis)).and_then(|size| size.fixed());
    let lengths = match (at.attribute_or_input("split", 1)?, all) {
        (Some(lengths), _) => lengths.into_iter().map(size).collect::<Result<Vec<_>, _>>()?,
        (None, Some(all)) => {
            let each = all.div_ceil(at.node.output.len().max(1));
            (0..at.node.output.len()).map(|part| each.min(all.saturating_sub(part.saturating_mul(each)))).collect()
        }
        (None, None) => return Err("the size of its axis is unknown".into()),
    };
    let sum = lengths.iter().fold(0usize, |sum, length| sum.saturating_add(*length));
    if lengths.len() != at.node.output.len() || all.is_some_and(|all| all != sum) {
        return Err(format!("it splits {sum} elements into {} parts", lengths.len()));
    }
    let start = lengths.iter().take(at.output).fold(0usize, |sum, length| sum.saturating_add(*length));
    let start = i64::try_from(start).map_err(|e| e.to_string())?;
    let length = lengths.get(at.output).copied().filter(|length| *length > 0).ok_or("one of its parts has no elements")?;
    first(Slice { start, length: Some(length), rest: 0, step: 1, axis })
}

/// Converts integers and booleans to floats. Casts between equal types are removed.
fn cast(at: &NodeContext) -> Result<Option<TypedNode>, String> {
    let (to, from) = (at.int("to", 0), at.ty(0)?.element);
    match from {
        Element::Float if to == DataType::Float as i64 => Ok(None),
        Element::Int if to == DataType::Float as i64 => first(ToFloat {}),
        Element::Int if to == DataType::Int64 as i64 && at.is_int64(0) => Ok(None),
        _ => Err(format!("it casts to type {to}")),
    }
}

fn flatten(at: &NodeContext) -> Result<Option<TypedNode>, String> {
    let rank = at.rank()?;
    match at.int("axis", 1) {
        1 if rank == 4 => first(Flatten { channels_last: false }),
        1 if rank > 1 => first(Reshape { shape: vec![TargetSize::Copy(0), TargetSize::Rest] }),
        0 => first(Reshape { shape: vec![TargetSize::Number(1), TargetSize::Rest] }),
        axis => Err(format!("it flattens around axis {axis}")),
    }
}

/// Non-negative axes.
fn axes_of(axes: Vec<i64>, rank: usize) -> Result<Vec<usize>, String> {
    let count = i64::try_from(rank).unwrap_or(i64::MAX);
    axes.into_iter().map(|axis| size(if axis < 0 { axis.saturating_add(count) } else { axis })).collect()
}

fn squeeze(at: &NodeContext) -> Result<Option<TypedNode>, String> {
    let shape = at.ty(0)?.shape;
    let gone = match at.attribute_or_input("axes", 1)? {
        Some(axes) => axes_of(axes, shape.len())?,
        None if shape.iter().all(|size| size.fixed().is_some()) => {
            (0..shape.len()).filter(|axis| shape.get(*axis).and_then(|size| size.fixed()) == Some(1)).collect()
        }
        None => return Err("the axes of size 1 are unknown".into()),
    };
    first(Reshape { shape: (0..shape.len()).filter(|axis| !gone.contains(axis)).map(TargetSize::Copy).collect() })
}

fn unsqueeze(at: &NodeContext) -> Result<Option<TypedNode>, String> {
    let axes = at.attribute_or_input("axes", 1)?.ok_or("its `axes` are missing")?;
    let rank = at.rank()?.saturating_add(axes.len());
    let new = axes_of(axes, rank)?;
    let mut old = 0usize..;
    let target = |axis: usize| if new.contains(&axis) { Some(TargetSize::Number(1)) } else { old.next().map(TargetSize::Copy) };
    first(Reshape { shape: (0..rank).map_while(target).collect() })
}

fn pad(at: &NodeContext) -> Result<Option<TypedNode>, String> {
    let mode = match at.text("mode").as_deref() {
        None | Some("constant") => PadMode::Constant,
        Some("reflect") => PadMode::Reflect,
        Some("edge") => PadMode::Edge,
        Some(other) => return Err(format!("its padding mode is `{other}`")),
    };
    if at.has(3) {
        return Err("it pads selected axes".into());
    }
    let pads = at.attribute_or_input("pads", 1)?.ok_or("its `pads` are missing")?;
    let value = if at.has(2) { at.scalar(2)? } else { at.float("value", 0.0) };
    first(Pad { pads, mode, value })
}

fn resize(at: &NodeContext) -> Result<Option<TypedNode>, String> {
    let mode = match at.text("mode").as_deref() {
        None | Some("nearest") => Interpolation::Nearest,
        Some("linear") => Interpolation::Linear,
        Some(other) => return Err(format!("its interpolation mode is `{other}`")),
    };
    let extents = |scales: Vec<f32>| scales.into_iter().map(|scale| Extent::Scale(scale.into())).collect();
    // Before opset 11, positions are divided by the scales and rounded down. Runtimes differ in the rounding
    // of positions of reduced axes.
    if at.opset() < 11 {
        let scales = at.scales(1)?;
        if mode == Interpolation::Nearest && scales.iter().any(|scale| *scale < 1.0) {
            return Err("it reduces an axis, and its opset is older than 11".into());
        }
        return first(Resize { sizes: extents(scales), mode, coordinates: Coordinates::Asymmetric, nearest: NearestMode::Floor });
    }
    if at.int("antialias", 0) != 0 || at.ints("axes").is_some() || at.text("keep_aspect_ratio_policy").is_some_and(|how| how != "stretch") {
        return Err("it uses `antialias`, `axes` or an aspect ratio policy".into());
    }
    let coordinates = match at.text("coordinate_transformation_mode").as_deref() {
        None | Some("half_pixel") => Coordinates::HalfPixel,
        Some("pytorch_half_pixel") => Coordinates::PytorchHalfPixel,
        Some("align_corners") => Coordinates::AlignCorners,
        Some("asymmetric") => Coordinates::Asymmetric,
        Some(other) => return Err(format!("its coordinate transformation is `{other}`")),
    };
    let nearest = match at.text("nearest_mode").as_deref() {
        None | Some("round_prefer_floor") => NearestMode::RoundPreferFloor,
        Some("round_prefer_ceil") => NearestMode::RoundPreferCeil,
        Some("floor") => NearestMode::Floor,
        Some("ceil") => NearestMode::Ceil,
        Some(other) => return Err(format!("its nearest mode is `{other}`")),
    };
    let sizes =
        if at.has(3) { at.numbers(3)?.into_iter().map(|value| size(value).map(Extent::Size)).collect::<Result<Vec<_>, _>>()? } else { extents(at.scales(2)?) };
    first(Resize { sizes, mode, coordinates, nearest })
}

fn reduce(at: &NodeContext, kind: ReduceKind) -> Result<Option<TypedNode>, String> {
    let axes = at.attribute_or_input("axes", 1)?.unwrap_or_default();
    if axes.is_empty() && at.int("noop_with_empty_axes", 0) != 0 {
        return match kind {
            ReduceKind::Mean | ReduceKind::Sum | ReduceKind::Max | ReduceKind::Min => Ok(None),
            // ONNX Runtime applies the function to each element, and older specifications return the input.
            ReduceKind::L1 | ReduceKind::L2 | ReduceKind::SumOfSquares => Err("it reduces no axis".into()),
        };
    }
    first(Reduce { kind, axes, keep_dims: at.int("keepdims", 1) != 0 })
}

fn cum_sum(at: &NodeContext) -> Result<Option<TypedNode>, String> {
    if at.ty(0)?.element == Element::Int && !at.is_int64(0) {
        return Err("its integers have fewer than 64 bits".into());
    }
    let axis = match at.numbers(1)?[..] {
        [axis] => axis,
        _ => return Err("its axis is not a single number".into()),
    };
    first(CumSum { axis, exclusive: at.int("exclusive", 0) != 0, reverse: at.int("reverse", 0) != 0 })
}
