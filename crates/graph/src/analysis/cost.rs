//! Compute and memory cost of a run.

use std::collections::{BTreeMap, BTreeSet};

use super::live::{dead_after, node_by_node};
use crate::ir::ops::elements;
use crate::ir::{Bindings, Dim, Element, Graph, Kind, Node, Op, TensorType, ValueId};

/// Default length of a text in tokens.
const SEQUENCE: usize = 128;
/// Default height and width of an image.
const IMAGE: usize = 224;

/// Default sizes for the named axes of a graph: one sample, texts of 128 tokens besides their image, images
/// of 224 x 224.
pub fn usual_sizes(graph: &Graph) -> Bindings {
    let patches = graph.image_patches().map_or(0, |(_, patches)| patches);
    graph.bind(|name| match name {
        "sequence" => SEQUENCE + patches,
        "decoder_sequence" => SEQUENCE,
        "height" | "width" => IMAGE,
        _ => 1,
    })
}

/// The fraction of tokens that nodes of experts process on average: `top / experts`.
#[derive(Default)]
struct RoutedTokens(BTreeMap<ValueId, (u64, u64)>);

impl RoutedTokens {
    /// The share of `whole`, the cost for all tokens, that a node takes.
    fn share_of(&mut self, whole: u64, graph: &Graph, node: &Node) -> u64 {
        let route = |id: &ValueId| {
            let Op::Route(route) = &graph.producer(*id)?.op else { return None };
            Some((route.top as u64, graph.value(*id).ty.shape.last()?.fixed()? as u64))
        };
        let part = match node.op {
            Op::Dispatch(_) => node.inputs.get(1).and_then(route),
            Op::Combine(_) => None,
            _ => node.inputs.iter().find_map(|id| self.0.get(id).copied()),
        };
        let Some((top, experts)) = part.filter(|(_, experts)| *experts > 0) else { return whole };
        self.0.insert(node.output, (top, experts));
        let found = u128::from(whole) * u128::from(top) / u128::from(experts);
        u64::try_from(found).unwrap_or(u64::MAX)
    }
}

/// Multiply-accumulate operations of each node, for these values of the named sizes. Experts process only the
/// tokens that are routed to them.
fn node_macs(graph: &Graph, sizes: &Bindings) -> Vec<u64> {
    let mut routed = RoutedTokens::default();
    let macs = |node: &Node| {
        let whole = node.op.spec().macs(&graph.input_types(node), &graph.value(node.output).ty, sizes);
        routed.share_of(whole, graph, node)
    };
    graph.nodes().iter().map(macs).collect()
}

/// Multiply-accumulate operations of the nodes that compute the wanted values.
pub fn cost_of_values(graph: &Graph, sizes: &Bindings, wanted: impl Fn(&str) -> bool) -> u64 {
    let mut needed: BTreeSet<ValueId> = graph.ids().filter(|id| wanted(&graph.value(*id).name)).collect();
    let mut sum = 0u64;
    for (node, macs) in graph.nodes().iter().zip(node_macs(graph, sizes)).rev() {
        if needed.contains(&node.output) {
            needed.extend(&node.inputs);
            sum = sum.saturating_add(macs);
        }
    }
    sum
}

/// Multiply-accumulate operations of a node whose values have these sizes.
pub fn macs_of_node<'a>(graph: &Graph, node: &Node, dims: impl Fn(ValueId) -> &'a [usize]) -> u64 {
    let ty = |id: ValueId| {
        let (ty, dims) = (&graph.value(id).ty, dims(id));
        let fixed = || dims.iter().copied().map(Dim::Fixed).collect();
        TensorType { shape: if dims.is_empty() { ty.shape.clone() } else { fixed() }, ..ty.clone() }
    };
    let inputs: Vec<TensorType> = node.inputs.iter().map(|id| ty(*id)).collect();
    node.op.spec().macs(&inputs.iter().collect::<Vec<_>>(), &ty(node.output), &Bindings::new())
}

