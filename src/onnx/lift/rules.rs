//! Each operator that has a typed form, a row of the table.

// What is read here, anybody may have written.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use super::super::proto::DataType;
use super::numbers::Number;
use super::{At, Made};
use crate::ir::ops::{
    Abs, Add, AveragePool, BatchNorm, Binary, BinaryKind, Clip, Concat, Conv, ConvTranspose, Coordinates, Elu, Embedding, Erf, Exp, Extent, Flatten, Gelu,
    GlobalAveragePool, HardSigmoid, HardSwish, Interpolation, LayerNorm, LeakyRelu, Linear, Log, MatMul, MaxPool, Mish, Mul, NearestMode, Neg, Pad, PadMode,
    Padding, PerAxis, Power, Reciprocal, Reduce, ReduceKind, Relu, Reshape, Resize, Sigmoid, Slice, Softmax, Softplus, Sqrt, Tanh, TargetSize, ToFloat,
    Transpose,
};
use crate::ir::{Dim, Element, Op, OpSpec};
use crate::store::Role;

/// What stands for a node; nothing where it passes its first input on.
type Rule = fn(&At) -> Result<Option<Made>, String>;

/// The operators, by name.
pub(super) const RULES: &[(&str, Rule)] = &[
    ("MatMul", matmul),
    ("Gemm", gemm),
    ("Conv", conv),
    ("ConvTranspose", conv_transpose),
    ("BatchNormalization", batch_norm),
    ("LayerNormalization", layer_norm),
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
    ("LeakyRelu", |at| first(LeakyRelu { alpha: at.float("alpha", 0.01) })),
    ("Elu", |at| first(Elu { alpha: at.float("alpha", 1.0) })),
    ("HardSigmoid", |at| first(HardSigmoid { alpha: at.float("alpha", 0.2), beta: at.float("beta", 0.5) })),
    ("Gelu", |at| first(Gelu { tanh: at.text("approximate").is_some_and(|kind| kind == "tanh") })),
    ("Clip", clip),
    ("Softmax", softmax),
    ("MaxPool", max_pool),
    ("AveragePool", average_pool),
    ("GlobalAveragePool", |_| first(GlobalAveragePool { keep: true })),
    ("Reshape", reshape),
    ("Flatten", flatten),
    ("Expand", expand),
    ("Squeeze", squeeze),
    ("Unsqueeze", unsqueeze),
    ("Transpose", |at| first(Transpose { perm: at.ints("perm").unwrap_or_default().into_iter().map(size).collect::<Result<_, _>>()? })),
    ("Concat", |at| Ok(Some(Made { op: Concat { axis: at.int("axis", 0) }.into(), inputs: at.all() }))),
    ("Pad", pad),
    ("Resize", resize),
    ("ReduceMean", |at| reduce(at, ReduceKind::Mean)),
    ("ReduceSum", |at| reduce(at, ReduceKind::Sum)),
    ("ReduceMax", |at| reduce(at, ReduceKind::Max)),
    ("ReduceMin", |at| reduce(at, ReduceKind::Min)),
    ("ReduceL2", |at| reduce(at, ReduceKind::L2)),
    ("Identity", |_| Ok(None)),
    ("Dropout", |_| Ok(None)),
    ("Cast", cast),
    ("Slice", slice),
    ("Split", split),
];

/// The operators that compute several values, all of which have a form.
pub(super) const SEVERAL: [&str; 1] = ["Split"];

fn made(op: impl Into<Op>, inputs: Vec<usize>) -> Result<Option<Made>, String> {
    Ok(Some(Made { op: op.into(), inputs }))
}

fn first(op: impl Into<Op>) -> Result<Option<Made>, String> {
    made(op, vec![0])
}

