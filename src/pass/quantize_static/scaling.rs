//! Moving range from activations to weights, at no cost when the model runs (Xiao et al., SmoothQuant, 2023; Nagel et al.,
//! cross-layer equalization, 2019): the layer or normalisation that makes a value divides each channel by a number, the layers
//! that read it multiply by the same. Where weights have 16 bits, numbers are powers of two, so that nothing is rounded.

use std::collections::BTreeMap;

use rayon::prelude::*;

use super::ceiling::Ceiling;
use crate::calibration::{ActivationObserver, Channels, ValueStatistics, Weighted, crossed};
use crate::error::Result;
use crate::ir::ops::Op;
use crate::ir::{Graph, Node};
use crate::model::Model;
use crate::pass::chains::{Chain, ScaledLayer, is_depthwise};
use crate::pass::walk::{channels_second, weight_input};
use crate::store::DType;

/// Part of the largest channel below which a channel counts as silent.
const SILENT: f64 = 1e-3;
/// Steps from one power of two to the next where nothing stands against it.
const FINE: f64 = 4.0;
/// The strength where values are cut off: what samples of one kind hold says little of how far a channel is from its ceiling for
/// others, so that the weights on both sides alone decide (Nagel et al., 2019).
const BALANCED: f64 = 0.5;
/// Strengths that are tried: how much of an activation's range goes over to the weights.
const STRENGTHS: [f64; 6] = [0.3, 0.45, 0.6, 0.7, 0.8, 0.9];
/// A chain is changed for a gain of so much of its error.
const GAIN: f64 = 0.02;
/// Where it takes a multiplication when the model runs, or cuts off what no sample reached, for a gain of so much.
const COSTLY_GAIN: f64 = 0.25;

/// What was chosen for a chain.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Choice {
    pub name: String,
    pub strength: f64,
    /// Estimated squared error of the layers' outputs, after and before.
    pub gain: f64,
    /// Whether it takes a multiplication when the model runs.
    pub costly: bool,
}

/// Rescales chains by what was seen of their values: the weights of the model, and what was seen, change alike.
pub(super) fn rescale(
    chains: &[Chain],
    graph: &Graph,
    model: &mut Model,
    seen: &mut BTreeMap<String, ValueStatistics>,
    fixed: Option<f64>,
    observer: ActivationObserver,
    percentile: f64,
) -> Result<Vec<Choice>> {
    let mut choices = Vec::new();
    for chain in chains {
        // Experts that are stored as one tensor have no weights of their own.
        let is_stored = |name: &String| model.weights.by_name.contains_key(name);
        let is_whole = chain.makers.iter().map(|(name, _)| name).chain(chain.sinks.iter().map(|sink| &sink.weight)).all(is_stored);
        if !is_whole || chain.mixed && fixed.is_none() {
            continue;
        }
        let Some(measure) = Measure::of(chain, graph, model, seen)? else { continue };
        let still = vec![0.0; chain.width];
        let fine = chain.makers.iter().all(|(name, _)| model.weights.by_name.get(name).is_some_and(|w| matches!(w.dtype, DType::F32 | DType::F64)));
        // What 16 bits store of such a norm is not scaled exactly by a power of two.
        if chain.offset != 0.0 && !fine {
            continue;
        }
        let before = measure.error(&still, observer, percentile);
        let tries = if chain.ceilings.is_empty() { &STRENGTHS[..] } else { &[BALANCED] };
        let strengths: Vec<f64> = fixed.map_or(tries.to_vec(), |strength| vec![strength]);
        // Other observers than the least error take copies of what was seen.
        let together = if observer == ActivationObserver::Mse { 1 } else { strengths.len() };
        let tried = strengths.into_par_iter().with_min_len(together).map(|strength| {
            let powers = measure.powers(strength, if fine { FINE } else { 1.0 });
            (measure.error(&powers, observer, percentile), strength, powers)
        });
        let tried: Vec<_> = tried.collect();
        let Some((error, strength, powers)) = tried.into_iter().min_by(|a, b| a.0.total_cmp(&b.0)) else { continue };
        let gain = if chain.costly || !chain.ceilings.is_empty() { COSTLY_GAIN } else { GAIN };
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
            if let Some(seen) = seen.get_mut(&graph.value(*value).name) {
                seen.multiply(&index.iter().map(|channel| (-powers[*channel]).exp2()).collect::<Vec<_>>());
            }
        }
        choices.push(Choice { name: chain.name.clone(), strength, gain: error / before, costly: chain.costly });
    }
    Ok(choices)
}

/// What is needed to tell the error of a chain's layers from the powers.
struct Measure<'s> {
    width: usize,
    sinks: Vec<Sink<'s>>,
    ceiling: Option<Ceiling>,
}

/// A layer that reads a value.
struct Sink<'s> {
    layer: Layer,
    seen: &'s ValueStatistics,
    /// All that was seen of its channels.
    channels: Channels,
    index: &'s [usize],
}

/// What an error of each input of a layer costs: the squares of its weights.
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
    let sink = ScaledLayer { value: node.inputs[0], weight: name.to_owned(), index: (0..inputs).collect(), first, depthwise };
    Ok(Layer::of(model, &sink)?.squares)
}

/// What is needed of a weight `[out, in, ...]`, by channel of its input.
struct Layer {
    /// Largest magnitudes, `[out][in]`.
    largest: Vec<f32>,
    /// Squares of columns, summed over outputs.
    squares: Vec<f64>,
    /// Largest magnitudes of columns.
    columns: Vec<f32>,
    inputs: usize,
    depthwise: bool,
}

