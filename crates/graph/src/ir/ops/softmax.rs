//! Softmax.

use std::ops::Range;

use candle_core::Tensor;
use serde::{Deserialize, Serialize};

use super::gradient::wide;
use super::{Backward, OpSpec, axis_of, letters, require};
use crate::ir::{Element, TensorType};

/// The factors of the probabilities of these batch and head counts, for the queries and keys in these ranges:
/// `[batch, heads, queries, keys]`.
pub type ProbabilityFactors<'f> = &'f dyn Fn([usize; 2], [&Range<usize>; 2]) -> candle_core::Result<Tensor>;

/// Multiplies values of these queries and keys, `[batch, groups, shared queries, keys]`, by the factors.
pub(super) fn times(values: &Tensor, ranges: [&Range<usize>; 2], heads: usize, factors: Option<ProbabilityFactors>) -> candle_core::Result<Tensor> {
    let Some(factors) = factors else { return Ok(values.clone()) };
    let factors = factors([values.dim(0)?, heads], ranges)?;
    values.mul(&factors.to_dtype(values.dtype())?.reshape(values.shape())?)
}

/// `exp(x) / Σ exp(x)` over an axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Softmax {
    /// The axis; negative numbers count from the last axis.
    #[serde(skip_serializing_if = "super::is_last")]
    pub axis: i64,
}

impl Default for Softmax {
    fn default() -> Self {
        Self { axis: -1 }
    }
}

impl Softmax {
    /// Whether it is over the last of `rank` axes.
    pub(super) fn over_last(&self, rank: usize) -> bool {
        axis_of(self.axis, rank).is_ok_and(|axis| axis + 1 == rank)
    }
}

impl OpSpec for Softmax {
    fn arity(&self) -> Range<usize> {
        1..2
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        require(inputs[0], Element::Float, "the input")?;
        axis_of(self.axis, inputs[0].shape.len())?;
        Ok(inputs[0].clone())
    }

    fn axes(&self, inputs: &[&TensorType]) -> String {
        let rank = inputs[0].shape.len();
        match axis_of(self.axis, rank) {
            Ok(axis) if axis + 1 < rank => {
                let axes = letters(rank, |at| (at == axis).then(|| "c!".into()));
                format!("{axes} -> {axes}")
            }
            _ => "* c! -> * c!".into(),
        }
    }

    fn eval(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
        softmax_over(&inputs[0], axis_of(self.axis, inputs[0].rank()).map_err(super::shape_error)?)
    }

    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        let of_input = backward.gradient_of(0, || {
            let axis = axis_of(self.axis, backward.gradient.rank()).map_err(super::shape_error)?;
            back_over(backward.output.tensor()?, backward.gradient, axis)
        })?;
        Ok(vec![of_input])
    }

    fn reads_input(&self, _input: usize) -> bool {
        false
    }

    fn reads_output(&self) -> bool {
        true
    }
}

/// The gradient of the argument of a softmax over the last axis, computed from its result.
pub(super) fn back(y: &Tensor, gradient: &Tensor) -> candle_core::Result<Tensor> {
    back_over(y, gradient, y.rank().saturating_sub(1))
}

fn back_over(y: &Tensor, gradient: &Tensor, axis: usize) -> candle_core::Result<Tensor> {
    let (wide_y, wide_gradient) = (wide(y)?, wide(gradient)?);
    let along = (&wide_y * &wide_gradient)?.sum_keepdim(axis)?;
    (wide_gradient.broadcast_sub(&along)? * wide_y)?.to_dtype(gradient.dtype())
}

/// Softmax over the last axis, computed in at least 32 bits.
pub(super) fn softmax(x: &Tensor) -> candle_core::Result<Tensor> {
    softmax_over(x, x.rank().saturating_sub(1))
}

fn softmax_over(x: &Tensor, axis: usize) -> candle_core::Result<Tensor> {
    let wide_x = wide(x)?;
    let powers = wide_x.broadcast_sub(&wide_x.max_keepdim(axis)?)?.exp()?;
    powers.broadcast_div(&powers.sum_keepdim(axis)?)?.to_dtype(x.dtype())
}
