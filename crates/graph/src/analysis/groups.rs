//! Groups of coupled channels for structured pruning: heads, neurons, channels, the width of a residual
//! stream.
//!
//! Every op defines how its axes correspond ([`ir::axes`](crate::ir::axes)), and axes are unified across
//! the graph. The result are groups of slices of tensors that must be removed together. Only shapes are
//! read.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::{Deserialize, Serialize};

use super::atoms::{AxisId, UnitLayout};
use super::axes::{Traced, is_param, trace};
use crate::error::Result;
use crate::ir::{Builder, Catalog, Graph, Op, Rewrite, Slicing, rebuild};

/// Kind of the units of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum, schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum GroupUnit {
    /// Attention heads; heads that share keys and values are removed together
    Heads,
    /// Neurons between two linear layers
    Mlp,
    /// Channels of convolutions
    Channels,
    /// The width of a residual stream
    Hidden,
    /// Other units that could be removed, outside of repeated layers
    Other,
}

impl fmt::Display for GroupUnit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            GroupUnit::Heads => "heads",
            GroupUnit::Mlp => "mlp",
            GroupUnit::Channels => "channels",
            GroupUnit::Hidden => "hidden",
            GroupUnit::Other => "other",
        })
    }
}

/// The role of a tensor for the units of its group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// The weight of a layer that computes the units.
    Writes,
    /// The weight of a layer that reads the units.
    Reads,
    /// The weight of a normalization.
    Scales,
    /// Biases, statistics, position embeddings.
    #[serde(rename = "goes")]
    Follows,
}

/// The slices of a tensor for the units of a group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Member {
    /// Name of the tensor.
    pub param: String,
    /// Axis of the tensor.
    pub axis: usize,
    /// Layout of the units on the axis.
    #[serde(rename = "place")]
    pub layout: UnitLayout,
    /// Role of the tensor.
    pub role: Role,
}

/// Units that can be removed, each from all members at once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Group {
    /// The module of the first member.
    pub name: String,
    /// Kind of the units.
    pub unit: GroupUnit,
    /// Number of units.
    pub size: usize,
    /// Members in graph order.
    pub members: Vec<Member>,
    /// Whether an op divides by a statistic over the units, so that removing one affects the others
    /// slightly.
    pub normalised: bool,
    /// The feature output that becomes narrower.
    pub output: Option<String>,
    #[serde(skip)]
    atom: AxisId,
}

/// An axis that cannot be pruned.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct FrozenAxis {
    /// Name of the first tensor with this axis.
    pub param: String,
    /// Axis of the tensor.
    pub axis: usize,
    /// Number of elements.
    pub size: usize,
    /// The reason why it cannot be pruned.
    pub reason: String,
}

/// All groups of a graph.
pub struct Groups {
    /// Groups that can be pruned.
    pub groups: Vec<Group>,
    /// Axes that cannot be pruned.
    pub frozen: Vec<FrozenAxis>,
    traced: Traced,
}

/// Finds the groups of a graph.
pub fn groups(graph: &Graph) -> Result<Groups> {
    let traced = trace(graph)?;
    let roles = Roles::new(graph, &traced);
    let mut found: BTreeMap<AxisId, Group> = BTreeMap::new();
    let mut order = Vec::new();
    let mut frozen: BTreeMap<AxisId, FrozenAxis> = BTreeMap::new();
    for (index, value) in graph.values().iter().enumerate().filter(|(_, value)| is_param(value)) {
        for (axis, id) in traced.values[index].iter().enumerate() {
            let Some(id) = id else { continue };
            traced.atoms.layouts(*id, &mut |atom, layout| {
                let size = traced.atoms.size(atom);
                if size < 2 {
                    return;
                }
                if let Some(reason) = traced.atoms.reason(atom) {
                    frozen.entry(atom).or_insert_with(|| FrozenAxis { param: value.name.clone(), axis, size, reason: reason.to_owned() });
                    return;
                }
                let group = found.entry(atom).or_insert_with(|| {
                    order.push(atom);
                    let name = value.name.rsplit_once('.').map_or(value.name.as_str(), |(module, _)| module).to_owned();
                    roles.group(name, size, atom)
                });
                let role = roles.members.get(&(index, axis)).copied().unwrap_or(Role::Follows);
                group.members.push(Member { param: value.name.clone(), axis, layout, role });
            });
        }
    }
    let mut groups = Vec::with_capacity(order.len());
    for atom in order {
        let Some(group) = found.remove(&atom) else { continue };
        match &group.output {
            // Features of a residual stream can be pruned on request; other features are predictions.
            Some(output) if group.unit != GroupUnit::Hidden && group.unit != GroupUnit::Other => {
                let reason = format!("output `{output}`");
                frozen.entry(atom).or_insert_with(|| FrozenAxis { param: group.name.clone(), axis: 0, size: group.size, reason });
            }
            _ => groups.push(group),
        }
    }
    Ok(Groups { groups, frozen: frozen.into_values().collect(), traced })
}

