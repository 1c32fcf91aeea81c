//! Root mean square normalization.

use std::ops::Range;

use candle_core::{D, Tensor};
use serde::{Deserialize, Serialize};

use super::gradient::{summed_to, wide};
use super::{Backward, OpSpec, last, require, require_vector};
use crate::ir::{Element, TensorType};

/// `x / sqrt(mean(x²) + epsilon) * (weight + offset)` over the last axis (Zhang and Sennrich, 2019).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RmsNorm {
    /// Added to the mean square.
    pub epsilon: f64,
    /// Added to the weight: Gemma stores the weight minus one.
    #[serde(skip_serializing_if = "super::is_zero")]
    pub offset: f64,
}

impl RmsNorm {
    /// The effective weight, `weight + offset`, in at least 32 bits.
    pub(super) fn factors(&self, weight: &Tensor) -> candle_core::Result<Tensor> {
        let weight = wide(weight)?;
        if self.offset == 0.0 { Ok(weight) } else { weight + self.offset }
    }
}

impl Default for RmsNorm {
    fn default() -> Self {
        Self { epsilon: 1e-6, offset: 0.0 }
    }
}

impl OpSpec for RmsNorm {
    fn arity(&self) -> Range<usize> {
        2..3
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        require(inputs[0], Element::Float, "the input")?;
        require_vector(inputs[1], last(inputs[0])?, "the weight")?;
        Ok(inputs[0].clone())
    }

    fn axes(&self, _inputs: &[&TensorType]) -> String {
        "* c~, c~ -> * c~".into()
    }

    fn eval(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
        let [x, weight] = inputs else { candle_core::bail!("RmsNorm takes two inputs") };
        let wide_x = wide(x)?;
        let mean = wide_x.sqr()?.mean_keepdim(D::Minus1)?;
        wide_x.broadcast_div(&(mean + self.epsilon)?.sqrt()?)?.broadcast_mul(&self.factors(weight)?)?.to_dtype(x.dtype())
    }

    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        let (x, weight) = (backward.inputs[0].tensor()?, backward.inputs[1].tensor()?);
        let (wide_x, gradient) = (wide(x)?, wide(backward.gradient)?);
        let scale = (wide_x.sqr()?.mean_keepdim(D::Minus1)? + self.epsilon)?.sqrt()?.recip()?;
        let normal = wide_x.broadcast_mul(&scale)?;
        let of_input = backward.gradient_of(0, || {
            let weighted = gradient.broadcast_mul(&self.factors(weight)?)?;
            let along = (&weighted * &normal)?.mean_keepdim(D::Minus1)?;
            (weighted - normal.broadcast_mul(&along)?)?.broadcast_mul(&scale)?.to_dtype(x.dtype())
        })?;
        let of_weight = backward.gradient_of(1, || summed_to(&(&gradient * &normal)?, weight.dims())?.to_dtype(weight.dtype()))?;
        Ok(vec![of_input, of_weight])
    }
}
