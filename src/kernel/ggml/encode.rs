//! From values to blocks, as `quantize_row_*_ref` of `ggml-quants.c` does it.

use half::f16;

/// One over a step, and nothing for a step that is nothing: codes mean nothing then.
fn inverse(step: f32) -> f32 {
    let inverse = 1.0 / step;
    if inverse.is_finite() { inverse } else { 0.0 }
}

/// The value that is farthest from zero, the first of equals.
pub(super) fn farthest(values: &[f32]) -> f32 {
    values.iter().fold(0f32, |most, value| if value.abs() > most.abs() { *value } else { most })
}

fn put(scale: f32, bytes: &mut [u8], at: usize) {
    bytes[at..at + 2].copy_from_slice(&f16::from_f32(scale).to_le_bytes());
}

simd! {
    /// The largest magnitude is 127 steps.
    pub(super) fn q8_0(values: &[f32], blocks: &mut [u8]) {
        for (values, block) in values.as_chunks::<32>().0.iter().zip(blocks.as_chunks_mut::<34>().0) {
            let step = farthest(values).abs() / 127.0;
            let inverse = inverse(step);
            put(step, block, 0);
            for (value, code) in values.iter().zip(&mut block[2..]) {
                *code = (value * inverse).round() as i8 as u8;
            }
        }
    }
}

/// Codes of so many values as [`q4_0`](super::decode::q4_0) finds them, the lowest code for the value that is farthest from zero.
fn around_zero(values: &[f32; 32], middle: f32) -> (f32, [u8; 32]) {
    let step = farthest(values) / -middle;
    let inverse = inverse(step);
    (step, values.map(|value| (value * inverse + (middle + 0.5)).min(2.0 * middle - 1.0) as u8))
}

fn halves(codes: &[u8; 32], bytes: &mut [u8]) {
    for (j, byte) in bytes.iter_mut().enumerate() {
        *byte = codes[j] & 15 | codes[j + 16] << 4;
    }
}

fn fifths(codes: &[u8; 32]) -> [u8; 4] {
    codes.iter().enumerate().fold(0u32, |bits, (element, code)| bits | u32::from(code >> 4 & 1) << element).to_le_bytes()
}

simd! {
    pub(super) fn q4_0(values: &[f32], blocks: &mut [u8]) {
        for (values, block) in values.as_chunks::<32>().0.iter().zip(blocks.as_chunks_mut::<18>().0) {
            let (step, codes) = around_zero(values, 8.0);
            put(step, block, 0);
            halves(&codes, &mut block[2..]);
        }
    }
}

simd! {
    pub(super) fn q5_0(values: &[f32], blocks: &mut [u8]) {
        for (values, block) in values.as_chunks::<32>().0.iter().zip(blocks.as_chunks_mut::<22>().0) {
            let (step, codes) = around_zero(values, 16.0);
            put(step, block, 0);
            block[2..6].copy_from_slice(&fifths(&codes));
            halves(&codes, &mut block[6..]);
        }
    }
}

simd! {
    /// From the lowest value to the highest.
    pub(super) fn q5_1(values: &[f32], blocks: &mut [u8]) {
        for (values, block) in values.as_chunks::<32>().0.iter().zip(blocks.as_chunks_mut::<24>().0) {
            let (low, high) = values.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(low, high), value| (low.min(*value), high.max(*value)));
            let step = (high - low) / 31.0;
            let inverse = inverse(step);
            let codes = values.map(|value| ((value - low) * inverse + 0.5).min(31.0) as u8);
            put(step, block, 0);
            put(low, block, 2);
            block[4..8].copy_from_slice(&fifths(&codes));
            halves(&codes, &mut block[8..]);
        }
    }
}

/// Codes, scale and what is taken away of so many values.
struct Fit<const N: usize> {
    codes: [u8; N],
    scale: f32,
    minimum: f32,
}

/// A sum over `N` values, one after another.
fn sum<const N: usize>(of: impl Fn(usize) -> f32) -> f32 {
    (0..N).fold(0.0, |sum, i| sum + of(i))
}

