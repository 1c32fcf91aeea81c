//! Running sums.

use std::ops::Range;

use candle_core::Tensor;
use serde::{Deserialize, Serialize};

use super::gradient::wide;
use super::{Backward, OpSpec, axis_of, is_zero, letters, shape_error};
use crate::ir::TensorType;

/// Sums of the elements up to each position of an axis, of floats or integers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CumSum {
    /// The axis; negative numbers count from the last axis.
    #[serde(skip_serializing_if = "super::is_last")]
    pub axis: i64,
    /// Whether a sum excludes the element at its own position.
    #[serde(skip_serializing_if = "is_zero")]
    pub exclusive: bool,
    /// Whether sums start at the end of the axis.
    #[serde(skip_serializing_if = "is_zero")]
    pub reverse: bool,
}

impl Default for CumSum {
    fn default() -> Self {
        Self { axis: -1, exclusive: false, reverse: false }
    }
}

impl CumSum {
    /// Moves elements `by` positions in the direction of the sum; the first ones become zero.
    fn shift(self, x: &Tensor, axis: usize, by: usize) -> candle_core::Result<Tensor> {
        let size = x.dim(axis)?;
        if by >= size {
            return x.zeros_like();
        }
        let zeros = x.narrow(axis, 0, by)?.zeros_like()?;
        if self.reverse { Tensor::cat(&[&x.narrow(axis, by, size - by)?, &zeros], axis) } else { Tensor::cat(&[&zeros, &x.narrow(axis, 0, size - by)?], axis) }
    }

    /// The sums, in a number of steps that is logarithmic in the size of the axis (Hillis and Steele, 1986).
    fn sums(self, x: &Tensor) -> candle_core::Result<Tensor> {
        let axis = axis_of(self.axis, x.rank()).map_err(shape_error)?;
        let start = wide(x)?;
        let mut sums = if self.exclusive { self.shift(&start, axis, 1)? } else { start };
        let mut by = 1;
        while by < x.dim(axis)? {
            sums = (&sums + self.shift(&sums, axis, by)?)?;
            by *= 2;
        }
        sums.to_dtype(x.dtype())
    }
}

impl OpSpec for CumSum {
    fn arity(&self) -> Range<usize> {
        1..2
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        axis_of(self.axis, inputs[0].shape.len())?;
        Ok(inputs[0].clone())
    }

    fn axes(&self, inputs: &[&TensorType]) -> String {
        let rank = inputs[0].shape.len();
        let axis = axis_of(self.axis, rank).ok();
        let axes = letters(rank, |at| (Some(at) == axis).then(|| "c!".into()));
        format!("{axes} -> {axes}")
    }

    fn eval(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
        self.sums(&inputs[0])
    }

    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        let opposite = CumSum { reverse: !self.reverse, ..*self };
        Ok(vec![backward.gradient_of(0, || opposite.sums(backward.gradient))?])
    }

    fn reads_input(&self, _input: usize) -> bool {
        false
    }
}
