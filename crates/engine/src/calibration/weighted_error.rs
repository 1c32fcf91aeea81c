//! Quantization error of a value as a function of its range.

use super::Channels;
use super::histogram::BINS;

/// Quantization error of a value as a function of its range, weighted per channel.
pub struct WeightedError {
    /// Minimum and maximum of all values and zero.
    wide: (f64, f64),
    /// Centres of the bins, ascending.
    centers: Vec<f64>,
    /// Total weight, first and second moment of the bins before each bin.
    below: Vec<[f64; 3]>,
    /// The same of each bin and those after it.
    above: Vec<[f64; 3]>,
    /// Mean squares of the channels, ascending.
    squares: Vec<f64>,
    /// Total weight, and weighted sum of mean squares, of the channels before each channel.
    channels: Vec<[f64; 2]>,
}

/// Sums of the elements before each element, and of all elements.
fn running<const N: usize>(values: impl Iterator<Item = [f64; N]>) -> Vec<[f64; N]> {
    let mut sum = [0.0; N];
    let sums = values.map(|value| {
        sum.iter_mut().zip(value).for_each(|(sum, value)| *sum += value);
        sum
    });
    std::iter::once([0.0; N]).chain(sums).collect()
}

impl WeightedError {
    /// The error function of channels, each multiplied by its factor. Returns `None` without histograms,
    /// or if `weights` does not have one element per channel.
    pub fn from_channels(channels: &Channels, factors: Option<&[f64]>, weights: &[f64]) -> Option<WeightedError> {
        if !channels.has_histograms() || weights.len() != channels.channels() {
            return None;
        }
        let factor = |channel: usize| factors.map_or(1.0, |factors| factors[channel]);
        let mut all = vec![0f64; BINS];
        let grid = channels.empty_histogram(factor);
        // A power of two.
        let inverse = 1.0 / grid.width();
        for (channel, weight) in weights.iter().enumerate() {
            channels.for_each_bin(channel, factor(channel), |center, count| {
                // The cast rounds down and saturates at zero.
                let bin = (center * inverse + BINS as f64 / 2.0) as usize;
                all[bin.min(BINS - 1)] += weight * count;
            });
        }
        let values = all.into_iter().enumerate().filter(|(_, weight)| *weight > 0.0).map(|(bin, weight)| (grid.bin_center(bin), weight)).collect();
        let count = channels.count() as f64;
        let squares = channels.mean_squares().into_iter().enumerate().map(|(channel, square)| square * factor(channel) * factor(channel));
        let channels = squares.zip(weights).map(|(square, weight)| (square, weight * count)).collect();
        let (low, high) = grid.range();
        Some(WeightedError::new((low.into(), high.into()), values, channels))
    }

    /// `values` are the centres of bins, ascending, and their weights; `channels` are mean squares and
    /// weights.
    fn new(wide: (f64, f64), values: Vec<(f64, f64)>, mut channels: Vec<(f64, f64)>) -> WeightedError {
        let moments = |(value, weight): &(f64, f64)| [*weight, weight * value, weight * value * value];
        let mut above = running(values.iter().rev().map(moments));
        above.reverse();
        channels.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
        WeightedError {
            wide,
            below: running(values.iter().map(moments)),
            above,
            centers: values.iter().map(|(value, _)| *value).collect(),
            squares: channels.iter().map(|(square, _)| *square).collect(),
            channels: running(channels.iter().map(|(square, weight)| [*weight, weight * square])),
        }
    }

    /// The range with the smallest error.
    pub fn best_range(&self) -> (f32, f32) {
        let (low, high) = search(self.wide, |range| self.error(range));
        (low as f32, high as f32)
    }

    /// Weighted squared error of quantizing to 256 levels of a range: uniform rounding noise within it,
    /// and clipping outside of it.
    pub fn error(&self, (low, high): (f64, f64)) -> f64 {
        let step = (high - low) / 255.0;
        let noise = step * step / 12.0;
        let ([all, _], [zeroed, zeroed_squares]) = (self.channels[self.squares.len()], self.channels[self.squares.partition_point(|square| *square < noise)]);
        let outside = |[weight, first, second]: [f64; 3], end: f64| second - 2.0 * end * first + end * end * weight;
        let below = self.below[self.centers.partition_point(|value| *value < low)];
        let above = self.above[self.centers.partition_point(|value| *value <= high)];
        zeroed_squares + (all - zeroed) * noise + outside(below, low) + outside(above, high)
    }
}

/// Steps of the search for the smallest squared error: each end is scaled to 100 %, 98 %, … 20 %.
const STEPS: usize = 41;

fn shrink_factor(step: usize) -> f64 {
    1.0 - 0.02 * step as f64
}

/// Shrinks both ends by the same factor, then the low end, then the high end.
pub(super) fn search(wide: (f64, f64), error: impl Fn((f64, f64)) -> f64) -> (f64, f64) {
    let mut best = (wide, error(wide));
    for (low, high) in [(true, true), (true, false), (false, true)] {
        let start = best.0;
        let moved = |end: f64, moves: bool, step: usize| if moves { end * shrink_factor(step) } else { end };
        for range in (0..STEPS).map(|step| (moved(start.0, low, step), moved(start.1, high, step))) {
            let error = error(range);
            if error < best.1 {
                best = (range, error);
            }
        }
    }
    best.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clipped_values_have_squared_errors_and_all_others_rounding_noise() {
        let values = vec![(-3.0, 1.0), (-0.5, 1.0), (0.5, 2.0), (4.0, 0.5)];
        // The second channel is always zero, and has no noise.
        let error = WeightedError::new((-3.0, 4.0), values, vec![(9.0, 2.0), (0.0, 5.0)]);
        let noise = |width: f64| 2.0 * (width / 255.0).powi(2) / 12.0;
        assert!((error.error((-3.0, 4.0)) - noise(7.0)).abs() < 1e-12);
        assert!((error.error((-1.0, 2.0)) - noise(3.0) - (2.0 * 2.0 + 0.5 * 2.0 * 2.0)).abs() < 1e-12);
    }
}
