//! Decay of gated linear attention.

use std::ops::Range;

use candle_core::{Result as Computed, Tensor};
use serde::{Deserialize, Serialize};

use super::activation::{between, softplus};
use super::constants::ScalarOps;
use super::gradient::wide;
use super::{Backward, OpSpec, Saved, require_floats};
use crate::ir::TensorType;

/// Logarithmic decay of each head at each token, `-exp(l) · step` (Gu and Dao, *Mamba*, 2023; Yang et al.,
/// *Gated Delta Networks*, 2025). The step size is `ln(1 + exp(x + b))`, limited to the range from `min` to
/// `max`. Inputs: values `x` `[batch, sequence, heads]`, biases `b` and logarithmic rates `l`, both
/// `[heads]`.
///
/// The result has at least 32 bits, whatever the precision of the inputs, because its errors accumulate over
/// the tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Decay {
    /// Smallest step size.
    pub min: f64,
    /// Largest step size. `None` if it is not limited.
    pub max: Option<f64>,
}

impl Decay {
    /// The step sizes for the sum of values and biases.
    fn steps(&self, shifted: &Tensor) -> Computed<Tensor> {
        let steps = softplus(shifted)?;
        if self.has_limits() { steps.clamp_scalar(self.min, self.upper()) } else { Ok(steps) }
    }

    /// The gradient of sums of values and biases, from that of step sizes: zero beyond the limits.
    fn gradient_of_shifted(&self, gradient: &Tensor, shifted: &Tensor) -> Computed<Tensor> {
        let gradient = (gradient * candle_nn::ops::sigmoid(shifted)?)?;
        if !self.has_limits() {
            return Ok(gradient);
        }
        let steps = softplus(shifted)?;
        between(steps.gt_scalar(self.min)?, steps.lt_scalar(self.upper())?, &gradient)? * gradient
    }

    fn upper(&self) -> f64 {
        self.max.unwrap_or(f64::INFINITY)
    }

    /// Whether a step size, which is positive, can be beyond a limit.
    pub fn has_limits(&self) -> bool {
        self.min > 0.0 || self.max.is_some()
    }
}

/// `x + b` and `-exp(l)`, in at least 32 bits.
fn parts(inputs: &[&Tensor]) -> Computed<(Tensor, Tensor)> {
    Ok((wide(inputs[0])?.broadcast_add(&wide(inputs[1])?)?, wide(inputs[2])?.exp()?.neg()?))
}

impl OpSpec for Decay {
    fn arity(&self) -> Range<usize> {
        3..4
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        require_floats(inputs[0], 3, "the values")?;
        let heads = TensorType::float([inputs[0].shape[2].clone()]);
        match inputs[1..].iter().find(|ty| ***ty != heads) {
            Some(other) => Err(format!("biases and rates must be {heads}, not {other}")),
            None => Ok(inputs[0].clone()),
        }
    }

    fn axes(&self, _inputs: &[&TensorType]) -> String {
        "* h, h, h -> * h".into()
    }

    fn eval(&self, inputs: &[Tensor]) -> Computed<Tensor> {
        let (shifted, speed) = parts(&inputs.iter().collect::<Vec<_>>())?;
        self.steps(&shifted)?.broadcast_mul(&speed)
    }

    fn is_wide(&self) -> bool {
        true
    }

    fn backward(&self, backward: &Backward) -> Computed<Vec<Option<Tensor>>> {
        let inputs = backward.inputs.iter().map(Saved::tensor).collect::<Computed<Vec<_>>>()?;
        let ((shifted, speed), gradient, dtype) = (parts(&inputs)?, wide(backward.gradient)?, backward.gradient.dtype());
        let of_shifted = || self.gradient_of_shifted(&gradient.broadcast_mul(&speed)?, &shifted);
        Ok(vec![
            backward.gradient_of(0, || of_shifted()?.to_dtype(dtype))?,
            backward.gradient_of(1, || of_shifted()?.sum((0, 1))?.to_dtype(dtype))?,
            backward.gradient_of(2, || (&gradient * self.steps(&shifted)?.broadcast_mul(&speed)?)?.sum((0, 1))?.to_dtype(dtype))?,
        ])
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;

    /// Decays of weights in 16 bits are those of transformers, which computes them in 32 bits.
    #[test]
    fn decays_of_16_bit_values_are_not_rounded() {
        let values = [-15.0f32, -9.0, -3.25, 0.5];
        let narrow = |values: &[f32]| Tensor::new(values, &Device::Cpu).unwrap().to_dtype(DType::BF16).unwrap();
        let inputs = [narrow(&values).reshape((1, 4, 1)).unwrap(), narrow(&[0.0625]), narrow(&[1.5])];
        let found = Decay::default().eval(&inputs).unwrap();
        assert_eq!(found.dtype(), DType::F32);
        let found = found.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        for (x, found) in values.iter().zip(found) {
            let expected = -1.5f64.exp() * (f64::from(*x) + 0.0625).exp().ln_1p();
            assert!((f64::from(found) / expected - 1.0).abs() < 1e-5, "{x}: {found} instead of {expected}");
        }
        let limited = Decay { min: 0.001, max: Some(0.5) }.eval(&inputs).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let speed = -1.5f64.exp();
        let expected = [0.001, 0.001, (-3.1875f64).exp().ln_1p(), 0.5].map(|step| speed * step);
        for (found, expected) in limited.into_iter().zip(expected) {
            assert!((f64::from(found) / expected - 1.0).abs() < 1e-5, "{found} instead of {expected}");
        }
    }
}
