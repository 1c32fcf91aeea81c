//! The branches of layers: attention and feed-forward network, each with its residual connection.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use super::NAME;
use crate::analysis::{Group, GroupUnit, Groups, Layer, Layers, Member, Role};
use crate::error::{Error, Result};
use crate::ir::{Graph, GraphFile, Node, Op, ValueId};
use crate::model::Model;
use crate::pass::prune_structured::cut::set_graph;

/// Kind of a branch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Part {
    Attention,
    Network,
}

impl Part {
    /// The kind of its units.
    pub fn unit(self) -> GroupUnit {
        match self {
            Part::Attention => GroupUnit::Heads,
            Part::Network => GroupUnit::Mlp,
        }
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Part::Attention => "attention",
            Part::Network => "network",
        })
    }
}

/// Units of a branch that can be removed.
#[derive(Debug, Clone)]
pub(super) struct Units {
    /// Index of their group.
    pub group: usize,
    /// Their number.
    pub size: usize,
    /// Index of the linear layer that reads them.
    pub reader: usize,
    /// Slices of its weight.
    pub member: Member,
}

/// A branch: a part of a layer that adds its result to the residual stream.
#[derive(Debug, Clone)]
pub(super) struct Branch {
    /// Index of the layer.
    pub layer: usize,
    pub part: Part,
    /// The hidden state that it reads.
    pub input: String,
    /// The sum of the hidden state and its result.
    pub output: String,
    /// Tensors that only this branch reads.
    pub tensors: BTreeSet<String>,
    /// `None` if its units cannot be removed, as for experts.
    pub units: Option<Units>,
}

/// The branches of all layers, in the order of the graph.
///
/// # Errors
/// If a layer is not the sum of its input, attention and a feed-forward network.
pub(super) fn branches(graph: &Graph, found: &Layers, groups: &Groups) -> Result<Vec<Branch>> {
    let mut branches = Vec::with_capacity(2 * found.layers.len());
    for (index, layer) in found.layers.iter().enumerate() {
        let sums = residual_sums(graph, layer);
        let parts: Option<Vec<Part>> = sums.iter().map(|sum| part(graph, layer, sum)).collect();
        let (Some([first, second]), [_, (_, last)]) = (parts.as_deref(), &sums[..]) else { return Err(unsupported(index)) };
        if first == second || *last != layer.output {
            return Err(unsupported(index));
        }
        for ((input, output), part) in sums.iter().zip([*first, *second]) {
            let through = BTreeMap::from([(output.as_str(), input.as_str())]);
            let tensors = Unused::new(graph, &through).tensors;
            let units = units(graph, groups, part, &tensors);
            branches.push(Branch { layer: index, part, input: input.clone(), output: output.clone(), tensors, units });
        }
    }
    Ok(branches)
}

fn unsupported(layer: usize) -> Error {
    let reason = format!("layer {layer} is not the sum of its input, attention and a feed-forward network");
    Error::Unsupported { what: format!("{NAME}: a model in which {reason},"), hint: "use `prune-structured`, which removes parts of other layers too".into() }
}

/// The residual additions of a layer: the names of the hidden state and of the sum.
fn residual_sums(graph: &Graph, layer: &Layer) -> Vec<(String, String)> {
    let mut sums: Vec<(String, String)> = Vec::new();
    for node in graph.nodes().iter().filter(|node| matches!(node.op, Op::Add(_))) {
        let output = &graph.value(node.output).name;
        let stream = sums.last().map_or(&layer.input, |(_, sum)| sum);
        if layer.nodes.contains(output) && node.inputs.iter().any(|id| graph.value(*id).name == *stream) {
            sums.push((stream.clone(), output.clone()));
        }
    }
    sums
}

