//! Channels that can be rescaled at no cost when the model runs (Xiao et al., SmoothQuant, 2023; Nagel et al., cross-layer equalization,
//! 2019): the layer or normalisation that makes a value divides each channel by a number, the layers that read it multiply by the same.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::walk::{only_reader, readers, weight_input};
use crate::error::Result;
use crate::ir::ops::Op;
use crate::ir::{Graph, Kind, Node, ValueId};
use crate::store::{Scaled, Weight};

/// Channels that can be rescaled.
#[derive(Debug)]
pub(super) struct Chain {
    /// Name of the node that makes them.
    pub name: String,
    /// Whether that node is there for the factors alone.
    pub costly: bool,
    /// Whether values are mixed by attention on the way. What tokens add to each other differs so much from sample to sample that
    /// channels made alike on some leave the range on others: on MiniLM the worst cosine fell from 0.989 to 0.94.
    pub mixed: bool,
    /// How many.
    pub width: usize,
    /// Added to the stored factors of a normalization when it computes.
    pub offset: f32,
    /// Parameters that take the division over, along their first axis (or their second, when said so).
    pub makers: Vec<(String, bool)>,
    /// Values on the way, with the channel that each of their channels is.
    pub values: Vec<(ValueId, Vec<usize>)>,
    /// Layers that take the multiplication over: the value they read, their weight, and whether it is `[in, out]` or depthwise.
    pub sinks: Vec<ScaledLayer>,
    /// Values that are cut off above, with the channel that each of their channels is, and where.
    pub ceilings: Vec<(ValueId, Vec<usize>, f64)>,
}

#[derive(Debug, Clone)]
pub(super) struct ScaledLayer {
    pub value: ValueId,
    pub weight: String,
    /// The channel of each index of the weight's axis of inputs.
    pub index: Vec<usize>,
    /// Whether that axis is the first one.
    pub first: bool,
    /// Whether each output has one input: rounded with a scale of its own, it loses nothing by a factor.
    pub depthwise: bool,
}

/// All chains of a graph that quantized layers are part of: of the sinks at least one, or a convolution that makes the values and whose
/// output is quantized.
pub(super) fn chains(graph: &Graph, layers: &BTreeSet<String>) -> Vec<Chain> {
    let made = |chain: &Chain| chain.sinks.iter().all(|sink| sink.depthwise) && chain.makers.iter().any(|(name, _)| layers.contains(name));
    let read = |chain: &Chain| chain.sinks.iter().any(|sink| layers.contains(&sink.weight));
    graph.nodes().iter().filter_map(|node| chain(graph, node)).filter(|chain| read(chain) || made(chain)).collect()
}

/// The value whose rows determine the cost of rescaling: the one that all layers of the chain read, or the output of its normalization, which
/// experts read in parts.
pub(super) fn source(graph: &Graph, chain: &Chain) -> Option<ValueId> {
    let first = chain.sinks.first()?.value;
    if chain.sinks.iter().all(|sink| sink.value == first) {
        return Some(first);
    }
    let (made, _) = chain.values.first()?;
    let is_dispatched = |value: ValueId| match graph.value(value).kind {
        Kind::Node(at) => matches!(graph.nodes()[at].op, Op::Dispatch(_)) && graph.nodes()[at].inputs.first() == Some(made),
        _ => false,
    };
    chain.sinks.iter().all(|sink| sink.value == *made || is_dispatched(sink.value)).then_some(*made)
}

/// Normalizations whose channels quantized layers read, directly or after operators that move, mask or select them, by the name of their first
/// parameter.
pub(super) fn norms(graph: &Graph, layers: &BTreeSet<String>) -> BTreeSet<String> {
    let reaches = |value: ValueId| {
        let (mut next, mut visited) = (vec![value], BTreeSet::new());
        while let Some(value) = next.pop() {
            for node in readers(graph, value).0.into_iter().map(|at| &graph.nodes()[at]) {
                match &node.op {
                    Op::Linear(_) if layers.contains(weight_input(graph, node)) => return true,
                    Op::Linear(_) | Op::Add(_) | Op::Attention(_) | Op::LayerNorm(_) | Op::RmsNorm(_) | Op::Conv(_) | Op::MatMul(_) => {}
                    _ if visited.insert(node.output.index()) => next.push(node.output),
                    _ => {}
                }
            }
        }
        false
    };
    let is_norm = |node: &&Node| matches!(node.op, Op::LayerNorm(_) | Op::RmsNorm(_)) && reaches(node.output);
    graph.nodes().iter().filter(is_norm).filter_map(|node| Some(graph.value(*node.inputs.get(1)?).name.clone())).collect()
}

