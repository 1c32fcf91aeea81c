//! The one rule for rounding: to the nearest whole number, halves to the even one, as ONNX and IEEE 754 have it.

use candle_core::{Result, Tensor};

/// The nearest whole numbers, halves to even; exact up to 2²² in 32 bits. Devices have operations of their own for this, which do
/// different things with halves.
///
/// # Errors
/// The device runs out of memory.
pub fn round_half_even(x: &Tensor) -> Result<Tensor> {
    let above = (x + 0.5)?.floor()?;
    // One where a number lies between two, else zero.
    let tie = ((&above - x)? + 0.5)?.floor()?;
    let odd = (&above - ((&above * 0.5)?.floor()? * 2.0)?)?;
    above - (tie * odd)?
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn halves_go_to_even_numbers() {
        let mut values: Vec<f32> = (-600..=600).map(|i| i as f32 / 4.0).collect();
        for x in values.clone() {
            values.extend([x.next_up(), x.next_down()]);
        }
        let expected: Vec<f32> = values.iter().map(|x| x.round_ties_even()).collect();
        let rounded = round_half_even(&Tensor::from_slice(&values, values.len(), &Device::Cpu).unwrap()).unwrap();
        assert_eq!(rounded.to_vec1::<f32>().unwrap(), expected);
    }
}
