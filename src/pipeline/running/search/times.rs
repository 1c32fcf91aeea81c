//! Latencies of mixtures of formats, and from them the time that each unit takes in each format.
//!
//! Runtimes fuse layers, and convert activations between layers of different arithmetic, so that the time of
//! a layer depends on its neighbours. Whole models are measured, in alternation with the original model:
//! first with all units of the same shape in a format, then uniform formats and mixtures, to which the times
//! of the units are fitted.

use std::collections::BTreeMap;

use super::formats::Unit;
use super::solver::{self, Row};
use super::{Found, Point};
use crate::error::{Error, Result};
use crate::evaluation::Latency;
use crate::ir::Graph;
use crate::model::Model;
use crate::report::search::{LatencyTable, MixtureLatency};

/// Measures the units in the formats with these indices; without units, the original model.
pub(super) type Measure<'a> = Box<dyn FnMut(&[Unit], &[usize]) -> Result<Latency> + 'a>;

/// Latencies that are known, and the measurement of others.
pub(super) struct Times<'a> {
    table: &'a mut LatencyTable,
    measure: Measure<'a>,
}

impl<'a> Times<'a> {
    /// Adds measurements to a table, which contains the latency of the original model.
    pub fn new(table: &'a mut LatencyTable, measure: Measure<'a>) -> Times<'a> {
        Times { table, measure }
    }

    /// All latencies.
    pub fn table(&self) -> &LatencyTable {
        self.table
    }

    /// The latency of the units in the formats with these indices.
    fn mixture(&mut self, units: &[Unit], options: &[usize]) -> Result<MixtureLatency> {
        if let Some(known) = self.table.mixtures.iter().find(|known| known.options == options) {
            return Ok(known.clone());
        }
        let measured = mixture(options, &(self.measure)(units, options)?);
        self.table.mixtures.push(measured.clone());
        Ok(measured)
    }

    /// Sets the measured latency of a point.
    pub fn measure(&mut self, units: &[Unit], point: &mut Point) -> Result<()> {
        point.measured_ms = Some(self.table.original_ms * self.mixture(units, &point.options)?.ratio);
        Ok(())
    }

    /// Measures the time of each unit in each format, with all units of a group in the same format. A
    /// difference within the uncertainty of the measurement counts as none.
    ///
    /// # Errors
    /// If the table is one of other units, or if a measurement fails.
    pub fn measure_units(&mut self, units: &mut [Unit], groups: &[Vec<usize>]) -> Result<()> {
        let names: Vec<String> = units.iter().map(|unit| unit.name.clone()).collect();
        if self.table.units.is_empty() {
            self.table.units = names;
        } else if self.table.units != names {
            return Err(Error::option("--times", "the times are those of another model or other formats: name another file, or remove this one"));
        }
        let count = self.table.formats.len();
        let floats = count.saturating_sub(1);
        units.iter_mut().for_each(|unit| unit.milliseconds = vec![0.0; count]);
        for group in groups {
            for format in 0..floats {
                let members: Vec<usize> = group.iter().copied().filter(|at| units[*at].options[format].is_some()).collect();
                if members.is_empty() {
                    continue;
                }
                let mut options = vec![floats; units.len()];
                members.iter().for_each(|at| options[*at] = format);
                let MixtureLatency { ratio, uncertainty, .. } = self.mixture(units, &options)?;
                let difference = if (ratio - 1.0).abs() > uncertainty { self.table.original_ms * (ratio - 1.0) } else { 0.0 };
                members.iter().for_each(|at| units[*at].milliseconds[format] = difference / members.len() as f64);
            }
        }
        Ok(())
    }
}

/// The latency of a mixture. The uncertainty is that of a median, for a distribution with these quartiles
/// (McGill, Tukey and Larsen 1978).
fn mixture(options: &[usize], latency: &Latency) -> MixtureLatency {
    let ratio = 1.0 / latency.speedup;
    let [low, high] = latency.speedup_quartiles.unwrap_or([latency.speedup; 2]);
    let relative = 1.57 * (high - low) / latency.speedup / (latency.runs.max(1) as f64).sqrt();
    MixtureLatency { options: options.to_vec(), ratio, uncertainty: ratio * relative }
}

