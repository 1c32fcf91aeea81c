//! Quantization to blocks, following `quantize_row_*_ref` of `ggml-quants.c`, or `quantize_row_*_impl`
//! if columns have an importance. In the latter case, the values must be one row.

use half::f16;

use super::codes::{self, halves};
use super::decode::{E2M1, half_power_of_two};
use super::search::{EPSILON, Fits, Interleaved, LANES, Trials, around, costs, higher, interleaved, lanes, lower, nearest, with_minimum};

mod grid;
mod integers;
mod low_bits;
mod one_bit;
mod ternary;
mod uneven;

pub(super) use grid::{iq2_s, iq2_xs, iq2_xxs, iq3_s, iq3_xxs};
pub(super) use integers::on_grid;
pub(super) use low_bits::{q2_k, q3_k};
pub(super) use one_bit::{iq1_m, iq1_s};
pub(super) use ternary::{tq1_0, tq2_0};
pub(super) use uneven::{iq4_nl, iq4_xs};

/// Reciprocal of a step; 0 if it is infinite, because the step is 0 or denormal.
#[inline(always)]
fn inverse(step: f32) -> f32 {
    let inverse = 1.0 / step;
    if inverse.is_finite() { inverse } else { 0.0 }
}

/// The value with the largest magnitude, the first one if several are equal.
#[inline(always)]
pub(super) fn farthest(values: &[f32]) -> f32 {
    values.iter().fold(0f32, |most, value| if value.abs() > most.abs() { *value } else { most })
}

fn put(scale: f32, bytes: &mut [u8], at: usize) {
    bytes[at..at + 2].copy_from_slice(&f16::from_f32(scale).to_le_bytes());
}

simd! {
    /// Scales the largest magnitude to 127.
    pub(super) fn q8_0(values: &[f32], _importance: &[f32], blocks: &mut [u8]) {
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

/// Exponent of the scale of the largest magnitude of a block of MXFP4: the rounded logarithm to base 2,
/// minus that of the largest value of E2M1.
fn exponent(largest: f32) -> u8 {
    let logarithm = f64::from(largest).log2() as f32;
    if largest > 0.0 { (logarithm.floor() as i32 - 2 + 127) as u8 } else { 0 }
}

simd! {
    /// A power of two as the scale, and the values of E2M1 that are closest to the values.
    pub(super) fn mxfp4(values: &[f32], _importance: &[f32], blocks: &mut [u8]) {
        for (values, block) in values.as_chunks::<32>().0.iter().zip(blocks.as_chunks_mut::<17>().0) {
            block[0] = exponent(farthest(values).abs());
            let scale = half_power_of_two(block[0]);
            let closest = |value: f32| {
                let error = |code: usize| (E2M1[code] * scale - value).abs();
                (1..16).fold(0, |best, code| if error(code) < error(best) { code } else { best }) as u8
            };
            halves(&values.map(closest), &mut block[1..]);
        }
    }
}

/// Codes for the symmetric formats such as [`q4_0`](super::decode::q4_0): the value with the largest
/// magnitude has the lowest code.
#[inline(always)]
fn around_zero(values: &[f32], middle: f32) -> Fits<32> {
    let mut fits = Fits::ZERO;
    for (lane, values) in values.as_chunks::<32>().0.iter().enumerate().take(LANES) {
        let step = farthest(values) / -middle;
        fits.scale[lane] = step;
        // Infinities become code 0, as in ggml on x86-64; C leaves their conversion undefined.
        if (1.0 / step).is_infinite() && step != 0.0 {
            continue;
        }
        let inverse = inverse(step);
        for (value, code) in values.iter().zip(&mut fits.codes[lane]) {
            *code = (value * inverse + (middle + 0.5)).min(2.0 * middle - 1.0) as u8;
        }
    }
    fits
}

/// Codes for the asymmetric formats: the lowest value of each block has code 0.
#[inline(always)]
fn from_lowest(values: &[f32], highest: f32) -> Fits<32> {
    let mut fits = Fits::ZERO;
    for (lane, values) in values.as_chunks::<32>().0.iter().enumerate().take(LANES) {
        let (low, high) = values.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(low, high), value| (lower(low, *value), higher(high, *value)));
        let step = (high - low) / highest;
        let inverse = inverse(step);
        (fits.scale[lane], fits.minimum[lane]) = (step, -low);
        for (value, code) in values.iter().zip(&mut fits.codes[lane]) {
            *code = ((value - low) * inverse + 0.5).min(highest) as u8;
        }
    }
    fits
}

/// Mean square.
fn power(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |sum, value| sum + value * value) / values.len().max(1) as f32
}

