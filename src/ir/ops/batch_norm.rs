//! Batch normalisation, with fixed statistics or those of the batch.

use std::ops::Range;

use candle_core::Tensor;
use serde::{Deserialize, Serialize};

use super::gradient::wide;
use super::host::{Host, by_channel, channels, channels_first, readable};
use super::{Backward, Mode, OpSpec, require, require_vector};
use crate::ir::{Element, TensorType};
use crate::kernel::channels as kernel;

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
        if x.rank() == 4 && readable([x]) {
            let x = by_channel(x)?;
            let host = Host::of(&x);
            if let Some(channels) = host.as_ref().and_then(|host| channels(&x, host)) {
                let (means, variances) = kernel::moments(&channels);
                return Ok((of_channels(means, &x)?, of_channels(variances, &x)?));
            }
        }
        Self::moments_of_primitives(x)
    }

    fn moments_of_primitives(x: &Tensor) -> candle_core::Result<(Tensor, Tensor)> {
        let by_channel = wide(x)?.transpose(0, 1)?.flatten_from(1)?;
        let mean = by_channel.mean_keepdim(1)?;
        let variance = by_channel.broadcast_sub(&mean)?.sqr()?.mean(1)?;
        Ok((mean.squeeze(1)?, variance))
    }

    /// Each channel times a factor, plus a summand.
    fn scaled(x: &Tensor, scale: &Tensor, shift: &Tensor, mode: Mode) -> candle_core::Result<Tensor> {
        if mode == Mode::Infer && x.rank() == 4 && readable([x, scale, shift]) {
            let (images, count, height, width) = x.dims4()?;
            let x = by_channel(x)?;
            let compute = || {
                let [host, scale, shift] = [Host::of(&x)?, Host::of(scale)?, Host::of(shift)?];
                let mut y = vec![0.0; x.elem_count()];
                kernel::scaled(&channels(&x, &host)?, scale.floats()?, shift.floats()?, &mut y);
                Some(y)
            };
            if let Some(y) = compute() {
                return channels_first(y, [images, count, height, width]);
            }
        }
        wide(x)?.broadcast_mul(&spread(x, scale)?)?.broadcast_add(&spread(x, shift)?)?.to_dtype(x.dtype())
    }

    /// Sums of gradients, and of gradients times distances from the mean, by channel.
    fn sums(x: &Tensor, gradient: &Tensor, mean: &Tensor) -> candle_core::Result<[Tensor; 2]> {
        if x.rank() == 4 && readable([x, gradient, mean]) {
            let (x, gradient) = (by_channel(x)?, by_channel(gradient)?);
            let compute = || {
                let hosts = [Host::of(&x)?, Host::of(&gradient)?, Host::of(mean)?];
                let (values, gradients) = (channels(&x, &hosts[0])?, channels(&gradient, &hosts[1])?);
                Some([kernel::sums(&gradients), kernel::products(&values, &gradients, hosts[2].floats()?)])
            };
            if let Some([plain, products]) = compute() {
                return Ok([of_channels(plain, &x)?, of_channels(products, &x)?]);
            }
        }
        let summed = |t: Tensor| t.transpose(0, 1)?.flatten_from(1)?.sum(1);
        let (x, gradient) = (wide(x)?, wide(gradient)?);
        Ok([summed(gradient.clone())?, summed((x.broadcast_sub(&spread(&x, mean)?)? * gradient)?)?])
    }

    /// `g * a + x * b + c` with three numbers for each channel.
    fn mixed(x: &Tensor, gradient: &Tensor, factors: [&Tensor; 3]) -> candle_core::Result<Tensor> {
        if x.rank() == 4 && readable([x, gradient]) && readable(factors) {
            let (images, count, height, width) = x.dims4()?;
            let (x, gradient) = (by_channel(x)?, by_channel(gradient)?);
            let numbers = factors.map(|t| t.to_vec1::<f32>());
            let [Ok(a), Ok(b), Ok(c)] = numbers else { candle_core::bail!("factors of channels are vectors") };
            let factors: Vec<[f32; 3]> = a.into_iter().zip(b).zip(c).map(|((a, b), c)| [a, b, c]).collect();
            let compute = || {
                let hosts = [Host::of(&x)?, Host::of(&gradient)?];
                let mut y = vec![0.0; x.elem_count()];
                kernel::combined(&channels(&x, &hosts[0])?, &channels(&gradient, &hosts[1])?, &factors, &mut y);
                Some(y)
            };
            if let Some(y) = compute() {
                return channels_first(y, [images, count, height, width]);
            }
        }
        let (wide_x, gradient) = (wide(x)?, wide(gradient)?);
        let [a, b, c] = factors.map(|t| spread(x, t));
        (gradient.broadcast_mul(&a?)? + wide_x.broadcast_mul(&b?)?)?.broadcast_add(&c?)?.to_dtype(x.dtype())
    }
}

