//! Incremental decoding with a KV cache.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use candle_core::Tensor;

use super::plan::FusedNodes;
use super::pool::while_awake;
use super::run::failed;
use super::{Executor, Inputs, bytes_of};
use crate::analysis::SequenceAxes;
use crate::error::{Error, Result};
use crate::ir::ops::{Branches, DecodingState, elements};
use crate::ir::{Bindings, Dim, Graph, Kind, Node, Op, ValueId};

/// State of a graph in incremental decoding: cached keys and values, states of convolutions and recurrent
/// layers, position counts, and values that are the same for all tokens, such as the encoder output. With a
/// sliding window, only the keys and values within it are cached, plus the rows required by
/// [`truncate`](SequenceCache::truncate).
#[derive(Debug)]
pub struct SequenceCache {
    axes: SequenceAxes,
    tokens: usize,
    /// Number of last tokens that can be removed.
    removable: usize,
    /// State of each node; `None` for nodes that do not depend on earlier tokens.
    ops: Vec<Option<DecodingState>>,
    /// Values that do not depend on tokens but are read by nodes that do, once they are computed.
    same: Option<Vec<(ValueId, Tensor)>>,
}

/// Tokens for which a run computes outputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OutputTokens {
    /// All tokens.
    All,
    /// This many of the last tokens. Nodes after the last one that combines tokens skip the others.
    Last(usize),
}

impl SequenceCache {
    /// Creates an empty cache. Fails if the graph does not support incremental decoding; the message names
    /// the node.
    pub fn new(graph: &Graph) -> Result<SequenceCache> {
        SequenceCache::with_removable(graph, 0)
    }

    /// Like [`new`](SequenceCache::new), but up to `removable` of the last tokens can be removed, in
    /// addition to those of the last run.
    pub fn with_removable(graph: &Graph, removable: usize) -> Result<SequenceCache> {
        let axes = SequenceAxes::from_graph(graph)?;
        let state = |node| axes.needs_state(node).then(|| DecodingState::with_removable(removable));
        let ops = (0..graph.nodes().len()).map(state).collect();
        Ok(SequenceCache { axes, tokens: 0, removable, ops, same: None })
    }

    /// Number of processed tokens.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        let same = self.same.iter().flatten().map(|(_, tensor)| bytes_of(tensor) as usize).sum::<usize>();
        same + self.ops.iter().flatten().map(DecodingState::bytes).sum::<usize>()
    }

    /// Maximum size in bytes for `tokens` tokens in 32 bits, including values that are the same for all
    /// tokens, for inputs of these sizes.
    pub fn bytes_of(&self, graph: &Graph, tokens: usize, sizes: &Bindings) -> u64 {
        let of_node = |(at, node): (usize, &Node)| {
            let Op::Attention(op) = &node.op else {
                let op = node.op.spec().incremental().filter(|_| self.axes.needs_state(at));
                return op.map_or(0, |op| op.state_elements(&graph.input_types(node), self.removable, sizes).saturating_mul(4));
            };
            let elements = |id: &ValueId| elements(&graph.value(*id).ty, sizes);
            let keys = node.inputs.iter().skip(1).take(2);
            if !self.axes.needs_state(at) {
                let same = self.axes.depends_on_tokens(node.output);
                return if same { keys.map(elements).sum::<u64>().saturating_mul(4) } else { 0 };
            }
            let widths = keys.map(|id| {
                let shape = &graph.value(*id).ty.shape;
                [1, 3].map(|axis| shape.get(axis).and_then(Dim::fixed).unwrap_or(0) as u64).iter().product::<u64>()
            });
            // Buffers have twice the capacity, so that rows are rarely moved.
            let rows = op.window.map_or(tokens, |window| window.saturating_add(self.removable).min(tokens));
            widths.sum::<u64>().saturating_mul(8).saturating_mul(rows as u64)
        };
        graph.nodes().iter().enumerate().map(of_node).fold(0, u64::saturating_add)
    }

    /// Empties the cache.
    pub fn clear(&mut self) {
        self.same = None;
        drop(self.take());
    }

    fn take(&mut self) -> Vec<Option<DecodingState>> {
        self.tokens = 0;
        let empty = || DecodingState::with_removable(self.removable);
        self.ops.iter_mut().map(|past| past.as_mut().map(|past| std::mem::replace(past, empty()))).collect()
    }

    /// Removes all tokens after the first `tokens`, such as rejected proposals of a draft. Fails if keys and
    /// values in a sliding window before them, or states at their position, are no longer cached.
    pub fn truncate(&mut self, graph: &Graph, tokens: usize) -> Result<()> {
        for (node, past) in graph.nodes().iter().zip(&mut self.ops) {
            if past.as_mut().is_some_and(|past| !past.truncate(tokens)) {
                let reason = format!("depends on earlier tokens that are no longer cached: the last {} cannot be removed", self.tokens - tokens);
                self.clear();
                return Err(Error::graph(format!("graph node `{}`", graph.value(node.output).name), reason));
            }
        }
        self.tokens = self.tokens.min(tokens);
        Ok(())
    }

    /// Whether tokens can continue a text in several ways ([`Executor::run_branches`]).
    pub fn supports_branches(&self, graph: &Graph) -> bool {
        let stateful = graph.nodes().iter().enumerate().filter(|(at, _)| self.axes.needs_state(*at)).map(|(_, node)| node);
        stateful.into_iter().all(|node| node.op.spec().incremental().is_some_and(|op| op.supports_branches(&graph.input_types(node))))
    }

    /// Of the last `count` tokens, which were branches, retains those with these indices, in ascending order.
    pub fn retain(&mut self, count: usize, indices: &[usize]) -> Result<()> {
        for past in self.ops.iter_mut().flatten() {
            past.retain(count, indices).map_err(failed("the KV cache"))?;
        }
        self.tokens -= count - indices.len();
        Ok(())
    }

    /// Whether no node of a step depends on tokens.
    fn is_same(&self, graph: &Graph, step: &FusedNodes) -> bool {
        !step.nodes.iter().any(|node| self.axes.depends_on_tokens(graph.nodes()[*node].output))
    }

    /// Values that do not depend on tokens and are outputs or read by steps that depend on tokens.
    fn read_again(&self, graph: &Graph, steps: &[FusedNodes]) -> BTreeSet<ValueId> {
        let computed = |id: &ValueId| matches!(graph.value(*id).kind, Kind::Node(_)) && !self.axes.depends_on_tokens(*id);
        let steps = steps.iter().filter(|step| !self.is_same(graph, step));
        let read = steps.flat_map(|step| &step.nodes).flat_map(|node| &graph.nodes()[*node].inputs);
        read.chain(graph.outputs().iter().map(|(_, id)| id)).copied().filter(|id| computed(id)).collect()
    }

    /// Whether a cache of the first `before` tokens stays valid in a sequence of `after` tokens. It does
    /// not for rotary embeddings whose angles depend on the length of the sequence.
    pub fn is_stable(graph: &Graph, before: usize, after: usize) -> bool {
        let width = |node: &Node| node.inputs.first().and_then(|id| graph.value(*id).ty.shape.last()?.fixed()).unwrap_or(0);
        before == 0 || graph.nodes().iter().all(|node| node.op.spec().incremental().is_none_or(|op| op.is_stable(width(node), before, after)))
    }
}

