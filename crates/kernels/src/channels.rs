//! Channel-wise statistics and transforms of image batches. A channel is contiguous in memory, with the
//! pixels of all images.
//!
//! A channel is summed piece by piece in f32 lanes, and the pieces in f64.

use rayon::prelude::*;

use super::rows::sum;

simd! {
    fn piece_sum(piece: &[f32]) -> f32 {
        sum(piece, |x| x)
    }
}

simd! {
    fn piece_deviation(piece: &[f32], mean: f32) -> f32 {
        sum(piece, |x| (x - mean) * (x - mean))
    }
}

simd! {
    fn piece_product(values: &[f32], gradient: &[f32], centre: f32) -> f32 {
        let mut lanes = [0f32; 32];
        let (values, values_tail) = values.as_chunks::<32>();
        let (gradient, gradient_tail) = gradient.as_chunks::<32>();
        for (x, g) in values.iter().zip(gradient) {
            for lane in 0..32 {
                lanes[lane] += (x[lane] - centre) * g[lane];
            }
        }
        for (lane, (x, g)) in lanes.iter_mut().zip(values_tail.iter().zip(gradient_tail)) {
            *lane += (x - centre) * g;
        }
        lanes.iter().sum()
    }
}

simd! {
    fn piece_scaled(values: &[f32], scale: f32, shift: f32, out: &mut [f32]) {
        for (out, x) in out.iter_mut().zip(values) {
            *out = x * scale + shift;
        }
    }
}

simd! {
    fn piece_combined(values: &[f32], gradient: &[f32], factors: [f32; 3], out: &mut [f32]) {
        let [of_gradient, of_value, constant] = factors;
        for ((out, x), g) in out.iter_mut().zip(values).zip(gradient) {
            *out = g * of_gradient + (x * of_value + constant);
        }
    }
}

/// Number of elements per piece.
const PIECE: usize = 1 << 12;

fn total(channel: &[f32], sum: impl Fn(&[f32]) -> f32) -> f64 {
    channel.chunks(PIECE).map(|piece| f64::from(sum(piece))).sum()
}

/// Mean and (biased) variance of each channel.
pub fn moments(channels: &[&[f32]]) -> (Vec<f32>, Vec<f32>) {
    let moments = |channel: &&[f32]| {
        let count = channel.len() as f64;
        let mean = (total(channel, piece_sum) / count) as f32;
        (mean, (total(channel, |piece| piece_deviation(piece, mean)) / count) as f32)
    };
    channels.par_iter().map(moments).unzip()
}

/// The sum of each channel.
pub fn sums(channels: &[&[f32]]) -> Vec<f32> {
    channels.par_iter().map(|channel| total(channel, piece_sum) as f32).collect()
}

/// For each channel, the sum of `(x - center) · gradient`.
pub fn products(channels: &[&[f32]], gradients: &[&[f32]], centres: &[f32]) -> Vec<f32> {
    let pairs = |x: &[f32], g: &[f32], centre: f32| x.chunks(PIECE).zip(g.chunks(PIECE)).map(|(x, g)| f64::from(piece_product(x, g, centre))).sum::<f64>();
    channels.par_iter().zip(gradients).zip(centres).map(|((x, g), centre)| pairs(x, g, *centre) as f32).collect()
}

/// `x * scale + shift`, with separate factors for each channel.
pub fn scaled(channels: &[&[f32]], scale: &[f32], shift: &[f32], output: &mut [f32]) {
    by_piece(channels, output, |channel, piece, _, out| piece_scaled(piece, scale[channel], shift[channel], out));
}

/// `g * a + x * b + c`, with separate factors for each channel.
pub fn combined(channels: &[&[f32]], gradients: &[&[f32]], factors: &[[f32; 3]], output: &mut [f32]) {
    by_piece(channels, output, |channel, piece, at, out| piece_combined(piece, &gradients[channel][at..], factors[channel], out));
}

fn by_piece(channels: &[&[f32]], output: &mut [f32], function: impl Fn(usize, &[f32], usize, &mut [f32]) + Sync) {
    let size = channels.first().map_or(1, |channel| channel.len());
    output.par_chunks_mut(size.max(1)).zip(channels).enumerate().for_each(|(index, (out, channel))| {
        let pieces = out.chunks_mut(PIECE).zip(channel.chunks(PIECE)).enumerate();
        pieces.for_each(|(piece, (out, values))| function(index, values, piece * PIECE, out));
    });
}

/// Fills every plane with one value.
pub fn filled(values: &[f32], output: &mut [f32]) {
    let size = output.len() / values.len().max(1);
    output.par_chunks_mut(size.max(1)).with_min_len(16).zip(values).for_each(|(out, value)| out.fill(*value));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn channels_by_hand() {
        let channels = [&[1.0, 3.0, 5.0, 7.0][..], &[2.0, 2.0, 2.0, 2.0]];
        assert_eq!(moments(&channels), (vec![4.0, 2.0], vec![5.0, 0.0]));
        assert_eq!(sums(&channels), [16.0, 8.0]);
        assert_eq!(products(&channels, &channels, &[4.0, 1.0]), [20.0, 8.0]);
        let mut output = [0.0; 8];
        scaled(&channels, &[2.0, 1.0], &[0.0, -1.0], &mut output);
        assert_eq!(output, [2.0, 6.0, 10.0, 14.0, 1.0, 1.0, 1.0, 1.0]);
        combined(&channels, &channels, &[[1.0, 1.0, 0.5], [0.0, 0.0, 3.0]], &mut output);
        assert_eq!(output, [2.5, 6.5, 10.5, 14.5, 3.0, 3.0, 3.0, 3.0]);
        filled(&[1.0, 2.0], &mut output);
        assert_eq!(output, [1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0]);
    }
}
