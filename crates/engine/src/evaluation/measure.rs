//! Evaluates one or several models on a data set.

use std::time::{Duration, Instant};

use super::metric::{Metric, Outputs};
use super::{Fidelity, FidelityAccumulator, Runner, Score, classification, custom_metric, embedding, language_modelling};
use crate::data::{Batch, DataSet, Order, References, Task};
use crate::error::{Error, Result};
use crate::evaluation::{Accuracy, Runtime};
use crate::exec::Inputs;
use crate::work::{Event, ProgressUnit, Work};

/// Evaluation result of one model.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcome {
    /// Score on labelled data; `None` for the fidelity task.
    pub score: Option<Score>,
    /// Total run time.
    pub time: Duration,
}

/// Evaluation results of all models.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcomes {
    /// Evaluation task.
    pub task: Task,
    /// Number of samples (windows, for perplexity; samples with a label, for accuracy).
    pub samples: usize,
    /// Results in the order of the models.
    pub models: Vec<Outcome>,
    /// Fidelity in the order of the pairs.
    pub pairs: Vec<Fidelity>,
}

impl Outcomes {
    /// These outcomes, with those of models that were evaluated separately before them.
    #[must_use]
    pub fn after(self, before: Outcomes) -> Outcomes {
        Outcomes { models: before.models.into_iter().chain(self.models).collect(), ..self }
    }

    /// The accuracy of the input and the output on `data`. The models are those of the input on each
    /// runtime, if it was run, followed at `first_after` by those of the output; models after them were
    /// only run for comparison.
    pub fn accuracy(&self, runtimes: &[Runtime], data: &DataSet, first_after: usize) -> Accuracy {
        let (before, after) = self.models.split_at(first_after);
        let values = |side: &[Outcome]| runtimes.iter().zip(side).filter_map(|(runtime, outcome)| Some((*runtime, outcome.score.as_ref()?.value))).collect();
        let [old, new] = [before, after].map(|side| side.first().and_then(|outcome| outcome.score.as_ref()));
        let both = old.zip(new);
        // A count that a score does not contain, such as that of outputs with NaN, is zero.
        let figure = |score: &Score, name: &str| score.more.get(name).copied().unwrap_or(0.0);
        let more =
            |(old, new): (&Score, &Score)| old.more.keys().chain(new.more.keys()).map(|name| (name.clone(), [figure(old, name), figure(new, name)])).collect();
        Accuracy {
            task: self.task.to_string(),
            metric: new.map(|score| score.metric.clone()),
            data: data.description().to_owned(),
            data_blake3: None,
            samples: self.samples,
            before: values(before),
            after: values(after),
            ci95: both.and_then(|(old, new)| Some([old.ci95?, new.ci95?])),
            drop: both.map(|(old, new)| old.drop_to(new)),
            fidelity: None,
            more: both.map(more).unwrap_or_default(),
        }
    }
}

/// State of an evaluation: the metrics of each model, and the fidelity of each pair.
struct Evaluation {
    metrics: Vec<Option<Box<dyn Metric>>>,
    times: Vec<Duration>,
    pairs: Vec<((usize, usize), FidelityAccumulator)>,
    samples: usize,
    /// Whether samples without a label do not count.
    counts_labels: bool,
}

impl Evaluation {
    fn new(data: &DataSet, models: usize, pairs: &[(usize, usize)]) -> Result<Evaluation> {
        Ok(Evaluation {
            metrics: (0..models).map(|_| metric(data)).collect::<Result<_>>()?,
            times: vec![Duration::ZERO; models],
            pairs: pairs.iter().map(|pair| (*pair, FidelityAccumulator::new(data.logits()))).collect(),
            samples: 0,
            counts_labels: data.task() == Task::Classification && data.metric().is_none(),
        })
    }