impl Groups {
    /// Rebuilds the graph over tensors of other sizes; `remaining` returns the number of remaining units
    /// of a group. Fails if the tensors do not have these sizes.
    pub fn rebuild(&self, graph: &Graph, catalog: &dyn Catalog, remaining: &dyn Fn(&Group) -> usize) -> Result<Graph> {
        let size = self.sizes(remaining);
        let positions: BTreeMap<&str, usize> = graph.nodes().iter().enumerate().map(|(index, node)| (graph.value(node.output).name.as_str(), index)).collect();
        rebuild(graph, catalog, &mut |step: Rewrite| {
            let letters = positions.get(step.name).map(|index| &self.traced.letters[*index]);
            let letter = |name: &str| letters.and_then(|l| l.get(name)).map_or(0, |(axis, _)| self.traced.atoms.resized(*axis, &size));
            let op = step.node.op.resized(&letter);
            let builder: &mut Builder = step.builder;
            builder.node(step.name, op, &step.inputs)
        })
    }

    /// The shapes of the graph's tensors for these numbers of remaining units.
    pub fn shapes(&self, graph: &Graph, remaining: &dyn Fn(&Group) -> usize) -> BTreeMap<String, Vec<usize>> {
        let size = self.sizes(remaining);
        let resized = |axis: &Option<AxisId>| axis.map_or(0, |axis| self.traced.atoms.resized(axis, &size));
        let values = graph.values().iter().zip(&self.traced.values).filter(|(value, _)| is_param(value));
        values.map(|(value, axes)| (value.name.clone(), axes.iter().map(resized).collect())).collect()
    }

    /// The size of each atom for these numbers of remaining units.
    fn sizes(&self, remaining: &dyn Fn(&Group) -> usize) -> impl Fn(AxisId) -> usize {
        let sizes: BTreeMap<AxisId, usize> = self.groups.iter().map(|group| (group.atom, remaining(group))).collect();
        move |atom| sizes.get(&atom).copied().unwrap_or_else(|| self.traced.atoms.size(atom))
    }

    /// The group with this name.
    pub fn find(&self, name: &str) -> Option<&Group> {
        self.groups.iter().find(|group| group.name == name)
    }
}

/// Roles of atoms, derived from the ops that read and write them.
struct Roles {
    heads: BTreeSet<AxisId>,
    shared: BTreeSet<AxisId>,
    normalised: BTreeSet<AxisId>,
    stream: BTreeSet<AxisId>,
    channels: BTreeSet<AxisId>,
    /// Neurons of layers that write to the residual stream, or of all linear layers without attention.
    inner: BTreeSet<AxisId>,
    features: BTreeMap<AxisId, String>,
    attends: bool,
    /// Role by value and axis.
    members: BTreeMap<(usize, usize), Role>,
}

