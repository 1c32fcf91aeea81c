//! Rounding to the nearest integer, ties to even, as ONNX and IEEE 754 define it.

use candle_core::{Result, Tensor};

/// Rounds to the nearest integers, ties to even; exact up to 2²² in 32 bits. The native rounding
/// operations of devices treat ties differently.
pub fn round_half_even(x: &Tensor) -> Result<Tensor> {
    let above = (x + 0.5)?.floor()?;
    // 1 for a number halfway between two integers, else 0.
    let tie = ((&above - x)? + 0.5)?.floor()?;
    let odd = (&above - ((&above * 0.5)?.floor()? * 2.0)?)?;
    above - (tie * odd)?
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn ties_round_to_even() {
        let mut values: Vec<f32> = (-600..=600).map(|i| i as f32 / 4.0).collect();
        for x in values.clone() {
            values.extend([x.next_up(), x.next_down()]);
        }
        let expected: Vec<f32> = values.iter().map(|x| x.round_ties_even()).collect();
        let rounded = round_half_even(&Tensor::from_slice(&values, values.len(), &Device::Cpu).unwrap()).unwrap();
        assert_eq!(rounded.to_vec1::<f32>().unwrap(), expected);
    }
}
