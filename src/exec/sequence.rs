//! Runs that go on with a sequence: what attention keeps of earlier tokens is not computed again.

use std::collections::{BTreeMap, BTreeSet};

use candle_core::Tensor;

use super::plan::FusedNodes;
use super::run::failed;
use super::{Executor, Inputs, bytes_of};
use crate::analysis::SequenceAxes;
use crate::error::Result;
use crate::ir::ops::{Past, elements};
use crate::ir::{Bindings, Dim, Graph, Kind, Node, Op, ValueId};

/// What a graph keeps of the tokens that it has seen: keys and values of attention, and counts of positions; and what is the same for all
/// tokens, such as what an encoder has made of its inputs. Of layers with a window, no more than the window reaches.
#[derive(Debug)]
pub struct SequenceCache {
    axes: SequenceAxes,
    tokens: usize,
    /// By node; nothing of nodes that need not know of earlier tokens.
    ops: Vec<Option<Past>>,
    /// What does not follow from tokens and is read by what does, once it is computed.
    same: Option<Vec<(ValueId, Tensor)>>,
}

/// For which tokens of a run the outputs are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answers {
    /// For all.
    All,
    /// For the last one: behind the last node that looks at several tokens, the others are left out.
    Last,
}

impl SequenceCache {
    /// An empty one for a graph.
    ///
    /// # Errors
    /// The graph cannot go on with a sequence; the message names the node.
    pub fn new(graph: &Graph) -> Result<SequenceCache> {
        let axes = SequenceAxes::of(graph)?;
        let ops = (0..graph.nodes().len()).map(|node| axes.goes_on(node).then(Past::default)).collect();
        Ok(SequenceCache { axes, tokens: 0, ops, same: None })
    }

    /// How many tokens it has seen.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Bytes that it takes.
    pub fn bytes(&self) -> usize {
        let same = self.same.iter().flatten().map(|(_, tensor)| bytes_of(tensor) as usize).sum::<usize>();
        same + self.ops.iter().flatten().map(Past::bytes).sum::<usize>()
    }

    /// Bytes that so many tokens take at most, in 32 bits, with what is kept beside them for inputs of these sizes.
    pub fn bytes_of(&self, graph: &Graph, tokens: usize, sizes: &Bindings) -> u64 {
        let of_node = |(at, node): (usize, &Node)| {
            let Op::Attention(op) = &node.op else { return 0 };
            let elements = |id: &ValueId| elements(&graph.value(*id).ty, sizes);
            let keys = node.inputs.iter().skip(1).take(2);
            if !self.axes.goes_on(at) {
                let same = self.axes.follows(node.output);
                return if same { keys.map(elements).sum::<u64>().saturating_mul(4) } else { 0 };
            }
            let widths = keys.map(|id| {
                let shape = &graph.value(*id).ty.shape;
                [1, 3].map(|axis| shape.get(axis).and_then(Dim::fixed).unwrap_or(0) as u64).iter().product::<u64>()
            });
            // There is room for twice as many, so that rows are seldom moved.
            widths.sum::<u64>().saturating_mul(8).saturating_mul(op.window.map_or(tokens, |window| window.min(tokens)) as u64)
        };
        graph.nodes().iter().enumerate().map(of_node).fold(0, u64::saturating_add)
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.same = None;
        drop(self.take());
    }

    fn take(&mut self) -> Vec<Option<Past>> {
        self.tokens = 0;
        self.ops.iter_mut().map(|past| past.as_mut().map(std::mem::take)).collect()
    }

    /// Whether a step computes nothing that follows from tokens.
    fn is_same(&self, graph: &Graph, step: &FusedNodes) -> bool {
        !step.nodes.iter().any(|node| self.axes.follows(graph.nodes()[*node].output))
    }

    /// Values that do not follow from tokens and are read by steps that do, or are outputs.
    fn read_again(&self, graph: &Graph, steps: &[FusedNodes]) -> BTreeSet<ValueId> {
        let computed = |id: &ValueId| matches!(graph.value(*id).kind, Kind::Node(_)) && !self.axes.follows(*id);
        let steps = steps.iter().filter(|step| !self.is_same(graph, step));
        let read = steps.flat_map(|step| &step.nodes).flat_map(|node| &graph.nodes()[*node].inputs);
        read.chain(graph.outputs().iter().map(|(_, id)| id)).copied().filter(|id| computed(id)).collect()
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
    /// sequence for its last tokens, within rounding. What does not follow from tokens is computed with the first of them: until the cache is
    /// cleared, all other inputs must stay as they are. After an error the cache is empty.
    ///
    /// # Errors
    /// As [`run`](Executor::run).
    pub fn run_next(&self, inputs: &Inputs, cache: &mut SequenceCache, answers: Answers) -> Result<BTreeMap<String, Tensor>> {
        let (before, graph) = (cache.tokens, self.graph());
        let known = cache.same.take();
        let mut run = self.start_behind(inputs, before, Some(cache.take()))?;
        let count = graph.inputs().find_map(|(id, _)| run.values[id.index()].as_ref()?.dim(cache.axes.axis(id)?).ok()).unwrap_or(0);
        known.iter().flatten().for_each(|(id, tensor)| run.replace(*id, tensor.clone()));
        let again = if known.is_some() { BTreeSet::new() } else { cache.read_again(graph, self.steps()) };
        let mut same = Vec::new();
        // Steps that need all tokens; where no node looks at several, the first one needs the last token alone.
        let all = self.steps().iter().rposition(|step| step.nodes.iter().any(|node| cache.axes.goes_on(*node))).map_or(0, |last| last + 1);
        for (index, step) in self.steps().iter().enumerate() {
            if answers == Answers::Last && index == all && count > 1 {
                for id in graph.ids() {
                    let Some((axis, tensor)) = cache.axes.axis(id).zip(run.values[id.index()].clone()) else { continue };
                    let row = tensor.narrow(axis, count - 1, 1).and_then(|row| row.contiguous()).map_err(failed(&graph.value(id).name))?;
                    run.replace(id, row);
                }
            }
            if known.is_none() || !cache.is_same(graph, step) {
                self.step(step, &mut run)?;
            }
            for node in &step.nodes {
                let id = graph.nodes()[*node].output;
                same.extend(run.values[id.index()].clone().filter(|_| again.contains(&id)).map(|tensor| (id, tensor)));
            }
            run.forget(step);
        }
        let outputs = self.outputs(&run)?;
        cache.ops = run.past.take().unwrap_or_default();
        cache.ops.iter_mut().flatten().for_each(|past| past.add(count));
        cache.same = known.or(Some(same));
        cache.tokens = before + count;
        Ok(outputs)
    }
}
