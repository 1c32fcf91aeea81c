//! The smallest point within a limit of the task's score.
//!
//! Scores are not additive, and expected losses only order the points. Points are therefore measured
//! ([`next_within`]) until no smaller one is left, or [`ROUNDS`](super::ROUNDS) are measured.

use super::measure::Measurement;
use super::{Budget, Found, Point, ROUNDS, Search};
use crate::error::Result;
use crate::pass::assignment::{Measured, next_within};

impl Search<'_> {
    /// The smallest measured point within the limit. All measured points are added to those of the search.
    pub(super) fn choose_by_drop(&self, percent: f64, found: &mut Found, measurement: &Measurement) -> Result<Point> {
        let (limit, front) = (Budget::Drop(percent), found.quantized_front());
        let is_within = |point: &Point| limit.allows(point, 0);
        for round in 0..ROUNDS {
            let Some(at) = next(&front, &found.points, is_within, percent / 100.0, round) else { break };
            let mut point = front[at].clone();
            measurement.measure(&found.units, &mut point)?;
            found.points.push(point);
        }
        found.points.sort_by_key(|point| point.bytes);
        let smallest = found.points.iter().find(|point| is_within(point)).cloned();
        smallest.ok_or_else(|| {
            let drops = found.points.iter().filter(|point| point.drop.is_some_and(f64::is_finite));
            let nearest = drops.min_by(|a, b| a.drop.partial_cmp(&b.drop).unwrap_or(std::cmp::Ordering::Equal));
            self.no_choice(limit, nearest.map(|point| limit.nearest(point, 0)))
        })
    }
}

/// The point of the front to measure next; `None` if no smaller one can be within the limit. `round`: number
/// of points that were measured before.
fn next(front: &[Point], measured: &[Point], is_within: impl Fn(&Point) -> bool, limit: f64, round: usize) -> Option<usize> {
    let costs: Vec<(u64, f64)> = front.iter().map(|point| (point.bytes, point.predicted)).collect();
    let known =
        |point: &Point| Measured { cost: point.bytes, loss: point.predicted, is_within: is_within(point), share: point.drop.map_or(0.0, |drop| limit / drop) };
    let is_new = |at: usize| measured.iter().all(|other| other.options != front[at].options);
    next_within(&costs, &measured.iter().map(known).collect::<Vec<_>>(), is_new, round)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(number: usize, count: usize) -> Point {
        let predicted = 0.5f64.powf(number as f64 / 3.0);
        Point { bytes: 100 + number as u64, predicted, options: vec![number, count], ..Point::default() }
    }

    /// The chosen point is within the limit, and close to the smallest one: within a sixteenth of the front.
    #[test]
    fn bisection_finds_the_smallest_point_within_the_limit() {
        for (count, exponent) in [1usize, 2, 5, 60, 200].into_iter().flat_map(|count| [0.3, 0.5, 1.0, 2.0].map(|exponent| (count, exponent))) {
            let front: Vec<Point> = (0..count).map(|number| point(number, count)).collect();
            let drop = |at: usize| 0.02 * front[at].predicted.powf(exponent);
            for enough in 0..=count {
                let limit = if enough < count { drop(enough) } else { 0.9 * drop(count - 1) };
                let measure = |at: usize| Point { drop: Some(drop(at)), ..front[at].clone() };
                let is_within = |point: &Point| point.drop.is_some_and(|drop| drop <= limit);
                let mut measured: Vec<Point> = [0, count / 2].map(measure).to_vec();
                for round in 0..ROUNDS {
                    let Some(at) = next(&front, &measured, is_within, limit, round) else { break };
                    assert!(measured.iter().all(|other| other.options != front[at].options), "{at} is measured twice");
                    measured.push(measure(at));
                }
                match measured.iter().filter(|point| is_within(point)).map(|point| point.bytes as usize - 100).min() {
                    None => assert_eq!(enough, count, "a point within the limit exists"),
                    Some(found) => assert!((enough..=enough + count / 16).contains(&found), "{found} instead of {enough} of {count}"),
                }
            }
        }
    }

    /// If no point exceeds the limit, the smallest one is tried, and nothing else.
    #[test]
    fn the_smallest_point_ends_the_search() {
        let front: Vec<Point> = (0..9).map(|number| point(number, 9)).collect();
        let within = |at: usize| Point { drop: Some(0.0), ..front[at].clone() };
        let next = |measured: &[Point]| next(&front, measured, |point| point.drop == Some(0.0), 0.01, 0);
        assert_eq!(next(&[within(4)]), Some(0));
        assert_eq!(next(&[within(4), within(0)]), None);
    }
}
