//! Learned quantizer scales, trained as logarithms next to the model's parameters.

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

/// Largest 8-bit integer. The gradient of a scale is divided by the square root of this times the number
/// of values it scales, so that its magnitude is similar to that of weight gradients (Esser et al.,
/// *Learned Step Size Quantization*, 2020, section 2.2).
const MAX_INTEGER: f64 = 127.0;

/// Suffix of the names of parameters that hold the logarithm of a scale.
const LOGARITHM: &str = "/logarithm";

/// Name of the parameter that holds the logarithm of the scale of a tensor.
pub(super) fn logarithm_name(name: &str) -> String {
    format!("{name}{LOGARITHM}")
}

/// The name of the tensor whose scale has this name, or the name itself.
pub(super) fn parameter_name(name: &str) -> &str {
    name.strip_suffix(LOGARITHM).unwrap_or(name)
}

/// The next step if a learned scale is invalid.
pub(super) const LEARNED: &str = "lower `learning_rate`, or train with `scales: fixed`";

/// Factor on the gradient of a scale that is shared by this many values.
pub(super) fn gradient_factor(values: usize) -> f64 {
    1.0 / (values.max(1) as f64 * MAX_INTEGER).sqrt()
}

/// Activation quantizers with trained scales.
pub struct Quantizers {
    /// The training graph, in which the quantizers read the logarithm of their scale as a parameter.
    pub graph: Graph,
    /// Quantizers by the name of their output, with the number of values per sample.
    by_name: BTreeMap<String, (LearnedFakeQuantize, usize)>,
}

impl Quantizers {
    /// Collects the quantizers of a graph, except those whose consumer has a weight that is not trained:
    /// the scale is stored with that weight.
    pub fn new(graph: &Graph, trains: &dyn Fn(&str) -> bool) -> Result<Quantizers> {
        let fixed = |node: &&crate::ir::Node| layer_weight(graph, node).is_some_and(|weight| !trains(weight));
        let excluded: BTreeSet<_> = graph.nodes().iter().filter(fixed).filter_map(|node| node.inputs.first()).collect();
        let mut by_name = BTreeMap::new();
        for node in graph.nodes().iter().filter(|node| !excluded.contains(&node.output)) {
            if let Op::FakeQuantize(op) = node.op {
                let value = graph.value(node.output);
                let count = value.ty.shape.iter().filter_map(Dim::fixed).product();
                by_name.insert(value.name.clone(), (op.into(), count));
            }
        }
        let shape = |(_, value): (_, &crate::ir::Value)| Some((value.name.clone(), value.ty.shape.iter().map(Dim::fixed).collect::<Option<_>>()?));
        let mut shapes: BTreeMap<String, Vec<usize>> = graph.params().filter_map(shape).collect();
        shapes.extend(by_name.keys().map(|name| (logarithm_name(name), vec![1])));
        let graph = rebuild(graph, &shapes, &mut |mut step: Rewrite| match by_name.get(step.name) {
            Some((op, _)) => {
                step.inputs.push(step.builder.param(&logarithm_name(step.name), &[1])?);
                step.builder.node(step.name, *op, &step.inputs)
            }
            None => step.copy(),
        })?;
        Ok(Quantizers { graph, by_name })
    }

    /// Names of the logarithms, and the factors on their gradients.
    pub fn logarithms(&self) -> impl Iterator<Item = (String, f64)> {
        self.by_name.iter().map(|(name, (_, count))| (logarithm_name(name), gradient_factor(*count)))
    }

    /// Writes the learned scales into the graph of a model, and into the weights that store the scale of
    /// their input. Fails if a learned scale is not a positive normal number.
    pub fn write_to(&self, state: &Tensors, model: &mut Model) -> Result<()> {
        if self.by_name.is_empty() {
            return Ok(());
        }
        let mut learned = BTreeMap::new();
        for (name, (op, _)) in &self.by_name {
            let Some(kept) = state.get(&logarithm_name(name)) else { continue };
            let quantizer = with_learned_scale(*op, &kept.open()?).map_err(|e| Error::candle(format!("the scale of `{name}`"), e))?;
            require_scale(name, quantizer.scale, LEARNED)?;
            learned.insert(name.as_str(), quantizer);
        }
        let graph = model.graph()?;
        for node in graph.nodes() {
            let input = node.inputs.first().and_then(|id| learned.get(graph.value(*id).name.as_str()));
            let weight = layer_weight(&graph, node).and_then(|name| model.weights.by_name.get_mut(name));
            if let (Some(quantizer), Some(Encoding::Quantized(affine))) = (input, weight.map(|weight| &mut weight.encoding))
                && let ActivationScheme::Static(old) = &mut affine.activations
            {
                *old = Static::new(quantizer.scale, old.zero_point);
            }
        }
        let graph = rebuild(&graph, &model.weights, &mut |step: Rewrite| match learned.get(step.name) {
            Some(quantizer) => step.builder.node(step.name, *quantizer, &step.inputs),
            None => step.copy(),
        })?;
        model.changed_graph = Some(Arc::new(graph));
        Ok(())
    }

    /// Number of quantizers.
    pub fn count(&self) -> usize {
        self.by_name.len()
    }
}

/// Rejects scales that are not positive normal numbers.
pub(super) fn require_scale(name: &str, scale: f32, hint: &str) -> Result<()> {
    if scale.is_normal() && scale > 0.0 {
        return Ok(());
    }
    Err(Error::tensor(name, format!("its scale {scale} is not a positive normal number"), hint))
}

fn with_learned_scale(op: LearnedFakeQuantize, logarithm: &Tensor) -> candle_core::Result<FakeQuantize> {
    Ok(op.at(transfer::number(logarithm, Cause::State)? as f32))
}

#[cfg(test)]
mod tests {
    /// Without momentum and normalization, the factor is a factor of the learning rate (LSQ, section 2.2).
    #[test]
    fn gradients_of_shared_scales_are_reduced() {
        for (values, wanted) in [(0, 0.088_736), (1, 0.088_736), (4, 0.044_368), (1_000_000, 8.8736e-5)] {
            let factor = super::gradient_factor(values);
            assert!((factor / wanted - 1.0).abs() < 1e-4, "{values}: {factor}");
        }
    }
}
