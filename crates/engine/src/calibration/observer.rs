//! Observers: choose the range of an 8-bit quantized activation from its statistics.

use serde::{Deserialize, Serialize};

use super::histogram::BINS;
use super::statistics::SampleRanges;
use super::weighted_error::search;
use super::{ActivationHistogram, Channels, Fold, ValueStatistics, WeightedError};

/// Method that chooses the range of activations.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum, schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum ActivationObserver {
    /// From the smallest to the largest value
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

impl ActivationObserver {
    /// Whether ranges follow from the joint histogram of all channels. `weighted`: whether the squared errors
    /// of channels have weights.
    pub fn needs_joint_histogram(self, weighted: bool) -> bool {
        match self {
            ActivationObserver::Minmax | ActivationObserver::MovingAverage => false,
            ActivationObserver::Percentile | ActivationObserver::Entropy => true,
            ActivationObserver::Mse => !weighted,
        }
    }

    /// Chooses a range. It includes zero, and does not exceed the observed minimum and maximum unless it is
    /// that of a few rows of a table, of which others will have larger values. `weights` are the weights of
    /// each channel's squared error, and `percentile` is read by [`ActivationObserver::Percentile`].
    pub fn range(self, statistics: &ValueStatistics, weights: Option<&[f64]>, percentile: f64) -> (f32, f32) {
        let (low, high) = statistics.range();
        let wide = (f64::from(low), f64::from(high));
        let of_histogram = |choose: &dyn Fn(&ActivationHistogram) -> (f64, f64)| statistics.histogram().map_or(wide, |histogram| choose(&histogram));
        let (low, high) = match self {
            ActivationObserver::Minmax => wide,
            ActivationObserver::MovingAverage => return statistics.running_range.range(),
            ActivationObserver::Percentile => of_histogram(&|histogram| percentiles(histogram, wide, percentile)),
            ActivationObserver::Entropy => of_histogram(&|histogram| entropy(histogram, wide)),
            ActivationObserver::Mse => weights
                .and_then(|weights| statistics.sample_ranges.as_ref().and_then(SampleRanges::mean).or_else(|| group_range(statistics, weights)))
                .unwrap_or_else(|| of_histogram(&|histogram| min_squared_error(histogram, wide))),
        };
        (low as f32, high as f32)
    }
}

/// Maximum number of values of samples with one row each, such as the rows of a table, for which the mean
/// over groups is not used.
const FEW_VALUES: u64 = 1 << 15;

/// The range that follows from the ranges that minimize the error of each group of samples.
fn group_range(statistics: &ValueStatistics, weights: &[f64]) -> Option<(f64, f64)> {
    if !has_few_rows(statistics, weights.len()) {
        return mean_group_range(statistics, weights);
    }
    let (low, high) = widened(ActivationObserver::Mse, second_group_range(statistics, weights)?, statistics, weights, 0.0);
    Some((low.into(), high.into()))
}

/// The mean of the ranges of groups. An outlier sample widens only
/// the range of its own group, while it would dominate a sum of squared errors over all samples.
fn mean_group_range(statistics: &ValueStatistics, weights: &[f64]) -> Option<(f64, f64)> {
    let (mut low, mut high, mut count) = (0.0, 0.0, 0.0);
    for group in statistics.groups() {
        let (range, values) = (WeightedError::from_channels(group, None, weights)?.best_range(), group.count() as f64);
        (low, high, count) = (low + values * f64::from(range.0), high + values * f64::from(range.1), count + values);
    }
    (count > 0.0).then(|| (low / count, high / count))
}

/// Whether samples are single rows, such as those of a table, with few values in total.
fn has_few_rows(statistics: &ValueStatistics, columns: usize) -> bool {
    let rows: u64 = statistics.groups().map(Channels::count).sum();
    statistics.rows_per_sample() == 1 && rows.saturating_mul(columns as u64) <= FEW_VALUES
}

