//! Affine quantization to integers of up to eight bits: range, scale, rounding, clipping.
//!
//! `q = round_half_even(clamp(w / scale + zero_point, min, max))` and `w' = (q - zero_point) * scale`,
//! in f32: the arithmetic of compressed-tensors, so that results are bitwise equal.

use super::Float;

/// Number of independent sums or extremes per loop. Fixed, so that results do not depend on the
/// instruction set.
const LANES: usize = 32;

simd! {
    /// The smallest and largest finite value, extended to include zero.
    pub fn range[F: Float](bytes: &[u8]) -> (f32, f32) {
        // Magnitudes have the order of the values, and narrow types are compared in wider vectors.
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

/// 1.5 · 2²³: adding it rounds a small float to an integer, ties to even, which is stored in the low
/// bits.
pub(super) const ROUND: f32 = 12_582_912.0;

/// The smallest and largest permitted integer.
pub type Bounds = [f32; 2];

/// The range of int8.
pub const FULL: Bounds = [-128.0, 127.0];

/// The range of a bit width.
pub fn bounds(bits: u8) -> Bounds {
    super::packing::range(bits).map(f32::from)
}

/// Fractions of a range that a scale search tries: from 100 % down to `least` percent, and the one for
/// which the largest value is an integer multiple of the symmetric step. Without it, the largest value
/// would be half a step away from the outermost integer, and always clipped toward zero if it is
/// positive. For the few weights of a depthwise kernel, this is most of the error, with the same sign in
/// all layers.
pub fn parts([lowest, highest]: Bounds, symmetric: bool, (low, high): (f32, f32), least: u32) -> impl Iterator<Item = f32> {
    let outermost = if high >= -low { highest } else { -lowest };
    let aligned = symmetric.then_some((highest - lowest) / 2.0 / outermost);
    (least..=100).rev().map(|percent| percent as f32 / 100.0).chain(aligned)
}

#[inline(always)]
fn level(value: f32, scale: f32, zero_point: f32, [lowest, highest]: Bounds) -> f32 {
    let q = value / scale + zero_point;
    let q = if q >= lowest { q } else { lowest };
    let q = if q <= highest { q } else { highest };
    if value.is_nan() { zero_point } else { q }
}

simd! {
    /// Quantizes to int8 (two's complement bytes). NaN becomes zero, infinities the ends of the range.
    pub fn quantize[F: Float](input: &[u8], output: &mut [u8], scale: f32, zero_point: f32, bounds: Bounds) {
        for (&e, out) in F::split(input).iter().zip(output) {
            *out = (level(F::to_f32(e), scale, zero_point, bounds) + ROUND).to_bits() as u8;
        }
    }
}

simd! {
    /// Rounds values to multiples of the scale in place, from -128 to 127. Zeros keep their sign.
    pub fn round_symmetric(values: &mut [f32], scale: f32) {
        for x in values {
            *x = (*x / scale).round_ties_even().clamp(-128.0, 127.0) * scale;
        }
    }
}

simd! {
    /// Rounds values in place to integers from 0 to 255, minus the zero point and times the scale.
    pub fn round_affine(values: &mut [f32], scale: f32, zero_point: f32) {
        for x in values {
            *x = (((*x / scale).round_ties_even() + zero_point).clamp(0.0, 255.0) - zero_point) * scale;
        }
    }
}

/// Exponent of an error measure.
pub trait Power {
    /// The exponent.
    const EXPONENT: i32;

    /// The power of an error's magnitude.
    fn power(error: f32) -> f32;
}

/// Squared errors.
pub struct Squares;

/// Fourth powers of errors, which give clipping errors more weight.
pub struct FourthPowers;

impl Power for Squares {
    const EXPONENT: i32 = 2;

    #[inline(always)]
    fn power(error: f32) -> f32 {
        error * error
    }
}

impl Power for FourthPowers {
    const EXPONENT: i32 = 4;

    #[inline(always)]
    fn power(error: f32) -> f32 {
        (error * error) * (error * error)
    }
}

simd! {
    /// Sum of powers of the quantization errors of finite values for a scale.
    pub fn error[F: Float, P: Power](bytes: &[u8], scale: f32, zero_point: f32, bounds: Bounds) -> f64 {
        let mut total = 0f64;
        for run in F::split(bytes).chunks(4096) {
            let mut sums = [0f32; LANES];
            let (blocks, tail) = run.as_chunks::<LANES>();
            let step = |e: F::Bytes| {
                let value = F::to_f32(e);
                let q = (level(value, scale, zero_point, bounds) + ROUND) - ROUND;
                // In units of the scale, because the square of a tiny or huge weight may not be
                // representable in f32.
                let error = (q - zero_point) - value / scale;
                if value.abs() <= f32::MAX { P::power(error) } else { 0.0 }
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
        total * f64::from(scale).powi(P::EXPONENT)
    }
}

/// Dequantizes an int8 byte.
#[inline(always)]
pub(super) fn value(q: u8, scale: f32, zero_point: f32) -> f32 {
    (f32::from(q as i8) - zero_point) * scale
}

simd! {
    /// Dequantizes int8 bytes.
    pub fn dequantize(input: &[u8], output: &mut [f32], scale: f32, zero_point: f32) {
        for (&q, out) in input.iter().zip(output) {
            *out = value(q, scale, zero_point);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{F32, F64};
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
    fn the_range_is_limited_to_f32() {
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
    fn range_includes_zero_and_ignores_nonfinite_values() {
        let bytes: Vec<u8> = [2.0f32, 5.0, f32::NAN, f32::INFINITY].iter().flat_map(|v| v.to_le_bytes()).collect();
        assert_eq!(range::<F32>(&bytes), (0.0, 5.0));
        assert_eq!(range::<F32>(&[]), (0.0, 0.0));
    }
}
