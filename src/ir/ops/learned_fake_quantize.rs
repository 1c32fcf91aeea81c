//! Rounding to eight bits with a scale that trains.

use std::ops::Range;

use candle_core::Tensor;
use serde::{Deserialize, Serialize};

use super::activation::FakeQuantize;
use super::gradient::wide;
use super::host::{combined, laid_like, readable};
use super::{Backward, Mode, OpSpec, require, require_vector};
use crate::ir::{Dim, Element, TensorType};
use crate::kernel::activation_gradient::scale_derivative;

/// [`FakeQuantize`] in steps of `scale · exp(logarithm)`, the logarithm being an input `[1]`. Its gradient is that of Esser et
/// al., *Learned Step Size Quantization*, 2020; the logarithm keeps scales positive and steps as large as they are themselves
/// (Jain et al., *Trained Quantization Thresholds*, 2020).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LearnedFakeQuantize {
    /// Distance of neighbouring values where the logarithm is zero.
    pub scale: f32,
    /// The integer that stands for zero, of -128 to 127.
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
    /// The quantizer that it is with this logarithm.
    pub fn at(&self, logarithm: f32) -> FakeQuantize {
        FakeQuantize { scale: self.scale * logarithm.exp(), zero_point: self.zero_point }
    }

    /// The smallest and the largest number of steps.
    /// The value in steps.
    fn steps(&self, x: &Tensor, logarithm: &Tensor) -> candle_core::Result<Tensor> {
        wide(x)?.broadcast_div(&wide(logarithm)?.exp()?.affine(self.scale.into(), 0.0)?)
    }

    /// The gradient times what each value moves when the logarithm grows.
    fn derivative_of_logarithm(&self, x: &Tensor, logarithm: &Tensor, gradient: &Tensor) -> candle_core::Result<Tensor> {
        let (low, high) = self.at(0.0).steps();
        let steps = self.steps(x, logarithm)?;
        let moved = (steps.clamp(low, high)?.round()? - (&steps * self.at(0.0).passes(&steps)?)?)?;
        let scale = wide(logarithm)?.exp()?.affine(self.scale.into(), 0.0)?;
        wide(gradient)? * moved.broadcast_mul(&scale)?
    }

    fn fixed(&self, logarithm: &Tensor) -> candle_core::Result<FakeQuantize> {
        Ok(self.at(logarithm.flatten_all()?.get(0)?.to_scalar()?))
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

    fn axes(&self, _inputs: usize) -> String {
        "* c, 1 -> * c".into()
    }

    fn eval(&self, inputs: &[Tensor], mode: Mode) -> candle_core::Result<Tensor> {
        let [x, logarithm] = inputs else { candle_core::bail!("takes a value and a logarithm") };
        if mode == Mode::Infer && readable([x, logarithm]) {
            return self.fixed(logarithm)?.eval(&inputs[..1], mode);
        }
        let (low, high) = self.at(0.0).steps();
        let scale = logarithm.exp()?.affine(self.scale.into(), 0.0)?;
        let steps = x.broadcast_div(&scale)?;
        let passed = (&steps * self.at(0.0).passes(&steps)?)?;
        let integers = (&passed + (steps.clamp(low, high)?.round()? - &passed)?.detach())?;
        integers.broadcast_mul(&scale)
    }

    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        let (x, logarithm) = (backward.inputs[0].tensor()?, backward.inputs[1].tensor()?);
        let summed = |part: Tensor| part.sum_all()?.reshape(1)?.to_dtype(backward.gradient.dtype());
        if readable([x, backward.gradient, logarithm]) {
            let fixed = self.fixed(logarithm)?;
            let alone = Backward { inputs: &backward.inputs[..1], wanted: &backward.wanted[..1], ..*backward };
            let mut found = fixed.backward(&alone)?;
            let of_logarithm = backward.of(1, || {
                let (scale, zero_point) = (fixed.scale, fixed.zero_point as f32);
                let gradient = laid_like(backward.gradient, x)?;
                match combined(x, &gradient, |x, g, out| scale_derivative(scale, zero_point, x, g, out)) {
                    Some(parts) => summed(parts?),
                    None => summed(self.derivative_of_logarithm(x, logarithm, &gradient)?),
                }
            })?;
            found.push(of_logarithm);
            return Ok(found);
        }
        let of_value = backward.of(0, || backward.gradient * self.at(0.0).passes(&self.steps(x, logarithm)?)?.to_dtype(backward.gradient.dtype())?)?;
        let of_logarithm = backward.of(1, || summed(self.derivative_of_logarithm(x, logarithm, backward.gradient)?))?;
        Ok(vec![of_value, of_logarithm])
    }
}
