//! Repeated layers: numbered nodes between two values of the same type, with attention inside.

use std::collections::{BTreeMap, BTreeSet};

use crate::ir::{Graph, Kind, Node, Op, ValueId};

/// One of several layers of the same form.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layer {
    /// The hidden state that it reads.
    pub input: String,
    /// The hidden state that it returns.
    pub output: String,
    /// Names of its nodes.
    pub nodes: BTreeSet<String>,
}

/// The layers of an encoder or a decoder, and the prefixes of their indices in names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layers {
    /// Prefix in the names of nodes: `encoder.layer.`.
    pub nodes: String,
    /// Prefix in the names of tensors: `bert.encoder.layer.`.
    pub tensors: String,
    /// The layers in order.
    pub layers: Vec<Layer>,
}

impl Layers {
    /// The hidden state that the layer with this index reads; the number of layers selects the output of
    /// the last one.
    pub fn state(&self, index: usize) -> Option<&String> {
        let last = self.layers.last().filter(|_| index == self.layers.len()).map(|layer| &layer.output);
        self.layers.get(index).map(|layer| &layer.input).or(last)
    }
}

/// The index after a prefix, if it is a complete component of the name.
pub fn layer_index(name: &str, prefix: &str) -> Option<usize> {
    let digits = name.strip_prefix(prefix)?.split('.').next()?;
    digits.parse().ok().filter(|number: &usize| number.to_string() == digits)
}

/// Finds the layers of a transformer; those of the encoder for encoder-decoder models.
pub fn layers(graph: &Graph) -> Option<Layers> {
    layers_of(graph, prefixes(graph).first()?, false)
}

/// Finds the layers of a transformer, and also those of the decoder for encoder-decoder models, which
/// read the encoder's output in cross-attention.
pub fn stacks(graph: &Graph) -> Vec<Layers> {
    let prefixes = prefixes(graph);
    prefixes.iter().enumerate().filter_map(|(at, prefix)| layers_of(graph, prefix, at > 0)).collect()
}

/// Prefixes of the indices of layers with attention, except those of a vision tower for a language model.
fn prefixes(graph: &Graph) -> Vec<&str> {
    let (mut found, of_images) = (Vec::new(), graph.of_images());
    for node in graph.nodes().iter().filter(|node| matches!(node.op, Op::Attention(_)) && !of_images[node.output.index()]) {
        if let Some(prefix) = index_prefix(&graph.value(node.output).name).filter(|prefix| !found.contains(prefix)) {
            found.push(prefix);
        }
    }
    found
}

/// The layers with this prefix; `cross_attends` selects layers that read one more value than their hidden
/// state.
fn layers_of(graph: &Graph, prefix: &str, cross_attends: bool) -> Option<Layers> {
    let name = |id: ValueId| graph.value(id).name.as_str();
    let mut nodes: BTreeMap<usize, Vec<&Node>> = BTreeMap::new();
    for node in graph.nodes() {
        if let Some(number) = layer_index(name(node.output), prefix) {
            nodes.entry(number).or_default().push(node);
        }
    }
    let mut params = nodes.values().flatten().flat_map(|node| &node.inputs).filter(|id| graph.value(**id).kind == Kind::Param);
    // Tensors that all layers share have no index.
    let tensors = params.find_map(|id| index_prefix(name(*id)))?.to_owned();
    let layers: Option<Vec<Layer>> =
        nodes.into_iter().enumerate().map(|(at, (number, nodes))| layer(graph, &nodes, cross_attends).filter(|_| at == number)).collect();
    layers.map(|layers| Layers { nodes: prefix.to_owned(), tensors, layers })
}

/// A name up to its first numeric component.
fn index_prefix(name: &str) -> Option<&str> {
    let mut at = 0;
    for part in name.split('.') {
        if !part.is_empty() && part.chars().all(|c| c.is_ascii_digit()) {
            return Some(&name[..at]);
        }
        at += part.len() + 1;
    }
    None
}

/// Removes values that quantizers or factors of channels compute from another value of the set.
fn without_derived(graph: &Graph, ids: BTreeSet<ValueId>) -> BTreeSet<ValueId> {
    let source = |id: ValueId| match graph.producer(id)? {
        Node { op: Op::FakeQuantize(_) | Op::LearnedFakeQuantize(_), inputs, .. } => inputs.first().copied(),
        Node { op: Op::Mul(_), inputs, .. } => match inputs.as_slice() {
            [value, factors] if graph.value(*factors).kind == Kind::Param => Some(*value),
            _ => None,
        },
        _ => None,
    };
    let is_derived = |id: &ValueId| std::iter::successors(source(*id), |id| source(*id)).any(|id| ids.contains(&id));
    ids.iter().copied().filter(|id| !is_derived(id)).collect()
}

fn layer(graph: &Graph, nodes: &[&Node], cross_attends: bool) -> Option<Layer> {
    let own: BTreeSet<ValueId> = nodes.iter().map(|node| node.output).collect();
    // Features of images are not hidden states.
    let read = nodes.iter().flat_map(|node| if matches!(node.op, Op::InsertImages(_)) { &node.inputs[..1] } else { &node.inputs });
    let read = read.filter(|id| !own.contains(id) && matches!(graph.value(**id).kind, Kind::Node(_)));
    let inputs = without_derived(graph, read.copied().collect());
    let outside = graph.nodes().iter().filter(|node| !own.contains(&node.output)).flat_map(|node| &node.inputs);
    let outputs = outside.chain(graph.outputs().iter().map(|(_, id)| id)).filter(|id| own.contains(id)).copied().collect();
    let outputs = without_derived(graph, outputs);
    let [output] = outputs.into_iter().collect::<Vec<_>>()[..] else { return None };
    let (through, others): (Vec<ValueId>, Vec<ValueId>) = inputs.into_iter().partition(|id| graph.value(*id).ty == graph.value(output).ty);
    let name = |id: ValueId| graph.value(id).name.clone();
    match (through.as_slice(), others.len()) {
        ([input], count) if count == usize::from(cross_attends) => {
            Some(Layer { input: name(*input), output: name(output), nodes: own.into_iter().map(name).collect() })
        }
        _ => None,
    }
}
