//! Measures quantized models on samples that were not used for the search: the distance of their outputs
//! from the original ones, and the score of the task.

use std::ops::ControlFlow;

use super::checkpoint::Checkpoint;
use super::formats::{Formats, Unit, Written};
use super::{Found, Point};
use crate::data::{Batch, Data, DataSet, DataSets, Order, Target, WindowSampling};
use crate::error::{Error, Result, counted};
use crate::evaluation::{Baseline, Comparison, Resources, Samples, Subject};
use crate::exec::sizes_of;
use crate::ir::Bindings;
use crate::model::Model;
use crate::pass::{Context, Score, Scores};
use crate::report::search::{SearchLoss, SearchMetric};

/// Largest number of held-out samples of a text whose outputs are compared.
const MAX_SAMPLES: usize = 8;
/// Largest number of samples per batch if the metric is measured on a part of a set.
const BATCH: usize = 8;
/// Largest number of samples that measure the metric, unless they are evaluation data.
const MAX_MEASURED: usize = 2000;
/// Largest number of calibration samples of a set that also measures the metric, unless it is limited.
const MAX_CALIBRATION: usize = 128;

/// The calibration samples of a set whose other samples measure the metric: as many as `samples` specifies,
/// or a quarter of the set, at most 128.
///
/// # Errors
/// If the samples of the set are not in a fixed order, or if none are left.
pub fn calibration_part(sets: &DataSets, set: &Data, target: Target) -> Result<Data> {
    if set.images.as_ref().is_some_and(|path| path.is_dir()) || set.sampling == Some(WindowSampling::Spread) {
        let reason = "needs `--eval`: the calibration samples are spread over the whole data, so that no part of it is left to measure on";
        return Err(Error::option("--max-loss", reason));
    }
    let data = sets.open(&Data { samples: None, ..set.clone() }, target)?;
    let (batch, all) = (batch_of(&data, target)?, data.count()?);
    let quarter = (all / 4).min(MAX_CALIBRATION);
    let used = set.samples.unwrap_or(if quarter < batch { quarter } else { quarter - quarter % batch }).max(1);
    if used >= all || used.next_multiple_of(batch) >= all {
        return Err(Error::option("--max-loss", format!("needs `--eval`, because calibration uses {used} of the {all} samples of the data")));
    }
    Ok(Data { samples: Some(used), ..set.clone() })
}

/// Samples per batch: the model's fixed batch size, or that of the data, at most [`BATCH`].
fn batch_of(data: &DataSet, target: Target) -> Result<usize> {
    let batch = match target.fixed_batch() {
        Some(batch) => batch,
        None => data.first()?.samples.min(BATCH),
    };
    Ok(batch.max(1))
}

/// The samples.
pub struct Measurement<'a> {
    model: &'a Model,
    context: &'a Context<'a>,
    formats: &'a dyn Formats,
    scores: Scores,
    /// The held-out samples, and their description; `None` without data.
    comparison: Option<(Comparison, String)>,
    /// Sizes of the named axes of the held-out samples.
    held_out: Vec<Bindings>,
    baseline: Option<Baseline>,
    checkpoint: Option<&'a Checkpoint>,
}

