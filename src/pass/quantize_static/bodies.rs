//! Layers in bodies of `If`, `Loop` and `Scan` of ONNX files. Their inputs are observed as outputs of the
//! nodes that contain the bodies, and quantized in the bodies.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::prepare::Prepared;
use super::{GranularityKind, QuantizeStatic};
use crate::calibration::{Axis, Request, ValueStatistics};
use crate::error::{Error, Result, counted};
use crate::ir::Graph;
use crate::ir::ops::FakeQuantize;
use crate::model::Model;
use crate::onnx::control_flow::{self, observed_input};
use crate::pass::ActivationTarget;
use crate::pass::weight_quantizer::WeightQuantizer;
use crate::store::{ActivationScheme, Granularity};
use crate::work::Meter;

/// The weights of the selected layers in bodies.
fn selected(graph: &Graph, layers: &BTreeSet<String>) -> BTreeSet<String> {
    control_flow::layers(graph).into_keys().filter(|weight| layers.contains(weight)).collect()
}

/// The graph with the inputs of the selected layers in bodies as values, and the statistics to collect of
/// them. `joint`: with the histogram of all channels.
pub(super) fn observed(prepared: &Prepared, requests: &mut BTreeMap<String, Request>, joint: bool) -> Result<Graph> {
    let weights = selected(&prepared.graph, &prepared.layers);
    if weights.is_empty() {
        return Ok(prepared.graph.clone());
    }
    requests.extend(weights.iter().map(|weight| (observed_input(weight), Request { axis: Axis::Last, histograms: true, joint, weights: None })));
    control_flow::observed(&prepared.graph, &prepared.model.weights, &weights)
}

/// Deselects layers in bodies without statistics of their inputs, and notes the reasons. `graph` is that of
/// [`observed`], which has run on batches of the size that was requested.
///
/// # Errors
/// If no layer remains.
pub(super) fn deselect_unobserved(
    prepared: &mut Prepared,
    graph: &Graph,
    statistics: &BTreeMap<String, ValueStatistics>,
    batch_size: Option<usize>,
) -> Result<()> {
    let failures = control_flow::failures(graph);
    let is_observed = |name: &String| !failures.contains_key(name) && statistics.get(name).is_some_and(|found| found.range() != (0.0, 0.0));
    let weights = selected(&prepared.graph, &prepared.layers).into_iter();
    let unobserved: Vec<String> = weights.filter(|weight| !is_observed(&observed_input(weight))).collect();
    let Some(first) = unobserved.first() else { return Ok(()) };
    let reason = failures.get(&observed_input(first)).map_or_else(
        || match batch_size.filter(|size| *size > 1) {
            Some(size) => format!("no calibration sample reaches it in batches of {size}, of which each runs one branch for all samples: omit `batch_size`"),
            None => "no calibration sample reaches it with values other than zero".to_owned(),
        },
        |reason| format!("its input could not be observed: {reason}"),
    );
    if unobserved.len() == prepared.layers.len() {
        let hint = "use other calibration samples, or `quantize-dynamic`, which needs none";
        return Err(Error::tensor(first, format!("cannot be quantized: {reason}"), hint));
    }
    prepared
        .notes
        .push(format!("{} in bodies of control flow operators left in floats (the first: `{first}`, because {reason})", counted(unobserved.len(), "layer")));
    prepared.layers.retain(|weight| !unobserved.contains(weight));
    Ok(())
}

impl QuantizeStatic {
    /// Quantizes these layers in bodies: the weights of the model, and the inputs in the graph. Without
    /// statistics, quantizers are placeholders.
    pub(super) fn fit_bodies(
        &self,
        (prepared, graph): (&Prepared, Graph),
        layers: &BTreeSet<String>,
        statistics: Option<&BTreeMap<String, ValueStatistics>>,
        model: &mut Model,
        meter: &Arc<Meter>,
    ) -> Result<Graph> {
        let mut quantizers: BTreeMap<String, FakeQuantize> = BTreeMap::new();
        for weight in selected(&prepared.graph, layers) {
            let stored = prepared.model.weights.get(&weight)?.clone();
            let by = match statistics {
                None => FakeQuantize::default(),
                Some(statistics) => match statistics.get(&observed_input(&weight)) {
                    Some(found) => self.quantizer(self.range(found, &costs(&stored.floats(&weight)?, &stored.shape))),
                    None => continue,
                },
            };
            let granularity = if self.granularity == GranularityKind::Tensor { Granularity::Tensor } else { Granularity::Channel };
            let affine = self.affine(&stored, granularity, ActivationScheme::None);
            let quantizer = WeightQuantizer::new(&weight, &stored, affine, self.weight_observer, meter).reduced(self.target == ActivationTarget::Portable);
            model.weights.by_name.insert(weight.clone(), quantizer.weight());
            quantizers.insert(weight, by);
        }
        control_flow::quantized(&graph, &model.weights, &quantizers)
    }
}

/// Weights of the squared error of each input channel: sums of the squares of a weight `[out, in, ...]`.
fn costs(weight: &[f32], shape: &[usize]) -> Vec<f64> {
    let inputs = shape.get(1).copied().unwrap_or(0);
    let taps = shape.iter().skip(2).product::<usize>().max(1);
    let mut sums = vec![0.0; inputs];
    for (at, value) in weight.iter().enumerate() {
        if let Some(sum) = sums.get_mut(at / taps % inputs.max(1)) {
            *sum += f64::from(*value) * f64::from(*value);
        }
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_are_sums_of_squares_for_each_input() {
        assert_eq!(costs(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], &[2, 3]), [17.0, 29.0, 45.0]);
        assert_eq!(costs(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], &[2, 2, 1, 2]), [66.0, 138.0]);
    }
}
