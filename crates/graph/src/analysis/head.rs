//! The layer that computes logits.

use crate::ir::{Graph, Kind, Node, Op, ValueId};

/// The linear layer from which an output `[batch, tokens, classes]` is computed, possibly followed by
/// elementwise ops. Each row of its input can be processed separately.
pub fn head(graph: &Graph, output: ValueId) -> Option<&Node> {
    let rank = |id: ValueId| graph.value(id).ty.shape.len();
    let mut id = output;
    while rank(id) == 3 {
        let node = graph.producer(id)?;
        let (parameters, values): (Vec<ValueId>, Vec<ValueId>) = node.inputs.iter().partition(|id| graph.value(**id).kind == Kind::Param);
        let [input] = values.as_slice() else { return None };
        match node.op {
            Op::Linear(_) => return (rank(*input) == 3 && node.inputs.first() == Some(input)).then_some(node),
            Op::Scale(_) | Op::Tanh(_) | Op::Clip(_) | Op::Mul(_) | Op::Add(_) if parameters.iter().all(|id| rank(*id) < 2) => id = *input,
            _ => return None,
        }
    }
    None
}

/// The [`head`] of a graph of which every output is computed by the head or is the input of the head.
pub fn shared_head(graph: &Graph) -> Option<&Node> {
    let found = graph.outputs().iter().find_map(|(_, output)| head(graph, *output))?;
    let follows = |output: ValueId| found.inputs.first() == Some(&output) || head(graph, output).is_some_and(|other| other.output == found.output);
    graph.outputs().iter().all(|(_, output)| follows(*output)).then_some(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The input of the head of a graph that ends with these ops.
    fn input_of_head(tail: &str) -> Option<String> {
        let text = format!(
            "input input_ids: int[batch, sequence]\nparam t: float[50, 64]\nparam w: float[50, 64]\nparam b: float[50]\nx = Embedding(input_ids, t) -> float[batch, sequence, 64]\n{tail}output logits = logits\n"
        );
        let graph: Graph = text.parse().unwrap();
        let (_, output) = graph.outputs()[0];
        head(&graph, output).map(|node| graph.value(node.inputs[0]).name.clone())
    }

    #[test]
    fn a_head_is_found_before_elementwise_ops() {
        let linear = "y = Linear(x, w) -> float[batch, sequence, 50]\n";
        assert_eq!(input_of_head("logits = Linear(x, w) -> float[batch, sequence, 50]\n").as_deref(), Some("x"));
        assert_eq!(input_of_head(&format!("{linear}logits = Tanh(y) -> float[batch, sequence, 50]\n")).as_deref(), Some("x"));
        assert_eq!(input_of_head(&format!("{linear}logits = Add(y, b) -> float[batch, sequence, 50]\n")).as_deref(), Some("x"));
        assert_eq!(input_of_head(&format!("{linear}logits = Softmax(y) -> float[batch, sequence, 50]\n")), None);
        assert_eq!(input_of_head(&format!("{linear}logits = Add(y, y) -> float[batch, sequence, 50]\n")), None);
        assert_eq!(input_of_head("logits = Embedding(input_ids, t) -> float[batch, sequence, 64]\n"), None);
    }
}
