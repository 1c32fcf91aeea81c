//! Quantized weights that stay integers in memory.

use crate::error::Result;
use crate::kernel::coded::CodedMatrix;
use crate::store::{Codes, Encoding, FloatFormat, Granularity, QuantizationSpec, Weight};

/// The factor with which all values of a format are 8-bit integers. `None` if there is none.
fn factor(codes: Codes, is_symmetric: bool) -> Option<f32> {
    match codes {
        // Differences of codes and zero points have one more bit.
        Codes::Integer(bits) => (bits < 8 || is_symmetric).then_some(1.0),
        Codes::Float(format) => integer_factor(format),
        Codes::Palette(_) => None,
    }
}

fn integer_factor(format: FloatFormat) -> Option<f32> {
    let codes: Vec<u8> = (0..=u8::MAX >> (8 - format.bits())).collect();
    let mut values = vec![0f32; codes.len()];
    let is_integer = |value: &f32| value.fract() == 0.0 && value.abs() <= 127.0;
    [1.0, 2.0, 4.0, 8.0].into_iter().find(|factor| {
        format.dequantize(&codes, &mut values, *factor);
        values.iter().all(is_integer)
    })
}

/// The quantization of a matrix of 8-bit integers, the number of elements that share a scale, and the factor
/// with which the values of its codes are integers. `None` for other weights.
pub(super) fn layout(weight: &Weight) -> Option<(&QuantizationSpec, usize, f32)> {
    let (Encoding::Quantized(spec), [_, row]) = (&weight.encoding, &weight.shape[..]) else { return None };
    let group = match spec.granularity {
        Granularity::Tensor | Granularity::Channel => *row,
        Granularity::Group(size) => size,
        Granularity::Block(_) => return None,
    };
    let factor = factor(spec.codes, spec.symmetric)?;
    (group > 0 && row.is_multiple_of(group)).then_some((spec, group, factor))
}

/// The integers and scales of a weight. `None` if it has none, or if the values would not be exactly equal.
pub(super) fn from_weight(weight: &Weight) -> Result<Option<CodedMatrix>> {
    let Some((spec, group, factor)) = layout(weight) else { return Ok(None) };
    let (mut codes, mut scales) = (Vec::with_capacity(weight.elements()), Vec::with_capacity(weight.elements() / group));
    let (mut values, mut exact) = (vec![0f32; group], true);
    weight.visit(weight.row(), &mut |block| {
        let view = block.now;
        let Some((spec, _)) = view.affine.filter(|(affine, _)| affine.codes == spec.codes && affine.granularity == spec.granularity) else {
            exact = false;
            return Ok(());
        };
        for (index, coded) in view.values.chunks_exact(group).enumerate() {
            let (scale, zero) = view.parameters(spec, if spec.granularity == Granularity::Tensor { 0 } else { index });
            match spec.codes {
                Codes::Integer(_) => values.iter_mut().zip(coded).for_each(|(value, code)| *value = f32::from(*code as i8) - zero),
                Codes::Float(format) => format.dequantize(coded, &mut values, factor),
                Codes::Palette(_) => exact = false,
            }
            exact &= scale / factor * factor == scale && values.iter().all(|value| (-128.0..=127.0).contains(value));
            scales.push(scale / factor);
            codes.extend(values.iter().map(|value| *value as i8 as u8));
        }
        Ok(())
    })?;
    Ok(CodedMatrix::new(weight.row(), group, codes, scales).filter(|_| exact))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_with_few_values_are_integers() {
        let found: Vec<_> = FloatFormat::ALL.iter().map(|format| (format.row().name, integer_factor(*format))).collect();
        assert_eq!(found, [("fp8", None), ("fp6", Some(8.0)), ("fp4", Some(2.0))]);
    }
}
