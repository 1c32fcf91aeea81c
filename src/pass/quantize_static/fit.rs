//! From what was seen to a quantized model.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::prepare::Prepared;
use super::sites::Sites;
use super::{QuantizeStatic, scaling};
use crate::calibration::{ActivationHistogram, ValueStatistics, with_headroom};
use crate::error::Result;
use crate::ir::ops::{FakeQuantize, Op};
use crate::ir::quantizers::{self, Quantizers, layer_weight};
use crate::ir::{Graph, Kind, Node, ValueId};
use crate::model::{self, Model};
use crate::pass::integers::Integers;
use crate::pass::walk::{readers, weight_input};
use crate::pass::{ActivationTarget, GranularityKind};
use crate::store::{ActivationScheme, Affine, Bias, BiasForm, Codes, Computed, DType, Granularity, Origin, Scaled, Static, Weight};
use crate::work::Meter;

/// Quantizers of values by name, and whether everybody sees them.
pub(super) type Found = BTreeMap<String, (FakeQuantize, bool)>;

/// The part of a range that a value can take. Runtimes make a layer an integer kernel only where what cuts its values off cuts no more than the
/// quantizer behind it.
fn possible(graph: &Graph, value: ValueId, (low, high): (f32, f32)) -> (f32, f32) {
    match graph.value(value).kind {
        Kind::Node(at) => match &graph.nodes()[at].op {
            Op::Clip(op) => (low.max(op.min.min(0.0) as f32), high.min(op.max.max(0.0) as f32)),
            _ => (low, high),
        },
        _ => (low, high),
    }
}

impl QuantizeStatic {
    /// The quantizers of all sites; before anything was seen, steps of one.
    ///
    /// # Errors
    /// A weight cannot be read.
    pub(super) fn quantizers(&self, prepared: &Prepared, layers: &BTreeSet<String>, seen: Option<&BTreeMap<String, ValueStatistics>>) -> Result<Found> {
        let graph = &prepared.graph;
        let sites = Sites::of(graph, layers);
        let mut found = Found::new();
        let mut ranges: BTreeMap<ValueId, FakeQuantize> = BTreeMap::new();
        for (value, site) in &sites.values {
            let by = match (ranges.get(&site.like), seen.and_then(|seen| seen.get(&graph.value(site.like).name))) {
                (Some(by), _) => *by,
                (None, None) => FakeQuantize::default(),
                (None, Some(seen)) => {
                    let costs = self.costs(prepared, layers, site.like)?;
                    let (low, high) = if self.headroom {
                        with_headroom(self.observer, seen, &costs, self.percentile)
                    } else {
                        self.observer.range(seen, Some(&costs), self.percentile)
                    };
                    let (low, high) = possible(graph, site.like, (low, high));
                    // Behind an activation, integer kernels want zero at the bottom.
                    let half = low == 0.0;
                    if self.symmetric && !half { FakeQuantize::symmetric(low, high) } else { FakeQuantize::of_range(low, high) }
                }
            };
            ranges.insert(site.like, by);
            found.insert(graph.value(*value).name.clone(), (by, site.everyone));
        }
        Ok(found)
    }

    /// What an error of each channel of a value costs, summed over the quantized layers that read it.
    fn costs(&self, prepared: &Prepared, layers: &BTreeSet<String>, value: ValueId) -> Result<Vec<f64>> {
        let graph = &prepared.graph;
        let mut total: Vec<f64> = Vec::new();
        for node in graph.nodes() {
            let reads = matches!(node.op, Op::Linear(_) | Op::Conv(_)) && node.inputs[0] == value && layers.contains(weight_input(graph, node));
            if !reads {
                continue;
            }
            let costs = scaling::costs(&prepared.model, graph, node)?;
            if total.is_empty() {
                total = costs;
            } else {
                total.iter_mut().zip(costs).for_each(|(sum, cost)| *sum += cost);
            }
        }
        Ok(total)
    }

