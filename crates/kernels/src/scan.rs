//! Counting of zeros and nonfinite values.

use super::Float;

/// Number of elements that are zero of either sign.
pub fn zeros<F: Float>(bytes: &[u8]) -> u64 {
    count_equal::<F>(bytes, F::from_key(0))
}

simd! {
    /// Number of elements of exactly this magnitude.
    pub fn count_equal[F: Float](bytes: &[u8], magnitude: F::Magnitude) -> u64 {
        // Short runs let the compiler count in narrow lanes before widening.
        F::split(bytes).chunks(4096).map(|run| u64::from(run.iter().map(|&e| u16::from(F::magnitude(e) == magnitude)).sum::<u16>())).sum()
    }
}

simd! {
    /// Number of elements that are NaN or infinite.
    pub fn nonfinite[F: Float](bytes: &[u8]) -> u64 {
        F::split(bytes).chunks(4096).map(|run| u64::from(run.iter().map(|&e| u16::from(F::magnitude(e) >= F::INFINITY)).sum::<u16>())).sum()
    }
}

simd! {
    /// Number of bytes that equal `byte`.
    pub fn count_bytes(bytes: &[u8], byte: u8) -> u64 {
        bytes.chunks(4096).map(|run| u64::from(run.iter().map(|&b| u16::from(b == byte)).sum::<u16>())).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Bf16, F32};
    use super::*;

    #[test]
    fn counts() {
        let values: Vec<u8> = [0.0f32, -0.0, 1.0, f32::NAN, f32::INFINITY, 1e-45].iter().flat_map(|v| v.to_le_bytes()).collect();
        assert_eq!(zeros::<F32>(&values), 2);
        assert_eq!(nonfinite::<F32>(&values), 2);
        assert_eq!(zeros::<Bf16>(&[0; 20_000]), 10_000);
        assert_eq!(count_bytes(&[3, 0, 3], 3), 2);
    }
}