fn two(at: &At, op: Op) -> Result<Option<Made>, String> {
    // Before opset 7, the second input is aligned with this axis of the first one, and not with its last axes.
    let aligned = at.node.attribute.iter().find(|attribute| attribute.name() == "axis").map(|attribute| attribute.i.unwrap_or(0));
    if let Some(axis) = aligned.filter(|_| at.opset() < 7 && at.int("broadcast", 0) != 0) {
        let [first, second] = [at.ty(0)?.shape.len(), at.ty(1)?.shape.len()];
        if axes_of(vec![axis], first)? != [first.saturating_sub(second)] {
            return Err(format!("it broadcasts its second input from axis {axis} on"));
        }
    }
    if at.node.input.len() == 2 { made(op, vec![0, 1]) } else { Err(format!("it has {} inputs, two are known", at.node.input.len())) }
}

fn size(value: i64) -> Result<usize, String> {
    usize::try_from(value).map_err(|_| format!("{value} is no size"))
}

fn matmul(at: &At) -> Result<Option<Made>, String> {
    if at.role(1) == Some(Role::Matrix) { made(Linear { input_major: false }, vec![0, 1]) } else { made(MatMul {}, vec![0, 1]) }
}

fn gemm(at: &At) -> Result<Option<Made>, String> {
    if at.int("transA", 0) != 0 || at.float("alpha", 1.0) != 1.0 || (at.has(2) && at.float("beta", 1.0) != 1.0) {
        return Err("it scales or transposes its first input".into());
    }
    if at.role(1) != Some(Role::Matrix) {
        return Err("its second input is no weight of products alone".into());
    }
    made(Linear { input_major: false }, at.all())
}

/// How a window moves: steps, places around, distances of taps; of a sequence in the place of the width.
fn window(at: &At, places: usize) -> Result<(PerAxis, Padding, PerAxis), String> {
    let per_axis = |name: &str| -> Result<PerAxis, String> {
        let values = at.ints(name).unwrap_or_else(|| vec![1; places]).into_iter().map(size).collect::<Result<Vec<_>, _>>()?;
        match values[..] {
            [width] if places == 1 => Ok(PerAxis([1, width])),
            [height, width] if places == 2 => Ok(PerAxis([height, width])),
            _ => Err(format!("its `{name}` are not those of images or sequences")),
        }
    };
    if !matches!(at.text("auto_pad").as_deref(), None | Some("NOTSET" | "VALID" | "")) {
        return Err("its padding depends on the size of its input (`auto_pad`)".into());
    }
    let pads = at.ints("pads").unwrap_or_else(|| vec![0; places.saturating_mul(2)]).into_iter().map(size).collect::<Result<Vec<_>, _>>()?;
    let padding = match pads[..] {
        [left, right] if places == 1 => Padding([0, left, 0, right]),
        [above, left, below, right] if places == 2 => Padding([above, left, below, right]),
        _ => return Err("its `pads` are not those of images or sequences".into()),
    };
    Ok((per_axis("strides")?, padding, per_axis("dilations")?))
}

fn places(at: &At) -> Result<usize, String> {
    at.rank()?.checked_sub(2).filter(|places| (1..=2).contains(places)).ok_or_else(|| "its input is neither an image nor a sequence".to_owned())
}

fn conv(at: &At) -> Result<Option<Made>, String> {
    let (stride, padding, dilation) = window(at, places(at)?)?;
    made(Conv { stride, padding, dilation, groups: size(at.int("group", 1))? }, at.all())
}

fn conv_transpose(at: &At) -> Result<Option<Made>, String> {
    let places = places(at)?;
    let (stride, padding, dilation) = window(at, places)?;
    if at.ints("output_shape").is_some() {
        return Err("its padding depends on the size of its output (`output_shape`)".into());
    }
    let added = at.ints("output_padding").unwrap_or_else(|| vec![0; places]).into_iter().map(size).collect::<Result<Vec<_>, _>>()?;
    let output_padding = match added[..] {
        [width] if places == 1 => PerAxis([0, width]),
        [height, width] if places == 2 => PerAxis([height, width]),
        _ => return Err("its `output_padding` is not that of images or sequences".into()),
    };
    made(ConvTranspose { stride, padding, dilation, groups: size(at.int("group", 1))?, output_padding }, at.all())
}

