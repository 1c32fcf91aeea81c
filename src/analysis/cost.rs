//! What a run costs.

use super::live::{dead_after, node_by_node};
use crate::ir::ops::elements;
use crate::ir::{Bindings, Graph, Kind, TensorType};

/// Tokens of a text when nothing is said.
const SEQUENCE: usize = 128;
/// Height and width of an image when nothing is said.
const IMAGE: usize = 224;

/// Sizes for a graph's named axes: one sample, a text of 128 tokens, an image of 224 x 224.
pub fn usual_sizes(graph: &Graph) -> Bindings {
    graph.bind(|name| match name {
        "sequence" => SEQUENCE,
        "height" | "width" => IMAGE,
        _ => 1,
    })
}

/// Multiply-accumulates of one run, and the most bytes of values that are alive at once (four a number, parameters
/// not counted), given the named sizes.
pub fn cost(graph: &Graph, sizes: &Bindings) -> (u64, u64) {
    let bytes = |ty: &TensorType| elements(ty, sizes).saturating_mul(4);
    let mut alive: u64 = graph.values().iter().filter(|v| v.kind == Kind::Input).map(|v| bytes(&v.ty)).fold(0, u64::saturating_add);
    let (mut macs, mut most) = (0u64, alive);
    for (node, dead) in graph.nodes().iter().zip(dead_after(graph, &node_by_node(graph))) {
        let output = &graph.value(node.output).ty;
        macs = macs.saturating_add(node.op.spec().macs(&graph.input_types(node), output, sizes));
        alive = alive.saturating_add(bytes(output));
        most = most.max(alive);
        alive = dead.iter().fold(alive, |alive, id| alive.saturating_sub(bytes(&graph.value(*id).ty)));
    }
    (macs, most)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_network_is_added_up() {
        let text = "input x: float[batch, 4]\nparam w: float[8, 4]\nparam v: float[2, 8]\na = Linear(x, w) -> float[batch, 8]\nb = Relu(a) -> float[batch, 8]\nc = Linear(b, v) -> float[batch, 2]\noutput logits = c\n";
        let graph: Graph = text.parse().unwrap();
        let sizes = usual_sizes(&graph);
        assert_eq!(sizes.get("batch"), Some(&1));
        // x and a; a and b; b and c.
        assert_eq!(cost(&graph, &sizes), (4 * 8 + 8 * 2, 4 * 16));
        assert_eq!(cost(&graph, &[("batch".to_owned(), 3)].into()).0, 3 * (4 * 8 + 8 * 2));
    }
}
