//! Root mean square normalisation.

use std::ops::Range;

use candle_core::{D, Tensor};
use serde::{Deserialize, Serialize};

use super::host::by_rows;
use super::{Mode, OpSpec, last, require, require_arity, require_vector};
use crate::ir::{Element, TensorType};
use crate::kernel::rows;

/// `x / sqrt(mean(x²) + epsilon) * weight` over the last axis (Zhang and Sennrich, 2019).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RmsNorm {
    /// Added to the mean square.
    pub epsilon: f64,
}

impl Default for RmsNorm {
    fn default() -> Self {
        Self { epsilon: 1e-6 }
    }
}

impl OpSpec for RmsNorm {
    fn arity(&self) -> Range<usize> {
        2..3
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        require_arity(self, inputs)?;
        require(inputs[0], Element::Float, "the input")?;
        require_vector(inputs[1], last(inputs[0])?, "the weight")?;
        Ok(inputs[0].clone())
    }

    fn axes(&self, _inputs: usize) -> String {
        "* c~, c~ -> * c~".into()
    }

    fn eval(&self, inputs: &[Tensor], mode: Mode) -> candle_core::Result<Tensor> {
        let [x, weight] = inputs else { candle_core::bail!("RmsNorm takes two inputs") };
        if mode == Mode::Infer {
            let epsilon = self.epsilon as f32;
            if let Some(y) = by_rows(x, [weight], |x, y, [weight]| rows::rms_norm(x, y, weight, epsilon))? {
                return Ok(y);
            }
            return candle_nn::ops::rms_norm(&x.contiguous()?, weight, epsilon);
        }
        // The fused kernel has no gradient.
        let mean = x.sqr()?.mean_keepdim(D::Minus1)?;
        x.broadcast_div(&(mean + self.epsilon)?.sqrt()?)?.broadcast_mul(weight)
    }
}