/// Kind of the nodes between a hidden state and a sum; `None` if they are neither attention nor a network
/// that processes each token separately.
fn part(graph: &Graph, layer: &Layer, (input, output): &(String, String)) -> Option<Part> {
    let mut seen = BTreeSet::new();
    let mut queue: Vec<ValueId> = graph.ids().filter(|id| graph.value(*id).name == *output).collect();
    let (mut attends, mut mixes) = (false, false);
    while let Some(id) = queue.pop() {
        let name = &graph.value(id).name;
        if name == input || !layer.nodes.contains(name) || !seen.insert(id) {
            continue;
        }
        let Some(node) = graph.producer(id) else { continue };
        attends |= matches!(node.op, Op::Attention(_));
        mixes |= matches!(node.op, Op::GatedDelta(_) | Op::CausalConv(_) | Op::Conv(_));
        queue.extend(&node.inputs);
    }
    match (attends, mixes) {
        (true, false) => Some(Part::Attention),
        (false, false) => Some(Part::Network),
        (_, true) => None,
    }
}

/// The units of a branch, if all of its units are in one group and one linear layer reads them.
fn units(graph: &Graph, groups: &Groups, part: Part, tensors: &BTreeSet<String>) -> Option<Units> {
    // A normalization over the units would change with their number.
    let belongs = |group: &Group| group.unit == part.unit() && !group.normalised && group.members.iter().all(|member| tensors.contains(&member.param));
    let mut own = groups.groups.iter().enumerate().filter(|(_, group)| belongs(group));
    let (Some((index, group)), None) = (own.next(), own.next()) else { return None };
    let mut members = group.members.iter().filter(|member| member.role == Role::Reads);
    let (Some(member), None) = (members.next(), members.next()) else { return None };
    let reads = |node: &Node| {
        let Op::Linear(op) = &node.op else { return false };
        node.inputs.get(1).is_some_and(|id| graph.value(*id).name == member.param) && member.axis == usize::from(!op.input_major)
    };
    let reader = graph.nodes().iter().position(reads)?;
    Some(Units { group: index, size: group.size, reader, member: member.clone() })
}

/// Nodes and tensors that are not needed if values are replaced by others.
struct Unused {
    nodes: BTreeSet<String>,
    tensors: BTreeSet<String>,
}

impl Unused {
    /// `through` has the replacement of each replaced value, which may itself be replaced.
    fn new(graph: &Graph, through: &BTreeMap<&str, &str>) -> Unused {
        let ids: BTreeMap<&str, ValueId> = graph.ids().map(|id| (graph.value(id).name.as_str(), id)).collect();
        let resolve = |id: ValueId| ids.get(resolved(&graph.value(id).name, through)).copied().unwrap_or(id);
        let mut needed = BTreeSet::new();
        let mut queue: Vec<ValueId> = graph.outputs().iter().map(|(_, id)| resolve(*id)).collect();
        while let Some(id) = queue.pop() {
            if needed.insert(id)
                && let Some(node) = graph.producer(id)
            {
                queue.extend(node.inputs.iter().map(|id| resolve(*id)));
            }
        }
        let name = |id: ValueId| graph.value(id).name.clone();
        let nodes = graph.nodes().iter().map(|node| node.output).filter(|id| !needed.contains(id)).map(name).collect();
        let tensors = graph.params().filter(|(id, _)| !needed.contains(id)).map(|(_, value)| value.name.clone()).collect();
        Unused { nodes, tensors }
    }
}

/// The value that replaces a value in the end.
fn resolved<'n>(mut name: &'n str, through: &BTreeMap<&str, &'n str>) -> &'n str {
    while let Some(before) = through.get(name) {
        name = before;
    }
    name
}

/// Removes branches: the sums become the hidden states that the branches read. Other layers keep their
/// indices. Returns notes on the description of the model.
pub(super) fn remove(model: &mut Model, graph: &Graph, branches: &[&Branch]) -> Result<Vec<String>> {
    let through: BTreeMap<&str, &str> = branches.iter().map(|branch| (branch.output.as_str(), branch.input.as_str())).collect();
    let Unused { nodes, tensors } = Unused::new(graph, &through);
    model.weights.by_name.retain(|name, _| !tensors.contains(name));
    let file = GraphFile::from(graph).edited(&|name| nodes.contains(name), &|name| resolved(name, &through).to_owned());
    let smaller = file.build(&model.weights)?;
    set_graph(model, smaller, Vec::new())
}