impl<'a> Measurement<'a> {
    /// Reads the evaluation data, or samples of the calibration data that the search does not use. Without
    /// data, only sizes are measured.
    pub fn new(model: &'a Model, context: &'a Context<'a>, formats: &'a dyn Formats) -> Result<Measurement<'a>> {
        let data = context.data;
        let subject = Subject::from_model(model.clone())?;
        let mut samples = Vec::new();
        // Without logits per token, all held-out samples are compared: at most 64 (`for_each_held_out`).
        let most = if formats.loss() == SearchLoss::KlDivergence { MAX_SAMPLES } else { usize::MAX };
        let mut take = |sample: Batch| {
            samples.push(sample);
            Ok(if samples.len() < most { ControlFlow::Continue(()) } else { ControlFlow::Break(()) })
        };
        let (set, kind, used, others): (&Data, _, _, Vec<&Data>) = match (&data.evaluation, &data.calibration) {
            (Some(evaluation), calibration) => (evaluation, "evaluation data", 0, calibration.iter().collect()),
            (None, Some(calibration)) => (calibration, "held-out samples of the calibration data", calibration.samples.unwrap_or(usize::MAX), Vec::new()),
            (None, None) => {
                let held_out = Vec::new();
                return Ok(Measurement { model, context, formats, scores: Scores::default(), comparison: None, held_out, baseline: None, checkpoint: None });
            }
        };
        data.for_each_held_out(set, used, &others, subject.target(), &mut take)?;
        if samples.is_empty() {
            // Fewer samples than a batch of the model.
            data.evaluation.as_ref().map_or(Ok(()), |evaluation| data.open(evaluation, subject.target())?.first().map(drop))?;
            let (reason, hint) = match &data.evaluation {
                Some(_) => {
                    ("no sample of the evaluation data is known to differ from the calibration samples", "specify other data, or more `samples`, with `--eval`")
                }
                None => (
                    "samples to measure on are missing: all calibration samples are used by the search",
                    "specify `--eval`, or fewer `samples` in `--calibration`",
                ),
            };
            return Err(Error::run("auto", reason, hint));
        }
        let name = set.names().unwrap_or_default();
        let what = if formats.loss() == SearchLoss::KlDivergence { "window" } else { "sample" };
        let source = format!("{} of {name} ({kind})", counted(samples.len(), what));
        let graph = model.graph()?;
        let held_out = samples.iter().map(|sample| sizes_of(&graph, &sample.inputs)).collect();
        let comparison = Some((Comparison::new(model.clone(), Samples::Batches(samples)), source));
        Ok(Measurement { model, context, formats, scores: Scores::default(), comparison, held_out, baseline: None, checkpoint: None })
    }

    /// Sizes of the named axes of the held-out samples.
    pub fn held_out(&self) -> &[Bindings] {
        &self.held_out
    }

    /// Takes known measurements from a checkpoint, and adds others to it.
    pub fn with_checkpoint(self, checkpoint: Option<&'a Checkpoint>) -> Measurement<'a> {
        Measurement { checkpoint, ..self }
    }

    /// Sets the scores, which have the importance of columns for rounding.
    pub fn set_scores(&mut self, scores: Scores) {
        self.scores = scores;
    }

    fn resources(&self) -> Resources<'_> {
        self.context.resources(self.formats.rounding())
    }

    /// Computes the score of the original model on the evaluation data, or on the samples of the `labelled`
    /// set after the calibration samples. Without labels, points have no score.
    ///
    /// # Errors
    /// If the score is 0, so that a relative loss is not defined.
    pub fn with_metric(mut self, labelled: Option<&Data>) -> Result<Measurement<'a>> {
        let sets = self.context.data;
        let subject = Subject::from_model(self.model.clone())?;
        let (data, part) = match (&sets.evaluation, labelled) {
            (Some(evaluation), _) => (sets.open(evaluation, subject.target())?, None),
            (None, Some(labelled)) => {
                let data = sets.open(&Data { samples: None, ..labelled.clone() }, subject.target())?;
                let batch = batch_of(&data, subject.target())?;
                let used = sets.calibration.as_ref().and_then(|calibration| calibration.samples).unwrap_or(0);
                let order = Order { batch: Some(batch), skip: used.div_ceil(batch), ..Order::default() };
                (data, Some((order, MAX_MEASURED)))
            }
            (None, None) => return Ok(self),
        };
        let Some(baseline) = Baseline::new(self.model.clone(), data, part, self.resources())? else { return Ok(self) };
        let score = &baseline.score;
        if !(score.value.is_finite() && score.value != 0.0) {
            let reason = format!("the {} of the original model is {}, so that a relative loss is not defined", score.metric, score.value);
            return Err(Error::run("--max-loss", reason, "check the labels of the data"));
        }
        self.baseline = Some(baseline);
        Ok(self)
    }

    /// Description of the samples.
    pub fn description(&self) -> Option<String> {
        self.comparison.as_ref().map(|(_, source)| source.clone())
    }

    /// The metric of the task, with the value of the original model.
    pub fn metric(&self) -> Option<SearchMetric> {
        let baseline = self.baseline.as_ref()?;
        let part = if baseline.is_part() { " that calibration does not use" } else { "" };
        let measured_on = format!("{} samples of {}{part}", baseline.samples, baseline.data().description());
        Some(SearchMetric { name: baseline.score.metric.clone(), original: baseline.score.value, measured_on })
    }

    /// The distance of the outputs of the model with the units rounded in the formats with these indices from
    /// those of the original one; `None` if all units are floats.
    pub fn loss(&self, units: &[Unit], options: &[usize]) -> Result<Option<f64>> {
        self.context.work.cancel.check()?;
        let compute = || {
            let written = self.formats.rounded(units, options, &self.scores, self.context)?;
            written.map(|written| self.distance(&written.model)).transpose()
        };
        self.checkpoint.map_or_else(compute, |checkpoint| checkpoint.loss(options, compute))
    }

    /// Whether a checkpoint has the measurement of a point.
    pub fn is_known(&self, point: &Point) -> bool {
        self.checkpoint.filter(|_| self.comparison.is_some()).is_some_and(|checkpoint| checkpoint.has(point, self.baseline.is_some()))
    }

    /// Measures a point: its loss, its score if the metric is measured, and the size of its file.
    pub fn measure(&self, units: &[Unit], point: &mut Point) -> Result<()> {
        self.context.work.cancel.check()?;
        let compute = |point: &mut Point| self.compute(units, point);
        match self.checkpoint.filter(|_| self.comparison.is_some()) {
            Some(checkpoint) => {
                checkpoint.measure(point, self.baseline.is_some(), compute)?;
                // Another search may have measured the score.
                if self.baseline.is_none() {
                    point.score = None;
                    point.drop = point.measured.filter(|_| self.formats.loss() == SearchLoss::CosineDistance);
                }
                Ok(())
            }
            None => compute(point),
        }
    }

    fn compute(&self, units: &[Unit], point: &mut Point) -> Result<()> {
        let Some(Written { model, bytes }) = self.formats.rounded(units, &point.options, &self.scores, self.context)? else { return Ok(()) };
        point.bytes = bytes.unwrap_or(point.bytes);
        if self.comparison.is_some() { self.judge(model, point) } else { Ok(()) }
    }

    /// Sets the loss of a point from its model, and its score if the metric is measured.
    pub(super) fn judge(&self, model: Model, point: &mut Point) -> Result<()> {
        let loss = self.distance(&model)?;
        point.measured = Some(loss);
        if let Some(baseline) = &self.baseline {
            let (before, after) = (&baseline.score, baseline.score_of(model, self.resources())?);
            point.score = after.as_ref().map(|after| after.value);
            point.drop = after.map(|after| before.drop_to(&after) / before.value.abs());
        } else if self.formats.loss() == SearchLoss::CosineDistance {
            point.drop = Some(loss);
        }
        Ok(())
    }

    /// The KL divergence of a model from the original one in nats per token, or the cosine distance of its
    /// outputs.
    fn distance(&self, changed: &Model) -> Result<f64> {
        let (comparison, _) = self.comparison.as_ref().ok_or_else(|| Error::option("auto", "needs `--calibration`"))?;
        let fidelity = comparison.fidelity(changed, self.resources())?;
        if self.formats.loss() == SearchLoss::CosineDistance {
            // Outputs that are not finite count as unrelated. Rounding of the cosine itself must not produce
            // a loss of 0, because losses are fitted relative to measurements.
            let distance = if fidelity.cosine.is_finite() { 1.0 - fidelity.cosine } else { 1.0 };
            return Ok(distance.max(f64::EPSILON));
        }
        fidelity.kl.filter(|divergence| divergence.is_finite()).ok_or_else(|| {
            Error::run("auto", "the KL divergence of the predictions is not defined for this model", "`auto` searches formats of models with logits")
        })
    }
}

