//! Migrates scales from activations to weights, without cost at run time (Xiao et al., SmoothQuant, 2023;
//! Nagel et al., cross-layer equalization, 2019): the layer or normalization that computes a value
//! divides each channel by a factor, and the layers that read the value multiply by it. For 16-bit
//! weights, factors are powers of two, which are exact.
//!
//! With one scale per weight tensor, a factor also changes the rounding error of all other channels: of the
//! layer that divides, if its row becomes the largest one, and of the layers that multiply.

use std::collections::{BTreeMap, BTreeSet};

use rayon::prelude::*;

use super::relu6_limit::ClampLimit;
use crate::calibration::{ActivationObserver, Channels, Fold, ValueStatistics, WeightedError, validated_range};
use crate::error::Result;
use crate::ir::ops::Op;
use crate::ir::{Graph, Kind, Node};
use crate::model::Model;
use crate::pass::channel_equalization::{Chain, ScaledLayer, is_depthwise};
use crate::pass::consumers::{channels_second, weight_input};
use crate::store::DType;

/// Fraction of the largest channel below which a channel is considered silent.
const SILENT: f64 = 1e-3;
/// Steps per octave of the factors of 32-bit weights.
const FINE: f64 = 4.0;
/// Strength for chains with clamped values. The distance of a channel from the clamp varies between
/// samples, so that factors follow from the weights on both sides only (Nagel et al., 2019).
const BALANCED: f64 = 0.5;
/// Candidate strengths.
const STRENGTHS: [f64; 6] = [0.3, 0.45, 0.6, 0.7, 0.8, 0.9];
/// Minimum relative reduction of the error of a chain.
const MIN_GAIN: f64 = 0.02;
/// Minimum relative reduction for chains that need a multiplication at run time, or that contain a clamp.
const MIN_COSTLY_GAIN: f64 = 0.25;

/// SelectedWeights strength of a chain.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Choice {
    pub name: String,
    pub strength: f64,
    /// Ratio of the estimated squared errors of the layers' outputs after and before.
    pub gain: f64,
    /// Whether the chain needs a multiplication at run time.
    pub costly: bool,
}

/// How weights and activations are quantized after rescaling.
#[derive(Clone, Copy)]
pub(super) struct Settings<'l> {
    /// Weights of the quantized layers.
    pub layers: &'l BTreeSet<String>,
    /// Whether a weight has one scale instead of one per output channel.
    pub per_tensor: bool,
    /// Strength specified by the user.
    pub fixed: Option<f64>,
    pub observer: ActivationObserver,
    pub percentile: f64,
}

