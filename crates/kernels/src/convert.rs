//! Conversion between float formats, with rounding to nearest, ties to even.

use half::slice::HalfFloatSliceExt;
use safetensors::Dtype;

use super::{Float, minifloat};
use crate::with_float;

simd! {
    /// Converts to f32. f64 is rounded.
    pub fn to_f32[F: Float](input: &[u8], output: &mut [f32]) {
        for (&e, out) in F::split(input).iter().zip(output) {
            *out = F::to_f32(e);
        }
    }
}

simd! {
    /// Writes f32 values as bytes.
    pub fn f32_bytes(input: &[f32], output: &mut [u8]) {
        for (value, out) in input.iter().zip(output.as_chunks_mut::<4>().0) {
            *out = value.to_le_bytes();
        }
    }
}

simd! {
    /// Rounds f32 values to bfloat16 bytes. NaN is preserved.
    pub fn bf16_bytes(input: &[f32], output: &mut [u8]) {
        for (value, out) in input.iter().zip(output.as_chunks_mut::<2>().0) {
            let bits = value.to_bits();
            let rounded = bits.wrapping_add(0x7FFF + ((bits >> 16) & 1)) >> 16;
            let quiet = (bits >> 16) | 0x40;
            *out = (if value.is_nan() { quiet } else { rounded } as u16).to_le_bytes();
        }
    }
}

/// Rounds f32 values to binary16 bytes.
pub fn f16_bytes(input: &[f32], output: &mut [u8]) {
    let mut run = [half::f16::ZERO; 1024];
    for (values, out) in input.chunks(run.len()).zip(output.chunks_mut(2 * run.len())) {
        let run = &mut run[..values.len()];
        run.convert_from_f32_slice(values);
        for (value, out) in run.iter().zip(out.as_chunks_mut::<2>().0) {
            *out = value.to_le_bytes();
        }
    }
}

/// Converts f32 values to the bytes of a float format. Returns `false` unless the format is f16, bf16 or
/// f32.
#[must_use]
pub fn from_f32(dtype: Dtype, input: &[f32], output: &mut [u8]) -> bool {
    match dtype {
        Dtype::F32 => f32_bytes(input, output),
        Dtype::BF16 => bf16_bytes(input, output),
        Dtype::F16 => f16_bytes(input, output),
        _ => return false,
    }
    true
}

/// Converts the bytes of a float format to f32 values. Returns `false` unless the format is a float of
/// at least 16 bits.
#[must_use]
pub fn decode(dtype: Dtype, input: &[u8], output: &mut [f32]) -> bool {
    with_float!(dtype, F => { to_f32::<F>(input, output); true }, else false)
}

/// As [`decode`], for scales, which may also be E4M3 or E8M0.
#[must_use]
pub fn decode_scales(dtype: Dtype, input: &[u8], output: &mut [f32]) -> bool {
    let from = match dtype {
        Dtype::F8_E4M3 => minifloat::from_e4m3,
        Dtype::F8_E8M0 => minifloat::from_e8m0,
        _ => return decode(dtype, input, output),
    };
    input.iter().zip(output).for_each(|(byte, out)| *out = from(*byte));
    true
}

/// As [`from_f32`], for scales, which may also be exact values of E4M3 or E8M0.
#[must_use]
pub fn encode_scales(dtype: Dtype, input: &[f32], output: &mut [u8]) -> bool {
    let to: fn(f32) -> u8 = match dtype {
        Dtype::F8_E4M3 => minifloat::to_e4m3,
        Dtype::F8_E8M0 => |scale| (scale.to_bits() >> 23) as u8,
        _ => return from_f32(dtype, input, output),
    };
    input.iter().zip(output).for_each(|(value, out)| *out = to(*value));
    true
}

/// The largest finite value of a float format.
pub fn largest(dtype: Dtype) -> f32 {
    match dtype {
        Dtype::F16 => half::f16::MAX.to_f32(),
        Dtype::BF16 => half::bf16::MAX.to_f32(),
        _ => f32::MAX,
    }
}

/// A value rounded to a float format, converted back to f32.
pub fn rounded(dtype: Dtype, value: f32) -> f32 {
    match dtype {
        Dtype::F16 => half::f16::from_f32(value).to_f32(),
        Dtype::BF16 => half::bf16::from_f32(value).to_f32(),
        _ => value,
    }
}

/// A scale rounded to a float format: to the nearest value, but upwards in the subnormal range. There,
/// the distance of adjacent values is so large that a scale rounded down would clip the ends of its
/// range, or be zero.
pub fn scale(dtype: Dtype, exact: f64) -> f32 {
    let nearest = rounded(dtype, exact as f32);
    let (least_normal, next) = match dtype {
        Dtype::F16 => (half::f16::MIN_POSITIVE.to_f32(), half::f16::from_bits(half::f16::from_f32(nearest).to_bits() + 1).to_f32()),
        Dtype::BF16 => (half::bf16::MIN_POSITIVE.to_f32(), half::bf16::from_bits(half::bf16::from_f32(nearest).to_bits() + 1).to_f32()),
        _ => (f32::MIN_POSITIVE, nearest.next_up()),
    };
    if f64::from(nearest) < exact && nearest < least_normal { next } else { nearest }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subnormal_scales_cover_their_range() {
        for (dtype, least) in
            [(Dtype::F16, half::f16::from_bits(1).to_f64()), (Dtype::BF16, half::bf16::from_bits(1).to_f64()), (Dtype::F32, f64::from(f32::from_bits(1)))]
        {
            for (steps, wanted) in [(0.0, 0.0), (1e-3, 1.0), (1.0, 1.0), (13.4, 14.0), (63.2, 64.0)] {
                assert_eq!(f64::from(scale(dtype, steps * least)), wanted * least, "{dtype:?} {steps}");
            }
        }
        for exact in [6.2e-5f32, 1e-3, 0.3, 7.0, 65504.0] {
            let scales = [Dtype::F16, Dtype::BF16, Dtype::F32].map(|dtype| scale(dtype, exact.into()));
            assert_eq!(scales, [half::f16::from_f32(exact).to_f32(), half::bf16::from_f32(exact).to_f32(), exact]);
        }
    }

    #[test]
    fn bf16_agrees_with_half() {
        let mut state = 1u32;
        let values: Vec<f32> = (0..100_000)
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                f32::from_bits(state)
            })
            .chain([0.0, -0.0, f32::MAX, f32::INFINITY, f32::NAN, f32::from_bits(0x3F80_8000), f32::from_bits(0x3F81_8000)])
            .collect();
        let mut bytes = vec![0; values.len() * 2];
        bf16_bytes(&values, &mut bytes);
        for (value, out) in values.iter().zip(bytes.as_chunks::<2>().0) {
            let theirs = half::bf16::from_f32(*value);
            assert!(theirs.to_le_bytes() == *out, "{value}");
        }
    }
}
