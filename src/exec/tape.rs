//! A graph walked forwards and backwards: reverse-mode differentiation over its nodes (Griewank and Walther, *Evaluating
//! Derivatives*, 2008), with values kept no longer than somebody reads them.
//!
//! The nodes are cut into segments. Of a segment that is computed again, only what later segments read is kept on the
//! forward pass; in the backward pass it runs once more (Chen et al., *Training Deep Nets with Sublinear Memory Cost*, 2016).

mod forecast;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::OnceLock;

use candle_core::{DType, Device, Tensor};

use super::memory_trace::GRADIENT;
use super::sizes::Sizes;
use super::{Inputs, MemoryCategory, MemoryTracker, Parameters, bytes_of, run};
use crate::error::{Error, Result};
use crate::ir::ops::{Backward, PreparedOp, Saved, sum};
use crate::ir::{Graph, Kind, Node, ValueId};

pub use forecast::{Pages, TapeForecast};

/// A graph with a plan of what is kept when.
#[derive(Debug)]
pub struct Tape<'g> {
    graph: &'g Graph,
    device: Device,
    sizes: Sizes,
    segments: Vec<Segment>,
    /// By value: whether a gradient goes through it.
    reached: Vec<bool>,
    taps: BTreeSet<ValueId>,
    /// By node: values that nobody reads after it in the forward pass.
    dead: Vec<Vec<ValueId>>,
    /// By node: values that no node before it reads in the backward pass.
    done: Vec<Vec<ValueId>>,
    /// By node: its inputs that the backward pass reads, and whether it reads the output.
    reads: Vec<(Vec<bool>, bool)>,
    /// By node, since the precision of the computation is known.
    prepared: Vec<OnceLock<PreparedOp>>,
}

#[derive(Debug, Clone)]
struct Segment {
    nodes: Range<usize>,
    again: bool,
    /// Those that its nodes read, by name.
    parameters: BTreeSet<String>,
}

/// What the forward pass leaves.
#[derive(Debug)]
pub struct Forward {
    values: Vec<Option<Tensor>>,
    /// Shapes, which outlive the values.
    dims: Vec<Vec<usize>>,
    taps: BTreeMap<ValueId, Tensor>,
}

impl Forward {
    /// The values that were asked for.
    pub fn taps(&self) -> &BTreeMap<ValueId, Tensor> {
        &self.taps
    }
}

/// Is told gradients of parameters.
pub type GradientSink<'s> = &'s mut dyn FnMut(&str, Tensor) -> Result<()>;

/// Is told a node, what it reads, and what it computes.
type NodeObserver<'s> = &'s mut dyn FnMut(&Node, &[Tensor], &Tensor) -> Result<()>;

/// Is told what nodes read as they are computed for the first time.
pub type Watch<'w> = &'w mut dyn FnMut(&Node, &[Tensor]) -> Result<()>;

