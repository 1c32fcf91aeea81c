//! From values to blocks, as `quantize_row_*_ref` of `ggml-quants.c` does it, and `quantize_row_*_impl` where columns have an importance:
//! then the values are one row.

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

/// Codes from the lowest value on, the step between them, and that value.
fn from_lowest(values: &[f32; 32], most: f32) -> (f32, f32, [u8; 32]) {
    let (low, high) = values.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(low, high), value| (low.min(*value), high.max(*value)));
    let step = (high - low) / most;
    let inverse = inverse(step);
    (step, low, values.map(|value| ((value - low) * inverse + 0.5).min(most) as u8))
}

fn halves(codes: &[u8; 32], bytes: &mut [u8]) {
    for (j, byte) in bytes.iter_mut().enumerate() {
        *byte = codes[j] & 15 | codes[j + 16] << 4;
    }
}

fn fifths(codes: &[u8; 32]) -> [u8; 4] {
    codes.iter().enumerate().fold(0u32, |bits, (element, code)| bits | u32::from(code >> 4 & 1) << element).to_le_bytes()
}

/// Mean square.
fn power(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |sum, value| sum + value * value) / values.len().max(1) as f32
}

/// That of a row, where anything is weighted by it.
fn power_of_row(values: &[f32], importance: &[f32]) -> f32 {
    if importance.is_empty() { 0.0 } else { power(values) }
}

/// What errors count for: the importance of a column, and more where the value is large beside a power.
fn costs<const N: usize>(values: &[f32; N], importance: &[f32; N], power: f32) -> [f32; N] {
    std::array::from_fn(|i| importance[i] * (power + values[i] * values[i]).sqrt())
}

/// Step and codes of 32 values around zero; `importance` is that of a row, or nothing.
fn centred(values: &[f32; 32], importance: Option<&[f32; 32]>, power: f32, middle: f32) -> (f32, [u8; 32]) {
    match importance {
        None => around_zero(values, middle),
        Some(importance) => around(values, &costs(values, importance, power), middle),
    }
}

/// Step, lowest value and codes of 32 values.
fn ranged(values: &[f32; 32], importance: Option<&[f32; 32]>, power: f32, most: f32) -> (f32, f32, [u8; 32]) {
    let Some(importance) = importance else { return from_lowest(values, most) };
    let fit = with_minimum(values, &costs(values, importance, power), most, &Trials::WEIGHTED);
    (fit.scale, -fit.minimum, fit.codes)
}

/// The importance of a block, where there is any.
fn of_block<const N: usize>(importance: &[f32], index: usize) -> Option<&[f32; N]> {
    importance.as_chunks::<N>().0.get(index)
}

simd! {
    pub(super) fn q4_0(values: &[f32], importance: &[f32], blocks: &mut [u8]) {
        let power = power_of_row(values, importance);
        for (index, (values, block)) in values.as_chunks::<32>().0.iter().zip(blocks.as_chunks_mut::<18>().0).enumerate() {
            let (step, codes) = centred(values, of_block(importance, index), power, 8.0);
            put(step, block, 0);
            halves(&codes, &mut block[2..]);
        }
    }
}

simd! {
    pub(super) fn q4_1(values: &[f32], importance: &[f32], blocks: &mut [u8]) {
        let power = power_of_row(values, importance);
        for (index, (values, block)) in values.as_chunks::<32>().0.iter().zip(blocks.as_chunks_mut::<20>().0).enumerate() {
            let (step, low, codes) = ranged(values, of_block(importance, index), power, 15.0);
            put(step, block, 0);
            put(low, block, 2);
            halves(&codes, &mut block[4..]);
        }
    }
}

simd! {
    pub(super) fn q5_0(values: &[f32], importance: &[f32], blocks: &mut [u8]) {
        let power = power_of_row(values, importance);
        for (index, (values, block)) in values.as_chunks::<32>().0.iter().zip(blocks.as_chunks_mut::<22>().0).enumerate() {
            let (step, codes) = centred(values, of_block(importance, index), power, 16.0);
            put(step, block, 0);
            block[2..6].copy_from_slice(&fifths(&codes));
            halves(&codes, &mut block[6..]);
        }
    }
}