impl Roles {
    fn new(graph: &Graph, traced: &Traced) -> Roles {
        let atoms_of = |axis: AxisId| {
            let mut found = Vec::new();
            traced.atoms.layouts(axis, &mut |atom, _| found.push(atom));
            found
        };
        let mut roles = Roles {
            heads: BTreeSet::new(),
            shared: BTreeSet::new(),
            normalised: BTreeSet::new(),
            stream: BTreeSet::new(),
            channels: BTreeSet::new(),
            inner: BTreeSet::new(),
            features: BTreeMap::new(),
            attends: graph.nodes().iter().any(|node| matches!(node.op, Op::Attention(_))),
            members: BTreeMap::new(),
        };
        let mut added: BTreeSet<AxisId> = BTreeSet::new();
        for (node, letters) in graph.nodes().iter().zip(&traced.letters) {
            let letter = |name: &str| letters.get(name).map(|(axis, _)| atoms_of(*axis)).unwrap_or_default();
            match &node.op {
                Op::Attention(_) => {
                    roles.heads.extend(letter("g"));
                    roles.shared.extend(letter("r"));
                }
                Op::Conv(_) | Op::ConvTranspose(_) => ["k", "o", "g", "c"].iter().for_each(|name| roles.channels.extend(letter(name))),
                Op::Embedding(_) => roles.stream.extend(letter("c")),
                Op::Add(_) => added.extend(letter("c")),
                _ => {}
            }
            let over = letters.values().filter(|(_, slicing)| *slicing == Slicing::Normalised).flat_map(|(axis, _)| atoms_of(*axis));
            roles.normalised.extend(over);
            let Some(weight) = node.inputs.get(1).map(|id| id.index()) else { continue };
            match &node.op {
                Op::Linear(op) => {
                    roles.members.extend([((weight, usize::from(op.input_major)), Role::Writes), ((weight, usize::from(!op.input_major)), Role::Reads)])
                }
                Op::Conv(_) => roles.members.extend([((weight, 0), Role::Writes), ((weight, 1), Role::Reads)]),
                Op::ConvTranspose(_) => roles.members.extend([((weight, 0), Role::Reads), ((weight, 1), Role::Writes)]),
                Op::Embedding(_) => drop(roles.members.entry((weight, 1)).or_insert(Role::Writes)),
                Op::BatchNorm(_) | Op::LayerNorm(_) | Op::RmsNorm(_) => drop(roles.members.insert((weight, 0), Role::Scales)),
                _ => {}
            }
        }
        // Excludes latent widths that attention projects to and normalizes before it computes keys.
        let mut read: BTreeMap<AxisId, bool> = BTreeMap::new();
        let answers = graph.outputs().iter().flat_map(|(_, id)| traced.values[id.index()].iter().flatten());
        let answers: BTreeSet<AxisId> = answers.flat_map(|axis| atoms_of(*axis)).collect();
        for (node, letters) in graph.nodes().iter().zip(&traced.letters).filter(|_| roles.attends) {
            if let (Op::Linear(_), Some((input, _)), Some((output, _))) = (&node.op, letters.get("k"), letters.get("o")) {
                let continues = |atom: &AxisId| added.contains(atom) || roles.normalised.contains(atom) || answers.contains(atom);
                let continues = atoms_of(*output).iter().any(continues);
                atoms_of(*input).into_iter().for_each(|atom| *read.entry(atom).or_default() |= continues);
            }
        }
        let of_stream = |atom: &AxisId| added.contains(atom) || read.get(atom).copied().unwrap_or(true);
        roles.stream.extend(roles.normalised.iter().copied().filter(of_stream));
        for (node, letters) in graph.nodes().iter().zip(&traced.letters) {
            if let (Op::Linear(_), Some((input, _)), Some((output, _))) = (&node.op, letters.get("k"), letters.get("o")) {
                let writes = atoms_of(*output);
                if !roles.attends || writes.iter().any(|atom| roles.stream.contains(atom)) {
                    roles.inner.extend(atoms_of(*input));
                }
            }
        }
        roles.features = traced.features.iter().flat_map(|(name, axis)| atoms_of(*axis).into_iter().map(|atom| (atom, name.clone()))).collect();
        roles
    }

    fn group(&self, name: String, size: usize, atom: AxisId) -> Group {
        let unit = if self.heads.contains(&atom) {
            GroupUnit::Heads
        } else if self.shared.contains(&atom) {
            GroupUnit::Other
        } else if self.stream.contains(&atom) {
            GroupUnit::Hidden
        } else if self.channels.contains(&atom) {
            GroupUnit::Channels
        } else if self.inner.contains(&atom) {
            GroupUnit::Mlp
        } else {
            GroupUnit::Other
        };
        Group { name, unit, size, members: Vec::new(), normalised: self.normalised.contains(&atom), output: self.features.get(&atom).cloned(), atom }
    }
}