/// Measures the losses of units that the backward pass does not give, with all others as floats. In a smaller
/// structure, those of weights of the same size are assumed to be the same as in the original model, because
/// losses are sums over units, of which one has the loss of the structure: removing heads and neurons does
/// not change embeddings. For other weights, such as experts, the loss of the structure is subtracted. This
/// difference is at least the loss of the next larger format, because measurements have errors.
pub(super) fn measure_units(found: &mut Found, measurement: &Measurement) -> Result<()> {
    set_losses(found, |units, options| measurement.loss(units, options))
}

/// The option of the original model, the last structure, whose loss an option in a smaller structure has:
/// that of weights of the same size, and of floats.
fn copied(unit: &Unit, option: usize, each: usize) -> Option<Score> {
    let original = unit.options.len() - each + option % each;
    let is_float = original + 1 == unit.options.len();
    let is_same = |score: &Score| is_float || unit.options[option].is_some_and(|own| own.bytes == score.bytes);
    unit.options[original].filter(|score| !unit.weights.is_empty() && original != option && is_same(score))
}

/// The number of options of a unit of which [`measure_units`] measures the losses. `each`: number of options
/// of a structure.
pub(super) fn measured_options(unit: &Unit, each: usize) -> usize {
    (0..unit.options.len() - 1).filter(|option| unit.options[*option].is_some() && copied(unit, *option, each).is_none()).count()
}

