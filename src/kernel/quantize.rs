//! Affine int8: range, scale, round, clip.
//!
//! `q = round_half_even(clamp(w / scale + zero_point, -128, 127))` and `w' = (q - zero_point) * scale`, in f32:
//! the arithmetic of compressed-tensors, so that its readers and ours agree to the bit.

use super::Float;

/// Independent running sums or extremes of one loop; fixed, so that results do not depend on the instruction set.
const LANES: usize = 32;

simd! {
    /// Smallest and largest finite value, the range widened to include zero.
    pub fn range[F: Float](bytes: &[u8]) -> (f32, f32) {
        // Magnitudes order as the values do, and narrow ones are compared many at once.
        let (mut negative, mut positive) = ([F::from_key(0); LANES], [F::from_key(0); LANES]);
        let step = |e: F::Bytes, negative: &mut F::Magnitude, positive: &mut F::Magnitude| {
            let magnitude = F::magnitude(e);
            let magnitude = if magnitude < F::BEYOND_F32 { magnitude } else { F::from_key(0) };
            let (below, above) = if F::is_negative(e) { (magnitude, F::from_key(0)) } else { (F::from_key(0), magnitude) };
            *negative = below.max(*negative);
            *positive = above.max(*positive);
        };
        let (blocks, tail) = F::split(bytes).as_chunks::<LANES>();
        for block in blocks {
            for lane in 0..LANES {
                step(block[lane], &mut negative[lane], &mut positive[lane]);
            }
        }
        for (lane, &e) in tail.iter().enumerate() {
            step(e, &mut negative[lane], &mut positive[lane]);
        }
        let largest = |lanes: [F::Magnitude; LANES]| F::to_f32(F::element(lanes.into_iter().max().unwrap_or(F::from_key(0))));
        (0.0 - largest(negative), largest(positive))
    }
}

/// 1.5 · 2²³: adding it rounds a small float to an integer, half to even, and leaves that integer in the low bits.
const ROUND: f32 = 12_582_912.0;

/// The smallest and the largest integer that may be used.
pub type Bounds = [f32; 2];

/// All of int8.
pub const FULL: Bounds = [-128.0, 127.0];

#[inline(always)]
fn level(value: f32, steps: f32, zero_point: f32, [least, most]: Bounds) -> f32 {
    let q = steps + zero_point;
    let q = if q >= least { q } else { least };
    let q = if q <= most { q } else { most };
    if value.is_nan() { zero_point } else { q }
}

/// How far from the middle between two integers a product with the reciprocal of a scale rounds as the quotient does:
/// both are at most 2⁸ from zero where it matters, so they differ by less than 2⁻¹³.
const SURE: f32 = 0.5 - 1.0 / 4096.0;

simd! {
    /// Quantizes to int8 (two's complement bytes). NaN becomes zero, infinities the ends of the range.
    pub fn quantize[F: Float](input: &[u8], output: &mut [u8], scale: f32, zero_point: f32, bounds: Bounds) {
        let divide = |input: &[F::Bytes], output: &mut [u8]| {
            for (&e, out) in input.iter().zip(output) {
                let value = F::to_f32(e);
                *out = (level(value, value / scale, zero_point, bounds) + ROUND).to_bits() as u8;
            }
        };
        let input = F::split(input);
        let inverse = 1.0 / scale;
        if !(scale.is_normal() && inverse.is_normal()) {
            return divide(input, output);
        }
        // Products take a fraction of the time of quotients; the few blocks in which they might round differently are divided.
        let (blocks, tail) = input.as_chunks::<LANES>();
        let (outputs, rest) = output.as_chunks_mut::<LANES>();
        for (block, out) in blocks.iter().zip(outputs) {
            let mut furthest = [0f32; LANES];
            for lane in 0..LANES {
                let value = F::to_f32(block[lane]);
                let q = level(value, value * inverse, zero_point, bounds);
                let rounded = q + ROUND;
                furthest[lane] = (q - (rounded - ROUND)).abs();
                out[lane] = rounded.to_bits() as u8;
            }
            if furthest.iter().any(|far| *far > SURE) {
                divide(block, out);
            }
        }
        divide(tail, rest);
    }
}

