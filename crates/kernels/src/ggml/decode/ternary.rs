//! Dequantization of TQ1_0 and TQ2_0, whose values are −1, 0 and 1 times a scale.

use super::half;

simd! {
    /// 64 bytes of codes of two bits as in Q2_K, and `d`; `d · (code − 1)`.
    pub(in crate::ggml) fn tq2_0(blocks: &[u8], values: &mut [f32]) {
        for (block, values) in blocks.as_chunks::<66>().0.iter().zip(values.as_chunks_mut::<256>().0) {
            let d = half(block, 64);
            for (row, values) in values.as_chunks_mut::<32>().0.iter_mut().enumerate() {
                for (value, code) in values.iter_mut().zip(&block[row / 4 * 32..]) {
                    *value = (f32::from(code >> (row % 4 * 2) & 3) - 1.0) * d;
                }
            }
        }
    }
}

/// Runs of bytes of TQ1_0: the first byte, the number of bytes, and digits per byte. Each digit of a run
/// belongs to as many consecutive values as the run has bytes.
pub(in crate::ggml) const RUNS: [(usize, usize, usize); 3] = [(0, 32, 5), (32, 16, 5), (48, 4, 4)];

simd! {
    /// 52 bytes and `d`. A byte is a fraction of 256 whose digits in base 3 are codes, the first one the
    /// highest; `d · (code − 1)`.
    pub(in crate::ggml) fn tq1_0(blocks: &[u8], values: &mut [f32]) {
        for (block, values) in blocks.as_chunks::<54>().0.iter().zip(values.as_chunks_mut::<256>().0) {
            let d = half(block, 52);
            let mut values = values.iter_mut();
            for (first, count, digits) in RUNS {
                for power in [1u8, 3, 9, 27, 81].into_iter().take(digits) {
                    for (byte, value) in block[first..][..count].iter().zip(&mut values) {
                        let code = (u16::from(byte.wrapping_mul(power)) * 3) >> 8;
                        *value = (f32::from(code) - 1.0) * d;
                    }
                }
            }
        }
    }
}
