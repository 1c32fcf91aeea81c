//! Graphs that process several texts in one row.

use super::SequenceAxes;
use crate::error::{Error, Result};
use crate::ir::ops::{Attention, RotaryScaling};
use crate::ir::{Graph, Op, subgraph};

/// The input that numbers the texts of a row.
const MASK: &str = "attention_mask";

/// Restricts attention to the segments that the attention mask numbers, so that a row of several texts has
/// the values of separate rows. Fails if a node combines or counts tokens in another way than causal
/// attention with that mask and rotary position embeddings, which depend only on distances of tokens.
pub fn with_segments(graph: &Graph) -> Result<Graph> {
    let axes = SequenceAxes::from_graph(graph)?;
    let mask = graph.inputs().find(|(_, value)| value.name == MASK).map(|(id, _)| id);
    for (_, node) in graph.nodes().iter().enumerate().filter(|(at, _)| axes.needs_state(*at)) {
        let is_separable = match &node.op {
            Op::Attention(op) => op.causal && mask.is_some() && node.inputs.get(3).copied() == mask,
            Op::Rotary(op) => !matches!(op.scaling, RotaryScaling::Dynamic { .. } | RotaryScaling::LongRope { .. }),
            _ => false,
        };
        if !is_separable {
            let reason = format!("{} depends on the position in the row, or on other texts in it", node.op.name());
            return Err(Error::graph(format!("graph node `{}`", graph.value(node.output).name), reason));
        }
    }
    let outputs: Vec<String> = graph.outputs().iter().map(|(_, id)| graph.value(*id).name.clone()).collect();
    subgraph(graph, &outputs, &|op| match op {
        Op::Attention(op) => Attention { segments: true, ..*op }.into(),
        other => other.clone(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: &str = "input input_ids: int[batch, sequence]\ninput attention_mask: int[batch, sequence]\nparam t: float[9, 8]\nparam q: float[9, 8]\nx = Embedding(input_ids, t) -> float[batch, sequence, 8]\n\
        h = SplitHeads{\"head_dim\":4}(x) -> float[batch, 2, sequence, 4]\n";

    fn result(nodes: &str) -> Result<Graph> {
        let graph: Graph = format!("{START}{nodes}").parse().unwrap();
        with_segments(&graph)
    }

    #[test]
    fn attention_with_the_mask_is_restricted_to_segments() {
        let attention = |attributes: &str, inputs: &str| {
            format!("a = Attention{{{attributes}}}({inputs}) -> float[batch, 2, sequence, 4]\ny = MergeHeads(a) -> float[batch, sequence, 8]\noutput y = y\n")
        };
        let rotary = "r = Rotary(h) -> float[batch, 2, sequence, 4]\n";
        let graph = result(&format!("{rotary}{}", attention("\"causal\":true", "r, r, h, attention_mask"))).unwrap();
        let is_segmented = |node: &crate::ir::Node| matches!(&node.op, Op::Attention(op) if op.segments && op.causal);
        assert_eq!(graph.nodes().iter().filter(|node| is_segmented(node)).count(), 1);
        let refused = |nodes: String| result(&nodes).unwrap_err().to_string();
        assert!(refused(attention("\"causal\":true", "h, h, h")).contains("graph node `a`: Attention depends on"));
        assert!(refused(attention("", "h, h, h, attention_mask")).contains("graph node `a`"));
        let dynamic = "r = Rotary{\"scaling\":{\"dynamic\":{\"factor\":2.0,\"max_position\":8}}}(h) -> float[batch, 2, sequence, 4]\n";
        let found = refused(format!("{dynamic}{}", attention("\"causal\":true", "r, r, h, attention_mask")));
        assert!(found.contains("graph node `r`: Rotary depends on the position in the row"), "{found}");
        let convolution = "param f: float[8, 1, 3]\nc = CausalConv(x, f, attention_mask) -> float[batch, sequence, 8]\noutput c = c\n";
        assert!(refused(convolution.to_owned()).contains("graph node `c`: CausalConv depends on the position in the row, or on other texts"));
        let learned = "p = Positions(input_ids) -> int[batch, sequence]\ne = Embedding(p, q) -> float[batch, sequence, 8]\noutput e = e\n";
        assert!(refused(learned.to_owned()).contains("graph node `p`: Positions depends on the position in the row"));
    }
}
