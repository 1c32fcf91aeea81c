//! Layer normalisation.

use std::ops::Range;

use candle_core::{D, Tensor};
use serde::{Deserialize, Serialize};

use super::host::by_rows;
use super::{Mode, OpSpec, last, require, require_arity, require_vector};
use crate::ir::{Element, TensorType};
use crate::kernel::rows;

/// `(x - mean) / sqrt(variance + epsilon) * weight + bias` over the last axis (Ba et al., 2016).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LayerNorm {
    /// Added to the variance.
    pub epsilon: f64,
}

impl Default for LayerNorm {
    fn default() -> Self {
        Self { epsilon: 1e-5 }
    }
}

impl OpSpec for LayerNorm {
    fn arity(&self) -> Range<usize> {
        3..4
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        require_arity(self, inputs)?;
        require(inputs[0], Element::Float, "the input")?;
        require_vector(inputs[1], last(inputs[0])?, "the weight")?;
        require_vector(inputs[2], last(inputs[0])?, "the bias")?;
        Ok(inputs[0].clone())
    }

    fn axes(&self, _inputs: usize) -> String {
        "* c~, c~, c~ -> * c~".into()
    }

    fn eval(&self, inputs: &[Tensor], mode: Mode) -> candle_core::Result<Tensor> {
        let [x, weight, bias] = inputs else { candle_core::bail!("LayerNorm takes three inputs") };
        if mode == Mode::Infer {
            let epsilon = self.epsilon as f32;
            if let Some(y) = by_rows(x, [weight, bias], |x, y, [weight, bias]| rows::layer_norm(x, y, weight, bias, epsilon))? {
                return Ok(y);
            }
            return candle_nn::ops::layer_norm(&x.contiguous()?, weight, bias, epsilon);
        }
        // The fused kernel has no gradient.
        let centred = x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?;
        let variance = centred.sqr()?.mean_keepdim(D::Minus1)?;
        centred.broadcast_div(&(variance + self.epsilon)?.sqrt()?)?.broadcast_mul(weight)?.broadcast_add(bias)
    }
}
