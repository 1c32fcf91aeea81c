//! Linear layers, grouped by the values that they read.

use std::collections::{BTreeMap, BTreeSet};

use crate::analysis::Block;
use crate::data::{SequenceRoles, TokenAxis};
use crate::error::{Error, Result};
use crate::ir::{Graph, Kind, Node, Op, ValueId};
use crate::kernel::dense::transposed;
use crate::model::Model;
use crate::pass::{targets, tower};
use crate::store::Pattern;

/// A linear layer.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Layer {
    /// Name of its weight.
    pub weight: String,
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub size: usize,
    /// Whether the weight is stored as `[in, out]`.
    pub input_major: bool,
}

impl Layer {
    /// The shape in which the weight is stored.
    pub fn shape(&self) -> [usize; 2] {
        if self.input_major { [self.size, self.rows] } else { [self.rows, self.size] }
    }

    /// Converts stored values to `[rows, size]`.
    pub fn output_major(&self, values: Vec<f32>) -> Vec<f32> {
        if self.input_major { transposed(&values, self.rows) } else { values }
    }

    /// Converts `[rows, size]` to the stored layout.
    pub fn stored(&self, values: Vec<f32>) -> Vec<f32> {
        if self.input_major { transposed(&values, self.size) } else { values }
    }
}

/// A graph value and the layers that read it.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Site {
    pub value: String,
    pub tokens: TokenAxis,
    pub layers: Vec<Layer>,
}

/// Why a layerwise pass does not support a weight: continues "the weight is".
type Reason = &'static str;

/// The weights among `names` that layerwise passes do not support, and why.
pub(super) fn unsupported<'n>(model: &Model, names: &BTreeSet<&'n str>) -> Result<BTreeMap<Reason, Vec<&'n str>>> {
    Ok(unsupported_in(&model.graph()?, names))
}

/// Removes the weights that layerwise passes do not support from `names`, and returns notes on them.
///
/// # Errors
/// If no weight remains, or if one of the `patterns` without a wildcard selects a removed weight.
pub(in crate::pass) fn retain_supported(pass: &str, model: &Model, names: &mut BTreeSet<&str>, patterns: &[Pattern]) -> Result<Vec<String>> {
    let skipped = unsupported(model, names)?;
    names.retain(|name| !skipped.values().flatten().any(|skipped| skipped == name));
    targets::left_unchanged(pass, &skipped, patterns, names.is_empty())
}

fn unsupported_in<'n>(graph: &Graph, names: &BTreeSet<&'n str>) -> BTreeMap<Reason, Vec<&'n str>> {
    let reads = reads(graph, names);
    let mut found: BTreeMap<Reason, Vec<&str>> = BTreeMap::new();
    for name in names {
        let reason = reads.get(name).map_or_else(|| Some(tower::unread(name)), |readers| layer(graph, readers).err());
        if let Some(reason) = reason {
            found.entry(reason).or_default().push(name);
        }
    }
    found
}

/// The nodes that read each of the values, and the positions of the values in their inputs.
fn reads<'g, 'n>(graph: &'g Graph, names: &BTreeSet<&'n str>) -> BTreeMap<&'n str, Vec<(&'g Node, usize)>> {
    let mut reads: BTreeMap<&str, Vec<(&Node, usize)>> = BTreeMap::new();
    for node in graph.nodes() {
        for (at, id) in node.inputs.iter().enumerate() {
            if let Some(name) = names.get(graph.value(*id).name.as_str()) {
                reads.entry(name).or_default().push((node, at));
            }
        }
    }
    reads
}

/// The layer of a weight with these readers, and the value that it reads.
fn layer(graph: &Graph, reads: &[(&Node, usize)]) -> Result<(ValueId, Layer), Reason> {
    let linear = |(node, at): &(&Node, usize)| matches!(node.op, Op::Linear(_)) && *at == 1;
    if !reads.iter().all(linear) {
        return Err("read by an operator that is not a linear layer");
    }
    let (node, op) = match reads {
        [(node, _)] => match &node.op {
            Op::Linear(op) => (node, op),
            _ => return Err("read by an operator that is not a linear layer"),
        },
        _ => return Err("read by several layers"),
    };
    let &[read, weight, ..] = node.inputs.as_slice() else { return Err("read by a layer without an input") };
    let weight = graph.value(weight);
    let sizes: Vec<usize> = weight.ty.shape.iter().filter_map(|dim| dim.fixed()).collect();
    let [a, b] = sizes[..] else { return Err("not a matrix") };
    let (rows, size) = if op.input_major { (b, a) } else { (a, b) };
    if graph.value(read).kind == Kind::Param {
        return Err("part of a layer whose input is a weight");
    }
    Ok((read, Layer { weight: weight.name.clone(), rows, size, input_major: op.input_major }))
}

/// Groups the layers of the `targets` by the value that they read, in the order of the graph; with
/// `separate`, each layer is in its own group. `pass` is the name of the pass in errors.
pub(super) fn sites(pass: &str, graph: &Graph, targets: &BTreeSet<&str>, separate: bool) -> Result<Vec<Site>> {
    let (mut sites, sides): (Vec<Site>, SequenceRoles) = (Vec::new(), SequenceRoles::new(graph));
    if let Some((reason, names)) = unsupported_in(graph, targets).first_key_value() {
        let reason = format!("is {reason}; {pass} supports only linear layers that are computed once, from activations");
        return Err(Error::tensor(names.first().copied().unwrap_or_default(), reason, "add it to `ignore`"));
    }
    for node in graph.nodes() {
        let Ok((read, layer)) = layer(graph, &[(node, 1)]) else { continue };
        if !targets.contains(layer.weight.as_str()) {
            continue;
        }
        let read = graph.value(read);
        match sites.iter_mut().find(|site| site.value == read.name && !separate) {
            Some(site) => site.layers.push(layer),
            None => sites.push(Site { value: read.name.clone(), tokens: sides.token_axis(&read.name), layers: vec![layer] }),
        }
    }
    Ok(sites)
}

/// Index of the block that computes the layers of a site.
pub(super) fn block_of(blocks: &[Block], site: &Site) -> Result<usize> {
    let reads = |block: &Block| site.layers.iter().all(|layer| block.parameters.contains(&layer.weight));
    let name = site.layers.first().map_or("", |layer| layer.weight.as_str());
    let reason = "is not used in the same block as the other layers that read the same value";
    blocks.iter().position(reads).ok_or_else(|| Error::tensor(name, reason, "add it to `ignore`"))
}
