//! Search for the formats of a model's weights under a limit of size or loss.
//!
//! Weights that runtimes treat alike are one unit. One backward pass gives the expected loss of each format
//! of each unit ([`scores`](crate::pass::scores)), and dynamic programming the assignments with the least
//! loss for their size. Some of them are measured by the KL divergence of their predictions on held-out
//! samples; the scores of each format are scaled to what was measured, and the front is computed again.

mod budget;
mod measure;
pub mod solver;

use std::collections::BTreeMap;

use serde::Serialize;

pub use budget::{Budget, LoadedBy};

use crate::arch;
use crate::error::{Error, Result, counted};
use crate::model::Model;
use crate::pass::{Context, Method, Quantize, SchemeRule, Score, scores};
use crate::store::Pattern;
use measure::Measurement;
use solver::{Assignment, front};

/// A search.
pub struct Search<'a> {
    /// The model.
    pub model: &'a Model,
    /// The runtime that loads the result.
    pub target: LoadedBy,
    /// The limit; `None` for the front only.
    pub budget: Option<Budget>,
    /// Number of points of the front that are measured.
    pub points: usize,
    /// Calibration data, device and progress.
    pub context: &'a Context<'a>,
}

/// Weights that have the same format.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Unit {
    /// Name of the layer that a runtime fuses the weights into, or of the weight.
    pub name: String,
    /// Names of the weights.
    pub weights: Vec<String>,
    /// Number of values.
    pub parameters: u64,
    /// Expected loss and size of each format of [`Found::formats`], and of floats.
    pub options: Vec<Option<Score>>,
}

/// A point of the front, or a uniform format.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Point {
    /// The format of all units; `None` for a mixture.
    pub uniform: Option<String>,
    /// Mean bits of the weights of all units, with scales.
    pub bits: f64,
    /// Size of all weights of the model.
    pub bytes: u64,
    /// Expected KL divergence, in nats per token.
    pub predicted: f64,
    /// KL divergence on held-out samples with weights rounded to nearest.
    pub measured: Option<f64>,
    /// Index of the format of each unit.
    #[serde(skip)]
    pub options: Vec<usize>,
}

/// Result of a search.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Found {
    /// Formats that the runtime loads, in ascending order of bits; the last one is floats.
    pub formats: Vec<String>,
    /// All units.
    pub units: Vec<Unit>,
    /// Measured points, and uniform formats, by ascending size.
    pub points: Vec<Point>,
    /// The point for the limit.
    pub chosen: Option<Point>,
    /// Description of the samples on which points were measured.
    pub measured_on: Option<String>,
    /// Bytes of the weights that are not searched.
    pub other_bytes: u64,
}

