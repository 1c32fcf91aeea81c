//! From what was seen to the range that eight bits are spread over.

use serde::{Deserialize, Serialize};

use super::histogram::BINS;
use super::{ActivationHistogram, Channels, ValueStatistics};

/// How the range of activations is chosen.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum, schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum ActivationObserver {
    /// From the smallest to the largest value seen
    Minmax,
    /// Smallest and largest values of batches, averaged with a weight of 0.01 for each new batch
    MovingAverage,
    /// Clips the outermost values; see `percentile`
    Percentile,
    /// The range with the least Kullback-Leibler divergence
    Entropy,
    /// The range with the least squared error in the outputs of the layers that read the value
    #[default]
    Mse,
}

/// Running means of the extremes of batches.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Averages(Option<(f64, f64)>);

/// Weight of a new batch.
const NEW: f64 = 0.01;

impl Averages {
    /// Takes the extremes of a batch.
    pub fn add(&mut self, low: f32, high: f32) {
        let (low, high) = (f64::from(low), f64::from(high));
        self.0 = Some(self.0.map_or((low, high), |(l, h)| (l + NEW * (low - l), h + NEW * (high - h))));
    }

    /// Follows a change of scale that took one range to another.
    pub(super) fn scale(&mut self, before: (f32, f32), after: (f32, f32)) {
        let ratio = |before: f32, after: f32| if before == 0.0 { 1.0 } else { f64::from(after) / f64::from(before) };
        if let Some((low, high)) = &mut self.0 {
            *low *= ratio(before.0, after.0);
            *high *= ratio(before.1, after.1);
        }
    }

    /// The means, zero included.
    pub fn range(&self) -> (f32, f32) {
        self.0.map_or((0.0, 0.0), |(low, high)| (low.min(0.0) as f32, high.max(0.0) as f32))
    }
}

impl ActivationObserver {
    /// The range for what was seen, zero included; never wider than from the smallest to the largest value. `weights` says how
    /// much an error of each channel counts.
    pub fn range(self, seen: &ValueStatistics, weights: Option<&[f64]>, percentile: f64) -> (f32, f32) {
        let histogram = &seen.histogram;
        let (low, high) = histogram.range();
        let wide = (f64::from(low), f64::from(high));
        let (low, high) = match self {
            ActivationObserver::Minmax => wide,
            ActivationObserver::MovingAverage => return seen.averages.range(),
            ActivationObserver::Percentile => percentiles(histogram, wide, percentile),
            ActivationObserver::Entropy => entropy(histogram, wide),
            ActivationObserver::Mse => weights.and_then(|weights| mean_range(seen, weights)).unwrap_or_else(|| squares(histogram, wide)),
        };
        (low as f32, high as f32)
    }
}

/// The mean over the groups of samples of the range with the least error for the group. An unusual sample widens only the range of its
/// own group; in a sum of squared errors over all samples it would decide the range for all of them.
fn mean_range(seen: &ValueStatistics, weights: &[f64]) -> Option<(f64, f64)> {
    let (mut low, mut high, mut count) = (0.0, 0.0, 0.0);
    for group in seen.groups() {
        let (range, values) = (Weighted::of(group, None, weights)?.range(), group.count() as f64);
        (low, high, count) = (low + values * f64::from(range.0), high + values * f64::from(range.1), count + values);
    }
    (count > 0.0).then(|| (low / count, high / count))
}

/// Factors by which a range is widened.
const HEADROOM: [f64; 6] = [1.0, 1.1, 1.2, 1.35, 1.5, 1.75];

/// The range of an observer, widened by the factor with which the range of one half of the samples has the least error on the other half.
pub fn with_headroom(observer: ActivationObserver, seen: &ValueStatistics, weights: &[f64], percentile: f64) -> (f32, f32) {
    let (low, high) = observer.range(seen, Some(weights), percentile);
    let wider = |(low, high): (f32, f32), by: f64| (f64::from(low) * by, f64::from(high) * by);
    let Some(crossed) = crossed(observer, seen, None, weights, percentile) else { return (low, high) };
    let mut errors = [0f64; HEADROOM.len()];
    for (range, costs) in crossed {
        errors.iter_mut().zip(HEADROOM).for_each(|(error, by)| *error += costs.error(wider(range, by)));
    }
    let best = (0..errors.len()).reduce(|best, at| if errors[at] < errors[best] { at } else { best }).unwrap_or(0);
    let (low, high) = wider((low, high), HEADROOM[best]);
    (low as f32, high as f32)
}

