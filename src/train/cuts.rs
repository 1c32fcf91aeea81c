//! Where segments begin that are computed again in the backward pass, and whose parameters are in memory by themselves where they are
//! elsewhere between uses.

use std::collections::BTreeMap;

use super::layers::Counted;
use super::{Checkpointing, Training};
use crate::analysis;
use crate::ir::{Graph, Op};

/// Positions of nodes: the beginnings of layers that repeat, or of residual blocks where there is no attention; where parameters come and
/// go, of all blocks that are cut apart by one value.
pub(super) fn cuts(graph: &Graph, options: &Training) -> Vec<usize> {
    let every = match options.gradient_checkpointing {
        Checkpointing::None if !options.pages_parameters() => return Vec::new(),
        Checkpointing::None | Checkpointing::Blocks => 1,
        Checkpointing::Every(layers) => layers.max(1),
    };
    blocks(graph, options.pages_parameters()).into_iter().step_by(every).collect()
}

fn blocks(graph: &Graph, by_parameters: bool) -> Vec<usize> {
    let nodes = graph.nodes();
    let found = Counted::of(graph);
    if found.lacking().is_none() {
        let place: BTreeMap<&str, usize> = nodes.iter().enumerate().map(|(index, node)| (graph.value(node.output).name.as_str(), index)).collect();
        let first = |layer: &analysis::Layer| layer.nodes.iter().filter_map(|name| place.get(name.as_str()).copied()).min();
        return found.layers.iter().filter_map(first).collect();
    }
    if by_parameters {
        return analysis::block_ends(graph);
    }
    // Behind each sum of two branches only the sum is read.
    nodes.iter().enumerate().filter(|(_, node)| matches!(node.op, Op::Add(_))).map(|(index, _)| index + 1).filter(|index| *index < nodes.len()).collect()
}
