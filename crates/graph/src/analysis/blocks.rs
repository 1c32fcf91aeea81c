//! Splitting of a graph into blocks that run one after the other, with the parameters of one block in
//! memory.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use crate::ir::{Graph, Kind, Op, ValueId};

/// A part of a graph with a single value as its input: in a transformer, attention or the feed-forward
/// network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block {
    /// Indices of its nodes.
    pub nodes: Range<usize>,
    /// Names of the parameters that they read.
    pub parameters: BTreeSet<String>,
    /// Name of its output: the only value that depends on parameters and is read by later blocks.
    pub value: String,
}

/// Candidate cuts between nodes.
struct CutPoints<'g> {
    graph: &'g Graph,
    /// For each value, the number of nodes that read it and the index of the last one.
    readers: BTreeMap<ValueId, (usize, usize)>,
    /// For each value, whether it depends on a parameter.
    dependent: Vec<bool>,
}

impl CutPoints<'_> {
    fn new(graph: &Graph) -> CutPoints<'_> {
        let mut readers: BTreeMap<ValueId, (usize, usize)> = BTreeMap::new();
        let mut dependent: Vec<bool> = graph.values().iter().map(|value| value.kind == Kind::Param).collect();
        for (index, node) in graph.nodes().iter().enumerate() {
            for id in node.inputs.iter().collect::<BTreeSet<_>>() {
                let (count, last) = readers.entry(*id).or_default();
                (*count, *last) = (*count + 1, index);
            }
            dependent[node.output.index()] = node.inputs.iter().any(|id| dependent[id.index()]);
        }
        CutPoints { graph, readers, dependent }
    }

    /// For each cut between two nodes, identified by the index of the second, the values that cross it
    /// and depend on parameters.
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

    /// Whether a value is materialized in every execution plan. A value with a single reader may be fused
    /// with it, unless the reader starts a fused group. A transposed value is a view; as a copy, it would
    /// be reduced in a different order of summation.
    fn is_materialized(&self, id: ValueId) -> bool {
        if self.graph.producer(id).is_some_and(|node| matches!(node.op, Op::Transpose(_))) {
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

/// Splits a graph at every cut that a single value depending on parameters crosses. Values that depend on
/// no parameter, such as masks and positions, may cross as well. In a transformer, the cuts are after
/// each residual addition or the normalization that follows it. A graph without such cuts is one block.
pub fn blocks(graph: &Graph) -> Vec<Block> {
    let cuts = CutPoints::new(graph);
    let mut found: Vec<Block> = Vec::new();
    let mut first = 0;
    for (cut, crossing) in cuts.crossings() {
        let [value] = crossing.as_slice() else { continue };
        let mut block = cuts.block(first..cut);
        if cuts.is_materialized(*value) && !block.parameters.is_empty() {
            block.value = graph.value(*value).name.clone();
            found.push(block);
            first = cut;
        }
    }
    let mut last = cuts.block(first..graph.nodes().len());
    if last.parameters.is_empty()
        && let Some(before) = found.pop()
    {
        last = Block { nodes: before.nodes.start..last.nodes.end, parameters: before.parameters, value: last.value };
    }
    found.push(last);
    found
}

/// The indices of nodes at which one block ends and the next one starts.
pub fn block_ends(graph: &Graph) -> Vec<usize> {
    let ends = blocks(graph).into_iter().map(|block| block.nodes.end);
    ends.filter(|end| *end < graph.nodes().len()).collect()
}

/// The reason why a graph is a single block, if it is.
pub fn single_block_reason(graph: &Graph) -> Option<String> {
    if blocks(graph).len() > 1 {
        return None;
    }
    let cuts = CutPoints::new(graph);
    let narrowest = cuts.crossings().into_iter().filter(|(_, values)| values.len() > 1).min_by_key(|(_, values)| values.len());
    Some(match narrowest {
        Some((_, values)) => {
            let names: Vec<String> = values.iter().take(3).map(|id| format!("`{}`", graph.value(*id).name)).collect();
            format!("no single value separates two parts of the graph; {} values cross the narrowest cut: {}", values.len(), names.join(", "))
        }
        None => "fewer than two parts of the graph have parameters".into(),
    })
}

/// Parameters that are only weights of linear layers, so that no value shares their memory.
pub fn linear_weights(graph: &Graph) -> BTreeSet<String> {
    let mut found: BTreeMap<ValueId, bool> = graph.params().map(|(id, _)| (id, !graph.is_output(id))).collect();
    for node in graph.nodes() {
        for (position, id) in node.inputs.iter().enumerate() {
            if let Some(only_linear) = found.get_mut(id) {
                *only_linear &= position == 1 && matches!(node.op, Op::Linear(_));
            }
        }
    }
    found.into_iter().filter(|(_, only_linear)| *only_linear).map(|(id, _)| graph.value(id).name.clone()).collect()
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
    fn cuts_follow_residual_additions() {
        let residual = "a = Linear(x, w) -> float[2, 4]\nb = Relu(a) -> float[2, 4]\nc = Linear(b, v) -> float[2, 4]\nd = Add(a, c) -> float[2, 4]\ne = Relu(d) -> float[2, 4]\nf = Linear(e, h) -> float[2, 4]\noutput logits = f\n";
        // `Relu` is the only reader of `d` and may be fused with it.
        assert_eq!(values(residual), ["a", "e", "f"]);
        let graph: Graph = format!("{LAYER}{residual}").parse().unwrap();
        let found = blocks(&graph);
        assert_eq!(found.iter().map(|block| block.nodes.clone()).collect::<Vec<_>>(), [0..1, 1..5, 5..6]);
        assert_eq!(found[1].parameters, BTreeSet::from(["v".to_owned()]));
        assert_eq!(single_block_reason(&graph), None);
    }

    #[test]
    fn nodes_without_parameters_and_parallel_branches_are_not_split() {
        assert_eq!(values("a = Linear(x, w) -> float[2, 4]\nb = Relu(a) -> float[2, 4]\noutput a = a\noutput b = b\n"), ["b"]);
        let branches = "a = Linear(x, w) -> float[2, 4]\nb = Linear(x, v) -> float[2, 4]\nc = Mul(a, b) -> float[2, 4]\noutput c = c\n";
        assert_eq!(values(branches), ["c"]);
        let graph: Graph = format!("{LAYER}{branches}").parse().unwrap();
        assert!(single_block_reason(&graph).unwrap().contains("2 values cross the narrowest cut: `a`, `b`"), "{:?}", single_block_reason(&graph));
        let crossed = "a = Linear(x, w) -> float[2, 4]\nb = Linear(a, v) -> float[2, 4]\nc = Linear(b, h) -> float[2, 4]\nd = Mul(a, b) -> float[2, 4]\ne = Mul(d, c) -> float[2, 4]\noutput e = e\n";
        assert_eq!(values(crossed), ["a", "e"]);
    }
}
