//! Segment boundaries of a graph, for activation recomputation and for paged parameters.

use std::collections::BTreeMap;

use super::layer_pairs::LayerIndex;
use super::{Checkpointing, Training};
use crate::analysis;
use crate::ir::{Graph, Op};

/// Indices of the nodes at which segments begin: the repeated layers, or the residual blocks of a model
/// without attention. With paged parameters, the latter are all blocks that are connected by a single
/// value.
pub(super) fn cuts(graph: &Graph, options: &Training) -> Vec<usize> {
    let every = match options.gradient_checkpointing {
        Checkpointing::None if !options.pages_parameters() => return Vec::new(),
        Checkpointing::None | Checkpointing::Blocks => 1,
        Checkpointing::Every(layers) => layers.max(1),
    };
    blocks(graph, options.pages_parameters()).into_iter().step_by(every).collect()
}

fn blocks(graph: &Graph, pages_parameters: bool) -> Vec<usize> {
    let nodes = graph.nodes();
    let found = LayerIndex::new(graph);
    if found.missing_stack().is_none() {
        let index_of: BTreeMap<&str, usize> = nodes.iter().enumerate().map(|(index, node)| (graph.value(node.output).name.as_str(), index)).collect();
        let first = |layer: &analysis::Layer| layer.nodes.iter().filter_map(|name| index_of.get(name.as_str()).copied()).min();
        return found.layers.iter().filter_map(first).collect();
    }
    if pages_parameters {
        return analysis::block_ends(graph);
    }
    // After an addition of two branches, later nodes read only the sum.
    nodes.iter().enumerate().filter(|(_, node)| matches!(node.op, Op::Add(_))).map(|(index, _)| index + 1).filter(|index| *index < nodes.len()).collect()
}

#[cfg(test)]
mod tests {
    use super::super::layer_pairs::LayerIndex;
    use super::{Checkpointing, Training, cuts};
    use crate::model::Model;

    #[test]
    fn each_repeated_layer_is_one_segment() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/models/llama");
        let graph = Model::open(folder).unwrap().graph().unwrap();
        let layers = LayerIndex::new(&graph).layers;
        let found = cuts(&graph, &Training { gradient_checkpointing: Checkpointing::Blocks, ..Training::default() });
        assert_eq!(found.len(), layers.len());
        let index = |name: &String| graph.nodes().iter().position(|node| graph.value(node.output).name == *name).unwrap();
        for (number, layer) in layers.iter().enumerate() {
            let end = found.get(number + 1).copied().unwrap_or(graph.nodes().len());
            assert!(layer.nodes.iter().map(index).all(|at| (found[number]..end).contains(&at)), "layer {number}");
        }
    }
}
