//! Reverse-mode differentiation over the nodes of a graph (Griewank and Walther, *Evaluating
//! Derivatives*, 2008). Values are released after their last reader.
//!
//! Nodes are divided into segments. A recomputed segment (gradient checkpointing) only keeps the values
//! that later segments read in the forward pass, and runs recomputed in the backward pass (Chen et al.,
//! *Training Deep Nets with Sublinear Memory Cost*, 2016).
//!
//! Inputs of layers with quantized weights are rounded as by the executor, with straight-through gradients.

mod forecast;
mod gradients;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::OnceLock;

use candle_core::{DType, Device, Tensor};

use super::dropout::{AttentionMask, Dropout, DropoutSeed};
use super::pool::on_pool_thread;
use super::sizes::InputCheck;
use super::{Inputs, MemoryCategory, MemoryTracker, Parameters, Rounding, bytes_of, run};
use crate::error::{Error, Result};
use crate::ir::ops::{Attention, Backward, PreparedOp, Saved};
use crate::ir::{Graph, Kind, Node, Op, ValueId};

pub use forecast::{Pages, TapeForecast};
use gradients::Gradients;

/// A graph with a plan of when values are retained and released.
#[derive(Debug)]
pub struct Tape<'g> {
    graph: &'g Graph,
    device: Device,
    input_check: InputCheck,
    segments: Vec<Segment>,
    /// For each value, whether a gradient flows through it.
    reached: Vec<bool>,
    taps: BTreeSet<ValueId>,
    /// Values whose gradients are requested.
    observed: BTreeSet<ValueId>,
    /// For each node, the values that no later node reads in the forward pass.
    dead: Vec<Vec<ValueId>>,
    /// For each node, the values that no earlier node reads in the backward pass.
    done: Vec<Vec<ValueId>>,
    /// For each node, which of its inputs the backward pass reads, and whether it reads the output.
    reads: Vec<(Vec<bool>, bool)>,
    /// For each node, its kernel, prepared as soon as the precision of the computation is known.
    prepared: Vec<OnceLock<PreparedOp>>,
    dropout: Option<Dropout>,
}

#[derive(Debug, Clone)]
struct Segment {
    nodes: Range<usize>,
    recomputed: bool,
    /// Names of the parameters that its nodes read.
    parameters: BTreeSet<String>,
}

impl Segment {
    fn new(graph: &Graph, nodes: Range<usize>, recomputed: bool) -> Segment {
        let read = graph.nodes()[nodes.clone()].iter().flat_map(|node| &node.inputs).map(|id| graph.value(*id)).filter(|value| value.kind == Kind::Param);
        Segment { parameters: read.map(|value| value.name.clone()).collect(), nodes, recomputed }
    }

    /// All nodes, divided at `cuts`.
    fn between(graph: &Graph, cuts: &[usize]) -> Vec<Segment> {
        let (mut from, end) = (0, graph.nodes().len());
        let ends = cuts.iter().copied().filter(|cut| *cut > 0 && *cut < end).chain([end]);
        ends.map(|to| Segment::new(graph, std::mem::replace(&mut from, to)..to, to < end)).collect()
    }
}

/// Result of the forward pass.
#[derive(Debug)]
pub struct Forward {
    values: Vec<Option<Tensor>>,
    /// Shapes, which are retained after the values are released.
    dims: Vec<Vec<usize>>,
    taps: BTreeMap<ValueId, Tensor>,
    dropout: Option<DropoutSeed>,
}

impl Forward {
    /// The requested values.
    pub fn taps(&self) -> &BTreeMap<ValueId, Tensor> {
        &self.taps
    }
}

/// Receives gradients of parameters and of requested values by name.
pub type GradientSink<'s> = &'s mut (dyn FnMut(&str, Tensor) -> Result<()> + Send);

/// Observes a node with its operands and its result.
type NodeObserver<'s> = &'s mut dyn FnMut(&Node, &[Tensor], &Tensor) -> Result<()>;

/// Observes nodes with their operands when they are computed for the first time.
pub type Watch<'w> = &'w mut (dyn FnMut(&Node, &[Tensor]) -> Result<()> + Send);