fn of_channels(values: Vec<f32>, x: &Tensor) -> candle_core::Result<Tensor> {
    let count = values.len();
    Tensor::from_vec(values, count, x.device())
}

/// A number for each channel, to be spread over the other axes of `x`.
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
        let channels = inputs[0].shape.get(1).ok_or("needs an axis of channels")?;
        for (ty, what) in inputs[1..].iter().zip(["the weight", "the bias", "the mean", "the variance"]) {
            require_vector(ty, channels, what)?;
        }
        Ok(inputs[0].clone())
    }

    fn axes(&self, _inputs: usize) -> String {
        if self.batch { "b! c _ _, c, c, c, c -> b! c _ _" } else { "b c _ _, c, c, c, c -> b c _ _" }.into()
    }

    fn eval(&self, inputs: &[Tensor], mode: Mode) -> candle_core::Result<Tensor> {
        let [x, weight, bias, mean, variance] = inputs else { candle_core::bail!("BatchNorm takes five inputs") };
        let (weight, bias) = (&wide(weight)?, &wide(bias)?);
        let (scale, shift) = if self.batch {
            let (mean, variance) = match mode {
                Mode::Infer => Self::moments(x)?,
                Mode::Train => Self::moments_of_primitives(x)?,
            };
            self.channels([weight, bias, &mean, &variance])?
        } else {
            self.channels([weight, bias, &wide(mean)?, &wide(variance)?])?
        };
        Self::scaled(x, &scale, &shift, mode)
    }

    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        let (x, gradient) = (backward.inputs[0].tensor()?, backward.gradient);
        let weight = wide(backward.inputs[1].tensor()?)?;
        let (mean, variance) = if self.batch { Self::moments(x)? } else { (wide(backward.inputs[3].tensor()?)?, wide(backward.inputs[4].tensor()?)?) };
        let derivative = (variance + self.epsilon)?.sqrt()?.recip()?;
        let scale = (&weight * &derivative)?;
        let none = scale.zeros_like()?;
        let fixed = !self.batch;
        let sums = if (fixed && !(1..5).any(|input| backward.wants(input))) || (self.batch && !(0..3).any(|input| backward.wants(input))) {
            [none.clone(), none.clone()]
        } else {
            Self::sums(x, gradient, &mean)?
        };
        let [plain, products] = &sums;
        let of_input = backward.of(0, || {
            if fixed {
                return Self::scaled(gradient, &scale, &none, Mode::Infer);
            }
            // What changes the mean and the variance of the batch changes nothing.
            let count = (x.elem_count() / mean.elem_count().max(1)) as f64;
            let along = (((products * &derivative)? * (&derivative * &scale)?)? / -count)?;
            let constant = (((plain * &scale)? / -count)? - (&along * &mean)?)?;
            Self::mixed(x, gradient, [&scale, &along, &constant])
        })?;
        let like = |t: Tensor| t.to_dtype(x.dtype());
        let of_weight = backward.of(1, || like((products * &derivative)?))?;
        let of_bias = backward.of(2, || like(plain.clone()))?;
        if self.batch {
            return Ok(vec![of_input, of_weight, of_bias, None, None]);
        }
        let of_mean = backward.of(3, || like((plain * &scale)?.neg()?))?;
        let of_variance = backward.of(4, || like(((products * &scale)? * (derivative.sqr()? * -0.5)?)?))?;
        Ok(vec![of_input, of_weight, of_bias, of_mean, of_variance])
    }

    fn reads_input(&self, input: usize) -> bool {
        input < 2 || (!self.batch && input > 2)
    }
}
