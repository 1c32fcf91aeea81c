//! Gradients of parameters within one block.

use candle_core::Tensor;

use super::Blockwise;
use crate::error::{Error, Result};
use crate::exec::{Forward, MemoryTracker, Parameters, Tape};
use crate::ir::ValueId;

impl<'a> Blockwise<'a> {
    /// Plans gradients of parameters of this block, starting from those of its output, which is a tap. Fails
    /// if no block was entered.
    pub fn tape(&self, trained: &dyn Fn(&str) -> bool) -> Result<(Tape<'a>, ValueId)> {
        self.range()?;
        let graph = self.executor.graph();
        let block = &self.blocks[self.current.unwrap_or(0)];
        let missing = || Error::graph(format!("graph value `{}`", block.value), "is not computed by its block");
        let last = block.nodes.clone().rev().find(|index| graph.value(graph.nodes()[*index].output).name == block.value).ok_or_else(missing)?;
        let output = graph.nodes()[last].output;
        let nodes = block.nodes.start..last + 1;
        Ok((Tape::within(graph, self.options.device.clone(), nodes, [output].into(), trained), output))
    }

    /// The parameters of this block; tensors are shared.
    pub fn parameters(&self) -> Parameters {
        self.executor.parameters().clone()
    }

    /// Runs a [tape](Blockwise::tape) of this block for one batch, with other parameters.
    pub fn forward(&self, tape: &Tape, index: usize, parameters: &Parameters, tracker: &MemoryTracker) -> Result<Forward> {
        let snapshot = self.samples[index].start.snapshot(&self.options.device)?;
        let values = self.executor.graph().ids().zip(snapshot.values).filter_map(|(id, value)| Some((id, value?)));
        tape.forward_from(parameters, values.collect::<Vec<(ValueId, Tensor)>>(), tracker, None)
    }
}