/// Rescales chains if it reduces the quantization error. Updates the weights of the model and the
/// statistics.
pub(super) fn rescale(
    chains: &[Chain],
    graph: &Graph,
    model: &mut Model,
    statistics: &mut BTreeMap<String, ValueStatistics>,
    settings: Settings,
) -> Result<Vec<Choice>> {
    let Settings { fixed, observer, percentile, .. } = settings;
    let mut choices = Vec::new();
    for chain in chains {
        // Experts that are stored as one tensor have no separate weights.
        let is_stored = |name: &String| model.weights.by_name.contains_key(name);
        let is_complete = chain.producers.iter().map(|(name, _)| name).chain(chain.consumers.iter().map(|layer| &layer.weight)).all(is_stored);
        if !is_complete || chain.mixed && fixed.is_none() {
            continue;
        }
        let Some(estimator) = ErrorEstimator::new(chain, graph, model, statistics, settings)? else { continue };
        let unchanged = vec![vec![0.0; chain.width]; estimator.folds()];
        let fine = chain.producers.iter().all(|(name, _)| model.weights.by_name.get(name).is_some_and(|w| matches!(w.dtype, DType::F32 | DType::F64)));
        // With an offset, 16-bit weights are not scaled exactly by powers of two.
        if chain.offset != 0.0 && !fine {
            continue;
        }
        let steps = if fine { FINE } else { 1.0 };
        let before = estimator.error(&unchanged, observer, percentile);
        let candidates = if chain.clamps.is_empty() { &STRENGTHS[..] } else { &[BALANCED] };
        let strengths: Vec<f64> = fixed.map_or(candidates.to_vec(), |strength| vec![strength]);
        // Other observers than MSE copy the statistics, so that they run sequentially to save memory.
        let per_job = if observer == ActivationObserver::Mse { 1 } else { strengths.len() };
        let tried = strengths.into_par_iter().with_min_len(per_job).map(|strength| {
            let folds: Vec<Vec<f64>> = (0..estimator.folds()).map(|fold| estimator.powers(strength, steps, Some(fold))).collect();
            (estimator.error(&folds, observer, percentile), strength)
        });
        let tried: Vec<_> = tried.collect();
        let Some((error, strength)) = tried.into_iter().min_by(|a, b| a.0.total_cmp(&b.0)) else { continue };
        let powers = estimator.powers(strength, steps, None);
        let gain = if chain.costly || !chain.clamps.is_empty() { MIN_COSTLY_GAIN } else { MIN_GAIN };
        if powers.iter().all(|p| *p == 0.0) || (fixed.is_none() && error > before * (1.0 - gain)) {
            continue;
        }
        let factors: Vec<f32> = powers.iter().map(|power| power.exp2() as f32).collect();
        chain.rescale(&factors, |name, scaled| {
            let weight = scaled(model.weights.get(name)?.clone());
            model.weights.by_name.insert(name.to_owned(), weight);
            Ok(())
        })?;
        for (value, index) in &chain.values {
            if let Some(value) = statistics.get_mut(&graph.value(*value).name) {
                value.multiply(&index.iter().map(|channel| (-powers[*channel]).exp2()).collect::<Vec<_>>());
            }
        }
        choices.push(Choice { name: chain.name.clone(), strength, gain: error / before, costly: chain.costly });
    }
    Ok(choices)
}

/// Estimates the error of the layers of a chain as a function of the factors.
struct ErrorEstimator<'s> {
    width: usize,
    consumers: Vec<Consumer<'s>>,
    producer: Option<Producer>,
    limit: Option<ClampLimit>,
    per_tensor: bool,
}

/// The quantized layer that computes the channels, if its weight has one scale. With a scale per channel,
/// factors do not change its relative rounding error.
struct Producer {
    /// Largest magnitude of the weights of each channel.
    largest: Vec<f64>,
    /// Mean square of the inputs of each channel, summed over its weights.
    energy: Vec<f64>,
    /// Sum of squares of the weights by which the consumers multiply each channel.
    squares: Vec<f64>,
}

/// A layer that reads a value.
struct Consumer<'s> {
    layer: LayerWeights,
    statistics: &'s ValueStatistics,
    /// Channel statistics over all samples.
    channels: Channels,
    /// Divisions of the samples for cross-validation; empty without several groups of samples.
    folds: Vec<Fold>,
    index: &'s [usize],
    scales: Scales,
}

/// Scales of the weight of a consumer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Scales {
    Channel,
    Tensor,
    /// The weight stays in floats.
    None,
}

/// Weights of the squared error of each input of a layer: the sums of squares of its weights.
pub(super) fn costs(model: &Model, graph: &Graph, node: &Node) -> Result<Vec<f64>> {
    let name = weight_input(graph, node);
    let shape = &graph.value(node.inputs[0]).ty.shape;
    let axis = if channels_second(graph, node.inputs[0]) { shape.get(1) } else { shape.last() };
    let inputs = axis.and_then(|d| d.fixed()).unwrap_or(0);
    let depthwise = is_depthwise(graph, node);
    let grouped = matches!(&node.op, Op::Conv(op) if op.groups > 1);
    if grouped && !depthwise || inputs == 0 {
        return Ok(Vec::new());
    }
    let first = depthwise || matches!(&node.op, Op::Linear(op) if op.input_major);
    let layer = ScaledLayer { value: node.inputs[0], weight: name.to_owned(), index: (0..inputs).collect(), first, depthwise };
    Ok(LayerWeights::new(model, &layer)?.squares)
}

