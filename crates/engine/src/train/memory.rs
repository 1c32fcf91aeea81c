//! Timeline of the process's memory during training.

use std::time::{Duration, Instant};

use serde::Serialize;

use crate::work::resident;

/// Minimum time between two points.
const MIN_INTERVAL: Duration = Duration::from_millis(200);
/// Number of points at which every second one is dropped.
const MAX_POINTS: usize = 512;

/// Memory at one point in time.
#[derive(Debug, Clone, Serialize)]
pub struct Point {
    /// Seconds since the start of the training.
    pub seconds: f64,
    /// Completed steps.
    pub step: u64,
    /// Resident set size of the process.
    pub rss_bytes: Option<u64>,
    /// Bytes of the tensors of the training, from the memory tracker.
    pub device_bytes: u64,
    /// Current phase.
    pub phase: &'static str,
}

/// Memory over time.
#[derive(Debug)]
pub struct Timeline {
    start: Instant,
    last: Option<Instant>,
    interval: Duration,
    /// Points in order of time.
    pub points: Vec<Point>,
}

impl Timeline {
    /// An empty timeline that starts now.
    pub fn new() -> Timeline {
        Timeline { start: Instant::now(), last: None, interval: MIN_INTERVAL, points: Vec::new() }
    }

    /// Adds a point, unless the last one is too recent.
    pub fn add(&mut self, phase: &'static str, step: u64, device_bytes: u64) {
        if self.last.is_some_and(|last| last.elapsed() < self.interval) {
            return;
        }
        self.last = Some(Instant::now());
        self.points.push(Point { seconds: self.start.elapsed().as_secs_f64(), step, rss_bytes: resident(), device_bytes, phase });
        if self.points.len() >= MAX_POINTS {
            let mut number = 0;
            self.points.retain(|_| {
                number += 1;
                number % 2 == 1
            });
            self.interval *= 2;
        }
    }

    /// Growth of resident memory from the second to the last quarter of the steps: bytes, and number of
    /// steps.
    ///
    /// Returns `None` unless memory also grew from the second to the third quarter and from the third to
    /// the last: memory that rises to a plateau is not a leak.
    pub fn growth(&self) -> Option<(u64, u64)> {
        let quarter = self.points.len() / 4;
        if quarter < 4 {
            return None;
        }
        let least = |points: &[Point]| points.iter().filter_map(|point| point.rss_bytes).min();
        let [second, third, last] = [1, 2, 3].map(|number| least(&self.points[number * quarter..(number + 1) * quarter]));
        let (second, third, last) = (second?, third?, last?);
        let steps = self.points[4 * quarter - 1].step - self.points[quarter].step;
        let grown = last.checked_sub(second).filter(|grown| third > second && last > third && *grown > MIN_GROWTH)?;
        Some((grown, steps))
    }
}

/// Smaller growth is attributed to the allocator.
const MIN_GROWTH: u64 = 64 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    fn timeline(rss: impl Fn(u64) -> u64) -> Timeline {
        let point = |step| Point { seconds: step as f64, step, rss_bytes: Some(rss(step) << 20), device_bytes: 0, phase: "training" };
        Timeline { points: (0..100).map(point).collect(), ..Timeline::new() }
    }

    #[test]
    fn only_continued_growth_is_a_leak() {
        // From the least of steps 25 to 49 to the least of steps 75 to 99.
        assert_eq!(timeline(|step| 100 + 5 * step).growth(), Some((250 << 20, 74)));
        assert!(timeline(|step| 100 + (5 * step).min(150)).growth().is_none());
        assert!(timeline(|step| 1000 + 40 * (step % 2)).growth().is_none());
        assert!(timeline(|step| 1000 - step).growth().is_none());
    }

    #[test]
    fn points_are_thinned_out() {
        let mut timeline = Timeline { interval: Duration::ZERO, ..Timeline::new() };
        (0..2000).for_each(|step| timeline.add("training", step, 0));
        assert!(timeline.points.len() <= MAX_POINTS && timeline.points[0].step == 0);
        assert!(resident().is_some_and(|bytes| bytes > 1 << 20));
    }
}
