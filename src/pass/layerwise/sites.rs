//! Linear layers, grouped by the values that they read.

use std::collections::BTreeSet;

use crate::analysis::Block;
use crate::data::{SequenceRoles, TokenAxis};
use crate::error::{Error, Result};
use crate::ir::{Graph, Kind, Op};
use crate::kernel::dense::transposed;

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

/// Groups the layers of the `targets` by the value that they read, in the order of the graph; with
/// `separate`, each layer is in its own group. `pass` is the name of the pass in errors.
pub(super) fn sites(pass: &str, graph: &Graph, targets: &BTreeSet<&str>, separate: bool) -> Result<Vec<Site>> {
    let (mut sites, sides): (Vec<Site>, SequenceRoles) = (Vec::new(), SequenceRoles::new(graph));
    let mut found = BTreeSet::new();
    let unusable = |name: &str, reason: &str| {
        Err(Error::tensor(name, format!("{reason}; {pass} supports only linear layers that are computed once, from activations"), "add it to `ignore`"))
    };
    for node in graph.nodes() {
        for (at, id) in node.inputs.iter().enumerate() {
            let value = graph.value(*id);
            if !targets.contains(value.name.as_str()) {
                continue;
            }
            let (Op::Linear(op), 1) = (&node.op, at) else { return unusable(&value.name, "is read by an operator that is not a linear layer") };
            if !found.insert(value.name.clone()) {
                return unusable(&value.name, "is read by several layers");
            }
            let sizes: Vec<usize> = value.ty.shape.iter().filter_map(|dim| dim.fixed()).collect();
            let [a, b] = sizes[..] else { return unusable(&value.name, "is not a matrix") };
            let (rows, size) = if op.input_major { (b, a) } else { (a, b) };
            let layer = Layer { weight: value.name.clone(), rows, size, input_major: op.input_major };
            let read = graph.value(node.inputs[0]);
            if read.kind == Kind::Param {
                return unusable(&value.name, &format!("belongs to a layer whose input is the weight `{}`", read.name));
            }
            match sites.iter_mut().find(|site| site.value == read.name && !separate) {
                Some(site) => site.layers.push(layer),
                None => sites.push(Site { value: read.name.clone(), tokens: sides.token_axis(&read.name), layers: vec![layer] }),
            }
        }
    }
    match targets.iter().find(|name| !found.contains(**name)) {
        Some(name) => unusable(name, "is not used by the model"),
        None => Ok(sites),
    }
}

/// Index of the block that computes the layers of a site.
pub(super) fn block_of(blocks: &[Block], site: &Site) -> Result<usize> {
    let reads = |block: &Block| site.layers.iter().all(|layer| block.parameters.contains(&layer.weight));
    let name = site.layers.first().map_or("", |layer| layer.weight.as_str());
    let reason = "is not used in the same block as the other layers that read the same value";
    blocks.iter().position(reads).ok_or_else(|| Error::tensor(name, reason, "add it to `ignore`"))
}
