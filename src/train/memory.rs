//! What the process takes of the machine's memory, over time.

use std::time::{Duration, Instant};

use serde::Serialize;

use crate::work::resident;

/// Time between two points at least.
const EVERY: Duration = Duration::from_millis(200);
/// Points that are kept; then every second one goes.
const POINTS: usize = 512;

/// Memory at one time.
#[derive(Debug, Clone, Serialize)]
pub struct Point {
    /// Since training began.
    pub seconds: f64,
    /// Steps that were done.
    pub step: u64,
    /// Resident memory of the process.
    pub rss_bytes: Option<u64>,
    /// What tensors of training take by the memory tracker.
    pub device_bytes: u64,
    /// What was being done.
    pub phase: &'static str,
}

/// Memory over time.
#[derive(Debug)]
pub struct Timeline {
    start: Instant,
    last: Option<Instant>,
    pause: Duration,
    /// The points.
    pub points: Vec<Point>,
}

impl Timeline {
    /// Begins now.
    pub fn new() -> Timeline {
        Timeline { start: Instant::now(), last: None, pause: EVERY, points: Vec::new() }
    }

    /// Adds a point, unless the last one is too near.
    pub fn add(&mut self, phase: &'static str, step: u64, device_bytes: u64) {
        if self.last.is_some_and(|last| last.elapsed() < self.pause) {
            return;
        }
        self.last = Some(Instant::now());
        self.points.push(Point { seconds: self.start.elapsed().as_secs_f64(), step, rss_bytes: resident(), device_bytes, phase });
        if self.points.len() >= POINTS {
            let mut number = 0;
            self.points.retain(|_| {
                number += 1;
                number % 2 == 1
            });
            self.pause *= 2;
        }
    }

    /// Growth of resident memory from the second quarter of the steps to the last: bytes, and over how many steps.
    ///
    /// Memory that rises to a level and stays there is no leak, so growth must go on: the third quarter lies between.
    pub fn growth(&self) -> Option<(u64, u64)> {
        let quarter = self.points.len() / 4;
        if quarter < 4 {
            return None;
        }
        let least = |points: &[Point]| points.iter().filter_map(|point| point.rss_bytes).min();
        let [second, third, last] = [1, 2, 3].map(|number| least(&self.points[number * quarter..(number + 1) * quarter]));
        let (second, third, last) = (second?, third?, last?);
        let steps = self.points[4 * quarter - 1].step - self.points[quarter].step;
        let grown = last.checked_sub(second).filter(|grown| third > second && last > third && *grown > GROWTH)?;
        Some((grown, steps))
    }
}

/// Growth below this is no leak but how allocators work.
const GROWTH: u64 = 64 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    fn timeline(rss: impl Fn(u64) -> u64) -> Timeline {
        let point = |step| Point { seconds: step as f64, step, rss_bytes: Some(rss(step) << 20), device_bytes: 0, phase: "training" };
        Timeline { points: (0..100).map(point).collect(), ..Timeline::new() }
    }

    #[test]
    fn what_goes_on_growing_is_a_leak() {
        assert!(timeline(|step| 100 + 5 * step).growth().is_some());
        assert!(timeline(|step| 100 + (5 * step).min(150)).growth().is_none());
        assert!(timeline(|step| 1000 + 40 * (step % 2)).growth().is_none());
        assert!(timeline(|step| 1000 - step).growth().is_none());
    }

    #[test]
    fn points_are_thinned_out() {
        let mut timeline = Timeline { pause: Duration::ZERO, ..Timeline::new() };
        (0..2000).for_each(|step| timeline.add("training", step, 0));
        assert!(timeline.points.len() <= POINTS && timeline.points[0].step == 0);
        assert!(resident().is_some_and(|bytes| bytes > 1 << 20));
    }
}
