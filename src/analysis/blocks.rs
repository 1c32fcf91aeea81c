//! Where a graph can be cut, so that its parts run one after the other with the parameters of one part in memory.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use crate::ir::{Graph, Kind, Op, ValueId};

/// A part of a graph that one value leads into: of a transformer, attention or the network behind it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block {
    /// Its nodes, by position.
    pub nodes: Range<usize>,
    /// Parameters that they read, by name.
    pub parameters: BTreeSet<String>,
    /// The value at its end, by name: the only one that depends on parameters and is read by later blocks.
    pub value: String,
}

/// What the places between nodes are like.
struct Places<'g> {
    graph: &'g Graph,
    /// By value: how many nodes read it, and the last of them.
    readers: BTreeMap<ValueId, (usize, usize)>,
    /// By value: whether it depends on a parameter.
    dependent: Vec<bool>,
}

impl Places<'_> {
    fn of(graph: &Graph) -> Places<'_> {
        let mut readers: BTreeMap<ValueId, (usize, usize)> = BTreeMap::new();
        let mut dependent: Vec<bool> = graph.values().iter().map(|value| value.kind == Kind::Param).collect();
        for (index, node) in graph.nodes().iter().enumerate() {
            for id in node.inputs.iter().collect::<BTreeSet<_>>() {
                let (count, last) = readers.entry(*id).or_default();
                (*count, *last) = (*count + 1, index);
            }
            dependent[node.output.index()] = node.inputs.iter().any(|id| dependent[id.index()]);
        }
        Places { graph, readers, dependent }
    }

    /// For each place between two nodes, by the position of the second: the values that cross it and depend on parameters.
    fn crossings(&self) -> Vec<(usize, Vec<ValueId>)> {
        let mut open: Vec<ValueId> = Vec::new();
        let nodes = self.graph.nodes();
        let mut found = Vec::with_capacity(nodes.len());
        for (index, node) in nodes.iter().enumerate().take(nodes.len().saturating_sub(1)) {
            if self.dependent[node.output.index()] {
                open.push(node.output);
            }
            open.retain(|id| self.readers.get(id).is_some_and(|(_, last)| *last > index));
            found.push((index + 1, open.clone()));
        }
        found
    }

    /// Whether a value stands by itself in every plan: what one node alone reads may be computed together with it, unless that node
    /// begins something. A transposed value is a view of another one, and is read in another order of sums once it is a copy.
    fn stands_alone(&self, id: ValueId) -> bool {
        if matches!(self.graph.value(id).kind, Kind::Node(index) if matches!(self.graph.nodes()[index].op, Op::Transpose(_))) {
            return false;
        }
        let (count, last) = self.readers.get(&id).copied().unwrap_or_default();
        count > 1 || self.graph.is_output(id) || matches!(self.graph.nodes()[last].op, Op::Linear(_) | Op::Conv(_))
    }

    fn block(&self, nodes: Range<usize>) -> Block {
        let inputs = self.graph.nodes()[nodes.clone()].iter().flat_map(|node| &node.inputs).map(|id| self.graph.value(*id));
        let parameters = inputs.filter(|value| value.kind == Kind::Param).map(|value| value.name.clone()).collect();
        let last = nodes.end.checked_sub(1).map(|last| self.graph.value(self.graph.nodes()[last].output).name.clone());
        Block { nodes, parameters, value: last.unwrap_or_default() }
    }
}

/// Cuts a graph wherever one value that depends on parameters is all that later nodes read; values that depend on none, such as masks
/// and positions, may be read across. In a transformer, that is behind each residual sum, or behind its normalisation. A graph that
/// cannot be cut is one block.
pub fn blocks(graph: &Graph) -> Vec<Block> {
    let places = Places::of(graph);
    let mut found: Vec<Block> = Vec::new();
    let mut first = 0;
    for (place, crossing) in places.crossings() {
        let [value] = crossing.as_slice() else { continue };
        let mut block = places.block(first..place);
        if places.stands_alone(*value) && !block.parameters.is_empty() {
            block.value = graph.value(*value).name.clone();
            found.push(block);
            first = place;
        }
    }
    let mut last = places.block(first..graph.nodes().len());
    if last.parameters.is_empty()
        && let Some(before) = found.pop()
    {
        last = Block { nodes: before.nodes.start..last.nodes.end, parameters: before.parameters, value: last.value };
    }
    found.push(last);
    found
}

