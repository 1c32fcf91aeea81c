//! Points of a search, and the front.

use std::cmp::Ordering;
use std::ops::Range;

use super::formats::Unit;
use super::{Budget, Found, Point};
use crate::error::counted;
use crate::pass::assignment::{Assignment, Choice, front, undominated};

impl Found {
    /// The assignments that no other one beats, in loss and size, or in loss and time if times are known.
    pub(super) fn front(&self) -> Vec<Assignment> {
        let (count, each) = (self.formats.len(), self.structure_options());
        let fronts = (0..count).step_by(each).flat_map(|first| self.front_of(first..first + each));
        undominated(fronts.collect(), |assignment| (assignment.cost, assignment.loss))
    }

    /// Number of options of a structure.
    pub(super) fn structure_options(&self) -> usize {
        self.structure_options.unwrap_or(self.formats.len()).max(1)
    }

    /// All units as floats, in the structure of an option.
    pub(super) fn floats(&self, option: usize) -> Vec<usize> {
        let each = self.structure_options();
        vec![option - option % each + each - 1; self.units.len()]
    }

    /// The front with these options only.
    fn front_of(&self, options: Range<usize>) -> Vec<Assignment> {
        let choices = |unit: &Unit| unit.choices().into_iter().filter(|(option, _)| options.contains(option)).collect();
        let units: Vec<Vec<(usize, Choice)>> = self.units.iter().map(choices).collect();
        let only: Vec<Vec<Choice>> = units.iter().map(|unit| unit.iter().map(|(_, choice)| *choice).collect()).collect();
        let mut assignments = front(&only);
        for assignment in &mut assignments {
            assignment.options.iter_mut().zip(&units).for_each(|(option, unit)| *option = unit[*option].0);
        }
        assignments
    }

    /// The points of the front by ascending size or time, without that of floats.
    pub(super) fn quantized_front(&self) -> Vec<Point> {
        let points = self.front().into_iter().map(|assignment| self.point(assignment.options));
        points.filter(|point| !self.is_floats(point)).collect()
    }

    /// Whether all units of a point are floats.
    pub(super) fn is_floats(&self, point: &Point) -> bool {
        point.options.iter().all(|option| option + 1 == self.formats.len())
    }

    /// Multiplies the losses of each format by its factor, except measured losses.
    pub(super) fn scale(&mut self, factors: &[f64]) {
        for unit in self.units.iter_mut().filter(|unit| !unit.measured) {
            for (option, factor) in unit.options.iter_mut().zip(factors) {
                option.iter_mut().for_each(|option| option.loss *= factor);
            }
        }
        self.predict_points();
    }

    /// Sets the expected losses of the points.
    pub(super) fn predict_points(&mut self) {
        for at in 0..self.points.len() {
            self.points[at].predicted = self.point(self.points[at].options.clone()).predicted;
        }
    }

    /// A point with these formats.
    pub(super) fn point(&self, options: Vec<usize>) -> Point {
        let chosen = || self.units.iter().zip(&options).filter_map(|(unit, option)| unit.options.get(*option).copied().flatten());
        let bytes: u64 = chosen().map(|format| format.bytes).sum();
        let parameters: u64 = self.units.iter().map(|unit| unit.parameters).sum();
        let times = || self.units.iter().zip(&options).filter_map(|(unit, option)| unit.milliseconds.get(*option));
        let predicted_ms = self.original_ms.map(|original| original + times().sum::<f64>());
        Point {
            predicted_ms,
            bits: 8.0 * bytes as f64 / parameters.max(1) as f64,
            bytes: bytes + self.other_bytes,
            predicted: chosen().map(|format| format.loss).sum(),
            options,
            ..Point::default()
        }
    }

    /// The chosen point, or a measured one that is better within the same limit: with less loss for a limit
    /// of the size, or smaller for one of the loss. Predictions may order them differently. `input` is the
    /// size of the input.
    pub(super) fn best(&self, budget: Option<Budget>, input: u64, chosen: Point) -> Point {
        let rank = |point: &Point| match (budget?, point.measured.filter(|_| !self.is_floats(point))?) {
            (Budget::Loss(limit), measured) => (measured <= limit).then_some((point.bytes as f64, measured)),
            (budget, measured) => (budget.is_size() && budget.allows(point, input)).then_some((measured, point.bytes as f64)),
        };
        let Some(own) = rank(&chosen) else { return chosen };
        let better = self.points.iter().filter_map(|point| Some((rank(point).filter(|found| *found < own)?, point)));
        let best = better.min_by(|(one, _), (other, _)| one.partial_cmp(other).unwrap_or(Ordering::Equal));
        best.map_or(chosen, |(_, point)| Point { reference: None, ..point.clone() })
    }

    /// The point of a common mixture.
    pub(super) fn reference(&self, name: String, options: Vec<usize>) -> Point {
        Point { reference: Some(name), ..self.point(options) }
    }

    /// Numbers of units of a point by format, in words: "12 in W4A16".
    pub fn summary(&self, point: &Point) -> String {
        let mut counts = vec![0usize; self.formats.len()];
        let weighted = || self.units.iter().zip(&point.options).filter(|(unit, _)| !unit.weights.is_empty());
        weighted().for_each(|(_, option)| counts[*option] += 1);
        let parts = self.formats.iter().zip(counts).filter(|(_, count)| *count > 0).map(|(format, count)| format!("{count} in {format}"));
        format!("{}: {}", counted(weighted().count(), "unit"), parts.collect::<Vec<_>>().join(", "))
    }
}

