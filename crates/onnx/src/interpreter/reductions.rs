//! Reductions and running sums.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use candle_core::Tensor;

use super::super::initializer_roles::int;
use super::super::proto::DataType;
use super::{Call, Value, axis_of, from_floats, from_ints, text};

/// A value whose reduced axes are the last ones.
struct Reduction {
    value: Value,
    /// Number of elements that are reduced to one.
    count: usize,
    /// Shape of the result.
    shape: Vec<usize>,
}

impl Reduction {
    fn new(x: &Value, axes: &[usize], keeps: bool) -> Result<Reduction, String> {
        let is_reduced = |axis: usize| axes.contains(&axis);
        let order: Vec<usize> = (0..x.dims().len()).filter(|axis| !is_reduced(*axis)).chain(axes.iter().copied()).collect();
        let count = axes.iter().filter_map(|axis| x.dims().get(*axis)).fold(1usize, |count, size| count.saturating_mul(*size));
        if count == 0 {
            return Err("it reduces an axis without elements".into());
        }
        let size = |(axis, size): (usize, &usize)| if is_reduced(axis) { keeps.then_some(1) } else { Some(*size) };
        let shape = x.dims().iter().enumerate().filter_map(size).collect();
        let tensor = x.tensor.permute(order).and_then(|tensor| tensor.contiguous()).map_err(text)?;
        Ok(Reduction { value: Value { tensor, ty: x.ty }, count, shape })
    }

    fn floats(&self, combine: fn(&[f32]) -> f32) -> Result<Tensor, String> {
        from_floats(self.value.floats(self.value.dims())?.chunks(self.count).map(combine).collect(), &self.shape)
    }

    fn ints(&self, combine: impl Fn(&[i64]) -> i64) -> Result<Tensor, String> {
        from_ints(self.value.ints(self.value.dims())?.chunks(self.count).map(combine).collect(), &self.shape)
    }
}

pub(super) fn reduce(call: &Call) -> Result<Tensor, String> {
    let x = call.input(0)?;
    let rank = x.dims().len();
    let mut axes = call.attribute_or_input("axes", 1)?.unwrap_or_default().into_iter().map(|axis| axis_of(axis, rank)).collect::<Result<Vec<_>, _>>()?;
    if axes.is_empty() {
        if int(call.node, "noop_with_empty_axes", 0) != 0 {
            return Ok(x.tensor.clone());
        }
        axes = (0..rank).collect();
    }
    axes.sort_unstable();
    axes.dedup();
    let reduction = Reduction::new(x, &axes, int(call.node, "keepdims", 1) != 0)?;
    if x.is_float() {
        return reduction.floats(match call.node.op_type() {
            "ReduceSum" => |part| part.iter().sum(),
            "ReduceMax" => |part| part.iter().copied().fold(f32::NEG_INFINITY, f32::max),
            "ReduceMin" => |part| part.iter().copied().fold(f32::INFINITY, f32::min),
            _ => |part| part.iter().product(),
        });
    }
    let op = call.node.op_type();
    let narrow = x.ty == DataType::Int32;
    reduction.ints(|part| {
        let result = match op {
            "ReduceSum" => part.iter().fold(0i64, |sum, value| sum.wrapping_add(*value)),
            "ReduceMax" => part.iter().copied().max().unwrap_or(0),
            "ReduceMin" => part.iter().copied().min().unwrap_or(0),
            _ => part.iter().fold(1i64, |product, value| product.wrapping_mul(*value)),
        };
        if narrow { i64::from(result as i32) } else { result }
    })
}

pub(super) fn arg_max(call: &Call) -> Result<Tensor, String> {
    let x = call.input(0)?;
    let axis = call.axis(0, x.dims().len())?;
    let reduction = Reduction::new(x, &[axis], int(call.node, "keepdims", 1) != 0)?;
    let is_last = int(call.node, "select_last_index", 0) != 0;
    fn position<T: PartialOrd + Copy>(part: &[T], is_last: bool) -> i64 {
        let mut best = (0, part.first().copied());
        for (at, value) in part.iter().enumerate() {
            if best.1.is_none_or(|largest| *value > largest || is_last && *value == largest) {
                best = (at, Some(*value));
            }
        }
        i64::try_from(best.0).unwrap_or(0)
    }
    let positions: Vec<i64> = if x.is_float() {
        reduction.value.floats(reduction.value.dims())?.chunks(reduction.count).map(|part| position(part, is_last)).collect()
    } else {
        reduction.value.ints(reduction.value.dims())?.chunks(reduction.count).map(|part| position(part, is_last)).collect()
    };
    from_ints(positions, &reduction.shape)
}

pub(super) fn cum_sum(call: &Call) -> Result<Tensor, String> {
    let x = call.input(0)?;
    let axis = axis_of(call.ints(1)?.first().copied().ok_or("its axis is missing")?, x.dims().len())?;
    let (exclusive, reverse) = (int(call.node, "exclusive", 0) != 0, int(call.node, "reverse", 0) != 0);
    // The summed axis becomes the last one.
    let order: Vec<usize> = (0..x.dims().len()).filter(|other| *other != axis).chain([axis]).collect();
    let moved = x.tensor.permute(order.as_slice()).and_then(|tensor| tensor.contiguous()).map_err(text)?;
    let dims = moved.dims().to_vec();
    let size = dims.last().copied().unwrap_or(1).max(1);
    fn sums<T: Copy>(mut values: Vec<T>, size: usize, zero: T, exclusive: bool, reverse: bool, add: impl Fn(T, T) -> T) -> Vec<T> {
        for row in values.chunks_mut(size) {
            if reverse {
                row.reverse();
            }
            let mut sum = zero;
            for value in row.iter_mut() {
                let after = add(sum, *value);
                *value = if exclusive { sum } else { after };
                sum = after;
            }
            if reverse {
                row.reverse();
            }
        }
        values
    }
    let moved = Value { tensor: moved, ty: x.ty };
    let result = if x.is_float() {
        from_floats(sums(moved.floats(&dims)?, size, 0.0, exclusive, reverse, |a, b| a + b), &dims)?
    } else {
        let narrow = x.ty == DataType::Int32;
        let add = |a: i64, b: i64| if narrow { i64::from((a as i32).wrapping_add(b as i32)) } else { a.wrapping_add(b) };
        from_ints(sums(moved.ints(&dims)?, size, 0, exclusive, reverse, add), &dims)?
    };
    let back: Vec<usize> = (0..order.len()).filter_map(|axis| order.iter().position(|from| *from == axis)).collect();
    result.permute(back).and_then(|tensor| tensor.contiguous()).map_err(text)
}
