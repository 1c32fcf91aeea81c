//! What training will take of memory, told from the graph.

use std::collections::BTreeSet;

use super::optimizer::Kind;
use super::{Objective, Training, cuts, weights};
use crate::exec::{MemoryCategory, Tape};
use crate::ir::{Bindings, Element, Graph, TensorType};

/// Bytes by category.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MemoryForecast {
    bytes: [u64; 6],
    /// The most of activations and gradients at one time.
    together: u64,
}

impl MemoryForecast {
    /// Of one category.
    pub fn of(&self, category: MemoryCategory) -> u64 {
        self.bytes[category as usize]
    }

    /// The most of all at one time: of gradients the last come when most activations have gone.
    pub fn total(&self) -> u64 {
        let alone = [MemoryCategory::Weights, MemoryCategory::Optimizer, MemoryCategory::Teacher, MemoryCategory::Data];
        self.together + alone.into_iter().map(|category| self.of(category)).sum::<u64>()
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
    let selected = weights::selected(graph, &options.targets, &options.ignore);
    let all = parameters(graph, sizes);
    let trained: u64 = graph.params().filter(|(_, value)| selected(&value.name)).map(|(_, value)| elements(&value.ty, sizes)).sum();
    let mut found = MemoryForecast::default();
    let mut set = |category: MemoryCategory, bytes: u64| found.bytes[category as usize] = bytes;
    // Weights that train are kept in f32, and in the precision of the computation where that is another one.
    set(MemoryCategory::Weights, if width == 4 { 4 * all } else { (4 + width) * trained + width * (all - trained) });
    set(MemoryCategory::Gradients, 4 * trained);
    let state = match options.optimizer {
        Kind::AdamW => 8 * trained,
        Kind::AdamW8bit => 2 * trained + trained / 32,
        Kind::Sgd => 4 * trained,
        Kind::Adafactor => graph
            .params()
            .filter(|(_, value)| selected(&value.name))
            .map(|(_, value)| {
                let rows = value.ty.shape.first().and_then(|dim| dim.evaluate(sizes)).unwrap_or(1) as u64;
                let all = elements(&value.ty, sizes);
                4 * if value.ty.shape.len() > 1 { rows + all / rows.max(1) } else { all }
            })
            .sum(),
    };
    set(MemoryCategory::Optimizer, state + if options.average.is_some() { 4 * trained } else { 0 });
    let taps: BTreeSet<_> = graph.outputs().iter().map(|(_, id)| *id).collect();
    let tape = Tape::new(graph, candle_core::Device::Cpu, taps, &selected, &cuts::cuts(graph, options.gradient_checkpointing));
    let (activations, together) = tape.forecast(&|ty| width * elements(ty, sizes), &|ty| 4 * elements(ty, sizes));
    set(MemoryCategory::Activations, activations);
    let element = |ty: &TensorType| if ty.element == Element::Int { 8 } else { width };
    set(MemoryCategory::Data, graph.inputs().map(|(_, value)| element(&value.ty) * elements(&value.ty, sizes)).sum());
    set(MemoryCategory::Teacher, teacher.filter(|_| !objective.teacher_values().is_empty()).map_or(0, |teacher| 4 * parameters(teacher, sizes)));
    // Gradients of a batch before lie beside the activations of the next.
    found.together = if options.gradient_accumulation > 1 { activations + 4 * trained } else { together };
    found
}