simd! {
    /// Sum of squared errors that quantizing with this scale makes on finite values.
    pub fn squared_error[F: Float](bytes: &[u8], scale: f32, zero_point: f32, bounds: Bounds) -> f64 {
        let mut total = 0f64;
        for run in F::split(bytes).chunks(4096) {
            let mut sums = [0f32; LANES];
            let (blocks, tail) = run.as_chunks::<LANES>();
            let step = |e: F::Bytes| {
                let value = F::to_f32(e);
                let q = (level(value, value / scale, zero_point, bounds) + ROUND) - ROUND;
                // Counted in steps: the square of a tiny or a huge weight is no f32.
                let error = (q - zero_point) - value / scale;
                if value.abs() <= f32::MAX { error * error } else { 0.0 }
            };
            for block in blocks {
                for lane in 0..LANES {
                    sums[lane] += step(block[lane]);
                }
            }
            for (lane, &e) in tail.iter().enumerate() {
                sums[lane] += step(e);
            }
            total += sums.iter().map(|s| f64::from(*s)).sum::<f64>();
        }
        total * f64::from(scale) * f64::from(scale)
    }
}

/// The value that an int8 byte stands for.
#[inline(always)]
pub(super) fn value(q: u8, scale: f32, zero_point: f32) -> f32 {
    (f32::from(q as i8) - zero_point) * scale
}

simd! {
    /// The values that int8 bytes stand for.
    pub fn dequantize(input: &[u8], output: &mut [f32], scale: f32, zero_point: f32) {
        for (&q, out) in input.iter().zip(output) {
            *out = value(q, scale, zero_point);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Bf16, F32, F64};
    use super::*;

    fn quantized(values: &[f32], scale: f32, zero_point: f32) -> Vec<i8> {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let mut out = vec![0; values.len()];
        quantize::<F32>(&bytes, &mut out, scale, zero_point, FULL);
        out.iter().map(|&b| b as i8).collect()
    }

    #[test]
    fn halves_round_to_even_and_ends_clip() {
        assert_eq!(quantized(&[0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.5, 300.0, -300.0], 1.0, 0.0), [0, 2, 2, 0, -2, 126, 127, 127, -128]);
        assert_eq!(quantized(&[f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0], 1.0, 3.0), [3, 127, -128, 3]);
    }

    #[test]
    fn products_round_as_quotients_do() {
        let all: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
        let mut state = 9u32;
        let mut random = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state >> 8
        };
        for trial in 0..400 {
            // Scales that bfloat16 holds meet the middle between two integers exactly.
            let scale = f32::from_bits((90 + random() % 70) << 23 | if trial % 2 == 0 { (random() & 0x7F) << 16 } else { random() & 0x7F_FFFF });
            let scale = if trial < 3 { [1.0, f32::MIN_POSITIVE / 4.0, 3e38][trial] } else { scale };
            let zero_point = if trial % 3 == 0 { 0.0 } else { (random() % 256) as f32 - 128.0 };
            let bounds = if trial % 5 == 0 { [-64.0, 64.0] } else { FULL };
            let mut out = vec![0; 1 << 16];
            quantize::<Bf16>(&all, &mut out, scale, zero_point, bounds);
            for (e, q) in Bf16::split(&all).iter().zip(out) {
                let value = Bf16::to_f32(*e);
                let exact = if value.is_nan() { zero_point } else { (value / scale + zero_point).clamp(bounds[0], bounds[1]).round_ties_even() };
                assert_eq!(f32::from(q as i8), exact, "{value:e} / {scale:e} + {zero_point}");
            }
        }
    }

    #[test]
    fn the_range_is_that_of_what_f32_holds() {
        let limit = 2f64.powi(128) - 2f64.powi(103);
        for values in [
            vec![limit, -3.0, 2.0],
            vec![-limit, 2.0],
            vec![limit.next_down(), -limit.next_down()],
            vec![-1e-50, 1e-320],
            vec![-0.0],
            vec![f64::NEG_INFINITY, -7.5],
        ] {
            let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            let finite = || values.iter().map(|v| *v as f32).filter(|v| v.is_finite());
            assert_eq!(range::<F64>(&bytes), (finite().fold(0.0, f32::min), finite().fold(0.0, f32::max)), "{values:?}");
        }
    }

    #[test]
    fn range_includes_zero_and_leaves_out_what_is_not_finite() {
        let bytes: Vec<u8> = [2.0f32, 5.0, f32::NAN, f32::INFINITY].iter().flat_map(|v| v.to_le_bytes()).collect();
        assert_eq!(range::<F32>(&bytes), (0.0, 5.0));
        assert_eq!(range::<F32>(&[]), (0.0, 0.0));
    }
}
