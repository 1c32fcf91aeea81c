//! Queries for the consumers of graph values.

use crate::ir::{Graph, Node, Op, ValueId};

/// Indices of the nodes that read a value, and whether the value is an output of the graph.
pub(super) fn readers(graph: &Graph, value: ValueId) -> (Vec<usize>, bool) {
    let nodes = graph.nodes().iter().enumerate().filter(|(_, node)| node.inputs.contains(&value)).map(|(index, _)| index).collect();
    (nodes, graph.outputs().iter().any(|(_, id)| *id == value))
}

/// The only reader of a value; `None` if there are several, or if the value is an output of the graph.
pub(super) fn only_reader(graph: &Graph, value: ValueId) -> Option<usize> {
    match readers(graph, value) {
        (nodes, false) if nodes.len() == 1 => nodes.first().copied(),
        _ => None,
    }
}

/// Name of the second input of a node, which is the weight of linear layers and convolutions.
pub(super) fn weight_input<'g>(graph: &'g Graph, node: &Node) -> &'g str {
    node.inputs.get(1).map_or("", |id| graph.value(*id).name.as_str())
}

/// Whether the second axis of a value is its channel axis. This applies to images, and to 3-D values that
/// a convolution, batch norm or pooling reads or computes, possibly through activation functions.
pub(super) fn channels_second(graph: &Graph, value: ValueId) -> bool {
    let is_spatial = |node: &Node| matches!(node.op, Op::Conv(_) | Op::ConvTranspose(_) | Op::BatchNorm(_) | Op::MaxPool(_) | Op::AveragePool(_));
    let rank = graph.value(value).ty.shape.len();
    if rank != 3 {
        return rank == 4;
    }
    let reads = |reader: &usize| graph.nodes().get(*reader).is_some_and(|node| is_spatial(node) && node.inputs.first() == Some(&value));
    if readers(graph, value).0.iter().any(reads) {
        return true;
    }
    let mut value = value;
    while let Some(node) = graph.producer(value) {
        match (node.op.activation(), node.inputs.first()) {
            _ if is_spatial(node) => return true,
            (Some(_), Some(input)) => value = *input,
            _ => return false,
        }
    }
    false
}
