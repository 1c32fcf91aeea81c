//! Floats of 8, 6 and 4 bits (E4M3, E2M3, E2M1) and powers of two (E8M0) as defined in the OCP specifications
//! (*Microscaling Formats*, 2023; *8-bit Floating Point Specification*, 2023). E4M3 is the variant
//! without infinities: 448 is the largest value, `7F` and `FF` are NaN.
//!
//! Values are rounded to nearest, ties to even, and clipped to the range, as in compressed-tensors.

use super::Float;
use super::weighted_error::{Rounding, weighted_error};

/// The largest E4M3 value.
pub const E4M3_MAX: f32 = 448.0;
/// The largest E2M3 value.
pub const E2M3_MAX: f32 = 7.5;
/// The largest E2M1 value.
pub const E2M1_MAX: f32 = 6.0;

/// 2^exponent, for normal numbers.
#[inline(always)]
const fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(((exponent + 127) as u32) << 23)
}

/// The magnitude of a code with `MANTISSA` mantissa bits, without its sign bit.
#[inline(always)]
fn from_magnitude<const MANTISSA: u32, const BIAS: i32>(code: u8) -> f32 {
    // The exponent is `127 - BIAS` too small, which the multiplication corrects exactly, including
    // subnormal numbers.
    f32::from_bits(u32::from(code) << (23 - MANTISSA)) * power_of_two(127 - BIAS)
}

/// The nearest code of the magnitude of a value, at most `largest`. NaN becomes `largest`.
#[inline(always)]
fn to_magnitude<const MANTISSA: u32, const BIAS: i32>(value: f32, largest: f32) -> u8 {
    let magnitude = value.abs();
    let magnitude = if magnitude < largest { magnitude } else { largest };
    // Adding this power of two rounds to a multiple of the smallest subnormal number, and leaves its index in
    // the low bits.
    let subnormal = (magnitude + power_of_two(24 - BIAS - MANTISSA as i32)).to_bits() & ((2 << MANTISSA) - 1);
    let (bits, shift) = (magnitude.to_bits(), 23 - MANTISSA);
    let normal = ((bits + (1 << (shift - 1)) - 1 + (bits >> shift & 1)) >> shift).wrapping_sub(((127 - BIAS) as u32) << MANTISSA);
    (if magnitude < power_of_two(1 - BIAS) { subnormal } else { normal }) as u8
}

/// The value of an E4M3 byte.
#[inline(always)]
pub fn from_e4m3(code: u8) -> f32 {
    let magnitude = if code & 0x7F == 0x7F { f32::NAN } else { from_magnitude::<3, 7>(code & 0x7F) };
    f32::from_bits(magnitude.to_bits() | u32::from(code & 0x80) << 24)
}

/// The nearest E4M3 byte.
#[inline(always)]
pub fn to_e4m3(value: f32) -> u8 {
    let code = if value.is_nan() { 0x7F } else { to_magnitude::<3, 7>(value, E4M3_MAX) };
    code | (value.to_bits() >> 24) as u8 & 0x80
}

/// The value of an E2M3 code.
#[inline(always)]
pub fn from_e2m3(code: u8) -> f32 {
    f32::from_bits(from_magnitude::<3, 1>(code & 0x1F).to_bits() | u32::from(code & 0x20) << 26)
}

/// The nearest E2M3 code. NaN becomes zero.
#[inline(always)]
pub fn to_e2m3(value: f32) -> u8 {
    let code = to_magnitude::<3, 1>(value, E2M3_MAX) | (value.to_bits() >> 26) as u8 & 0x20;
    if value.is_nan() { 0 } else { code }
}

/// The value of an E2M1 code.
#[inline(always)]
pub fn from_e2m1(code: u8) -> f32 {
    f32::from_bits(from_magnitude::<1, 1>(code & 7).to_bits() | u32::from(code & 8) << 28)
}

/// The nearest E2M1 code. NaN becomes zero.
#[inline(always)]
pub fn to_e2m1(value: f32) -> u8 {
    let m = value.abs();
    let above = [m > 0.25, m >= 0.75, m > 1.25, m >= 1.75, m > 2.5, m >= 3.5, m > 5.0];
    above.into_iter().fold(u8::from(value < 0.0) << 3, |code, above| code + u8::from(above))
}

/// The value of an E8M0 byte: 2^(byte − 127).
pub fn from_e8m0(code: u8) -> f32 {
    match code {
        0 => f32::from_bits(1 << 22),
        255 => f32::NAN,
        code => f32::from_bits(u32::from(code) << 23),
    }
}

/// The E8M0 scale of a group with this largest magnitude: its power of two after rounding it to
/// `mantissa_bits`, divided by 2^`offset`, the power of two of the largest value of the format.
pub fn e8m0_scale(largest: f32, offset: u8, mantissa_bits: u8) -> u8 {
    let exponent = (largest.to_bits() + (1 << (22 - u32::from(mantissa_bits)))) >> 23;
    exponent.saturating_sub(offset.into()).min(254) as u8
}