impl<'g> Tape<'g> {
    /// Plans gradients of the parameters selected by `trained`, and the requested values `taps`. `cuts`
    /// are the indices of nodes at which recomputed segments start; without any, all values are retained.
    pub fn new(graph: &'g Graph, device: Device, taps: BTreeSet<ValueId>, trained: &dyn Fn(&str) -> bool, cuts: &[usize]) -> Tape<'g> {
        Tape::planned(graph, device, Segment::between(graph, cuts), (taps, BTreeSet::new()), trained)
    }

    /// Plans gradients of the values `observed`, which nodes compute, instead of parameters.
    pub fn observing(graph: &'g Graph, device: Device, taps: BTreeSet<ValueId>, observed: BTreeSet<ValueId>, cuts: &[usize]) -> Tape<'g> {
        Tape::planned(graph, device, Segment::between(graph, cuts), (taps, observed), &|_| false)
    }

    /// Plans gradients within a range of nodes, which are computed from the values that earlier nodes
    /// computed ([`forward_from`](Tape::forward_from)).
    pub(super) fn within(graph: &'g Graph, device: Device, nodes: Range<usize>, taps: BTreeSet<ValueId>, trained: &dyn Fn(&str) -> bool) -> Tape<'g> {
        Tape::planned(graph, device, vec![Segment::new(graph, nodes, false)], (taps, BTreeSet::new()), trained)
    }

    fn planned(
        graph: &'g Graph,
        device: Device,
        segments: Vec<Segment>,
        (taps, observed): (BTreeSet<ValueId>, BTreeSet<ValueId>),
        trained: &dyn Fn(&str) -> bool,
    ) -> Tape<'g> {
        let nodes = graph.nodes();
        let mut reached: Vec<bool> = graph.values().iter().map(|value| value.kind == Kind::Param && trained(&value.name)).collect();
        for node in nodes {
            reached[node.output.index()] = observed.contains(&node.output) || node.inputs.iter().any(|id| reached[id.index()]);
        }
        let reads = |node: &Node| {
            let on = reached[node.output.index()];
            let spec = node.op.spec();
            ((0..node.inputs.len()).map(|index| on && spec.reads_input(index)).collect(), on && spec.reads_output())
        };
        let reads = nodes.iter().map(reads).collect();
        let prepared = nodes.iter().map(|_| OnceLock::new()).collect();
        let (input_check, dead, done) = (InputCheck::default(), Vec::new(), Vec::new());
        let mut tape = Tape { graph, device, input_check, segments, reached, taps, observed, dead, done, reads, prepared, dropout: None };
        tape.plan();
        tape
    }

    /// Determines the last reader of each value.
    fn plan(&mut self) {
        let nodes = self.graph.nodes();
        let count = self.graph.values().len();
        let segment_of = |node: usize| self.segments.iter().position(|segment| segment.nodes.contains(&node)).unwrap_or(0);
        let segments: Vec<usize> = (0..nodes.len()).map(segment_of).collect();
        let mut producer = vec![None; count];
        nodes.iter().enumerate().for_each(|(index, node)| producer[node.output.index()] = Some(index));
        // Forward pass: the last node that reads the value.
        let mut last = vec![None; count];
        // Backward pass: the first node that reads the value, or the start of a segment that is
        // recomputed from it.
        let mut first: Vec<Option<usize>> = vec![None; count];
        let mut retained = vec![false; count];
        for (index, node) in nodes.iter().enumerate() {
            let segment = &self.segments[segments[index]];
            let (inputs, output) = &self.reads[index];
            for (id, read) in node.inputs.iter().zip(inputs) {
                let at = id.index();
                last[at] = Some(index);
                let made = producer[at].map(|producer| segments[producer]);
                let outside = made != Some(segments[index]);
                if outside && segment.recomputed {
                    first[at].get_or_insert(segment.nodes.start);
                    retained[at] = true;
                } else if *read {
                    first[at].get_or_insert(index);
                    retained[at] |= outside || !segment.recomputed;
                }
            }
            let at = node.output.index();
            last[at].get_or_insert(index);
            if *output {
                first[at] = Some(first[at].map_or(index, |first| first.min(index)));
                retained[at] |= !segment.recomputed;
            }
        }
        self.dead = vec![Vec::new(); nodes.len()];
        self.done = vec![Vec::new(); nodes.len()];
        for id in self.graph.ids() {
            let at = id.index();
            if self.graph.value(id).kind == Kind::Param {
                continue;
            }
            if let Some(last) = last[at].filter(|_| !retained[at]) {
                self.dead[last].push(id);
            }
            if let Some(first) = first[at] {
                self.done[first].push(id);
            }
        }
    }

    /// The graph.
    pub fn graph(&self) -> &'g Graph {
        self.graph
    }

    /// Applies dropout in forward passes that have a seed. The nodes must not read their output in the
    /// backward pass.
    #[must_use]
    pub(crate) fn with_dropout(mut self, dropout: Option<Dropout>) -> Tape<'g> {
        self.dropout = dropout;
        self
    }

