//! Which values of a graph are quantized, and what stays as it is and why.
//!
//! The rules are those by which runtimes make integer kernels (ONNX Runtime's QDQ fusions): the input of every quantized layer;
//! the output of every quantized convolution, behind the activation that follows it; sums of quantized values, and pooling between
//! them. What moves values about or takes their maximum has one scale on both sides. Everything else computes in floats.

use std::collections::{BTreeMap, BTreeSet};

use crate::calibration::{Axis, Request};
use crate::ir::ops::Op;
use crate::ir::{Graph, Node, ValueId};
use crate::pass::walk::{channels_second, only_reader, weight_input};

/// A value that is quantized.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Site {
    /// Whether all readers see it rounded, or quantized layers alone.
    pub everyone: bool,
    /// The value whose scale it has.
    pub like: ValueId,
}

/// All sites of a graph.
#[derive(Debug, Default)]
pub(super) struct Sites {
    pub values: BTreeMap<ValueId, Site>,
}

impl Sites {
    /// Finds the sites for layers whose weights are quantized.
    pub fn of(graph: &Graph, layers: &BTreeSet<String>) -> Sites {
        let mut sites = Sites::default();
        let quantized = |node: &Node| matches!(node.op, Op::Linear(_) | Op::Conv(_)) && layers.contains(weight_input(graph, node));
        for node in graph.nodes() {
            if quantized(node) {
                sites.add(node.inputs[0], false, None);
            }
            match &node.op {
                Op::Conv(_) if quantized(node) => sites.add(behind_activation(graph, node.output), true, None),
                Op::Add(_) if node.inputs.iter().all(|id| sites.is_everyone(*id)) => sites.add(behind_activation(graph, node.output), true, None),
                Op::MaxPool(_) | Op::Flatten(_) if sites.is_everyone(node.inputs[0]) => {
                    let like = sites.values.get(&node.inputs[0]).map(|site| site.like);
                    sites.add(node.output, true, like);
                }
                Op::GlobalAveragePool(_) if sites.is_everyone(node.inputs[0]) => sites.add(node.output, true, None),
                _ => {}
            }
        }
        sites
    }

    fn add(&mut self, value: ValueId, everyone: bool, like: Option<ValueId>) {
        let site = self.values.entry(value).or_insert(Site { everyone, like: value });
        site.everyone |= everyone;
        if let Some(like) = like {
            site.like = like;
        }
    }

    fn is_everyone(&self, value: ValueId) -> bool {
        self.values.get(&value).is_some_and(|site| site.everyone)
    }

    /// What calibration has to look at.
    pub fn requests(&self, graph: &Graph) -> BTreeMap<String, Request> {
        let request = |id: &ValueId| {
            let value = graph.value(*id);
            let axis = if channels_second(graph, *id) { Axis::Second } else { Axis::Last };
            (value.name.clone(), Request { axis, histograms: true })
        };
        self.values.keys().map(request).collect()
    }
}

/// The value after the activations that are part of an integer kernel.
fn behind_activation(graph: &Graph, value: ValueId) -> ValueId {
    match only_reader(graph, value).map(|reader| &graph.nodes()[reader]) {
        Some(next) if matches!(&next.op, Op::Relu(_)) || matches!(&next.op, Op::Clip(clip) if clip.min == 0.0) => next.output,
        _ => value,
    }
}

/// Nodes that compute in floats although their inputs could be quantized, and why, in one note.
pub(super) fn left_in_floats(graph: &Graph, layers: &BTreeSet<String>) -> Vec<String> {
    let sites = Sites::of(graph, layers);
    let mut kinds: BTreeMap<(&'static str, &'static str), (usize, String)> = BTreeMap::new();
    for node in graph.nodes() {
        let why = match &node.op {
            Op::Attention(_) => "scores, masks and softmax lose more than their integer kernels gain",
            Op::Softmax(_) | Op::Sigmoid(_) | Op::Tanh(_) | Op::Silu(_) | Op::Gelu(_) => "no integer kernel",
            Op::LayerNorm(_) | Op::RmsNorm(_) | Op::Normalize(_) => "statistics need floats",
            Op::BatchNorm(_) => "cannot be folded into an adjacent layer",
            Op::Opaque(_) => "nodes that stay as they stand in the file, and that ONNX Runtime computes",
            Op::Linear(_) | Op::Conv(_) if !layers.contains(weight_input(graph, node)) => "left out by name",
            Op::Add(_) | Op::Mul(_) if !node.inputs.iter().all(|id| sites.is_everyone(*id)) => "residual streams and gates keep full precision",
            _ => continue,
        };
        let entry = kinds.entry((node.op.name(), why)).or_insert_with(|| (0, graph.value(node.output).name.clone()));
        entry.0 += 1;
    }
    let kinds: Vec<String> = kinds.into_iter().map(|((op, why), (count, first))| format!("{count} {op} ({why}; the first: `{first}`)")).collect();
    if kinds.is_empty() { Vec::new() } else { vec![format!("left in floats: {}", kinds.join(", "))] }
}
