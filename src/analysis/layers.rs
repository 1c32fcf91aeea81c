//! Layers that repeat: numbered nodes between two values of one type, with attention inside.

use std::collections::{BTreeMap, BTreeSet};

use crate::ir::{Graph, Kind, Node, Op, ValueId};

/// One of several layers that have the same form.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layer {
    /// The value that goes through it.
    pub input: String,
    /// The value that it gives.
    pub output: String,
    /// Its nodes.
    pub nodes: BTreeSet<String>,
}

/// Layers by number, and what stands before the number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layers {
    /// In the names of nodes: `encoder.layer.`.
    pub nodes: String,
    /// In the names of tensors: `bert.encoder.layer.`.
    pub tensors: String,
    /// In order.
    pub layers: Vec<Layer>,
}

/// The number behind a prefix, where it is a component of its own.
pub fn number(name: &str, prefix: &str) -> Option<usize> {
    let digits = name.strip_prefix(prefix)?.split('.').next()?;
    digits.parse().ok().filter(|number: &usize| number.to_string() == digits)
}

/// Finds the layers of a transformer; with a decoder behind an encoder, those of the encoder.
pub fn layers(graph: &Graph) -> Option<Layers> {
    layers_of(graph, prefixes(graph).first()?, false)
}

/// The same, and behind them those of a decoder, whose layers all look at what the encoder says.
pub fn stacks(graph: &Graph) -> Vec<Layers> {
    let prefixes = prefixes(graph);
    prefixes.iter().enumerate().filter_map(|(at, prefix)| layers_of(graph, prefix, at > 0)).collect()
}

/// What stands before the numbers of layers with attention.
fn prefixes(graph: &Graph) -> Vec<&str> {
    let mut found = Vec::new();
    for node in graph.nodes().iter().filter(|node| matches!(node.op, Op::Attention(_))) {
        if let Some(prefix) = before_number(&graph.value(node.output).name).filter(|prefix| !found.contains(prefix)) {
            found.push(prefix);
        }
    }
    found
}

/// Layers with this before their numbers, which look at something beside what goes through them, or do not.
fn layers_of(graph: &Graph, prefix: &str, looks: bool) -> Option<Layers> {
    let name = |id: ValueId| graph.value(id).name.as_str();
    let mut nodes: BTreeMap<usize, Vec<&Node>> = BTreeMap::new();
    for node in graph.nodes() {
        if let Some(number) = number(name(node.output), prefix) {
            nodes.entry(number).or_default().push(node);
        }
    }
    let mut params = nodes.values().flatten().flat_map(|node| &node.inputs).filter(|id| graph.value(**id).kind == Kind::Param);
    // What all layers read has no number.
    let tensors = params.find_map(|id| before_number(name(*id)))?.to_owned();
    let layers: Option<Vec<Layer>> = nodes.into_iter().enumerate().map(|(at, (number, nodes))| layer(graph, &nodes, looks).filter(|_| at == number)).collect();
    layers.map(|layers| Layers { nodes: prefix.to_owned(), tensors, layers })
}

/// A name up to its first component that is a number.
fn before_number(name: &str) -> Option<&str> {
    let mut at = 0;
    for part in name.split('.') {
        if !part.is_empty() && part.chars().all(|c| c.is_ascii_digit()) {
            return Some(&name[..at]);
        }
        at += part.len() + 1;
    }
    None
}

fn layer(graph: &Graph, nodes: &[&Node], looks: bool) -> Option<Layer> {
    let own: BTreeSet<ValueId> = nodes.iter().map(|node| node.output).collect();
    let read = nodes.iter().flat_map(|node| &node.inputs).filter(|id| !own.contains(id) && matches!(graph.value(**id).kind, Kind::Node(_)));
    let inputs: BTreeSet<ValueId> = read.copied().collect();
    let outside = graph.nodes().iter().filter(|node| !own.contains(&node.output)).flat_map(|node| &node.inputs);
    let outputs: BTreeSet<ValueId> = outside.chain(graph.outputs().iter().map(|(_, id)| id)).filter(|id| own.contains(id)).copied().collect();
    let [output] = outputs.into_iter().collect::<Vec<_>>()[..] else { return None };
    let (through, others): (Vec<ValueId>, Vec<ValueId>) = inputs.into_iter().partition(|id| graph.value(*id).ty == graph.value(output).ty);
    let name = |id: ValueId| graph.value(id).name.clone();
    match (through.as_slice(), others.len()) {
        ([input], count) if count == usize::from(looks) => {
            Some(Layer { input: name(*input), output: name(output), nodes: own.into_iter().map(name).collect() })
        }
        _ => None,
    }
}
