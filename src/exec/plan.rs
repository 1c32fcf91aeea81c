//! Which nodes are computed together, and which values are not needed after them.

use std::collections::BTreeMap;

use crate::analysis;
use crate::ir::ops::Op;
use crate::ir::{Graph, Kind, Node, ValueId};
use crate::kernel::activation::ActivationFunction;

/// Nodes that are computed in one go.
#[derive(Debug)]
pub(super) struct FusedNodes {
    /// The first computes, the others finish its result; only the last one's value is seen.
    pub nodes: Vec<usize>,
    /// Values that nobody reads afterwards.
    pub dead: Vec<ValueId>,
}

/// Every node by itself.
pub(super) fn single(graph: &Graph) -> Vec<FusedNodes> {
    with_dead(graph, analysis::node_by_node(graph))
}

/// Linear layers and convolutions with what is done to their results alone.
pub(super) fn chained(graph: &Graph) -> Vec<FusedNodes> {
    let nodes = graph.nodes();
    let mut readers: BTreeMap<ValueId, Vec<usize>> = BTreeMap::new();
    for (index, node) in nodes.iter().enumerate() {
        node.inputs.iter().for_each(|id| readers.entry(*id).or_default().push(index));
    }
    let only_reader = |id: ValueId| match readers.get(&id).map(Vec::as_slice) {
        Some([reader]) if graph.outputs().iter().all(|(_, out)| *out != id) => Some(*reader),
        _ => None,
    };
    let mut taken = vec![false; nodes.len()];
    let mut chains = Vec::new();
    for (index, node) in nodes.iter().enumerate() {
        if taken[index] {
            continue;
        }
        let mut chain = vec![index];
        if matches!(node.op, Op::Linear(_) | Op::Conv(_)) {
            let mut value = node.output;
            while let Some(reader) = only_reader(value).filter(|reader| !taken[*reader]) {
                if !finishes(graph, node, &nodes[reader], value) {
                    break;
                }
                taken[reader] = true;
                chain.push(reader);
                value = nodes[reader].output;
            }
        }
        chains.push(chain);
    }
    // A chain runs when everything that its last node reads is there.
    chains.sort_by_key(|chain| chain.last().copied());
    with_dead(graph, chains)
}

fn finishes(graph: &Graph, first: &Node, next: &Node, value: ValueId) -> bool {
    match &next.op {
        Op::Add(_) | Op::Mul(_) => next.inputs.iter().all(|id| graph.value(*id).kind != Kind::Param && graph.value(*id).ty == graph.value(value).ty),
        Op::BatchNorm(_) => matches!(first.op, Op::Conv(_)) && next.inputs[0] == value,
        op => activation(op).is_some(),
    }
}

/// The function of single elements that an op is.
pub(super) fn activation(op: &Op) -> Option<ActivationFunction> {
    Some(match op {
        Op::Relu(op) => op.kernel(),
        Op::Gelu(op) => op.kernel(),
        Op::Silu(op) => op.kernel(),
        Op::Sigmoid(op) => op.kernel(),
        Op::Tanh(op) => op.kernel(),
        Op::Clip(op) => op.kernel(),
        Op::FakeQuantize(op) => op.kernel(),
        _ => return None,
    })
}

fn with_dead(graph: &Graph, chains: Vec<Vec<usize>>) -> Vec<FusedNodes> {
    let dead = analysis::dead_after(graph, &chains);
    chains.into_iter().zip(dead).map(|(nodes, dead)| FusedNodes { nodes, dead }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The nodes' names, a line for a step.
    fn steps(text: &str) -> Vec<String> {
        let graph: Graph = text.parse().unwrap();
        let name = |index: &usize| graph.value(graph.nodes()[*index].output).name.clone();
        chained(&graph).iter().map(|step| step.nodes.iter().map(name).collect::<Vec<_>>().join(" ")).collect()
    }

    #[test]
    fn chains_end_where_others_read() {
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
        let graph = b.finish().unwrap();
        // `act` belongs to `gate`, whose chain takes the product too, and so runs after `up`.
        assert_eq!(steps(&graph.to_string()), ["up", "gate act gated", "down sum", "seen", "relu"]);
    }
}
