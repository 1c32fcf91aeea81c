//! Calibration samples on their way through the original and the smaller model.

use candle_core::{DType, Tensor};

use crate::data::Batch;
use crate::error::Result;
use crate::exec::{Blockwise, BlockwiseOptions, Residence};
use crate::ir::Graph;
use crate::model::Model;
use crate::pass::Context;
use crate::pass::calibrate;
use crate::store::Weights;
use crate::work::{Event, ProgressUnit};

/// Most bytes of stopped runs in memory, for each model.
const MOST: u64 = 1 << 29;

/// Two models with samples that go through both, site by site: each node runs once for a sample whose runs are in memory.
pub(super) struct Pairs<'a> {
    runs: [Blockwise<'a>; 2],
    context: &'a Context<'a>,
}

impl<'a> Pairs<'a> {
    /// Reads the samples; `wanted` are the values of all sites.
    ///
    /// # Errors
    /// There are none, or they do not fit the model.
    pub fn new(models: [(&'a Graph, &Weights); 2], wanted: impl Fn(&str) -> bool, model: &Model, context: &'a Context<'a>) -> Result<Self> {
        let options = BlockwiseOptions {
            compute: DType::F32,
            residence: Residence::Computed,
            limit: MOST,
            spill: Some(std::env::temp_dir()),
            tracker: context.memory_tracker.clone(),
            ..BlockwiseOptions::on(&context.device)
        };
        let mut runs = models.map(|(graph, weights)| Blockwise::new(graph, weights, &wanted, options.clone(), &context.work.quiet()));
        calibrate::for_each("Reading samples", model, context, |batch| runs.iter_mut().try_for_each(|run| run.push(batch.clone())))?;
        Ok(Pairs { runs, context })
    }

    /// Takes every sample to a site, and shows its value in both models.
    ///
    /// # Errors
    /// Running fails, the consumer does, or the work is cancelled.
    pub fn each(&mut self, value: &str, mut see: impl FnMut(&Batch, [&Tensor; 2]) -> Result<()>) -> Result<()> {
        let (work, [first, second]) = (self.context.work, &mut self.runs);
        let samples = (0..first.batches()).map(|index| first.batch(index).samples as u64).sum();
        work.progress.on(Event::Begin { stage: "Repairing", total: samples, unit: ProgressUnit::Samples });
        let mut all = || {
            first.reach(value)?;
            second.reach(value)?;
            for index in 0..first.batches() {
                work.cancel.check()?;
                let seen = [first.value(index, value)?, second.value(index, value)?];
                see(first.batch(index), seen.each_ref())?;
                work.advance(first.batch(index).samples as u64)?;
            }
            Ok(())
        };
        let done = all();
        work.progress.on(Event::End);
        done
    }

    /// Puts a tensor in the place of a parameter of the smaller model, for nodes that run from now on.
    pub fn replace(&mut self, name: &str, tensor: Tensor) {
        self.runs[1].replace(name, tensor);
    }
}
