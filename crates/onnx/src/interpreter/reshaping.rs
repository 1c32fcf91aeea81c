//! Shapes, and operators that rearrange or repeat elements.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use candle_core::Tensor;

use super::super::initializer_roles::int;
use super::{Call, Value, axis_of, filling, from_floats, from_ints, text};

fn wide(size: usize) -> i64 {
    i64::try_from(size).unwrap_or(i64::MAX)
}

fn sizes(values: &[i64]) -> Result<Vec<usize>, String> {
    values.iter().map(|value| usize::try_from(*value).map_err(|_| format!("{value} is not a valid size"))).collect()
}

pub(super) fn shape(call: &Call) -> Result<Tensor, String> {
    let dims = call.input(0)?.dims();
    let place = |at: i64| if at < 0 { at.saturating_add(wide(dims.len())) } else { at }.clamp(0, wide(dims.len()));
    let [start, end] = [("start", 0), ("end", i64::MAX)].map(|(name, missing)| usize::try_from(place(int(call.node, name, missing))).unwrap_or(0));
    let part: Vec<i64> = dims.get(start..end.max(start)).unwrap_or_default().iter().map(|size| wide(*size)).collect();
    let count = part.len();
    from_ints(part, &[count])
}

pub(super) fn size(call: &Call) -> Result<Tensor, String> {
    from_ints(vec![wide(call.input(0)?.tensor.elem_count())], &[])
}

fn reshaped(x: &Value, shape: &[usize]) -> Result<Tensor, String> {
    x.tensor.reshape(shape).map_err(text)
}

pub(super) fn reshape(call: &Call) -> Result<Tensor, String> {
    let (x, target) = (call.input(0)?, call.ints(1)?);
    let copies = int(call.node, "allowzero", 0) == 0;
    let size = |(axis, size): (usize, &i64)| match size {
        0 if copies => x.dims().get(axis).map(|size| wide(*size)).ok_or_else(|| format!("it copies axis {axis}, which does not exist")),
        size => Ok(*size),
    };
    let mut shape = target.iter().enumerate().map(size).collect::<Result<Vec<_>, _>>()?;
    let others = shape.iter().filter(|size| **size != -1).fold(1i64, |count, size| count.saturating_mul(*size));
    let rest = wide(x.tensor.elem_count()).checked_div(others).unwrap_or(0);
    shape.iter_mut().filter(|size| **size == -1).take(1).for_each(|size| *size = rest);
    let shape = sizes(&shape)?;
    call.check_size(&shape)?;
    reshaped(x, &shape)
}

pub(super) fn flatten(call: &Call) -> Result<Tensor, String> {
    let x = call.input(0)?;
    let axis = match int(call.node, "axis", 1) {
        axis if axis == wide(x.dims().len()) => x.dims().len(),
        axis => axis_of(axis, x.dims().len())?,
    };
    let product = |sizes: &[usize]| sizes.iter().fold(1usize, |count, size| count.saturating_mul(*size));
    let (before, after) = x.dims().split_at_checked(axis).ok_or("its axis does not exist")?;
    reshaped(x, &[product(before), product(after)])
}

pub(super) fn squeeze(call: &Call) -> Result<Tensor, String> {
    let x = call.input(0)?;
    let rank = x.dims().len();
    let gone: Option<Vec<usize>> =
        call.attribute_or_input("axes", 1)?.map(|axes| axes.into_iter().map(|axis| axis_of(axis, rank)).collect::<Result<_, _>>()).transpose()?;
    let is_gone = |axis: usize, size: usize| gone.as_ref().map_or(size == 1, |gone| gone.contains(&axis));
    let kept: Vec<usize> = x.dims().iter().enumerate().filter(|(axis, size)| !is_gone(*axis, **size)).map(|(_, size)| *size).collect();
    reshaped(x, &kept)
}

pub(super) fn unsqueeze(call: &Call) -> Result<Tensor, String> {
    let (x, axes) = (call.input(0)?, call.attribute_or_input("axes", 1)?.ok_or("its `axes` are missing")?);
    let rank = x.dims().len().saturating_add(axes.len());
    let new: Vec<usize> = axes.into_iter().map(|axis| axis_of(axis, rank)).collect::<Result<_, _>>()?;
    let mut old = x.dims().iter().copied();
    let shape: Vec<usize> = (0..rank).map_while(|axis| if new.contains(&axis) { Some(1) } else { old.next() }).collect();
    reshaped(x, &shape)
}

pub(super) fn expand(call: &Call) -> Result<Tensor, String> {
    let (x, target) = (call.input(0)?, sizes(&call.ints(1)?)?);
    let shape = call.broadcast(&[x.dims(), &target])?;
    x.tensor.broadcast_as(shape).and_then(|tensor| tensor.contiguous()).map_err(text)
}