/// The loss of the next larger format in the structure of an option; never 0, the loss of floats.
fn next_larger(unit: &Unit, option: usize, each: usize) -> f64 {
    let formats = unit.options.iter().skip(option - option % each).take(each - 1).flatten();
    let larger = formats.filter(|score| unit.options[option].is_some_and(|option| score.bytes > option.bytes));
    larger.min_by_key(|score| score.bytes).map_or(0.0, |score| score.loss).max(f64::EPSILON)
}

/// Sets the losses of units that are measured, by a function of the options of all units.
fn set_losses(found: &mut Found, measure: impl Fn(&[Unit], &[usize]) -> Result<Option<f64>>) -> Result<()> {
    let (floats, each) = (found.formats.len() - 1, found.structure_options());
    for at in (0..found.units.len()).filter(|at| found.units[*at].measured).collect::<Vec<_>>() {
        let has_weights = !found.units[at].weights.is_empty();
        let mut differences = Vec::new();
        for option in (0..floats).rev() {
            let Some(score) = found.units[at].options[option] else { continue };
            let loss = if let Some(score) = copied(&found.units[at], option, each) {
                Some(score.loss)
            } else {
                let mut options = found.floats(option);
                // The original model is the last structure, without a loss.
                let is_difference = has_weights && option + each <= floats;
                let structures = found.units.iter().zip(&options).filter(|(unit, _)| is_difference && unit.weights.is_empty());
                let structure: f64 = structures.filter_map(|(unit, option)| unit.options[*option]).map(|score| score.loss).sum();
                options[at] = option;
                differences.extend(is_difference.then_some((score.bytes, option)));
                measure(&found.units, &options)?.map(|loss| loss - structure)
            };
            if let Some(loss) = loss {
                found.units[at].options[option] = Some(Score { loss, ..score });
            }
        }
        differences.sort_unstable();
        for (_, option) in differences.into_iter().rev() {
            let least = next_larger(&found.units[at], option, each);
            found.units[at].options[option].iter_mut().for_each(|score| score.loss = score.loss.max(least));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two formats and floats, in a smaller structure and in the original model. The measured loss is the sum
    /// of that of the structure, 0.5, and those of the formats.
    #[test]
    fn losses_of_structures_are_separate_from_those_of_their_units() {
        const OPTIONS: usize = 6;
        let score = Some(Score { loss: 0.0, bytes: 8 });
        let unit = |name: &str, weights: &[&str], options: [bool; OPTIONS]| {
            let options = options.map(|possible| score.filter(|_| possible)).to_vec();
            Unit { measured: true, weights: weights.iter().map(|name| (*name).to_owned()).collect(), options, ..Unit::new(name.to_owned(), 0) }
        };
        // The second format of the experts is only possible in the smaller structure.
        let units = vec![
            unit("widths", &[], [false, false, true, false, false, true]),
            unit("embedding", &["embedding"], [true; OPTIONS]),
            unit("experts", &["experts"], [true, true, true, true, false, true]),
        ];
        let formats = (0..OPTIONS).map(|at| at.to_string()).collect();
        let mut found = Found { formats, units, structure_options: Some(3), ..Found::default() };
        let expected: usize = found.units.iter().map(|unit| measured_options(unit, 3)).sum();
        let measured = std::cell::RefCell::new(Vec::new());
        let measure = |_: &[Unit], options: &[usize]| {
            measured.borrow_mut().push(options.to_vec());
            let is_small = options.iter().all(|option| *option < 3);
            assert!(is_small || options.iter().all(|option| *option >= 3), "{options:?} has units of both models");
            let (structure, formats) = (if is_small { 0.5 } else { 0.0 }, options.iter().map(|option| [0.01, 0.02, 0.0][option % 3]).sum::<f64>());
            Ok((options != [5; 3]).then_some(structure + formats))
        };
        set_losses(&mut found, measure).unwrap();
        let losses = |at: usize| found.units[at].options.iter().map(|score| score.map(|score| (score.loss * 100.0).round() as u32)).collect::<Vec<_>>();
        assert_eq!(losses(0), [None, None, Some(50), None, None, Some(0)]);
        assert_eq!(losses(1), [1, 2, 0, 1, 2, 0].map(Some));
        assert_eq!(losses(2), [Some(1), Some(2), Some(0), Some(1), None, Some(0)]);
        // The structure, both formats of the embedding, and one of each structure of the experts.
        let measured = measured.into_inner();
        assert_eq!(measured, [[2, 2, 2], [5, 4, 5], [5, 3, 5], [5, 5, 3], [2, 2, 1]]);
        assert_eq!(measured.len(), expected);
    }

    /// Experts with fewer neurons have losses of their own.
    #[test]
    fn losses_of_smaller_weights_are_not_those_of_the_original_ones() {
        let option = |bytes: u64| Some(Score { loss: 0.0, bytes });
        let widths = vec![None, option(0), None, option(0)];
        let experts = vec![option(2), option(4), option(4), option(8)];
        let unit = |name: &str, weights: Vec<String>, options| Unit { measured: true, weights, options, ..Unit::new(name.to_owned(), 0) };
        let units = vec![unit("widths", vec![], widths), unit("experts", vec!["experts".to_owned()], experts)];
        assert_eq!(units.iter().map(|unit| measured_options(unit, 2)).collect::<Vec<_>>(), [1, 2]);
        let mut found = Found { formats: (0..4).map(|at| at.to_string()).collect(), units, structure_options: Some(2), ..Found::default() };
        set_losses(&mut found, |_, options| Ok([Some(0.75), Some(0.5), Some(0.125), None][options[1]])).unwrap();
        let losses: Vec<f64> = found.units[1].options.iter().map(|score| score.unwrap().loss).collect();
        assert_eq!(losses, [0.25, 0.0, 0.125, 0.0]);
    }

    /// A measured loss below that of the structure does not make a format better than a larger one, or free.
    #[test]
    fn losses_of_units_in_a_structure_are_positive() {
        // Three formats of descending sizes and floats, of which the original model can only have floats.
        let option = |bytes: u64| Some(Score { loss: 0.0, bytes });
        let widths = vec![None, None, None, option(0), None, None, None, option(0)];
        let sizes = vec![option(3), option(2), option(1), option(8), None, None, None, option(8)];
        let unit = |name: &str, weights: Vec<String>, options| Unit { measured: true, weights, options, ..Unit::new(name.to_owned(), 0) };
        let units = vec![unit("widths", vec![], widths), unit("experts", vec!["experts".to_owned()], sizes)];
        let losses = |measured: [f64; 3]| {
            let formats = (0..8).map(|at| at.to_string()).collect();
            let mut found = Found { formats, units: units.clone(), structure_options: Some(4), ..Found::default() };
            set_losses(&mut found, |_, options| Ok(Some(measured.get(options[1]).copied().unwrap_or(0.5)))).unwrap();
            found.units[1].options.iter().take(4).map(|score| score.unwrap().loss).collect::<Vec<_>>()
        };
        assert_eq!(losses([0.625, 0.75, 1.0]), [0.125, 0.25, 0.5, 0.0]);
        assert_eq!(losses([0.625, 0.375, 1.0]), [0.125, 0.125, 0.5, 0.0]);
        assert_eq!(losses([0.625, 0.375, 0.5]), [0.125, 0.125, 0.125, 0.0]);
        assert_eq!(losses([0.375, 0.5, 0.75]), [f64::EPSILON, f64::EPSILON, 0.25, 0.0]);
    }
}
