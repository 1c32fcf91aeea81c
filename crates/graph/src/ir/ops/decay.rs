//! Decay of gated linear attention.

use std::ops::Range;

use candle_core::{Result as Computed, Tensor};
use serde::{Deserialize, Serialize};

use super::activation::softplus;
use super::gradient::wide;
use super::{Backward, OpSpec, Saved, require_floats};
use crate::ir::TensorType;

/// Logarithmic decay of each head at each token, `-exp(l) · ln(1 + exp(x + b))` (Gu and Dao, *Mamba*, 2023;
/// Yang et al., *Gated Delta Networks*, 2025). Inputs: values `x` `[batch, sequence, heads]`, biases `b` and
/// logarithmic rates `l`, both `[heads]`.
///
/// The result has at least 32 bits, whatever the precision of the inputs, because its errors accumulate over
/// the tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Decay {}

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
        softplus(&shifted)?.broadcast_mul(&speed)
    }

    fn is_wide(&self) -> bool {
        true
    }

    fn backward(&self, backward: &Backward) -> Computed<Vec<Option<Tensor>>> {
        let inputs = backward.inputs.iter().map(Saved::tensor).collect::<Computed<Vec<_>>>()?;
        let ((shifted, speed), gradient, dtype) = (parts(&inputs)?, wide(backward.gradient)?, backward.gradient.dtype());
        let of_shifted = || gradient.broadcast_mul(&speed)? * candle_nn::ops::sigmoid(&shifted)?;
        Ok(vec![
            backward.gradient_of(0, || of_shifted()?.to_dtype(dtype))?,
            backward.gradient_of(1, || of_shifted()?.sum((0, 1))?.to_dtype(dtype))?,
            backward.gradient_of(2, || (&gradient * softplus(&shifted)?.broadcast_mul(&speed)?)?.sum((0, 1))?.to_dtype(dtype))?,
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
        let found = Decay {}.eval(&inputs).unwrap();
        assert_eq!(found.dtype(), DType::F32);
        let found = found.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        for (x, found) in values.iter().zip(found) {
            let expected = -1.5f64.exp() * (f64::from(*x) + 0.0625).exp().ln_1p();
            assert!((f64::from(found) / expected - 1.0).abs() < 1e-5, "{x}: {found} instead of {expected}");
        }
    }
}