impl Layer {
    fn of(model: &Model, sink: &ScaledLayer) -> Result<Layer> {
        let weight = model.weights.get(&sink.weight)?;
        let values = weight.floats(&sink.weight)?;
        let inputs = sink.index.len();
        // Of `[in, out]`, a column is a row; of a depthwise weight, each row has one input.
        let (inner, transposed) = match weight.shape[..] {
            [rows, columns] if sink.first && rows == inputs => (1, columns),
            _ if sink.first => (weight.row(), 1),
            _ => (weight.shape.get(2..).unwrap_or(&[]).iter().product::<usize>().max(1), 0),
        };
        let outputs = values.len() / (inputs * inner).max(1);
        let mut layer =
            Layer { largest: vec![0.0; outputs.max(1) * inputs], squares: vec![0.0; inputs], columns: vec![0.0; inputs], inputs, depthwise: sink.depthwise };
        for (at, value) in values.iter().enumerate() {
            let (output, input) = match transposed {
                0 => (at / (inputs * inner), at / inner % inputs),
                _ => (at % (transposed * inner) / inner.max(1), at / (transposed * inner)),
            };
            let place = output * inputs + input;
            if let Some(largest) = layer.largest.get_mut(place) {
                *largest = largest.max(value.abs());
            }
            layer.columns[input] = layer.columns[input].max(value.abs());
            layer.squares[input] += f64::from(*value) * f64::from(*value);
        }
        Ok(layer)
    }
}

impl<'s> Measure<'s> {
    fn of(chain: &'s Chain, graph: &Graph, model: &Model, seen: &'s BTreeMap<String, ValueStatistics>) -> Result<Option<Measure<'s>>> {
        let mut sinks = Vec::new();
        for sink in &chain.sinks {
            let Some(seen) = seen.get(&graph.value(sink.value).name) else { continue };
            let channels = seen.channels();
            if channels.has_histograms() && channels.channels() == sink.index.len() {
                sinks.push(Sink { layer: Layer::of(model, sink)?, seen, channels, index: &sink.index });
            }
        }
        let ceiling = if chain.ceilings.is_empty() { None } else { Some(Ceiling::of(chain, graph, model, seen)?) };
        Ok((!sinks.is_empty()).then_some(Measure { width: chain.width, sinks, ceiling }))
    }

    /// `log2 (a^strength / w^(1 - strength))` for each channel, in so many steps to one, around zero.
    fn powers(&self, strength: f64, steps: f64) -> Vec<f64> {
        let (mut activations, mut weights) = (vec![0f64; self.width], vec![0f64; self.width]);
        for sink in &self.sinks {
            let largest = sink.channels.largest();
            for (input, channel) in sink.index.iter().enumerate() {
                activations[*channel] = activations[*channel].max(f64::from(largest[input]));
                weights[*channel] = weights[*channel].max(f64::from(sink.layer.columns[input]));
            }
        }
        if let Some(ceiling) = &self.ceiling {
            return ceiling.powers(&weights, strength, steps);
        }
        // A channel that was nearly always zero is taken for a small one: its weights must not set the scale of all.
        let floor = activations.iter().copied().fold(0.0, f64::max) * SILENT;
        let log = |(a, w): (&f64, &f64)| {
            if floor > 0.0 && *w > 0.0 {
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

    /// Estimated squared error of the layers' outputs when channels are divided by `2ᵖ`: ranges are chosen on one half of the
    /// samples and held to the other.
    fn error(&self, powers: &[f64], observer: ActivationObserver, percentile: f64) -> f64 {
        self.sinks.iter().map(|sink| sink.error(powers, observer, percentile)).sum()
    }
}

impl Sink<'_> {
    fn error(&self, powers: &[f64], observer: ActivationObserver, percentile: f64) -> f64 {
        let by: Vec<f64> = self.index.iter().map(|channel| powers[*channel].exp2()).collect();
        let inverse: Vec<f64> = by.iter().map(|by| 1.0 / by).collect();
        let columns: Vec<f64> = self.layer.squares.iter().zip(&by).map(|(square, by)| square * by * by).collect();
        let cost = |(low, high): (f32, f32), seen: &Weighted| seen.error((low.into(), high.into()));
        let activations = match crossed(observer, self.seen, Some(&inverse), &columns, percentile) {
            Some(crossed) => crossed.iter().map(|(range, seen)| cost(*range, seen)).sum(),
            None => {
                let mut divided = self.seen.clone();
                divided.multiply(&inverse);
                let range = observer.range(&divided, Some(&columns), percentile);
                Weighted::of(&self.channels, Some(&inverse), &columns).map_or(0.0, |seen| cost(range, &seen))
            }
        } / self.channels.count().max(1) as f64;
        if self.layer.depthwise {
            return activations;
        }
        let energy: f64 = self.channels.mean_squares().iter().zip(&inverse).map(|(square, by)| square * by * by).sum();
        let row = |row: &[f32]| {
            let largest = row.iter().zip(&by).map(|(w, by)| f64::from(*w) * by).fold(0f64, f64::max);
            let step = largest / 127.5;
            step * step / 12.0 * energy
        };
        activations + self.layer.largest.chunks_exact(self.layer.inputs.max(1)).map(row).sum::<f64>()
    }
}
