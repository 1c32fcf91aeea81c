//! How long values are needed.

use std::collections::BTreeMap;

use crate::ir::{Graph, Kind, ValueId};

/// For each node, the values that nobody reads after it; outputs and parameters live on.
pub fn dead_after(graph: &Graph) -> Vec<Vec<ValueId>> {
    let mut last = BTreeMap::new();
    for (index, node) in graph.nodes().iter().enumerate() {
        for id in node.inputs.iter().chain([&node.output]) {
            last.insert(*id, index);
        }
    }
    let mut dead = vec![Vec::new(); graph.nodes().len()];
    for (id, index) in last {
        let kept = graph.outputs().iter().any(|(_, out)| *out == id);
        if !kept && graph.value(id).kind != Kind::Param {
            dead[index].push(id);
        }
    }
    dead
}