/// The positions of nodes at which one block ends and the next begins.
pub fn block_ends(graph: &Graph) -> Vec<usize> {
    let ends = blocks(graph).into_iter().map(|block| block.nodes.end);
    ends.filter(|end| *end < graph.nodes().len()).collect()
}

/// Why a graph is one block, if it is.
pub fn uncut(graph: &Graph) -> Option<String> {
    if blocks(graph).len() > 1 {
        return None;
    }
    let places = Places::of(graph);
    let narrowest = places.crossings().into_iter().filter(|(_, values)| values.len() > 1).min_by_key(|(_, values)| values.len());
    Some(match narrowest {
        Some((_, values)) => {
            let names: Vec<String> = values.iter().take(3).map(|id| format!("`{}`", graph.value(*id).name)).collect();
            format!("nowhere does one value alone lead into the rest of the graph; at the narrowest place {} do: {}", values.len(), names.join(", "))
        }
        None => "it has no two parts with parameters of their own".into(),
    })
}

/// Parameters that are weights of linear layers and nothing else: no value shares their memory.
pub fn weights_of_layers(graph: &Graph) -> BTreeSet<String> {
    let mut found: BTreeMap<ValueId, bool> = graph.params().map(|(id, _)| (id, !graph.is_output(id))).collect();
    for node in graph.nodes() {
        for (position, id) in node.inputs.iter().enumerate() {
            if let Some(alone) = found.get_mut(id) {
                *alone &= position == 1 && matches!(node.op, Op::Linear(_));
            }
        }
    }
    found.into_iter().filter(|(_, alone)| *alone).map(|(id, _)| graph.value(id).name.clone()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYER: &str = "input x: float[2, 4]\ninput m: int[2, 4]\nparam w: float[4, 4]\nparam v: float[4, 4]\nparam h: float[4, 4]\n";

    fn values(nodes: &str) -> Vec<String> {
        let graph: Graph = format!("{LAYER}{nodes}").parse().unwrap();
        blocks(&graph).into_iter().map(|block| block.value).collect()
    }

    #[test]
    fn cuts_are_behind_residual_sums() {
        let residual = "a = Linear(x, w) -> float[2, 4]\nb = Relu(a) -> float[2, 4]\nc = Linear(b, v) -> float[2, 4]\nd = Add(a, c) -> float[2, 4]\ne = Relu(d) -> float[2, 4]\nf = Linear(e, h) -> float[2, 4]\noutput logits = f\n";
        // `d` is read by `Relu` alone, which may be computed with it.
        assert_eq!(values(residual), ["a", "e", "f"]);
        let graph: Graph = format!("{LAYER}{residual}").parse().unwrap();
        let found = blocks(&graph);
        assert_eq!(found.iter().map(|block| block.nodes.clone()).collect::<Vec<_>>(), [0..1, 1..5, 5..6]);
        assert_eq!(found[1].parameters, BTreeSet::from(["v".to_owned()]));
        assert_eq!(uncut(&graph), None);
    }

    #[test]
    fn what_has_no_parameters_is_no_block_and_two_branches_are_one() {
        assert_eq!(values("a = Linear(x, w) -> float[2, 4]\nb = Relu(a) -> float[2, 4]\noutput a = a\noutput b = b\n"), ["b"]);
        let branches = "a = Linear(x, w) -> float[2, 4]\nb = Linear(x, v) -> float[2, 4]\nc = Mul(a, b) -> float[2, 4]\noutput c = c\n";
        assert_eq!(values(branches), ["c"]);
        let graph: Graph = format!("{LAYER}{branches}").parse().unwrap();
        assert!(uncut(&graph).unwrap().contains("2 do: `a`, `b`"), "{:?}", uncut(&graph));
        let crossed = "a = Linear(x, w) -> float[2, 4]\nb = Linear(a, v) -> float[2, 4]\nc = Linear(b, h) -> float[2, 4]\nd = Mul(a, b) -> float[2, 4]\ne = Mul(d, c) -> float[2, 4]\noutput e = e\n";
        assert_eq!(values(crossed), ["a", "e"]);
    }
}