/// The units by the shapes of their weights and of the values that are computed from them.
pub(super) fn groups(model: &Model, graph: &Graph, units: &[Unit]) -> Vec<Vec<usize>> {
    let mut values: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for (id, value) in graph.params() {
        let outputs = graph.nodes().iter().filter(|node| node.inputs.contains(&id)).map(|node| graph.value(node.output).ty.to_string());
        values.insert(&value.name, outputs.collect());
    }
    let key = |unit: &Unit| -> Vec<(Vec<usize>, Vec<String>)> {
        let shape = |name: &String| model.weights.by_name.get(name).map(|weight| weight.shape.clone()).unwrap_or_default();
        unit.weights.iter().map(|name| (shape(name), values.get(name.as_str()).cloned().unwrap_or_default())).collect()
    };
    let mut groups: Vec<(_, Vec<usize>)> = Vec::new();
    for (at, unit) in units.iter().enumerate() {
        let key = key(unit);
        match groups.iter_mut().find(|(other, _)| *other == key) {
            Some((_, members)) => members.push(at),
            None => groups.push((key, vec![at])),
        }
    }
    groups.into_iter().map(|(_, members)| members).collect()
}

impl Found {
    /// Fits the times of the units to the measured latencies of points: the times of each format have a
    /// common factor.
    pub(super) fn fit_times(&mut self, measured: &[Point]) {
        let Some(original) = self.original_ms else { return };
        let row = |point: &Point| {
            let mut losses = vec![0.0; self.formats.len()];
            self.units.iter().zip(&point.options).for_each(|(unit, option)| losses[*option] += unit.milliseconds[*option]);
            Some(Row { losses, fixed: original, measured: point.measured_ms? })
        };
        let factors = solver::factors(&measured.iter().filter_map(row).collect::<Vec<_>>());
        for unit in &mut self.units {
            unit.milliseconds.iter_mut().zip(&factors).for_each(|(time, factor)| *time *= factor);
        }
        for at in 0..self.points.len() {
            self.points[at].predicted_ms = self.point(self.points[at].options.clone()).predicted_ms;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::found;
    use super::*;

    fn latency(speedup: f64, spread: f64) -> Latency {
        let quantiles = serde_json::json!({ "p50": 1.0, "p95": 1.0 });
        let value = serde_json::json!({
            "runtime": "onnxruntime", "threads": 1, "batch": [1], "runs": 100, "before_ms": quantiles, "after_ms": quantiles,
            "speedup": speedup, "speedup_quartiles": [speedup - spread, speedup + spread]
        });
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn differences_within_the_uncertainty_count_as_none() {
        let fast = mixture(&[0], &latency(2.0, 0.1));
        assert!((fast.ratio - 0.5).abs() < 1e-9 && (fast.uncertainty - 0.5 * 1.57 * 0.1 / 10.0).abs() < 1e-9, "{fast:?}");
        let mut table = LatencyTable { formats: vec!["a".into(), "floats".into()], original_ms: 10.0, ..LatencyTable::default() };
        let mut units: Vec<Unit> = ["one", "other", "third"].map(|name| Unit::new(name.to_owned(), 2)).to_vec();
        let measure = |_: &[Unit], options: &[usize]| Ok(if options[2] == 0 { latency(1.01, 1.0) } else { latency(1.25, 0.1) });
        Times::new(&mut table, Box::new(measure)).measure_units(&mut units, &[vec![0, 1], vec![2]]).unwrap();
        // Two units together are faster by 2 of 10 ms.
        for (unit, expected) in units.iter().zip([-1.0, -1.0, 0.0]) {
            assert!((unit.milliseconds[0] - expected).abs() < 1e-9 && unit.milliseconds[1] == 0.0, "{unit:?}");
        }
        assert_eq!(table.mixtures.len(), 2);
        // Known latencies are not measured again, and other units are refused.
        let refuse = |_: &[Unit], _: &[usize]| Err(Error::option("test", "measured again"));
        Times::new(&mut table, Box::new(refuse)).measure_units(&mut units, &[vec![0, 1], vec![2]]).unwrap();
        let error = Times::new(&mut table, Box::new(refuse)).measure_units(&mut units[..2], &[vec![0, 1]]).unwrap_err();
        assert!(error.to_string().contains("--times: the times are those of another model"), "{error}");
    }

    /// Measurements of mixtures correct the times of each format.
    #[test]
    fn times_are_fitted_to_mixtures() {
        let mut found = found(&[[-2.0, -1.0], [-1.0, -0.5], [-3.0, -1.0]]);
        let exact = |options: &[usize]| {
            20.0 + options
                .iter()
                .zip([[-2.0, -1.0, 0.0], [-1.0, -0.5, 0.0], [-3.0, -1.0, 0.0]])
                .map(|(option, times)| [0.5, 2.0, 1.0][*option] * times[*option])
                .sum::<f64>()
        };
        let measured = [[0, 0, 0], [1, 1, 1], [0, 1, 2]].map(|options| Point { measured_ms: Some(exact(&options)), ..found.point(options.to_vec()) });
        let error = |found: &Found| (found.point(vec![1, 0, 0]).predicted_ms.unwrap() - exact(&[1, 0, 0])).abs();
        let before = error(&found);
        found.fit_times(&measured);
        assert!(error(&found) < 0.7 * before, "{} and {before}", error(&found));
    }
}