    /// Runs the forward pass and retains the values that the backward pass needs.
    pub fn forward(&self, parameters: &Parameters, inputs: &Inputs, memory_tracker: &MemoryTracker, watch: Option<Watch>) -> Result<Forward> {
        self.forward_with(None, parameters, inputs, memory_tracker, watch)
    }

    /// As [`forward`](Tape::forward), with dropout if there is a seed.
    pub(crate) fn forward_with(
        &self,
        dropout: Option<DropoutSeed>,
        parameters: &Parameters,
        inputs: &Inputs,
        memory_tracker: &MemoryTracker,
        watch: Option<Watch>,
    ) -> Result<Forward> {
        let inputs = self.input_check.prepare(self.graph, inputs, 0, &self.device, parameters.compute())?;
        self.start(dropout, parameters, inputs, memory_tracker, watch)
    }

    /// As [`forward`](Tape::forward), from the values that its first node and later ones read.
    pub(super) fn forward_from(
        &self,
        parameters: &Parameters,
        start: impl IntoIterator<Item = (ValueId, Tensor)>,
        memory_tracker: &MemoryTracker,
        watch: Option<Watch>,
    ) -> Result<Forward> {
        self.start(None, parameters, start, memory_tracker, watch)
    }

    fn start(
        &self,
        dropout: Option<DropoutSeed>,
        parameters: &Parameters,
        start: impl IntoIterator<Item = (ValueId, Tensor)>,
        memory_tracker: &MemoryTracker,
        mut watch: Option<Watch>,
    ) -> Result<Forward> {
        let count = self.graph.values().len();
        let mut forward = Forward { values: vec![None; count], dims: vec![Vec::new(); count], taps: BTreeMap::new(), dropout };
        for (id, tensor) in start {
            if self.taps.contains(&id) {
                forward.taps.insert(id, tensor.clone());
            }
            forward.dims[id.index()] = tensor.dims().to_vec();
            memory_tracker.allocate_named(self.category(id), &self.graph.value(id).name, bytes_of(&tensor))?;
            forward.values[id.index()] = Some(tensor);
        }
        let Forward { values, dims, taps, .. } = &mut forward;
        let mut observe = |node: &Node, operands: &[Tensor], result: &Tensor| {
            dims[node.output.index()] = result.dims().to_vec();
            if self.taps.contains(&node.output) {
                taps.insert(node.output, result.clone());
            }
            watch.as_mut().map_or(Ok(()), |watch| watch(node, operands))
        };
        let mut compute = |segment: &Segment| self.compute(segment, parameters, values, memory_tracker, (false, dropout), &mut observe);
        let computed = on_pool_thread(&self.device, || self.segments.iter().try_for_each(&mut compute));
        if computed.is_err() {
            self.release_all(&mut forward.values, memory_tracker);
        }
        computed.map(|()| forward)
    }

    fn compute(
        &self,
        segment: &Segment,
        parameters: &Parameters,
        values: &mut [Option<Tensor>],
        memory_tracker: &MemoryTracker,
        (recomputed, dropout): (bool, Option<DropoutSeed>),
        observe: NodeObserver,
    ) -> Result<()> {
        memory_tracker.work_on(if recomputed { "recomputation" } else { "forward" }, "");
        parameters.enter(&segment.parameters, Some(memory_tracker))?;
        for index in segment.nodes.clone() {
            let node = &self.graph.nodes()[index];
            if recomputed && values[node.output.index()].is_some() {
                continue;
            }
            memory_tracker.work_on(if recomputed { "recomputation" } else { "forward" }, self.name(node));
            let operands = self.operands(node, parameters, values)?;
            let compute = parameters.compute();
            let dropped = |result| self.drop_out(index, run::in_precision(&node.op, result, compute)?, dropout);
            let result = match self.dropped_attention(index, dropout) {
                Some((op, mask)) => op.eval_with_factors(&operands, &|sizes, block| mask.factors(sizes, block, &self.device)),
                None => self.prepared(index, compute).forward(&operands),
            };
            let result = result.and_then(dropped).map_err(run::failed(self.name(node)))?;
            memory_tracker.count_macs(|| run::macs(self.graph, node, &operands, &result));
            observe(node, &operands, &result)?;
            drop(operands);
            memory_tracker.allocate_named(MemoryCategory::Activations, self.name(node), bytes_of(&result))?;
            values[node.output.index()] = Some(result);
            for id in &self.dead[index] {
                // The backward pass needs it after recomputation.
                let needed = recomputed && self.read_back(*id, segment);
                if !needed {
                    self.release(values, *id, memory_tracker);
                }
            }
        }
        Ok(())
    }

