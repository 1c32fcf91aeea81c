//! Rescaling of channels with an upper clamp (ReLU6): a channel that is scaled up reaches the clamp
//! earlier.

use std::collections::BTreeMap;

use crate::calibration::ValueStatistics;
use crate::error::Result;
use crate::ir::Graph;
use crate::model::Model;
use crate::pass::channel_equalization::Chain;

/// Safety margin: a multiple of the largest observed value of a channel must stay below the clamp.
const MARGIN: f64 = 1.5;

/// Limits on the factors of a chain with clamped values.
pub(super) struct ClampLimit {
    /// The number of powers of two by which each channel can grow.
    growth: Vec<f64>,
    /// Largest producer weight of each channel.
    producer_weights: Vec<f32>,
}

impl ClampLimit {
    /// Computes the limits of a chain with clamps.
    pub fn new(chain: &Chain, graph: &Graph, model: &Model, statistics: &BTreeMap<String, ValueStatistics>) -> Result<ClampLimit> {
        let mut growth = vec![f64::INFINITY; chain.width];
        for (value, index, clamp) in &chain.clamps {
            // Channels without statistics must not grow.
            let largest = statistics.get(&graph.value(*value).name).map_or(vec![f32::INFINITY; index.len()], |value| value.channels().largest());
            for (channel, largest) in index.iter().zip(largest) {
                growth[*channel] = growth[*channel].min((clamp / (MARGIN * f64::from(largest))).log2().max(0.0));
            }
        }
        let mut producer_weights = vec![0f32; chain.width];
        if let Some((name, second)) = chain.producers.first() {
            let weight = model.weights.get(name)?;
            for (at, value) in weight.floats(name)?.iter().enumerate() {
                let channel = if *second { at % chain.width } else { at / weight.row().max(1) };
                producer_weights[channel] = producer_weights[channel].max(value.abs());
            }
        }
        Ok(ClampLimit { growth, producer_weights })
    }

    /// The power of two that divides each channel. `readers` holds the largest reader weight of each
    /// channel.
    ///
    /// Channels that reach the clamp are not rescaled, and the other channels are scaled up towards their
    /// level, within the limits. No channel shrinks. Channels that are always zero are not rescaled.
    pub fn powers(&self, readers: &[f64], strength: f64, steps: f64) -> Vec<f64> {
        let log = |(producer, reader): (&f32, &f64)| strength * f64::from(*producer).log2() - (1.0 - strength) * reader.log2();
        let logs: Vec<f64> = self.producer_weights.iter().zip(readers).map(log).collect();
        let clamped: Vec<f64> = logs.iter().zip(&self.growth).filter(|(l, growth)| l.is_finite() && **growth <= 0.0).map(|(l, _)| *l).collect();
        let level = match clamped.len() {
            0 => logs.iter().copied().filter(|l| l.is_finite()).fold(f64::NEG_INFINITY, f64::max),
            count => clamped.iter().sum::<f64>() / count as f64,
        };
        let power =
            |(l, growth): (&f64, &f64)| if l.is_finite() && growth.is_finite() { ((l - level).max(-growth).min(0.0) * steps).ceil() / steps } else { 0.0 };
        logs.iter().zip(&self.growth).map(power).collect()
    }
}
