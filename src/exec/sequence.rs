//! Runs that go on with a sequence: what attention keeps of earlier tokens is not computed again.

use std::collections::BTreeMap;

use candle_core::Tensor;

use super::run::failed;
use super::{Executor, Inputs};
use crate::analysis::SequenceAxes;
use crate::error::Result;
use crate::ir::ops::Past;
use crate::ir::{Dim, Graph, Node, Op};

/// What a graph keeps of the tokens that it has seen: keys and values of attention, and counts of positions. Of layers with a window, no
/// more than the window reaches.
#[derive(Debug)]
pub struct SequenceCache {
    axes: SequenceAxes,
    tokens: usize,
    /// By node.
    ops: Vec<Past>,
}

/// For which tokens of a run the outputs are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answers {
    /// For all.
    All,
    /// For the last one: behind the last node that looks at several tokens, the others are left out.
    Last,
}

fn is_sequential(node: &Node) -> bool {
    node.op.spec().sequential().is_some()
}

impl SequenceCache {
    /// An empty one for a graph.
    ///
    /// # Errors
    /// The graph cannot go on with a sequence; the message names the node.
    pub fn new(graph: &Graph) -> Result<SequenceCache> {
        let mut cache = SequenceCache { axes: SequenceAxes::of(graph)?, tokens: 0, ops: Vec::new() };
        cache.ops.resize_with(graph.nodes().len(), Past::default);
        Ok(cache)
    }

    /// How many tokens it has seen.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Bytes that it takes.
    pub fn bytes(&self) -> usize {
        self.ops.iter().map(Past::bytes).sum()
    }

    /// Bytes that so many tokens take at most, in 32 bits.
    pub fn bytes_of(graph: &Graph, tokens: usize) -> u64 {
        let of_node = |node: &Node| {
            let Op::Attention(op) = &node.op else { return 0 };
            let widths = node.inputs.iter().skip(1).take(2).map(|id| {
                let shape = &graph.value(*id).ty.shape;
                [1, 3].map(|axis| shape.get(axis).and_then(Dim::fixed).unwrap_or(0) as u64).iter().product::<u64>()
            });
            // There is room for twice as many, so that rows are seldom moved.
            widths.sum::<u64>().saturating_mul(8).saturating_mul(op.window.map_or(tokens, |window| window.min(tokens)) as u64)
        };
        graph.nodes().iter().map(of_node).fold(0, u64::saturating_add)
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        drop(self.take());
    }

    fn take(&mut self) -> Vec<Past> {
        self.tokens = 0;
        self.ops.iter_mut().map(std::mem::take).collect()
    }

    /// Whether the first `before` tokens are the same to the graph in a sequence of `after` tokens. Rotary embeddings whose angles depend on
    /// the length of a sequence are not; what was kept of its beginning is then of no use.
    pub fn is_stable(graph: &Graph, before: usize, after: usize) -> bool {
        let width = |node: &Node| node.inputs.first().and_then(|id| graph.value(*id).ty.shape.last()?.fixed()).unwrap_or(0);
        before == 0 || graph.nodes().iter().all(|node| node.op.spec().sequential().is_none_or(|op| op.is_stable(width(node), before, after)))
    }
}

impl Executor<'_> {
    /// Runs tokens that stand behind those which the cache has seen; it then has seen them too. Outputs are those of a run of the whole
    /// sequence for its last tokens, within rounding. After an error the cache is empty.
    ///
    /// # Errors
    /// As [`run`](Executor::run).
    pub fn run_next(&self, inputs: &Inputs, cache: &mut SequenceCache, answers: Answers) -> Result<BTreeMap<String, Tensor>> {
        let before = cache.tokens;
        let mut run = self.start_behind(inputs, before, Some(cache.take()))?;
        let count = self.graph().inputs().find_map(|(id, _)| run.values[id.index()].as_ref()?.dim(cache.axes.axis(id)?).ok()).unwrap_or(0);
        let nodes = self.graph().nodes();
        // Steps that need all tokens; where no node looks at several, the first one needs the last token alone.
        let all = self.steps().iter().rposition(|step| step.nodes.iter().any(|node| is_sequential(&nodes[*node]))).map_or(0, |last| last + 1);
        for (index, step) in self.steps().iter().enumerate() {
            if answers == Answers::Last && index == all && count > 1 {
                for id in self.graph().ids() {
                    let Some((axis, tensor)) = cache.axes.axis(id).zip(run.values[id.index()].clone()) else { continue };
                    let row = tensor.narrow(axis, count - 1, 1).and_then(|row| row.contiguous()).map_err(failed(&self.graph().value(id).name))?;
                    run.replace(id, row);
                }
            }
            self.step(step, &mut run)?;
            run.forget(step);
        }
        let outputs = self.outputs(&run)?;
        cache.ops = run.past.take().unwrap_or_default();
        cache.ops.iter_mut().for_each(|past| past.add(count));
        cache.tokens = before + count;
        Ok(outputs)
    }
}
