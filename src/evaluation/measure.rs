//! Going over a data set with one model or several.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::{Duration, Instant};

use candle_core::Tensor;

use super::{Fidelity, Runner, Score, classification, embedding, fidelity, language_modelling};
use crate::data::{Batch, DataSet, Task};
use crate::error::{Error, Result};
use crate::exec::Inputs;
use crate::work::Work;

/// Named outputs of a model.
pub type Outputs = BTreeMap<String, Tensor>;

/// Sums up how well a model does.
pub(super) trait Metric {
    /// Takes a batch and what the model says to it.
    fn add(&mut self, batch: &Batch, outputs: &Outputs) -> Result<()>;
    /// The score of all batches.
    fn score(&self) -> Result<Score>;
}

/// What one model did.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcome {
    /// How well it does, where there are labels.
    pub score: Option<Score>,
    /// Time that it ran.
    pub time: Duration,
}

/// What all models did.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcomes {
    /// What was asked.
    pub task: Task,
    /// On how many samples (windows, for perplexity).
    pub samples: usize,
    /// Model by model.
    pub models: Vec<Outcome>,
    /// Pair by pair.
    pub pairs: Vec<Fidelity>,
}

/// Sums over batches, for models and for pairs of them.
struct Sums {
    metrics: Vec<Option<Box<dyn Metric>>>,
    times: Vec<Duration>,
    pairs: Vec<((usize, usize), fidelity::Sums)>,
    samples: usize,
}

impl Sums {
    fn new(task: Task, models: usize, pairs: &[(usize, usize)]) -> Sums {
        Sums {
            metrics: (0..models).map(|_| metric(task)).collect(),
            times: vec![Duration::ZERO; models],
            pairs: pairs.iter().map(|pair| (*pair, fidelity::Sums::default())).collect(),
            samples: 0,
        }
    }

    fn add(&mut self, batch: &Batch, models: &mut [Box<dyn Runner + '_>]) -> Result<()> {
        let mut answers = Vec::with_capacity(models.len());
        for (index, model) in models.iter_mut().enumerate() {
            let start = Instant::now();
            let outputs = model.run(&batch.inputs)?;
            self.times[index] += start.elapsed();
            if let Some(metric) = &mut self.metrics[index] {
                metric.add(batch, &outputs)?;
            }
            answers.push(outputs);
        }
        for ((before, after), sums) in &mut self.pairs {
            sums.add(batch, &answers[*before], &answers[*after])?;
        }
        self.samples += batch.samples;
        Ok(())
    }

    /// The same for several batches, which models are told of first.
    fn add_all(&mut self, batches: &[Batch], models: &mut [Box<dyn Runner + '_>]) -> Result<()> {
        for (model, time) in models.iter_mut().zip(&mut self.times) {
            let start = Instant::now();
            model.prepare(batches)?;
            *time += start.elapsed();
        }
        batches.iter().try_for_each(|batch| self.add(batch, models))
    }

    fn finish(self, task: Task) -> Result<Outcomes> {
        let outcome = |(metric, time): (Option<Box<dyn Metric>>, Duration)| Ok(Outcome { score: metric.map(|metric| metric.score()).transpose()?, time });
        Ok(Outcomes {
            task,
            samples: self.samples,
            models: self.metrics.into_iter().zip(self.times).map(outcome).collect::<Result<_>>()?,
            pairs: self.pairs.into_iter().map(|(_, sums)| sums.finish()).collect(),
        })
    }
}

/// Runs models over a data set, and compares those of each pair with each other.
///
/// # Errors
/// Reading or running fails, an output that the task needs is missing, or the work is cancelled.
pub fn evaluate(data: &DataSet, models: &mut [Box<dyn Runner + '_>], pairs: &[(usize, usize)], work: &Work) -> Result<Outcomes> {
    let mut sums = Sums::new(data.task(), models.len(), pairs);
    if models.iter().all(|model| model.together(&Inputs::new()).is_none()) {
        data.for_each_batch("Evaluating", work, |batch| sums.add(&batch, models))?;
        return sums.finish(data.task());
    }
    // Models tell how far they are, block by block.
    let mut consumer = (sums, models);
    let most = |batch: &Batch, models: &[Box<dyn Runner + '_>]| models.iter().filter_map(|model| model.together(&batch.inputs)).min().unwrap_or(1);
    data.for_each_group(work, &mut consumer, |(_, models), batch| most(batch, models), |(sums, models), batches| sums.add_all(batches, models))?;
    let (sums, _) = consumer;
    sums.finish(data.task())
}

/// How close two models' answers to one batch are.
///
/// # Errors
/// Running fails.
pub fn compare(batch: &Batch, models: &mut [Box<dyn Runner + '_>; 2]) -> Result<Fidelity> {
    let [before, after] = models;
    closeness(batch, &before.run(&batch.inputs)?, &after.run(&batch.inputs)?)
}

/// How close answers to one batch are to others.
///
/// # Errors
/// They share no output, or their shapes differ.
pub fn closeness(batch: &Batch, before: &Outputs, after: &Outputs) -> Result<Fidelity> {
    let mut sums = fidelity::Sums::default();
    sums.add(batch, before, after)?;
    Ok(sums.finish())
}

fn metric(task: Task) -> Option<Box<dyn Metric>> {
    match task {
        Task::Classification => Some(Box::<classification::Classification>::default()),
        Task::LanguageModelling => Some(Box::<language_modelling::Perplexity>::default()),
        Task::Embedding => Some(Box::<embedding::Similarity>::default()),
        Task::Fidelity => None,
    }
}

/// The output that carries the answer: the first of the names that there is, else the only one of this rank.
pub(super) fn answer<'o>(outputs: &'o Outputs, names: &[&str], rank: usize) -> Result<(&'o str, &'o Tensor)> {
    let named = names.iter().find_map(|name| outputs.get_key_value(*name));
    let mut fitting = outputs.iter().filter(|(_, tensor)| tensor.rank() == rank);
    let mut only = || fitting.next().filter(|_| fitting.next().is_none());
    let found = match named {
        Some(named) => Some(named).filter(|(_, tensor)| tensor.rank() == rank),
        None => only(),
    };
    found.map(|(name, tensor)| (name.as_str(), tensor)).ok_or_else(|| {
        let there = outputs.iter().map(|(name, tensor)| format!("`{name}` {:?}", tensor.dims())).collect::<Vec<_>>().join(", ");
        Error::option("task", format!("needs an output `{}` of {rank} axes; the model gives {there}", names.first().unwrap_or(&"")))
    })
}

/// An error of a tensor that could not be computed.
pub(super) fn computed(e: candle_core::Error) -> Error {
    Error::option("evaluation", e)
}

/// Values that figures are made of at once on a device, as doubles.
const AT_ONCE: usize = 1 << 24;

/// Figures of rows of a width, made of as many at once as fit.
pub(super) fn by_parts<T>(rows: usize, width: usize, figures: impl Fn(Range<usize>) -> candle_core::Result<Vec<T>>) -> candle_core::Result<Vec<T>> {
    let step = (AT_ONCE / width.max(1)).max(1);
    let parts = (0..rows).step_by(step).map(|first| figures(first..rows.min(first + step)));
    Ok(parts.collect::<candle_core::Result<Vec<_>>>()?.into_iter().flatten().collect())
}
