//! Attention scores that `Where` replaces by a minimum, as sums with a bias, which attention patterns match.
//!
//! `Where(mask, scores, minimum)` and `scores + Where(mask, 0, minimum)` are equal for finite scores if the
//! minimum is infinite, or so low that adding a score does not change it. Queries all of whose keys are
//! masked have equal scores in both forms. Other minimums, such as -10,000, remain.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::{BTreeMap, BTreeSet};

use super::check::{self, is_own};
use super::proto::{DataType, GraphProto, NodeProto, TensorProto};
use super::{elements, fresh};

/// The largest minimum that scores of up to 10²² do not change in 32 bits.
const LARGEST: f32 = -1e30;
/// Operators that compute scores.
const SCORES: [&str; 3] = ["MatMul", "Mul", "Div"];

/// A replacement of masked scores.
struct Masked {
    /// Positions of the `Where`, and of a sum with another bias that follows it.
    place: usize,
    sum: Option<usize>,
    /// Inputs of the `Where`.
    mask: String,
    scores: String,
    minimum: String,
    /// Whether scores are kept where the mask is true.
    is_kept: bool,
}

/// Replaces masked scores in the nodes of a graph, and returns the constants that new nodes read. `weight`
/// is the value of a weight with one element.
pub(super) fn with_biases(graph: &GraphProto, nodes: &mut Vec<NodeProto>, weight: impl Fn(&str) -> Option<f32>) -> Vec<TensorProto> {
    let found = find(graph, nodes, weight);
    if found.is_empty() {
        return Vec::new();
    }
    let mut taken = BTreeSet::new();
    check::names(graph, &mut taken);
    taken.extend(nodes.iter().flat_map(|node| node.output.iter().chain(&node.name)).cloned());
    let zero = fresh(&mut taken, "masked_scores/zero".to_owned());
    let mut biases: BTreeMap<[String; 3], String> = BTreeMap::new();
    for Masked { place, sum, mask, scores, minimum, is_kept } in found {
        let inputs = if is_kept { [mask, zero.clone(), minimum] } else { [mask, minimum, zero.clone()] };
        let bias = biases.entry(inputs).or_insert_with_key(|inputs| {
            let name = fresh(&mut taken, "masked_scores/bias".to_owned());
            let operator = Some("Where".to_owned());
            nodes.push(NodeProto { op_type: operator, input: inputs.to_vec(), output: vec![name.clone()], ..NodeProto::default() });
            name
        });
        let Some(output) = nodes.get(place).and_then(|node| node.output.first()).cloned() else { continue };
        let other = sum.and_then(|sum| nodes.get(sum)?.input.iter().find(|name| **name != output).cloned());
        // The sum of both biases takes the name of the `Where`.
        let (own, of_sum) = match other {
            Some(other) => ([bias.clone(), other], Some([scores, output])),
            None => ([scores, bias.clone()], None),
        };
        nodes.get_mut(place).into_iter().for_each(|node| become_sum(node, own.clone()));
        if let (Some(node), Some(inputs)) = (sum.and_then(|sum| nodes.get_mut(sum)), of_sum) {
            become_sum(node, inputs);
        }
    }
    let value = Some(0f32.to_le_bytes().to_vec());
    vec![TensorProto { name: Some(zero), data_type: Some(DataType::Float as i32), raw_data: value, ..TensorProto::default() }]
}

fn find(graph: &GraphProto, nodes: &[NodeProto], weight: impl Fn(&str) -> Option<f32>) -> Vec<Masked> {
    let mut readers: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (place, node) in nodes.iter().enumerate() {
        check::reads(node).into_iter().for_each(|name| readers.entry(name).or_default().push(place));
    }
    let outputs: BTreeSet<&str> = graph.output.iter().map(|output| output.name()).collect();
    let producers: BTreeMap<&str, &NodeProto> = nodes.iter().flat_map(|node| node.output.iter().map(move |name| (name.as_str(), node))).collect();
    let is = |node: &NodeProto, operators: &[&str]| is_own(node.domain()) && operators.contains(&node.op_type());
    // The only node that reads a value.
    let only = |name: &str| match readers.get(name).map(Vec::as_slice) {
        Some([place]) if !outputs.contains(name) => nodes.get(*place).map(|node| (*place, node)),
        _ => None,
    };
    let is_minimum = |name: &str| {
        let constant = || {
            let node = producers.get(name).filter(|node| is(node, &["Constant"]))?;
            let tensor = node.attribute.iter().find_map(|attribute| attribute.t.as_ref())?;
            elements::small_floats(tensor).filter(|values| values.len() == 1)?.first().copied()
        };
        weight(name).or_else(constant).is_some_and(|number| number <= LARGEST)
    };
    let masked = |(place, node): (usize, &NodeProto)| {
        let ([mask, kept, other], [output]) = (node.input.as_slice(), node.output.as_slice()) else { return None };
        let (scores, minimum, is_kept) = match [kept, other].map(|name| is_minimum(name)) {
            [false, true] => (kept, other, true),
            [true, false] => (other, kept, false),
            _ => return None,
        };
        producers.get(scores.as_str()).filter(|producer| is(producer, &SCORES))?;
        only(scores)?;
        let (reader, following) = only(output)?;
        let sum = Some(reader).filter(|_| is(following, &["Add"]));
        let softmax = if sum.is_some() { only(following.output.first()?)?.1 } else { following };
        let [mask, scores, minimum] = [mask, scores, minimum].map(String::clone);
        is(softmax, &["Softmax"]).then_some(Masked { place, sum, mask, scores, minimum, is_kept })
    };
    nodes.iter().enumerate().filter(|(_, node)| is(node, &["Where"])).filter_map(masked).collect()
}

fn become_sum(node: &mut NodeProto, input: [String; 2]) {
    (node.op_type, node.input) = (Some("Add".to_owned()), input.to_vec());
    node.attribute.clear();
}
