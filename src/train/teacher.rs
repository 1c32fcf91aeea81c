//! The model that is learned from: run without gradients, asked for values inside it.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};

use crate::data::Batch;
use crate::error::Result;
use crate::exec::{Blockwise, BlockwiseOptions, Executor, Inputs, MemoryCategory, MemoryTracker, Parameters, Residence};
use crate::ir::{Graph, Op, part};
use crate::model::Model;
use crate::store::Weights;
use crate::work::Work;

/// Values by name.
pub(super) type Values = BTreeMap<String, Tensor>;

/// A teacher that answers with some of its values.
pub struct Teacher {
    graph: Graph,
    parameters: Parameters,
    device: Device,
    /// Where its weights are read from whenever they are used, unless they are in memory.
    streamed: Option<Weights>,
}

impl Teacher {
    /// Loads the part of a teacher that its `values` depend on, and `more` parameters that losses read; streamed, each parameter is read
    /// from its file when it is used.
    ///
    /// # Errors
    /// Reading fails, or memory runs out.
    pub fn load(
        model: &Model,
        graph: &Graph,
        (values, more): (&[String], &[String]),
        (device, compute, streamed): (&Device, DType, bool),
        memory_tracker: &MemoryTracker,
        work: &Work,
    ) -> Result<Teacher> {
        let graph = part(graph, values, &Op::clone)?;
        let names = graph.params().map(|(_, value)| &value.name).chain(more).collect();
        let (parameters, bytes) = if streamed {
            Parameters::streamed(names, &model.weights, device, compute, Residence::Stored)?
        } else {
            let parameters = Parameters::load_named(names, &model.weights, device, compute, Residence::Stored, work)?;
            let bytes = parameters.bytes();
            (parameters, bytes)
        };
        memory_tracker.set(MemoryCategory::Teacher, bytes)?;
        Ok(Teacher { graph, parameters, device: device.clone(), streamed: streamed.then(|| model.weights.clone()) })
    }

    /// The values for some samples, by name, where the teacher is.
    ///
    /// # Errors
    /// Inputs do not fit, or memory runs out.
    pub fn values(&self, inputs: &Inputs) -> Result<Values> {
        Executor::new(&self.graph, self.parameters.clone(), self.device.clone()).run(inputs)
    }

    /// Whether its weights are read whenever they are used.
    pub fn is_streamed(&self) -> bool {
        self.streamed.is_some()
    }

    /// Shows the values for many batches, which go through one block of a streamed teacher after the other, so that its weights are read once.
    ///
    /// # Errors
    /// Inputs do not fit, reading fails, memory runs out, or the consumer fails.
    pub fn block_by_block(
        &self,
        batches: Vec<Batch>,
        options: &BlockwiseOptions,
        work: &Work,
        mut see: impl FnMut(&Batch, &Values) -> Result<()>,
    ) -> Result<()> {
        let Some(weights) = self.streamed.as_ref().filter(|_| !batches.is_empty()) else { return Ok(()) };
        let options = BlockwiseOptions { device: self.device.clone(), compute: self.parameters.compute(), ..options.clone() };
        let mut blocks = Blockwise::new(&self.graph, weights, |_| false, options, work);
        batches.into_iter().try_for_each(|batch| blocks.push(batch))?;
        for block in 0..blocks.blocks().len() {
            blocks.enter(block)?;
            blocks.leave()?;
        }
        blocks.outputs(|batch, values| see(batch, &values))
    }

    /// Its parameters.
    pub fn parameters(&self) -> &Parameters {
        &self.parameters
    }
}
