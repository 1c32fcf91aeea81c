//! Dequantization of blocks.

use half::f16;

use crate::grid::UNEVEN_LEVELS as LEVELS;

mod grids;
mod ternary;

pub(super) use grids::{iq1_m, iq1_s, iq2_s, iq2_xs, iq2_xxs, iq3_s, iq3_xxs};
pub(super) use ternary::{RUNS, tq1_0, tq2_0};

fn half(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

simd! {
    /// `d`, 16 bytes with element `j` in the low half of byte `j` and element `j + 16` in the high half;
    /// `d · (code − 8)`.
    pub(super) fn q4_0(blocks: &[u8], values: &mut [f32]) {
        for (block, values) in blocks.as_chunks::<18>().0.iter().zip(values.as_chunks_mut::<32>().0) {
            let d = half(block, 0);
            for j in 0..16 {
                values[j] = d * (f32::from(block[2 + j] & 15) - 8.0);
                values[j + 16] = d * (f32::from(block[2 + j] >> 4) - 8.0);
            }
        }
    }
}

simd! {
    /// `d`, `m`, 16 bytes as in Q4_0; `d · code + m`.
    pub(super) fn q4_1(blocks: &[u8], values: &mut [f32]) {
        for (block, values) in blocks.as_chunks::<20>().0.iter().zip(values.as_chunks_mut::<32>().0) {
            let (d, m) = (half(block, 0), half(block, 2));
            for j in 0..16 {
                values[j] = d * f32::from(block[4 + j] & 15) + m;
                values[j + 16] = d * f32::from(block[4 + j] >> 4) + m;
            }
        }
    }
}

/// The fifth bit of an element, shifted to bit 4.
fn fifth(bits: u32, element: usize) -> u8 {
    ((bits >> element & 1) << 4) as u8
}

simd! {
    /// `d`, 32 bits with the fifth bit of each code, 16 bytes as in Q4_0; `d · (code − 16)`.
    pub(super) fn q5_0(blocks: &[u8], values: &mut [f32]) {
        for (block, values) in blocks.as_chunks::<22>().0.iter().zip(values.as_chunks_mut::<32>().0) {
            let (d, bits) = (half(block, 0), u32::from_le_bytes([block[2], block[3], block[4], block[5]]));
            for j in 0..16 {
                values[j] = d * (f32::from(block[6 + j] & 15 | fifth(bits, j)) - 16.0);
                values[j + 16] = d * (f32::from(block[6 + j] >> 4 | fifth(bits, j + 16)) - 16.0);
            }
        }
    }
}

simd! {
    /// `d`, `m`, 32 bits, 16 bytes; `d · code + m`.
    pub(super) fn q5_1(blocks: &[u8], values: &mut [f32]) {
        for (block, values) in blocks.as_chunks::<24>().0.iter().zip(values.as_chunks_mut::<32>().0) {
            let (d, m, bits) = (half(block, 0), half(block, 2), u32::from_le_bytes([block[4], block[5], block[6], block[7]]));
            for j in 0..16 {
                values[j] = d * f32::from(block[8 + j] & 15 | fifth(bits, j)) + m;
                values[j + 16] = d * f32::from(block[8 + j] >> 4 | fifth(bits, j + 16)) + m;
            }
        }
    }
}

simd! {
    /// `d`, 32 integers; `d · code`.
    pub(super) fn q8_0(blocks: &[u8], values: &mut [f32]) {
        for (block, values) in blocks.as_chunks::<34>().0.iter().zip(values.as_chunks_mut::<32>().0) {
            let d = half(block, 0);
            for (value, code) in values.iter_mut().zip(&block[2..]) {
                *value = f32::from(*code as i8) * d;
            }
        }
    }
}

simd! {
    /// Scales in the low and minima in the high halves of 16 bytes, for 16 sub-blocks of 16 elements; 64
    /// bytes of codes; `d`, `dmin`. Each 32 bytes of codes contain four rows of 32 elements, the first one
    /// in the lowest two bits; `d · scale · code − dmin · minimum`.
    pub(super) fn q2_k(blocks: &[u8], values: &mut [f32]) {
        for (block, values) in blocks.as_chunks::<84>().0.iter().zip(values.as_chunks_mut::<256>().0) {
            let (d, dmin) = (half(block, 80), half(block, 82));
            for (j, values) in values.as_chunks_mut::<16>().0.iter_mut().enumerate() {
                let (scale, minimum) = (d * f32::from(block[j] & 15), dmin * f32::from(block[j] >> 4));
                let codes = &block[16 + j / 8 * 32 + j % 2 * 16..][..16];
                for (value, code) in values.iter_mut().zip(codes) {
                    *value = scale * f32::from(code >> (j % 8 / 2 * 2) & 3) - minimum;
                }
            }
        }
    }
}

/// The 6-bit scale of sub-block `j`, from the twelve bytes with those of sixteen sub-blocks.
pub(super) fn signed_scale(bytes: &[u8], j: usize) -> i8 {
    let low = bytes[j % 8] >> (j / 8 * 4) & 15;
    let high = bytes[8 + j % 4] >> (j / 4 * 2) & 3;
    (low | high << 4) as i8 - 32
}

simd! {
    /// 32 bytes with the upper bits of the codes: bit `j` of byte `l` belongs to element `l` of row `j`, 32
    /// elements; 64 bytes with the low bits as in Q2_K; scales of 16 sub-blocks; `d`; `d · scale ·
    /// (code − 4)`.
    pub(super) fn q3_k(blocks: &[u8], values: &mut [f32]) {
        for (block, values) in blocks.as_chunks::<110>().0.iter().zip(values.as_chunks_mut::<256>().0) {
            let d = half(block, 108);
            for (j, values) in values.as_chunks_mut::<16>().0.iter_mut().enumerate() {
                let scale = d * f32::from(signed_scale(&block[96..108], j));
                let (row, from) = (j / 2, j % 2 * 16);
                let low = &block[32 + row / 4 * 32 + from..][..16];
                for ((value, low), high) in values.iter_mut().zip(low).zip(&block[from..]) {
                    let code = low >> (row % 4 * 2) & 3 | (high >> row & 1) << 2;
                    *value = scale * (f32::from(code) - 4.0);
                }
            }
        }
    }
}

/// The 6-bit scale and minimum of sub-block `j`, from the twelve bytes with those of eight sub-blocks.
pub(super) fn scale_and_minimum(bytes: &[u8], j: usize) -> (u8, u8) {
    if j < 4 { (bytes[j] & 63, bytes[j + 4] & 63) } else { (bytes[j + 4] & 15 | bytes[j - 4] >> 6 << 4, bytes[j + 4] >> 4 | bytes[j] >> 6 << 4) }
}

simd! {
    /// `d`, `dmin`, scales and minima of eight sub-blocks of 32 elements, 128 bytes. In each 32 bytes,
    /// the low halves are one sub-block and the high halves the next one; `d · scale · code − dmin ·
    /// minimum`.
    pub(super) fn q4_k(blocks: &[u8], values: &mut [f32]) {
        for (block, values) in blocks.as_chunks::<144>().0.iter().zip(values.as_chunks_mut::<256>().0) {
            let (d, dmin) = (half(block, 0), half(block, 2));
            for (j, values) in values.as_chunks_mut::<32>().0.iter_mut().enumerate() {
                let (scale, minimum) = scale_and_minimum(&block[4..16], j);
                let (scale, minimum, shift) = (d * f32::from(scale), dmin * f32::from(minimum), 4 * (j % 2));
                for (value, code) in values.iter_mut().zip(&block[16 + j / 2 * 32..]) {
                    *value = scale * f32::from(code >> shift & 15) - minimum;
                }
            }
        }
    }
}

simd! {
    /// As Q4_K, with another 32 bytes before the 128 bytes: bit `j` of byte `l` is the fifth bit of
    /// element `l` of sub-block `j`.
    pub(super) fn q5_k(blocks: &[u8], values: &mut [f32]) {
        for (block, values) in blocks.as_chunks::<176>().0.iter().zip(values.as_chunks_mut::<256>().0) {
            let (d, dmin) = (half(block, 0), half(block, 2));
            for (j, values) in values.as_chunks_mut::<32>().0.iter_mut().enumerate() {
                let (scale, minimum) = scale_and_minimum(&block[4..16], j);
                let (scale, minimum, shift) = (d * f32::from(scale), dmin * f32::from(minimum), 4 * (j % 2));
                for ((value, code), high) in values.iter_mut().zip(&block[48 + j / 2 * 32..]).zip(&block[16..48]) {
                    *value = scale * f32::from(code >> shift & 15 | (high >> j & 1) << 4) - minimum;
                }
            }
        }
    }
}

simd! {
    /// 128 bytes with the low four bits of the codes, 64 bytes with the upper two bits, 16 8-bit scales,
    /// and `d`; `d · scale · (code − 32)`. Of each 128 elements, the first 64 are in the low halves of
    /// 64 bytes and the others in the high halves; the upper bits of four elements share a byte.
    pub(super) fn q6_k(blocks: &[u8], values: &mut [f32]) {
        for (block, values) in blocks.as_chunks::<210>().0.iter().zip(values.as_chunks_mut::<256>().0) {
            let d = half(block, 208);
            for (row, values) in values.as_chunks_mut::<32>().0.iter_mut().enumerate() {
                let (part, row) = (row / 4, row % 4);
                let low = &block[64 * part + row % 2 * 32..][..32];
                let high = &block[128 + 32 * part..][..32];
                let scales = &block[192 + 8 * part + 2 * row..][..2];
                for (values, (from, scale)) in values.as_chunks_mut::<16>().0.iter_mut().zip([0, 16].into_iter().zip(scales)) {
                    let scale = d * f32::from(*scale as i8);
                    for ((value, low), high) in values.iter_mut().zip(&low[from..]).zip(&high[from..]) {
                        let code = low >> (row / 2 * 4) & 15 | (high >> (2 * row) & 3) << 4;
                        *value = scale * (f32::from(code) - 32.0);
                    }
                }
            }
        }
    }
}

/// Twice the values of E2M1 by their codes.
pub(super) const E2M1: [f32; 16] = [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0];

/// Half the power of two with a biased exponent.
pub(super) fn half_power_of_two(exponent: u8) -> f32 {
    f32::from_bits(if exponent < 2 { 0x20_0000 << exponent } else { u32::from(exponent - 1) << 23 })
}

simd! {
    /// A biased exponent, 16 bytes as in Q4_0; a power of two times a value of E2M1.
    pub(super) fn mxfp4(blocks: &[u8], values: &mut [f32]) {
        for (block, values) in blocks.as_chunks::<17>().0.iter().zip(values.as_chunks_mut::<32>().0) {
            let scale = half_power_of_two(block[0]);
            for j in 0..16 {
                values[j] = E2M1[usize::from(block[1 + j] & 15)] * scale;
                values[j + 16] = E2M1[usize::from(block[1 + j] >> 4)] * scale;
            }
        }
    }
}

/// Dequantizes 16 bytes of codes as in Q4_0.
#[inline(always)]
fn levels(scale: f32, codes: &[u8], values: &mut [f32; 32]) {
    for (j, code) in codes[..16].iter().enumerate() {
        values[j] = scale * LEVELS[usize::from(code & 15)];
        values[j + 16] = scale * LEVELS[usize::from(code >> 4)];
    }
}

simd! {
    /// `d`, 16 bytes as in Q4_0; `d · level`.
    pub(super) fn iq4_nl(blocks: &[u8], values: &mut [f32]) {
        for (block, values) in blocks.as_chunks::<18>().0.iter().zip(values.as_chunks_mut::<32>().0) {
            levels(half(block, 0), &block[2..], values);
        }
    }
}

simd! {
    /// `d`, two bytes with the upper two bits and four bytes with the low four bits of the scales of eight
    /// sub-blocks of 32 elements, 128 bytes; `d · (scale − 32) · level`.
    pub(super) fn iq4_xs(blocks: &[u8], values: &mut [f32]) {
        for (block, values) in blocks.as_chunks::<136>().0.iter().zip(values.as_chunks_mut::<256>().0) {
            let (d, high) = (half(block, 0), u16::from_le_bytes([block[2], block[3]]));
            for (j, values) in values.as_chunks_mut::<32>().0.iter_mut().enumerate() {
                let scale = block[4 + j / 2] >> (j % 2 * 4) & 15 | ((high >> (2 * j) & 3) << 4) as u8;
                levels(d * (f32::from(scale) - 32.0), &block[8 + 16 * j..], values);
            }
        }
    }
}