/// Reductions of a weight `[out, in, ...]`.
struct LayerWeights {
    /// Largest magnitude for each output and input, `[out, in]`.
    largest: Vec<f32>,
    /// Sum of squares for each input.
    squares: Vec<f64>,
    /// Largest magnitude for each input.
    columns: Vec<f32>,
    inputs: usize,
    /// Number of weights for each output and input: the size of a kernel.
    taps: usize,
    depthwise: bool,
}

impl LayerWeights {
    fn new(model: &Model, consumer: &ScaledLayer) -> Result<LayerWeights> {
        let weight = model.weights.get(&consumer.weight)?;
        let values = weight.floats(&consumer.weight)?;
        let inputs = consumer.index.len();
        // In the layout `[in, out]`, inputs are rows. Each row of a depthwise weight has one input.
        let (taps, columns, inputs_are_rows) = match weight.shape[..] {
            [rows, columns] if consumer.first && rows == inputs => (1, columns, true),
            _ if consumer.first => (weight.row(), 1, true),
            _ => (weight.shape.get(2..).unwrap_or(&[]).iter().product::<usize>(), inputs, false),
        };
        let (taps, columns) = (taps.max(1), columns.max(1));
        let outputs = values.len() / (inputs * taps).max(1);
        let largest = vec![0.0; outputs.max(1) * inputs];
        let mut layer = LayerWeights { largest, squares: vec![0.0; inputs], columns: vec![0.0; inputs], inputs, taps, depthwise: consumer.depthwise };
        for (row, kernels) in values.chunks(columns * taps).enumerate() {
            for (column, kernel) in kernels.chunks(taps).enumerate() {
                let (output, input) = if inputs_are_rows { (column, row) } else { (row, column) };
                let largest = kernel.iter().fold(0f32, |largest, value| largest.max(value.abs()));
                if let Some(all) = layer.largest.get_mut(output * inputs + input) {
                    *all = all.max(largest);
                }
                layer.columns[input] = layer.columns[input].max(largest);
                kernel.iter().for_each(|value| layer.squares[input] += f64::from(*value) * f64::from(*value));
            }
        }
        Ok(layer)
    }
}

