//! The four float formats of weights, as little-endian bytes.

use safetensors::Dtype;

/// A float format whose magnitudes have the order of unsigned integers (IEEE 754 without the sign bit).
pub trait Float: 'static {
    /// One element, `[u8; N]`.
    type Bytes: Copy + Send + Sync;
    /// An unsigned integer of the element's width.
    type Magnitude: Copy + Ord + Into<u64> + Send + Sync;
    /// Size of an element in bytes.
    const SIZE: usize;
    /// Number of bits of a magnitude, without the sign.
    const BITS: u32;
    /// Positive zero.
    const ZERO: Self::Bytes;
    /// The magnitude of infinity. Larger magnitudes are NaN.
    const INFINITY: Self::Magnitude;
    /// The smallest magnitude beyond the finite range of f32: infinity, except for f64.
    const BEYOND_F32: Self::Magnitude;
    /// The corresponding dtype of safetensors.
    const DTYPE: Dtype;

    /// Bytes as elements. A trailing incomplete element is ignored.
    fn split(bytes: &[u8]) -> &[Self::Bytes];
    /// Mutable bytes as elements.
    fn split_mut(bytes: &mut [u8]) -> &mut [Self::Bytes];
    /// The bits without the sign.
    fn magnitude(element: Self::Bytes) -> Self::Magnitude;
    /// A magnitude from its 64-bit representation; higher bits are dropped.
    fn from_key(key: u64) -> Self::Magnitude;
    /// Whether the sign bit is set.
    fn is_negative(element: Self::Bytes) -> bool;
    /// The positive element with a magnitude.
    fn element(magnitude: Self::Magnitude) -> Self::Bytes;
    /// The value, rounded to f32 if the format is wider.
    fn to_f32(element: Self::Bytes) -> f32;
}

macro_rules! float {
    ($(#[$meta:meta])* $name:ident, $uint:ty, $size:literal, $infinity:literal, $beyond:literal, $dtype:ident, |$bits:ident| $to_f32:expr) => {
        $(#[$meta])*
        #[derive(Debug)]
        pub struct $name;

        impl Float for $name {
            type Bytes = [u8; $size];
            type Magnitude = $uint;
            const SIZE: usize = $size;
            const BITS: u32 = <$uint>::BITS - 1;
            const ZERO: [u8; $size] = [0; $size];
            const INFINITY: $uint = $infinity;
            const BEYOND_F32: $uint = $beyond;
            const DTYPE: Dtype = Dtype::$dtype;

            #[inline(always)]
            fn split(bytes: &[u8]) -> &[[u8; $size]] {
                bytes.as_chunks().0
            }
            #[inline(always)]
            fn split_mut(bytes: &mut [u8]) -> &mut [[u8; $size]] {
                bytes.as_chunks_mut().0
            }
            #[inline(always)]
            fn magnitude(element: [u8; $size]) -> $uint {
                <$uint>::from_le_bytes(element) & (<$uint>::MAX >> 1)
            }
            #[inline(always)]
            fn from_key(key: u64) -> $uint {
                key as $uint
            }
            #[inline(always)]
            fn is_negative(element: [u8; $size]) -> bool {
                <$uint>::from_le_bytes(element) > <$uint>::MAX >> 1
            }
            #[inline(always)]
            fn element(magnitude: $uint) -> [u8; $size] {
                magnitude.to_le_bytes()
            }
            #[inline(always)]
            fn to_f32(element: [u8; $size]) -> f32 {
                let $bits = <$uint>::from_le_bytes(element);
                $to_f32
            }
        }
    };
}

float!(
    /// IEEE 754 binary16.
    F16, u16, 2, 0x7C00, 0x7C00, F16, |bits| {
        // Shifting the fields yields an exponent that is 112 too small, which the multiplication
        // corrects exactly, including subnormal numbers. The exponent of infinities and NaN is set
        // separately.
        let magnitude = u32::from(bits & 0x7FFF);
        let scaled = (f32::from_bits(magnitude << 13) * f32::from_bits((112 + 127) << 23)).to_bits();
        let special = if magnitude >= 0x7C00 { 0x7F80_0000 } else { 0 };
        f32::from_bits(scaled | special | (u32::from(bits & 0x8000) << 16))
    }
);
float!(
    /// bfloat16: the upper half of an f32.
    Bf16, u16, 2, 0x7F80, 0x7F80, BF16, |bits| f32::from_bits(u32::from(bits) << 16)
);
float!(
    /// IEEE 754 binary32.
    F32, u32, 4, 0x7F80_0000, 0x7F80_0000, F32, |bits| f32::from_bits(bits)
);
float!(
    /// IEEE 754 binary64.
    F64, u64, 8, 0x7FF0_0000_0000_0000, 0x47EF_FFFF_F000_0000, F64, |bits| f64::from_bits(bits) as f32
);

/// Runs the body with `$float` bound to the [`Float`] type of a dtype, or the `else` value for other dtypes.
#[macro_export]
macro_rules! with_float {
    ($dtype:expr, $float:ident => $body:expr, else $other:expr) => {
        match $dtype {
            safetensors::Dtype::F16 => {
                type $float = $crate::F16;
                $body
            }
            safetensors::Dtype::BF16 => {
                type $float = $crate::Bf16;
                $body
            }
            safetensors::Dtype::F32 => {
                type $float = $crate::F32;
                $body
            }
            safetensors::Dtype::F64 => {
                type $float = $crate::F64;
                $body
            }
            _ => $other,
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f16_agrees_with_half_on_every_pattern() {
        for bits in 0..=u16::MAX {
            let ours = F16::to_f32(bits.to_le_bytes());
            let theirs = half::f16::from_bits(bits).to_f32();
            assert!(ours.to_bits() == theirs.to_bits() || (ours.is_nan() && theirs.is_nan()), "{bits:#06x}: {ours} {theirs}");
        }
    }

    #[test]
    fn magnitudes_have_the_order_of_the_values() {
        let values = [0.0f32, 1e-40, 1e-30, 0.5, 1.0, 3.5, 1e30, f32::INFINITY];
        for pair in values.windows(2) {
            assert!(F32::magnitude((-pair[0]).to_le_bytes()) < F32::magnitude(pair[1].to_le_bytes()));
        }
    }
}