    fn add(&mut self, batch: &Batch, models: &mut [Box<dyn Runner + '_>]) -> Result<()> {
        let mut all_outputs = Vec::with_capacity(models.len());
        for (index, model) in models.iter_mut().enumerate() {
            let start = Instant::now();
            let outputs = model.run(&batch.inputs)?;
            self.times[index] += start.elapsed();
            if let Some(metric) = &mut self.metrics[index] {
                metric.add(batch, &outputs)?;
            }
            all_outputs.push(outputs);
        }
        for ((before, after), fidelity) in &mut self.pairs {
            fidelity.add(batch, &all_outputs[*before], &all_outputs[*after])?;
        }
        self.samples += match &batch.references {
            References::Classes(classes) if self.counts_labels => classes.iter().flatten().count(),
            _ => batch.samples,
        };
        Ok(())
    }

    /// Adds several batches, after passing all of them to [`Runner::prepare`].
    fn add_all(&mut self, batches: &[Batch], models: &mut [Box<dyn Runner + '_>], work: &Work) -> Result<()> {
        for (model, time) in models.iter_mut().zip(&mut self.times) {
            let start = Instant::now();
            model.prepare(batches)?;
            *time += start.elapsed();
        }
        // Models that run block by block compute their last block here, which may take long.
        let samples = |batch: &Batch| batch.samples as u64;
        let shown = batches.len() > 1;
        if shown {
            let total = batches.iter().map(samples).sum();
            work.progress.on(Event::Begin { stage: "Evaluating", total, done: 0, unit: ProgressUnit::Samples });
        }
        let added = batches.iter().try_for_each(|batch| {
            work.cancel.check()?;
            self.add(batch, models)?;
            if shown { work.advance(samples(batch)) } else { Ok(()) }
        });
        if shown {
            work.progress.on(Event::End);
        }
        added
    }

    fn finish(self, task: Task) -> Result<Outcomes> {
        let outcome = |(metric, time): (Option<Box<dyn Metric>>, Duration)| Ok(Outcome { score: metric.map(|metric| metric.score()).transpose()?, time });
        Ok(Outcomes {
            task,
            samples: self.samples,
            models: self.metrics.into_iter().zip(self.times).map(outcome).collect::<Result<_>>()?,
            pairs: self.pairs.into_iter().map(|(_, fidelity)| fidelity.finish()).collect(),
        })
    }
}

/// Runs models over a data set, computes the metric of each, and compares the outputs of each pair of
/// models. Fails if an output that the task needs is missing.
pub fn evaluate(data: &DataSet, models: &mut [Box<dyn Runner + '_>], pairs: &[(usize, usize)], work: &Work) -> Result<Outcomes> {
    if models.iter().all(|model| model.group_size(&Inputs::new()).is_none()) {
        let mut evaluation = Evaluation::new(data, models.len(), pairs)?;
        data.for_each_batch("Evaluating", work, |batch| evaluation.add(&batch, models))?;
        return evaluation.finish(data.task());
    }
    // Blockwise runners report progress themselves.
    evaluate_in((Order::default(), usize::MAX), data, models, pairs, work)
}

/// Like [`evaluate`], on the batches of an order, for example without the first ones, until they have at
/// least this number of samples.
pub fn evaluate_in(part: (Order, usize), data: &DataSet, models: &mut [Box<dyn Runner + '_>], pairs: &[(usize, usize)], work: &Work) -> Result<Outcomes> {
    let mut consumer = (Evaluation::new(data, models.len(), pairs)?, models);
    let size = |batch: &Batch, models: &[Box<dyn Runner + '_>]| models.iter().filter_map(|model| model.group_size(&batch.inputs)).min().unwrap_or(1);
    data.for_each_group(part, work, &mut consumer, |(_, models), batch| size(batch, models), |(state, models), batches| state.add_all(batches, models, work))?;
    let (evaluation, _) = consumer;
    evaluation.finish(data.task())
}

/// Runs two models on one batch and compares their outputs.
pub fn compare(batch: &Batch, models: &mut [Box<dyn Runner + '_>; 2]) -> Result<Fidelity> {
    let [before, after] = models;
    output_fidelity(batch, &before.run(&batch.inputs)?, &after.run(&batch.inputs)?)
}

/// Fidelity of the outputs `after` to the outputs `before` of the same batch. Fails if no float output of the
/// same name has the same shape in both.
pub fn output_fidelity(batch: &Batch, before: &Outputs, after: &Outputs) -> Result<Fidelity> {
    let mut fidelity = FidelityAccumulator::default();
    fidelity.add(batch, before, after)?;
    Ok(fidelity.finish())
}

fn metric(data: &DataSet) -> Result<Option<Box<dyn Metric>>> {
    if let Some(name) = data.metric() {
        return Ok(Some(Box::new(custom_metric::Registered::new(name)?)));
    }
    Ok(match data.task() {
        Task::Classification => Some(Box::<classification::Classification>::default()),
        Task::LanguageModelling => Some(Box::<language_modelling::Perplexity>::default()),
        Task::Embedding => Some(Box::<embedding::Similarity>::default()),
        Task::Contrastive => {
            return Err(Error::option("task", "contrastive is the task of training data: evaluate on pairs with scores, `task: embedding`"));
        }
        Task::Fidelity => None,
    })
}
