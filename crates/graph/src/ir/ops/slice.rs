//! Slicing of an axis.

use std::ops::Range;

use candle_core::Tensor;
use serde::{Deserialize, Serialize};

use super::gather::{cached_indices, gather, gather_gradient};
use super::{Backward, OpSpec, axis_of, letters};
use crate::ir::{Dim, TensorType};

/// Selects every `step`-th element of an axis: `length` elements from `start` on, or all except the last
/// `rest`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Slice {
    /// First element; negative numbers count from the end.
    pub start: i64,
    /// Number of elements; `None` for all except the last `rest`.
    pub length: Option<usize>,
    /// Number of elements at the end to exclude, without a length.
    #[serde(skip_serializing_if = "super::is_zero")]
    pub rest: usize,
    /// Distance of selected elements; negative to go backwards. A step other than 1 requires a length.
    #[serde(skip_serializing_if = "is_one")]
    pub step: i64,
    /// The axis; negative numbers count from the last axis.
    #[serde(skip_serializing_if = "super::is_last")]
    pub axis: i64,
}

fn is_one(step: &i64) -> bool {
    *step == 1
}

impl Default for Slice {
    fn default() -> Self {
        Self { start: 0, length: Some(1), rest: 0, step: 1, axis: -1 }
    }
}

impl Slice {
    /// Selects `length` elements of the last axis from `start` on.
    pub fn last_axis(start: usize, length: usize) -> Slice {
        Slice { start: i64::try_from(start).unwrap_or(i64::MAX), length: Some(length), ..Slice::default() }
    }

    /// The first index and the number of elements, for an axis of this size.
    pub fn bounds(&self, size: usize) -> Option<(usize, usize)> {
        let wide = i64::try_from(size).ok()?;
        let start = if self.start < 0 { self.start.checked_add(wide)? } else { self.start };
        let length = match self.length {
            Some(length) => i64::try_from(length).ok()?,
            None => wide.checked_sub(i64::try_from(self.rest).ok()?)?.checked_sub(start)?,
        };
        let last = length.checked_sub(1)?.checked_mul(self.step)?.checked_add(start)?;
        let inside = |at: i64| (0..wide).contains(&at);
        if length > 0 && inside(start) && inside(last) { Some((usize::try_from(start).ok()?, usize::try_from(length).ok()?)) } else { None }
    }

    fn resolve(&self, dims: &[usize]) -> candle_core::Result<(usize, usize, usize)> {
        let axis = axis_of(self.axis, dims.len()).map_err(super::shape_error)?;
        let (start, length) = self.bounds(dims[axis]).ok_or_else(|| super::shape_error(format!("{self:?} does not fit {} elements", dims[axis])))?;
        Ok((axis, start, length))
    }

    /// The indices of the selected elements.
    fn indices(&self, start: usize, length: usize, like: &Tensor) -> candle_core::Result<Tensor> {
        let index = |at: usize| (start as i64 + at as i64 * self.step) as u32;
        cached_indices(format!("{self:?} {start} {length}"), like.device(), || (0..length).map(index).collect())
    }
}

impl OpSpec for Slice {
    fn arity(&self) -> Range<usize> {
        1..2
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        let mut shape = inputs[0].shape.clone();
        let axis = axis_of(self.axis, shape.len())?;
        if self.step != 1 && self.length.is_none() {
            return Err("a slice with a step other than 1 requires a length".into());
        }
        shape[axis] = match (shape[axis].fixed(), self.length) {
            (Some(size), _) => match self.bounds(size) {
                Some((_, length)) => Dim::Fixed(length),
                None => {
                    let end = self.length.map_or(size.saturating_sub(self.rest) as i64, |length| self.start.saturating_add(length as i64));
                    return Err(format!("elements {} to {end} are out of range for an axis of size {size}", self.start));
                }
            },
            (None, Some(0)) => return Err("a slice needs at least one element".into()),
            (None, Some(length)) => Dim::Fixed(length),
            (None, None) => {
                let rest = i64::try_from(self.rest).map_err(|_| "the excluded rest overflows".to_owned())?;
                let less = self.start.checked_add(rest).and_then(i64::checked_neg);
                let length = less.and_then(|less| if self.start < 0 { usize::try_from(less).ok().map(Dim::Fixed) } else { shape[axis].moved(less) });
                length.ok_or_else(|| format!("the slice from element {} to the last but {rest} of {} is empty", self.start, shape[axis]))?
            }
        };
        Ok(TensorType { element: inputs[0].element, shape })
    }

    fn axes(&self, inputs: &[&TensorType]) -> String {
        let shape = &inputs[0].shape;
        let Ok(axis) = axis_of(self.axis, shape.len()) else { return String::new() };
        let (from, to) = match shape[axis].fixed().and_then(|size| self.bounds(size)) {
            Some((start, length)) if self.step == 1 => (format!("(a={start}+k={length}+b)"), "k"),
            _ => ("_".to_owned(), "_"),
        };
        if axis + 1 == shape.len() {
            return format!("* {from} -> * {to}");
        }
        let with = |text: &str| letters(shape.len(), |at| (at == axis).then(|| text.to_owned()));
        format!("{} -> {}", with(&from), with(to))
    }

    fn resize(&mut self, size: &dyn Fn(&str) -> usize) {
        if size("k") > 0 {
            (self.start, self.length, self.rest) = (size("a") as i64, Some(size("k")), 0);
        }
    }

    fn eval(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
        let x = &inputs[0];
        let (axis, start, length) = self.resolve(x.dims())?;
        if self.step == 1 {
            return x.narrow(axis, start, length)?.contiguous();
        }
        gather(x, &self.indices(start, length, x)?, axis)
    }

    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        let (dims, gradient) = (backward.inputs[0].dims(), backward.gradient);
        let of_input = backward.gradient_of(0, || {
            let (axis, start, length) = self.resolve(dims)?;
            if self.step == 1 {
                return gradient.pad_with_zeros(axis, start, dims[axis] - start - length);
            }
            gather_gradient(gradient, &self.indices(start, length, gradient)?, axis, dims[axis])
        })?;
        Ok(vec![of_input])
    }

    fn reads_input(&self, _input: usize) -> bool {
        false
    }

    fn accepts_half(&self, _input: usize) -> bool {
        true
    }
}