impl<'g> Tape<'g> {
    /// Plans for gradients of some parameters, by name, and for values that are asked for. `cuts` are the positions of
    /// nodes at which segments begin that are computed again; without any, everything is kept.
    pub fn new(graph: &'g Graph, device: Device, taps: BTreeSet<ValueId>, trained: &dyn Fn(&str) -> bool, cuts: &[usize]) -> Tape<'g> {
        let nodes = graph.nodes();
        let mut reached: Vec<bool> = graph.values().iter().map(|value| value.kind == Kind::Param && trained(&value.name)).collect();
        for node in nodes {
            reached[node.output.index()] = node.inputs.iter().any(|id| reached[id.index()]);
        }
        let mut segments: Vec<Segment> = Vec::new();
        let mut from = 0;
        for to in cuts.iter().copied().filter(|cut| *cut > 0 && *cut < nodes.len()).chain([nodes.len()]) {
            let read = nodes[from..to].iter().flat_map(|node| &node.inputs).map(|id| graph.value(*id)).filter(|value| value.kind == Kind::Param);
            let parameters = read.map(|value| value.name.clone()).collect();
            segments.push(Segment { nodes: from..to, again: to < nodes.len(), parameters });
            from = to;
        }
        let reads = |node: &Node| {
            let on = reached[node.output.index()];
            let spec = node.op.spec();
            ((0..node.inputs.len()).map(|index| on && spec.reads_input(index)).collect(), on && spec.reads_output())
        };
        let reads = nodes.iter().map(reads).collect();
        let prepared = nodes.iter().map(|_| OnceLock::new()).collect();
        let mut tape = Tape { graph, device, sizes: Sizes::default(), segments, reached, taps, dead: Vec::new(), done: Vec::new(), reads, prepared };
        tape.plan();
        tape
    }

    /// Finds when values are needed last.
    fn plan(&mut self) {
        let nodes = self.graph.nodes();
        let count = self.graph.values().len();
        let segment_of = |node: usize| self.segments.iter().position(|segment| segment.nodes.contains(&node)).unwrap_or(0);
        let segments: Vec<usize> = (0..nodes.len()).map(segment_of).collect();
        let mut maker = vec![None; count];
        nodes.iter().enumerate().for_each(|(index, node)| maker[node.output.index()] = Some(index));
        // In the forward pass within a segment: the last node of it that reads the value.
        let mut last = vec![None; count];
        // In the backward pass: the first node that reads the value, or the start of a segment that is computed from it.
        let mut first: Vec<Option<usize>> = vec![None; count];
        let mut stays = vec![false; count];
        for (index, node) in nodes.iter().enumerate() {
            let segment = &self.segments[segments[index]];
            let (inputs, output) = &self.reads[index];
            for (id, read) in node.inputs.iter().zip(inputs) {
                let at = id.index();
                last[at] = Some(index);
                let made = maker[at].map(|maker| segments[maker]);
                let outside = made != Some(segments[index]);
                if outside && segment.again {
                    first[at].get_or_insert(segment.nodes.start);
                    stays[at] = true;
                } else if *read {
                    first[at].get_or_insert(index);
                    stays[at] |= outside || !segment.again;
                }
            }
            let at = node.output.index();
            last[at].get_or_insert(index);
            if *output {
                first[at] = Some(first[at].map_or(index, |first| first.min(index)));
                stays[at] |= !segment.again;
            }
        }
        self.dead = vec![Vec::new(); nodes.len()];
        self.done = vec![Vec::new(); nodes.len()];
        for id in self.graph.ids() {
            let at = id.index();
            if self.graph.value(id).kind == Kind::Param {
                continue;
            }
            if let Some(last) = last[at].filter(|_| !stays[at]) {
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

    /// Computes the graph and keeps what the backward pass needs.
    ///
    /// # Errors
    /// An input is missing or does not fit, or memory runs out.
    pub fn forward(&self, parameters: &Parameters, inputs: &Inputs, memory_tracker: &MemoryTracker, mut watch: Option<Watch>) -> Result<Forward> {
        let count = self.graph.values().len();
        let mut forward = Forward { values: vec![None; count], dims: vec![Vec::new(); count], taps: BTreeMap::new() };
        for (id, tensor) in self.sizes.take(self.graph, inputs, 0, &self.device, parameters.compute())? {
            if self.taps.contains(&id) {
                forward.taps.insert(id, tensor.clone());
            }
            forward.dims[id.index()] = tensor.dims().to_vec();
            memory_tracker.take_for(MemoryCategory::Data, &self.graph.value(id).name, bytes_of(&tensor))?;
            forward.values[id.index()] = Some(tensor);
        }
        for segment in &self.segments {
            let (dims, taps) = (&mut forward.dims, &mut forward.taps);
            let first = self.compute(segment, parameters, &mut forward.values, memory_tracker, false, &mut |node, operands, result| {
                dims[node.output.index()] = result.dims().to_vec();
                if self.taps.contains(&node.output) {
                    taps.insert(node.output, result.clone());
                }
                watch.as_mut().map_or(Ok(()), |watch| watch(node, operands))
            });
            if let Err(e) = first {
                self.release_all(&mut forward.values, memory_tracker);
                return Err(e);
            }
        }
        Ok(forward)
    }

    fn compute(
        &self,
        segment: &Segment,
        parameters: &Parameters,
        values: &mut [Option<Tensor>],
        memory_tracker: &MemoryTracker,
        again: bool,
        seen: NodeObserver,
    ) -> Result<()> {
        memory_tracker.work_on(if again { "recomputation" } else { "forward" }, "");
        parameters.enter(&segment.parameters, Some(memory_tracker))?;
        for index in segment.nodes.clone() {
            let node = &self.graph.nodes()[index];
            if again && values[node.output.index()].is_some() {
                continue;
            }
            memory_tracker.work_on(if again { "recomputation" } else { "forward" }, self.name(node));
            let operands = self.operands(node, parameters, values)?;
            let compute = parameters.compute();
            let result = self.prepared(index, compute).forward(&operands);
            let result = result.and_then(|t| if t.dtype().is_float() { t.to_dtype(compute) } else { Ok(t) }).map_err(run::failed(self.name(node)))?;
            seen(node, &operands, &result)?;
            drop(operands);
            memory_tracker.take_for(MemoryCategory::Activations, self.name(node), bytes_of(&result))?;
            values[node.output.index()] = Some(result);
            for id in &self.dead[index] {
                // Computed again, it is needed in the backward pass now.
                let needed = again && self.read_back(*id, segment);
                if !needed {
                    self.release(values, *id, memory_tracker);
                }
            }
        }
        Ok(())
    }

    /// Whether the backward pass of a segment reads a value that was made in it.
    fn read_back(&self, id: ValueId, segment: &Segment) -> bool {
        self.done[segment.nodes.clone()].iter().flatten().any(|done| *done == id)
    }

    /// Walks back from gradients of the values that were asked for; every gradient of a parameter goes to `sink`, that of
    /// a parameter with several readers in several parts.
    ///
    /// # Errors
    /// Memory runs out, or the sink fails.
    pub fn backward(
        &self,
        forward: Forward,
        from: BTreeMap<ValueId, Tensor>,
        parameters: &Parameters,
        memory_tracker: &MemoryTracker,
        sink: GradientSink,
    ) -> Result<()> {
        let Forward { mut values, dims, taps } = forward;
        drop(taps);
        let mut gradients = Gradients { graph: self.graph, by_value: vec![None; values.len()], memory_tracker };
        let done = from.into_iter().try_for_each(|(id, gradient)| gradients.add(id, gradient).map_err(run::failed(&self.graph.value(id).name))?);
        let done = done.and_then(|()| self.walk_back(&mut values, &dims, &mut gradients, parameters, memory_tracker, sink));
        self.release_all(&mut values, memory_tracker);
        gradients.clear();
        done
    }

    fn walk_back(
        &self,
        values: &mut [Option<Tensor>],
        dims: &[Vec<usize>],
        gradients: &mut Gradients,
        parameters: &Parameters,
        memory_tracker: &MemoryTracker,
        sink: GradientSink,
    ) -> Result<()> {
        let goes_back = |node: &Node| self.reached[node.output.index()];
        for segment in self.segments.iter().rev() {
            let nodes = &self.graph.nodes()[segment.nodes.clone()];
            match (segment.again, nodes.iter().any(goes_back)) {
                (true, true) => self.compute(segment, parameters, values, memory_tracker, true, &mut |_, _, _| Ok(()))?,
                (false, true) => parameters.enter(&segment.parameters, Some(memory_tracker))?,
                (_, false) => {}
            }
            for (index, node) in segment.nodes.clone().zip(nodes).rev() {
                memory_tracker.work_on("backward", self.name(node));
                if let Some(gradient) = gradients.get(node.output).filter(|_| goes_back(node)) {
                    self.back_through(index, &gradient, parameters, (values, dims), gradients, sink)?;
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
        index: usize,
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
                (true, _) => Saved::whole(parameters.get(&value.name).map_err(failed)?),
                (false, true) => Saved::whole(self.read(values, *id)?),
                (false, false) => Saved::shape(&dims[id.index()]),
            });
        }
        let output = if *reads_output { Saved::whole(self.read(values, node.output)?) } else { Saved::shape(gradient.dims()) };
        let wanted: Vec<bool> = node.inputs.iter().map(|id| self.reached[id.index()]).collect();
        let backward = Backward { inputs: &inputs, output: &output, gradient, wanted: &wanted };
        let found = self.prepared(index, parameters.compute()).backward(&backward).map_err(failed)?;
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

    fn prepared(&self, index: usize, compute: DType) -> &PreparedOp {
        self.prepared[index].get_or_init(|| PreparedOp::new(&self.graph.nodes()[index].op, &self.device, compute))
    }

    fn operands(&self, node: &Node, parameters: &Parameters, values: &[Option<Tensor>]) -> Result<Vec<Tensor>> {
        let operand = |id: &ValueId| {
            let value = self.graph.value(*id);
            if value.kind == Kind::Param { parameters.get(&value.name).map_err(run::failed(&value.name)) } else { self.read(values, *id) }
        };
        node.inputs.iter().map(operand).collect()
    }

    fn read(&self, values: &[Option<Tensor>], id: ValueId) -> Result<Tensor> {
        values[id.index()].clone().ok_or_else(|| Error::graph(format!("graph value `{}`", self.graph.value(id).name), "is read when it is not there"))
    }

    fn name(&self, node: &Node) -> &str {
        &self.graph.value(node.output).name
    }

    fn release(&self, values: &mut [Option<Tensor>], id: ValueId, memory_tracker: &MemoryTracker) {
        if let Some(tensor) = values[id.index()].take() {
            let category = if self.graph.value(id).kind == Kind::Input { MemoryCategory::Data } else { MemoryCategory::Activations };
            memory_tracker.give_for(category, &self.graph.value(id).name, bytes_of(&tensor));
        }
    }

    fn release_all(&self, values: &mut [Option<Tensor>], memory_tracker: &MemoryTracker) {
        self.graph.ids().for_each(|id| self.release(values, id, memory_tracker));
    }
}

/// Gradients that wait for the nodes which made their values.
struct Gradients<'l> {
    graph: &'l Graph,
    by_value: Vec<Option<Tensor>>,
    memory_tracker: &'l MemoryTracker,
}

impl Gradients<'_> {
    fn add(&mut self, id: ValueId, found: Tensor) -> candle_core::Result<Result<()>> {
        let sum = match self.take(id) {
            Some(other) => sum(other, found)?,
            None => found,
        };
        let kept = self.memory_tracker.take_for(MemoryCategory::Activations, &self.name(id), bytes_of(&sum));
        self.by_value[id.index()] = Some(sum);
        Ok(kept)
    }

    fn get(&self, id: ValueId) -> Option<Tensor> {
        self.by_value[id.index()].clone()
    }

    fn take(&mut self, id: ValueId) -> Option<Tensor> {
        let gradient = self.by_value[id.index()].take();
        gradient.inspect(|gradient| self.memory_tracker.give_for(MemoryCategory::Activations, &self.name(id), bytes_of(gradient)))
    }

    fn name(&self, id: ValueId) -> String {
        format!("{GRADIENT}{}", self.graph.value(id).name)
    }

    fn clear(&mut self) {
        self.graph.ids().for_each(|id| drop(self.take(id)));
    }
}
