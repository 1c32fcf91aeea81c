//! How long a model takes.

use super::runner::{Runner, seconds};
use super::{Latency, Quantiles};
use crate::error::Result;
use crate::exec::Inputs;

/// Time that runs before the clock counts: caches fill, processors speed up.
const WARM_UP: f64 = 0.3;
/// Time that is measured, unless there are too few runs.
const MEASURED: f64 = 1.5;
/// Fewest runs that are measured, and most.
const RUNS: std::ops::RangeInclusive<usize> = 10..=200;

/// Times two models on one batch, in turns, so that what else the machine does meets both.
///
/// # Errors
/// A run fails.
pub fn latency(before: &mut dyn Runner, after: &mut dyn Runner, inputs: &Inputs, threads: usize) -> Result<Latency> {
    let mut spent = 0.0;
    while spent < WARM_UP {
        spent += seconds(before, inputs)? + seconds(after, inputs)?;
    }
    let mut times = (Vec::new(), Vec::new());
    let mut spent = 0.0;
    while times.0.len() < *RUNS.start() || (spent < MEASURED && times.0.len() < *RUNS.end()) {
        times.0.push(seconds(before, inputs)?);
        times.1.push(seconds(after, inputs)?);
        spent += times.0.last().unwrap_or(&0.0) + times.1.last().unwrap_or(&0.0);
    }
    let runs = times.0.len();
    let ratios = times.0.iter().zip(&times.1).map(|(before, after)| before / after).collect();
    let (before_ms, after_ms) = (quantiles(times.0), quantiles(times.1));
    let batch = inputs.get("input_ids").or_else(|| inputs.values().next()).map(|t| t.dims().to_vec()).unwrap_or_default();
    let speedup = before_ms.p50 / after_ms.p50;
    Ok(Latency { runtime: after.runtime().to_string(), threads, batch, runs, before_ms, after_ms, speedup, speedup_quartiles: Some(quartiles(ratios)) })
}

fn quantiles(mut seconds: Vec<f64>) -> Quantiles {
    seconds.sort_by(f64::total_cmp);
    Quantiles { p50: quantile(&seconds, 0.5) * 1e3, p95: quantile(&seconds, 0.95) * 1e3 }
}

fn quartiles(mut ratios: Vec<f64>) -> [f64; 2] {
    ratios.sort_by(f64::total_cmp);
    [quantile(&ratios, 0.25), quantile(&ratios, 0.75)]
}

/// The smallest of sorted values that so large a part of them does not exceed.
fn quantile(sorted: &[f64], part: f64) -> f64 {
    sorted.get(((sorted.len() as f64 * part).ceil() as usize).saturating_sub(1)).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sleeps for a time at each run.
    struct Sleeper(u64);

    impl Runner for Sleeper {
        fn runtime(&self) -> super::super::Runtime {
            super::super::Runtime::Candle
        }

        fn run(&mut self, _: &Inputs) -> Result<super::super::Outputs> {
            std::thread::sleep(std::time::Duration::from_millis(self.0));
            Ok(Default::default())
        }
    }

    #[test]
    fn a_faster_model_has_a_speedup_above_one() {
        let found = latency(&mut Sleeper(40), &mut Sleeper(4), &Inputs::new(), 1).unwrap();
        assert!(found.speedup > 1.0 && found.before_ms.p50 > found.after_ms.p50, "{found:?}");
    }

    #[test]
    fn quantiles_of_a_hundred() {
        let quantiles = quantiles((1..=100).rev().map(f64::from).collect());
        assert_eq!((quantiles.p50, quantiles.p95), (50_000.0, 95_000.0));
        assert_eq!(quartiles((1..=8).rev().map(f64::from).collect()), [2.0, 6.0]);
    }
}