pub(super) fn tile(call: &Call) -> Result<Tensor, String> {
    let (x, times) = (call.input(0)?, sizes(&call.ints(1)?)?);
    if times.len() != x.dims().len() || times.contains(&0) {
        return Err(format!("it repeats {} axes {times:?} times", x.dims().len()));
    }
    call.check_size(&x.dims().iter().zip(&times).map(|(size, times)| size.saturating_mul(*times)).collect::<Vec<_>>())?;
    x.tensor.repeat(times).and_then(|tensor| tensor.contiguous()).map_err(text)
}

pub(super) fn transpose(call: &Call) -> Result<Tensor, String> {
    let x = call.input(0)?;
    let perm = match call.node.attribute.iter().find(|attribute| attribute.name() == "perm") {
        Some(attribute) => sizes(&attribute.ints)?,
        None => (0..x.dims().len()).rev().collect(),
    };
    x.tensor.permute(perm).and_then(|tensor| tensor.contiguous()).map_err(text)
}

pub(super) fn concat(call: &Call) -> Result<Tensor, String> {
    let all = (0..call.node.input.len()).map(|at| call.input(at)).collect::<Result<Vec<_>, _>>()?;
    let first = all.first().ok_or("it has no inputs")?;
    let axis = call.axis(0, first.dims().len())?;
    let along = |value: &Value| value.dims().get(axis).copied().unwrap_or(0);
    let total = all.iter().fold(0usize, |sum, value| sum.saturating_add(along(value)));
    let mut shape = first.dims().to_vec();
    shape.get_mut(axis).into_iter().for_each(|size| *size = total);
    call.check_size(&shape)?;
    let parts: Vec<&Tensor> = all.iter().filter(|value| along(value) > 0).map(|value| &value.tensor).collect();
    if parts.is_empty() { Ok(first.tensor.clone()) } else { Tensor::cat(&parts, axis).and_then(|tensor| tensor.contiguous()).map_err(text) }
}

pub(super) fn constant_of_shape(call: &Call) -> Result<Tensor, String> {
    let shape = sizes(&call.ints(0)?)?;
    call.check_size(&shape)?;
    let filling = filling(call.node).ok_or("its value is missing")?;
    filling.tensor.flatten_all().and_then(|value| value.squeeze(0)?.broadcast_as(shape)?.contiguous()).map_err(text)
}

pub(super) fn range(call: &Call) -> Result<Tensor, String> {
    let first = call.input(0)?;
    if first.is_float() {
        let one = |at: usize| call.input(at).and_then(|value| value.floats(value.dims()))?.first().copied().ok_or_else(|| "it is empty".to_owned());
        let (start, end, step) = (one(0)?, one(1)?, one(2)?);
        // ONNX Runtime computes the number of elements with 64 bits, and each element from the previous one.
        let count = ((f64::from(end) - f64::from(start)) / f64::from(step)).ceil().max(0.0);
        if !count.is_finite() {
            return Err(format!("its step is {step}"));
        }
        let count = count as usize;
        call.check_size(&[count])?;
        return from_floats(std::iter::successors(Some(start), |value| Some(value + step)).take(count).collect(), &[count]);
    }
    let one = |at: usize| call.ints(at)?.first().copied().ok_or_else(|| "it is empty".to_owned());
    let (start, end, step) = (one(0)?, one(1)?, one(2)?);
    let (span, by) = if step < 0 { (start.checked_sub(end), step.checked_neg()) } else { (end.checked_sub(start), Some(step)) };
    let (span, by) = span.zip(by.filter(|by| *by > 0)).ok_or_else(|| format!("its step is {step}"))?;
    let count = usize::try_from(span.max(0).saturating_add(by).saturating_sub(1).checked_div(by).unwrap_or(0)).map_err(|e| e.to_string())?;
    call.check_size(&[count])?;
    from_ints((0..count).map(|at| wide(at).wrapping_mul(step).wrapping_add(start)).collect(), &[count])
}

/// Replaces elements below (`upper`) or above a diagonal by zeros.
pub(super) fn trilu(call: &Call) -> Result<Tensor, String> {
    let x = call.input(0)?;
    let [.., rows, columns] = x.dims() else { return Err("it needs a matrix".into()) };
    let diagonal = if call.optional(1).is_some() { call.ints(1)?.first().copied().unwrap_or(0) } else { 0 };
    let upper = int(call.node, "upper", 1) != 0;
    let is_kept = |at: usize| {
        let column = at.checked_rem(*columns).unwrap_or(0);
        let row = at.checked_div(*columns).and_then(|at| at.checked_rem(*rows)).unwrap_or(0);
        let distance = wide(column).saturating_sub(wide(row));
        if upper { distance >= diagonal } else { distance <= diagonal }
    };
    if x.is_float() {
        return from_floats(x.floats(x.dims())?.into_iter().enumerate().map(|(at, value)| if is_kept(at) { value } else { 0.0 }).collect(), x.dims());
    }
    from_ints(x.ints(x.dims())?.into_iter().enumerate().map(|(at, value)| if is_kept(at) { value } else { 0 }).collect(), x.dims())
}
