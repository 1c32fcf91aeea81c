//! Batch normalization, with running statistics or those of the batch.

use std::ops::Range;

use candle_core::Tensor;
use serde::{Deserialize, Serialize};

use super::gradient::wide;
use super::{Backward, OpSpec, require, require_vector};
use crate::ir::{Element, TensorType};

/// `(x - mean) / sqrt(variance + epsilon) * weight + bias` over axis 1 (Ioffe and Szegedy, 2015). Inputs:
/// x, weight, bias, mean, variance.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct BatchNorm {
    /// Added to the variance.
    pub epsilon: f64,
    /// Whether mean and variance are those of the batch, as in training; the inputs with the running
    /// statistics are not read then.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub batch: bool,
}

impl Default for BatchNorm {
    fn default() -> Self {
        Self { epsilon: 1e-5, batch: false }
    }
}

impl BatchNorm {
    /// Scale and shift of each channel, from weight, bias, mean and variance.
    pub fn scale_and_shift(&self, [weight, bias, mean, variance]: [&Tensor; 4]) -> candle_core::Result<(Tensor, Tensor)> {
        let scale = (weight / (variance + self.epsilon)?.sqrt()?)?;
        let shift = (bias - (mean * &scale)?)?;
        Ok((scale, shift))
    }

    /// Mean and (biased) variance of each channel.
    pub fn moments(x: &Tensor) -> candle_core::Result<(Tensor, Tensor)> {
        let by_channel = wide(x)?.transpose(0, 1)?.flatten_from(1)?;
        let mean = by_channel.mean_keepdim(1)?;
        let variance = by_channel.broadcast_sub(&mean)?.sqr()?.mean(1)?;
        Ok((mean.squeeze(1)?, variance))
    }

    /// [`backward`](OpSpec::backward) with the given implementation of channel operations.
    pub(super) fn backward_with(&self, backward: &Backward, ops: &dyn ChannelOps) -> candle_core::Result<Vec<Option<Tensor>>> {
        let (x, gradient) = (backward.inputs[0].tensor()?, backward.gradient);
        let weight = wide(backward.inputs[1].tensor()?)?;
        let (mean, variance) = if self.batch { ops.moments(x)? } else { (wide(backward.inputs[3].tensor()?)?, wide(backward.inputs[4].tensor()?)?) };
        let inverse = (variance + self.epsilon)?.sqrt()?.recip()?;
        let scale = (&weight * &inverse)?;
        let none = scale.zeros_like()?;
        let summed = if self.batch { 0..3 } else { 1..5 };
        let [plain, products] =
            if summed.into_iter().any(|input| backward.needs_gradient(input)) { ops.sums(x, gradient, &mean)? } else { [none.clone(), none.clone()] };
        let of_input = backward.gradient_of(0, || {
            if !self.batch {
                return ops.scaled(gradient, &scale, &none);
            }
            // The gradient through the mean and the variance of the batch.
            let count = (x.elem_count() / mean.elem_count().max(1)) as f64;
            let along = (((&products * &inverse)? * (&inverse * &scale)?)? / -count)?;
            let constant = (((&plain * &scale)? / -count)? - (&along * &mean)?)?;
            ops.mixed(x, gradient, [&scale, &along, &constant])
        })?;
        let like = |t: Tensor| t.to_dtype(x.dtype());
        let of_weight = backward.gradient_of(1, || like((&products * &inverse)?))?;
        let of_bias = backward.gradient_of(2, || like(plain.clone()))?;
        if self.batch {
            return Ok(vec![of_input, of_weight, of_bias, None, None]);
        }
        let of_mean = backward.gradient_of(3, || like((&plain * &scale)?.neg()?))?;
        let of_variance = backward.gradient_of(4, || like(((&products * &scale)? * (inverse.sqr()? * -0.5)?)?))?;
        Ok(vec![of_input, of_weight, of_bias, of_mean, of_variance])
    }

    /// [`eval`](OpSpec::eval) with the given implementation of channel operations.
    pub(super) fn eval_with(&self, inputs: &[Tensor], ops: &dyn ChannelOps) -> candle_core::Result<Tensor> {
        let [x, weight, bias, mean, variance] = inputs else { candle_core::bail!("BatchNorm takes five inputs") };
        let (mean, variance) = if self.batch { ops.moments(x)? } else { (wide(mean)?, wide(variance)?) };
        let (scale, shift) = self.scale_and_shift([&wide(weight)?, &wide(bias)?, &mean, &variance])?;
        ops.scaled(x, &scale, &shift)
    }
}

/// Channel operations of images, by default in tensor operations; kernels override them.
pub(super) trait ChannelOps {
    /// As [`BatchNorm::moments`].
    fn moments(&self, x: &Tensor) -> candle_core::Result<(Tensor, Tensor)> {
        BatchNorm::moments(x)
    }

    /// Multiplies each channel by a factor and adds a shift.
    fn scaled(&self, x: &Tensor, scale: &Tensor, shift: &Tensor) -> candle_core::Result<Tensor> {
        wide(x)?.broadcast_mul(&spread(x, scale)?)?.broadcast_add(&spread(x, shift)?)?.to_dtype(x.dtype())
    }

    /// Sums over each channel of the gradient, and of the gradient times the distance from the mean.
    fn sums(&self, x: &Tensor, gradient: &Tensor, mean: &Tensor) -> candle_core::Result<[Tensor; 2]> {
        let summed = |t: Tensor| t.transpose(0, 1)?.flatten_from(1)?.sum(1);
        let (x, gradient) = (wide(x)?, wide(gradient)?);
        Ok([summed(gradient.clone())?, summed((x.broadcast_sub(&spread(&x, mean)?)? * gradient)?)?])
    }

    /// `g * a + x * b + c` with three numbers for each channel.
    fn mixed(&self, x: &Tensor, gradient: &Tensor, factors: [&Tensor; 3]) -> candle_core::Result<Tensor> {
        let [a, b, c] = factors.map(|t| spread(x, t));
        (wide(gradient)?.broadcast_mul(&a?)? + wide(x)?.broadcast_mul(&b?)?)?.broadcast_add(&c?)?.to_dtype(x.dtype())
    }
}

/// The default implementation.
struct TensorOps;

impl ChannelOps for TensorOps {}

/// Reshapes a vector of channels for broadcasting over `x`.
fn spread(x: &Tensor, numbers: &Tensor) -> candle_core::Result<Tensor> {
    let mut shape = vec![1; x.rank()];
    shape[1] = numbers.elem_count();
    numbers.reshape(shape)
}

impl OpSpec for BatchNorm {
    fn arity(&self) -> Range<usize> {
        5..6
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        require(inputs[0], Element::Float, "the input")?;
        let channels = inputs[0].shape.get(1).ok_or("the input needs a channel axis")?;
        for (ty, what) in inputs[1..].iter().zip(["the weight", "the bias", "the mean", "the variance"]) {
            require_vector(ty, channels, what)?;
        }
        Ok(inputs[0].clone())
    }

    fn axes(&self, _inputs: &[&TensorType]) -> String {
        if self.batch { "b! c _ _, c, c, c, c -> b! c _ _" } else { "b c _ _, c, c, c, c -> b c _ _" }.into()
    }

    fn eval(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
        self.eval_with(inputs, &TensorOps)
    }

    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        self.backward_with(backward, &TensorOps)
    }

    fn reads_input(&self, input: usize) -> bool {
        input < 2 || (!self.batch && input > 2)
    }
}
