//! Parameters that a training selects.

use std::collections::BTreeSet;

use super::{QuantizerScales, Training, fixed_codes, weight_rounding};
use crate::error::Result;
use crate::ir::{Graph, Kind, Node, Op};
use crate::model::{Model, is_linear};
use crate::store::{Encoding, Pattern, Weight};

/// Names of the parameters that are running statistics, not weights.
pub(super) fn statistics(graph: &Graph) -> BTreeSet<&str> {
    let first = |node: &'_ Node| match node.op {
        Op::BatchNorm(_) => 3,
        Op::CacheQuantize(_) => 1,
        _ => usize::MAX,
    };
    let inputs = graph.nodes().iter().flat_map(|node| node.inputs.get(first(node)..).unwrap_or(&[]));
    inputs.map(|id| graph.value(*id).name.as_str()).collect()
}

/// Names of the matrices of hidden linear layers: neither embeddings, heads and similar layers by their
/// names, nor layers that compute an output of the graph, such as the head of a classifier.
pub(super) fn hidden_layers(graph: &Graph, model: &Model) -> BTreeSet<String> {
    let of_output = |node: &&Node| matches!(node.op, Op::Linear(_)) && graph.is_output(node.output);
    let heads = graph.nodes().iter().filter(of_output).filter_map(|node| node.inputs.get(1));
    let heads: BTreeSet<&str> = heads.map(|id| graph.value(*id).name.as_str()).collect();
    let is_hidden = |(name, weight): &(&String, &Weight)| is_linear(name, weight) && !heads.contains(name.as_str());
    model.weights.by_name.iter().filter(is_hidden).map(|(name, _)| name.clone()).collect()
}

/// Rejects trained weights whose codes, scales or values cannot be trained and written.
pub fn require_trainable(graph: &Graph, model: &Model, options: &Training) -> Result<()> {
    let selected = selected((graph, model), &options.targets, &options.ignore);
    let mut names = graph.params().map(|(_, value)| &value.name).filter(|name| selected(name));
    names.try_for_each(|name| {
        let Some(weight) = model.weights.by_name.get(name) else { return Ok(()) };
        if weight.encoding == Encoding::Dense && weight.is_float() {
            weight.require_computable(name)?;
        }
        weight_rounding::require_trainable(name, weight)?;
        fixed_codes::require_trainable(name, weight, options.scales)
    })
}

/// Names of the numbers in the code of a model from an ONNX file, which are not trained by default.
pub fn literals<'g>(graph: &'g Graph, model: &Model) -> BTreeSet<&'g str> {
    let is_literal = |name: &&str| model.onnx.as_ref().is_some_and(|file| file.is_literal(name));
    graph.params().map(|(_, value)| value.name.as_str()).filter(is_literal).collect()
}

/// Names of the operands of arithmetic that no other op reads, such as scales of residual branches. In an
/// ONNX file, they may also be numbers in the code of the model.
pub fn operands(graph: &Graph) -> BTreeSet<&str> {
    let is_arithmetic = |node: &&Node| matches!(node.op, Op::Add(_) | Op::Mul(_) | Op::Binary(_));
    let names = |arithmetic: bool| {
        let nodes = graph.nodes().iter().filter(move |node| is_arithmetic(node) == arithmetic);
        nodes.flat_map(|node| &node.inputs).map(|id| graph.value(*id)).filter(|value| value.kind == Kind::Param).map(|value| value.name.as_str())
    };
    let read_otherwise: BTreeSet<&str> = names(false).collect();
    names(true).filter(|name| !read_otherwise.contains(name)).collect()
}

/// Returns a predicate for the parameters that are trained: by default, all except those of the vision tower
/// of a language model, and literals.
pub fn selected<'a>((graph, model): (&'a Graph, &Model), targets: &'a [Pattern], ignore: &'a [Pattern]) -> impl Fn(&str) -> bool + 'a {
    let (statistics, of_images) = (statistics(graph), graph.of_images());
    let tower = graph.params().filter(|(id, _)| of_images.get(id.index()) == Some(&true));
    let mut fixed: BTreeSet<&str> = tower.map(|(_, value)| value.name.as_str()).chain(literals(graph, model)).collect();
    if !targets.is_empty() {
        fixed.clear();
    }
    move |name| !statistics.contains(name) && !fixed.contains(name) && selects(targets, ignore, name)
}

fn selects(targets: &[Pattern], ignore: &[Pattern], name: &str) -> bool {
    let any = |patterns: &[Pattern]| patterns.iter().any(|pattern| pattern.matches(name));
    (targets.is_empty() || any(targets)) && !any(ignore)
}

impl Training {
    /// Whether the codes of a quantized weight with this name are trained, from its values before
    /// quantization.
    #[doc(hidden)]
    pub fn trains_codes(&self, name: &str) -> bool {
        let is_trained = match &self.adapter {
            Some(adapter) => adapter.absorb && selects(&adapter.targets, &[], name),
            None => selects(&self.targets, &self.ignore, name),
        };
        is_trained && self.scales != QuantizerScales::Only
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn layers_that_compute_an_output_are_not_hidden() {
        let hidden = |name: &str| {
            let model = Model::open(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/models").join(name)).unwrap();
            hidden_layers(&model.graph().unwrap(), &model)
        };
        let cases = [
            ("llama", "model.layers.0.mlp.down_proj.weight", "lm_head.weight"),
            ("bert-sequence-classification", "bert.pooler.dense.weight", "classifier.weight"),
        ];
        for (name, layer, head) in cases {
            let hidden = hidden(name);
            assert!(hidden.contains(layer) && !hidden.contains(head), "{name}: {hidden:?}");
        }
        assert_eq!(hidden("torchvision-resnet18"), BTreeSet::new());
    }
}
