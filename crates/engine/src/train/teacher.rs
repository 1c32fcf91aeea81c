//! The teacher: a model that runs without gradients and returns intermediate values.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};

use crate::data::Batch;
use crate::error::Result;
use crate::exec::{Blockwise, BlockwiseOptions, Executor, Inputs, MemoryCategory, MemoryTracker, Parameters, Residence};
use crate::ir::{Graph, Op, subgraph};
use crate::model::Model;
use crate::store::Weights;
use crate::work::Work;

/// Values by name.
pub(super) type Values = BTreeMap<String, Tensor>;

/// A teacher, reduced to the part of its graph that the losses read.
pub struct Teacher {
    graph: Graph,
    parameters: Parameters,
    device: Device,
    /// The weights on disk, if they are read whenever they are used instead of kept in memory.
    streamed: Option<Weights>,
}

impl Teacher {
    /// Loads the part of a teacher that `values` depend on, and the parameters `more` that losses read.
    /// If `streamed`, each parameter is read from its file when it is used.
    pub fn load(
        model: &Model,
        graph: &Graph,
        (values, more): (&[String], &[String]),
        (device, compute, streamed): (&Device, DType, bool),
        memory_tracker: &MemoryTracker,
        work: &Work,
    ) -> Result<Teacher> {
        let graph = subgraph(graph, values, &Op::clone)?;
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

    /// Computes the values for a batch, by name, on the teacher's device.
    pub fn values(&self, inputs: &Inputs) -> Result<Values> {
        Executor::new(&self.graph, self.parameters.clone(), self.device.clone()).run(inputs)
    }

    /// Whether the weights are read from disk whenever they are used.
    pub fn is_streamed(&self) -> bool {
        self.streamed.is_some()
    }

    /// Runs many batches through a streamed teacher, block by block, so that its weights are read once.
    /// Calls `consume` with the values of each batch.
    pub fn block_by_block(
        &self,
        batches: Vec<Batch>,
        options: &BlockwiseOptions,
        work: &Work,
        mut consume: impl FnMut(&Batch, &Values) -> Result<()>,
    ) -> Result<()> {
        let Some(weights) = self.streamed.as_ref().filter(|_| !batches.is_empty()) else { return Ok(()) };
        let options = BlockwiseOptions { device: self.device.clone(), compute: self.parameters.compute(), ..options.clone() };
        let mut blocks = Blockwise::new(&self.graph, weights, |_| false, options, work);
        batches.into_iter().try_for_each(|batch| blocks.push(batch))?;
        for block in 0..blocks.blocks().len() {
            blocks.enter(block)?;
            blocks.leave()?;
        }
        blocks.outputs(|batch, values| consume(batch, &values))
    }

    /// The teacher's parameters.
    pub fn parameters(&self) -> &Parameters {
        &self.parameters
    }
}