    /// Whether the backward pass of a segment reads a value that the segment computes.
    fn read_back(&self, id: ValueId, segment: &Segment) -> bool {
        self.done[segment.nodes.clone()].iter().flatten().any(|done| *done == id)
    }

    /// Runs the backward pass from gradients of the requested values. Each gradient of a parameter is
    /// passed to `sink`; that of a parameter with several readers arrives in several summands. Gradients
    /// of observed values are passed to it as well.
    pub fn backward(
        &self,
        forward: Forward,
        from: BTreeMap<ValueId, Tensor>,
        parameters: &Parameters,
        memory_tracker: &MemoryTracker,
        sink: GradientSink,
    ) -> Result<()> {
        let Forward { mut values, dims, taps, dropout } = forward;
        drop(taps);
        let mut gradients = Gradients::new(self.graph, memory_tracker);
        let done = from.into_iter().try_for_each(|(id, gradient)| gradients.add(id, gradient).map_err(run::failed(&self.graph.value(id).name))?);
        let walk = || self.walk_back(&mut values, (&dims, dropout), &mut gradients, parameters, memory_tracker, sink);
        let done = done.and_then(|()| on_pool_thread(&self.device, walk));
        self.release_all(&mut values, memory_tracker);
        gradients.clear();
        done
    }

    fn walk_back(
        &self,
        values: &mut [Option<Tensor>],
        (dims, dropout): (&[Vec<usize>], Option<DropoutSeed>),
        gradients: &mut Gradients,
        parameters: &Parameters,
        memory_tracker: &MemoryTracker,
        sink: GradientSink,
    ) -> Result<()> {
        let needs_backward = |node: &Node| self.reached[node.output.index()];
        for segment in self.segments.iter().rev() {
            let nodes = &self.graph.nodes()[segment.nodes.clone()];
            match (segment.recomputed, nodes.iter().any(needs_backward)) {
                (true, true) => self.compute(segment, parameters, values, memory_tracker, (true, dropout), &mut |_, _, _| Ok(()))?,
                (false, true) => parameters.enter(&segment.parameters, Some(memory_tracker))?,
                (_, false) => {}
            }
            for (index, node) in segment.nodes.clone().zip(nodes).rev() {
                memory_tracker.work_on("backward", self.name(node));
                if let Some(gradient) = gradients.get(node.output).filter(|_| needs_backward(node)) {
                    if self.observed.contains(&node.output) {
                        sink(self.name(node), gradient.clone())?;
                    }
                    memory_tracker.count_macs(|| 2 * run::macs_of_sizes(self.graph, node, dims));
                    let gradient = self.drop_out(index, gradient, dropout).map_err(run::failed(self.name(node)))?;
                    self.back_through((index, dropout), &gradient, parameters, (values, dims), gradients, sink)?;
                }
                gradients.take(node.output);
                for id in &self.done[index] {
                    self.release(values, *id, memory_tracker);
                }
            }
            nodes.iter().for_each(|node| self.release(values, node.output, memory_tracker));
        }
        Ok(())
    }

