//! The model that is learned from: run without gradients, asked for values inside it.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};

use crate::error::Result;
use crate::exec::{Executor, Inputs, MemoryCategory, MemoryTracker, Parameters, Residence};
use crate::ir::{Graph, Op, part};
use crate::model::Model;
use crate::work::Work;

/// A teacher that answers with some of its values.
pub struct Teacher {
    graph: Graph,
    parameters: Parameters,
    device: Device,
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
        Ok(Teacher { graph, parameters, device: device.clone() })
    }

    /// The values for some samples, by name, where the teacher is.
    ///
    /// # Errors
    /// Inputs do not fit, or memory runs out.
    pub fn values(&self, inputs: &Inputs) -> Result<BTreeMap<String, Tensor>> {
        Executor::new(&self.graph, self.parameters.clone(), self.device.clone()).run(inputs)
    }

    /// Its parameters.
    pub fn parameters(&self) -> &Parameters {
        &self.parameters
    }
}
