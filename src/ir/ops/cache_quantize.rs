//! Keys and values as a cache of eight bits keeps them.

use std::ops::Range;

use candle_core::{DType, Tensor};
use serde::{Deserialize, Serialize};

use super::gradient::wide;
use super::rounding::round_half_even;
use super::{Backward, OpSpec, require, require_vector};
use crate::ir::{Dim, Element, TensorType};
use crate::kernel::cache::CacheFormat;

/// Values in steps of a scale `[1]`, rounded to what the format can say and cut off at its ends, as compressed-tensors and vLLM do to the
/// keys (behind the rotary embedding) and values of attention. The gradient of what is not cut off goes straight through; the scale has none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CacheQuantize {
    /// What values are rounded to.
    pub format: CacheFormat,
}

impl CacheQuantize {
    /// The smallest and the largest number of steps.
    fn ends(self) -> (f64, f64) {
        match self.format {
            CacheFormat::Fp8 => (-448.0, 448.0),
            CacheFormat::Int8 => (-128.0, 127.0),
        }
    }

    /// Distance of neighbouring numbers of steps: one, or what the power of two below a magnitude has in E4M3.
    fn distance(self, steps: &Tensor) -> candle_core::Result<Tensor> {
        if self.format == CacheFormat::Int8 {
            return steps.ones_like();
        }
        let magnitude = steps.abs()?;
        let least = Tensor::full(2f32.powi(-9), steps.dims(), steps.device())?.to_dtype(steps.dtype())?;
        // From 2⁻⁵ on, each power of two doubles the distance.
        (-5..9).try_fold(least, |distance, power: i32| {
            let more = magnitude.ge(2f64.powi(power))?.to_dtype(steps.dtype())?;
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
        require_vector(inputs[1], &Dim::Fixed(1), "the scale")?;
        Ok(inputs[0].clone())
    }

    fn axes(&self, _inputs: &[&TensorType]) -> String {
        "* c, 1 -> * c".into()
    }

    fn eval(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
        let [x, scale] = inputs else { candle_core::bail!("takes a value and a scale") };
        let (low, high) = self.ends();
        let steps = Self::steps(x, scale)?.clamp(low, high)?;
        let distance = self.distance(&steps)?;
        let rounded = (round_half_even(&(steps / &distance)?)? * distance)?;
        rounded.broadcast_mul(&scale.to_dtype(rounded.dtype())?)?.to_dtype(x.dtype())
    }

    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        let of_value = backward.of(0, || {
            let (low, high) = self.ends();
            let steps = Self::steps(backward.inputs[0].tensor()?, backward.inputs[1].tensor()?)?;
            let passes = (steps.ge(low)? * steps.le(high)?)?;
            backward.gradient * passes.to_dtype(backward.gradient.dtype())?
        })?;
        let of_scale = backward.of(1, || Tensor::zeros(1, DType::F32, backward.gradient.device())?.to_dtype(backward.gradient.dtype()))?;
        Ok(vec![of_value, of_scale])
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::kernel::narrow;

    #[test]
    fn values_are_those_of_e4m3() {
        let mut values: Vec<f32> = (0..=u16::MAX).map(|bits| f32::from_bits(u32::from(bits) << 16)).filter(|x| x.is_finite() && x.abs() < 1e6).collect();
        for x in values.clone() {
            values.extend([x.next_up(), x.next_down()]);
        }
        let x = Tensor::from_slice(&values, values.len(), &Device::Cpu).unwrap();
        for scale in [1f32, 0.037] {
            let found = CacheQuantize::default().eval(&[x.clone(), Tensor::new(&[scale], &Device::Cpu).unwrap()]).unwrap().to_vec1::<f32>().unwrap();
            for (x, found) in values.iter().zip(found) {
                let wanted = narrow::from_e4m3(narrow::to_e4m3(x / scale)) * scale;
                assert!(found == wanted, "{x} in steps of {scale} is {found}, not {wanted}");
            }
        }
    }

    #[test]
    fn what_is_cut_off_has_no_gradient() {
        let x = Tensor::new(&[[-5f32, -1.28, 0.3, 1.27, 2.0]], &Device::Cpu).unwrap();
        let scale = Tensor::new(&[0.01f32], &Device::Cpu).unwrap();
        let op = CacheQuantize { format: CacheFormat::Int8 };
        let found = op.eval(&[x.clone(), scale.clone()]).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert!(found.iter().zip([-1.28, -1.28, 0.3, 1.27, 1.27]).all(|(a, b): (&f32, f32)| (a - b).abs() < 1e-6), "{found:?}");
        let inputs = [super::super::Saved::whole(x.clone()), super::super::Saved::whole(scale)];
        let output = super::super::Saved::shape(x.dims());
        let gradient = x.ones_like().unwrap();
        let found = op.backward(&Backward { inputs: &inputs, output: &output, gradient: &gradient, wanted: &[true, false] }).unwrap();
        assert_eq!(found[0].as_ref().unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap(), [0.0, 1.0, 1.0, 1.0, 0.0]);
        assert!(found[1].is_none());
    }
}
