//! What can be taken out of a model together: heads, neurons, channels, the width of a residual stream.
//!
//! Every op says how its axes correspond ([`ir::axes`](crate::ir::axes)); axes that are the same anywhere are the
//! same everywhere. What is left are groups of slices of tensors that must go together. Only shapes are looked at.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::{Deserialize, Serialize};

use super::atoms::{AxisId, Place};
use super::axes::{Traced, is_param, trace};
use crate::error::Result;
use crate::ir::{Builder, Catalog, Graph, Hold, Op, Rewrite, rebuild};

/// What the units of a group are.
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
    /// Anything else that could be taken out, but is no part of a layer that repeats
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

/// What a tensor does for units that it carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// A layer's weight that computes them.
    Writes,
    /// A layer's weight that sums over them.
    Reads,
    /// The factor of a normalisation.
    Scales,
    /// Biases, statistics, embeddings of positions.
    Goes,
}

/// A slice of a tensor for each unit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Member {
    /// Name of the tensor.
    pub param: String,
    /// Which of its axes.
    pub axis: usize,
    /// Where the units lie on it.
    pub place: Place,
    /// What it does for the units.
    pub role: Role,
}

/// Units that can be taken out, each from all members at once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Group {
    /// The first module that carries it.
    pub name: String,
    /// What the units are.
    pub unit: GroupUnit,
    /// How many.
    pub size: usize,
    /// In the order of the graph.
    pub members: Vec<Member>,
    /// Whether some op divides by a statistic over the units: taking one out changes the others a little.
    pub normalised: bool,
    /// An output of features that becomes narrower.
    pub output: Option<String>,
    #[serde(skip)]
    atom: AxisId,
}

/// An axis that nothing can be taken out of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct FrozenAxis {
    /// The first tensor that carries it.
    pub param: String,
    /// Which of its axes.
    pub axis: usize,
    /// How many elements.
    pub size: usize,
    /// What holds it.
    pub reason: String,
}

/// All groups of a graph.
pub struct Groups {
    /// What can be taken out.
    pub groups: Vec<Group>,
    /// What cannot.
    pub held: Vec<FrozenAxis>,
    traced: Traced,
}

/// Finds the groups.
///
/// # Errors
/// The axes of an op are not well formed.
pub fn groups(graph: &Graph) -> Result<Groups> {
    let traced = trace(graph)?;
    let roles = Roles::of(graph, &traced);
    let mut found: BTreeMap<AxisId, Group> = BTreeMap::new();
    let mut order = Vec::new();
    let mut held: BTreeMap<AxisId, FrozenAxis> = BTreeMap::new();
    for (index, value) in graph.values().iter().enumerate().filter(|(_, value)| is_param(value)) {
        for (axis, id) in traced.values[index].iter().enumerate() {
            let Some(id) = id else { continue };
            traced.atoms.places(*id, &mut |atom, place| {
                let size = traced.atoms.size(atom);
                if size < 2 {
                    return;
                }
                if let Some(reason) = traced.atoms.reason(atom) {
                    held.entry(atom).or_insert_with(|| FrozenAxis { param: value.name.clone(), axis, size, reason: reason.to_owned() });
                    return;
                }
                let group = found.entry(atom).or_insert_with(|| {
                    order.push(atom);
                    let name = value.name.rsplit_once('.').map_or(value.name.as_str(), |(module, _)| module).to_owned();
                    roles.group(name, size, atom)
                });
                let role = roles.members.get(&(index, axis)).copied().unwrap_or(Role::Goes);
                group.members.push(Member { param: value.name.clone(), axis, place, role });
            });
        }
    }
    let mut groups = Vec::with_capacity(order.len());
    for atom in order {
        let Some(group) = found.remove(&atom) else { continue };
        match &group.output {
            // Features of a residual stream become narrower where that is asked for; others are the answer.
            Some(output) if group.unit != GroupUnit::Hidden && group.unit != GroupUnit::Other => {
                let reason = format!("output `{output}`");
                held.entry(atom).or_insert_with(|| FrozenAxis { param: group.name.clone(), axis: 0, size: group.size, reason });
            }
            _ => groups.push(group),
        }
    }
    Ok(Groups { groups, held: held.into_values().collect(), traced })
}

