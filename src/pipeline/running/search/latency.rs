//! The point with the least loss within a limit of the latency.
//!
//! Latencies are not additive: the predictions lead to points of the front that are measured, until the
//! point with the least expected loss that is within the limit is known, or [`ROUNDS`](super::ROUNDS) are
//! measured. A prediction is expected to err like that of the nearest measured point.

use super::budget::rounded_up;
use super::formats::Formats;
use super::measure::Measurement;
use super::times::{Times, groups};
use super::{Budget, Found, Point, ROUNDS, Search, measure};
use crate::error::{Error, Result};
use crate::report::format::milliseconds;

impl Search<'_> {
    /// Measures the times of all units, and fits them to the latencies of the uniform formats.
    ///
    /// # Errors
    /// If a measurement fails, or if neither a uniform format nor the fastest point is within the limit.
    pub(super) fn measure_times(&self, limit: f64, formats: &dyn Formats, found: &mut Found, times: &mut Times) -> Result<()> {
        let groups = groups(self.model, &self.model.graph()?, &found.units);
        times.measure_units(&mut found.units, &groups)?;
        found.original_ms = Some(times.table().original_ms);
        let mut measured: Vec<Point> = formats.references(&found.units)?.into_iter().map(|(name, options)| found.reference(name, options)).collect();
        measured.iter_mut().try_for_each(|point| times.measure(&found.units, point))?;
        found.fit_times(&measured);
        if let Some(mut fastest) = found.quantized_front().into_iter().next() {
            times.measure(&found.units, &mut fastest)?;
            measured.push(fastest);
        }
        if points_within(&measured, limit).next().is_none() {
            return Err(self.no_choice(Budget::Latency(limit), nearest(&measured)));
        }
        Ok(())
    }

    /// The point with the least expected loss of all points that were measured within the limit.
    pub(super) fn choose_by_latency(&self, limit: f64, found: &mut Found, times: &mut Times, measurement: &Measurement) -> Result<Point> {
        let chosen = least_loss_within(limit, found, |found, point| times.measure(&found.units, point))?;
        let mut chosen = chosen.ok_or_else(|| self.no_choice(Budget::Latency(limit), nearest(&found.points)))?;
        measure(found, &mut chosen, measurement)?;
        Ok(chosen)
    }
}

/// An error if the original model is within the limit.
pub(super) fn require_slower(original_ms: f64, limit: f64) -> Result<()> {
    if original_ms > limit {
        return Ok(());
    }
    let reason = format!(
        "the original model takes {}, which is within the limit `{}`, so that there is nothing to do",
        milliseconds(original_ms),
        Budget::Latency(limit)
    );
    Err(Error::run("auto", reason, "use a lower limit"))
}

/// The points that were measured within the limit.
fn points_within(points: &[Point], limit: f64) -> impl Iterator<Item = &Point> {
    points.iter().filter(move |point| point.measured_ms.is_some_and(|time| time <= limit))
}

/// The limit that the fastest measured point meets.
fn nearest(points: &[Point]) -> Option<Budget> {
    let fastest = points.iter().filter_map(|point| point.measured_ms).min_by(f64::total_cmp)?;
    Some(Budget::Latency(rounded_up(fastest)))
}

/// Measures points of the front, which are added to the measured points, and returns the one with the least
/// expected loss within the limit.
fn least_loss_within(limit: f64, found: &mut Found, mut measure: impl FnMut(&Found, &mut Point) -> Result<()>) -> Result<Option<Point>> {
    let front = found.quantized_front();
    for round in 1..=ROUNDS {
        let Some(at) = next(&front, &found.points, limit, round == ROUNDS) else { break };
        let mut point = front[at].clone();
        measure(found, &mut point)?;
        found.points.push(point);
    }
    found.points.sort_by_key(|point| point.bytes);
    let chosen = points_within(&found.points, limit).filter(|point| !found.is_floats(point)).min_by(|a, b| a.predicted.total_cmp(&b.predicted));
    Ok(chosen.map(|point| Point { reference: None, ..point.clone() }))
}

