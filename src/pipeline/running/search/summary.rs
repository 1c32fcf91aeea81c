//! The section of the report about a search.

use super::{Budget, Found, LoadedBy, Point};
use crate::report::search::{FormatSearch, SearchPoint, SearchUnit};

/// Largest number of points of the front in a report.
const FRONT: usize = 200;

impl Found {
    /// The section of the report, for a limit; `None` without a chosen point.
    pub fn report(&self, target: LoadedBy, budget: Option<Budget>) -> Option<FormatSearch> {
        let chosen = self.chosen.as_ref()?;
        let front = self.front();
        let is_close = |point: &Point| match (point.predicted_ms, chosen.predicted_ms) {
            (Some(time), Some(limit)) => time <= 1.05 * limit,
            _ => point.bytes <= chosen.bytes + chosen.bytes / 20,
        };
        let larger = front.iter().rev().map(|assignment| self.point(assignment.options.clone())).find(is_close);
        let larger = larger.filter(|point| point.predicted < chosen.predicted);
        let step = front.len().div_ceil(FRONT).max(1);
        let thinned = front.iter().rev().step_by(step).map(|assignment| self.point(assignment.options.clone()));
        let mut thinned: Vec<SearchPoint> = thinned.map(|point| reported(&point)).collect();
        thinned.reverse();
        let format = |option: Option<&usize>| option.and_then(|option| self.formats.get(*option)).cloned().unwrap_or_default();
        let units = self.units.iter().zip(&chosen.options).enumerate().map(|(at, (unit, option))| {
            let score = unit.options.get(*option).copied().flatten();
            let other = larger.as_ref().and_then(|point| point.options.get(at)).filter(|other| *other != option);
            SearchUnit {
                name: unit.name.clone(),
                format: format(Some(option)),
                bytes: score.map_or(0, |score| score.bytes),
                loss: score.map_or(0.0, |score| score.loss),
                larger: other.map(|other| format(Some(other))),
                milliseconds: unit.milliseconds.get(*option).copied(),
            }
        });
        Some(FormatSearch {
            runtime: target.to_string(),
            measured_on: self.measured_on.clone(),
            max_kl: if let Some(Budget::Loss(limit)) = budget { Some(limit) } else { None },
            max_loss: if let Some(Budget::Drop(percent)) = budget { Some(percent) } else { None },
            max_latency_ms: if let Some(Budget::Latency(limit)) = budget { Some(limit) } else { None },
            loss: self.loss,
            times: self.times.clone(),
            metric: self.metric.clone(),
            methods: self.methods.clone(),
            chosen: reported(chosen),
            larger: larger.as_ref().map(reported),
            points: self.points.iter().map(reported).collect(),
            front: thinned,
            units: units.collect(),
        })
    }
}

fn reported(point: &Point) -> SearchPoint {
    SearchPoint {
        name: point.reference.clone(),
        bits: point.bits,
        bytes: point.bytes,
        predicted: point.predicted,
        measured: point.measured,
        score: point.score,
        predicted_ms: point.predicted_ms,
        measured_ms: point.measured_ms,
    }
}
