//! Layer normalization.

use std::ops::Range;

use candle_core::{D, Tensor};
use serde::{Deserialize, Serialize};

use super::gradient::{summed_to, wide};
use super::{Backward, OpSpec, last, require, require_vector};
use crate::ir::{Element, TensorType};

/// `(x - mean) / sqrt(variance + epsilon) * weight + bias` over the last axis (Ba et al., 2016); the bias
/// is optional.
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
        2..4
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        require(inputs[0], Element::Float, "the input")?;
        require_vector(inputs[1], last(inputs[0])?, "the weight")?;
        if let Some(bias) = inputs.get(2) {
            require_vector(bias, last(inputs[0])?, "the bias")?;
        }
        Ok(inputs[0].clone())
    }

    fn axes(&self, inputs: &[&TensorType]) -> String {
        if inputs.len() > 2 { "* c~, c~, c~ -> * c~" } else { "* c~, c~ -> * c~" }.into()
    }

    fn eval(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
        let (x, weight) = (&inputs[0], &inputs[1]);
        let wide_x = wide(x)?;
        let centred = wide_x.broadcast_sub(&wide_x.mean_keepdim(D::Minus1)?)?;
        let variance = centred.sqr()?.mean_keepdim(D::Minus1)?;
        let normal = centred.broadcast_div(&(variance + self.epsilon)?.sqrt()?)?;
        let scaled = normal.broadcast_mul(&wide(weight)?)?;
        match inputs.get(2) {
            Some(bias) => scaled.broadcast_add(&wide(bias)?)?,
            None => scaled,
        }
        .to_dtype(x.dtype())
    }

    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        let (x, weight) = (backward.inputs[0].tensor()?, backward.inputs[1].tensor()?);
        let (wide_x, gradient) = (wide(x)?, wide(backward.gradient)?);
        let centred = wide_x.broadcast_sub(&wide_x.mean_keepdim(D::Minus1)?)?;
        let scale = (centred.sqr()?.mean_keepdim(D::Minus1)? + self.epsilon)?.sqrt()?.recip()?;
        let normal = centred.broadcast_mul(&scale)?;
        let of_input = backward.gradient_of(0, || {
            let weighted = gradient.broadcast_mul(&wide(weight)?)?;
            let along = (&weighted * &normal)?.mean_keepdim(D::Minus1)?;
            let rest = weighted.broadcast_sub(&weighted.mean_keepdim(D::Minus1)?)? - normal.broadcast_mul(&along)?;
            rest?.broadcast_mul(&scale)?.to_dtype(x.dtype())
        })?;
        let summed = |rows: &Tensor| summed_to(rows, weight.dims())?.to_dtype(weight.dtype());
        let (of_weight, of_bias) = (backward.gradient_of(1, || summed(&(&gradient * &normal)?))?, backward.gradient_of(2, || summed(&gradient))?);
        Ok([of_input, of_weight, of_bias].into_iter().take(backward.inputs.len()).collect())
    }

    fn reads_input(&self, input: usize) -> bool {
        input < 2
    }
}
