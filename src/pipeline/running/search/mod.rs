//! Search for the formats of a model's weights under a limit of size or loss.
//!
//! Weights that runtimes treat alike are one unit. One backward pass gives the expected loss of each format
//! of each unit ([`scores`](crate::pass::scores)), and dynamic programming the assignments with the least
//! loss for their size. Some of them are measured by the KL divergence of their predictions on held-out
//! samples; the scores of each format are scaled to what was measured, the scores of single units are
//! corrected (`corrections`), and the front is computed again. The point for the limit is measured too. If it
//! exceeds a limit of loss, larger points are measured. For a limit of the task's score, the smallest point
//! within it is searched by bisection (`metric`). Without samples, the errors of the weights are the losses
//! (`weight_errors`), and nothing is measured.
//!
//! For ONNX Runtime, each layer is quantized separately on the calibration samples instead, and losses are
//! cosine distances of the outputs (`onnx_layers`). Fractions of the units of layers that remain after
//! structured pruning can be further options: of each layer for ONNX Runtime (`pruned`), and of all layers
//! alike for other runtimes (`uniform`). A limit of the latency replaces sizes by times, which are measured
//! (`times`, `latency`).

mod blocks;
mod budget;
mod checkpoint;
mod corrections;
mod finish;
mod forecast;
mod formats;
mod latency;
mod matrices;
mod measure;
mod metric;
mod onnx_layers;
mod points;
mod pruned;
mod runtimes;
mod schemes;
pub mod solver;
mod stopwatch;
mod summary;
mod testing;
mod times;
mod uniform;
mod weight_errors;

use serde::Serialize;

pub use budget::{Budget, parse_time};
pub use checkpoint::Checkpoint;
use formats::Formats;
pub use formats::{Unit, Writing};
pub use measure::calibration_part;
pub use runtimes::LoadedBy;

use crate::data::Data;
use crate::error::{Error, Result};
use crate::model::Model;
use crate::pass::assignment::Assignment;
use crate::pass::{Context, Method, Remaining};
use crate::report::search::{LatencyTable, SearchLoss, SearchMethod, SearchMetric};
use budget::rounded_up;
use measure::{Measurement, measure_units};
use points::by_format;
use solver::Row;

/// Largest number of points that are measured for a limit of loss.
const ROUNDS: usize = 6;

/// A search.
pub struct Search<'a> {
    /// The model.
    pub model: &'a Model,
    /// The runtime that loads the result.
    pub target: LoadedBy,
    /// Names of the formats to choose from; all that the runtime loads if empty.
    pub formats: &'a [String],
    /// Fractions of heads, neurons and channels that may remain, as further options; empty without pruning.
    /// For ONNX Runtime, of each layer; for other runtimes, of all layers alike.
    pub fractions: &'a [f64],
    /// The limit; `None` for the front only, or for a single format, which all weights then have.
    pub budget: Option<Budget>,
    /// Number of points of the front that are measured.
    pub points: usize,
    /// The calibration data with its labels. Without evaluation data, the samples that do not calibrate
    /// measure the task's score.
    pub labelled: Option<&'a Data>,
    /// Scores and measurements of an interrupted search, to which new ones are added.
    pub checkpoint: Option<&'a Checkpoint>,
    /// Calibration data, device and progress.
    pub context: &'a Context<'a>,
}

/// A point of the front, or a common mixture.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Point {
    /// The name of the mixture; `None` for a point of the front.
    pub reference: Option<String>,
    /// Mean bits of the weights of all units, with scales.
    pub bits: f64,
    /// Size of all weights of the model, or of the file if the output is a single file.
    pub bytes: u64,
    /// Expected KL divergence in nats per token, or cosine distance of the outputs, or error of the weights.
    pub predicted: f64,
    /// The same, measured on held-out samples with weights rounded to nearest.
    pub measured: Option<f64>,
    /// Score on data with labels, if the limit is one of the score.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub score: Option<f64>,
    /// Loss of the score relative to that of the original model, or the measured cosine distance without
    /// labels.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub drop: Option<f64>,
    /// Expected latency in milliseconds, if the limit is one of the latency.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub predicted_ms: Option<f64>,
    /// Measured latency in milliseconds, if the limit is one of the latency.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub measured_ms: Option<f64>,
    /// Index of the format of each unit.
    #[serde(skip)]
    pub options: Vec<usize>,
}

/// Result of a search.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
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
    /// The loss that was minimized.
    pub loss: SearchLoss,
    /// The metric of the task, if the limit is one of its score.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metric: Option<SearchMetric>,
    /// Bytes of the weights that are not searched.
    pub other_bytes: u64,
    /// The measured times, if the limit is one of the latency.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub times: Option<LatencyTable>,
    /// Methods that were tried for the chosen point.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub methods: Vec<SearchMethod>,
    /// Latency of the original model, if times are measured.
    #[serde(skip)]
    original_ms: Option<f64>,
    /// Number of formats of a structure, if there are several: all units have options of the same one.
    #[serde(skip)]
    structure_options: Option<usize>,
}

