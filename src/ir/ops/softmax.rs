//! Softmax.

use std::ops::Range;

use candle_core::{D, Tensor};
use serde::{Deserialize, Serialize};

use super::gradient::wide;
use super::{Backward, OpSpec, last, require};
use crate::ir::{Element, TensorType};

/// `exp(x) / Σ exp(x)` over the last axis.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Softmax {}

impl OpSpec for Softmax {
    fn arity(&self) -> Range<usize> {
        1..2
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        require(inputs[0], Element::Float, "the input")?;
        last(inputs[0])?;
        Ok(inputs[0].clone())
    }

    fn axes(&self, _inputs: usize) -> String {
        "* c! -> * c!".into()
    }

    fn eval(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
        softmax(&inputs[0])
    }

    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        Ok(vec![backward.of(0, || back(backward.output.tensor()?, backward.gradient))?])
    }

    fn reads_input(&self, _input: usize) -> bool {
        false
    }

    fn reads_output(&self) -> bool {
        true
    }
}

/// The gradient of a softmax's argument, out of its result.
pub(super) fn back(y: &Tensor, gradient: &Tensor) -> candle_core::Result<Tensor> {
    let (wide_y, wide_gradient) = (wide(y)?, wide(gradient)?);
    let along = (&wide_y * &wide_gradient)?.sum_keepdim(D::Minus1)?;
    (wide_gradient.broadcast_sub(&along)? * wide_y)?.to_dtype(gradient.dtype())
}

/// Over the last axis, in 32 bits at least.
pub(super) fn softmax(x: &Tensor) -> candle_core::Result<Tensor> {
    let wide_x = wide(x)?;
    let powers = wide_x.broadcast_sub(&wide_x.max_keepdim(D::Minus1)?)?.exp()?;
    powers.broadcast_div(&powers.sum_keepdim(D::Minus1)?)?.to_dtype(x.dtype())
}
