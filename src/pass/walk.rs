//! Who reads what in a graph.

use crate::ir::{Graph, Node, ValueId};

/// The nodes that read a value, and whether it is a result of the graph.
pub(super) fn readers(graph: &Graph, value: ValueId) -> (Vec<usize>, bool) {
    let nodes = graph.nodes().iter().enumerate().filter(|(_, node)| node.inputs.contains(&value)).map(|(index, _)| index).collect();
    (nodes, graph.outputs().iter().any(|(_, id)| *id == value))
}

/// The only reader of a value that is no result.
pub(super) fn only_reader(graph: &Graph, value: ValueId) -> Option<usize> {
    match readers(graph, value) {
        (nodes, false) if nodes.len() == 1 => nodes.first().copied(),
        _ => None,
    }
}

/// The name of what stands in the place of a weight.
pub(super) fn weight_input<'g>(graph: &'g Graph, node: &Node) -> &'g str {
    node.inputs.get(1).map_or("", |id| graph.value(*id).name.as_str())
}
