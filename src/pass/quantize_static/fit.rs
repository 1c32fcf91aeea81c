//! Builds the quantized model from calibration statistics.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::prepare::Prepared;
use super::sites::Sites;
use super::{QuantizeStatic, scaling};
use crate::calibration::{ValueStatistics, with_headroom};
use crate::error::Result;
use crate::ir::ops::{FakeQuantize, Op};
use crate::ir::quantizers::{self, Quantizers, layer_weight};
use crate::ir::{Graph, Node, ValueId};
use crate::model::{self, Model};
use crate::pass::consumers::{readers, weight_input};
use crate::pass::weight_quantizer::WeightQuantizer;
use crate::pass::{ActivationTarget, GranularityKind};
use crate::store::{ActivationScheme, Bias, BiasForm, Codes, Computed, DType, Encoding, Granularity, Origin, QuantizationSpec, Scaled, Static, Weight, select};
use crate::work::Meter;

/// Quantizers of values by name, and whether all readers get the quantized value.
pub(super) type ValueQuantizers = BTreeMap<String, (FakeQuantize, bool)>;

/// Limits a range to that of the clamp that computes the value. Runtimes fuse a clamp into an integer
/// kernel only if the quantizer after it has no wider range.
fn clamp_range(graph: &Graph, value: ValueId, (low, high): (f32, f32)) -> (f32, f32) {
    match graph.producer(value).map(|node| &node.op) {
        // With a minimum above the maximum, the result is the maximum.
        Some(Op::Clip(op)) => (low.max(op.min.min(op.max).min(0.0) as f32), high.min(op.max.max(0.0) as f32)),
        _ => (low, high),
    }
}

impl QuantizeStatic {
    /// The quantizers of all sites. Without statistics, they are placeholders.
    pub(super) fn quantizers(
        &self,
        prepared: &Prepared,
        layers: &BTreeSet<String>,
        statistics: Option<&BTreeMap<String, ValueStatistics>>,
    ) -> Result<ValueQuantizers> {
        let graph = &prepared.graph;
        let sites = Sites::new(graph, layers);
        let mut quantizers = ValueQuantizers::new();
        let mut ranges: BTreeMap<ValueId, FakeQuantize> = BTreeMap::new();
        for (value, site) in &sites.values {
            let by = match (ranges.get(&site.scale_of), statistics.and_then(|statistics| statistics.get(&graph.value(site.scale_of).name))) {
                (Some(by), _) => *by,
                (None, None) => FakeQuantize::default(),
                (None, Some(observed)) => {
                    let range = self.range(observed, &self.costs(prepared, layers, site.scale_of)?);
                    self.quantizer(clamp_range(graph, site.scale_of, range))
                }
            };
            ranges.insert(site.scale_of, by);
            quantizers.insert(graph.value(*value).name.clone(), (by, site.all_readers));
        }
        Ok(quantizers)
    }

    /// The range of a value. `costs`: weights of the squared error of each channel.
    pub(super) fn range(&self, observed: &ValueStatistics, costs: &[f64]) -> (f32, f32) {
        if self.headroom { with_headroom(self.observer, observed, costs, self.percentile) } else { self.observer.range(observed, Some(costs), self.percentile) }
    }

    /// The quantizer of a range.
    pub(super) fn quantizer(&self, (low, high): (f32, f32)) -> FakeQuantize {
        // After an activation function, integer kernels require zero at the lower end.
        let is_unsigned = low == 0.0;
        if self.symmetric && !is_unsigned { FakeQuantize::symmetric(low, high) } else { FakeQuantize::from_range(low, high) }
    }

