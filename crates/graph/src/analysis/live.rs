//! Lifetimes of values.

use std::collections::BTreeMap;

use crate::ir::{Graph, Kind, ValueId};

/// For each step of nodes in execution order, the values that no later step reads. Outputs and parameters
/// stay alive.
pub fn dead_after(graph: &Graph, steps: &[Vec<usize>]) -> Vec<Vec<ValueId>> {
    let mut last = BTreeMap::new();
    for (index, step) in steps.iter().enumerate() {
        for node in step.iter().map(|node| &graph.nodes()[*node]) {
            node.inputs.iter().chain([&node.output]).for_each(|id| {
                last.insert(*id, index);
            });
        }
    }
    let mut dead = vec![Vec::new(); steps.len()];
    for (id, index) in last {
        let is_output = graph.outputs().iter().any(|(_, out)| *out == id);
        if !is_output && graph.value(id).kind != Kind::Param {
            dead[index].push(id);
        }
    }
    dead
}

/// One step per node.
pub fn node_by_node(graph: &Graph) -> Vec<Vec<usize>> {
    (0..graph.nodes().len()).map(|index| vec![index]).collect()
}
