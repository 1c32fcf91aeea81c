//! Calibration samples on their way through the whole and the smaller model.

use candle_core::Tensor;

use crate::data::Batch;
use crate::error::Result;
use crate::exec::{Executor, Observation, PartialRun};
use crate::model::Model;
use crate::pass::Context;
use crate::pass::prune_structured::calibrate;
use crate::work::{Event, ProgressUnit};

/// Bytes of stopped runs that are held. Samples beyond them run from the beginning for each site.
const HELD: u64 = 1 << 30;

/// A sample whose runs have stopped at a site.
struct Stopped {
    batch: Batch,
    runs: [PartialRun; 2],
}

/// Two models with samples that go through both, site by site: each node runs once for a sample that is held.
pub(super) struct Pairs<'a> {
    executors: [Executor<'a>; 2],
    observations: [Observation; 2],
    model: &'a Model,
    context: &'a Context<'a>,
    /// The first samples.
    held: Vec<Stopped>,
    samples: u64,
    batches: usize,
}

impl<'a> Pairs<'a> {
    /// Reads the samples; `wanted` are the values of all sites.
    ///
    /// # Errors
    /// There are none, or they do not fit the model.
    pub fn new(executors: [Executor<'a>; 2], wanted: impl Fn(&str) -> bool, model: &'a Model, context: &'a Context<'a>) -> Result<Self> {
        let observations = executors.each_ref().map(|executor| executor.observation(&wanted));
        let mut pairs = Pairs { executors, observations, model, context, held: Vec::new(), samples: 0, batches: 0 };
        let mut bytes = 0;
        calibrate::for_each("Reading samples", model, context, |batch| {
            pairs.samples += batch.samples as u64;
            pairs.batches += 1;
            if bytes <= HELD {
                let stopped = pairs.begin(batch)?;
                bytes += stopped.bytes();
                pairs.held.push(stopped);
            }
            Ok(())
        })?;
        pairs.trim();
        Ok(pairs)
    }

    fn begin(&self, batch: Batch) -> Result<Stopped> {
        let runs = [self.executors[0].start(&batch.inputs)?, self.executors[1].start(&batch.inputs)?];
        Ok(Stopped { batch, runs })
    }

    /// Takes every sample to a site, and shows its value in both models.
    ///
    /// # Errors
    /// Running fails, the consumer does, or the work is cancelled.
    pub fn each(&mut self, value: &str, mut see: impl FnMut(&Batch, [&Tensor; 2]) -> Result<()>) -> Result<()> {
        let mut held = std::mem::take(&mut self.held);
        let mut advance = |stopped: &mut Stopped| {
            let [first, second] = &mut stopped.runs;
            let x = self.executors[0].advance(&self.observations[0], first, value)?;
            let y = self.executors[1].advance(&self.observations[1], second, value)?;
            see(&stopped.batch, [&x, &y])
        };
        let context = self.context;
        context.work.progress.on(Event::Begin { stage: "Repairing", total: self.samples, unit: ProgressUnit::Samples });
        let done = held.iter_mut().try_for_each(|stopped| {
            context.work.cancel.check()?;
            advance(stopped)?;
            context.work.advance(stopped.batch.samples as u64)
        });
        context.work.progress.on(Event::End);
        done?;
        if held.len() < self.batches {
            let mut index = 0;
            calibrate::for_each("Repairing", self.model, context, |batch| {
                index += 1;
                if index > held.len() { advance(&mut self.begin(batch)?) } else { Ok(()) }
            })?;
        }
        self.held = held;
        self.trim();
        Ok(())
    }

    /// Puts a tensor in the place of a parameter of the smaller model, which `nodes` are about to read.
    pub fn replace(&mut self, name: &str, tensor: Tensor, nodes: &[usize]) {
        let graph = self.executors[1].graph();
        let reads = |index: usize| graph.nodes()[index].inputs.iter().any(|id| graph.value(*id).name == name);
        let first = nodes.iter().min().copied().unwrap_or(0);
        if (0..first).any(reads) {
            // Something that has run already would have come out otherwise.
            self.held.clear();
        }
        self.executors[1].replace(name, tensor);
    }

    /// Lets go of the last samples where there are more than may be held.
    fn trim(&mut self) {
        let mut bytes = 0;
        let fit = self.held.iter().take_while(|stopped| {
            bytes += stopped.bytes();
            bytes <= HELD
        });
        let fit = fit.count();
        self.held.truncate(fit);
    }
}

impl Stopped {
    fn bytes(&self) -> u64 {
        self.runs.iter().map(PartialRun::bytes).sum()
    }
}
