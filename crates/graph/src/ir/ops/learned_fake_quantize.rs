//! Fake quantization with a learned scale.

use std::ops::Range;

use candle_core::Tensor;
use serde::{Deserialize, Serialize};

use super::activation::FakeQuantize;
use super::constants::ScalarOps;
use super::gradient::wide;
use super::rounding::round_half_even;
use super::{Backward, OpSpec, require, require_vector};
use crate::ir::{Dim, Element, TensorType};

/// [`FakeQuantize`] with the scale `scale · exp(logarithm)`; the logarithm is an input `[1]`. The
/// gradient is that of Esser et al., *Learned Step Size Quantization*, 2020. The logarithm keeps the
/// scale positive and makes updates relative to its size (Jain et al., *Trained Quantization Thresholds*,
/// 2020).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LearnedFakeQuantize {
    /// Quantization step where the logarithm is zero.
    pub scale: f32,
    /// The integer that represents zero, in -128..=127.
    pub zero_point: i32,
}

impl Default for LearnedFakeQuantize {
    fn default() -> Self {
        FakeQuantize::default().into()
    }
}

impl From<FakeQuantize> for LearnedFakeQuantize {
    fn from(fixed: FakeQuantize) -> Self {
        Self { scale: fixed.scale, zero_point: fixed.zero_point }
    }
}

impl LearnedFakeQuantize {
    /// The fixed quantizer for this logarithm.
    pub fn at(&self, logarithm: f32) -> FakeQuantize {
        FakeQuantize { scale: self.scale * logarithm.exp(), zero_point: self.zero_point }
    }

    /// The value in units of the scale, in at least 32 bits.
    fn steps(&self, x: &Tensor, logarithm: &Tensor) -> candle_core::Result<Tensor> {
        wide(x)?.broadcast_div(&self.scale(logarithm)?)
    }

    /// The gradient times the derivative of each output with respect to the logarithm.
    fn derivative_of_logarithm(&self, x: &Tensor, logarithm: &Tensor, gradient: &Tensor) -> candle_core::Result<Tensor> {
        let (low, high) = self.at(0.0).integer_range();
        let steps = self.steps(x, logarithm)?;
        let moved = (round_half_even(&steps.clamp_scalar(low, high)?)? - (&steps * self.at(0.0).gradient_mask(&steps)?)?)?;
        wide(gradient)? * moved.broadcast_mul(&self.scale(logarithm)?)?
    }

    fn scale(&self, logarithm: &Tensor) -> candle_core::Result<Tensor> {
        wide(logarithm)?.exp()?.affine(self.scale.into(), 0.0)
    }
}

impl OpSpec for LearnedFakeQuantize {
    fn arity(&self) -> Range<usize> {
        2..3
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        require(inputs[0], Element::Float, "the input")?;
        require(inputs[1], Element::Float, "the logarithm")?;
        require_vector(inputs[1], &Dim::Fixed(1), "the logarithm")?;
        Ok(inputs[0].clone())
    }

    fn axes(&self, _inputs: &[&TensorType]) -> String {
        "* c, 1 -> * c".into()
    }

    fn eval(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
        let [x, logarithm] = inputs else { candle_core::bail!("LearnedFakeQuantize takes a value and a logarithm") };
        let (low, high) = self.at(0.0).integer_range();
        let integers = round_half_even(&self.steps(x, logarithm)?.clamp_scalar(low, high)?)?;
        integers.broadcast_mul(&self.scale(logarithm)?)?.to_dtype(x.dtype())
    }

    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        let (x, logarithm) = (backward.inputs[0].tensor()?, backward.inputs[1].tensor()?);
        let summed = |part: Tensor| part.sum_all()?.reshape(1)?.to_dtype(backward.gradient.dtype());
        let of_value =
            backward.gradient_of(0, || backward.gradient * self.at(0.0).gradient_mask(&self.steps(x, logarithm)?)?.to_dtype(backward.gradient.dtype())?)?;
        let of_logarithm = backward.gradient_of(1, || summed(self.derivative_of_logarithm(x, logarithm, backward.gradient)?))?;
        Ok(vec![of_value, of_logarithm])
    }
}