/// The E8M0 byte of the power of two whose exponent is nearest to the logarithm of a positive number.
pub fn nearest_e8m0(value: f32) -> u8 {
    /// The smallest mantissa of a number above √2.
    const ABOVE_ROOT: u32 = 0x35_04F4;
    // The smallest power of two is subnormal.
    if value < f32::MIN_POSITIVE {
        return 0;
    }
    ((value.to_bits() + (1 << 23) - ABOVE_ROOT) >> 23).min(254) as u8
}

/// Encoding and decoding of a float format.
pub trait Codec: Copy + Send + Sync + 'static {
    /// The nearest code.
    fn encode(value: f32) -> u8;
    /// The value of a code.
    fn decode(code: u8) -> f32;
}

macro_rules! codecs {
    ($($format:ident: $encode:ident, $decode:ident, $largest:ident;)*) => {
        $(
            #[doc = concat!("The codec of ", stringify!($format), ".")]
            #[derive(Debug, Clone, Copy)]
            pub struct $format;

            impl Codec for $format {
                #[inline(always)]
                fn encode(value: f32) -> u8 {
                    $encode(value)
                }

                #[inline(always)]
                fn decode(code: u8) -> f32 {
                    $decode(code)
                }
            }
        )*

        /// A format with a codec.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Minifloat {
            $(
                #[doc = concat!("Values of ", stringify!($format), ".")]
                $format
            ),*
        }

        impl Minifloat {
            /// The largest value.
            pub fn largest(self) -> f32 {
                match self {
                    $(Minifloat::$format => $largest),*
                }
            }

            /// The nearest code.
            #[inline(always)]
            pub fn encode(self, value: f32) -> u8 {
                match self {
                    $(Minifloat::$format => $encode(value)),*
                }
            }

            /// The value of a code.
            #[inline(always)]
            pub fn decode(self, code: u8) -> f32 {
                match self {
                    $(Minifloat::$format => $decode(code)),*
                }
            }

            /// Sum of `cost · error²` of the rounding errors with a scale.
            pub fn error(self, values: &[f32], costs: &[f32], scale: f32) -> f32 {
                match self {
                    $(Minifloat::$format => weighted_error(($format, scale), values, costs)),*
                }
            }
        }
    };
}

codecs! {
    E4m3: to_e4m3, from_e4m3, E4M3_MAX;
    E2m3: to_e2m3, from_e2m3, E2M3_MAX;
    E2m1: to_e2m1, from_e2m1, E2M1_MAX;
}

impl Minifloat {
    /// The nearest value.
    #[inline(always)]
    pub fn nearest(self, value: f32) -> f32 {
        self.decode(self.encode(value))
    }

    /// The second largest value.
    fn second_largest(self) -> f32 {
        self.decode(self.encode(self.largest()) - 1)
    }

    /// The ratio of the two largest values.
    pub fn largest_ratio(self) -> f32 {
        self.largest() / self.second_largest()
    }

    /// The magnitude beyond which clipping to the range changes a value by more than half of the last
    /// step, the largest change by rounding.
    pub fn clipping_limit(self) -> f32 {
        (3.0 * self.largest() - self.second_largest()) / 2.0
    }

    /// The position of a value among the values of the format. A magnitude in the format has its code as
    /// position, which is linear between two values, and beyond the largest one; the sign is that of the
    /// value.
    #[inline(always)]
    pub fn position(self, value: f32) -> f32 {
        let magnitude = value.abs();
        let nearest = self.encode(magnitude);
        let below = nearest - u8::from(self.decode(nearest) > magnitude || magnitude >= self.largest());
        let [low, high] = [below, below + 1].map(|code| self.decode(code));
        (f32::from(below) + (magnitude - low) / (high - low)).copysign(value)
    }
}

impl<C: Codec> Rounding for (C, f32) {
    #[inline(always)]
    fn round(self, value: f32) -> f32 {
        C::decode(C::encode(value / self.1)) * self.1
    }
}

simd! {
    /// Quantizes values with a scale, one byte per code.
    pub fn quantize[F: Float, C: Codec](input: &[u8], output: &mut [u8], scale: f32) {
        for (&e, out) in F::split(input).iter().zip(output) {
            *out = C::encode(F::to_f32(e) / scale);
        }
    }
}

simd! {
    /// Dequantizes codes.
    pub fn dequantize[C: Codec](input: &[u8], output: &mut [f32], scale: f32) {
        for (&code, out) in input.iter().zip(output) {
            *out = C::decode(code) * scale;
        }
    }
}

