//! What is done to a model before anything is seen of its values: normalisations folded, matrices transposed.

use std::collections::BTreeSet;

use super::fold::{self, Folded};
use super::sites::Sites;
use crate::error::{Error, Result};
use crate::ir::ops::{Linear, Op};
use crate::ir::{Graph, GraphFile, Rewrite, rebuild};
use crate::model::{self, Model};
use crate::pass::targets::{self, Chosen};
use crate::pass::walk::weight_input;
use crate::store::{DType, Origin, Pattern, Transposed};

/// A model that is ready to be quantized.
#[derive(Clone)]
pub(super) struct Prepared {
    pub model: Model,
    pub graph: Graph,
    /// Weights of the layers that are to be quantized.
    pub layers: BTreeSet<String>,
    /// How they were chosen.
    pub rule: String,
    /// Whether `config.json` still says what the model computes.
    pub described: bool,
    pub notes: Vec<String>,
}

const RULE: &str = "weights of linear layers and convolutions of the graph, but no output head, router, embedding, or kernel of several convolutions";

/// Chooses the layers and brings the model into the form in which they are quantized.
pub(super) fn prepare(pass: &str, mut model: Model, targets: &[Pattern], ignore: &[Pattern]) -> Result<Prepared> {
    let graph = model.graph()?;
    let candidates: BTreeSet<&str> =
        graph.nodes().iter().filter(|node| matches!(node.op, Op::Linear(_) | Op::Conv(_))).map(|node| weight_input(&graph, node)).collect();
    let weights = model.weights.clone();
    // ONNX Runtime refuses files in which several convolutions of bytes read one kernel.
    let convolutions = |name: &str| graph.nodes().iter().filter(|node| matches!(node.op, Op::Conv(_)) && weight_input(&graph, node) == name).count();
    let eligible = |name: &str, weight: &crate::store::Weight| candidates.contains(name) && model::is_prunable(name, weight) && convolutions(name) < 2;
    let Chosen { names, rule } = targets::choose(pass, &weights, targets, ignore, RULE, eligible)?;
    let layers: BTreeSet<String> = names.into_iter().map(str::to_owned).collect();
    for name in &layers {
        targets::require_float(pass, name, weights.get(name)?)?;
        if !candidates.contains(name.as_str()) {
            return Err(Error::tensor(name, "is not the weight of a linear layer or a convolution of this model", "leave it out of `targets`"));
        }
    }
    let mut described = model.changed_graph.is_none() && model.onnx.is_none() && !crate::files::is_file(&model.path.join(GraphFile::NAME));
    let mut notes = Vec::new();
    let shared: Vec<&&str> = candidates.iter().filter(|name| convolutions(name) > 1 && !layers.contains(**name)).collect();
    if let Some(first) = shared.first() {
        notes.push(format!("{} kernels stay in floats: several convolutions share each of them (the first: `{first}`)", shared.len()));
    }
    let (graph, Folded { count, left }) = fold::fold(&mut model, graph)?;
    if count > 0 {
        notes.push(format!("{count} batch normalisations are folded into adjacent layers"));
        described = false;
    }
    if let Some(first) = left.first() {
        notes.push(format!("{} batch normalisations are kept (the first: `{first}`): no adjacent layer can absorb them", left.len()));
    }
    let graph = turn(&mut model, graph, &layers, &mut described)?;
    let convolutions = graph.nodes().iter().any(|node| matches!(node.op, Op::Conv(_)) && layers.contains(weight_input(&graph, node)));
    described &= !convolutions && Sites::of(&graph, &layers).values.values().all(|site| !site.everyone);
    Ok(Prepared { model, graph, layers, rule, described, notes })
}

/// Turns matrices that are stored as `[in, out]`, whose outputs could not have scales of their own otherwise.
fn turn(model: &mut Model, graph: Graph, layers: &BTreeSet<String>, described: &mut bool) -> Result<Graph> {
    let stored = |graph: &Graph, node: &crate::ir::Node| matches!(&node.op, Op::Linear(op) if op.input_major) && layers.contains(weight_input(graph, node));
    let names: BTreeSet<&str> = graph.nodes().iter().filter(|node| stored(&graph, node)).map(|node| weight_input(&graph, node)).collect();
    if names.is_empty() {
        return Ok(graph);
    }
    for name in &names {
        let upstream = model.weights.get(name)?.clone();
        if upstream.dtype == DType::F64 {
            return Err(Error::tensor(name, "is F64, where floats of 16 or 32 bits are needed", ""));
        }
        model.weights.by_name.insert((*name).to_owned(), Transposed { upstream }.weight().of_origin(Origin::Rescaled));
    }
    *described = false;
    rebuild(&graph, &model.weights, &mut |step: Rewrite| {
        if stored(&graph, step.node) { step.builder.node(step.name, Linear { input_major: false }, &step.inputs) } else { step.keep() }
    })
}