simd! {
    /// From the lowest value to the highest.
    pub(super) fn q5_1(values: &[f32], importance: &[f32], blocks: &mut [u8]) {
        let power = power_of_row(values, importance);
        for (index, (values, block)) in values.as_chunks::<32>().0.iter().zip(blocks.as_chunks_mut::<24>().0).enumerate() {
            let (step, low, codes) = ranged(values, of_block(importance, index), power, 31.0);
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

/// Scales that are tried beside that of the whole range: `steps` more than one, `apart` codes between them.
struct Trials {
    first: f32,
    apart: f32,
    steps: usize,
}

impl Trials {
    /// Of Q4_K and Q5_K without importance.
    const OF_FOUR_BITS: Trials = Trials { first: -1.0, apart: 0.1, steps: 20 };
    const OF_FIVE_BITS: Trials = Trials { first: -0.5, apart: 0.1, steps: 15 };
    /// Of all types with it.
    const WEIGHTED: Trials = Trials { first: -0.9, apart: 0.05, steps: 36 };
}

/// A sum over `N` values, one after another.
fn sum<const N: usize>(of: impl Fn(usize) -> f32) -> f32 {
    (0..N).fold(0.0, |sum, i| sum + of(i))
}

/// Scale and minimum by weighted least squares, for codes that several scales give (`make_qkx2_quants`, `make_qkx3_quants`).
fn with_minimum<const N: usize>(values: &[f32; N], weights: &[f32; N], most: f32, trials: &Trials) -> Fit<N> {
    let (low, high) = values.iter().fold((values[0], values[0]), |(low, high), value| (low.min(*value), high.max(*value)));
    let low = low.min(0.0);
    if high <= low {
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
    for step in 0..=trials.steps {
        // From the best minimum so far, as the reference has it.
        let codes = codes_by((trials.first + trials.apart * step as f32 + most) / (high - minimum), minimum);
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

/// Most that six bits hold.
const SIX_BITS: f32 = 63.0;

/// Codes of scales that are not below zero, and the step between them, which makes the largest one the highest code.
fn evenly(scales: &[f32; 8]) -> (f32, [u8; 8]) {
    let largest = scales.iter().fold(0f32, |most, value| most.max(*value));
    let inverse = if largest > 0.0 { SIX_BITS / largest } else { 0.0 };
    (largest / SIX_BITS, scales.map(|scale| (inverse * scale).round_ties_even().min(SIX_BITS) as u8))
}

/// Codes of scales that are not below zero, and the step between them, by least squares that count as the weights say
/// (`make_qp_quants`).
fn by_weight(scales: &[f32; 8], weights: &[f32; 8]) -> (f32, [u8; 8]) {
    let largest = scales.iter().fold(0f32, |most, value| most.max(*value));
    if largest < NOTHING {
        return (0.0, [0; 8]);
    }
    let codes_by = |inverse: f32| scales.map(|scale| (inverse * scale).round_ties_even().min(SIX_BITS));
    let error = |inverse: f32| {
        let (codes, step) = (codes_by(inverse), 1.0 / inverse);
        sum::<8>(|i| {
            let difference = scales[i] - step * codes[i];
            weights[i] * difference * difference
        })
    };
    let mut inverse = SIX_BITS / largest;
    let mut least = error(inverse);
    for step in (-4i8..=4).filter(|step| *step != 0) {
        let other = (0.1 * f32::from(step) + SIX_BITS) / largest;
        let this = error(other);
        if this < least {
            (inverse, least) = (other, this);
        }
    }
    let mut codes = codes_by(inverse);
    let (mut products, mut squares) = (sum::<8>(|i| weights[i] * scales[i] * codes[i]), sum::<8>(|i| weights[i] * codes[i] * codes[i]));
    // One code after another, while that makes the error less.
    for _ in 0..5 {
        let mut changed = false;
        for i in 0..8 {
            let mut other_products = products - weights[i] * scales[i] * codes[i];
            let mut other_squares = squares - weights[i] * codes[i] * codes[i];
            if other_products > 0.0 && other_squares > 0.0 {
                let code = (scales[i] * other_squares / other_products).round_ties_even().min(SIX_BITS);
                other_products += weights[i] * scales[i] * code;
                other_squares += weights[i] * code * code;
                if code != codes[i] && other_products * other_products * squares > products * products * other_squares {
                    (codes[i], products, squares, changed) = (code, other_products, other_squares, true);
                }
            }
        }
        if !changed {
            break;
        }
    }
    (if squares > 0.0 { products / squares } else { 0.0 }, codes.map(|code| code as u8))
}

/// Scales and minima of a block of 256 in six bits each, and its codes: what Q4_K and Q5_K have in common.
fn in_parts(values: &[f32; 256], importance: Option<&[f32; 256]>, most: f32, trials: &Trials, start: &mut [u8]) -> [u8; 256] {
    let mut codes = [0; 256];
    let (mut scales, mut minima, mut sums) = ([0f32; 8], [0f32; 8], [0f32; 8]);
    let power = 2.0 * power(values);
    for (j, values) in values.as_chunks::<32>().0.iter().enumerate() {
        let importance = importance.and_then(|importance| of_block::<32>(importance, j));
        let weights = match importance {
            Some(importance) => costs(values, importance, power),
            None => {
                let mean = (values.iter().map(|value| value * value).sum::<f32>() / 32.0).sqrt();
                values.map(|value| mean + value.abs())
            }
        };
        let fit = with_minimum(values, &weights, most, if importance.is_some() { &Trials::WEIGHTED } else { trials });
        codes[32 * j..][..32].copy_from_slice(&fit.codes);
        (scales[j], minima[j], sums[j]) = (fit.scale, fit.minimum, sum::<32>(|i| weights[i]));
    }
    let stored = |values: &[f32; 8]| if importance.is_some() { by_weight(values, &sums) } else { evenly(values) };
    let ((scale, scales), (minimum, minima)) = (stored(&scales), stored(&minima));
    let bytes = &mut start[4..16];
    for (j, (s, m)) in scales.into_iter().zip(minima).enumerate() {
        if j < 4 {
            (bytes[j], bytes[j + 4]) = (s, m);
        } else {
            bytes[j + 4] = s & 15 | (m & 15) << 4;
            bytes[j - 4] |= s >> 4 << 6;
            bytes[j] |= m >> 4 << 6;
        }
    }
    put(scale, start, 0);
    put(minimum, start, 2);
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
    pub(super) fn q4_k(values: &[f32], importance: &[f32], blocks: &mut [u8]) {
        for (index, (values, block)) in values.as_chunks::<256>().0.iter().zip(blocks.as_chunks_mut::<144>().0).enumerate() {
            block.fill(0);
            let codes = in_parts(values, of_block(importance, index), 15.0, &Trials::OF_FOUR_BITS, block);
            nibbles(&codes, &mut block[16..]);
        }
    }
}

simd! {
    pub(super) fn q5_k(values: &[f32], importance: &[f32], blocks: &mut [u8]) {
        for (index, (values, block)) in values.as_chunks::<256>().0.iter().zip(blocks.as_chunks_mut::<176>().0).enumerate() {
            block.fill(0);
            let codes = in_parts(values, of_block(importance, index), 31.0, &Trials::OF_FIVE_BITS, block);
            for (element, code) in codes.iter().enumerate() {
                block[16 + element % 32] |= (code >> 4) << (element / 32);
            }
            nibbles(&codes, &mut block[48..]);
        }
    }
}

/// What is nothing among scales.
const NOTHING: f32 = 1e-15;

/// The scale of codes from −`middle` to `middle` − 1 by weighted least squares: of the lowest code for the value that is farthest from zero,
/// and of those for up to nine tenths of a code more or less (`make_qx_quants`).
fn around<const N: usize>(values: &[f32; N], weights: &[f32; N], middle: f32) -> (f32, [u8; N]) {
    let farthest = farthest(values);
    if farthest.abs() < NOTHING {
        return (0.0, [0; N]);
    }
    let fit = |inverse: f32| {
        let codes = values.map(|value| (inverse * value).round_ties_even().clamp(-middle, middle - 1.0));
        (codes, sum::<N>(|i| weights[i] * values[i] * codes[i]), sum::<N>(|i| weights[i] * codes[i] * codes[i]))
    };
    let (mut best, products, squares) = fit(-middle / farthest);
    let mut scale = if squares != 0.0 { products / squares } else { 0.0 };
    let mut most = scale * products;
    for step in (-9i8..=9).filter(|step| *step != 0) {
        let (codes, products, squares) = fit(-(middle + 0.1 * f32::from(step)) / farthest);
        if squares > 0.0 && products * products > most * squares {
            scale = products / squares;
            (best, most) = (codes, scale * products);
        }
    }
    (scale, best.map(|code| (code + middle) as u8))
}

simd! {
    pub(super) fn q6_k(values: &[f32], importance: &[f32], blocks: &mut [u8]) {
        for (index, (values, block)) in values.as_chunks::<256>().0.iter().zip(blocks.as_chunks_mut::<210>().0).enumerate() {
            let importance = of_block::<256>(importance, index);
            block.fill(0);
            let (mut codes, mut scales) = ([0u8; 256], [0f32; 16]);
            for (j, values) in values.as_chunks::<16>().0.iter().enumerate() {
                let squares = values.map(|value| value * value);
                let weights = importance.and_then(|importance| of_block::<16>(importance, j)).unwrap_or(&squares);
                let (scale, found) = around(values, weights, 32.0);
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
