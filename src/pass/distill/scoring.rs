//! Evaluation of a model while it is trained.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::adapters::{self, Adapters};
use crate::data::{Batch, DataSet, Task};
use crate::error::{Error, Result};
use crate::evaluation::{self, Candle, Fidelity, Runner, Runs, Score, Subject};
use crate::exec::{Executor, ManagedTensor};
use crate::ir::Graph;
use crate::model::Model;
use crate::pass::Context;
use crate::train::{Quantizers, Training, Weights};
use crate::work::{Cancel, Work};

/// Evaluation data, and the model that the score compares with.
pub(super) struct ScoreData<'a> {
    samples: Option<Arc<DataSet>>,
    /// The teacher, if the score is the fidelity to it.
    reference: Option<&'a Model>,
}

impl<'a> ScoreData<'a> {
    /// Opens the evaluation data, if there is any. Fails if checkpoints must be compared, but have no score.
    pub fn open((name, training): (&str, &Training), subject: &Subject, teacher: Option<&'a Model>, (context, rank): (&Context, usize)) -> Result<Self> {
        let samples = context.data.evaluation.as_ref().map(|data| context.data.open(data, subject.target())).transpose()?;
        // Without labels, the score is the fidelity to the teacher. Only rank 0 evaluates; other ranks do not
        // need evaluation data.
        let measures_fidelity = samples.as_ref().is_some_and(|data| data.task() == Task::Fidelity);
        let reference = teacher.filter(|_| measures_fidelity);
        let is_scored = samples.is_some() && (!measures_fidelity || reference.is_some()) || rank > 0;
        if training.evaluate_every.is_none() || is_scored {
            return Ok(ScoreData { samples, reference });
        }
        let missing =
            if samples.is_some() { "labels, a teacher, or `task: language-modelling`, in" } else { "samples with labels, or text for a language model:" };
        Err(Error::option(format!("{name}: evaluate_every"), format!("needs a score to compare checkpoints: add {missing} `data: {{ evaluation: ... }}`")))
    }
}

/// Computes the score of weights in training.
pub(super) struct Scoring<'a> {
    pub data: ScoreData<'a>,
    /// The model before training.
    pub model: &'a Model,
    /// Its graph, with trained quantizers.
    pub graph: &'a Graph,
    pub adapters: Option<&'a Adapters>,
    pub quantizers: Option<&'a Quantizers>,
    /// Whether the written weights differ from those in training.
    pub is_rounded_when_written: bool,
    /// The first batch of the training data.
    pub first: &'a Batch,
    pub context: &'a Context<'a>,
}

impl Scoring<'_> {
    /// The score of weights; `None` without evaluation data.
    pub fn score(&self, weights: &Weights, state: &BTreeMap<String, ManagedTensor>) -> Result<Option<Score>> {
        let Some(samples) = &self.data.samples else { return Ok(None) };
        let context = self.context;
        // Evaluation ignores cancellation, so that a checkpoint is written afterwards.
        let work = Work { cancel: &Cancel::default(), ..context.work.quiet() };
        let (mut written, mut original) = (None, None);
        let mut runners: Vec<Box<dyn Runner>> = if self.is_rounded_when_written {
            // Evaluate the model that would be written.
            let mut model = self.model.clone();
            weights.write_to(state, &mut model)?;
            self.quantizers.map_or(Ok(()), |quantizers| quantizers.write_to(state, &mut model))?;
            let model = adapters::finished(self.adapters, model)?;
            evaluation::load([written.insert(Subject::from_model(model)?)], (&self.first.inputs, &context.device), context.memory, Runs::Repeated, &work)?
        } else {
            vec![Box::new(Candle::new(Executor::new(self.graph, weights.parameters_of(state)?, context.device.clone())))]
        };
        let pairs: &[(usize, usize)] = if self.data.reference.is_some() { &[(1, 0)] } else { &[] };
        if let Some(reference) = self.data.reference {
            let subject = original.insert(Subject::from_model(reference.clone())?);
            runners.extend(evaluation::load([subject], (&self.first.inputs, &context.device), context.memory, Runs::Repeated, &work)?);
        }
        let outcomes = evaluation::evaluate(samples, &mut runners, pairs, &work)?;
        let fidelity = outcomes.pairs.first().map(Fidelity::score);
        Ok(fidelity.or_else(|| outcomes.models.into_iter().next().and_then(|outcome| outcome.score)))
    }
}