impl Search<'_> {
    /// Searches. `times`: times that an earlier search with a limit of the latency has measured, to which
    /// new measurements are added.
    ///
    /// # Errors
    /// If the model cannot run or has no logits, calibration samples are missing, or the limit cannot be met.
    pub fn run(&self, times: &mut Option<LatencyTable>) -> Result<Found> {
        let formats = self.formats()?;
        self.require_distribution(&*formats)?;
        self.require_samples()?;
        self.require_possible_size(&*formats)?;
        let mut times = self.times(&*formats, times)?;
        let mut measurement = Measurement::new(self.model, self.context, &*formats)?.with_checkpoint(self.checkpoint);
        let mut metric = None;
        if let Some(Budget::Drop(_)) = self.budget {
            measurement = measurement.with_metric(self.labelled)?;
            metric = measurement.metric();
            if metric.is_none() && formats.loss() == SearchLoss::KlDivergence {
                return Err(Error::option("--max-loss", "needs data with labels; without labels, limit the KL divergence with `--max-kl`"));
            }
        }
        // Nothing that follows from corrupted weights is stored or printed.
        let checked = || self.model.check_contents(&self.context.work);
        let scores = || formats.scores(self.context).and_then(|scores| checked().map(|()| scores));
        let scores = self.checkpoint.map_or_else(scores, |checkpoint| checkpoint.scores(scores))?;
        checked()?;
        let units = formats.units(&scores);
        measurement.set_scores(scores);
        if !units.iter().any(has_formats) {
            return Err(self.without_formats(&formats.names(), &units));
        }
        let other_bytes = formats.other_bytes(&units);
        let structure_options = Some(formats.structure_options());
        let mut found = Found { formats: formats.names(), units, other_bytes, loss: formats.loss(), metric, structure_options, ..Found::default() };
        // Reject an impossible limit before the long part.
        match (&mut times, self.budget) {
            (Some(times), Some(Budget::Latency(limit))) => self.measure_times(limit, &*formats, &mut found, times)?,
            _ => drop(self.choose(&found, &found.front())?),
        }
        if self.has_samples() {
            measure_units(&mut found, &measurement)?
        } else {
            found.score_by_weights(self.model, &*formats, self.context)?
        }
        let first = found.front();
        let expected = self.choose(&found, &first)?;
        found.points = formats.references(&found.units)?.into_iter().map(|(name, options)| found.reference(name, options)).collect();
        found.points.extend(self.selection(&found, &first, expected));
        found.points.sort_by_key(|point| point.bytes);
        let (mut rows, mut remaining) = (Vec::new(), Remaining::new("mixtures", found.points.len()));
        for at in 0..found.points.len() {
            let mut point = found.points[at].clone();
            let is_stored = times.is_none() && measurement.is_known(&point);
            measurement.measure(&found.units, &mut point)?;
            times.as_mut().map_or(Ok(()), |times| times.measure(&found.units, &mut point))?;
            if let Some(measured) = point.measured {
                let [predicted, exact] = [false, true].map(|measured| by_format(&found.units, &point.options, found.formats.len(), measured));
                rows.push(Row { losses: predicted, fixed: exact.iter().sum(), measured });
            }
            found.points[at] = point;
            remaining.finish(at, is_stored, &self.context.work);
        }
        found.measured_on = measurement.description();
        let factors = solver::factors(&rows);
        found.scale(&factors);
        found.fit_units();
        found.fit_times(&found.points.clone());
        found.chosen = match (self.budget, &mut times) {
            (Some(Budget::Loss(limit)), _) => Some(self.choose_by_loss(limit, &mut found, &measurement)?),
            (Some(Budget::Drop(percent)), _) => Some(self.choose_by_drop(percent, &mut found, &measurement)?),
            (Some(Budget::Latency(limit)), Some(times)) => Some(self.choose_by_latency(limit, &mut found, times, &measurement)?),
            (None, _) if self.formats.len() == 1 => smallest(&found, &measurement)?,
            _ => self.choose_by_size(&found, &measurement)?,
        };
        found.chosen = found.chosen.take().map(|chosen| found.best(self.budget, self.model.stored_bytes(), chosen));
        found.times = times.map(|times| times.table().clone());
        Ok(found)
    }

    /// The reason why all weights can only be floats.
    fn without_formats(&self, names: &[String], units: &[Unit]) -> Error {
        let rows = |name: &String| Some(format!(", such as `{name}` with rows of {}", self.model.weights.by_name.get(name)?.shape.last()?));
        let (example, reason) = if self.target == LoadedBy::OnnxRuntime {
            (None, if self.has_samples() { "" } else { "; some, such as `int8-static`, need `--calibration`" })
        } else {
            let example = units.iter().flat_map(|unit| &unit.weights).find_map(rows);
            (example, "; rows must be multiples of the size of a block or a group")
        };
        let floats = names.last().map_or("floats", String::as_str);
        let example = example.unwrap_or_default();
        let of_option = if self.formats.is_empty() { "" } else { " of `--formats`" };
        let what = format!("no format{of_option} for {} except {floats} fits the weights of this model{example}", self.target);
        Error::option("auto", format!("{what}{reason}; `compress cast` writes floats"))
    }

    /// Whether calibration samples give the losses. Without them, the errors of the weights do.
    fn has_samples(&self) -> bool {
        self.context.data.calibration.is_some()
    }

    /// Rejects limits that only samples can measure, if there are none.
    fn require_samples(&self) -> Result<()> {
        match self.budget {
            _ if self.has_samples() => Ok(()),
            Some(limit) if !limit.is_size() => Err(Error::option(limit.option(), "needs `--calibration`: without samples, only the size can be limited")),
            _ if self.context.data.evaluation.is_some() => Err(Error::option("--eval", "needs `--calibration`: without it, mixtures are not measured")),
            _ => Ok(()),
        }
    }

    /// Rejects a limit that is below the smallest possible size, before the model runs.
    fn require_possible_size(&self, formats: &dyn Formats) -> Result<()> {
        if !self.budget.is_some_and(Budget::is_size) {
            return Ok(());
        }
        let Some(sizes) = formats.sizes()? else { return Ok(()) };
        let units = formats.units(&sizes);
        if !units.iter().any(has_formats) {
            return Ok(());
        }
        let (other_bytes, structure_options) = (formats.other_bytes(&units), Some(formats.structure_options()));
        let smallest = Found { formats: formats.names(), other_bytes, units, structure_options, ..Found::default() };
        self.choose(&smallest, &smallest.front()).map(drop)
    }

    /// The formats to choose from.
    fn formats(&self) -> Result<Box<dyn Formats>> {
        self.target.formats(self.model, self.formats, matches!(self.budget, Some(Budget::Latency(_))), self.fractions)
    }

    /// Rejects models whose predictions have no KL divergence, if it is the loss of the formats.
    fn require_distribution(&self, formats: &dyn Formats) -> Result<()> {
        if !self.has_samples() || formats.loss() != SearchLoss::KlDivergence {
            return Ok(());
        }
        let how = "without `--calibration`, the errors of the weights order the formats; `--for onnxruntime` compares all outputs";
        self.model.require_distribution(&self.model.graph()?, "auto", how)
    }

    /// The largest point within a limit of size. The size of a file that is only known when it is written may
    /// exceed the limit: then, smaller points are measured.
    fn choose_by_size(&self, found: &Found, measurement: &Measurement) -> Result<Option<Point>> {
        let (Some(budget), mut front) = (self.budget, found.front()) else { return Ok(None) };
        for _ in 0..ROUNDS {
            let Some(mut point) = self.choose(found, &front)? else { break };
            let expected = point.bytes;
            measure(found, &mut point, measurement)?;
            if budget.allows(&point, self.model.stored_bytes()) {
                return Ok(Some(point));
            }
            let excess = point.bytes.saturating_sub(expected);
            front.retain_mut(|assignment| {
                assignment.cost += excess;
                assignment.options != point.options
            });
        }
        let reason = format!("no measured choice of formats for {} meets the limit `{budget}`", self.target);
        Err(Error::run("auto", reason, "use a larger limit"))
    }

    /// The smallest point whose measured loss is within the limit. Points that exceed it are added to the
    /// measured ones, and the next point is predicted to have proportionally less loss.
    fn choose_by_loss(&self, limit: f64, found: &mut Found, measurement: &Measurement) -> Result<Point> {
        let front = found.quantized_front();
        let (mut target, mut next, mut nearest) = (limit, 0, f64::INFINITY);
        for round in 1..=ROUNDS {
            let Some(last) = front.len().checked_sub(1).filter(|last| next <= *last) else { break };
            let expected = (next..last).find(|at| front[*at].predicted <= target);
            // The largest point shows whether the limit can be met.
            let at = expected.filter(|_| round < ROUNDS).unwrap_or(last);
            let mut point = front[at].clone();
            measure(found, &mut point, measurement)?;
            let measured = point.measured.unwrap_or(f64::INFINITY);
            if measured <= limit {
                return Ok(point);
            }
            nearest = nearest.min(measured);
            target = target.min(limit * point.predicted / measured);
            next = at + 1;
            if found.points.iter().all(|other| other.options != point.options) {
                found.points.push(point);
                found.points.sort_by_key(|point| point.bytes);
            }
        }
        Err(self.no_choice(Budget::Loss(limit), Some(nearest).filter(|nearest| nearest.is_finite()).map(|nearest| Budget::Loss(rounded_up(nearest)))))
    }

    /// An error because no point meets a limit.
    fn no_choice(&self, limit: Budget, nearest: Option<Budget>) -> Error {
        let reason = format!("no choice of formats for {} meets the limit `{limit}`", self.target);
        let hint = nearest.map_or_else(|| "choose another runtime with `--for`".to_owned(), |nearest| format!("the nearest possible limit is {nearest}"));
        Error::run("auto", reason, hint)
    }

    /// The point of the front for the limit. Limits of the score and of the latency need measurements.
    fn choose(&self, found: &Found, front: &[Assignment]) -> Result<Option<Point>> {
        let Some(budget) = self.budget.filter(|budget| !matches!(budget, Budget::Drop(_) | Budget::Latency(_))) else { return Ok(None) };
        // Assignments may be larger than their units.
        let point = |assignment: &Assignment| Point { bytes: assignment.cost + found.other_bytes, ..found.point(assignment.options.clone()) };
        let (Some(least), Some(most)) = (front.first().map(&point), front.last().map(&point)) else { return Ok(None) };
        let input = self.model.stored_bytes();
        let chosen = match budget {
            Budget::Loss(limit) => front.iter().map(&point).find(|point| point.predicted <= limit),
            _ => front.iter().rev().map(&point).find(|point| budget.allows(point, input)),
        };
        let nearest = if matches!(budget, Budget::Loss(_)) { most } else { least };
        chosen.map(Some).ok_or_else(|| self.no_choice(budget, Some(budget.nearest(&nearest, input))))
    }

    /// Points of the front at equal distances between its smallest or fastest point and the largest reference
    /// (or floats, if all references are about as small), and the point that is expected for the limit.
    fn selection(&self, found: &Found, front: &[Assignment], expected: Option<Point>) -> Vec<Point> {
        let reference = found.points.iter().map(|point| point.bytes - found.other_bytes).max();
        let floats = front.last().map(|last| last.cost).filter(|_| found.loss == SearchLoss::CosineDistance);
        let ends = front.first().zip(floats.or(reference));
        let mut chosen: Vec<usize> = Vec::new();
        if let Some((first, last)) = ends {
            let width = last.saturating_sub(first.cost) as f64;
            for number in 0..self.points {
                let cost = first.cost + (width * (number + 1) as f64 / (self.points + 1) as f64) as u64;
                chosen.extend(front.iter().rposition(|assignment| assignment.cost <= cost));
            }
        }
        chosen.dedup();
        let mut points: Vec<Point> = chosen.into_iter().map(|at| found.point(front[at].options.clone())).collect();
        points.extend(expected.filter(|point| points.iter().all(|other| other.options != point.options)));
        points.retain(|point| !found.is_floats(point) && found.points.iter().all(|reference| reference.options != point.options));
        points
    }

    /// The passes and output formats of a point, with the default method of the runtime if `method` is
    /// `None`.
    ///
    /// # Errors
    /// If the point leaves all weights as floats, or if the runtime does not support the method.
    pub fn writing(&self, found: &Found, point: &Point, method: Option<Method>) -> Result<Writing> {
        let method = method.or((!self.has_samples()).then_some(Method::Rtn));
        let writing = self.formats()?.writing(&found.units, &point.options, method)?;
        writing.ok_or_else(|| Error::run("auto", "the limit allows to leave all weights as floats, so that there is nothing to do", "use a lower limit"))
    }
}

/// The smallest point: with a single format, all weights that can have it.
fn smallest(found: &Found, measurement: &Measurement) -> Result<Option<Point>> {
    let Some(mut point) = found.quantized_front().into_iter().next() else { return Ok(None) };
    measure(found, &mut point, measurement)?;
    Ok(Some(point))
}

/// Whether a unit has another option than floats.
fn has_formats(unit: &Unit) -> bool {
    unit.options.iter().rev().skip(1).any(Option::is_some)
}

/// Measures a point, unless it is known.
fn measure(found: &Found, point: &mut Point, measurement: &Measurement) -> Result<()> {
    match found.points.iter().find(|known| known.options == point.options && known.measured.is_some()) {
        Some(known) => *point = Point { reference: None, predicted: point.predicted, ..known.clone() },
        None => measurement.measure(&found.units, point)?,
    }
    Ok(())
}