/// The second largest ends of the ranges of groups. The extremes of a few rows are smaller than those of all
/// rows, so that their mean would clip, but a single row must not determine the range.
fn second_group_range(statistics: &ValueStatistics, weights: &[f64]) -> Option<(f32, f32)> {
    let ranges = statistics.groups().map(|group| Some(WeightedError::from_channels(group, None, weights)?.best_range()));
    let (mut lows, mut highs): (Vec<f32>, Vec<f32>) = ranges.collect::<Option<Vec<_>>>()?.into_iter().unzip();
    lows.sort_by(f32::total_cmp);
    highs.sort_by(|a, b| b.total_cmp(a));
    // Of two groups, the narrower one would clip half of the samples.
    let at = usize::from(lows.len() > 2);
    Some((*lows.get(at)?, *highs.get(at)?))
}

/// Candidate factors by which a range is widened.
const HEADROOM: [f64; 6] = [1.0, 1.1, 1.2, 1.35, 1.5, 1.75];

/// A range must not have more than this many times the error of the complete range, in both halves of the
/// samples.
const MAX_CLIPPING_ERROR: f64 = 4.0;

/// The range of an observer, widened by the factor that minimizes the error in two-fold cross-validation
/// over the samples. With [`ActivationObserver::Mse`], the complete range if clipping has a much larger
/// error: then a channel with outliers dominates the outputs of some samples.
pub fn with_headroom(observer: ActivationObserver, statistics: &ValueStatistics, weights: &[f64], percentile: f64) -> (f32, f32) {
    let range = observer.range(statistics, Some(weights), percentile);
    // The range of a few rows is always widened.
    let is_widened = observer == ActivationObserver::Mse && has_few_rows(statistics, weights.len());
    if is_widened { range } else { widened(observer, range, statistics, weights, percentile) }
}

/// A range, widened by the factor that [`with_headroom`] selects.
fn widened(observer: ActivationObserver, (low, high): (f32, f32), statistics: &ValueStatistics, weights: &[f64], percentile: f64) -> (f32, f32) {
    let wider = |(low, high): (f32, f32), by: f64| (f64::from(low) * by, f64::from(high) * by);
    let validated = |fold: &Fold| validated_range(observer, statistics, fold, None, weights, percentile);
    let Some(folds) = statistics.halves().and_then(|halves| halves.iter().map(validated).collect::<Option<Vec<_>>>()) else { return (low, high) };
    let mut errors = [0f64; HEADROOM.len()];
    for (range, held_out) in &folds {
        errors.iter_mut().zip(HEADROOM).for_each(|(error, by)| *error += held_out.error(wider(*range, by)));
    }
    let best = (0..errors.len()).reduce(|best, at| if errors[at] < errors[best] { at } else { best }).unwrap_or(0);
    let (chosen, complete) = (wider((low, high), HEADROOM[best]), statistics.range());
    let is_clipped = |held_out: &WeightedError| held_out.error(chosen) > MAX_CLIPPING_ERROR * held_out.error(wider(complete, 1.0));
    if observer == ActivationObserver::Mse && folds.iter().all(|(_, held_out)| is_clipped(held_out)) {
        return complete;
    }
    (chosen.0 as f32, chosen.1 as f32)
}

/// The range chosen for the first part of the samples, and the error function of the other part. Each
/// channel is multiplied by its factor. Returns `None` without histograms, or if `weights` does not have one
/// element per channel.
pub fn validated_range(
    observer: ActivationObserver,
    statistics: &ValueStatistics,
    fold: &Fold,
    factors: Option<&[f64]>,
    weights: &[f64],
    percentile: f64,
) -> Option<((f32, f32), WeightedError)> {
    let range = match observer {
        ActivationObserver::Mse => WeightedError::from_channels(&fold.fitted, factors, weights)?.best_range(),
        _ => {
            let mut part = statistics.part(fold.fitted.clone());
            factors.into_iter().for_each(|factors| part.multiply(factors));
            observer.range(&part, None, percentile)
        }
    };
    Some((range, WeightedError::from_channels(&fold.held_out, factors, weights)?))
}