    fn back_through(
        &self,
        (index, dropout): (usize, Option<DropoutSeed>),
        gradient: &Tensor,
        parameters: &Parameters,
        (values, dims): (&[Option<Tensor>], &[Vec<usize>]),
        gradients: &mut Gradients,
        sink: GradientSink,
    ) -> Result<()> {
        let node = &self.graph.nodes()[index];
        let failed = |e: candle_core::Error| run::failed(self.name(node))(e);
        let (reads, reads_output) = &self.reads[index];
        let mut inputs = Vec::with_capacity(node.inputs.len());
        for (id, read) in node.inputs.iter().zip(reads) {
            let value = self.graph.value(*id);
            inputs.push(match (value.kind == Kind::Param, read) {
                (true, _) => Saved::full(parameters.get(&value.name).map_err(failed)?),
                (false, true) => Saved::full(self.read(values, *id)?),
                (false, false) => Saved::shape(&dims[id.index()]),
            });
        }
        // Linear layers read their input, which the forward pass rounded.
        let mut unrounded = None;
        if let (Some(scheme), Some(input)) = (run::input_scheme(self.graph, node, parameters), inputs.first_mut()) {
            let x = input.tensor().map_err(failed)?.clone();
            *input = Saved::full(Rounding::Token.round_input(scheme, &x).map_err(failed)?);
            unrounded = Some((scheme, x));
        }
        let output = if *reads_output { Saved::full(self.read(values, node.output)?) } else { Saved::shape(gradient.dims()) };
        let wanted: Vec<bool> = node.inputs.iter().map(|id| self.reached[id.index()]).collect();
        let backward = Backward { inputs: &inputs, output: &output, gradient, needs_gradient: &wanted };
        let found = match self.dropped_attention(index, dropout) {
            Some((op, mask)) => op.backward_with_factors(&backward, &|sizes, block| mask.factors(sizes, block, &self.device)),
            None => self.prepared(index, parameters.compute()).backward(&backward),
        };
        let mut found = found.map_err(failed)?;
        if let (Some((scheme, x)), Some(gradient)) = (unrounded, found.first_mut()) {
            *gradient = gradient.take().map(|gradient| Rounding::Token.input_gradient(scheme, &x, gradient)).transpose().map_err(failed)?;
        }
        for ((id, found), wanted) in node.inputs.iter().zip(found).zip(&wanted) {
            let Some(found) = found.filter(|_| *wanted) else { continue };
            let value = self.graph.value(*id);
            if value.kind == Kind::Param {
                sink(&value.name, found)?;
                continue;
            }
            gradients.add(*id, found).map_err(failed)??;
        }
        Ok(())
    }

    /// Applies dropout to the result of a node, or to its gradient.
    fn drop_out(&self, index: usize, tensor: Tensor, seed: Option<DropoutSeed>) -> candle_core::Result<Tensor> {
        match (&self.dropout, seed) {
            (Some(dropout), Some(seed)) => dropout.apply(seed, index, tensor),
            _ => Ok(tensor),
        }
    }

    /// A node of attention whose probabilities have dropout, which no kernel computes, and their mask.
    fn dropped_attention(&self, index: usize, seed: Option<DropoutSeed>) -> Option<(&Attention, AttentionMask<'_>)> {
        let (Op::Attention(op), Some(dropout), Some(seed)) = (&self.graph.nodes()[index].op, &self.dropout, seed) else { return None };
        (dropout.attention_rate > 0.0).then_some((op, AttentionMask { dropout, seed, node: index }))
    }

    fn prepared(&self, index: usize, compute: DType) -> &PreparedOp {
        self.prepared[index].get_or_init(|| PreparedOp::new(&self.graph.nodes()[index].op, &self.device, compute))
    }

    fn operands(&self, node: &Node, parameters: &Parameters, values: &[Option<Tensor>]) -> Result<Vec<Tensor>> {
        let operand = |id: &ValueId| {
            let value = self.graph.value(*id);
            if value.kind == Kind::Param { parameters.get(&value.name).map_err(run::failed(&value.name)) } else { self.read(values, *id) }
        };
        let mut operands = node.inputs.iter().map(operand).collect::<Result<Vec<Tensor>>>()?;
        if let (Some(scheme), Some(input)) = (run::input_scheme(self.graph, node, parameters), operands.first_mut()) {
            *input = Rounding::Token.round_input(scheme, input).map_err(run::failed(self.name(node)))?;
        }
        Ok(operands)
    }

    fn read(&self, values: &[Option<Tensor>], id: ValueId) -> Result<Tensor> {
        values[id.index()].clone().ok_or_else(|| Error::graph(format!("graph value `{}`", self.graph.value(id).name), "is read after it was released"))
    }

    fn name(&self, node: &Node) -> &str {
        &self.graph.value(node.output).name
    }

    fn release(&self, values: &mut [Option<Tensor>], id: ValueId, memory_tracker: &MemoryTracker) {
        if let Some(tensor) = values[id.index()].take() {
            memory_tracker.release_named(self.category(id), &self.graph.value(id).name, bytes_of(&tensor));
        }
    }

    fn category(&self, id: ValueId) -> MemoryCategory {
        if self.graph.value(id).kind == Kind::Input { MemoryCategory::Data } else { MemoryCategory::Activations }
    }

    fn release_all(&self, values: &mut [Option<Tensor>], memory_tracker: &MemoryTracker) {
        self.graph.ids().for_each(|id| self.release(values, id, memory_tracker));
    }
}
