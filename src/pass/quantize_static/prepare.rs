//! Preparation of a model before calibration: folds batch normalizations and transposes matrices.

use std::collections::BTreeSet;

use super::fold::{self, Folded};
use super::sites::Sites;
use super::unreached;
use crate::error::{Error, Result, counted};
use crate::ir::ops::{Linear, Op};
use crate::ir::{Graph, GraphFile, Rewrite, rebuild};
use crate::model::{self, Model};
use crate::pass::consumers::{channels_second, weight_input};
use crate::pass::targets::{self, SelectedWeights};
use crate::store::{DType, Origin, Pattern, Transposed};

/// A model prepared for quantization.
#[derive(Clone)]
pub(super) struct Prepared {
    pub model: Model,
    pub graph: Graph,
    /// Weights of the layers to quantize.
    pub layers: BTreeSet<String>,
    /// Description of the selection.
    pub rule: String,
    /// Whether `config.json` still describes the graph.
    pub described: bool,
    pub notes: Vec<String>,
}

impl Prepared {
    /// Whether a quantized value holds images.
    pub fn has_images(&self) -> bool {
        Sites::new(&self.graph, &self.layers).values.keys().any(|value| channels_second(&self.graph, *value))
    }
}

const RULE: &str =
    "weights of linear layers and convolutions of the graph, except output heads, routers, embeddings, and kernels that several convolutions share";

/// Selects the layers and prepares the model.
pub(super) fn prepare(pass: &str, mut model: Model, targets: &[Pattern], ignore: &[Pattern]) -> Result<Prepared> {
    let graph = model.graph()?;
    let bodies = crate::onnx::control_flow::layers(&graph);
    let layers = graph.nodes().iter().filter(|node| matches!(node.op, Op::Linear(_) | Op::Conv(_)));
    let candidates: BTreeSet<&str> = layers.map(|node| weight_input(&graph, node)).chain(bodies.keys().map(String::as_str)).collect();
    let weights = model.weights.clone();
    // ONNX Runtime rejects files in which several int8 convolutions share a kernel.
    let convolutions = |name: &str| graph.nodes().iter().filter(|node| matches!(node.op, Op::Conv(_)) && weight_input(&graph, node) == name).count();
    let eligible = |name: &str, weight: &crate::store::Weight| candidates.contains(name) && model::is_prunable(name, weight) && convolutions(name) < 2;
    let selected = targets::select_weights(pass, &weights, targets, ignore, RULE, eligible);
    let is_default = candidates.is_empty() && targets.is_empty();
    let selected = selected.map_err(|error| unreached::first_error(&model).filter(|_| is_default).unwrap_or(error));
    let SelectedWeights { names, rule, mut notes } = selected?;
    let layers: BTreeSet<String> = names.into_iter().map(str::to_owned).collect();
    for name in &layers {
        targets::require_float(pass, name, weights.get(name)?)?;
        if !candidates.contains(name.as_str()) {
            let reason = "is not the weight of a linear layer or a convolution of this model, such as the right operand of a MatMul, or the kernel of a Conv";
            let other = || Error::tensor(name, reason, "remove it from `targets`");
            return Err(unreached::error(&model, name).unwrap_or_else(other));
        }
    }
    let mut described = model.changed_graph.is_none() && model.onnx.is_none() && !crate::files::is_file(&model.path.join(GraphFile::NAME));
    let shared: Vec<&&str> = candidates.iter().filter(|name| convolutions(name) > 1 && !layers.contains(**name)).collect();
    if let Some(first) = shared.first() {
        notes.push(format!("{} left in floats, shared by several convolutions (the first: `{first}`)", counted(shared.len(), "kernel")));
    }
    notes.extend(unreached::notes(&model, &candidates));
    let (graph, Folded { count, unfolded }) = fold::fold(&mut model, graph)?;
    if count > 0 {
        notes.push(format!("{} folded into adjacent layers", counted(count, "batch normalisation")));
        described = false;
    }
    if let Some(first) = unfolded.first() {
        notes.push(format!("{} kept, without an adjacent layer to fold into (the first: `{first}`)", counted(unfolded.len(), "batch normalisation")));
    }
    let graph = transpose(&mut model, graph, &layers, &mut described)?;
    let convolutions = graph.nodes().iter().any(|node| matches!(node.op, Op::Conv(_)) && layers.contains(weight_input(&graph, node)));
    described &= !convolutions && Sites::new(&graph, &layers).values.values().all(|site| !site.all_readers);
    Ok(Prepared { model, graph, layers, rule, described, notes })
}

/// Transposes matrices that are stored as `[in, out]`, which could not have scales per output channel
/// otherwise.
fn transpose(model: &mut Model, graph: Graph, layers: &BTreeSet<String>, described: &mut bool) -> Result<Graph> {
    let stored = |graph: &Graph, node: &crate::ir::Node| matches!(&node.op, Op::Linear(op) if op.input_major) && layers.contains(weight_input(graph, node));
    let names: BTreeSet<&str> = graph.nodes().iter().filter(|node| stored(&graph, node)).map(|node| weight_input(&graph, node)).collect();
    if names.is_empty() {
        return Ok(graph);
    }
    for name in &names {
        let upstream = model.weights.get(name)?.clone();
        if upstream.dtype == DType::F64 {
            return Err(Error::tensor(name, "is F64, but only 16-bit and 32-bit floats are supported", "run `cast` first, or add it to `ignore`"));
        }
        model.weights.by_name.insert((*name).to_owned(), Transposed { upstream }.weight().with_origin(Origin::Rescaled));
    }
    *described = false;
    rebuild(&graph, &model.weights, &mut |step: Rewrite| {
        if stored(&graph, step.node) { step.builder.node(step.name, Linear { input_major: false }, &step.inputs) } else { step.copy() }
    })
}