impl<'s> ErrorEstimator<'s> {
    /// Returns `None` if no consumer has channel statistics.
    fn new(
        chain: &'s Chain,
        graph: &Graph,
        model: &Model,
        statistics: &'s BTreeMap<String, ValueStatistics>,
        settings: Settings,
    ) -> Result<Option<ErrorEstimator<'s>>> {
        let per_tensor = settings.per_tensor;
        let mut consumers = Vec::new();
        for layer in &chain.consumers {
            let Some(input) = statistics.get(&graph.value(layer.value).name) else { continue };
            let channels = input.channels();
            if channels.has_histograms() && channels.channels() == layer.index.len() {
                let scales = match (per_tensor, settings.layers.contains(&layer.weight)) {
                    (false, _) => Scales::Channel,
                    (true, true) => Scales::Tensor,
                    (true, false) => Scales::None,
                };
                let weights = LayerWeights::new(model, layer)?;
                consumers.push(Consumer { layer: weights, statistics: input, channels, folds: input.folds(), index: &layer.index, scales });
            }
        }
        let limit = if chain.clamps.is_empty() { None } else { Some(ClampLimit::new(chain, graph, model, statistics)?) };
        let producer = if per_tensor { Producer::new(chain, graph, model, statistics, settings.layers, &consumers)? } else { None };
        Ok((!consumers.is_empty()).then_some(ErrorEstimator { width: chain.width, consumers, producer, limit, per_tensor }))
    }

    /// `log2 (a^strength / w^(1 - strength))` for each channel, rounded to multiples of `1 / steps`, with
    /// mean zero. Activations are those of the fitted samples of a fold, or of all samples.
    fn powers(&self, strength: f64, steps: f64, fold: Option<usize>) -> Vec<f64> {
        let (mut activations, mut weights) = (vec![0f64; self.width], vec![0f64; self.width]);
        for consumer in &self.consumers {
            let channels = fold.and_then(|fold| consumer.folds.get(fold)).map_or(&consumer.channels, |fold| &fold.fitted);
            let largest = channels.largest();
            for (input, channel) in consumer.index.iter().enumerate() {
                activations[*channel] = activations[*channel].max(f64::from(largest[input]));
                weights[*channel] = weights[*channel].max(f64::from(consumer.layer.columns[input]));
            }
        }
        if let Some(limit) = &self.limit {
            return limit.powers(&weights, strength, steps);
        }
        // Silent channels get a minimum magnitude, so that their weights do not dominate the scale of a
        // row. With one scale per weight, they are not rescaled: the division would make their row the
        // largest one of the producer.
        let floor = activations.iter().copied().fold(0.0, f64::max) * SILENT;
        let log = |(a, w): (&f64, &f64)| {
            if floor > 0.0 && *w > 0.0 && !(self.per_tensor && *a < floor) {
                let a = a.max(floor);
                strength * a.log2() - (1.0 - strength) * w.log2()
            } else {
                f64::NAN
            }
        };
        let logs: Vec<f64> = activations.iter().zip(&weights).map(log).collect();
        let known: Vec<f64> = logs.iter().copied().filter(|l| l.is_finite()).collect();
        let mean = known.iter().sum::<f64>() / known.len().max(1) as f64;
        logs.iter().map(|l| if l.is_finite() { (((l - mean) * steps).round() / steps).clamp(-12.0, 12.0) } else { 0.0 }).collect()
    }

    /// Number of folds of the cross-validation.
    fn folds(&self) -> usize {
        self.consumers.iter().map(|consumer| consumer.folds.len()).max().unwrap_or(0).max(1)
    }

    /// Estimated squared error of the layers' outputs if channels are divided by `2ᵖ`, with
    /// cross-validation of the powers and of the ranges: `powers` holds those of each fold.
    fn error(&self, powers: &[Vec<f64>], observer: ActivationObserver, percentile: f64) -> f64 {
        let producer = self.producer.as_ref().map_or(0.0, |producer| powers.iter().map(|powers| producer.error(powers)).sum());
        self.consumers.iter().map(|consumer| consumer.error(powers, observer, percentile)).sum::<f64>() + producer / powers.len().max(1) as f64
    }
}

impl Producer {
    /// Returns `None` if the layer stays in floats or has no weights of its own for each channel.
    fn new(
        chain: &Chain,
        graph: &Graph,
        model: &Model,
        statistics: &BTreeMap<String, ValueStatistics>,
        layers: &BTreeSet<String>,
        consumers: &[Consumer],
    ) -> Result<Option<Producer>> {
        let Some((name, second)) = chain.producers.first().filter(|(name, _)| layers.contains(name)) else { return Ok(None) };
        let Some(Kind::Node(at)) = chain.values.first().map(|(value, _)| graph.value(*value).kind) else { return Ok(None) };
        let node = &graph.nodes()[at];
        let input = node.inputs.first().and_then(|input| statistics.get(&graph.value(*input).name));
        let Some(input) = input.filter(|_| weight_input(graph, node) == name) else { return Ok(None) };
        let weight = model.weights.get(name)?;
        let mut largest = vec![0f64; chain.width];
        for (at, value) in weight.floats(name)?.iter().enumerate() {
            let channel = if *second { at % chain.width.max(1) } else { at / weight.row().max(1) };
            if let Some(largest) = largest.get_mut(channel) {
                *largest = largest.max(f64::from(value.abs()));
            }
        }
        let taps = weight.shape.get(2..).unwrap_or(&[]).iter().product::<usize>().max(1);
        let groups = if let Op::Conv(op) = &node.op { op.groups.max(1) } else { 1 };
        let inputs = input.channels().mean_squares();
        let of_group: Vec<f64> = inputs.chunks(inputs.len().div_ceil(groups).max(1)).map(|squares| squares.iter().sum::<f64>() * taps as f64).collect();
        let energy = (0..chain.width).map(|channel| of_group.get(channel * groups / chain.width).copied().unwrap_or(0.0)).collect();
        let mut squares = vec![0f64; chain.width];
        for consumer in consumers {
            for (channel, square) in consumer.index.iter().zip(&consumer.layer.squares) {
                squares[*channel] += square;
            }
        }
        Ok(Some(Producer { largest, energy, squares }))
    }

