//! The units of a model, and what a runtime must know about its formats.

use serde::Serialize;

use crate::error::Result;
use crate::exec::Rounding;
use crate::export::Export;
use crate::model::Model;
use crate::pass::assignment::Choice;
use crate::pass::{Context, Method, Plan, Score, Scores, Step};
use crate::report::search::SearchLoss;
use crate::run_state::{Applied, RunState};
use crate::store::Weight;

/// Weights that have the same format.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Unit {
    /// Name of the layer that a runtime fuses the weights into, or of the tensor.
    pub name: String,
    /// Names of the weights.
    pub weights: Vec<String>,
    /// Number of values.
    pub parameters: u64,
    /// Expected loss and size of each format, and of floats.
    pub options: Vec<Option<Score>>,
    /// Expected difference of each format from the time of the unit in floats, if the limit is one of the
    /// latency.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub milliseconds: Vec<f64>,
    /// Whether the losses are measured, one format at a time, because the backward pass does not give them.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub measured: bool,
}

impl Unit {
    /// A unit without weights.
    pub(super) fn new(name: String, options: usize) -> Unit {
        let options = vec![Some(Score { loss: 0.0, bytes: 0 }); options];
        Unit { name, weights: Vec::new(), parameters: 0, options, milliseconds: Vec::new(), measured: false }
    }

    /// The options of the unit by index. Their cost is their size, or if times are known, the time in
    /// nanoseconds by which they are slower than the fastest option.
    pub(super) fn choices(&self) -> Vec<(usize, Choice)> {
        let existing = || self.options.iter().enumerate().filter_map(|(at, option)| Some((at, (*option)?)));
        let time = |at: usize| self.milliseconds.get(at).copied();
        let fastest = existing().filter_map(|(at, _)| time(at)).fold(f64::INFINITY, f64::min);
        let cost = |at: usize, score: Score| time(at).map_or(score.bytes, |time| (1e6 * (time - fastest)).round() as u64);
        existing().map(|(at, score)| (at, Choice { cost: cost(at, score), loss: score.loss })).collect()
    }

    /// Adds a weight with the scores of its formats. A format that cannot store one of the weights is not an
    /// option of the unit.
    pub(super) fn add(&mut self, name: &str, weight: &Weight, scores: impl Iterator<Item = Option<Score>>) {
        self.weights.push(name.to_owned());
        self.parameters += weight.elements() as u64;
        for (option, score) in self.options.iter_mut().zip(scores) {
            *option = option.zip(score).map(|(all, score)| Score { loss: all.loss + score.loss, bytes: all.bytes + score.bytes });
        }
    }
}

/// Passes and output formats that write a choice of formats.
#[derive(Debug, Clone)]
pub struct Writing {
    /// Passes.
    pub passes: Vec<Step>,
    /// Output formats; safetensors if empty.
    pub exports: Vec<Export>,
}

/// A model in a choice of formats.
pub(super) struct Written {
    /// The model.
    pub model: Model,
    /// Size of its file, if it is known more precisely than the sizes of the formats.
    pub bytes: Option<u64>,
}

/// The model after passes whose plans `execute` executes, and the state of the run.
pub(super) fn applied(input: &Model, passes: &[Step], mut execute: impl FnMut(Plan) -> Result<(Model, Applied)>) -> Result<(Model, RunState)> {
    let (mut model, mut run) = (input.clone(), RunState::default());
    for step in passes {
        let (changed, record) = execute(step.pass().plan(&model, &run)?)?;
        model = changed;
        run.add(record);
    }
    run.notes.extend(model.settle_ties(input)?);
    Ok((model, run))
}

/// Removes the elements for which `kept` is false; elements without an entry remain.
pub(super) fn retain<T>(elements: &mut Vec<T>, kept: &[bool]) {
    let mut flags = kept.iter();
    elements.retain(|_| flags.next().copied().unwrap_or(true));
}

/// The formats of a runtime, for a model. The option of a unit is the index of its format; the last one is
/// floats.
pub(super) trait Formats {
    /// Display names of the formats, in ascending order of bits, and of floats.
    fn names(&self) -> Vec<String>;

    /// Removes the formats for which `kept` is false.
    fn retain(&mut self, kept: &[bool]);

    /// The loss that the search minimizes.
    fn loss(&self) -> SearchLoss {
        SearchLoss::KlDivergence
    }

    /// How the runtime rounds activations at run time.
    fn rounding(&self) -> Rounding {
        Rounding::Token
    }

    /// Expected losses of the formats of each weight; 0 without calibration samples.
    ///
    /// # Errors
    /// If the model cannot run, or no weight can be quantized.
    fn scores(&self, context: &Context) -> Result<Scores>;

    /// Runs of whole models over the calibration samples that the [scores](Formats::scores) take, at most.
    /// Without an implementation: a forward pass, a backward pass, which is twice the work, and a forward
    /// pass to the inputs of the layers.
    ///
    /// # Errors
    /// If no weight can be quantized.
    fn score_runs(&self) -> Result<u64> {
        Ok(4)
    }

    /// Runs of whole models over the calibration samples to remove the units of a mixture, at most.
    fn prune_runs(&self) -> u64 {
        0
    }

    /// Sizes of the formats of each weight, with losses of 0; `None` if they are only known with the scores.
    ///
    /// # Errors
    /// If no weight can be quantized.
    fn sizes(&self) -> Result<Option<Scores>> {
        Ok(None)
    }

    /// The units with the scores of their formats.
    fn units(&self, scores: &Scores) -> Vec<Unit>;

    /// Size of the output without the units.
    fn other_bytes(&self, units: &[Unit]) -> u64;

    /// Common mixtures (uniform schemes, or those of llama.cpp), by name, as options of all units.
    ///
    /// # Errors
    /// If the output format cannot represent the model.
    fn references(&self, units: &[Unit]) -> Result<Vec<(String, Vec<usize>)>>;

    /// The model with the units in the formats with these indices, with weights rounded to nearest; `None` if
    /// all are floats.
    ///
    /// # Errors
    /// If a weight cannot be rounded.
    fn rounded(&self, units: &[Unit], options: &[usize], scores: &Scores, context: &Context) -> Result<Option<Written>>;

    /// A model that takes the same time as the units in the formats with these indices; `None` if all are
    /// floats.
    ///
    /// # Errors
    /// If a weight cannot be rounded.
    fn timed(&self, units: &[Unit], options: &[usize], context: &Context) -> Result<Option<Written>> {
        self.rounded(units, options, &Scores::default(), context)
    }

    /// Number of options of a structure: all units must have options of the same structure, and the last
    /// option of each is that of floats.
    fn structure_options(&self) -> usize {
        self.names().len()
    }

    /// Output formats of a model with all units as floats; safetensors if empty.
    fn float_exports(&self) -> Vec<Export> {
        Vec::new()
    }

    /// A model after the passes of [`writing`](Formats::writing), with the weights that the output format
    /// rounds.
    fn stored(&self, model: Model, _units: &[Unit], _options: &[usize]) -> Model {
        model
    }

    /// The passes and output formats of the units in the formats with these indices; `None` if all are
    /// floats.
    ///
    /// # Errors
    /// If the runtime does not support the method.
    fn writing(&self, units: &[Unit], options: &[usize], method: Option<Method>) -> Result<Option<Writing>>;
}