/// Scale and minimum by weighted least squares, for codes that several scales give: that of the whole range, and `steps` more from
/// `first` on, a tenth apart (`make_qkx2_quants`).
fn with_minimum<const N: usize>(values: &[f32; N], weights: &[f32; N], most: f32, first: f32, steps: usize) -> Fit<N> {
    let (low, high) = values.iter().fold((values[0], values[0]), |(low, high), value| (low.min(*value), high.max(*value)));
    let low = low.min(0.0);
    if high == low {
        return Fit { codes: [0; N], scale: 0.0, minimum: -low };
    }
    let codes_by = |inverse: f32, low: f32| values.map(|value| (inverse * (value - low)).round_ties_even().clamp(0.0, most));
    let error = |codes: &[f32; N], scale: f32, minimum: f32| {
        sum::<N>(|i| {
            let difference = scale * codes[i] + minimum - values[i];
            weights[i] * (difference * difference)
        })
    };
    let (sum_w, sum_x) = (sum::<N>(|i| weights[i]), sum::<N>(|i| weights[i] * values[i]));
    let inverse = most / (high - low);
    let (mut best, mut scale, mut minimum) = (codes_by(inverse, low), 1.0 / inverse, low);
    let mut least = error(&best, scale, minimum);
    for step in 0..=steps {
        // From the best minimum so far, as the reference has it.
        let codes = codes_by((first + 0.1 * step as f32 + most) / (high - minimum), minimum);
        let (sum_l, sum_l2) = (sum::<N>(|i| weights[i] * codes[i]), sum::<N>(|i| weights[i] * codes[i] * codes[i]));
        let sum_xl = sum::<N>(|i| weights[i] * codes[i] * values[i]);
        let determinant = sum_w * sum_l2 - sum_l * sum_l;
        if determinant > 0.0 {
            let (mut this_scale, mut this_minimum) = ((sum_w * sum_xl - sum_x * sum_l) / determinant, (sum_l2 * sum_x - sum_l * sum_xl) / determinant);
            if this_minimum > 0.0 {
                (this_scale, this_minimum) = (sum_xl / sum_l2, 0.0);
            }
            let this = error(&codes, this_scale, this_minimum);
            if this < least {
                (best, scale, minimum, least) = (codes, this_scale, this_minimum, this);
            }
        }
    }
    Fit { codes: best.map(|code| code as u8), scale, minimum: -minimum }
}

/// Scales and minima of a block of 256 in six bits each, and its codes: what Q4_K and Q5_K have in common.
fn in_parts(values: &[f32; 256], most: f32, first: f32, steps: usize, start: &mut [u8]) -> [u8; 256] {
    let mut codes = [0; 256];
    let (mut scales, mut minima) = ([0f32; 8], [0f32; 8]);
    for (j, values) in values.as_chunks::<32>().0.iter().enumerate() {
        let mean = (values.iter().map(|value| value * value).sum::<f32>() / 32.0).sqrt();
        let fit = with_minimum(values, &values.map(|value| mean + value.abs()), most, first, steps);
        codes[32 * j..][..32].copy_from_slice(&fit.codes);
        (scales[j], minima[j]) = (fit.scale, fit.minimum);
    }
    let largest = |list: &[f32; 8]| list.iter().fold(0f32, |most, value| most.max(*value));
    let (scale, minimum) = (largest(&scales), largest(&minima));
    let by = |most: f32| if most > 0.0 { 63.0 / most } else { 0.0 };
    let six = |value: f32| value.round_ties_even().min(63.0) as u8;
    let bytes = &mut start[4..16];
    for j in 0..8 {
        let (s, m) = (six(by(scale) * scales[j]), six(by(minimum) * minima[j]));
        if j < 4 {
            (bytes[j], bytes[j + 4]) = (s, m);
        } else {
            bytes[j + 4] = s & 15 | (m & 15) << 4;
            bytes[j - 4] |= s >> 4 << 6;
            bytes[j] |= m >> 4 << 6;
        }
    }
    put(scale / 63.0, start, 0);
    put(minimum / 63.0, start, 2);
    let stored = |at: usize| f16::from_le_bytes([start[at], start[at + 1]]).to_f32();
    for (j, values) in values.as_chunks::<32>().0.iter().enumerate() {
        let (s, m) = super::decode::scale_and_minimum(&start[4..16], j);
        let (scale, minimum) = (stored(0) * f32::from(s), stored(2) * f32::from(m));
        if scale != 0.0 {
            for (value, code) in values.iter().zip(&mut codes[32 * j..]) {
                *code = ((value + minimum) / scale).round_ties_even().clamp(0.0, most) as u8;
            }
        }
    }
    codes
}