/// Whether a product is one with a number for each channel.
pub(super) fn is_factor(graph: &Graph, node: &Node) -> bool {
    let factor = node.inputs.get(1).map(|id| graph.value(*id));
    matches!(node.op, Op::Mul(_)) && factor.is_some_and(|value| value.kind == Kind::Param && value.ty.shape.len() == 1)
}

/// Whether a node has, as its second input, a number for each channel of a picture.
fn is_by_channel(graph: &Graph, node: &Node) -> bool {
    let [value, numbers] = node.inputs.as_slice() else { return false };
    let (of, numbers) = (&graph.value(*value).ty.shape, graph.value(*numbers));
    let sizes: Vec<Option<usize>> = numbers.ty.shape.iter().map(|dim| dim.fixed()).collect();
    numbers.kind == Kind::Param && of.len() == 4 && sizes.len() == 3 && of[1].fixed().is_some() && sizes == [of[1].fixed(), Some(1), Some(1)]
}

fn chain(graph: &Graph, node: &Node) -> Option<Chain> {
    let name = |at: usize| graph.value(node.inputs[at]).name.clone();
    let width = match &node.op {
        Op::Linear(_) | Op::LayerNorm(_) | Op::RmsNorm(_) => graph.value(node.output).ty.shape.last()?.fixed()?,
        Op::Mul(_) if is_factor(graph, node) => graph.value(node.output).ty.shape.last()?.fixed()?,
        Op::Mul(_) if is_by_channel(graph, node) => graph.value(node.output).ty.shape.get(1)?.fixed()?,
        Op::Conv(_) | Op::BatchNorm(_) => graph.value(node.output).ty.shape.get(1)?.fixed()?,
        _ => return None,
    };
    let makers: Vec<(String, bool)> = match &node.op {
        Op::Linear(op) => (1..node.inputs.len()).map(|at| (name(at), at == 1 && op.input_major)).collect(),
        Op::Conv(_) => (1..node.inputs.len()).map(|at| (name(at), false)).collect(),
        _ => (1..node.inputs.len().min(3)).map(|at| (name(at), false)).collect(),
    };
    // A parameter that others read too cannot change.
    if node.inputs[1..].iter().any(|id| only_reader(graph, *id).is_none()) {
        return None;
    }
    let costly = is_factor(graph, node);
    let name = graph.value(node.output).name.clone();
    let offset = if let Op::RmsNorm(op) = &node.op { op.offset as f32 } else { 0.0 };
    let mut chain = Chain { name, costly, mixed: false, width, offset, makers, values: Vec::new(), sinks: Vec::new(), ceilings: Vec::new() };
    let index: Vec<usize> = (0..width).collect();
    follow(graph, node.output, &index, &mut chain).then_some(chain).filter(|chain| !chain.sinks.is_empty())
}