/// Quantizes values with a scale and dequantizes them.
pub fn round<C: Codec>(values: &mut [f32], scale: f32) {
    values.iter_mut().for_each(|x| *x = C::decode(C::encode(*x / scale)) * scale);
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    /// Which bf16 values round to which code, according to PyTorch and compressed-tensors
    /// (`scripts/goldens narrow`).
    fn check(name: &str, to: fn(f32) -> u8, from: fn(u8) -> f32, sign: u8) {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/narrow.json");
        let golden: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        let first: Vec<u16> = serde_json::from_value(golden[name]["first"].clone()).unwrap();
        let values: Vec<f32> = serde_json::from_value(golden[name]["values"].clone()).unwrap();
        for bits in 0..=u16::MAX {
            let value = half::bf16::from_bits(bits).to_f32();
            if value.is_nan() {
                continue;
            }
            let magnitude = first.partition_point(|first| *first <= bits & 0x7FFF) as u8 - 1;
            // The reference has no negative zero in E2M1.
            let negative = bits > 0x7FFF && (value < 0.0 || sign != 8);
            assert_eq!(to(value), if negative { magnitude | sign } else { magnitude }, "{name} of {value} ({bits:#06x})");
        }
        for (code, value) in values.iter().enumerate() {
            let (code, value) = (code as u8, f32::to_bits(*value));
            assert_eq!([from(code).to_bits(), from(code | sign).to_bits()], [value, value | 1 << 31], "{name} {code:#04x}");
        }
    }

    #[test]
    fn all_bf16_values_are_rounded_like_the_reference() {
        check("e4m3", to_e4m3, from_e4m3, 0x80);
        check("e2m3", to_e2m3, from_e2m3, 0x20);
        check("e2m1", to_e2m1, from_e2m1, 8);
        assert_eq!((to_e4m3(f32::NAN), from_e4m3(0x7F).is_nan(), from_e4m3(0xFF).is_nan()), (0x7F, true, true));
        assert_eq!((to_e4m3(f32::INFINITY), to_e4m3(-1e9), to_e2m1(f32::NEG_INFINITY), to_e2m1(f32::NAN)), (0x7E, 0xFE, 0xF, 0));
        assert_eq!((to_e2m3(f32::INFINITY), to_e2m3(f32::NEG_INFINITY), to_e2m3(-f32::NAN)), (0x1F, 0x3F, 0));
    }

    /// Positions are rounded to the code of the nearest value, including ties.
    #[test]
    fn positions_are_codes() {
        for format in [Minifloat::E4m3, Minifloat::E2m3, Minifloat::E2m1] {
            let last = format.encode(format.largest());
            for code in 0..=last {
                assert_eq!(format.position(format.decode(code)), f32::from(code));
                assert_eq!(format.position(-format.decode(code)), -f32::from(code));
            }
            for bits in 0..=u16::MAX {
                let value = half::bf16::from_bits(bits).to_f32();
                let position = format.position(value).round_ties_even();
                if value.is_finite() {
                    assert_eq!(format.decode(position.abs().min(last.into()) as u8).copysign(position), format.nearest(value), "{format:?} of {value}");
                }
            }
        }
        let positions = [2.5, -5.0, 0.125, 8.0].map(|value| Minifloat::E2m1.position(value));
        assert_eq!(positions, [4.5, -6.5, 0.25, 8.0], "halfway from 2 to 3 and from 4 to 6, a quarter of 0.5, and a step of 2 beyond 6");
    }

    #[test]
    fn scales_are_rounded_to_the_nearest_exponent() {
        let root = std::f32::consts::SQRT_2;
        for (value, nearest) in [(1.0, 1.0), (1.41, 1.0), (root, 1.0), (root.next_up(), 2.0), (1.5, 2.0), (0.7, 0.5), (0.71, 1.0), (3.0, 4.0)] {
            assert_eq!(from_e8m0(nearest_e8m0(value)), nearest, "{value}");
        }
        for byte in 0..255 {
            assert_eq!(nearest_e8m0(from_e8m0(byte)), byte);
        }
        assert_eq!([nearest_e8m0(0.0), nearest_e8m0(f32::MAX), nearest_e8m0(f32::INFINITY)], [0, 254, 254]);
    }

    /// Halfway between the largest number and the next one of an unlimited format.
    #[test]
    fn values_beyond_the_limit_are_clipped() {
        let limits = [Minifloat::E4m3, Minifloat::E2m3, Minifloat::E2m1].map(Minifloat::clipping_limit);
        assert_eq!(limits, [464.0, 7.75, 7.0]);
    }

    #[test]
    fn microscaling_scales_are_powers_of_two() {
        let e2m1 = [(6.99, 1, 1.0), (7.0, 1, 2.0), (0.87, 1, 0.125), (0.875, 1, 0.25), (4.0, 1, 1.0)];
        for (largest, mantissa_bits, scale) in e2m1.into_iter().chain([(7.74, 3, 1.0), (7.75, 3, 2.0)]) {
            assert_eq!(from_e8m0(e8m0_scale(largest, 2, mantissa_bits)), scale, "{largest}");
        }
        assert_eq!([from_e8m0(127), from_e8m0(0), from_e8m0(254)], [1.0, 2f32.powi(-127), 2f32.powi(127)]);
        assert_eq!((e8m0_scale(0.0, 2, 1), e8m0_scale(f32::MAX, 2, 1)), (0, 253));
    }
}