    /// Weights of the squared error of each channel of a value, summed over the quantized layers that
    /// read it.
    pub(super) fn costs(&self, prepared: &Prepared, layers: &BTreeSet<String>, value: ValueId) -> Result<Vec<f64>> {
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

    /// Quantizes these layers of the model.
    pub(super) fn fit(
        &self,
        prepared: &Prepared,
        quantizers: &ValueQuantizers,
        layers: &BTreeSet<String>,
        statistics: Option<&BTreeMap<String, ValueStatistics>>,
        meter: &Arc<Meter>,
    ) -> Result<Model> {
        let mut model = prepared.model.clone();
        let mut inserted = Quantizers { layers: input_quantizers(&prepared.graph, quantizers), ..Quantizers::default() };
        inserted.layers.retain(|weight, _| layers.contains(weight));
        for (value, (by, all_readers)) in quantizers {
            if *all_readers {
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
            self.quantize_layer(&mut model, prepared, node, by, statistics.and_then(|statistics| statistics.get(input)), meter)?;
        }
        if self.embeddings {
            let is_float_table =
                |name: &str, weight: &Weight| model::is_embedding(name, weight) && weight.encoding == Encoding::Dense && !layers.contains(name);
            let tables = prepared.model.weights.by_name.iter().filter(|(name, weight)| is_float_table(name, weight));
            for (name, weight) in tables.filter(|(name, weight)| !select::matches_any(&self.ignore, name, &weight.readers)) {
                let affine = self.affine(weight, Granularity::Channel, ActivationScheme::None);
                let quantizer = WeightQuantizer::new(name, weight, affine, self.weight_observer, meter);
                model.weights.by_name.insert(name.clone(), quantizer.weight());
            }
        }
        let graph = quantizers::insert(&prepared.graph, &model.weights, &inserted)?;
        let graph = self.fit_bodies((prepared, graph), layers, statistics, &mut model, meter)?;
        model.changed_graph = Some(Arc::new(graph));
        model.signed_activations |= self.target == ActivationTarget::Arm;
        Ok(model)
    }

    pub(super) fn affine(&self, weight: &Weight, granularity: Granularity, activations: ActivationScheme) -> QuantizationSpec {
        // Scales of small weights would be subnormal 16-bit floats.
        let scale_dtype = if matches!(weight.dtype, DType::F64 | DType::F16) { DType::F32 } else { weight.dtype };
        QuantizationSpec { codes: Codes::INT8, granularity, symmetric: true, scale_dtype, activations }
    }

    /// Quantizes the weight of a layer and corrects its bias for the mean rounding error. An f32 bias is
    /// rounded to the int32 grid of integer kernels.
    fn quantize_layer(
        &self,
        model: &mut Model,
        prepared: &Prepared,
        node: &Node,
        by: FakeQuantize,
        input: Option<&ValueStatistics>,
        meter: &Arc<Meter>,
    ) -> Result<()> {
        let graph = &prepared.graph;
        let name = weight_input(graph, node).to_owned();
        let weight = prepared.model.weights.get(&name)?.clone();
        let granularity = if self.granularity == GranularityKind::Tensor { Granularity::Tensor } else { Granularity::Channel };
        let zero_point = (!self.symmetric || by.zero_point != 0).then_some(by.zero_point as i8);
        let activations = if prepared.described { ActivationScheme::Static(Static::new(by.scale, zero_point)) } else { ActivationScheme::None };
        let quantizer = WeightQuantizer::new(&name, &weight, self.affine(&weight, granularity, activations), self.weight_observer, meter)
            .reduced(self.target == ActivationTarget::Portable)
            .with_bias(if input.is_some() { bias(graph, node, &prepared.model)? } else { None }, by.scale);
        let quantized = quantizer.weight();
        let read_once = |id: &ValueId| readers(graph, *id).0.len() == 1;
        if let (Some(id), Some(input)) = (node.inputs.get(2).filter(|id| read_once(id)), input) {
            let bias_name = graph.value(*id).name.clone();
            let mut bias = prepared.model.weights.get(&bias_name)?.clone();
            let dtype = bias.dtype;
            // If the layer is computed for several inputs, the correction would be valid for only one of
            // them.
            if self.bias_correction && node.inputs.get(1).is_some_and(read_once) {
                let (old, shape) = (bias.clone(), bias.shape.clone());
                let (means, before, after, full) = (input.channels().means(), weight, quantized.clone(), (name.clone(), bias_name.clone()));
                let groups = if let Op::Conv(op) = &node.op { op.groups.max(1) } else { 1 };
                let values = move || corrected(old.floats(&full.1)?, &before.floats(&full.0)?, &after.floats(&full.0)?, &means, groups);
                bias = Scaled { name: bias_name.clone(), upstream: Computed { values }.weight(shape), rows: None, columns: None, offset: 0.0 }.weight(dtype);
            }
            if dtype == DType::F32 {
                let rounded = Bias { name: bias_name.clone(), values: bias, weight: quantized.clone(), input_scale: by.scale, form: BiasForm::Floats };
                bias = rounded.weight().with_origin(Origin::Rescaled);
            }
            model.weights.by_name.insert(bias_name, bias);
        }
        model.weights.by_name.insert(name, quantized);
        Ok(())
    }
}

/// Quantizers of the inputs of layers, by the name of the weight. They are stored with the weight, so
/// that all inputs of a layer that is computed several times have the same scale.
pub(super) fn input_quantizers(graph: &Graph, quantizers: &ValueQuantizers) -> BTreeMap<String, FakeQuantize> {
    let mut layers: BTreeMap<String, FakeQuantize> = BTreeMap::new();
    for node in graph.nodes() {
        let input = node.inputs.first().and_then(|id| quantizers.get(&graph.value(*id).name));
        let (Some(weight), Some((by, _))) = (layer_weight(graph, node), input) else { continue };
        layers.entry(weight.to_owned()).and_modify(|all| *all = all.union(*by)).or_insert(*by);
    }
    layers
}

/// The bias of a layer, if it has one.
fn bias(graph: &Graph, node: &Node, model: &Model) -> Result<Option<Vec<f32>>> {
    let name = node.inputs.get(2).map(|id| &graph.value(*id).name);
    name.map(|name| model.weights.get(name)?.floats(name)).transpose()
}

/// Bias correction `bias + (W - Ŵ) · mean(x)` for the mean error of rounding the weights (Nagel et al.,
/// Data-Free Quantization, 2019). Treats padding as if it had the mean of its channel. Each of the
/// `groups` of a convolution reads different channels.
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

/// Values that are zero on all samples or that have no statistics, so that their quantizers are
/// meaningless.
pub(super) fn zero_values(quantizers: &ValueQuantizers, statistics: &BTreeMap<String, ValueStatistics>) -> Vec<String> {
    quantizers.keys().filter(|name| statistics.get(*name).is_none_or(|value| value.range() == (0.0, 0.0))).cloned().collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::pass::WeightObserver;

    /// Ranges end at the limits of a clamp, and contain zero.
    #[test]
    fn ranges_are_limited_by_clamps() {
        let limited = |min: &str, max: &str| {
            let text = format!("input x: float[batch, 4]\ny = Clip{{\"min\":{min},\"max\":{max}}}(x) -> float[batch, 4]\noutput y = y\n");
            let graph: Graph = text.parse().unwrap();
            let node = &graph.nodes()[0];
            assert_eq!(clamp_range(&graph, node.inputs[0], (-5.0, 8.0)), (-5.0, 8.0));
            clamp_range(&graph, node.output, (-5.0, 8.0))
        };
        assert_eq!(
            [("0.0", "0.5"), ("0.0", "9.0"), ("-2.0", "-1.0"), ("1.0", "3.0"), ("0.25", "-0.5")].map(|(min, max)| limited(min, max)),
            [(0.0, 0.5), (0.0, 8.0), (-2.0, 0.0), (0.0, 3.0), (-0.5, 0.0)]
        );
    }

    /// `bias + (W - Ŵ) · mean(x)`, computed by hand for a matrix, for two groups of two inputs with two
    /// taps each, and for a depthwise convolution of two channels with four taps.
    #[test]
    fn biases_are_corrected_for_the_mean_rounding_error() {
        let before = [1.0, 2.0, 3.0, 4.0, -1.0, 0.5, 0.25, 2.0];
        let after = [0.5, 2.0, 3.5, 4.0, -1.0, 0.0, 0.25, 1.0];
        let found = |means: &[f64], groups| corrected(vec![10.0, 20.0], &before, &after, means, groups).unwrap();
        assert_eq!(found(&[1.0, 5.0, 4.0, 3.0], 1), [10.0 + 0.5 - 2.0, 20.0 + 2.5 + 3.0]);
        // Taps of the first two channels lose 0.5 and -0.5, those of the last two 0.5 and 1.
        assert_eq!(found(&[2.0, 4.0, 8.0, 16.0], 2), [10.0 + 0.5 * 2.0 - 0.5 * 4.0, 20.0 + 0.5 * 8.0 + 16.0]);
        assert_eq!(found(&[2.0, 3.0], 2), [10.0, 20.0 + 1.5 * 3.0]);
    }

    proptest! {
        /// The float bias equals the dequantized integer bias, and rounding it again does not change it.
        #[test]
        fn biases_are_multiples_of_the_scale(weights in prop::collection::vec(-3f32..3.0, 12), values in prop::collection::vec(-2f32..2.0, 4), input_scale in 1e-3f32..0.2) {
            let dense = |values: &[f32], shape: Vec<usize>| {
                let values = values.to_vec();
                Computed { values: move || Ok(values.clone()) }.weight(shape)
            };
            let affine = QuantizeStatic::default().affine(&dense(&[], vec![0]), Granularity::Channel, ActivationScheme::None);
            let weight = WeightQuantizer::new("w", &dense(&weights, vec![4, 3]), affine, WeightObserver::Mse, &Arc::new(Meter::default())).weight();
            let of = |values: &Weight, form| Bias { name: "b".into(), values: values.clone(), weight: weight.clone(), input_scale, form }.weight();
            let integers = |values: &Weight| -> Vec<i32> {
                let mut codes = Vec::new();
                let read = |block: crate::store::Block| {
                    codes.extend(block.now.values.as_chunks().0.iter().map(|bytes| i32::from_le_bytes(*bytes)));
                    Ok(())
                };
                of(values, BiasForm::Integers).visit(1, &mut { read }).unwrap();
                codes
            };
            let original = dense(&values, vec![4]);
            let [scales, floats] = [BiasForm::Scales, BiasForm::Floats].map(|form| of(&original, form).floats("b").unwrap());
            let units = integers(&original);
            for at in 0..4 {
                prop_assert_eq!(floats[at], units[at] as f32 * scales[at]);
                prop_assert!((floats[at] - values[at]).abs() <= 0.5 * scales[at] + f32::EPSILON * values[at].abs());
            }
            prop_assert_eq!(integers(&of(&original, BiasForm::Floats)), units);
        }
    }
}
