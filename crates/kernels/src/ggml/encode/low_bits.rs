//! Q2_K and Q3_K: blocks of 256 values in 16 parts of 16.

use half::f16;

use super::super::codes;
use super::super::search::{Fits, Interleaved, LANES, Trials, around, around_by_descent, costs, farthest_values, interleaved, lanes, with_minimum};
use super::{power, put, quantize_scales, quantize_scales_weighted, sums_of};

simd! {
    pub(in crate::ggml) fn q2_k(values: &[f32], importance: &[f32], blocks: &mut [u8]) {
        for (index, (values, block)) in values.as_chunks::<256>().0.iter().zip(blocks.as_chunks_mut::<84>().0).enumerate() {
            let parts = interleaved::<16>(values);
            let importance = importance.as_chunks::<256>().0.get(index);
            let weights = match importance {
                Some(importance) => costs(&parts, importance, &[power(values); LANES]),
                None => parts.map(|row| row.map(f32::abs)),
            };
            let trials = if importance.is_some() { &Trials::WEIGHTED } else { &Trials::TWO_BITS };
            let fits = with_minimum(&parts, &weights, 3.0, trials);
            let sums = sums_of(&weights);
            let stored = |values: &[f32; 16]| if importance.is_some() { quantize_scales_weighted(values, &sums, 15.0) } else { quantize_scales(values, 15.0) };
            let ((scale, scales), (minimum, minima)) = (stored(&fits.scale), stored(&fits.minimum));
            let (scale, minimum) = (f16::from_f32(scale).to_f32(), f16::from_f32(minimum).to_f32());
            put(scale, block, 80);
            put(minimum, block, 82);
            let mut codes = [0u8; 256];
            codes.copy_from_slice(fits.codes.as_flattened());
            for (j, (values, codes)) in values.as_chunks::<16>().0.iter().zip(codes.as_chunks_mut::<16>().0).enumerate() {
                block[j] = scales[j] | minima[j] << 4;
                let (scale, minimum) = (scale * f32::from(scales[j]), minimum * f32::from(minima[j]));
                if scale != 0.0 {
                    for (value, code) in values.iter().zip(codes) {
                        *code = ((value + minimum) / scale).round_ties_even().clamp(0.0, 3.0) as u8;
                    }
                }
            }
            codes::q2_k(&codes, block);
        }
    }
}

/// Quantizes the scales of blocks to 6 bits, with a step that maps the one with the largest magnitude to
/// the lowest code.
#[inline(always)]
fn quantize_signed_scales(scales: &Interleaved<16>) -> Fits<16> {
    let farthest = farthest_values(scales);
    let inverse = lanes!(l => -32.0 / farthest[l]);
    let mut fits = Fits::ZERO;
    for l in (0..LANES).filter(|l| farthest[*l] != 0.0) {
        fits.scale[l] = 1.0 / inverse[l];
        for (scales, code) in scales.iter().zip(&mut fits.codes[l]) {
            *code = ((inverse[l] * scales[l]).round_ties_even().clamp(-32.0, 31.0) + 32.0) as u8;
        }
    }
    fits
}

/// Writes a block of 256 values with the 6-bit codes of its scales. `codes` are used for parts whose scale
/// is zero.
#[inline(always)]
fn write_q3_k(values: &[f32; 256], codes: &mut [u8; 256], (scale, scales): (f32, &[u8; 16]), block: &mut [u8; 110]) {
    block.fill(0);
    put(scale, block, 108);
    let scale = f16::from_f32(scale).to_f32();
    for (j, (values, codes)) in values.as_chunks::<16>().0.iter().zip(codes.as_chunks_mut::<16>().0).enumerate() {
        block[96 + j % 8] |= (scales[j] & 15) << (j / 8 * 4);
        block[104 + j % 4] |= (scales[j] >> 4) << (j / 4 * 2);
        let scale = scale * (f32::from(scales[j]) - 32.0);
        if scale != 0.0 {
            for (value, code) in values.iter().zip(codes) {
                *code = ((value / scale).round_ties_even().clamp(-4.0, 3.0) + 4.0) as u8;
            }
        }
    }
    codes::q3_k(codes, block);
}

simd! {
    /// Searches the scales of several blocks in parallel too.
    pub(in crate::ggml) fn q3_k(values: &[f32], importance: &[f32], blocks: &mut [u8]) {
        for (values, importance, blocks) in super::runs::<256, 110>(values, importance, blocks, LANES) {
            let mut codes = [[[0u8; 16]; LANES]; LANES];
            let (mut scales, mut sums) = ([[0f32; LANES]; 16], [[0f32; LANES]; 16]);
            for (lane, values) in values.as_chunks::<256>().0.iter().enumerate() {
                let parts = interleaved::<16>(values);
                let fits = match importance {
                    Some(importance) => {
                        let weights = costs(&parts, &importance[256 * lane..], &[2.0 * power(values); LANES]);
                        for (sums, sum) in sums.iter_mut().zip(sums_of(&weights)) {
                            sums[lane] = sum;
                        }
                        around(&parts, &weights, 4.0)
                    }
                    None => around_by_descent(&parts, 4.0),
                };
                for (scales, scale) in scales.iter_mut().zip(fits.scale) {
                    scales[lane] = scale;
                }
                codes[lane] = fits.codes;
            }
            let found = if importance.is_some() { around(&scales, &sums, 32.0) } else { quantize_signed_scales(&scales) };
            for (lane, (values, block)) in values.as_chunks::<256>().0.iter().zip(blocks).enumerate() {
                let mut flat = [0u8; 256];
                flat.copy_from_slice(codes[lane].as_flattened());
                write_q3_k(values, &mut flat, (found.scale[lane], &found.codes[lane]), block);
            }
        }
    }
}