/// The ends of the central `percentile` percent of the values, interpolated within their bins.
fn percentiles(histogram: &ActivationHistogram, (low, high): (f64, f64), percentile: f64) -> (f64, f64) {
    let outside = (1.0 - percentile / 100.0) / 2.0;
    let at = |fraction: f64| {
        let rank = fraction * histogram.total() as f64;
        let mut before = 0.0;
        for (bin, count) in histogram.counts().iter().enumerate().filter(|(_, count)| **count > 0) {
            let count = *count as f64;
            if before + count >= rank {
                return histogram.bin_center(bin) + ((rank - before) / count - 0.5) * histogram.width();
            }
            before += count;
        }
        high
    };
    (at(outside).clamp(low, 0.0), at(1.0 - outside).clamp(0.0, high))
}

/// Quantization levels of the candidate distribution.
const LEVELS: usize = 255;
/// Distance between candidate thresholds, and the smallest candidate, in bins.
const STRIDE: usize = 32;
const FIRST: usize = 128;

/// Clips both ends at the threshold with the smallest Kullback-Leibler divergence of the quantized
/// distribution (Migacz, 8-bit inference with TensorRT, 2017).
fn entropy(histogram: &ActivationHistogram, (low, high): (f64, f64)) -> (f64, f64) {
    let half = BINS / 2;
    let largest = low.abs().max(high);
    let last = ((largest / histogram.width()).ceil() as usize).next_multiple_of(STRIDE).clamp(FIRST, half);
    let mut best = (f64::INFINITY, (low, high));
    for threshold in (FIRST..=last).step_by(STRIDE) {
        let bound = threshold as f64 * histogram.width();
        let range = (low.max(-bound), high.min(bound));
        let divergence = divergence(histogram, range);
        if divergence < best.0 {
            best = (divergence, range);
        }
    }
    best.1
}

