//! Dequantization of the IQ1, IQ2 and IQ3 types, whose blocks contain indices of grid points.

use half::f16;

use super::super::grids;
use super::half;

/// The sign bits of eight values, of which seven are stored: the number of negative values is even.
fn even_signs(seven: u32) -> u8 {
    let seven = (seven & 127) as u8;
    seven | (seven.count_ones() as u8 % 2) << 7
}

fn word(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
}

/// Dequantizes one point: `scale · level`, negated for values with a sign bit.
#[inline(always)]
fn signed<const N: usize>(scale: f32, point: &[u8; N], levels: impl Fn(u8) -> f32, signs: u8, values: &mut [f32]) {
    for (i, (value, coordinate)) in values.iter_mut().zip(point).enumerate() {
        let magnitude = scale * levels(*coordinate);
        *value = if signs >> i & 1 == 1 { -magnitude } else { magnitude };
    }
}

/// Levels of the IQ2 types.
fn two_bits(coordinate: u8) -> f32 {
    [8.0, 25.0, 43.0][usize::from(coordinate)]
}

/// Levels of IQ3_XXS.
fn three_bits(coordinate: u8) -> f32 {
    if coordinate == 7 { 62.0 } else { f32::from(8 * coordinate + 4) }
}

/// Levels of IQ3_S.
fn odd(coordinate: u8) -> f32 {
    f32::from(2 * coordinate + 1)
}

/// `d`; for each 32 values, four 8-bit indices, and 32 bits with four times seven signs and the scale.
pub(in crate::ggml) fn iq2_xxs(blocks: &[u8], values: &mut [f32]) {
    let points = grids::IQ2_XXS.points();
    for (block, values) in blocks.as_chunks::<66>().0.iter().zip(values.as_chunks_mut::<256>().0) {
        let d = half(block, 0);
        for (part, values) in values.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let (indices, signs) = (&block[2 + 8 * part..], word(block, 6 + 8 * part));
            let scale = d * (0.5 + (signs >> 28) as f32) * 0.25;
            for (l, values) in values.as_chunks_mut::<8>().0.iter_mut().enumerate() {
                signed(scale, &points[usize::from(indices[l])], two_bits, even_signs(signs >> (7 * l)), values);
            }
        }
    }
}

/// The scale of 16 values, of 4-bit scales.
fn half_scale(d: f32, scales: u8, part: usize) -> f32 {
    d * (0.5 + f32::from(scales >> (4 * part) & 15)) * 0.25
}

/// `d`, 32 integers with nine bits of the index and seven signs of eight values, eight bytes with two scales
/// each.
pub(in crate::ggml) fn iq2_xs(blocks: &[u8], values: &mut [f32]) {
    let points = grids::IQ2_XS.points();
    for (block, values) in blocks.as_chunks::<74>().0.iter().zip(values.as_chunks_mut::<256>().0) {
        let d = half(block, 0);
        for (l, values) in values.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let code = u32::from(u16::from_le_bytes([block[2 + 2 * l], block[3 + 2 * l]]));
            let scale = half_scale(d, block[66 + l / 4], l % 4 / 2);
            signed(scale, &points[code as usize & 511], two_bits, even_signs(code >> 9), values);
        }
    }
}

/// `d`, 32 bytes with the low bits of the indices, 32 bytes of signs, eight bytes with the two upper bits of
/// four indices each, eight bytes with two scales each.
pub(in crate::ggml) fn iq2_s(blocks: &[u8], values: &mut [f32]) {
    let points = grids::IQ2_S.points();
    for (block, values) in blocks.as_chunks::<82>().0.iter().zip(values.as_chunks_mut::<256>().0) {
        let d = half(block, 0);
        for (l, values) in values.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let high = usize::from(block[66 + l / 4] >> (2 * (l % 4)) & 3);
            let scale = half_scale(d, block[74 + l / 4], l % 4 / 2);
            signed(scale, &points[usize::from(block[2 + l]) | high << 8], two_bits, block[34 + l], values);
        }
    }
}