/// Mean square of a row. 0 without importance, because it is not needed.
fn power_of_row(values: &[f32], importance: &[f32]) -> f32 {
    if importance.is_empty() { 0.0 } else { power(values) }
}

/// Quantizes symmetrically, optionally weighted by the importance of the columns.
#[inline(always)]
fn centred(values: &[f32], importance: Option<&[f32]>, power: f32, middle: f32) -> Fits<32> {
    let Some(importance) = importance else { return around_zero(values, middle) };
    let values = interleaved(values);
    around(&values, &costs(&values, importance, &[power; LANES]), middle)
}

/// Quantizes from the lowest to the highest value, optionally weighted by the importance of the columns.
#[inline(always)]
fn ranged(values: &[f32], importance: Option<&[f32]>, power: f32, highest: f32) -> Fits<32> {
    let Some(importance) = importance else { return from_lowest(values, highest) };
    let values = interleaved(values);
    with_minimum(&values, &costs(&values, importance, &[power; LANES]), highest, &Trials::WEIGHTED)
}

/// Splits a row into runs of `count` blocks that are processed together. Yields the values, the
/// importance of their columns if there is any, and the output blocks of `BYTES` bytes per `N` values.
fn runs<'a, const N: usize, const BYTES: usize>(
    values: &'a [f32],
    importance: &'a [f32],
    blocks: &'a mut [u8],
    count: usize,
) -> impl Iterator<Item = (&'a [f32], Option<&'a [f32]>, &'a mut [[u8; BYTES]])> {
    let runs = values.chunks(N * count).zip(blocks.as_chunks_mut::<BYTES>().0.chunks_mut(count)).enumerate();
    runs.map(move |(index, (values, blocks))| {
        let first = index * N * count;
        (values, importance.get(first..first + values.len()).filter(|some| !some.is_empty()), blocks)
    })
}

simd! {
    pub(super) fn q4_0(values: &[f32], importance: &[f32], blocks: &mut [u8]) {
        let power = power_of_row(values, importance);
        for (values, importance, blocks) in runs::<32, 18>(values, importance, blocks, LANES) {
            let fits = centred(values, importance, power, 8.0);
            for (lane, block) in blocks.iter_mut().enumerate() {
                put(fits.scale[lane], block, 0);
                codes::q4_0(&fits.codes[lane], block);
            }
        }
    }
}

simd! {
    pub(super) fn q4_1(values: &[f32], importance: &[f32], blocks: &mut [u8]) {
        let power = power_of_row(values, importance);
        for (values, importance, blocks) in runs::<32, 20>(values, importance, blocks, LANES) {
            let fits = ranged(values, importance, power, 15.0);
            for (lane, block) in blocks.iter_mut().enumerate() {
                put(fits.scale[lane], block, 0);
                put(-fits.minimum[lane], block, 2);
                codes::q4_1(&fits.codes[lane], block);
            }
        }
    }
}

simd! {
    pub(super) fn q5_0(values: &[f32], importance: &[f32], blocks: &mut [u8]) {
        let power = power_of_row(values, importance);
        for (values, importance, blocks) in runs::<32, 22>(values, importance, blocks, LANES) {
            let fits = centred(values, importance, power, 16.0);
            for (lane, block) in blocks.iter_mut().enumerate() {
                put(fits.scale[lane], block, 0);
                codes::q5_0(&fits.codes[lane], block);
            }
        }
    }
}