    /// The model with these layers quantized.
    pub(super) fn fit(
        &self,
        prepared: &Prepared,
        found: &Found,
        layers: &BTreeSet<String>,
        seen: Option<&BTreeMap<String, ValueStatistics>>,
        meter: &Arc<Meter>,
    ) -> Result<Model> {
        let mut model = prepared.model.clone();
        let mut inserted = Quantizers { layers: of_layers(&prepared.graph, found), ..Quantizers::default() };
        inserted.layers.retain(|weight, _| layers.contains(weight));
        for (value, (by, everyone)) in found {
            if *everyone {
                inserted.values.insert(value.clone(), *by);
            }
        }
        for node in prepared.graph.nodes() {
            let weight = weight_input(&prepared.graph, node);
            if !matches!(node.op, Op::Linear(_) | Op::Conv(_)) || !layers.contains(weight) {
                continue;
            }
            let input = &prepared.graph.value(node.inputs[0]).name;
            let Some(by) = inserted.layers.get(weight).copied() else { continue };
            self.layer(&mut model, prepared, node, by, seen.and_then(|seen| seen.get(input)), meter)?;
        }
        if self.embeddings {
            for (name, weight) in prepared.model.weights.by_name.iter().filter(|(name, w)| model::is_embedding(name, w) && !layers.contains(*name)) {
                let integers = Integers::new(name, weight, self.affine(weight, Granularity::Channel, ActivationScheme::None), self.weight_observer, meter);
                model.weights.by_name.insert(name.clone(), integers.weight());
            }
        }
        let graph = quantizers::insert(&prepared.graph, &model.weights, &inserted)?;
        model.changed_graph = Some(Arc::new(graph));
        model.signed_activations |= self.target == ActivationTarget::Arm;
        Ok(model)
    }

    pub(super) fn affine(&self, weight: &Weight, granularity: Granularity, activations: ActivationScheme) -> Affine {
        let scale_dtype = if weight.dtype == DType::F64 { DType::F32 } else { weight.dtype };
        Affine { codes: Codes::INT8, granularity, symmetric: true, scale_dtype, activations }
    }

    /// Gives a layer its int8 weight, and a bias that takes up what the rounding does on average; one of 32-bit floats is what a kernel
    /// of integers adds.
    fn layer(&self, model: &mut Model, prepared: &Prepared, node: &Node, by: FakeQuantize, seen: Option<&ValueStatistics>, meter: &Arc<Meter>) -> Result<()> {
        let graph = &prepared.graph;
        let name = weight_input(graph, node).to_owned();
        let weight = prepared.model.weights.get(&name)?.clone();
        let granularity = if self.granularity == GranularityKind::Tensor { Granularity::Tensor } else { Granularity::Channel };
        let zero_point = (!self.symmetric || by.zero_point != 0).then_some(by.zero_point as i8);
        let activations = if prepared.described { ActivationScheme::Static(Static::new(by.scale, zero_point)) } else { ActivationScheme::None };
        let integers = Integers::new(&name, &weight, self.affine(&weight, granularity, activations), self.weight_observer, meter)
            .reduced(self.target == ActivationTarget::Portable)
            .for_sums(if seen.is_some() { bias(graph, node, &prepared.model)? } else { None }, by.scale);
        let quantized = integers.weight();
        let read_once = |id: &ValueId| readers(graph, *id).0.len() == 1;
        if let (Some(id), Some(seen)) = (node.inputs.get(2).filter(|id| read_once(id)), seen) {
            let bias_name = graph.value(*id).name.clone();
            let mut bias = prepared.model.weights.get(&bias_name)?.clone();
            let dtype = bias.dtype;
            // Of several inputs, a bias could take up what is lost of one.
            if self.bias_correction && node.inputs.get(1).is_some_and(read_once) {
                let (old, shape) = (bias.clone(), bias.shape.clone());
                let (means, before, after, full) = (seen.channels().means(), weight, quantized.clone(), (name.clone(), bias_name.clone()));
                let groups = if let Op::Conv(op) = &node.op { op.groups.max(1) } else { 1 };
                let values = move || corrected(old.floats(&full.1)?, &before.floats(&full.0)?, &after.floats(&full.0)?, &means, groups);
                bias = Scaled { name: bias_name.clone(), upstream: Computed { values }.weight(shape), rows: None, columns: None, offset: 0.0 }.weight(dtype);
            }
            if dtype == DType::F32 {
                let rounded = Bias { name: bias_name.clone(), values: bias, weight: quantized.clone(), input_scale: by.scale, form: BiasForm::Floats };
                bias = rounded.weight().of_origin(Origin::Rescaled);
            }
            model.weights.by_name.insert(bias_name, bias);
        }
        model.weights.by_name.insert(name, quantized);
        Ok(())
    }
}

/// What layers round their inputs by, by the name of their weight: it is stored beside it, so that all inputs of a layer that is computed
/// several times are rounded alike.
pub(super) fn of_layers(graph: &Graph, found: &Found) -> BTreeMap<String, FakeQuantize> {
    let mut layers: BTreeMap<String, FakeQuantize> = BTreeMap::new();
    for node in graph.nodes() {
        let read = node.inputs.first().and_then(|id| found.get(&graph.value(*id).name));
        let (Some(weight), Some((by, _))) = (layer_weight(graph, node), read) else { continue };
        layers.entry(weight.to_owned()).and_modify(|all| *all = all.united(*by)).or_insert(*by);
    }
    layers
}

