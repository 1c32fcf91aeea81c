//! Gradients of values in a backward pass.

use candle_core::Tensor;

use crate::error::Result;
use crate::exec::memory::GRADIENT;
use crate::exec::{MemoryCategory, MemoryTracker, bytes_of};
use crate::ir::ops::sum;
use crate::ir::{Graph, ValueId};

/// Accumulated gradients of values whose nodes have not been differentiated yet.
pub(super) struct Gradients<'l> {
    graph: &'l Graph,
    by_value: Vec<Option<Tensor>>,
    memory_tracker: &'l MemoryTracker,
}

impl<'l> Gradients<'l> {
    pub fn new(graph: &'l Graph, memory_tracker: &'l MemoryTracker) -> Gradients<'l> {
        Gradients { graph, by_value: vec![None; graph.values().len()], memory_tracker }
    }

    pub fn add(&mut self, id: ValueId, found: Tensor) -> candle_core::Result<Result<()>> {
        let sum = match self.take(id) {
            Some(other) => sum(other, found)?,
            None => found,
        };
        let recorded = self.memory_tracker.allocate_named(MemoryCategory::Activations, &self.name(id), bytes_of(&sum));
        self.by_value[id.index()] = Some(sum);
        Ok(recorded)
    }

    pub fn get(&self, id: ValueId) -> Option<Tensor> {
        self.by_value[id.index()].clone()
    }

    pub fn take(&mut self, id: ValueId) -> Option<Tensor> {
        let gradient = self.by_value[id.index()].take();
        gradient.inspect(|gradient| self.memory_tracker.release_named(MemoryCategory::Activations, &self.name(id), bytes_of(gradient)))
    }

    fn name(&self, id: ValueId) -> String {
        format!("{GRADIENT}{}", self.graph.value(id).name)
    }

    pub fn clear(&mut self) {
        self.graph.ids().for_each(|id| drop(self.take(id)));
    }
}
