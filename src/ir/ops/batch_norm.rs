//! Batch normalisation, with fixed statistics or those of the batch.

use std::ops::Range;

use candle_core::{D, Tensor};
use serde::{Deserialize, Serialize};

use super::{Mode, OpSpec, require, require_arity, require_vector};
use crate::ir::{Element, TensorType};

/// `(x - mean) / sqrt(variance + epsilon) * weight + bias` over axis 1; inputs x, weight, bias, mean, variance
/// (Ioffe and Szegedy, 2015).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct BatchNorm {
    /// Added to the variance.
    pub epsilon: f64,
    /// Whether mean and variance are those of the batch, as in training, and the inputs of that name are not read.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub batch: bool,
}

impl Default for BatchNorm {
    fn default() -> Self {
        Self { epsilon: 1e-5, batch: false }
    }
}

impl BatchNorm {
    /// What each channel is multiplied with, and what is added then; from weight, bias, mean and variance.
    ///
    /// # Errors
    /// The device runs out of memory.
    pub fn channels(&self, [weight, bias, mean, variance]: [&Tensor; 4]) -> candle_core::Result<(Tensor, Tensor)> {
        let scale = (weight / (variance + self.epsilon)?.sqrt()?)?;
        let shift = (bias - (mean * &scale)?)?;
        Ok((scale, shift))
    }
}

impl BatchNorm {
    /// Mean and (biased) variance of each channel.
    ///
    /// # Errors
    /// The device runs out of memory.
    pub fn moments(x: &Tensor) -> candle_core::Result<(Tensor, Tensor)> {
        let by_channel = x.transpose(0, 1)?.flatten_from(1)?;
        let mean = by_channel.mean_keepdim(1)?;
        let variance = by_channel.broadcast_sub(&mean)?.sqr()?.mean(1)?;
        Ok((mean.squeeze(1)?, variance))
    }
}

impl OpSpec for BatchNorm {
    fn arity(&self) -> Range<usize> {
        5..6
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        require_arity(self, inputs)?;
        require(inputs[0], Element::Float, "the input")?;
        let channels = inputs[0].shape.get(1).ok_or("needs an axis of channels")?;
        for (ty, what) in inputs[1..].iter().zip(["the weight", "the bias", "the mean", "the variance"]) {
            require_vector(ty, channels, what)?;
        }
        Ok(inputs[0].clone())
    }

    fn axes(&self, _inputs: usize) -> String {
        if self.batch { "b! c _ _, c, c, c, c -> b! c _ _" } else { "b c _ _, c, c, c, c -> b c _ _" }.into()
    }

    fn eval(&self, inputs: &[Tensor], _mode: Mode) -> candle_core::Result<Tensor> {
        let [x, weight, bias, mean, variance] = inputs else { candle_core::bail!("BatchNorm takes five inputs") };
        let (scale, shift) = if self.batch {
            let (mean, variance) = Self::moments(x)?;
            self.channels([weight, bias, &mean, &variance])?
        } else {
            self.channels([weight, bias, mean, variance])?
        };
        let mut shape = vec![1; x.rank()];
        shape[1] = scale.dim(D::Minus1)?;
        x.broadcast_mul(&scale.reshape(shape.as_slice())?)?.broadcast_add(&shift.reshape(shape.as_slice())?)
    }
}