/// The sum of the losses of the units with each format: of the `measured` units, or of the others.
pub(super) fn by_format(units: &[Unit], options: &[usize], formats: usize, measured: bool) -> Vec<f64> {
    let mut sums = vec![0.0; formats];
    for (unit, option) in units.iter().zip(options).filter(|(unit, _)| unit.measured == measured) {
        sums[*option] += unit.options[*option].map_or(0.0, |option| option.loss);
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pass::Score;

    fn found() -> Found {
        let unit = |name: &str, losses: [f64; 2]| Unit {
            name: name.to_owned(),
            weights: vec![format!("{name}.weight")],
            parameters: 1000,
            options: vec![Some(Score { loss: losses[0], bytes: 500 }), Some(Score { loss: losses[1], bytes: 1000 }), Some(Score { loss: 0.0, bytes: 2000 })],
            ..Unit::new(String::new(), 0)
        };
        let units = vec![
            unit("a", [8.0, 1.0]),
            unit("b", [2.0, 1.5]),
            Unit { options: vec![None, Some(Score { loss: 0.1, bytes: 1000 }), Some(Score { loss: 0.0, bytes: 2000 })], ..unit("c", [0.0, 0.0]) },
        ];
        let formats = ["W4A16", "W8A16", "floats"].map(str::to_owned).to_vec();
        Found { formats, units, other_bytes: 100, ..Found::default() }
    }

    #[test]
    fn the_front_uses_only_formats_that_units_have() {
        let found = found();
        let front = found.front();
        assert_eq!(front[0].options, [0, 0, 1]);
        let point = found.point(front[1].options.clone());
        assert_eq!((point.options.as_slice(), point.bytes, point.predicted), (&[1, 0, 1][..], 2600, 3.1));
        assert!((point.bits - 8.0 * 2500.0 / 3000.0).abs() < 1e-9 && point.reference.is_none());
    }

    /// Predictions may order points differently from measurements.
    #[test]
    fn a_better_measured_point_is_chosen() {
        let mut found = found();
        let point = |options: [usize; 3], measured: f64| Point { measured: Some(measured), ..found.point(options.to_vec()) };
        let [small, chosen, large, floats] = [([0, 0, 1], 0.2), ([1, 0, 1], 0.3), ([1, 1, 1], 0.1), ([2, 2, 2], 0.0)].map(|(o, m)| point(o, m));
        found.points = vec![Point { reference: Some("common".to_owned()), ..small.clone() }, large.clone(), floats];
        let best = |budget: Budget| found.best(Some(budget), 6100, chosen.clone());
        assert_eq!(best(Budget::Bytes(chosen.bytes)), small);
        assert_eq!(best(Budget::Bytes(9999)), large);
        assert_eq!([0.3, 0.25, 0.1].map(|limit| found.best(Some(Budget::Loss(limit)), 6100, large.clone())), [small.clone(), small, large.clone()]);
        assert_eq!((found.best(Some(Budget::Drop(1.0)), 6100, chosen.clone()), found.best(None, 6100, chosen.clone())), (chosen.clone(), chosen));
    }

    /// Measured losses are not corrected by the measurements of mixtures.
    #[test]
    fn measured_units_are_not_scaled() {
        let mut found = found();
        found.units[0].measured = true;
        found.points = vec![found.reference("all".to_owned(), vec![0, 0, 1])];
        assert_eq!([false, true].map(|measured| by_format(&found.units, &[0, 0, 1], 3, measured)), [[2.0, 0.1, 0.0], [8.0, 0.0, 0.0]]);
        found.scale(&[0.5, 2.0, 1.0]);
        assert!((found.points[0].predicted - (8.0 + 0.5 * 2.0 + 2.0 * 0.1)).abs() < 1e-9);
    }

    /// All units have options of the same structure. Of all such choices, none beats the front.
    #[test]
    fn the_front_has_the_best_structure_for_each_size() {
        let option = |loss: f64, bytes: u64| Some(Score { loss, bytes });
        let unit = |at: u64| {
            let loss = at as f64 + 1.0;
            let options = vec![option(3.0 * loss, 30 + at), option(0.0, 60 + at), option(2.0 * loss, 50), option(0.0, 100)];
            Unit { weights: vec![at.to_string()], parameters: 100, options, ..Unit::new(at.to_string(), 0) }
        };
        let widths = Unit { measured: true, options: vec![None, option(1.5, 0), None, option(0.0, 7)], ..Unit::new("widths".to_owned(), 0) };
        let units = vec![widths, unit(0), unit(1), unit(2)];
        let found = Found { formats: vec![String::new(); 4], units, structure_options: Some(2), ..Found::default() };
        let front = found.front();
        let all: Vec<Point> = [0, 2]
            .iter()
            .flat_map(|first| (0..8).map(move |number| [vec![first + 1], (0..3).map(|at| first + (number >> at & 1)).collect()].concat()))
            .map(|options: Vec<usize>| found.point(options))
            .collect();
        let beaten = |point: &Point, cost: u64, loss: f64| point.bytes <= cost && point.predicted < loss || point.bytes < cost && point.predicted <= loss;
        for Assignment { cost, loss, options } in &front {
            assert!(options.iter().all(|option| option / 2 == options[0] / 2), "{options:?}");
            assert!(!all.iter().any(|point| beaten(point, *cost, *loss)), "{options:?}");
        }
        let best = all.iter().filter(|point| !all.iter().any(|other| beaten(other, point.bytes, point.predicted)));
        assert_eq!(best.map(|point| point.bytes).collect::<std::collections::BTreeSet<_>>(), front.iter().map(|found| found.cost).collect());
        assert!([0, 1].iter().all(|structure| front.iter().any(|found| found.options[0] / 2 == *structure)), "{front:?}");
        assert_eq!((found.floats(0), found.floats(3)), (vec![1; 4], vec![3; 4]));
    }
}
