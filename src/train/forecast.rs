//! What training will take of memory, told from the graph.

use std::collections::BTreeSet;

use super::optimizer::Kind;
use super::{Objective, Training, cuts};
use crate::exec::{MemoryCategory, Tape};
use crate::ir::{Bindings, Graph, TensorType};

/// Bytes by category.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MemoryForecast {
    bytes: [u64; 6],
}

impl MemoryForecast {
    /// Of one category.
    pub fn of(&self, category: MemoryCategory) -> u64 {
        self.bytes[category as usize]
    }

    /// Of all.
    pub fn total(&self) -> u64 {
        self.bytes.iter().sum()
    }

    /// In plain words.
    pub fn describe(&self) -> String {
        MemoryCategory::ALL
            .iter()
            .filter(|p| self.of(**p) > 0)
            .map(|p| format!("{} {} MB", p.name(), self.of(*p).div_ceil(1 << 20)))
            .collect::<Vec<_>>()
            .join(", ")
    }
}

fn elements(ty: &TensorType, sizes: &Bindings) -> u64 {
    ty.shape.iter().map(|dim| dim.evaluate(sizes).unwrap_or(0) as u64).product()
}

fn parameters(graph: &Graph, sizes: &Bindings) -> u64 {
    graph.params().map(|(_, value)| elements(&value.ty, sizes)).sum()
}

/// What a step over samples of these sizes takes.
pub fn forecast(graph: &Graph, options: &Training, teacher: Option<&Graph>, objective: &Objective, sizes: &Bindings) -> MemoryForecast {
    let width = options.precision.dtype().size_in_bytes() as u64;
    let weights = parameters(graph, sizes);
    let mut found = MemoryForecast::default();
    let mut set = |category: MemoryCategory, bytes: u64| found.bytes[category as usize] = bytes;
    set(MemoryCategory::Weights, weights * if width == 4 { 4 } else { 4 + width });
    set(MemoryCategory::Gradients, 4 * weights);
    let state = match options.optimizer {
        Kind::AdamW => 8 * weights,
        Kind::AdamW8bit => 2 * weights + weights / 32,
        Kind::Sgd => 4 * weights,
        Kind::Adafactor => graph
            .params()
            .map(|(_, value)| {
                let rows = value.ty.shape.first().and_then(|dim| dim.evaluate(sizes)).unwrap_or(1) as u64;
                let all = elements(&value.ty, sizes);
                4 * if value.ty.shape.len() > 1 { rows + all / rows.max(1) } else { all }
            })
            .sum(),
    };
    set(MemoryCategory::Optimizer, state + if options.average.is_some() { 4 * weights } else { 0 });
    let taps: BTreeSet<_> = graph.outputs().iter().map(|(_, id)| *id).collect();
    let tape = Tape::new(graph, candle_core::Device::Cpu, taps, &|_| true, &cuts::cuts(graph, options.gradient_checkpointing));
    set(MemoryCategory::Activations, tape.forecast(&|ty| width * elements(ty, sizes)));
    set(MemoryCategory::Data, graph.inputs().map(|(_, value)| 8 * elements(&value.ty, sizes)).sum());
    set(MemoryCategory::Teacher, teacher.filter(|_| !objective.teacher_values().is_empty()).map_or(0, |teacher| 4 * parameters(teacher, sizes)));
    found
}