/// The range that each half of the samples asks for, and what ranges cost the other half, when every channel is multiplied by a number: where both
/// have something, and there is a weight for every channel.
pub fn crossed(
    observer: ActivationObserver,
    seen: &ValueStatistics,
    factors: Option<&[f64]>,
    weights: &[f64],
    percentile: f64,
) -> Option<[((f32, f32), Weighted); 2]> {
    let [a, b] = seen.channels_of_halves()?.each_ref().map(|half| Weighted::of(half, factors, weights));
    let (a, b) = (a?, b?);
    let ranges = match observer {
        ActivationObserver::Mse => [a.range(), b.range()],
        _ => seen.halves()?.map(|mut half| {
            factors.into_iter().for_each(|factors| half.multiply(factors));
            observer.range(&half, None, percentile)
        }),
    };
    Some([(ranges[0], b), (ranges[1], a)])
}

/// What errors cost, by value and by channel.
pub struct Weighted {
    /// From the smallest to the largest value, zero included.
    wide: (f64, f64),
    /// Middles of bins, and the weight of what lies in them.
    values: Vec<(f64, f64)>,
    /// Mean square and weight of each channel.
    channels: Vec<(f64, f64)>,
}

impl Weighted {
    /// Of channels with histograms, when each is multiplied by a number.
    pub fn of(channels: &Channels, factors: Option<&[f64]>, weights: &[f64]) -> Option<Weighted> {
        if !channels.has_histograms() || weights.len() != channels.channels() {
            return None;
        }
        let factor = |channel: usize| factors.map_or(1.0, |factors| factors[channel]);
        let mut all = vec![0f64; BINS];
        let grid = channels.room(factor);
        let width = grid.width();
        for (channel, weight) in weights.iter().enumerate() {
            channels.each_bin(channel, factor(channel), |middle, count| {
                // The conversion rounds down, and takes what is below to zero.
                let bin = (middle / width + BINS as f64 / 2.0) as usize;
                all[bin.min(BINS - 1)] += weight * count;
            });
        }
        let values = all.into_iter().enumerate().filter(|(_, weight)| *weight > 0.0).map(|(bin, weight)| (grid.middle(bin), weight)).collect();
        let count = channels.count() as f64;
        let squares = channels.mean_squares().into_iter().enumerate().map(|(channel, square)| square * factor(channel) * factor(channel));
        let channels = squares.zip(weights).map(|(square, weight)| (square, weight * count)).collect();
        let (low, high) = grid.range();
        Some(Weighted { wide: (low.into(), high.into()), values, channels })
    }

    /// The range with the least error.
    pub fn range(&self) -> (f32, f32) {
        let (low, high) = search(self.wide, |range| self.error(range));
        (low as f32, high as f32)
    }

    /// What rounding to 256 levels of a range costs: a step's uniform noise within it, and what is cut off.
    pub fn error(&self, (low, high): (f64, f64)) -> f64 {
        let step = (high - low) / 255.0;
        let noise = step * step / 12.0;
        let rounded: f64 = self.channels.iter().map(|(square, weight)| weight * square.min(noise)).sum();
        let (below, above) = (self.values.partition_point(|(value, _)| *value < low), self.values.partition_point(|(value, _)| *value <= high));
        let outside = |values: &[(f64, f64)], end: f64| -> f64 { values.iter().map(|(value, weight)| weight * (value - end) * (value - end)).sum() };
        rounded + outside(&self.values[..below], low) + outside(&self.values[above.max(below)..], high)
    }
}

/// The values at both ends of the middle part, interpolated within their bins.
fn percentiles(seen: &ActivationHistogram, (low, high): (f64, f64), percentile: f64) -> (f64, f64) {
    let outside = (1.0 - percentile / 100.0) / 2.0;
    let at = |fraction: f64| {
        let wanted = fraction * seen.total() as f64;
        let mut before = 0.0;
        for (bin, count) in seen.counts().iter().enumerate().filter(|(_, count)| **count > 0) {
            let count = *count as f64;
            if before + count >= wanted {
                return seen.middle(bin) + ((wanted - before) / count - 0.5) * seen.width();
            }
            before += count;
        }
        high
    };
    (at(outside).clamp(low, 0.0), at(1.0 - outside).clamp(0.0, high))
}

/// Levels that a distribution is merged into.
const LEVELS: usize = 255;
/// Bins from one candidate to the next, and the least.
const STRIDE: usize = 32;
const FIRST: usize = 128;

/// Clips both ends at the threshold whose merged distribution diverges least (Migacz, 8-bit inference with TensorRT, 2017).
fn entropy(seen: &ActivationHistogram, (low, high): (f64, f64)) -> (f64, f64) {
    let half = BINS / 2;
    let largest = low.abs().max(high);
    let last = ((largest / seen.width()).ceil() as usize).next_multiple_of(STRIDE).clamp(FIRST, half);
    let mut best = (f64::INFINITY, (low, high));
    for threshold in (FIRST..=last).step_by(STRIDE) {
        let bound = threshold as f64 * seen.width();
        let range = (low.max(-bound), high.min(bound));
        let divergence = divergence(seen, range);
        if divergence < best.0 {
            best = (divergence, range);
        }
    }
    best.1
}

