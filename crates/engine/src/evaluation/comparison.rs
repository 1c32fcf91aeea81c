//! Comparison of changed models with an original one: of their scores, or of their outputs.

use std::sync::{Arc, OnceLock};

use candle_core::Device;

use super::{Fidelity, FidelityAccumulator, Outputs, Runner, Runs, Score, Subject, evaluate, evaluate_in, load};
use crate::data::{Batch, DataSet, Order};
use crate::error::{Error, Result};
use crate::exec::{MemoryTracker, Rounding};
use crate::model::Model;
use crate::work::{MemoryLimit, Work};

/// Maximum memory of cached outputs of the original model, in bytes.
const CACHE_BYTES: usize = 256 << 20;

/// Device, memory and threads on which models run.
#[derive(Clone, Copy)]
pub struct Resources<'a> {
    /// Device of the built-in executor.
    pub device: &'a Device,
    /// Memory limit of running models.
    pub memory: MemoryLimit,
    /// Threads, progress and cancellation.
    pub work: Work<'a>,
    /// How activations are quantized at run time.
    pub rounding: Rounding,
    /// Records the memory of running models, and counts their work.
    pub tracker: Option<&'a Arc<MemoryTracker>>,
}

impl Resources<'_> {
    fn load<'s>(&self, subjects: &'s mut [Subject], first: &Batch, work: &Work<'s>) -> Result<Vec<Box<dyn Runner + 's>>> {
        load(subjects, (&first.inputs, self.device), self.memory, Runs::Repeated, work)
    }

    fn subject(&self, model: Model) -> Result<Subject> {
        Ok(Subject::from_model(model)?.with_rounding(self.rounding).tracked(self.tracker))
    }
}

/// The samples on which outputs are compared.
pub enum Samples {
    /// All samples of a set.
    Set(Arc<DataSet>),
    /// Batches in memory.
    Batches(Vec<Batch>),
}

impl Samples {
    fn first(&self) -> Result<Option<Batch>> {
        match self {
            Samples::Set(data) => data.first().map(Some),
            Samples::Batches(batches) => Ok(batches.first().cloned()),
        }
    }
}

/// Compares the outputs of models with those of an original one on the same samples.
pub struct Comparison {
    original: Model,
    samples: Samples,
    /// Outputs of the original for all batches, if they are not too large, after the first comparison.
    cached: OnceLock<Vec<Outputs>>,
}

impl Comparison {
    /// Compares with this model on these samples.
    pub fn new(original: Model, samples: Samples) -> Comparison {
        Comparison { original, samples, cached: OnceLock::new() }
    }

    /// Fidelity of the outputs of a model to those of the original.
    pub fn fidelity(&self, model: &Model, resources: Resources) -> Result<Fidelity> {
        let cached = self.cached.get();
        let original = Some(&self.original).filter(|_| cached.is_none());
        let (mut fidelity, mut known) = (FidelityAccumulator::new(self.original.logit_kind()?), cached.into_iter().flatten());
        let (mut bytes, mut kept) = (0, Vec::new());
        self.each_batch([model].into_iter().chain(original), resources, |batch, outputs| {
            let mut outputs = outputs.into_iter();
            let Some(after) = outputs.next() else { return Ok(()) };
            if let Some(before) = known.next() {
                return fidelity.add(batch, before, &after);
            }
            let Some(before) = outputs.next() else { return Ok(()) };
            fidelity.add(batch, &before, &after)?;
            bytes += before.values().map(|output| output.elem_count() * output.dtype().size_in_bytes()).sum::<usize>();
            if bytes > CACHE_BYTES {
                kept.clear();
            } else {
                kept.push(before);
            }
            Ok(())
        })?;
        if cached.is_none() && bytes <= CACHE_BYTES {
            drop(self.cached.set(kept));
        }
        Ok(fidelity.finish())
    }

    /// Runs models on all samples.
    fn each_batch<'m>(
        &self,
        models: impl IntoIterator<Item = &'m Model>,
        resources: Resources,
        mut consume: impl FnMut(&Batch, Vec<Outputs>) -> Result<()>,
    ) -> Result<()> {
        let Some(first) = self.samples.first()? else { return Ok(()) };
        let mut subjects = models.into_iter().map(|model| resources.subject(model.clone())).collect::<Result<Vec<_>>>()?;
        let work = resources.work.quiet();
        let mut runners = resources.load(&mut subjects, &first, &work)?;
        // Models that are larger than memory are read once per group of batches.
        let size = |runners: &[Box<dyn Runner + '_>], batch: &Batch| runners.iter().filter_map(|runner| runner.group_size(&batch.inputs)).min().unwrap_or(1);
        let mut run = |runners: &mut [Box<dyn Runner + '_>], batches: &[Batch]| {
            runners.iter_mut().try_for_each(|runner| runner.prepare(batches))?;
            for batch in batches {
                work.cancel.check()?;
                let outputs = runners.iter_mut().map(|runner| runner.run(&batch.inputs)).collect::<Result<_>>()?;
                consume(batch, outputs)?;
            }
            Ok::<_, Error>(())
        };
        match &self.samples {
            Samples::Batches(batches) => {
                let size = size(&runners, &first);
                batches.chunks(size.max(1)).try_for_each(|batches| run(&mut runners, batches))
            }
            Samples::Set(data) => {
                let mut consumer = (runners, run);
                let capacity = |(runners, _): &(Vec<_>, _), batch: &Batch| size(runners, batch);
                data.for_each_group((Order::default(), usize::MAX), &work, &mut consumer, capacity, |(runners, run), batches| run(runners, batches))
            }
        }
    }
}