fn batch_norm(at: &At) -> Result<Option<Made>, String> {
    if at.int("training_mode", 0) != 0 || at.int("spatial", 1) != 1 || at.node.output.iter().skip(1).any(|output| !output.is_empty()) {
        return Err("it trains".into());
    }
    made(BatchNorm { epsilon: at.float("epsilon", 1e-5), batch: false }, vec![0, 1, 2, 3, 4])
}

fn layer_norm(at: &At) -> Result<Option<Made>, String> {
    let axis = at.int("axis", -1);
    if axis != -1 && Ok(axis) != i64::try_from(at.rank()?.saturating_sub(1)) {
        return Err("it normalises over more than the last axis".into());
    }
    made(LayerNorm { epsilon: at.float("epsilon", 1e-5) }, at.all())
}

fn gather(at: &At) -> Result<Option<Made>, String> {
    if at.role(0) == Some(Role::Table) { made(Embedding {}, vec![1, 0]) } else { Err("it looks something up that is no table".into()) }
}

fn pow(at: &At) -> Result<Option<Made>, String> {
    match at.number(1) {
        // An exponent with more axes than the base gives its axes to the result.
        Ok(exponent) if at.ty(1)?.shape.len() <= at.rank()? => first(Power { exponent }),
        _ => two(at, Binary { kind: BinaryKind::Pow }.into()),
    }
}

fn clip(at: &At) -> Result<Option<Made>, String> {
    let bound = |position: usize, name: &str, none: f64| {
        if at.has(position) {
            return at.number(position);
        }
        Ok(if at.opset() < 11 { Some(at.float(name, none as f32)).filter(|bound| bound.abs() < f64::from(f32::MAX)).unwrap_or(none) } else { none })
    };
    first(Clip { min: bound(1, "min", f64::NEG_INFINITY)?, max: bound(2, "max", f64::INFINITY)? })
}

fn softmax(at: &At) -> Result<Option<Made>, String> {
    if at.opset() >= 13 {
        return first(Softmax { axis: at.int("axis", -1) });
    }
    // Before, all axes from this one on are one.
    let (axis, last) = (at.int("axis", 1), i64::try_from(at.rank()?).unwrap_or(i64::MAX).saturating_sub(1));
    if axis == last || axis == -1 { first(Softmax { axis: -1 }) } else { Err(format!("it is over all axes from {axis} on")) }
}

fn kernel(at: &At, places: usize) -> Result<PerAxis, String> {
    let sides = at.ints("kernel_shape").unwrap_or_default().into_iter().map(size).collect::<Result<Vec<_>, _>>()?;
    match sides[..] {
        [width] if places == 1 => Ok(PerAxis([1, width])),
        [height, width] if places == 2 => Ok(PerAxis([height, width])),
        _ => Err("its window is not one over images or sequences".into()),
    }
}

fn max_pool(at: &At) -> Result<Option<Made>, String> {
    let places = places(at)?;
    let (stride, padding, dilation) = window(at, places)?;
    if at.node.output.iter().skip(1).any(|output| !output.is_empty()) {
        return Err("it tells where the largest values are".into());
    }
    first(MaxPool { kernel: kernel(at, places)?, stride, padding, dilation, ceil: at.int("ceil_mode", 0) != 0 })
}

fn average_pool(at: &At) -> Result<Option<Made>, String> {
    let places = places(at)?;
    let (stride, padding, dilation) = window(at, places)?;
    let (ceil, count_padding) = (at.int("ceil_mode", 0) != 0, at.int("count_include_pad", 0) != 0);
    first(AveragePool { kernel: kernel(at, places)?, stride, padding, dilation, ceil, count_padding })
}

fn reshape(at: &At) -> Result<Option<Made>, String> {
    let (copies, shape) = (at.int("allowzero", 0) == 0, at.ty(0)?.shape);
    let target = |(axis, number): (usize, Number)| match number {
        Number::Known(-1) | Number::Open => Ok(TargetSize::Rest),
        Number::Known(0) if copies => Ok(TargetSize::Copy(axis)),
        Number::Known(value) => size(value).map(TargetSize::Number),
        // One that is computed and no size of the input is what is left.
        Number::Size(dim) => Ok(shape.iter().position(|own| *own == dim).map_or(TargetSize::Rest, TargetSize::Copy)),
    };
    let shape = at.some_numbers(1)?.into_iter().enumerate().map(target).collect::<Result<Vec<_>, _>>()?;
    if shape.iter().filter(|size| **size == TargetSize::Rest).count() > 1 {
        return Err("more than one of its sizes is not known beforehand".into());
    }
    let (op, ty) = (Reshape { shape }, at.ty(0)?);
    // To the sizes that it has.
    if op.infer(&[&ty]).is_ok_and(|same| same == ty) { Ok(None) } else { first(op) }
}

