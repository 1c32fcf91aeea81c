//! Latency measurement.

use super::runner::{Runner, seconds};
use super::{Latency, Quantiles};
use crate::error::Result;
use crate::exec::Inputs;

/// Warm-up time in seconds.
const WARM_UP: f64 = 0.3;
/// Measurement time in seconds, unless it would result in too few runs.
const MEASURED: f64 = 1.5;
/// Minimum and maximum number of measured runs.
const RUNS: std::ops::RangeInclusive<usize> = 10..=200;

/// Measures two models, each on one batch, in alternation, so that other load on the machine affects both.
pub fn latency(before: &mut dyn Runner, after: &mut dyn Runner, [first, second]: [&Inputs; 2], threads: usize) -> Result<Latency> {
    let mut spent = 0.0;
    while spent < WARM_UP {
        spent += seconds(before, first)? + seconds(after, second)?;
    }
    let mut times = (Vec::new(), Vec::new());
    let mut spent = 0.0;
    while times.0.len() < *RUNS.start() || (spent < MEASURED && times.0.len() < *RUNS.end()) {
        times.0.push(seconds(before, first)?);
        times.1.push(seconds(after, second)?);
        spent += times.0.last().unwrap_or(&0.0) + times.1.last().unwrap_or(&0.0);
    }
    let batch = second.get("input_ids").or_else(|| second.values().next()).map(|t| t.dims().to_vec()).unwrap_or_default();
    Ok(summarize(times, after.runtime().to_string(), threads, batch))
}

/// Quantiles and ratios of the times of both models, in seconds, measured in pairs.
fn summarize((before, after): (Vec<f64>, Vec<f64>), runtime: String, threads: usize, batch: Vec<usize>) -> Latency {
    let runs = before.len();
    let [low, speedup, high] = quartiles(before.iter().zip(&after).map(|(before, after)| before / after).collect());
    let (before_ms, after_ms) = (quantiles(before), quantiles(after));
    Latency { runtime, threads, batch, runs, before_ms, after_ms, speedup, speedup_quartiles: Some([low, high]) }
}

fn quantiles(mut seconds: Vec<f64>) -> Quantiles {
    seconds.sort_by(f64::total_cmp);
    Quantiles { p50: quantile(&seconds, 0.5) * 1e3, p95: quantile(&seconds, 0.95) * 1e3 }
}

fn quartiles(mut ratios: Vec<f64>) -> [f64; 3] {
    ratios.sort_by(f64::total_cmp);
    [0.25, 0.5, 0.75].map(|fraction| quantile(&ratios, fraction))
}

/// The quantile of sorted values at a fraction, without interpolation.
fn quantile(sorted: &[f64], fraction: f64) -> f64 {
    sorted.get(((sorted.len() as f64 * fraction).ceil() as usize).saturating_sub(1)).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_faster_model_has_a_speedup_above_one() {
        let found = summarize((vec![4.0, 8.0, 12.0, 16.0], vec![2.0, 2.0, 2.0, 2.0]), "runtime".into(), 1, vec![1]);
        assert_eq!((found.runs, found.before_ms.p50, found.after_ms.p50, found.speedup), (4, 8000.0, 2000.0, 4.0));
        assert_eq!(found.speedup_quartiles, Some([2.0, 6.0]));
    }

    /// The ratio of the medians is 0.5 here, outside of the quartiles.
    #[test]
    fn the_speedup_is_that_of_consecutive_runs() {
        let found = summarize((vec![1.0, 1.0, 2.0, 8.0, 8.0], vec![1.0, 1.0, 4.0, 4.0, 8.0]), "runtime".into(), 1, vec![1]);
        assert_eq!((found.before_ms.p50, found.after_ms.p50), (2000.0, 4000.0));
        assert_eq!((found.speedup, found.speedup_quartiles), (1.0, Some([1.0, 1.0])));
    }

    #[test]
    fn quantiles_of_a_hundred() {
        let quantiles = quantiles((1..=100).rev().map(f64::from).collect());
        assert_eq!((quantiles.p50, quantiles.p95), (50_000.0, 95_000.0));
        assert_eq!(quartiles((1..=8).rev().map(f64::from).collect()), [2.0, 4.0, 6.0]);
    }
}