impl Search<'_> {
    /// Searches.
    ///
    /// # Errors
    /// If the model cannot run or has no logits, calibration samples are missing, or the limit cannot be met.
    pub fn run(&self) -> Result<Found> {
        let passes = self.target.passes();
        let scores = scores(&passes, self.model, self.context)?;
        let mut found = self.found(&passes, &scores);
        if found.units.is_empty() {
            return Err(Error::option("auto", format!("{} loads none of the formats for the weights of this model", self.target)));
        }
        let measurement = Measurement::new(self.model, self.context)?;
        let first = found.front();
        // Reject an impossible limit before the long part.
        let expected = self.choose(&found, &first)?;
        found.points = found.uniform_points();
        found.points.extend(self.selection(&found, &first, expected));
        found.points.sort_by_key(|point| point.bytes);
        let mut rows = Vec::new();
        for point in &mut found.points {
            self.context.work.cancel.check()?;
            let pass = pass_of(&passes, &found.units, &point.options, Method::Rtn)?;
            let Some(pass) = pass else { continue };
            let measured = measurement.divergence(&pass)?;
            rows.push((by_format(&found.units, &point.options, found.formats.len()), measured));
            point.measured = Some(measured);
        }
        found.measured_on = Some(measurement.description());
        let factors = solver::factors(&rows);
        found.scale(&factors);
        found.chosen = self.choose(&found, &found.front())?;
        Ok(found)
    }

    /// The units with the scores of their formats.
    fn found(&self, passes: &[Quantize], scores: &BTreeMap<String, Vec<Option<Score>>>) -> Found {
        let mut units: BTreeMap<String, Unit> = BTreeMap::new();
        for (name, options) in scores {
            let Some(weight) = self.model.weights.by_name.get(name) else { continue };
            let floats = Some(Score { loss: 0.0, bytes: weight.value_bytes() });
            let unit_name = unit_of(self.model.config.model_type(), name);
            let unit = units.entry(unit_name.clone()).or_insert_with(|| Unit {
                name: unit_name,
                weights: Vec::new(),
                parameters: 0,
                options: vec![Some(Score { loss: 0.0, bytes: 0 }); options.len() + 1],
            });
            unit.weights.push(name.clone());
            unit.parameters += weight.elements() as u64;
            for (option, score) in unit.options.iter_mut().zip(options.iter().chain([&floats])) {
                // A format that cannot encode one of the weights is not an option of the unit.
                *option = option.zip(*score).map(|(all, score)| Score { loss: all.loss + score.loss, bytes: all.bytes + score.bytes });
            }
        }
        let searched: u64 = scores.keys().filter_map(|name| self.model.weights.by_name.get(name)).map(|weight| weight.value_bytes()).sum();
        let all: u64 = self.model.weights.by_name.values().map(|weight| weight.value_bytes()).sum();
        let formats = passes.iter().map(|pass| self.target.format_name(pass)).chain(["floats".to_owned()]).collect();
        let mut units: Vec<Unit> = units.into_values().collect();
        units.sort_by(|a, b| crate::report::format::natural(&a.name, &b.name));
        Found { formats, units, points: Vec::new(), chosen: None, measured_on: None, other_bytes: all - searched }
    }

    /// The point of the front for the limit.
    fn choose(&self, found: &Found, front: &[Assignment]) -> Result<Option<Point>> {
        let Some(budget) = self.budget else { return Ok(None) };
        let point = |assignment: &Assignment| found.point(assignment.options.clone());
        let (Some(least), Some(most)) = (front.first().map(&point), front.last().map(&point)) else { return Ok(None) };
        let input = self.model.stored_bytes();
        let chosen = match budget {
            Budget::Loss(limit) => front.iter().map(&point).find(|point| point.predicted <= limit),
            _ => front.iter().rev().map(&point).find(|point| budget.allows(point, input)),
        };
        let nearest = if matches!(budget, Budget::Loss(_)) { most } else { least };
        chosen.map(Some).ok_or_else(|| {
            let reason = format!("no choice of formats for {} meets the limit `{budget}`", self.target);
            Error::run("auto", reason, format!("the nearest possible limit is {}", budget.nearest(&nearest, input)))
        })
    }

    /// Points of the front at equal distances between its smallest point and the largest uniform format, and
    /// the point that is expected for the limit.
    fn selection(&self, found: &Found, front: &[Assignment], expected: Option<Point>) -> Vec<Point> {
        let ends = front.first().zip(found.uniform_points().pop());
        let mut chosen: Vec<usize> = Vec::new();
        if let Some((first, last)) = ends {
            let width = (last.bytes - found.other_bytes).saturating_sub(first.bytes) as f64;
            for number in 0..self.points {
                let bytes = first.bytes + (width * (number + 1) as f64 / (self.points + 1) as f64) as u64;
                chosen.extend(front.iter().rposition(|assignment| assignment.bytes <= bytes));
            }
        }
        chosen.dedup();
        let mut points: Vec<Point> = chosen.into_iter().map(|at| found.point(front[at].options.clone())).collect();
        points.extend(expected.filter(|point| points.iter().all(|other| other.options != point.options)));
        points.retain(|point| point.uniform.is_none());
        points
    }

    /// The pass that writes a point.
    ///
    /// # Errors
    /// If the point leaves all weights as floats.
    pub fn pass(&self, found: &Found, point: &Point, method: Method) -> Result<Quantize> {
        let pass = pass_of(&self.target.passes(), &found.units, &point.options, method)?;
        pass.ok_or_else(|| Error::run("auto", "the limit allows to leave all weights as floats, so that there is nothing to do", "use a lower limit"))
    }
}

