//! TQ1_0 and TQ2_0: the value with the largest magnitude is one step.

use super::super::codes::quarters;
use super::super::decode::RUNS;
use super::{farthest, inverse, put};

/// Codes 0, 1 and 2 of the values, and the step.
#[inline(always)]
fn codes(values: &[f32; 256]) -> ([u8; 256], f32) {
    let step = farthest(values).abs();
    let inverse = inverse(step);
    (values.map(|value| ((value * inverse).round() + 1.0) as u8), step)
}

simd! {
    pub(in crate::ggml) fn tq2_0(values: &[f32], _importance: &[f32], blocks: &mut [u8]) {
        for (values, block) in values.as_chunks::<256>().0.iter().zip(blocks.as_chunks_mut::<66>().0) {
            let (codes, step) = codes(values);
            quarters(&codes, &mut block[..64]);
            put(step, block, 64);
        }
    }
}

simd! {
    pub(in crate::ggml) fn tq1_0(values: &[f32], _importance: &[f32], blocks: &mut [u8]) {
        for (values, block) in values.as_chunks::<256>().0.iter().zip(blocks.as_chunks_mut::<54>().0) {
            let (codes, step) = codes(values);
            let mut from = 0;
            for (first, count, digits) in RUNS {
                for byte in 0..count {
                    let number = (0..5).fold(0, |number, digit| number * 3 + if digit < digits { u16::from(codes[from + digit * count + byte]) } else { 0 });
                    // Rounded up, so that the digits are read back.
                    block[first + byte] = (number * 256).div_ceil(243) as u8;
                }
                from += count * digits;
            }
            put(step, block, 52);
        }
    }
}