/// Low halves of 64 codes in 32 bytes, the second 32 above the first.
fn nibbles(codes: &[u8; 256], bytes: &mut [u8]) {
    for (codes, bytes) in codes.as_chunks::<64>().0.iter().zip(bytes.as_chunks_mut::<32>().0) {
        for (l, byte) in bytes.iter_mut().enumerate() {
            *byte = codes[l] & 15 | codes[l + 32] << 4;
        }
    }
}

simd! {
    pub(super) fn q4_k(values: &[f32], blocks: &mut [u8]) {
        for (values, block) in values.as_chunks::<256>().0.iter().zip(blocks.as_chunks_mut::<144>().0) {
            block.fill(0);
            let codes = in_parts(values, 15.0, -1.0, 20, block);
            nibbles(&codes, &mut block[16..]);
        }
    }
}

simd! {
    pub(super) fn q5_k(values: &[f32], blocks: &mut [u8]) {
        for (values, block) in values.as_chunks::<256>().0.iter().zip(blocks.as_chunks_mut::<176>().0) {
            block.fill(0);
            let codes = in_parts(values, 31.0, -0.5, 15, block);
            for (element, code) in codes.iter().enumerate() {
                block[16 + element % 32] |= (code >> 4) << (element / 32);
            }
            nibbles(&codes, &mut block[48..]);
        }
    }
}

/// What is nothing among scales.
const NOTHING: f32 = 1e-15;

/// The scale of codes from −32 to 31 by least squares, weighted by squares: of the code −32 for the value that is farthest from zero, and of
/// those for up to nine tenths of a code more or less (`make_qx_quants`).
fn around(values: &[f32; 16]) -> (f32, [u8; 16]) {
    let farthest = farthest(values);
    if farthest.abs() < NOTHING {
        return (0.0, [0; 16]);
    }
    let fit = |inverse: f32| {
        let codes = values.map(|value| (inverse * value).round_ties_even().clamp(-32.0, 31.0));
        let (mut products, mut squares) = (0f32, 0f32);
        for (value, code) in values.iter().zip(&codes) {
            let weight = value * value;
            products += weight * value * code;
            squares += weight * code * code;
        }
        (codes, products, squares)
    };
    let (mut best, products, squares) = fit(-32.0 / farthest);
    let mut scale = if squares != 0.0 { products / squares } else { 0.0 };
    let mut most = scale * products;
    for step in (-9i8..=9).filter(|step| *step != 0) {
        let (codes, products, squares) = fit(-(32.0 + 0.1 * f32::from(step)) / farthest);
        if squares > 0.0 && products * products > most * squares {
            scale = products / squares;
            (best, most) = (codes, scale * products);
        }
    }
    (scale, best.map(|code| (code + 32.0) as u8))
}

simd! {
    pub(super) fn q6_k(values: &[f32], blocks: &mut [u8]) {
        for (values, block) in values.as_chunks::<256>().0.iter().zip(blocks.as_chunks_mut::<210>().0) {
            block.fill(0);
            let (mut codes, mut scales) = ([0u8; 256], [0f32; 16]);
            for (j, values) in values.as_chunks::<16>().0.iter().enumerate() {
                let (scale, found) = around(values);
                scales[j] = scale;
                codes[16 * j..][..16].copy_from_slice(&found);
            }
            let largest = farthest(&scales);
            if largest.abs() < NOTHING {
                continue;
            }
            let inverse = -128.0 / largest;
            put(1.0 / inverse, block, 208);
            let stored = f16::from_le_bytes([block[208], block[209]]).to_f32();
            for (j, values) in values.as_chunks::<16>().0.iter().enumerate() {
                let eight = (inverse * scales[j]).round_ties_even().min(127.0) as i8;
                block[192 + j] = eight as u8;
                let scale = stored * f32::from(eight);
                if scale != 0.0 {
                    for (value, code) in values.iter().zip(&mut codes[16 * j..]) {
                        *code = ((value / scale).round_ties_even().clamp(-32.0, 31.0) + 32.0) as u8;
                    }
                }
            }
            for (element, code) in codes.iter().enumerate() {
                let (part, row, l) = (element / 128, element % 128 / 32, element % 32);
                block[64 * part + row % 2 * 32 + l] |= (code & 15) << (row / 2 * 4);
                block[128 + 32 * part + l] |= (code >> 4) << (2 * row);
            }
        }
    }
}