/// The point of the front to measure next: the one with the least loss that is expected to be within the
/// limit, if its loss is less than that of all measured points within the limit. If none is expected to be
/// within it, the fastest one, unless a measured point is. The fastest one is also the last to try. The
/// `front` is sorted by ascending time and descending loss.
fn next(front: &[Point], measured: &[Point], limit: f64, is_last: bool) -> Option<usize> {
    let best = points_within(measured, limit).map(|point| point.predicted).fold(f64::INFINITY, f64::min);
    let errors: Vec<(f64, f64)> = measured.iter().filter_map(|point| Some((point.predicted_ms?, point.measured_ms? - point.predicted_ms?))).collect();
    let expected = |point: &Point| {
        let predicted = point.predicted_ms.unwrap_or(f64::INFINITY);
        let nearest = errors.iter().min_by(|a, b| (a.0 - predicted).abs().total_cmp(&(b.0 - predicted).abs()));
        predicted + nearest.map_or(0.0, |(_, error)| *error)
    };
    let is_open = |point: &Point| point.predicted < best && measured.iter().all(|other| other.options != point.options || other.measured_ms.is_none());
    let fastest = || if best.is_infinite() { front.iter().position(is_open) } else { None };
    let within = || front.iter().rposition(|point| is_open(point) && expected(point) <= limit);
    if is_last { fastest().or_else(within) } else { within().or_else(fastest) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::testing::found;
    use super::*;

    /// Time and loss of all choices of formats, except for floats only.
    fn every(found: &Found) -> Vec<Point> {
        let count = found.units.len();
        let options = |number: usize| (0..count).map(|at| number / 3usize.pow(at as u32) % 3).collect::<Vec<_>>();
        (0..3usize.pow(count as u32)).map(|number| found.point(options(number))).filter(|point| !found.is_floats(point)).collect()
    }

    proptest! {
        /// With additive times, no choice of formats within the limit has less expected loss, by more than
        /// one percent.
        #[test]
        fn exhaustive_search_finds_nothing_better(times in prop::collection::vec([-3.0f64..0.5, -3.0f64..0.5], 1..6), limit in 8.0f64..20.0) {
            let mut found = found(&times);
            let all = every(&found);
            let exact = |found: &Found, point: &mut Point| {
                point.measured_ms = found.point(point.options.clone()).predicted_ms;
                Ok(())
            };
            let chosen = least_loss_within(limit, &mut found, exact).unwrap();
            // Times are rounded to nanoseconds.
            let within = all.iter().filter(|point| point.predicted_ms.unwrap() <= limit - 1e-5).map(|point| point.predicted);
            let best = within.fold(f64::INFINITY, f64::min);
            match chosen {
                Some(point) => prop_assert!(point.measured_ms.unwrap() <= limit && point.predicted <= 1.01 * best, "{} instead of {best}", point.predicted),
                None => prop_assert!(best.is_infinite(), "{best}"),
            }
        }

        /// The measured latency is within the limit although predictions err, and an error names a limit that
        /// was measured.
        #[test]
        fn measured_latencies_are_within_the_limit(times in prop::collection::vec([-3.0f64..0.0, -3.0f64..0.0], 2..6), factor in 0.8f64..1.2, limit in 6.0f64..20.0) {
            let mut found = found(&times);
            let slower = |_: &Found, point: &mut Point| {
                point.measured_ms = point.predicted_ms.map(|time| 1.0 + factor * time);
                Ok(())
            };
            let fastest = every(&found).iter().filter_map(|point| point.predicted_ms).map(|time| 1.0 + factor * time).fold(f64::INFINITY, f64::min);
            match least_loss_within(limit, &mut found, slower).unwrap() {
                Some(point) => prop_assert!(point.measured_ms.unwrap() <= limit),
                None => {
                    prop_assert!(fastest > limit - 1e-5, "{fastest} is within {limit}");
                    let Some(Budget::Latency(nearest)) = nearest(&found.points) else { panic!("no limit") };
                    prop_assert!(nearest >= fastest - 1e-5 && nearest <= 1.02 * fastest, "{nearest} {fastest}");
                }
            }
        }
    }

    #[test]
    fn a_limit_that_the_original_model_meets_is_an_error() {
        require_slower(5.1, 5.0).unwrap();
        let error = require_slower(4.2, 5.0).unwrap_err().to_string();
        assert!(error.contains("the original model takes 4.20 ms, which is within the limit `5ms`"), "{error}");
    }
}