    /// Estimated squared error of the consumers' outputs due to the rounding of the producer's weights, if
    /// channels are divided by `2ᵖ`.
    fn error(&self, powers: &[f64]) -> f64 {
        let step = self.largest.iter().zip(powers).map(|(largest, power)| largest * (-power).exp2()).fold(0f64, f64::max) / 127.5;
        let gains = self.energy.iter().zip(&self.squares).zip(powers);
        step * step / 12.0 * gains.map(|((energy, square), power)| energy * square * (2.0 * power).exp2()).sum::<f64>()
    }
}

impl Consumer<'_> {
    fn error(&self, powers: &[Vec<f64>], observer: ActivationObserver, percentile: f64) -> f64 {
        let by_fold = powers.iter().enumerate().map(|(fold, powers)| {
            let by: Vec<f64> = self.index.iter().map(|channel| powers[*channel].exp2()).collect();
            let inverse: Vec<f64> = by.iter().map(|by| 1.0 / by).collect();
            let columns: Vec<f64> = self.layer.squares.iter().zip(&by).map(|(square, by)| square * by * by).collect();
            let validated = self.folds.get(fold).and_then(|fold| validated_range(observer, self.statistics, fold, Some(&inverse), &columns, percentile));
            let cost = |(low, high): (f32, f32), error: &WeightedError| error.error((low.into(), high.into()));
            let held_out = validated.map(|(range, error)| cost(range, &error) / self.folds[fold].held_out.count().max(1) as f64);
            let activations = held_out.unwrap_or_else(|| {
                let mut divided = self.statistics.clone();
                divided.multiply(&inverse);
                let range = observer.range(&divided, Some(&columns), percentile);
                let error = WeightedError::from_channels(&self.channels, Some(&inverse), &columns);
                error.map_or(0.0, |error| cost(range, &error)) / self.channels.count().max(1) as f64
            });
            match self.scales {
                Scales::None => activations,
                Scales::Channel if self.layer.depthwise => activations,
                Scales::Channel | Scales::Tensor => activations + self.rounding(&by, &inverse),
            }
        });
        by_fold.sum::<f64>() / powers.len().max(1) as f64
    }

    /// Estimated squared error due to the rounding of the weights.
    fn rounding(&self, by: &[f64], inverse: &[f64]) -> f64 {
        let energy: f64 = self.channels.mean_squares().iter().zip(inverse).map(|(square, by)| square * by * by).sum();
        let rows = self.layer.largest.chunks_exact(self.layer.inputs.max(1));
        let largest = |row: &[f32]| row.iter().zip(by).map(|(w, by)| f64::from(*w) * by).fold(0f64, f64::max);
        let error = |largest: f64| (largest / 127.5).powi(2) / 12.0 * energy;
        if self.scales == Scales::Tensor {
            let count = rows.len() * self.layer.taps;
            return error(rows.map(largest).fold(0f64, f64::max)) * count as f64;
        }
        rows.map(|row| error(largest(row))).sum()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use candle_core::{Device, Tensor};

    use super::*;
    use crate::exec::Inputs;
    use crate::pass::testing::{self, calibrated, numbers};
    use crate::pass::{GranularityKind, QuantizeStatic, Smooth};
    use crate::store::{Bytes, Encoding, Weight};

    /// With one scale per weight, a factor that makes a silent channel's row the largest one would increase
    /// the rounding error of all other rows.
    #[test]
    fn silent_channels_do_not_enlarge_the_scale_of_a_tensor() {
        let text = "input x: float[batch, 8]\nparam a.weight: float[8, 8]\nparam a.bias: float[8]\nparam b.weight: float[8, 8]\n\
            h = Linear{\"input_major\":false}(x, a.weight, a.bias) -> float[batch, 8]\nr = Relu(h) -> float[batch, 8]\n\
            y = Linear{\"input_major\":false}(r, b.weight) -> float[batch, 8]\noutput y = y\n";
        let values = |name: &str, shape: &[usize]| match name {
            "a.bias" => (0..8).map(|channel| if channel == 3 { -30.0 } else { 1.0 }).collect(),
            _ => numbers(shape),
        };
        let (_folder, model) = testing::model(text, values).unwrap();
        let inputs = Inputs::from([("x".to_owned(), Tensor::from_vec(values("x", &[16, 8]), (16, 8), &Device::Cpu).unwrap())]);
        let row = |model: &Model| model.weights.get("a.weight").unwrap().floats("a.weight").unwrap()[3 * 8..4 * 8].to_vec();
        for smooth in [Smooth::Auto, Smooth::Free, Smooth::Strength(0.9)] {
            let pass = QuantizeStatic { smooth, granularity: GranularityKind::Tensor, ..QuantizeStatic::default() };
            let (prepared, ..) = calibrated(&inputs, |context| pass.analyze_and_rescale(model.clone(), false, context)).unwrap().unwrap();
            assert_eq!(row(&prepared.model), row(&model), "{smooth}");
        }
    }

    #[test]
    fn the_error_of_a_producer_follows_from_its_largest_row() {
        let producer = Producer { largest: vec![1.0, 0.5], energy: vec![2.0, 3.0], squares: vec![5.0, 7.0] };
        let unit = 1.0 / 127.5f64.powi(2) / 12.0;
        let close = |found: f64, expected: f64| assert!((found / expected - 1.0).abs() < 1e-12, "{found} instead of {expected}");
        close(producer.error(&[0.0, 0.0]), unit * (10.0 + 21.0));
        // The second row grows to eight, and its error is multiplied by less.
        close(producer.error(&[0.0, -4.0]), 64.0 * unit * (10.0 + 21.0 / 256.0));
    }

    #[test]
    fn reductions_of_a_weight_do_not_depend_on_its_layout() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models/llama");
        let mut model = Model::open(folder).unwrap();
        let value = model.graph().unwrap().nodes()[0].output;
        // Shape, whether the inputs are the first axis, and whether each output has one input.
        let layouts = [(vec![4, 3], false, false), (vec![4, 3, 2, 2], false, false), (vec![3, 4], true, false), (vec![3, 1, 2, 2], true, true)];
        for (shape, first, depthwise) in layouts {
            let (inputs, inner) = (3, shape[2..].iter().product::<usize>());
            let outputs = if depthwise { 1 } else { 4 };
            let values: Vec<f32> = (0..inputs * outputs * inner).map(|i| (i * 29 % 64) as f32 - 31.0).collect();
            let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            let weight = Weight::new(DType::F32, shape.clone(), Encoding::Dense, Arc::new(Bytes { dtype: DType::F32, bytes }));
            model.weights.by_name.insert("w".into(), weight);
            let layer = ScaledLayer { value, weight: "w".into(), index: (0..inputs).collect(), first, depthwise };
            let found = LayerWeights::new(&model, &layer).unwrap();
            let element = |output: usize, input: usize, at: usize| values[if first { input * outputs + output } else { output * inputs + input } * inner + at];
            for input in 0..inputs {
                let all = || (0..outputs).flat_map(|output| (0..inner).map(move |at| element(output, input, at)));
                assert_eq!(found.columns[input], all().fold(0f32, |most, x| most.max(x.abs())), "{shape:?}");
                assert_eq!(found.squares[input], all().map(|x| f64::from(x * x)).sum::<f64>(), "{shape:?}");
                for output in 0..outputs {
                    let largest = (0..inner).fold(0f32, |most, at| most.max(element(output, input, at).abs()));
                    assert_eq!(found.largest[output * inputs + input], largest, "{shape:?}");
                }
            }
        }
    }
}
