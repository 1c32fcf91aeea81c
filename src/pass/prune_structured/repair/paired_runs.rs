//! Runs calibration samples through the original and the pruned model in parallel.

use candle_core::Tensor;

use crate::data::Batch;
use crate::error::Result;
use crate::exec::Blockwise;
use crate::ir::Graph;
use crate::model::Model;
use crate::pass::Context;
use crate::pass::calibrate;
use crate::store::Weights;
use crate::work::{Event, ProgressUnit};

/// Suspended runs of two models on the same samples, which advance from value to value. Each node runs
/// once per sample, unless a suspended run was evicted from memory.
pub(super) struct PairedRuns<'a> {
    runs: [Blockwise<'a>; 2],
    context: &'a Context<'a>,
}

impl<'a> PairedRuns<'a> {
    /// Reads the samples. `observed` selects the values that [`each`](Self::each) will visit.
    pub fn new(models: [(&'a Graph, &Weights); 2], observed: impl Fn(&str) -> bool, model: &Model, context: &'a Context<'a>) -> Result<Self> {
        let options = calibrate::blockwise_options(context);
        let mut runs = models.map(|(graph, weights)| Blockwise::new(graph, weights, &observed, options.clone(), &context.work.quiet()));
        calibrate::for_each("Reading samples", model, context, |batch| runs.iter_mut().try_for_each(|run| run.push(batch.clone())))?;
        Ok(PairedRuns { runs, context })
    }

    /// Number of batches.
    pub fn batches(&self) -> usize {
        self.runs[0].batches()
    }

    /// Advances every sample to a value, and calls `observe` with its tensors in both models.
    pub fn each(&mut self, value: &str, mut observe: impl FnMut(&Batch, [&Tensor; 2]) -> Result<()>) -> Result<()> {
        let (work, [first, second]) = (self.context.work, &mut self.runs);
        let samples = (0..first.batches()).map(|index| first.batch(index).samples as u64).sum();
        work.progress.on(Event::Begin { stage: "Repairing", total: samples, done: 0, unit: ProgressUnit::Samples });
        let mut all = || {
            first.reach(value)?;
            second.reach(value)?;
            for index in 0..first.batches() {
                work.cancel.check()?;
                let tensors = [first.value(index, value)?, second.value(index, value)?];
                observe(first.batch(index), tensors.each_ref())?;
                work.advance(first.batch(index).samples as u64)?;
            }
            Ok(())
        };
        let result = all();
        work.progress.on(Event::End);
        result
    }

    /// Replaces a parameter of the pruned model for nodes that run later.
    pub fn replace(&mut self, name: &str, tensor: Tensor) {
        self.runs[1].replace(name, tensor);
    }
}