/// Kullback-Leibler divergence of the values, clipped to a range and quantized to [`LEVELS`] levels, from
/// the original distribution.
fn divergence(histogram: &ActivationHistogram, (low, high): (f64, f64)) -> f64 {
    let half = BINS as f64 / 2.0;
    let first = ((low / histogram.width()).floor() + half).clamp(0.0, half) as usize;
    let end = ((high / histogram.width()).floor() + half + 1.0).clamp(half + 1.0, BINS as f64) as usize;
    let counts = histogram.counts();
    // Zeros, such as the outputs of a ReLU, are exact in every range and would dominate the distribution.
    let mut inside = counts[first..end].to_vec();
    if let Some(zeros) = inside.get_mut(ActivationHistogram::zero_bin() - first) {
        *zeros = 0;
    }
    let size = inside.len();
    let total = (histogram.total() - counts[ActivationHistogram::zero_bin()]) as f64;
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

/// The range with the smallest unweighted squared error.
fn min_squared_error(histogram: &ActivationHistogram, wide: (f64, f64)) -> (f64, f64) {
    let filled = histogram.counts().iter().enumerate().filter(|(_, count)| **count > 0);
    let values: Vec<(f64, f64)> = filled.map(|(bin, count)| (histogram.bin_center(bin), *count as f64)).collect();
    search(wide, |range| squared_error(&values, range))
}

/// Weighted squared error of quantizing `(value, weight)` pairs to 256 levels of a range.
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

    /// The samples of `scripts/goldens observers`.
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

    /// Statistics of one channel, with one vector of values per sample.
    fn statistics(samples: &[Vec<f32>]) -> ValueStatistics {
        let mut statistics = ValueStatistics::new(1, &Request { axis: Axis::Last, histograms: true, joint: false, weights: None });
        samples.iter().for_each(|sample| statistics.add("x", (sample, false), &[sample.len(), 1], Axis::Last, &[sample.len()]).unwrap());
        statistics
    }

    #[test]
    fn rescaled_statistics_are_those_of_rescaled_values() {
        let factors = [0.5f32, 4.0, 2.0];
        let values: Vec<f32> = (0..300).map(|i| (i * 797 % 300) as f32 / 150.0 - 0.9).collect();
        let observed = |values: &[f32]| {
            let mut statistics = ValueStatistics::new(3, &Request { axis: Axis::Last, histograms: true, joint: true, weights: None });
            statistics.add("x", (values, false), &[100, 3], Axis::Last, &[100]).unwrap();
            statistics
        };
        let (mut found, expected) = (observed(&values), observed(&values.iter().zip(factors.iter().cycle()).map(|(x, by)| x * by).collect::<Vec<_>>()));
        found.multiply(&factors.map(f64::from));
        assert_eq!((&found.rows, found.channels().largest()), (&expected.rows, expected.channels().largest()));
        // Within the width 8/128 of a bin of the channel with the largest values.
        let ranges = [&found, &expected].map(|statistics| ActivationObserver::Percentile.range(statistics, None, 90.0));
        assert!((ranges[0].1 - ranges[1].1).abs() < 0.05 && (ranges[0].0 - ranges[1].0).abs() < 0.05, "{ranges:?}");
        let squares = found.channels().mean_squares().into_iter().zip(expected.channels().mean_squares());
        assert!(squares.into_iter().all(|(found, expected)| (found - expected).abs() < 1e-6 * expected));
    }

    #[test]
    fn headroom_covers_the_wider_half() {
        let uniform = |limit: f32| (0..2000).map(|i| limit * ((i * 797 % 2000) as f32 / 1000.0 - 1.0)).collect::<Vec<_>>();
        let equal = statistics(&[uniform(1.0), uniform(1.0)]);
        assert_eq!(with_headroom(ActivationObserver::Minmax, &equal, &[1.0], 0.0), ActivationObserver::Minmax.range(&equal, Some(&[1.0]), 0.0));
        let uneven = statistics(&[uniform(1.0), uniform(1.2)]);
        let ((low, high), (least, most)) = (with_headroom(ActivationObserver::Minmax, &uneven, &[1.0], 0.0), uneven.range());
        assert!((high / most - 1.2).abs() < 1e-6 && (low / least - 1.2).abs() < 1e-6, "{low} {high}, {least} {most}");
    }

    /// The error of clipping the rare large values of one channel is far larger than that of coarse steps.
    #[test]
    fn values_that_dominate_the_error_are_not_clipped() {
        let sample = |limit: f32| (0..2000).map(|i| if i % 500 == 0 { limit } else { (i * 797 % 2000) as f32 / 1000.0 - 1.0 }).collect::<Vec<_>>();
        let samples: Vec<Vec<f32>> = (0..16).map(|at| sample(if at % 4 < 2 { 1.0 } else { 100.0 })).collect();
        let statistics = statistics(&samples);
        assert!(ActivationObserver::Mse.range(&statistics, Some(&[1.0]), 0.0).1 < 60.0);
        assert_eq!(with_headroom(ActivationObserver::Mse, &statistics, &[1.0], 0.0), statistics.range());
    }

    /// One of four samples has ten times larger values: each group contributes its own best range to the
    /// mean.
    #[test]
    fn the_range_is_the_mean_of_the_group_ranges() {
        let uniform = |limit: f32| (0..2000).map(|i| limit * ((i * 797 % 2000) as f32 / 1000.0 - 1.0)).collect::<Vec<_>>();
        let range = |samples: &[Vec<f32>]| ActivationObserver::Mse.range(&statistics(samples), Some(&[1.0]), 0.0).1;
        let (one, ten) = (range(&[uniform(1.0)]), range(&[uniform(10.0)]));
        assert!((range(&vec![uniform(1.0); 9]) - one).abs() < 1e-6);
        let mixed = range(&[uniform(1.0), uniform(1.0), uniform(10.0), uniform(1.0)]);
        assert!((mixed - (3.0 * one + ten) / 4.0).abs() < 1e-5, "{mixed} {one} {ten}");
    }

    /// Rows of a table are samples of one row. Large values of two rows in different groups count, and those
    /// of a single row widen the range of the others by the largest candidate factor at most.
    #[test]
    fn one_of_few_rows_does_not_determine_the_range() {
        let range = |large: &[usize]| {
            let row = |at: usize| vec![if large.contains(&at) { 4.0 } else { (at * 7 % 16) as f32 / 8.0 - 1.0 }];
            ActivationObserver::Mse.range(&statistics(&(0..64).map(row).collect::<Vec<_>>()), Some(&[1.0]), 0.0).1
        };
        assert!(range(&[63]) < 2.0 && range(&[5, 62]) > 3.5, "{} {}", range(&[63]), range(&[5, 62]));
    }

    /// Nine images, so that two of them share a group: every image contributes its own best range, also to
    /// statistics of several images per batch. Multiplied statistics have no ranges of single images.
    #[test]
    fn the_range_of_images_is_the_mean_of_their_ranges() {
        let image = |limit: f32| (0..2000).map(move |i| limit * ((i * 797 % 2000) as f32 / 1000.0 - 1.0));
        let observed = |limits: &[f32], batch: usize| {
            let request = Request { axis: Axis::Second, histograms: true, joint: false, weights: Some([3.0].into()) };
            let mut statistics = ValueStatistics::new(1, &request);
            for limits in limits.chunks(batch) {
                let values: Vec<f32> = limits.iter().flat_map(|limit| image(*limit)).collect();
                statistics.add("x", (&values, false), &[limits.len(), 1, 2000], Axis::Second, &vec![2000; limits.len()]).unwrap();
            }
            statistics
        };
        let range = |statistics: &ValueStatistics| ActivationObserver::Mse.range(statistics, Some(&[3.0]), 0.0).1;
        let (one, ten) = (range(&observed(&[1.0], 1)), range(&observed(&[10.0], 1)));
        let mut limits = [1.0; 9];
        limits[8] = 10.0;
        for batch in [1, 2, 9] {
            let mut statistics = observed(&limits, batch);
            assert!((range(&statistics) - (8.0 * one + ten) / 9.0).abs() < 1e-5, "{batch}");
            statistics.multiply(&[2.0]);
            // The first and the last image share a group, whose best range is that of the larger one.
            assert!((range(&statistics) - 2.0 * (7.0 * one + 2.0 * ten) / 9.0).abs() < 0.1 * ten, "{batch}");
        }
    }

    #[test]
    fn ranges_match_the_reference() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/observers.json");
        let golden: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        let mut checked = 0;
        for case in golden["cases"].as_array().unwrap() {
            let name = case["name"].as_str().unwrap();
            let values = samples(name, case["seed"].as_u64().unwrap(), case["count"].as_u64().unwrap() as usize);
            for (value, first) in values.iter().zip(case["first"].as_array().unwrap()) {
                assert_eq!(f64::from(*value), first.as_f64().unwrap(), "{name}");
            }
            let mut statistics = ValueStatistics::new(1, &Request { axis: Axis::Last, histograms: false, joint: true, weights: None });
            values.chunks(1000).for_each(|batch| statistics.add("x", (batch, false), &[batch.len(), 1], Axis::Last, &[batch.len()]).unwrap());
            let bin = case["radius"].as_f64().unwrap() / 4096.0;
            for (observer, expected) in case["ranges"].as_object().unwrap() {
                let (kind, percentile) = match observer.as_str() {
                    "minmax" => (ActivationObserver::Minmax, 0.0),
                    "moving-average" => (ActivationObserver::MovingAverage, 0.0),
                    "percentile" => (ActivationObserver::Percentile, 99.99),
                    "percentile-99.9" => (ActivationObserver::Percentile, 99.9),
                    "entropy" => (ActivationObserver::Entropy, 0.0),
                    _ => (ActivationObserver::Mse, 0.0),
                };
                let (low, high) = kind.range(&statistics, None, percentile);
                let (widest_low, widest_high) = ActivationObserver::Minmax.range(&statistics, None, 0.0);
                assert!(low >= widest_low && high <= widest_high && low <= 0.0 && high >= 0.0, "{name} {observer}");
                let near = |actual: f32, expected: &serde_json::Value| {
                    (f64::from(actual) - expected.as_f64().unwrap()).abs() <= 1e-6 * bin.max(f64::from(actual.abs()))
                };
                assert!(near(low, &expected[0]) && near(high, &expected[1]), "{name} {observer}: {low} {high}, not {expected}");
                checked += 1;
            }
        }
        assert_eq!(checked, 42);
    }
}