fn divergence(seen: &ActivationHistogram, (low, high): (f64, f64)) -> f64 {
    let half = BINS as f64 / 2.0;
    let first = ((low / seen.width()).floor() + half).clamp(0.0, half) as usize;
    let end = ((high / seen.width()).floor() + half + 1.0).clamp(half + 1.0, BINS as f64) as usize;
    let counts = seen.counts();
    // What an activation cuts off is zero, exact in any range, and would outweigh everything else.
    let mut inside = counts[first..end].to_vec();
    if let Some(zeros) = inside.get_mut(ActivationHistogram::zero_bin() - first) {
        *zeros = 0;
    }
    let size = inside.len();
    let total = (seen.total() - counts[ActivationHistogram::zero_bin()]) as f64;
    if size == 0 || total == 0.0 {
        return f64::INFINITY;
    }
    let mut p: Vec<f64> = inside.iter().map(|count| *count as f64).collect();
    p[0] += counts[..first].iter().sum::<u64>() as f64;
    p[size - 1] += counts[end..].iter().sum::<u64>() as f64;
    let level = |bin: usize| if size < LEVELS { bin } else { bin * LEVELS / size };
    let (mut sums, mut filled) = ([0f64; LEVELS], [0f64; LEVELS]);
    for (bin, count) in inside.iter().enumerate().filter(|(_, count)| **count > 0) {
        sums[level(bin)] += *count as f64;
        filled[level(bin)] += 1.0;
    }
    let all: f64 = inside.iter().sum::<u64>() as f64;
    let term = |(bin, p): (usize, &f64)| {
        let p = p / total;
        let q = if inside[bin] > 0 { sums[level(bin)] / filled[level(bin)] / all } else { 0.0 };
        p * (p / if q > 0.0 { q } else { 1e-12 }).ln()
    };
    p.iter().enumerate().filter(|(_, p)| **p > 0.0).map(term).sum()
}

/// Steps of the search by squared error: 100 %, 98 %, … 20 % of an end.
const STEPS: usize = 41;

fn part(step: usize) -> f64 {
    1.0 - 0.02 * step as f64
}

/// Of the histogram alone, every value as important as every other.
fn squares(seen: &ActivationHistogram, wide: (f64, f64)) -> (f64, f64) {
    let filled: Vec<(f64, f64)> =
        seen.counts().iter().enumerate().filter(|(_, count)| **count > 0).map(|(bin, count)| (seen.middle(bin), *count as f64)).collect();
    search(wide, |range| squared_error(&filled, range))
}

/// Shrinks both ends together, then each alone.
fn search(wide: (f64, f64), error: impl Fn((f64, f64)) -> f64) -> (f64, f64) {
    let mut best = (wide, error(wide));
    // Which ends a search moves.
    for (low, high) in [(true, true), (true, false), (false, true)] {
        let start = best.0;
        let moved = |end: f64, moves: bool, step: usize| if moves { end * part(step) } else { end };
        for range in (0..STEPS).map(|step| (moved(start.0, low, step), moved(start.1, high, step))) {
            let error = error(range);
            if error < best.1 {
                best = (range, error);
            }
        }
    }
    best.0
}

/// What rounding to 256 levels of a range makes of weighted values.
pub(super) fn squared_error(values: &[(f64, f64)], (low, high): (f64, f64)) -> f64 {
    let scale = (high - low) / 255.0;
    if scale <= 0.0 || scale.is_nan() {
        return values.iter().map(|(value, count)| count * value * value).sum();
    }
    let zero = (-low / scale).round_ties_even().clamp(0.0, 255.0);
    let error = |(value, count): &(f64, f64)| {
        let level = ((value / scale).round_ties_even() + zero).clamp(0.0, 255.0);
        let error = value - (level - zero) * scale;
        count * error * error
    };
    values.iter().map(error).sum()
}

#[cfg(test)]
mod tests {
    use super::super::{Axis, Request};
    use super::*;