/// The score of an original model on labels, with which those of changed models are compared.
pub struct Baseline {
    data: Arc<DataSet>,
    /// The order of the samples and the number that is enough, unless all samples are used.
    part: Option<(Order, usize)>,
    /// The score of the original model.
    pub score: Score,
    /// Number of samples.
    pub samples: usize,
}

impl Baseline {
    /// Scores the original model on all samples of a set, or in this order until this number of samples is
    /// reached. Returns `None` if the samples have no labels.
    pub fn new(original: Model, data: Arc<DataSet>, part: Option<(Order, usize)>, resources: Resources) -> Result<Option<Baseline>> {
        let scored = scored(original, &data, part, resources)?;
        Ok(scored.map(|(score, samples)| Baseline { data, part, score, samples }))
    }

    /// Whether only a part of the samples is used.
    pub fn is_part(&self) -> bool {
        self.part.is_some()
    }

    /// The data set.
    pub fn data(&self) -> &DataSet {
        &self.data
    }

    /// The score of a changed model.
    pub fn score_of(&self, model: Model, resources: Resources) -> Result<Option<Score>> {
        Ok(scored(model, &self.data, self.part, resources)?.map(|(score, _)| score))
    }
}

/// The score of a model, and the number of samples; `None` without labels.
fn scored(model: Model, data: &DataSet, part: Option<(Order, usize)>, resources: Resources) -> Result<Option<(Score, usize)>> {
    let mut subjects = [resources.subject(model)?];
    let mut runners = resources.load(&mut subjects, &data.first()?, &resources.work)?;
    let outcomes = match part {
        Some(part) => evaluate_in(part, data, &mut runners, &[], &resources.work)?,
        None => evaluate(data, &mut runners, &[], &resources.work)?,
    };
    let samples = outcomes.samples;
    Ok(outcomes.models.into_iter().next().and_then(|outcome| outcome.score).map(|score| (score, samples)))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use candle_core::Tensor;

    use super::*;
    use crate::data::References;
    use crate::ir::decoder::{MASK, TOKENS};
    use crate::work::{Cancel, Silent};

    /// The first comparison caches the outputs of the original. Models that run block by block have the same
    /// fidelity.
    #[test]
    fn fidelity_depends_neither_on_the_cache_nor_on_memory() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/models/llama");
        let (original, cancel) = (Model::open(folder).unwrap(), Cancel::default());
        let mut changed = original.clone();
        let names = [0, 1].map(|layer| format!("model.layers.{layer}.mlp.up_proj.weight"));
        for (name, other) in names.iter().zip(names.iter().rev()) {
            let weight = original.weights.get(other).unwrap().clone();
            changed.weights.by_name.insert(name.clone(), weight);
        }
        let batch = |first: i64| {
            let ids = Tensor::new(&[[first, 2, 3, 4]], &Device::Cpu).unwrap();
            let inputs = [(MASK.to_owned(), ids.ones_like().unwrap()), (TOKENS.to_owned(), ids)];
            Batch { inputs: inputs.into(), references: References::None, samples: 1 }
        };
        let comparison = Comparison::new(original, Samples::Batches([1, 5, 9].map(batch).to_vec()));
        let fidelity = |bytes: Option<u64>| {
            let work = Work { threads: 1, progress: &Silent, cancel: &cancel };
            let memory = MemoryLimit { bytes, explicit: false };
            comparison.fidelity(&changed, Resources { device: &Device::Cpu, memory, work, rounding: Rounding::Token, tracker: None }).unwrap().cosine
        };
        let first = fidelity(None);
        assert!(first < 0.9999, "{first}");
        assert_eq!(comparison.cached.get().map(Vec::len), Some(3));
        assert!((fidelity(None) - first).abs() < 1e-9);
        assert!((fidelity(Some(1 << 14)) - first).abs() < 1e-6);
    }
}