/// To the sizes that it has.
fn expand(at: &At) -> Result<Option<Made>, String> {
    let (shape, target) = (at.ty(0)?.shape, at.some_numbers(1)?);
    let extra = shape.len().checked_sub(target.len()).ok_or("it adds axes")?;
    let keeps = |(number, size): (&Number, &Dim)| match number {
        Number::Known(1) => true,
        Number::Known(known) => size.fixed().is_some_and(|size| i64::try_from(size) == Ok(*known)),
        Number::Size(dim) => dim == size,
        Number::Open => false,
    };
    let same = target.iter().zip(shape.iter().skip(extra)).all(keeps);
    if same { Ok(None) } else { Err("it repeats its input".into()) }
}

/// A part of one axis, in steps of one.
fn slice(at: &At) -> Result<Option<Made>, String> {
    let [starts, ends] = [("starts", 1), ("ends", 2)].map(|(name, position)| at.given(name, position));
    let (starts, ends) = (starts?.unwrap_or_default(), ends?.unwrap_or_default());
    let axes = at.given("axes", 3)?.unwrap_or_else(|| vec![0]);
    let steps = if at.has(4) { at.numbers(4)? } else { vec![1] };
    let ([start], [end], [axis], [1]) = (&starts[..], &ends[..], &axes[..], &steps[..]) else { return Err("it is no part of one axis in steps of one".into()) };
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
        None => return Err("how long its axis is, is not known beforehand".into()),
    };
    first(Slice { start: known.map_or(*start, |all| (*start).clamp(all.saturating_neg(), all)), length, rest, step: 1, axis: *axis })
}

