//! Blocks of integers with given scales.

use half::f16;

use super::put;
use crate::ggml::codes::PutCodes;
use crate::grid::{IntegerGrid, QuantizationParams};

/// Largest change of a scale by its rounding to binary16, relative to the scale, with which the integers of a
/// block remain close to the best ones.
const TOLERANCE: f32 = 1.0 / 256.0;

/// Writes the integers of the values of a block to a type without a minimum (if `integers` are symmetric), or
/// with one. Returns whether binary16 represents the scale.
pub(in super::super) fn on_grid((integers, put_codes): (IntegerGrid, PutCodes), values: &[f32; 32], params: QuantizationParams, block: &mut [u8]) -> bool {
    let QuantizationParams { scale, zero } = params;
    if (f16::from_f32(scale).to_f32() - scale).abs() > TOLERANCE * scale {
        return false;
    }
    let (lowest, _) = integers.bounds();
    put(scale, block, 0);
    if !integers.symmetric {
        put((lowest - zero) * scale, block, 2);
    }
    put_codes(&values.map(|value| (integers.integer(value, params) - lowest) as u8), block);
    true
}