simd! {
    /// Scale from the lowest to the highest value.
    pub(super) fn q5_1(values: &[f32], importance: &[f32], blocks: &mut [u8]) {
        let power = power_of_row(values, importance);
        for (values, importance, blocks) in runs::<32, 24>(values, importance, blocks, LANES) {
            let fits = ranged(values, importance, power, 31.0);
            for (lane, block) in blocks.iter_mut().enumerate() {
                put(fits.scale[lane], block, 0);
                put(-fits.minimum[lane], block, 2);
                codes::q5_1(&fits.codes[lane], block);
            }
        }
    }
}

/// Sequential sum over `N` values.
#[inline(always)]
fn sum<const N: usize>(term: impl Fn(usize) -> f32) -> f32 {
    (0..N).fold(0.0, |sum, i| sum + term(i))
}

/// Largest 6-bit code.
const SIX_BITS: f32 = 63.0;

/// Quantizes nonnegative scales, with a step that maps the largest one to the highest code.
#[inline(always)]
fn quantize_scales<const N: usize>(scales: &[f32; N], highest: f32) -> (f32, [u8; N]) {
    let largest = scales.iter().fold(0f32, |most, value| higher(most, *value));
    let inverse = if largest > 0.0 { highest / largest } else { 0.0 };
    (largest / highest, scales.map(|scale| (nearest(inverse * scale) as f32).clamp(0.0, highest) as u8))
}

