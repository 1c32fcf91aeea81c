//! L2 normalization.

use std::ops::Range;

use candle_core::{D, Tensor};
use serde::{Deserialize, Serialize};

use super::constants::ScalarOps;
use super::gradient::wide;
use super::{Backward, OpSpec, last, require};
use crate::ir::{Element, TensorType};

/// `x / max(sqrt(‖x‖₂² + epsilon), 1e-12)` over the last axis.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Normalize {
    /// Added to the sum of squares.
    #[serde(skip_serializing_if = "super::is_zero")]
    pub epsilon: f64,
}

impl Normalize {
    fn norm(self, x: &Tensor) -> candle_core::Result<Tensor> {
        (x.sqr()?.sum_keepdim(D::Minus1)? + self.epsilon)?.sqrt()?.clamp_scalar(1e-12, f64::MAX)
    }
}

impl OpSpec for Normalize {
    fn arity(&self) -> Range<usize> {
        1..2
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        require(inputs[0], Element::Float, "the input")?;
        last(inputs[0])?;
        Ok(inputs[0].clone())
    }

    fn axes(&self, _inputs: &[&TensorType]) -> String {
        "* c~ -> * c~".into()
    }

    fn eval(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
        let x = wide(&inputs[0])?;
        x.broadcast_div(&self.norm(&x)?)?.to_dtype(inputs[0].dtype())
    }

    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        let of_input = backward.gradient_of(0, || {
            let x = backward.inputs[0].tensor()?;
            let (x, gradient, dtype) = (wide(x)?, wide(backward.gradient)?, x.dtype());
            let norm = self.norm(&x)?;
            let direction = x.broadcast_div(&norm)?;
            let along = (&direction * &gradient)?.sum_keepdim(D::Minus1)?;
            (gradient - direction.broadcast_mul(&along)?)?.broadcast_div(&norm)?.to_dtype(dtype)
        })?;
        Ok(vec![of_input])
    }
}
