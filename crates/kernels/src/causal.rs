//! Causal depthwise convolutions over rows of tokens.

use rayon::prelude::*;

/// Number of channels that one job of the weight gradient processes.
const CHANNELS: usize = 64;
/// Number of elements that one job of the other loops computes.
const CHUNK: usize = 1 << 14;

/// Rows of tokens: several sequences of `sequence` rows of `channels` elements each.
#[derive(Debug, Clone, Copy)]
pub struct Rows {
    /// Number of rows of a sequence.
    pub sequence: usize,
    /// Number of elements of a row.
    pub channels: usize,
    /// Number of taps of a filter.
    pub kernel: usize,
}

impl Rows {
    /// Calls `row` with each row of the output and its index, in parallel.
    fn for_each(self, output: &mut [f32], row: impl Fn(usize, &mut [f32]) + Sync) {
        let rows = (CHUNK / self.channels.max(1)).max(1);
        output.par_chunks_mut((rows * self.channels).max(1)).enumerate().for_each(|(chunk, output)| {
            output.chunks_exact_mut(self.channels.max(1)).enumerate().for_each(|(index, output)| row(chunk * rows + index, output));
        });
    }

    /// The element range of a row.
    fn row(self, index: usize) -> std::ops::Range<usize> {
        index * self.channels..(index + 1) * self.channels
    }
}

/// Convolution of rows with `taps`, `[kernel, channels]`: the last tap applies to the row itself.
pub fn forward(rows: Rows, input: &[f32], taps: &[f32], bias: Option<&[f32]>, output: &mut [f32]) {
    rows.for_each(output, |index, output| {
        match bias {
            Some(bias) => output.copy_from_slice(&bias[..rows.channels]),
            None => output.fill(0.0),
        }
        for (tap, weights) in taps.chunks_exact(rows.channels).enumerate() {
            let back = rows.kernel - 1 - tap;
            if back <= index % rows.sequence {
                add_product(output, &input[rows.row(index - back)], weights);
            }
        }
    });
}

/// Gradient of the input of [`forward`].
pub fn input_gradient(rows: Rows, gradient: &[f32], taps: &[f32], output: &mut [f32]) {
    rows.for_each(output, |index, output| {
        output.fill(0.0);
        for (tap, weights) in taps.chunks_exact(rows.channels).enumerate() {
            let ahead = rows.kernel - 1 - tap;
            if index % rows.sequence + ahead < rows.sequence {
                add_product(output, &gradient[rows.row(index + ahead)], weights);
            }
        }
    });
}

/// Gradients of the taps, `[channels, kernel]`, of [`forward`].
pub fn weight_gradient(rows: Rows, input: &[f32], gradient: &[f32], output: &mut [f32]) {
    output.par_chunks_mut((CHANNELS * rows.kernel).max(1)).enumerate().for_each(|(chunk, output)| {
        let (first, count) = (chunk * CHANNELS, output.len() / rows.kernel.max(1));
        let part = |index: usize| index * rows.channels + first..index * rows.channels + first + count;
        let mut sums = vec![0f32; count];
        for tap in 0..rows.kernel {
            sums.fill(0.0);
            let back = rows.kernel - 1 - tap;
            for index in (0..gradient.len() / rows.channels.max(1)).filter(|index| index % rows.sequence >= back) {
                add_product(&mut sums, &input[part(index - back)], &gradient[part(index)]);
            }
            output.iter_mut().skip(tap).step_by(rows.kernel).zip(&sums).for_each(|(output, sum)| *output = *sum);
        }
    });
}

simd! {
    /// Adds the products of two rows.
    fn add_product(sum: &mut [f32], a: &[f32], b: &[f32]) {
        for ((sum, a), b) in sum.iter_mut().zip(a).zip(b) {
            *sum += a * b;
        }
    }
}