/// Quantizes nonnegative scales by weighted least squares (`make_qp_quants`).
#[inline(always)]
fn quantize_scales_weighted<const N: usize>(scales: &[f32; N], weights: &[f32; N], highest: f32) -> (f32, [u8; N]) {
    let largest = scales.iter().fold(0f32, |most, value| higher(most, *value));
    if largest < EPSILON {
        return (0.0, [0; N]);
    }
    let codes_by = |inverse: f32| scales.map(|scale| (inverse * scale).round_ties_even().min(highest));
    let error = |inverse: f32| {
        let (codes, step) = (codes_by(inverse), 1.0 / inverse);
        sum::<N>(|i| {
            let difference = scales[i] - step * codes[i];
            weights[i] * difference * difference
        })
    };
    let mut inverse = highest / largest;
    let mut least = error(inverse);
    for step in (-4i8..=4).filter(|step| *step != 0) {
        let other = (0.1 * f32::from(step) + highest) / largest;
        let trial = error(other);
        if trial < least {
            (inverse, least) = (other, trial);
        }
    }
    let mut codes = codes_by(inverse);
    let (mut products, mut squares) = (sum::<N>(|i| weights[i] * scales[i] * codes[i]), sum::<N>(|i| weights[i] * codes[i] * codes[i]));
    // Coordinate descent: changes one code at a time while the error decreases.
    for _ in 0..5 {
        let mut changed = false;
        for i in 0..N {
            let mut other_products = products - weights[i] * scales[i] * codes[i];
            let mut other_squares = squares - weights[i] * codes[i] * codes[i];
            if other_products > 0.0 && other_squares > 0.0 {
                let code = (scales[i] * other_squares / other_products).round_ties_even().min(highest);
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

/// Sums of the weights of each block.
#[inline(always)]
fn sums_of<const N: usize>(weights: &Interleaved<N>) -> [f32; LANES] {
    weights.iter().fold([0f32; LANES], |sums, row| lanes!(l => sums[l] + row[l]))
}

/// Weights of the errors in the 16 parts of two blocks of 256 values: the importance of a column, increased
/// for values that are large relative to their block.
#[inline(always)]
fn costs_of_parts(values: &[f32], parts: &Interleaved<32>, importance: &[f32]) -> Interleaved<32> {
    let mut powers = [0f32; LANES];
    for (values, powers) in values.as_chunks::<256>().0.iter().zip(powers.as_chunks_mut::<8>().0) {
        *powers = [2.0 * power(values); 8];
    }
    costs(parts, importance, &powers)
}

/// Searches scales and minima of the 16 parts of two blocks of 256 values.
#[inline(always)]
fn fit_parts(values: &[f32], importance: Option<&[f32]>, highest: f32, trials: &Trials) -> (Fits<32>, [f32; LANES]) {
    let parts = interleaved::<32>(values);
    let weights = match importance {
        Some(importance) => costs_of_parts(values, &parts, importance),
        None => {
            let mut squares = [0f32; LANES];
            for row in &parts {
                squares = lanes!(l => squares[l] + row[l] * row[l]);
            }
            let mean = lanes!(l => (squares[l] / 32.0).sqrt());
            let mut weights = parts;
            for row in &mut weights {
                *row = lanes!(l => mean[l] + row[l].abs());
            }
            weights
        }
    };
    (with_minimum(&parts, &weights, highest, if importance.is_some() { &Trials::WEIGHTED } else { trials }), sums_of(&weights))
}

/// Writes the 6-bit scales and minima of a block of 256 values and returns its codes. Shared by Q4_K and
/// Q5_K. `half` selects one of the two blocks that were searched together.
#[inline(always)]
fn write_scales(values: &[f32; 256], (fits, sums): &(Fits<32>, [f32; LANES]), half: usize, weighted: bool, highest: f32, start: &mut [u8]) -> [u8; 256] {
    let mut codes = [0; 256];
    let eight = |numbers: &[f32; LANES]| numbers.as_chunks::<8>().0[half];
    let (scales, minima, sums) = (eight(&fits.scale), eight(&fits.minimum), eight(sums));
    for (codes, found) in codes.as_chunks_mut::<32>().0.iter_mut().zip(&fits.codes[8 * half..]) {
        *codes = *found;
    }
    let stored = |values: &[f32; 8]| if weighted { quantize_scales_weighted(values, &sums, SIX_BITS) } else { quantize_scales(values, SIX_BITS) };
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
                *code = ((value + minimum) / scale).round_ties_even().clamp(0.0, highest) as u8;
            }
        }
    }
    codes
}

simd! {
    pub(super) fn q4_k(values: &[f32], importance: &[f32], blocks: &mut [u8]) {
        for (values, importance, blocks) in runs::<256, 144>(values, importance, blocks, 2) {
            let found = fit_parts(values, importance, 15.0, &Trials::FOUR_BITS);
            for (half, (values, block)) in values.as_chunks::<256>().0.iter().zip(blocks).enumerate() {
                block.fill(0);
                let codes = write_scales(values, &found, half, importance.is_some(), 15.0, block);
                codes::q4_k(&codes, block);
            }
        }
    }
}

simd! {
    pub(super) fn q5_k(values: &[f32], importance: &[f32], blocks: &mut [u8]) {
        for (values, importance, blocks) in runs::<256, 176>(values, importance, blocks, 2) {
            let found = fit_parts(values, importance, 31.0, &Trials::FIVE_BITS);
            for (half, (values, block)) in values.as_chunks::<256>().0.iter().zip(blocks).enumerate() {
                block.fill(0);
                let codes = write_scales(values, &found, half, importance.is_some(), 31.0, block);
                codes::q5_k(&codes, block);
            }
        }
    }
}

simd! {
    pub(super) fn q6_k(values: &[f32], importance: &[f32], blocks: &mut [u8]) {
        for (index, (values, block)) in values.as_chunks::<256>().0.iter().zip(blocks.as_chunks_mut::<210>().0).enumerate() {
            block.fill(0);
            let parts = interleaved::<16>(values);
            let weights = match importance.as_chunks::<256>().0.get(index) {
                Some(importance) => interleaved(importance),
                None => parts.map(|row| row.map(|value| value * value)),
            };
            let Fits { codes: found, scale: scales, .. } = around(&parts, &weights, 32.0);
            let mut codes = [0u8; 256];
            codes.copy_from_slice(found.as_flattened());
            let largest = farthest(&scales);
            if largest.abs() < EPSILON {
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
            codes::q6_k(&codes, block);
        }
    }
}
