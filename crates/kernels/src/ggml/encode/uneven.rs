//! IQ4_NL and IQ4_XS, whose codes have unevenly spaced levels. Without importance, too, they follow
//! `quantize_iq4_*`, which search for scales, and not `quantize_row_iq4_nl_ref`.

use super::super::codes::{self, halves};
use super::super::search::{EPSILON, Interleaved, LANES, costs, farthest_values, interleaved, lanes};
use super::{costs_of_parts, farthest, put, runs, sums_of};
use crate::grid::{UNEVEN_CENTERS as CENTERS, UNEVEN_LEVELS as LEVELS};

/// The levels closest to values: a sum of differences, because comparisons are vectorized and lookups are
/// not.
#[inline(always)]
fn closest(values: &[f32; LANES]) -> [f32; LANES] {
    let mut levels = [LEVELS[0]; LANES];
    for (code, center) in CENTERS.iter().enumerate() {
        let difference = LEVELS[code + 1] - LEVELS[code];
        levels = lanes!(l => levels[l] + if values[l] >= *center { difference } else { 0.0 });
    }
    levels
}

/// Codes of the levels closest to the values divided by a scale.
#[inline(always)]
fn codes_by(values: &[f32; 32], scale: f32) -> [u8; 32] {
    let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    let mut codes = [0f32; 32];
    for center in CENTERS {
        for (code, value) in codes.iter_mut().zip(values) {
            *code += if inverse * value >= center { 1.0 } else { 0.0 };
        }
    }
    codes.map(|code| code as u8)
}

/// Scales of blocks by weighted least squares. Tries the scale that assigns the value with the largest
/// magnitude to 127, and scales that assign it to −134 to −120 (`quantize_row_iq4_nl_impl`).
#[inline(always)]
fn scales_of(values: &Interleaved<32>, weights: &Interleaved<32>) -> [f32; LANES] {
    let farthest = farthest_values(values);
    let (mut scale, mut most) = ([0f32; LANES], [0f32; LANES]);
    let first = lanes!(l => 1.0 / (farthest[l] / -LEVELS[0]));
    for (is_first, step) in [(true, 0i8)].into_iter().chain((-7..=7).map(|step| (false, step))) {
        let trial = lanes!(l => if is_first { first[l] } else { (f32::from(step) + LEVELS[0]) / farthest[l] });
        let (mut products, mut squares) = ([0f32; LANES], [0f32; LANES]);
        for (x, w) in values.iter().zip(weights) {
            let levels = closest(&lanes!(l => trial[l] * x[l]));
            for l in 0..LANES {
                products[l] += w[l] * levels[l] * x[l];
                squares[l] += w[l] * levels[l] * levels[l];
            }
        }
        for l in 0..LANES {
            let better = (squares[l] > 0.0) & (is_first | (products[l] * products[l] > most[l] * squares[l]));
            let trial_scale = products[l] / squares[l];
            (scale[l], most[l]) = if better { (trial_scale, trial_scale * products[l]) } else { (scale[l], most[l]) };
        }
    }
    lanes!(l => if farthest[l].abs() < EPSILON { 0.0 } else { scale[l] })
}

/// Weights of the errors without importance.
#[inline(always)]
fn squares_of(parts: &Interleaved<32>) -> Interleaved<32> {
    parts.map(|row| row.map(|value| value * value))
}

simd! {
    pub(in crate::ggml) fn iq4_nl(values: &[f32], importance: &[f32], blocks: &mut [u8]) {
        for (values, importance, blocks) in runs::<32, 18>(values, importance, blocks, LANES) {
            let parts = interleaved::<32>(values);
            let weights = match importance {
                Some(importance) => {
                    let squares = sums_of(&squares_of(&parts));
                    costs(&parts, importance, &lanes!(l => squares[l] * (2.0 / 32.0)))
                }
                None => squares_of(&parts),
            };
            let scales = scales_of(&parts, &weights);
            for ((values, block), scale) in values.as_chunks::<32>().0.iter().zip(blocks).zip(scales) {
                put(scale, block, 0);
                codes::q4_0(&codes_by(values, scale), block);
            }
        }
    }
}

simd! {
    pub(in crate::ggml) fn iq4_xs(values: &[f32], importance: &[f32], blocks: &mut [u8]) {
        for (values, importance, blocks) in runs::<256, 136>(values, importance, blocks, 2) {
            let parts = interleaved::<32>(values);
            let weights = match importance {
                Some(importance) => costs_of_parts(values, &parts, importance),
                None => squares_of(&parts),
            };
            let found = scales_of(&parts, &weights);
            for ((values, block), scales) in values.as_chunks::<256>().0.iter().zip(blocks).zip(found.as_chunks::<8>().0) {
                block.fill(0);
                let step = -farthest(scales) / 32.0;
                put(step, block, 0);
                let inverse = if step == 0.0 { 0.0 } else { 1.0 / step };
                for (j, (values, scale)) in values.as_chunks::<32>().0.iter().zip(scales).enumerate() {
                    let six = (inverse * scale).round_ties_even().clamp(-32.0, 31.0);
                    let code = (six + 32.0) as u8;
                    block[2 + j / 4] |= code >> 4 << (j % 4 * 2);
                    block[4 + j / 2] |= (code & 15) << (j % 2 * 4);
                    halves(&codes_by(values, step * six), &mut block[8 + 16 * j..][..16]);
                }
            }
        }
    }
}
