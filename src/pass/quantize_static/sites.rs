//! Selection of the quantized values of a graph.
//!
//! The rules follow the QDQ fusions of ONNX Runtime. Quantized are: the input of every quantized layer;
//! the output of every quantized convolution, after its activation function; sums of quantized values;
//! and pooling of quantized values. Operators that move values or compute maxima have the same scale for
//! input and output. Everything else computes in floats.

use std::collections::{BTreeMap, BTreeSet};

use crate::calibration::{Axis, Request};
use crate::ir::ops::Op;
use crate::ir::{Graph, Node, ValueId};
use crate::pass::consumers::{channels_second, only_reader, weight_input};

/// A quantized value.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Site {
    /// Whether all readers get the quantized value, or only quantized layers.
    pub all_readers: bool,
    /// The value that determines its scale.
    pub scale_of: ValueId,
}

/// All quantized values of a graph.
#[derive(Debug, Default)]
pub(super) struct Sites {
    pub values: BTreeMap<ValueId, Site>,
}

impl Sites {
    /// Selects the quantized values for the given quantized layers.
    pub fn new(graph: &Graph, layers: &BTreeSet<String>) -> Sites {
        let mut sites = Sites::default();
        let quantized = |node: &Node| matches!(node.op, Op::Linear(_) | Op::Conv(_)) && layers.contains(weight_input(graph, node));
        for node in graph.nodes() {
            if quantized(node) {
                sites.add(node.inputs[0], false, None);
            }
            match &node.op {
                Op::Conv(_) if quantized(node) => sites.add(after_activation(graph, node.output), true, None),
                Op::Add(_) if node.inputs.iter().all(|id| sites.is_for_all_readers(*id)) => sites.add(after_activation(graph, node.output), true, None),
                Op::MaxPool(_) | Op::Flatten(_) if sites.is_for_all_readers(node.inputs[0]) => {
                    let scale_of = sites.values.get(&node.inputs[0]).map(|site| site.scale_of);
                    sites.add(node.output, true, scale_of);
                }
                Op::GlobalAveragePool(_) if sites.is_for_all_readers(node.inputs[0]) => sites.add(node.output, true, None),
                _ => {}
            }
        }
        sites
    }

    fn add(&mut self, value: ValueId, all_readers: bool, scale_of: Option<ValueId>) {
        let site = self.values.entry(value).or_insert(Site { all_readers, scale_of: value });
        site.all_readers |= all_readers;
        if let Some(scale_of) = scale_of {
            site.scale_of = scale_of;
        }
    }

    fn is_for_all_readers(&self, value: ValueId) -> bool {
        self.values.get(&value).is_some_and(|site| site.all_readers)
    }

    /// The statistics that calibration must collect of each channel.
    pub fn requests(&self, graph: &Graph) -> BTreeMap<String, Request> {
        let request = |id: &ValueId| {
            let axis = if channels_second(graph, *id) { Axis::Second } else { Axis::Last };
            (graph.value(*id).name.clone(), Request { axis, histograms: true, joint: false, weights: None })
        };
        self.values.keys().map(request).collect()
    }
}

/// The output of the activation function after a value, if integer kernels fuse it; otherwise the value.
fn after_activation(graph: &Graph, value: ValueId) -> ValueId {
    match only_reader(graph, value).map(|reader| &graph.nodes()[reader]) {
        Some(next) if matches!(&next.op, Op::Relu(_)) || matches!(&next.op, Op::Clip(clip) if clip.min == 0.0) => next.output,
        _ => value,
    }
}

/// A note on nodes that compute in floats although their inputs could be quantized, with the reasons.
pub(super) fn left_in_floats(graph: &Graph, layers: &BTreeSet<String>) -> Vec<String> {
    let sites = Sites::new(graph, layers);
    let mut kinds: BTreeMap<(&'static str, &'static str), (usize, String)> = BTreeMap::new();
    for node in graph.nodes() {
        let why = match &node.op {
            Op::Attention(_) => "integer kernels would lose too much accuracy",
            Op::Softmax(_) | Op::Sigmoid(_) | Op::Tanh(_) | Op::Silu(_) | Op::Gelu(_) => "no integer kernel",
            Op::LayerNorm(_) | Op::RmsNorm(_) | Op::Normalize(_) => "statistics need floats",
            Op::BatchNorm(_) => "cannot be folded into an adjacent layer",
            Op::Opaque(_) => "nodes without a typed form, which are written unchanged",
            Op::Linear(_) | Op::Conv(_) if !layers.contains(weight_input(graph, node)) => "not selected",
            Op::Add(_) | Op::Mul(_) if !node.inputs.iter().all(|id| sites.is_for_all_readers(*id)) => "residual streams and gates keep full precision",
            _ => continue,
        };
        let entry = kinds.entry((node.op.name(), why)).or_insert_with(|| (0, graph.value(node.output).name.clone()));
        entry.0 += 1;
    }
    let kinds: Vec<String> = kinds.into_iter().map(|((op, why), (count, first))| format!("{count} {op} ({why}; the first: `{first}`)")).collect();
    if kinds.is_empty() { Vec::new() } else { vec![format!("left in floats: {}", kinds.join(", "))] }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A residual block: the output of the first convolution is quantized after its activation function, and
    /// the sum because both of its inputs are.
    #[test]
    fn outputs_of_convolutions_are_quantized_for_all_readers() {
        let conv = "Conv{\"stride\":1,\"padding\":0,\"dilation\":1,\"groups\":1}";
        let text = format!(
            "input x: float[batch, 4, 8, 8]\nparam a: float[4, 4, 1, 1]\nparam b: float[4, 4, 1, 1]\nparam c: float[2, 4]\n\
            conv = {conv}(x, a) -> float[batch, 4, 8, 8]\nrelu = Relu(conv) -> float[batch, 4, 8, 8]\n\
            second = {conv}(relu, b) -> float[batch, 4, 8, 8]\nsum = Add(second, relu) -> float[batch, 4, 8, 8]\n\
            pool = GlobalAveragePool(sum) -> float[batch, 4]\nlogits = Linear{{\"input_major\":false}}(pool, c) -> float[batch, 2]\noutput logits = logits\n"
        );
        let graph: Graph = text.parse().unwrap();
        let found = |layers: &[&str]| -> BTreeMap<String, bool> {
            let sites = Sites::new(&graph, &layers.iter().map(|name| (*name).to_owned()).collect());
            assert!(sites.values.iter().all(|(value, site)| site.scale_of == *value));
            sites.values.iter().map(|(value, site)| (graph.value(*value).name.clone(), site.all_readers)).collect()
        };
        let expected = |values: &[(&str, bool)]| values.iter().map(|(name, all_readers)| ((*name).to_owned(), *all_readers)).collect::<BTreeMap<_, _>>();
        assert_eq!(found(&["a", "b", "c"]), expected(&[("x", false), ("relu", true), ("second", true), ("sum", true), ("pool", true)]));
        assert_eq!(found(&["b", "c"]), expected(&[("relu", false), ("second", true), ("pool", false)]));
    }
}
