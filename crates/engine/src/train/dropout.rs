//! Dropout of the residual branches, the embeddings and the attention probabilities of a transformer.

use std::collections::{BTreeMap, BTreeSet};

use super::Training;
use crate::analysis;
use crate::error::{Error, Result};
use crate::exec::Dropout;
use crate::ir::{Graph, Kind, Node, Op, ValueId};

/// Attention and feed-forward network of a layer.
const BRANCHES: usize = 2;

/// The values of a graph to which the requested dropout applies. Fails if they are not recognized.
pub fn dropout(graph: &Graph, training: &Training) -> Result<Option<Dropout>> {
    if training.attention_dropout.is_some() {
        require_attention(graph)?;
    }
    let nodes = if training.dropout.is_some() { hidden_states(graph)? } else { BTreeSet::new() };
    let (rate, attention_rate) = (training.dropout.unwrap_or(0.0), training.attention_dropout.unwrap_or(0.0));
    Ok((rate + attention_rate > 0.0).then_some(Dropout { rate, nodes, attention_rate }))
}

/// Checks that a graph has attention, whose masks can be those of samples: windows of images are heads.
fn require_attention(graph: &Graph) -> Result<()> {
    let wrong = |reason: String| Err(Error::option("attention_dropout", reason));
    let mut attention = graph.nodes().iter().filter(|node| matches!(node.op, Op::Attention(_))).peekable();
    if attention.peek().is_none() {
        return wrong("needs a model with attention: remove it".into());
    }
    let batch = graph.inputs().find_map(|(_, value)| value.ty.shape.first());
    let other = attention.map(|node| graph.value(node.output)).find(|value| value.ty.shape.first() != batch);
    other.map_or(Ok(()), |value| wrong(format!("`{}` is the result of attention whose first axis is not that of the samples: remove it", value.name)))
}

/// Indices of the nodes that compute the embeddings that the first layer reads, and the results of attention
/// and feed-forward network before they are added to the residual stream.
fn hidden_states(graph: &Graph) -> Result<BTreeSet<usize>> {
    let wrong = |reason: String| Error::option("dropout", reason);
    let [stack] = &analysis::stacks(graph)[..] else {
        return Err(wrong("needs a transformer with one stack of layers, and no `attention` loss: remove it".into()));
    };
    let branches = branches(graph);
    let by_name = |name: &str| graph.nodes().iter().position(|node| graph.value(node.output).name == name);
    let mut nodes = BTreeSet::new();
    for layer in &stack.layers {
        let is_own = |index: &&usize| graph.nodes().get(**index).is_some_and(|node| layer.nodes.contains(&graph.value(node.output).name));
        let found: Vec<usize> = branches.iter().filter(is_own).copied().collect();
        if found.len() != BRANCHES {
            let reason = format!(
                "the layer that returns `{}` has {} linear layers whose result is added to its residual stream, but attention and feed-forward network have {BRANCHES}: remove it",
                layer.output,
                found.len()
            );
            return Err(wrong(reason));
        }
        nodes.extend(found);
    }
    let first = stack.layers.first().and_then(|layer| by_name(&layer.input));
    // The backward pass of the node would read its output, with dropout.
    let first = first.filter(|index| graph.nodes().get(*index).is_some_and(|node| !node.op.spec().reads_output()));
    nodes.insert(first.ok_or_else(|| wrong("the embeddings that the first layer reads were not found: remove it".into()))?);
    Ok(nodes)
}

/// Indices of the linear layers whose only reader adds their result to a value that no linear layer computes.
fn branches(graph: &Graph) -> Vec<usize> {
    let is_linear = |id: ValueId| graph.producer(id).is_some_and(|node| matches!(node.op, Op::Linear(_)));
    let mut readers: BTreeMap<ValueId, Vec<&Node>> = BTreeMap::new();
    for node in graph.nodes() {
        for id in node.inputs.iter().collect::<BTreeSet<_>>() {
            readers.entry(*id).or_default().push(node);
        }
    }
    let is_branch = |node: &Node| {
        let Some([reader]) = readers.get(&node.output).map(Vec::as_slice) else { return false };
        let others: Vec<ValueId> = reader.inputs.iter().copied().filter(|id| *id != node.output).collect();
        matches!(node.op, Op::Linear(_))
            && matches!(reader.op, Op::Add(_))
            && matches!(others[..], [other] if graph.value(other).kind != Kind::Param && !is_linear(other))
    };
    graph.nodes().iter().enumerate().filter(|(_, node)| is_branch(node)).map(|(index, _)| index).collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::model::Model;

    fn graph(name: &str) -> Graph {
        Model::open(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/models").join(name)).unwrap().graph().unwrap()
    }

    fn found(name: &str) -> Result<Vec<String>> {
        let graph = graph(name);
        let dropout = dropout(&graph, &Training { dropout: Some(0.1), ..Training::default() })?.unwrap();
        Ok(dropout.nodes.iter().map(|index| graph.value(graph.nodes()[*index].output).name.clone()).collect())
    }

    /// The embeddings, and two values of each layer.
    #[test]
    fn branches_of_layers_are_recognized() {
        for name in ["bert", "roberta", "distilbert", "vit", "llama", "qwen3", "gpt2", "opt"] {
            let layers = analysis::stacks(&graph(name))[0].layers.len();
            let found = found(name).unwrap_or_else(|e| panic!("{name}: {e}"));
            assert_eq!(found.len(), 2 * layers + 1, "{name}: {found:?}");
        }
        for name in ["bert", "llama", "t5", "mixtral", "whisper", "swin"] {
            let found = dropout(&graph(name), &Training { attention_dropout: Some(0.1), ..Training::default() }).unwrap().unwrap();
            assert!(found.nodes.is_empty() && found.attention_rate == 0.1, "{name}: {found:?}");
        }
        let refused = dropout(&graph("resnet-basic"), &Training { attention_dropout: Some(0.1), ..Training::default() }).unwrap_err().to_string();
        assert!(refused.contains("attention_dropout: needs a model with attention"), "{refused}");
        for name in ["t5", "resnet-basic", "mixtral"] {
            assert!(found(name).unwrap_err().to_string().contains("dropout"), "{name}");
        }
    }
}