/// Follows a value to the layers that read it; `false` where something on the way does not pass factors on.
fn follow(graph: &Graph, value: ValueId, index: &[usize], chain: &mut Chain) -> bool {
    let (nodes, result) = readers(graph, value);
    if result || nodes.is_empty() || chain.values.iter().any(|(seen, _)| *seen == value) {
        return false;
    }
    chain.values.push((value, index.to_vec()));
    nodes.into_iter().all(|reader| {
        let node = &graph.nodes()[reader];
        let at = node.inputs.iter().position(|id| *id == value);
        let sole = node.inputs.iter().filter(|id| **id == value).count() == 1;
        let shape = |id: ValueId| &graph.value(id).ty.shape;
        match (&node.op, at) {
            (Op::Linear(_) | Op::Conv(_), Some(0)) if sole => sink(graph, node, index, chain),
            (Op::Mul(_), Some(0)) if is_by_channel(graph, node) => sink(graph, node, index, chain),
            (Op::Add(_), Some(0)) if is_by_channel(graph, node) && only_reader(graph, node.inputs[1]).is_some() => {
                chain.makers.push((graph.value(node.inputs[1]).name.clone(), false));
                follow(graph, node.output, index, chain)
            }
            (Op::Relu(_) | Op::MaxPool(_) | Op::GlobalAveragePool(_) | Op::SplitHeads(_) | Op::MergeHeads(_) | Op::Select(_), Some(0)) => {
                follow(graph, node.output, index, chain)
            }
            (Op::Clip(clip), Some(0)) if clip.min == 0.0 => {
                if clip.max.is_finite() {
                    chain.ceilings.push((node.output, index.to_vec(), clip.max));
                }
                follow(graph, node.output, index, chain)
            }
            (Op::MaskedMean(_) | Op::Dispatch(_), Some(0)) => follow(graph, node.output, index, chain),
            (Op::Mul(_), Some(_)) if sole && node.inputs.iter().all(|id| shape(*id) == shape(value) && graph.value(*id).kind != Kind::Param) => {
                follow(graph, node.output, index, chain)
            }
            (Op::Flatten(op), Some(0)) => {
                let Some(width) = shape(node.output).last().and_then(|d| d.fixed()) else { return false };
                let plane = width / index.len().max(1);
                let spread: Vec<usize> = (0..width).map(|at| if op.channels_last { index[at % index.len()] } else { index[at / plane.max(1)] }).collect();
                follow(graph, node.output, &spread, chain)
            }
            (Op::Attention(_), Some(2)) => {
                chain.mixed = true;
                let (Some(heads), Some(groups)) = (shape(node.inputs[0])[1].fixed(), shape(value)[1].fixed()) else { return false };
                let (width, shared) = (index.len() / groups.max(1), heads / groups.max(1));
                let spread: Vec<usize> = (0..heads * width).map(|at| index[at / width.max(1) / shared.max(1) * width + at % width.max(1)]).collect();
                follow(graph, node.output, &spread, chain)
            }
            _ => false,
        }
    })
}

fn sink(graph: &Graph, node: &Node, index: &[usize], chain: &mut Chain) -> bool {
    let weight = weight_input(graph, node).to_owned();
    let own = node.inputs.get(1).is_some_and(|id| readers(graph, *id).0.len() == 1);
    let depthwise = is_depthwise(graph, node) || matches!(node.op, Op::Mul(_));
    let first = match &node.op {
        Op::Linear(op) => op.input_major,
        Op::Conv(op) if op.groups > 1 && !depthwise => return false,
        // Of a depthwise convolution each output has one input, whose factor it takes over by its row.
        _ => depthwise,
    };
    chain.sinks.push(ScaledLayer { value: node.inputs[0], weight, index: index.to_vec(), first, depthwise });
    own
}

/// Whether each output of a convolution has one input.
pub(super) fn is_depthwise(graph: &Graph, node: &Node) -> bool {
    let channels = graph.value(node.output).ty.shape.get(1).and_then(|d| d.fixed());
    matches!(&node.op, Op::Conv(op) if op.groups > 1 && channels == Some(op.groups))
}

impl Chain {
    /// Divides channels by these numbers where they are made and multiplies where they are read; `change` puts another weight in the
    /// place of one.
    ///
    /// # Errors
    /// Those of `change`.
    pub fn rescale(&self, factors: &[f32], mut change: impl FnMut(&str, &dyn Fn(Weight) -> Weight) -> Result<()>) -> Result<()> {
        let divisors: Arc<Vec<f32>> = Arc::new(factors.iter().map(|factor| 1.0 / factor).collect());
        for (name, second) in &self.makers {
            change(name, &|weight| scaled(name, weight, divisors.clone(), !*second, self.offset))?;
        }
        for sink in &self.sinks {
            let factors: Arc<Vec<f32>> = Arc::new(sink.index.iter().map(|channel| factors[*channel]).collect());
            change(&sink.weight, &|weight| scaled(&sink.weight, weight, factors.clone(), sink.first, 0.0))?;
        }
        Ok(())
    }
}

fn scaled(name: &str, weight: Weight, factors: Arc<Vec<f32>>, first: bool, offset: f32) -> Weight {
    let dtype = weight.dtype;
    let (rows, columns) = if first { (Some(factors), None) } else { (None, Some(factors)) };
    Scaled { name: name.to_owned(), upstream: weight, rows, columns, offset }.weight(dtype)
}