impl Executor<'_> {
    /// As [`run_next`](Executor::run_next) with tokens that continue the text in several ways: the token
    /// before each new one is the last of the text for the first one, and one of the new tokens, with this
    /// smaller index, for the others. The graph must support it ([`SequenceCache::supports_branches`]).
    pub fn run_branches(
        &self,
        inputs: &Inputs,
        cache: &mut SequenceCache,
        tokens: OutputTokens,
        parents: &[Option<usize>],
    ) -> Result<BTreeMap<String, Tensor>> {
        let branches = Arc::new(Branches::new(parents, cache.tokens, self.device()).map_err(failed("the branches"))?);
        cache.ops.iter_mut().flatten().for_each(|past| past.set_branches(&branches));
        self.run_next(inputs, cache, tokens)
    }

    /// Runs the tokens that follow those in the cache, and adds them to it. Outputs equal those of a run
    /// of the whole sequence for its last tokens, up to rounding. Values that do not depend on tokens are
    /// computed by the first call; until the cache is cleared, all other inputs must stay the same. After
    /// an error the cache is empty.
    pub fn run_next(&self, inputs: &Inputs, cache: &mut SequenceCache, output_tokens: OutputTokens) -> Result<BTreeMap<String, Tensor>> {
        while_awake(self.device(), || self.advance_sequence(inputs, cache, output_tokens))
    }

    fn advance_sequence(&self, inputs: &Inputs, cache: &mut SequenceCache, output_tokens: OutputTokens) -> Result<BTreeMap<String, Tensor>> {
        let (before, graph) = (cache.tokens, self.graph());
        let known = cache.same.take();
        let mut run = self.start_at(inputs, before, Some(cache.take()))?;
        let count = graph.inputs().find_map(|(id, _)| run.values[id.index()].as_ref()?.dim(cache.axes.axis(id)?).ok()).unwrap_or(0);
        known.iter().flatten().for_each(|(id, tensor)| run.replace(*id, tensor.clone()));
        let again = if known.is_some() { BTreeSet::new() } else { cache.read_again(graph, self.steps()) };
        let mut same = Vec::new();
        // The number of steps that need all tokens. Without a node that combines tokens, even the first
        // step only needs the last token.
        let all = self.steps().iter().rposition(|step| step.nodes.iter().any(|node| cache.axes.needs_state(*node))).map_or(0, |last| last + 1);
        for (index, step) in self.steps().iter().enumerate() {
            if let OutputTokens::Last(last) = output_tokens
                && index == all
                && count > last
            {
                for id in graph.ids() {
                    let Some((axis, tensor)) = cache.axes.axis(id).zip(run.values[id.index()].clone()) else { continue };
                    let rows = tensor.narrow(axis, count - last, last).and_then(|rows| rows.contiguous()).map_err(failed(&graph.value(id).name))?;
                    run.replace(id, rows);
                }
            }
            if known.is_none() || !cache.is_same(graph, step) {
                self.step(step, &mut run)?;
            }
            for node in &step.nodes {
                let id = graph.nodes()[*node].output;
                same.extend(run.values[id.index()].clone().filter(|_| again.contains(&id)).map(|tensor| (id, tensor)));
            }
            run.drop_dead(step);
        }
        let outputs = self.outputs(&run)?;
        cache.ops = run.past.take().unwrap_or_default();
        cache.ops.iter_mut().flatten().for_each(|past| past.add(count));
        cache.same = known.or(Some(same));
        cache.tokens = before + count;
        Ok(outputs)
    }
}
