//! Scales of quantizers that train: as logarithms beside the model, which become scales again in the end.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use candle_core::Tensor;

use super::checkpoint::Tensors;
use crate::error::{Error, Result};
use crate::exec::transfer::{self, Cause};
use crate::ir::ops::{FakeQuantize, LearnedFakeQuantize};
use crate::ir::quantizers::layer_weight;
use crate::ir::{Dim, Graph, Op, Rewrite, rebuild};
use crate::model::Model;
use crate::store::{ActivationScheme, Encoding, Static};

/// The largest integer: gradients of a scale are divided by the square root of it and of how many values the scale moves, so
/// that they are no larger than those of weights (Esser et al., *Learned Step Size Quantization*, 2020, section 2.2).
const LARGEST: f64 = 127.0;

/// Name of the logarithm that stands for a scale, by the name of what it scales.
pub(super) fn logarithm(name: &str) -> String {
    format!("{name}/logarithm")
}

/// What a gradient of a scale is multiplied with that moves this many values.
pub(super) fn damping(values: usize) -> f64 {
    1.0 / (values.max(1) as f64 * LARGEST).sqrt()
}

/// Quantizers of values whose scales train.
pub struct Quantizers {
    /// The graph that trains: quantizers read a logarithm.
    pub graph: Graph,
    /// By the name of the quantizer's value, with the number of values of a sample.
    by_name: BTreeMap<String, (LearnedFakeQuantize, usize)>,
}

impl Quantizers {
    /// Of all quantizers of a graph but those that a layer reads whose weight does not train: its file holds its scale.
    ///
    /// # Errors
    /// The graph does not fit itself.
    pub fn new(graph: &Graph, trains: &dyn Fn(&str) -> bool) -> Result<Quantizers> {
        let fixed = |node: &&crate::ir::Node| layer_weight(graph, node).is_some_and(|weight| !trains(weight));
        let held: BTreeSet<_> = graph.nodes().iter().filter(fixed).filter_map(|node| node.inputs.first()).collect();
        let mut by_name = BTreeMap::new();
        for node in graph.nodes().iter().filter(|node| !held.contains(&node.output)) {
            if let Op::FakeQuantize(op) = node.op {
                let value = graph.value(node.output);
                let count = value.ty.shape.iter().filter_map(Dim::fixed).product();
                by_name.insert(value.name.clone(), (op.into(), count));
            }
        }
        let shape = |(_, value): (_, &crate::ir::Value)| Some((value.name.clone(), value.ty.shape.iter().map(Dim::fixed).collect::<Option<_>>()?));
        let mut shapes: BTreeMap<String, Vec<usize>> = graph.params().filter_map(shape).collect();
        shapes.extend(by_name.keys().map(|name| (logarithm(name), vec![1])));
        let graph = rebuild(graph, &shapes, &mut |mut step: Rewrite| match by_name.get(step.name) {
            Some((op, _)) => {
                step.inputs.push(step.builder.param(&logarithm(step.name), &[1])?);
                step.builder.node(step.name, *op, &step.inputs)
            }
            None => step.keep(),
        })?;
        Ok(Quantizers { graph, by_name })
    }

    /// Names of the logarithms, and what their gradients are multiplied with.
    pub fn logarithms(&self) -> impl Iterator<Item = (String, f64)> {
        self.by_name.iter().map(|(name, (_, count))| (logarithm(name), damping(*count)))
    }

    /// Puts learned scales into a model: into its graph, and to the weights that name those of their inputs.
    ///
    /// # Errors
    /// A scale is no number, or the graph does not fit the model.
    pub fn put(&self, state: &Tensors, model: &mut Model) -> Result<()> {
        let mut learned = BTreeMap::new();
        for (name, (op, _)) in &self.by_name {
            let Some(kept) = state.get(&logarithm(name)) else { continue };
            let by = settled(*op, &kept.open()?).map_err(|e| Error::computed(format!("the scale of `{name}`"), e))?;
            require_scale(name, by.scale)?;
            learned.insert(name.as_str(), by);
        }
        let graph = model.graph()?;
        for node in graph.nodes() {
            let read = node.inputs.first().and_then(|id| learned.get(graph.value(*id).name.as_str()));
            let weight = layer_weight(&graph, node).and_then(|name| model.weights.by_name.get_mut(name));
            if let (Some(by), Some(Encoding::Affine(affine))) = (read, weight.map(|weight| &mut weight.encoding))
                && let ActivationScheme::Static(old) = &mut affine.activations
            {
                *old = Static::new(by.scale, old.zero_point);
            }
        }
        let graph = rebuild(&graph, &model.weights, &mut |step: Rewrite| match learned.get(step.name) {
            Some(by) => step.builder.node(step.name, *by, &step.inputs),
            None => step.keep(),
        })?;
        model.changed_graph = Some(Arc::new(graph));
        Ok(())
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.by_name.len()
    }
}

/// Holds a learned scale to what can divide.
pub(super) fn require_scale(name: &str, scale: f32) -> Result<()> {
    if scale.is_normal() && scale > 0.0 {
        return Ok(());
    }
    Err(Error::tensor(name, format!("its learned scale {scale} is of no use"), "lower `learning_rate`, or train with `scales: fixed`"))
}

fn settled(op: LearnedFakeQuantize, logarithm: &Tensor) -> candle_core::Result<FakeQuantize> {
    Ok(op.at(transfer::number(logarithm, Cause::State)? as f32))
}