fn split(at: &At) -> Result<Option<Made>, String> {
    let (axis, shape) = (at.int("axis", 0), at.ty(0)?.shape);
    let place = axes_of(vec![axis], shape.len())?;
    let all = place.first().and_then(|axis| shape.get(*axis)).and_then(|size| size.fixed());
    let lengths = match (at.given("split", 1)?, all) {
        (Some(lengths), _) => lengths.into_iter().map(size).collect::<Result<Vec<_>, _>>()?,
        (None, Some(all)) => {
            let each = all.div_ceil(at.node.output.len().max(1));
            (0..at.node.output.len()).map(|part| each.min(all.saturating_sub(part.saturating_mul(each)))).collect()
        }
        (None, None) => return Err("how long its axis is, is not known beforehand".into()),
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

/// Integers and truth values become floats. Between equal types, nothing changes.
fn cast(at: &At) -> Result<Option<Made>, String> {
    let (to, from) = (at.int("to", 0), at.ty(0)?.element);
    match from {
        Element::Float if to == DataType::Float as i64 => Ok(None),
        Element::Int if to == DataType::Float as i64 => first(ToFloat {}),
        Element::Int if to == DataType::Int64 as i64 && at.is_int64(0) => Ok(None),
        _ => Err(format!("it casts to type {to}")),
    }
}

fn flatten(at: &At) -> Result<Option<Made>, String> {
    let rank = at.rank()?;
    match at.int("axis", 1) {
        1 if rank == 4 => first(Flatten { channels_last: false }),
        1 if rank > 1 => first(Reshape { shape: vec![TargetSize::Copy(0), TargetSize::Rest] }),
        0 => first(Reshape { shape: vec![TargetSize::Number(1), TargetSize::Rest] }),
        axis => Err(format!("it flattens around axis {axis}")),
    }
}

/// Axes counted from the front.
fn axes_of(axes: Vec<i64>, rank: usize) -> Result<Vec<usize>, String> {
    let count = i64::try_from(rank).unwrap_or(i64::MAX);
    axes.into_iter().map(|axis| size(if axis < 0 { axis.saturating_add(count) } else { axis })).collect()
}

fn squeeze(at: &At) -> Result<Option<Made>, String> {
    let shape = at.ty(0)?.shape;
    let gone = match at.given("axes", 1)? {
        Some(given) => axes_of(given, shape.len())?,
        None if shape.iter().all(|size| size.fixed().is_some()) => {
            (0..shape.len()).filter(|axis| shape.get(*axis).and_then(|size| size.fixed()) == Some(1)).collect()
        }
        None => return Err("which axes have one element is not known".into()),
    };
    first(Reshape { shape: (0..shape.len()).filter(|axis| !gone.contains(axis)).map(TargetSize::Copy).collect() })
}

fn unsqueeze(at: &At) -> Result<Option<Made>, String> {
    let given = at.given("axes", 1)?.ok_or("it does not say which axes")?;
    let rank = at.rank()?.saturating_add(given.len());
    let new = axes_of(given, rank)?;
    let mut old = 0usize..;
    let target = |axis: usize| if new.contains(&axis) { Some(TargetSize::Number(1)) } else { old.next().map(TargetSize::Copy) };
    first(Reshape { shape: (0..rank).map_while(target).collect() })
}

fn pad(at: &At) -> Result<Option<Made>, String> {
    let mode = match at.text("mode").as_deref() {
        None | Some("constant") => PadMode::Constant,
        Some("reflect") => PadMode::Reflect,
        Some("edge") => PadMode::Edge,
        Some(other) => return Err(format!("it pads by `{other}`")),
    };
    if at.has(3) {
        return Err("it names axes".into());
    }
    let pads = at.given("pads", 1)?.ok_or("it does not say how much")?;
    let value = if at.has(2) { at.number(2)? } else { at.float("value", 0.0) };
    first(Pad { pads, mode, value })
}

fn resize(at: &At) -> Result<Option<Made>, String> {
    let mode = match at.text("mode").as_deref() {
        None | Some("nearest") => Interpolation::Nearest,
        Some("linear") => Interpolation::Linear,
        Some(other) => return Err(format!("it interpolates by `{other}`")),
    };
    if at.opset() < 11 || at.int("antialias", 0) != 0 || at.ints("axes").is_some() || at.text("keep_aspect_ratio_policy").is_some_and(|how| how != "stretch") {
        return Err("it resizes in a way of its own".into());
    }
    let coordinates = match at.text("coordinate_transformation_mode").as_deref() {
        None | Some("half_pixel") => Coordinates::HalfPixel,
        Some("pytorch_half_pixel") => Coordinates::PytorchHalfPixel,
        Some("align_corners") => Coordinates::AlignCorners,
        Some("asymmetric") => Coordinates::Asymmetric,
        Some(other) => return Err(format!("its coordinates are `{other}`")),
    };
    let nearest = match at.text("nearest_mode").as_deref() {
        None | Some("round_prefer_floor") => NearestMode::RoundPreferFloor,
        Some("round_prefer_ceil") => NearestMode::RoundPreferCeil,
        Some("floor") => NearestMode::Floor,
        Some("ceil") => NearestMode::Ceil,
        Some(other) => return Err(format!("it rounds by `{other}`")),
    };
    let sizes = if at.has(3) {
        at.numbers(3)?.into_iter().map(|value| size(value).map(Extent::Size)).collect::<Result<Vec<_>, _>>()?
    } else {
        at.scales()?.into_iter().map(|scale| Extent::Scale(scale.into())).collect()
    };
    first(Resize { sizes, mode, coordinates, nearest })
}

fn reduce(at: &At, kind: ReduceKind) -> Result<Option<Made>, String> {
    let axes = at.given("axes", 1)?.unwrap_or_default();
    if axes.is_empty() && at.int("noop_with_empty_axes", 0) != 0 {
        return Ok(None);
    }
    first(Reduce { kind, axes, keep: at.int("keepdims", 1) != 0 })
}
