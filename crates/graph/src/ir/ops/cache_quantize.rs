//! Fake quantization of a KV cache.

use std::ops::Range;

use candle_core::{DType, Tensor};
use serde::{Deserialize, Serialize};

use super::constants::ScalarOps;
use super::gradient::wide;
use super::rounding::round_half_even;
use super::{Backward, OpSpec, require, require_vector};
use crate::ir::{Dim, Element, TensorType};
use crate::kernel::cache::CacheFormat;

/// Quantizes and dequantizes with a scale `[1]`, or `[heads, 1, 1]` for values `[batch, heads, tokens,
/// size]`, saturating at the limits of the format, as
/// compressed-tensors and vLLM do with the keys (after the rotary embedding) and values of attention.
/// Gradients of values that are not clipped pass straight through; the scale has no gradient.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CacheQuantize {
    /// Format of the cached values.
    pub format: CacheFormat,
}

impl CacheQuantize {
    /// The range of the format, in units of the scale.
    fn range(self) -> (f64, f64) {
        match self.format {
            CacheFormat::Fp8 => (-448.0, 448.0),
            CacheFormat::Int8 => (-128.0, 127.0),
        }
    }

    /// Distance of representable numbers, in units of the scale: 1 for int8, and for E4M3 that of the
    /// binade of each magnitude.
    fn distance(self, steps: &Tensor) -> candle_core::Result<Tensor> {
        if self.format == CacheFormat::Int8 {
            return steps.ones_like();
        }
        let magnitude = steps.abs()?;
        let least = Tensor::full(2f32.powi(-9), steps.dims(), steps.device())?.to_dtype(steps.dtype())?;
        // From 2⁻⁵ on, the distance doubles at each power of two.
        (-5..9).try_fold(least, |distance, power: i32| {
            let more = magnitude.ge_scalar(2f64.powi(power))?.to_dtype(steps.dtype())?;
            distance + (more * 2f64.powi(power - 4))?
        })
    }

    fn steps(x: &Tensor, scale: &Tensor) -> candle_core::Result<Tensor> {
        let x = wide(x)?;
        x.broadcast_div(&scale.to_dtype(x.dtype())?)
    }
}

impl OpSpec for CacheQuantize {
    fn arity(&self) -> Range<usize> {
        2..3
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        require(inputs[0], Element::Float, "the input")?;
        require(inputs[1], Element::Float, "the scale")?;
        let one = Dim::Fixed(1);
        match (inputs[1].shape.as_slice(), inputs[0].shape.as_slice()) {
            ([scales, first, second], [_, heads, _, _]) if scales == heads && *first == one && *second == one => {}
            ([_, _, _], shape) => return Err(format!("the scales must be [heads, 1, 1] for values [batch, heads, tokens, size], not {shape:?}")),
            _ => require_vector(inputs[1], &one, "the scale")?,
        }
        Ok(inputs[0].clone())
    }

    fn axes(&self, inputs: &[&TensorType]) -> String {
        if inputs[1].shape.len() == 1 { "* c, 1 -> * c".into() } else { "* h s c, h 1 1 -> * h s c".into() }
    }

    fn eval(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
        let [x, scale] = inputs else { candle_core::bail!("CacheQuantize takes a value and a scale") };
        let (low, high) = self.range();
        let steps = Self::steps(x, scale)?.clamp_scalar(low, high)?;
        let distance = self.distance(&steps)?;
        let rounded = (round_half_even(&(steps / &distance)?)? * distance)?;
        rounded.broadcast_mul(&scale.to_dtype(rounded.dtype())?)?.to_dtype(x.dtype())
    }

    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        let of_value = backward.gradient_of(0, || {
            let (low, high) = self.range();
            let steps = Self::steps(backward.inputs[0].tensor()?, backward.inputs[1].tensor()?)?;
            let passes = (steps.ge_scalar(low)? * steps.le_scalar(high)?)?;
            backward.gradient * passes.to_dtype(backward.gradient.dtype())?
        })?;
        let of_scale = backward
            .gradient_of(1, || Tensor::zeros(backward.inputs[1].dims(), DType::F32, backward.gradient.device())?.to_dtype(backward.gradient.dtype()))?;
        Ok(vec![of_value, of_scale])
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::kernel::minifloat;

    #[test]
    fn fp8_values_match_e4m3() {
        let mut values: Vec<f32> = (0..=u16::MAX).map(|bits| f32::from_bits(u32::from(bits) << 16)).filter(|x| x.is_finite() && x.abs() < 1e6).collect();
        for x in values.clone() {
            values.extend([x.next_up(), x.next_down()]);
        }
        let x = Tensor::from_slice(&values, values.len(), &Device::Cpu).unwrap();
        for scale in [1f32, 0.037] {
            let found = CacheQuantize::default().eval(&[x.clone(), Tensor::new(&[scale], &Device::Cpu).unwrap()]).unwrap().to_vec1::<f32>().unwrap();
            for (x, found) in values.iter().zip(found) {
                let wanted = minifloat::from_e4m3(minifloat::to_e4m3(x / scale)) * scale;
                assert!(found == wanted, "{x} in steps of {scale} is {found}, not {wanted}");
            }
        }
    }

    #[test]
    fn clipped_values_have_no_gradient() {
        let x = Tensor::new(&[[-5f32, -1.28, 0.3, 1.27, 2.0]], &Device::Cpu).unwrap();
        let scale = Tensor::new(&[0.01f32], &Device::Cpu).unwrap();
        let op = CacheQuantize { format: CacheFormat::Int8 };
        let found = op.eval(&[x.clone(), scale.clone()]).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert!(found.iter().zip([-1.28, -1.28, 0.3, 1.27, 1.27]).all(|(a, b): (&f32, f32)| (a - b).abs() < 1e-6), "{found:?}");
        let inputs = [super::super::Saved::full(x.clone()), super::super::Saved::full(scale)];
        let output = super::super::Saved::shape(x.dims());
        let gradient = x.ones_like().unwrap();
        let found = op.backward(&Backward { inputs: &inputs, output: &output, gradient: &gradient, needs_gradient: &[true, false] }).unwrap();
        assert_eq!(found[0].as_ref().unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap(), [0.0, 1.0, 1.0, 1.0, 0.0]);
        assert!(found[1].is_none());
    }
}
