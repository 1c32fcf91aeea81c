//! Root mean square normalisation.

use std::ops::Range;

use candle_core::{D, Device, Tensor};
use serde::{Deserialize, Serialize};

use super::gradient::{is_half, summed_to, wide};
use super::host::{by_rows, norm_back};
use super::{Backward, Mode, OpSpec, last, require, require_vector};
use crate::ir::{Element, TensorType};
use crate::kernel::{rows, rows_gradient};

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
        require(inputs[0], Element::Float, "the input")?;
        require_vector(inputs[1], last(inputs[0])?, "the weight")?;
        Ok(inputs[0].clone())
    }

    fn axes(&self, _inputs: usize) -> String {
        "* c~, c~ -> * c~".into()
    }

    fn eval(&self, inputs: &[Tensor], mode: Mode) -> candle_core::Result<Tensor> {
        let [x, weight] = inputs else { candle_core::bail!("RmsNorm takes two inputs") };
        if is_half(x) && (mode == Mode::Train || matches!(x.device(), Device::Cpu)) {
            return self.eval(&[wide(x)?, wide(weight)?], mode)?.to_dtype(x.dtype());
        }
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

    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        let (x, weight) = (backward.inputs[0].tensor()?, backward.inputs[1].tensor()?);
        let epsilon = self.epsilon as f32;
        let kernel = |x: &[f32], g: &[f32], weight: &[f32], out: &mut [f32], sums: &mut [f32]| rows_gradient::rms_norm(x, g, weight, epsilon, out, sums);
        if let Some(gradients) = norm_back(backward, kernel)? {
            return Ok(gradients);
        }
        let (wide_x, gradient) = (wide(x)?, wide(backward.gradient)?);
        let scale = (wide_x.sqr()?.mean_keepdim(D::Minus1)? + self.epsilon)?.sqrt()?.recip()?;
        let normal = wide_x.broadcast_mul(&scale)?;
        let of_input = backward.of(0, || {
            let weighted = gradient.broadcast_mul(&wide(weight)?)?;
            let along = (&weighted * &normal)?.mean_keepdim(D::Minus1)?;
            (weighted - normal.broadcast_mul(&along)?)?.broadcast_mul(&scale)?.to_dtype(x.dtype())
        })?;
        let of_weight = backward.of(1, || summed_to(&(&gradient * &normal)?, weight.dims())?.to_dtype(weight.dtype()))?;
        Ok(vec![of_input, of_weight])
    }
}
