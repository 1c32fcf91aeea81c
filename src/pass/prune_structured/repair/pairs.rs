//! Calibration samples on their way through the original and the smaller model.

use candle_core::Tensor;

use crate::data::Batch;
use crate::error::Result;
use crate::exec::{Executor, Observation, PartialRun};
use crate::model::Model;
use crate::pass::Context;
use crate::pass::prune_structured::calibrate;
use crate::work::{Event, ProgressUnit};

/// Most bytes of stopped runs in memory. Further samples run from the beginning for each site.
const MOST: u64 = 1 << 30;

/// A sample whose runs have stopped at a site.
struct Stopped {
    batch: Batch,
    runs: [PartialRun; 2],
}

/// Two models with samples that go through both, site by site: each node runs once for a sample whose runs are in memory.
pub(super) struct Pairs<'a> {
    executors: [Executor<'a>; 2],
    observations: [Observation; 2],
    model: &'a Model,
    context: &'a Context<'a>,
    /// The first samples.
    stopped_runs: Vec<Stopped>,
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
        let mut pairs = Pairs { executors, observations, model, context, stopped_runs: Vec::new(), samples: 0, batches: 0 };
        let mut bytes = 0;
        calibrate::for_each("Reading samples", model, context, |batch| {
            pairs.samples += batch.samples as u64;
            pairs.batches += 1;
            if bytes <= MOST {
                let stopped = pairs.begin(batch)?;
                bytes += stopped.bytes();
                pairs.stopped_runs.push(stopped);
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
        let mut stopped_runs = std::mem::take(&mut self.stopped_runs);
        let mut advance = |stopped: &mut Stopped| {
            let [first, second] = &mut stopped.runs;
            let x = self.executors[0].advance(&self.observations[0], first, value)?;
            let y = self.executors[1].advance(&self.observations[1], second, value)?;
            see(&stopped.batch, [&x, &y])
        };
        let context = self.context;
        context.work.progress.on(Event::Begin { stage: "Repairing", total: self.samples, unit: ProgressUnit::Samples });
        let done = stopped_runs.iter_mut().try_for_each(|stopped| {
            context.work.cancel.check()?;
            advance(stopped)?;
            context.work.advance(stopped.batch.samples as u64)
        });
        context.work.progress.on(Event::End);
        done?;
        if stopped_runs.len() < self.batches {
            let mut index = 0;
            calibrate::for_each("Repairing", self.model, context, |batch| {
                index += 1;
                if index > stopped_runs.len() { advance(&mut self.begin(batch)?) } else { Ok(()) }
            })?;
        }
        self.stopped_runs = stopped_runs;
        self.trim();
        Ok(())
    }

    /// Puts a tensor in the place of a parameter of the smaller model, which `nodes` are about to read.
    pub fn replace(&mut self, name: &str, tensor: Tensor, nodes: &[usize]) {
        let graph = self.executors[1].graph();
        let reads = |index: usize| graph.nodes()[index].inputs.iter().any(|id| graph.value(*id).name == name);
        let first = nodes.iter().min().copied().unwrap_or(0);
        if (0..first).any(reads) {
            // A node that has run already reads it, and its value has changed.
            self.stopped_runs.clear();
        }
        self.executors[1].replace(name, tensor);
    }

    /// Drops the last samples where their runs take more memory than allowed.
    fn trim(&mut self) {
        let mut bytes = 0;
        let fit = self.stopped_runs.iter().take_while(|stopped| {
            bytes += stopped.bytes();
            bytes <= MOST
        });
        let fit = fit.count();
        self.stopped_runs.truncate(fit);
    }
}

impl Stopped {
    fn bytes(&self) -> u64 {
        self.runs.iter().map(PartialRun::bytes).sum()
    }
}