/// Multiply-accumulate operations of one run, and the peak bytes of live values (four per element,
/// without parameters), for these values of the named sizes. Experts process only the tokens that are
/// routed to them.
pub fn cost(graph: &Graph, sizes: &Bindings) -> (u64, u64) {
    let bytes = |ty: &TensorType| elements(ty, sizes).saturating_mul(4);
    let mut alive: u64 = graph.values().iter().filter(|v| v.kind == Kind::Input).map(|v| bytes(&v.ty)).fold(0, u64::saturating_add);
    let (mut macs, mut most) = (0u64, alive);
    let by_node = node_macs(graph, sizes);
    for ((node, own), dead) in graph.nodes().iter().zip(by_node).zip(dead_after(graph, &node_by_node(graph))) {
        let output = &graph.value(node.output).ty;
        macs = macs.saturating_add(own);
        alive = alive.saturating_add(bytes(output));
        most = most.max(alive);
        alive = dead.iter().fold(alive, |alive, id| alive.saturating_sub(bytes(&graph.value(*id).ty)));
    }
    (macs, most)
}

/// The first node with an unknown number of multiply-accumulates: an opaque one that has several inputs
/// with at least two axes.
pub fn uncounted(graph: &Graph) -> Option<&str> {
    let may_multiply = |node: &&Node| {
        let large = |id: &&ValueId| graph.value(**id).ty.element == Element::Float && graph.value(**id).ty.shape.len() > 1;
        matches!(node.op, Op::Opaque(_)) && node.inputs.iter().filter(large).count() > 1
    };
    graph.nodes().iter().find(may_multiply).map(|node| graph.value(node.output).name.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_of_a_small_network() {
        let text = "input x: float[batch, 4]\nparam w: float[8, 4]\nparam v: float[2, 8]\na = Linear(x, w) -> float[batch, 8]\nb = Relu(a) -> float[batch, 8]\nc = Linear(b, v) -> float[batch, 2]\noutput logits = c\n";
        let graph: Graph = text.parse().unwrap();
        let sizes = usual_sizes(&graph);
        assert_eq!(sizes.get("batch"), Some(&1));
        // x and a; a and b; b and c.
        assert_eq!(cost(&graph, &sizes), (4 * 8 + 8 * 2, 4 * 16));
        assert_eq!(cost(&graph, &[("batch".to_owned(), 3)].into()).0, 3 * (4 * 8 + 8 * 2));
        let until = |name: &str| cost_of_values(&graph, &[("batch".to_owned(), 3)].into(), |value| value == name);
        assert_eq!([until("x"), until("b"), until("c")], [0, 3 * 4 * 8, 3 * (4 * 8 + 8 * 2)]);
        let last = &graph.nodes()[2];
        let dims = |id| -> &[usize] {
            match graph.value(id).name.as_str() {
                "b" => &[5, 8],
                "c" => &[5, 2],
                _ => &[],
            }
        };
        assert_eq!(macs_of_node(&graph, last, dims), 5 * 8 * 2);
    }

    #[test]
    fn experts_process_only_routed_tokens() {
        let text = "input x: float[batch, 4]\nparam r: float[3, 4]\nparam w: float[4, 4]\ns = Linear(x, r) -> float[batch, 3]\np = Route{\"top\":2}(s) -> float[batch, 3]\na = Dispatch(x, p) -> float[batch, 4]\nb = Dispatch{\"expert\":1}(x, p) -> float[batch, 4]\nc = Dispatch{\"expert\":2}(x, p) -> float[batch, 4]\nu = Linear(a, w) -> float[batch, 4]\nv = Linear(b, w) -> float[batch, 4]\ny = Combine(p, u, v, c) -> float[batch, 4]\nz = Linear(y, w) -> float[batch, 4]\noutput logits = z\n";
        let graph: Graph = text.parse().unwrap();
        assert_eq!(cost(&graph, &[("batch".to_owned(), 3)].into()).0, 3 * (3 * 4 + 4 * 4) + 2 * (2 * 4 * 4));
    }
}
