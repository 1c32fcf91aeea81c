//! Row-wise operations of matrices: normalization, softmax, sums.
//!
//! Sums have a fixed number of lanes, so that results do not depend on the instruction set.

use super::activation::exp;

const LANES: usize = 32;

#[inline(always)]
pub(super) fn sum(row: &[f32], term: impl Fn(f32) -> f32) -> f32 {
    let mut lanes = [0f32; LANES];
    let (blocks, tail) = row.as_chunks::<LANES>();
    for block in blocks {
        for lane in 0..LANES {
            lanes[lane] += term(block[lane]);
        }
    }
    for (lane, x) in tail.iter().enumerate() {
        lanes[lane] += term(*x);
    }
    lanes.iter().sum()
}

#[inline(always)]
pub(super) fn largest(row: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (blocks, tail) = row.as_chunks::<LANES>();
    let more = |a: f32, b: f32| if b > a { b } else { a };
    for block in blocks {
        for lane in 0..LANES {
            lanes[lane] = more(lanes[lane], block[lane]);
        }
    }
    for (lane, x) in tail.iter().enumerate() {
        lanes[lane] = more(lanes[lane], *x);
    }
    lanes.into_iter().fold(f32::NEG_INFINITY, more)
}

simd! {
    /// `(x - mean) / sqrt(variance + epsilon) * weight + bias` for each row. The width is the length of
    /// the weight.
    pub fn layer_norm(input: &[f32], output: &mut [f32], weight: &[f32], bias: &[f32], epsilon: f32) {
        let width = weight.len().max(1);
        for (row, out) in input.chunks_exact(width).zip(output.chunks_exact_mut(width)) {
            let mean = sum(row, |x| x) / width as f32;
            let variance = sum(row, |x| (x - mean) * (x - mean)) / width as f32;
            let scale = 1.0 / (variance + epsilon).sqrt();
            for (((out, x), weight), bias) in out.iter_mut().zip(row).zip(weight).zip(bias) {
                *out = (x - mean) * scale * weight + bias;
            }
        }
    }
}

simd! {
    /// `x / sqrt(mean(x²) + epsilon) * weight` for each row. The width is the length of the weight.
    pub fn rms_norm(input: &[f32], output: &mut [f32], weight: &[f32], epsilon: f32) {
        let width = weight.len().max(1);
        for (row, out) in input.chunks_exact(width).zip(output.chunks_exact_mut(width)) {
            let scale = 1.0 / (sum(row, |x| x * x) / width as f32 + epsilon).sqrt();
            for ((out, x), weight) in out.iter_mut().zip(row).zip(weight) {
                *out = x * scale * weight;
            }
        }
    }
}

#[inline(always)]
fn normalized_exponents(row: &mut [f32]) {
    let most = largest(row);
    for x in row.iter_mut() {
        *x = exp(*x - most);
    }
    let scale = 1.0 / sum(row, |x| x);
    for x in row.iter_mut() {
        *x *= scale;
    }
}

simd! {
    /// `exp(x) / Σ exp(x)` for each row, in place.
    pub fn softmax(values: &mut [f32], width: usize) {
        values.chunks_exact_mut(width.max(1)).for_each(normalized_exponents);
    }
}

simd! {
    /// `ln Σ exp(x)`.
    pub fn log_sum_exp(row: &[f32]) -> f64 {
        let most = largest(row);
        f64::from(sum(row, |x| exp(x - most))).ln() + f64::from(most)
    }
}

simd! {
    /// The mean of each plane.
    pub fn means(planes: &[&[f32]]) -> Vec<f32> {
        planes.iter().map(|plane| sum(plane, |x| x) / plane.len().max(1) as f32).collect()
    }
}

simd! {
    /// Elementwise sum.
    pub fn add(a: &[f32], b: &[f32], out: &mut [f32]) {
        for ((out, a), b) in out.iter_mut().zip(a).zip(b) {
            *out = a + b;
        }
    }
}

simd! {
    /// Elementwise product.
    pub fn multiply(a: &[f32], b: &[f32], out: &mut [f32]) {
        for ((out, a), b) in out.iter_mut().zip(a).zip(b) {
            *out = a * b;
        }
    }
}

simd! {
    /// Applies rotary position embedding to a row: rotates the pairs `(i, i + width / 2)` by angles
    /// given as cosines and sines.
    pub fn rotate(input: &[f32], output: &mut [f32], cosines: &[f32], sines: &[f32]) {
        let half = cosines.len();
        let (first, second) = input.split_at(half);
        let (out_first, out_second) = output.split_at_mut(half);
        for i in 0..half {
            out_first[i] = first[i] * cosines[i] - second[i] * sines[i];
            out_second[i] = first[i] * sines[i] + second[i] * cosines[i];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_by_hand() {
        let mut output = [0.0; 4];
        layer_norm(&[1.0, 3.0, 5.0, 5.0], &mut output, &[1.0, 2.0], &[0.0, 1.0], 0.0);
        assert_eq!(output[..2], [-1.0, 3.0]);
        rms_norm(&[3.0, 3.0, -4.0, 4.0], &mut output, &[1.0, 2.0], 0.0);
        assert_eq!(output, [1.0, 2.0, -1.0, 2.0]);
        let mut values = [0.0, 0.0, f32::MIN, 0.0];
        softmax(&mut values, 2);
        assert_eq!(values, [0.5, 0.5, 0.0, 1.0]);
        rotate(&[1.0, 0.0, 0.0, 1.0], &mut output, &[0.0, 1.0], &[1.0, 0.0]);
        assert_eq!(output, [0.0, 0.0, 1.0, 1.0]);
    }

    #[test]
    fn nan_propagates_within_its_row() {
        let mut values = [f32::NAN, 1.0, 2.0, 2.0];
        softmax(&mut values, 2);
        assert!(values[0].is_nan() && values[1].is_nan());
        assert_eq!(values[2..], [0.5, 0.5]);
    }
}