impl Found {
    /// The assignments that no other one beats.
    fn front(&self) -> Vec<Assignment> {
        let options = |unit: &Unit| unit.options.iter().enumerate().filter_map(|(at, option)| Some((at, (*option)?))).collect();
        let units: Vec<Vec<(usize, Score)>> = self.units.iter().map(options).collect();
        let only: Vec<Vec<Score>> = units.iter().map(|unit| unit.iter().map(|(_, score)| *score).collect()).collect();
        let mut assignments = front(&only);
        for assignment in &mut assignments {
            assignment.options.iter_mut().zip(&units).for_each(|(option, unit)| *option = unit[*option].0);
        }
        assignments
    }

    /// Multiplies the losses of each format by its factor.
    fn scale(&mut self, factors: &[f64]) {
        for unit in &mut self.units {
            for (option, factor) in unit.options.iter_mut().zip(factors) {
                option.iter_mut().for_each(|option| option.loss *= factor);
            }
        }
        for point in &mut self.points {
            point.predicted = by_format(&self.units, &point.options, self.formats.len()).iter().sum();
        }
    }

    /// A point with these formats.
    fn point(&self, options: Vec<usize>) -> Point {
        let chosen = || self.units.iter().zip(&options).filter_map(|(unit, option)| unit.options.get(*option).copied().flatten());
        let bytes: u64 = chosen().map(|format| format.bytes).sum();
        let parameters: u64 = self.units.iter().map(|unit| unit.parameters).sum();
        let first = options.first().filter(|first| options.iter().all(|option| option == *first));
        Point {
            uniform: first.and_then(|first| self.formats.get(*first)).cloned(),
            bits: 8.0 * bytes as f64 / parameters.max(1) as f64,
            bytes: bytes + self.other_bytes,
            predicted: chosen().map(|format| format.loss).sum(),
            measured: None,
            options,
        }
    }

    /// The points at which all units have one format, except floats.
    fn uniform_points(&self) -> Vec<Point> {
        let has = |format: &usize| self.units.iter().all(|unit| unit.options[*format].is_some());
        (0..self.formats.len() - 1).filter(has).map(|format| self.point(vec![format; self.units.len()])).collect()
    }

    /// Numbers of units of a point by format, in words: "12 in W4A16".
    pub fn summary(&self, point: &Point) -> String {
        let mut counts = vec![0usize; self.formats.len()];
        point.options.iter().for_each(|option| counts[*option] += 1);
        let parts = self.formats.iter().zip(counts).filter(|(_, count)| *count > 0).map(|(format, count)| format!("{count} in {format}"));
        format!("{}: {}", counted(self.units.len(), "unit"), parts.collect::<Vec<_>>().join(", "))
    }
}

/// The sum of the losses of the units with each format.
fn by_format(units: &[Unit], options: &[usize], formats: usize) -> Vec<f64> {
    let mut sums = vec![0.0; formats];
    for (unit, option) in units.iter().zip(options) {
        sums[*option] += unit.options[*option].map_or(0.0, |option| option.loss);
    }
    sums
}

/// Name of the unit of a weight: the fused layer, or all experts of a layer.
fn unit_of(model_type: &str, name: &str) -> String {
    match name.split_once(".experts.") {
        Some((layer, _)) => format!("{layer}.experts"),
        None => arch::fused_layer(model_type, name),
    }
}