/// The bias of a layer, if it has one.
fn bias(graph: &Graph, node: &Node, model: &Model) -> Result<Option<Vec<f32>>> {
    let name = node.inputs.get(2).map(|id| &graph.value(*id).name);
    name.map(|name| model.weights.get(name)?.floats(name)).transpose()
}

/// `bias + (W - Ŵ) · mean(x)`: the mean error of rounding the weights (Nagel et al., Data-Free Quantization, 2019). Padding counts as if it
/// had the mean of its channel. Each of the `groups` of a convolution reads its own channels.
fn corrected(mut bias: Vec<f32>, before: &[f32], after: &[f32], means: &[f64], groups: usize) -> Result<Vec<f32>> {
    let outputs = bias.len().max(1);
    let row = before.len() / outputs;
    let inputs = (means.len() / groups).max(1);
    let (taps, per_group) = ((row / inputs).max(1), (outputs / groups).max(1));
    for (output, bias) in bias.iter_mut().enumerate() {
        let first = output / per_group * inputs;
        let lost = |at: usize| f64::from(before[output * row + at]) - f64::from(after[output * row + at]);
        let sum: f64 = (0..row).map(|at| lost(at) * means.get(first + at / taps).copied().unwrap_or(0.0)).sum();
        *bias += sum as f32;
    }
    Ok(bias)
}

/// Values that nothing was seen of, or nothing but zeros: their quantizers mean nothing.
pub(super) fn empty(found: &Found, seen: &BTreeMap<String, ValueStatistics>) -> Vec<String> {
    let is_empty = |histogram: &ActivationHistogram| histogram.range() == (0.0, 0.0);
    found.keys().filter(|name| seen.get(*name).is_none_or(|seen| is_empty(&seen.histogram))).cloned().collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::pass::WeightObserver;

    /// `bias + (W - Ŵ) · mean(x)`, by hand: of a matrix, of two groups of two inputs with two taps each, and of a depthwise
    /// convolution of two channels with four taps.
    #[test]
    fn biases_take_up_the_mean_error_of_rounding() {
        let before = [1.0, 2.0, 3.0, 4.0, -1.0, 0.5, 0.25, 2.0];
        let after = [0.5, 2.0, 3.5, 4.0, -1.0, 0.0, 0.25, 1.0];
        let found = |means: &[f64], groups| corrected(vec![10.0, 20.0], &before, &after, means, groups).unwrap();
        assert_eq!(found(&[1.0, 5.0, 4.0, 3.0], 1), [10.0 + 0.5 - 2.0, 20.0 + 2.5 + 3.0]);
        // Taps of the first two channels lose 0.5 and -0.5, those of the last two 0.5 and 1.
        assert_eq!(found(&[2.0, 4.0, 8.0, 16.0], 2), [10.0 + 0.5 * 2.0 - 0.5 * 4.0, 20.0 + 0.5 * 8.0 + 16.0]);
        assert_eq!(found(&[2.0, 3.0], 2), [10.0, 20.0 + 1.5 * 3.0]);
    }

    proptest! {
        /// A bias of floats is what the integers beside it stand for, and is rounded once.
        #[test]
        fn biases_are_whole_numbers_of_steps(weights in prop::collection::vec(-3f32..3.0, 12), values in prop::collection::vec(-2f32..2.0, 4), input_scale in 1e-3f32..0.2) {
            let dense = |values: &[f32], shape: Vec<usize>| {
                let values = values.to_vec();
                Computed { values: move || Ok(values.clone()) }.weight(shape)
            };
            let affine = QuantizeStatic::default().affine(&dense(&[], vec![0]), Granularity::Channel, ActivationScheme::None);
            let weight = Integers::new("w", &dense(&weights, vec![4, 3]), affine, WeightObserver::Mse, &Arc::new(Meter::default())).weight();
            let of = |values: &Weight, form| Bias { name: "b".into(), values: values.clone(), weight: weight.clone(), input_scale, form }.weight();
            let integers = |values: &Weight| -> Vec<i32> {
                let mut found = Vec::new();
                let read = |block: crate::store::Block| {
                    found.extend(block.now.values.as_chunks().0.iter().map(|bytes| i32::from_le_bytes(*bytes)));
                    Ok(())
                };
                of(values, BiasForm::Integers).visit(1, &mut { read }).unwrap();
                found
            };
            let given = dense(&values, vec![4]);
            let [scales, floats] = [BiasForm::Scales, BiasForm::Floats].map(|form| of(&given, form).floats("b").unwrap());
            let units = integers(&given);
            for at in 0..4 {
                prop_assert_eq!(floats[at], units[at] as f32 * scales[at]);
                prop_assert!((floats[at] - values[at]).abs() <= 0.5 * scales[at] + f32::EPSILON * values[at].abs());
            }
            prop_assert_eq!(integers(&of(&given, BiasForm::Floats)), units);
        }
    }
}