impl Groups {
    /// Builds the graph again over tensors of other sizes; `kept` says how many units of a group stay.
    ///
    /// # Errors
    /// The tensors do not have these sizes.
    pub fn rebuild(&self, graph: &Graph, catalog: &dyn Catalog, kept: &dyn Fn(&Group) -> usize) -> Result<Graph> {
        let sizes: BTreeMap<AxisId, usize> = self.groups.iter().map(|group| (group.atom, kept(group))).collect();
        let size = |atom: AxisId| sizes.get(&atom).copied().unwrap_or_else(|| self.traced.atoms.size(atom));
        let positions: BTreeMap<&str, usize> = graph.nodes().iter().enumerate().map(|(index, node)| (graph.value(node.output).name.as_str(), index)).collect();
        rebuild(graph, catalog, &mut |step: Rewrite| {
            let letters = positions.get(step.name).map(|index| &self.traced.letters[*index]);
            let letter = |name: &str| letters.and_then(|l| l.get(name)).map_or(0, |(axis, _)| self.traced.atoms.resized(*axis, &size));
            let op = step.node.op.resized(&letter);
            let builder: &mut Builder = step.builder;
            builder.node(step.name, op, &step.inputs)
        })
    }

    /// The shapes of the graph's tensors when so many units of each group stay.
    pub fn shapes(&self, graph: &Graph, kept: &dyn Fn(&Group) -> usize) -> BTreeMap<String, Vec<usize>> {
        let sizes: BTreeMap<AxisId, usize> = self.groups.iter().map(|group| (group.atom, kept(group))).collect();
        let size = |atom: AxisId| sizes.get(&atom).copied().unwrap_or_else(|| self.traced.atoms.size(atom));
        let resized = |axis: &Option<AxisId>| axis.map_or(0, |axis| self.traced.atoms.resized(axis, &size));
        let values = graph.values().iter().zip(&self.traced.values).filter(|(value, _)| is_param(value));
        values.map(|(value, axes)| (value.name.clone(), axes.iter().map(resized).collect())).collect()
    }

    /// The group of a name.
    pub fn find(&self, name: &str) -> Option<&Group> {
        self.groups.iter().find(|group| group.name == name)
    }
}

/// What atoms are for, from the ops that they go through.
struct Roles {
    heads: BTreeSet<AxisId>,
    shared: BTreeSet<AxisId>,
    normalised: BTreeSet<AxisId>,
    stream: BTreeSet<AxisId>,
    channels: BTreeSet<AxisId>,
    /// Neurons whose readers write to a residual stream, or to other neurons.
    inner: BTreeSet<AxisId>,
    features: BTreeMap<AxisId, String>,
    attends: bool,
    /// By value and axis.
    members: BTreeMap<(usize, usize), Role>,
}

impl Roles {
    fn of(graph: &Graph, traced: &Traced) -> Roles {
        let atoms_of = |axis: AxisId| {
            let mut found = Vec::new();
            traced.atoms.places(axis, &mut |atom, _| found.push(atom));
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
            let over = letters.values().filter(|(_, hold)| *hold == Hold::Normalised).flat_map(|(axis, _)| atoms_of(*axis));
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
        // What attention makes of the stream and normalises before it makes keys of it has a width of its own.
        let mut read: BTreeMap<AxisId, bool> = BTreeMap::new();
        let answers = graph.outputs().iter().flat_map(|(_, id)| traced.values[id.index()].iter().flatten());
        let answers: BTreeSet<AxisId> = answers.flat_map(|axis| atoms_of(*axis)).collect();
        for (node, letters) in graph.nodes().iter().zip(&traced.letters).filter(|_| roles.attends) {
            if let (Op::Linear(_), Some((input, _)), Some((output, _))) = (&node.op, letters.get("k"), letters.get("o")) {
                let goes_on = |atom: &AxisId| added.contains(atom) || roles.normalised.contains(atom) || answers.contains(atom);
                let goes_on = atoms_of(*output).iter().any(goes_on);
                atoms_of(*input).into_iter().for_each(|atom| *read.entry(atom).or_default() |= goes_on);
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