/// The pass that quantizes the units in the formats with these indices; `None` if all are floats. Its scheme
/// is the one of most weights; the others have rules.
fn pass_of(passes: &[Quantize], units: &[Unit], options: &[usize], method: Method) -> Result<Option<Quantize>> {
    let mut weights: Vec<Vec<Pattern>> = vec![Vec::new(); passes.len() + 1];
    for (unit, option) in units.iter().zip(options) {
        for name in &unit.weights {
            weights[*option].push(name.parse().map_err(|e| Error::option("auto", e))?);
        }
    }
    let floats = weights.pop().unwrap_or_default();
    let most = weights.iter().enumerate().max_by_key(|(at, weights)| (weights.len(), usize::MAX - at)).filter(|(_, weights)| !weights.is_empty());
    let Some((most, _)) = most else { return Ok(None) };
    let rules = weights.into_iter().zip(passes).enumerate().filter(|(at, (weights, _))| *at != most && !weights.is_empty());
    let rules = rules.map(|(_, (targets, pass))| SchemeRule { targets, scheme: pass.scheme, group_size: pass.group_size });
    let (scheme, group_size) = (passes[most].scheme, passes[most].group_size);
    Ok(Some(Quantize { scheme, group_size, rules: rules.collect(), method, ignore: floats, ..Quantize::default() }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found() -> Found {
        let unit = |name: &str, losses: [f64; 2]| Unit {
            name: name.to_owned(),
            weights: vec![format!("{name}.weight")],
            parameters: 1000,
            options: vec![Some(Score { loss: losses[0], bytes: 500 }), Some(Score { loss: losses[1], bytes: 1000 }), Some(Score { loss: 0.0, bytes: 2000 })],
        };
        let units = vec![
            unit("a", [8.0, 1.0]),
            unit("b", [2.0, 1.5]),
            Unit { options: vec![None, Some(Score { loss: 0.1, bytes: 1000 }), Some(Score { loss: 0.0, bytes: 2000 })], ..unit("c", [0.0, 0.0]) },
        ];
        let formats = ["W4A16", "W8A16", "floats"].map(str::to_owned).to_vec();
        Found { formats, units, points: Vec::new(), chosen: None, measured_on: None, other_bytes: 100 }
    }

    #[test]
    fn the_front_uses_only_formats_that_units_have() {
        let found = found();
        let front = found.front();
        assert_eq!(front[0].options, [0, 0, 1]);
        let point = found.point(front[1].options.clone());
        assert_eq!((point.options.as_slice(), point.bytes, point.predicted), (&[1, 0, 1][..], 2600, 3.1));
        assert!((point.bits - 8.0 * 2500.0 / 3000.0).abs() < 1e-9 && point.uniform.is_none());
        // Only formats that all units have can be uniform.
        let uniform: Vec<Option<String>> = found.uniform_points().into_iter().map(|point| point.uniform).collect();
        assert_eq!(uniform, [Some("W8A16".to_owned())]);
    }

    #[test]
    fn a_pass_has_a_rule_for_each_other_scheme() {
        let passes = LoadedBy::Vllm.passes();
        let (last, floats) = (passes.len() - 1, passes.len());
        let unit = |name: &str, weights: usize| Unit {
            name: name.to_owned(),
            weights: (0..weights).map(|at| format!("{name}.{at}.weight")).collect(),
            parameters: 0,
            options: Vec::new(),
        };
        let units = [unit("a", 1), unit("b", 3), unit("c", 1)];
        let pass = pass_of(&passes, &units, &[0, last, floats], Method::Gptq).unwrap().unwrap();
        assert_eq!((pass.scheme, pass.method, pass.rules.len()), (passes[last].scheme, Method::Gptq, 1));
        assert!(pass.rules[0].targets[0].matches("a.0.weight") && pass.ignore[0].matches("c.0.weight"));
        assert!(pass_of(&passes, &units, &[floats; 3], Method::Gptq).unwrap().is_none());
    }

    #[test]
    fn experts_of_a_layer_are_one_unit() {
        let names = ["model.layers.0.mlp.experts.0.w1.weight", "model.layers.0.mlp.experts.7.w2.weight"].map(|name| unit_of("mixtral", name));
        assert_eq!(names[0], names[1]);
        assert_eq!(unit_of("llama", "model.layers.0.self_attn.q_proj.weight"), unit_of("llama", "model.layers.0.self_attn.v_proj.weight"));
        assert_ne!(unit_of("llama", "model.layers.0.self_attn.q_proj.weight"), unit_of("llama", "model.layers.1.self_attn.q_proj.weight"));
    }
}