    /// The samples of `scripts/goldens-observers`.
    fn samples(name: &str, seed: u64, count: usize) -> Vec<f32> {
        let mut state = seed;
        let mut u = move || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f64 / f64::from(1u32 << 24)
        };
        let n = |u: &mut dyn FnMut() -> f64| (0..12).fold(0.0, |sum, _| sum + u()) - 6.0;
        let mut sample = || match name {
            "normal" => n(&mut u),
            "gelu" => {
                let m = n(&mut u) * 2.0;
                m * (0.5 + 0.3 * m).clamp(0.0, 1.0)
            }
            "heavy" => {
                let m = n(&mut u);
                m * m * m * if u() < 0.001 { 30.0 } else { 1.0 }
            }
            "relu" => n(&mut u).max(0.0),
            "uniform" => (u() * 2.0 - 1.0) * 0.0001,
            "zero" => 0.0,
            _ => 3.0,
        };
        (0..count).map(|_| sample() as f32).collect()
    }

    /// Statistics of one channel, a row for each sample.
    fn statistics(samples: &[Vec<f32>]) -> ValueStatistics {
        let mut seen = ValueStatistics::new(1, Request { axis: Axis::Last, histograms: true });
        samples.iter().for_each(|sample| seen.add("x", sample, &[sample.len(), 1], Axis::Last, &[sample.len()]).unwrap());
        seen
    }

    #[test]
    fn headroom_is_what_one_half_needs_beyond_the_other() {
        let uniform = |limit: f32| (0..2000).map(|i| limit * ((i * 797 % 2000) as f32 / 1000.0 - 1.0)).collect::<Vec<_>>();
        let alike = statistics(&[uniform(1.0), uniform(1.0)]);
        assert_eq!(with_headroom(ActivationObserver::Minmax, &alike, &[1.0], 0.0), ActivationObserver::Minmax.range(&alike, Some(&[1.0]), 0.0));
        let uneven = statistics(&[uniform(1.0), uniform(1.2)]);
        let ((low, high), (least, most)) = (with_headroom(ActivationObserver::Minmax, &uneven, &[1.0], 0.0), uneven.histogram.range());
        assert!((high / most - 1.2).abs() < 1e-6 && (low / least - 1.2).abs() < 1e-6, "{low} {high}, {least} {most}");
    }

    /// One of four samples has ten times larger values: each group contributes its own best range to the mean.
    #[test]
    fn the_range_is_the_mean_of_those_of_the_groups() {
        let uniform = |limit: f32| (0..2000).map(|i| limit * ((i * 797 % 2000) as f32 / 1000.0 - 1.0)).collect::<Vec<_>>();
        let range = |samples: &[Vec<f32>]| ActivationObserver::Mse.range(&statistics(samples), Some(&[1.0]), 0.0).1;
        let (one, ten) = (range(&[uniform(1.0)]), range(&[uniform(10.0)]));
        assert!((range(&vec![uniform(1.0); 9]) - one).abs() < 1e-6);
        let mixed = range(&[uniform(1.0), uniform(1.0), uniform(10.0), uniform(1.0)]);
        assert!((mixed - (3.0 * one + ten) / 4.0).abs() < 1e-5, "{mixed} {one} {ten}");
    }

    #[test]
    fn ranges_are_those_of_the_reference() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/observers.json");
        let golden: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        let mut checked = 0;
        for case in golden["cases"].as_array().unwrap() {
            let name = case["name"].as_str().unwrap();
            let values = samples(name, case["seed"].as_u64().unwrap(), case["count"].as_u64().unwrap() as usize);
            for (value, first) in values.iter().zip(case["first"].as_array().unwrap()) {
                assert_eq!(f64::from(*value), first.as_f64().unwrap(), "{name}");
            }
            let mut seen = ValueStatistics::new(1, Request { axis: Axis::Last, histograms: false });
            values.chunks(1000).for_each(|batch| seen.add("x", batch, &[batch.len(), 1], Axis::Last, &[batch.len()]).unwrap());
            let bin = case["radius"].as_f64().unwrap() / 4096.0;
            for (observer, wanted) in case["ranges"].as_object().unwrap() {
                let (kind, percentile) = match observer.as_str() {
                    "minmax" => (ActivationObserver::Minmax, 0.0),
                    "moving-average" => (ActivationObserver::MovingAverage, 0.0),
                    "percentile" => (ActivationObserver::Percentile, 99.99),
                    "percentile-99.9" => (ActivationObserver::Percentile, 99.9),
                    "entropy" => (ActivationObserver::Entropy, 0.0),
                    _ => (ActivationObserver::Mse, 0.0),
                };
                let (low, high) = kind.range(&seen, None, percentile);
                let (widest_low, widest_high) = ActivationObserver::Minmax.range(&seen, None, 0.0);
                assert!(low >= widest_low && high <= widest_high && low <= 0.0 && high >= 0.0, "{name} {observer}");
                let near = |ours: f32, theirs: &serde_json::Value| (f64::from(ours) - theirs.as_f64().unwrap()).abs() <= 1e-6 * bin.max(f64::from(ours.abs()));
                assert!(near(low, &wanted[0]) && near(high, &wanted[1]), "{name} {observer}: {low} {high}, not {wanted}");
                checked += 1;
            }
        }
        assert_eq!(checked, 42);
    }
}
