//! Execution plan: fusion of nodes, and lifetimes of values.

use std::collections::BTreeMap;

use crate::analysis;
use crate::ir::ops::Op;
use crate::ir::{Graph, Kind, Node, ValueId};

/// Nodes that are computed as one step.
#[derive(Debug)]
pub(super) struct FusedNodes {
    /// The first node computes the value, the others are its epilogue. Only the value of the last node is
    /// materialized.
    pub nodes: Vec<usize>,
    /// Values that no later step reads.
    pub dead: Vec<ValueId>,
}

/// Plans the steps that compute the `visible` values, which are always materialized: linear layers and
/// convolutions are fused with the elementwise ops that exclusively read their results.
pub(super) fn steps(graph: &Graph, visible: &dyn Fn(ValueId) -> bool) -> Vec<FusedNodes> {
    let nodes = graph.nodes();
    let needed = graph.dependencies(graph.ids().filter(|id| visible(*id)));
    let mut readers: BTreeMap<ValueId, Vec<usize>> = BTreeMap::new();
    for (index, node) in nodes.iter().enumerate().filter(|(_, node)| needed[node.output.index()]) {
        node.inputs.iter().for_each(|id| readers.entry(*id).or_default().push(index));
    }
    let only_reader = |id: ValueId| match readers.get(&id).map(Vec::as_slice) {
        Some([reader]) if !visible(id) => Some(*reader),
        _ => None,
    };
    let mut fused = vec![false; nodes.len()];
    let mut chains = Vec::new();
    for (index, node) in nodes.iter().enumerate() {
        if fused[index] || !needed[node.output.index()] {
            continue;
        }
        let mut chain = vec![index];
        if matches!(node.op, Op::Linear(_) | Op::Conv(_)) {
            let mut value = node.output;
            while let Some(reader) = only_reader(value).filter(|reader| !fused[*reader]) {
                if !can_be_epilogue(graph, node, &nodes[reader], value) {
                    break;
                }
                fused[reader] = true;
                chain.push(reader);
                value = nodes[reader].output;
            }
        }
        chains.push(chain);
    }
    // A chain runs as soon as all inputs of its last node are available.
    chains.sort_by_key(|chain| chain.last().copied());
    let dead = analysis::dead_after(graph, &chains);
    chains.into_iter().zip(dead).map(|(nodes, dead)| FusedNodes { nodes, dead }).collect()
}

fn can_be_epilogue(graph: &Graph, first: &Node, next: &Node, value: ValueId) -> bool {
    match &next.op {
        Op::Add(_) | Op::Mul(_) => next.inputs.iter().all(|id| graph.value(*id).kind != Kind::Param && graph.value(*id).ty == graph.value(value).ty),
        Op::BatchNorm(op) => matches!(first.op, Op::Conv(_)) && next.inputs[0] == value && !op.batch,
        op => op.activation().is_some(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The names of the nodes, one line per step.
    fn steps(graph: &Graph, visible: &dyn Fn(ValueId) -> bool) -> Vec<String> {
        let name = |index: &usize| graph.value(graph.nodes()[*index].output).name.clone();
        super::steps(graph, visible).iter().map(|step| step.nodes.iter().map(name).collect::<Vec<_>>().join(" ")).collect()
    }

    #[test]
    fn chains_end_at_values_with_other_readers() {
        let mut b = crate::ir::Builder::unchecked();
        let x = b.input("x", crate::ir::TensorType::float([2, 4])).unwrap();
        let w = b.param("w", &[4, 4]).unwrap();
        let linear = || crate::ir::ops::Linear { input_major: false };
        let gate = b.node("gate", linear(), &[x, w]).unwrap();
        let act = b.node("act", crate::ir::ops::Silu {}, &[gate]).unwrap();
        let up = b.node("up", linear(), &[x, w]).unwrap();
        let gated = b.node("gated", crate::ir::ops::Mul {}, &[act, up]).unwrap();
        let down = b.node("down", linear(), &[gated, w]).unwrap();
        let sum = b.node("sum", crate::ir::ops::Add {}, &[x, down]).unwrap();
        let seen = b.node("seen", linear(), &[sum, w]).unwrap();
        let relu = b.node("relu", crate::ir::ops::Relu {}, &[seen]).unwrap();
        b.output("seen", seen);
        b.output("relu", relu);
        let graph: Graph = b.finish().unwrap().to_string().parse().unwrap();
        let named = |name: &str| graph.ids().find(|id| graph.value(*id).name == name).unwrap();
        // `act` is fused into `gate`, whose chain also includes the product and therefore runs after
        // `up`.
        assert_eq!(steps(&graph, &|id| graph.is_output(id)), ["up", "gate act gated", "down sum", "seen", "relu"]);
        // For a single visible value, later nodes are not computed and everything else is fused.
        assert_eq!(steps(&graph, &|id| id == named("down")), ["up", "gate act gated", "down"]);
        assert_eq!(steps(&graph, &|id| id == named("act")), ["gate act"]);
        assert_eq!(steps(&graph, &|_| true).len(), graph.nodes().len());
    }
}
