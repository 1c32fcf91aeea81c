//! Channels that a ReLU6 cuts off: a factor that makes one larger makes it meet the ceiling earlier.

use std::collections::BTreeMap;

use crate::calibration::ValueStatistics;
use crate::error::Result;
use crate::ir::Graph;
use crate::model::Model;
use crate::pass::chains::Chain;

/// So many times the largest value that a channel was seen with has to pass where values are cut off.
const ROOM: f64 = 1.5;

/// Where values of a chain are cut off on the way.
pub(super) struct Ceiling {
    /// How many powers of two each channel can grow by.
    growth: Vec<f64>,
    /// Largest weight that makes each channel.
    makers: Vec<f32>,
}

impl Ceiling {
    /// Of a chain on whose way there are ceilings.
    ///
    /// # Errors
    /// A weight cannot be read.
    pub fn of(chain: &Chain, graph: &Graph, model: &Model, seen: &BTreeMap<String, ValueStatistics>) -> Result<Ceiling> {
        let mut growth = vec![f64::INFINITY; chain.width];
        for (value, index, ceiling) in &chain.ceilings {
            // What nothing was seen of stays as it is.
            let largest = seen.get(&graph.value(*value).name).map_or(vec![f32::INFINITY; index.len()], |seen| seen.channels().largest());
            for (channel, largest) in index.iter().zip(largest) {
                growth[*channel] = growth[*channel].min((ceiling / (ROOM * f64::from(largest))).log2().max(0.0));
            }
        }
        let mut makers = vec![0f32; chain.width];
        if let Some((name, second)) = chain.makers.first() {
            let weight = model.weights.get(name)?;
            for (at, value) in weight.floats(name)?.iter().enumerate() {
                let channel = if *second { at % chain.width } else { at / weight.row().max(1) };
                makers[channel] = makers[channel].max(value.abs());
            }
        }
        Ok(Ceiling { growth, makers })
    }

    /// The power of two that divides each channel, by the largest weight of its readers.
    ///
    /// What reaches the ceiling stays there: such channels are what the others are brought in line with. None of them shrinks, and
    /// what grows stays below; of a channel that was always zero nothing is known.
    pub fn powers(&self, readers: &[f64], strength: f64, steps: f64) -> Vec<f64> {
        let logs = self.makers.iter().zip(readers).map(|(maker, reader)| strength * f64::from(*maker).log2() - (1.0 - strength) * reader.log2());
        let logs: Vec<f64> = logs.collect();
        let held: Vec<f64> = logs.iter().zip(&self.growth).filter(|(l, growth)| l.is_finite() && **growth <= 0.0).map(|(l, _)| *l).collect();
        let level = match held.len() {
            0 => logs.iter().copied().filter(|l| l.is_finite()).fold(f64::NEG_INFINITY, f64::max),
            count => held.iter().sum::<f64>() / count as f64,
        };
        let power =
            |(l, growth): (&f64, &f64)| if l.is_finite() && growth.is_finite() { ((l - level).max(-growth).min(0.0) * steps).ceil() / steps } else { 0.0 };
        logs.iter().zip(&self.growth).map(power).collect()
    }
}
