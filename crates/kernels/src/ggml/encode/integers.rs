//! Blocks of integers with given scales.

use half::f16;

use super::{fifths, halves, put};
use crate::grid::{IntegerGrid, QuantizationParams};

/// Largest change of a scale by its rounding to binary16, relative to the scale, with which the integers of a
/// block remain close to the best ones.
const TOLERANCE: f32 = 1.0 / 256.0;

/// Writes the integers of the values of a block to a type without a minimum (if `integers` are symmetric), or
/// with one. Returns whether binary16 represents the scale.
pub(in super::super) fn on_grid(integers: IntegerGrid, values: &[f32; 32], params: QuantizationParams, block: &mut [u8]) -> bool {
    let QuantizationParams { scale, zero } = params;
    if (f16::from_f32(scale).to_f32() - scale).abs() > TOLERANCE * scale {
        return false;
    }
    let (lowest, _) = integers.bounds();
    let codes = values.map(|value| integers.integer(value, params));
    let above = codes.map(|code| (code - lowest) as u8);
    put(scale, block, 0);
    let (_, mut codes_at) = block.split_at_mut(2);
    if !integers.symmetric {
        put((lowest - zero) * scale, codes_at, 0);
        codes_at = codes_at.split_at_mut(2).1;
    }
    match integers.bits {
        8 => codes.iter().zip(codes_at).for_each(|(code, out)| *out = *code as i8 as u8),
        5 => {
            let (high, low) = codes_at.split_at_mut(4);
            high.copy_from_slice(&fifths(&above));
            halves(&above, low);
        }
        _ => halves(&above, codes_at),
    }
    true
}