/// `d`, 64 8-bit indices of points with four coordinates, and 32 bits for each 32 values as in IQ2_XXS.
pub(in crate::ggml) fn iq3_xxs(blocks: &[u8], values: &mut [f32]) {
    let points = grids::IQ3_XXS.points();
    for (block, values) in blocks.as_chunks::<98>().0.iter().zip(values.as_chunks_mut::<256>().0) {
        let d = half(block, 0);
        for (l, values) in values.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            let signs = word(block, 66 + l / 8 * 4);
            let scale = d * (0.5 + (signs >> 28) as f32) * 0.5;
            let four = even_signs(signs >> (l % 8 / 2 * 7)) >> (l % 2 * 4);
            signed(scale, &points[usize::from(block[2 + l])], three_bits, four, values);
        }
    }
}

/// `d`, 64 bytes with the low bits of the indices, eight bytes with the upper bits, 32 bytes of signs, four
/// bytes with the scales of two times 32 values each.
pub(in crate::ggml) fn iq3_s(blocks: &[u8], values: &mut [f32]) {
    let points = grids::IQ3_S.points();
    for (block, values) in blocks.as_chunks::<110>().0.iter().zip(values.as_chunks_mut::<256>().0) {
        let d = half(block, 0);
        for (l, values) in values.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            let high = usize::from(block[66 + l / 8] >> (l % 8) & 1);
            let scale = d * f32::from(1 + 2 * (block[106 + l / 16] >> (l / 8 % 2 * 4) & 15));
            signed(scale, &points[usize::from(block[2 + l]) | high << 8], odd, block[74 + l / 2] >> (l % 2 * 4), values);
        }
    }
}

/// Dequantizes one point of the IQ1 types: `scale · (coordinate − 1 ± 1/8)`.
#[inline(always)]
fn shifted(scale: f32, point: &[u8; 8], is_lower: bool, values: &mut [f32; 8]) {
    let shift = if is_lower { -0.125 } else { 0.125 };
    for (value, coordinate) in values.iter_mut().zip(point) {
        *value = scale * (f32::from(*coordinate) - 1.0 + shift);
    }
}

/// `d`, 32 bytes with the low bits of the indices, and 16 bits for each 32 values: three upper bits of four
/// indices, the scale, and the sign of the shift.
pub(in crate::ggml) fn iq1_s(blocks: &[u8], values: &mut [f32]) {
    let points = grids::IQ1.points();
    for (block, values) in blocks.as_chunks::<50>().0.iter().zip(values.as_chunks_mut::<256>().0) {
        let d = half(block, 0);
        for (l, values) in values.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let high = u16::from_le_bytes([block[34 + l / 4 * 2], block[35 + l / 4 * 2]]);
            let index = usize::from(block[2 + l]) | usize::from(high >> (3 * (l % 4)) & 7) << 8;
            shifted(d * f32::from(2 * (high >> 12 & 7) + 1), &points[index], high >> 15 == 1, values);
        }
    }
}

/// 32 bytes with the low bits of the indices, 16 bytes with three upper bits and the sign of the shift of two
/// times eight values each, four 16-bit integers with four 3-bit scales each in the lower bits and four
/// bits of `d` in the upper bits.
pub(in crate::ggml) fn iq1_m(blocks: &[u8], values: &mut [f32]) {
    let points = grids::IQ1.points();
    for (block, values) in blocks.as_chunks::<56>().0.iter().zip(values.as_chunks_mut::<256>().0) {
        let scales = [48, 50, 52, 54].map(|at| u16::from_le_bytes([block[at], block[at + 1]]));
        let bits = scales.iter().rev().fold(0, |bits, scales| bits << 4 | scales >> 12);
        let d = f16::from_bits(bits).to_f32();
        for (l, values) in values.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let high = block[32 + l / 2] >> (l % 2 * 4);
            let index = usize::from(block[l]) | usize::from(high & 7) << 8;
            let scale = scales[l / 8] >> (l % 8 / 2 * 3) & 7;
            shifted(d * f32::from(2 * scale + 1), &points[index], high & 8 == 8, values);
        }
    }
}
