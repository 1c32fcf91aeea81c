//! Memory requirements of a graph, and the choice between running it as a whole or block by block.

use std::collections::BTreeSet;

use candle_core::{DType, Tensor};
use serde::Serialize;

use crate::analysis;
use crate::error::{Error, Result};
use crate::exec::inputs::Inputs;
use crate::exec::residence::{self, Residence};
use crate::ir::ops::elements;
use crate::ir::{Bindings, Dim, Element, Graph, TensorType};
use crate::store::Weights;
use crate::work::MemoryLimit;

/// Memory requirements of a graph in bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MemoryNeed {
    /// All parameters.
    pub parameters: u64,
    /// The largest parameters of two consecutive blocks: one runs while the next is being read.
    pub blocks: u64,
    /// Peak of live values.
    pub activations: u64,
    /// Activations cached between two blocks for a batch, at most.
    pub state: u64,
    /// Number of blocks.
    pub count: usize,
    /// The reason why the graph cannot be split into blocks, if it cannot.
    pub uncut: Option<String>,
}

/// Execution schedule of models.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Schedule {
    /// All parameters are in memory.
    Resident,
    /// Models run block by block, with this budget for activations cached between blocks, over all
    /// models.
    Blockwise {
        /// Budget in bytes.
        states: u64,
    },
}

/// Bytes of parameters from which models run block by block although they fit into memory.
const LARGE: u64 = 512 << 20;
/// Least budget of such models for activations between blocks. It suffices for thousands of tokens, whose
/// computation takes much longer than reading the parameters.
const STATES: u64 = 256 << 20;

impl MemoryNeed {
    /// Estimates the requirements of a graph for inputs of these sizes.
    pub fn estimate(graph: &Graph, weights: &Weights, compute: DType, residence: Residence, sizes: &Bindings) -> MemoryNeed {
        let coded = residence::coded_parameters(graph, residence, compute);
        let size = |name: &String| weights.find(name).map_or(0, |weight| residence::bytes(name, weight, &coded, residence, compute));
        let all: BTreeSet<&String> = graph.params().map(|(_, value)| &value.name).collect();
        let blocks = analysis::blocks(graph);
        let pair = |index: usize| -> u64 {
            blocks.iter().skip(index).take(2).flat_map(|block| &block.parameters).collect::<BTreeSet<_>>().into_iter().map(size).sum()
        };
        MemoryNeed {
            parameters: all.into_iter().map(size).sum(),
            blocks: (0..blocks.len()).map(pair).max().unwrap_or(0),
            activations: analysis::cost(graph, sizes).1,
            state: state(graph, &blocks, sizes),
            count: blocks.len(),
            uncut: analysis::single_block_reason(graph),
        }
    }

    /// Bytes with all parameters in memory.
    pub fn total(&self) -> u64 {
        self.parameters.saturating_add(self.activations)
    }

    /// Bytes for block-wise execution of one batch at a time.
    pub fn blockwise(&self) -> u64 {
        self.blocks.saturating_add(self.activations).saturating_add(self.state)
    }
}

/// Bytes that a batch of these sizes caches between two blocks, at most: its inputs and the output of the
/// previous block. The output of the last block is not cached.
fn state(graph: &Graph, blocks: &[analysis::Block], sizes: &Bindings) -> u64 {
    let bytes = |ty: &TensorType| elements(ty, sizes).saturating_mul(if ty.element == Element::Int { 8 } else { 4 });
    let inner = &blocks[..blocks.len().saturating_sub(1)];
    let crossing = graph.values().iter().filter(|value| inner.iter().any(|block| block.value == value.name)).map(|value| bytes(&value.ty)).max();
    let inputs = graph.inputs().map(|(_, value)| bytes(&value.ty));
    inputs.fold(crossing.unwrap_or(0), u64::saturating_add)
}

/// Bytes that a batch caches between two blocks of a graph, at most.
pub fn state_bytes(graph: &Graph, inputs: &Inputs) -> u64 {
    state(graph, &analysis::blocks(graph), &sizes_of(graph, inputs))
}

/// The sizes of a graph's named axes in a batch.
pub fn sizes_of(graph: &Graph, inputs: &Inputs) -> Bindings {
    axis_sizes(graph, |name| inputs.get(name).map(Tensor::dims))
}

/// The sizes of a graph's named axes, from the shapes of its inputs.
pub fn axis_sizes<'a>(graph: &Graph, shape_of: impl Fn(&str) -> Option<&'a [usize]>) -> Bindings {
    let axes = graph.inputs().filter_map(|(_, value)| Some((&value.ty.shape, shape_of(&value.name)?)));
    axes.flat_map(|(shape, dims)| shape.iter().zip(dims))
        .filter_map(|(axis, size)| if let Dim::Named(name) = axis { Some((name.clone(), *size)) } else { None })
        .collect()
}

impl Schedule {
    /// Chooses the schedule of models that are in memory at the same time, each with its name. Fails if the
    /// models do not fit into the memory that the user specified: one cannot be split into blocks, or its
    /// blocks are too large.
    pub fn choose(limit: MemoryLimit, models: &[(&str, MemoryNeed)]) -> Result<Schedule> {
        let sum = |part: fn(&MemoryNeed) -> u64| models.iter().map(|(_, need)| part(need)).fold(0, u64::saturating_add);
        let activations = models.iter().map(|(_, need)| need.activations).max().unwrap_or(0);
        let total = sum(|need| need.parameters).saturating_add(activations);
        let Some(memory) = limit.bytes.filter(|memory| *memory < total) else { return Ok(Schedule::Resident) };
        let refuse = |what: &str, reason: String| {
            let model = if what.is_empty() { "running the model".to_owned() } else { format!("running a model of family `{what}`") };
            Err(Error::run(model, reason, format!("set `memory` to at least {total} bytes to run it as a whole")))
        };
        if let Some((name, reason)) = models.iter().find_map(|(name, need)| Some((name, need.uncut.as_ref()?))) {
            return if limit.explicit {
                refuse(name, format!("takes {total} bytes of memory, but the limit is {memory}; it cannot run block by block: {reason}"))
            } else {
                Ok(Schedule::Resident)
            };
        }
        let (blocks, states) = (sum(|need| need.blocks).saturating_add(activations), sum(|need| need.state));
        let least = blocks.saturating_add(states);
        if least > memory && limit.explicit {
            let name = models.first().map_or("", |(name, _)| *name);
            return refuse(name, format!("takes {total} bytes of memory, {least} block by block, but the limit is {memory}"));
        }
        Ok(Schedule::Blockwise { states: memory.saturating_sub(blocks).max(states) })
    }

    /// The schedule for large models that fit into memory, if they take much less memory block by block. For
    /// models on the CPU that run over data once, and whose files are read quickly.
    pub fn compact(models: &[(&str, MemoryNeed)]) -> Option<Schedule> {
        let sum = |part: fn(&MemoryNeed) -> u64| models.iter().map(|(_, need)| part(need)).fold(0, u64::saturating_add);
        let (parameters, blocks) = (sum(|need| need.parameters), sum(|need| need.blocks));
        let states = STATES.max(parameters / 8);
        let saves = blocks.saturating_add(states) <= parameters / 2 && sum(|need| need.state) <= states;
        let is_cut = models.iter().all(|(_, need)| need.uncut.is_none());
        (parameters >= LARGE && saves && is_cut).then_some(Schedule::Blockwise { states })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn need(parameters: u64, blocks: u64, cut: bool) -> MemoryNeed {
        MemoryNeed { parameters, blocks, activations: 10, state: 5, count: 4, uncut: (!cut).then(|| "two values cross".to_owned()) }
    }

    #[test]
    fn models_beyond_the_limit_run_block_by_block_or_are_refused_by_name() {
        let limit = |bytes, explicit| MemoryLimit { bytes: Some(bytes), explicit };
        let one = [("llama", need(100, 30, true))];
        assert_eq!(Schedule::choose(MemoryLimit::default(), &one).unwrap(), Schedule::Resident);
        assert_eq!(Schedule::choose(limit(110, true), &one).unwrap(), Schedule::Resident);
        assert_eq!(Schedule::choose(limit(109, true), &one).unwrap(), Schedule::Blockwise { states: 69 });
        assert_eq!(Schedule::choose(limit(45, true), &one).unwrap(), Schedule::Blockwise { states: 5 });
        assert!(Schedule::choose(limit(44, true), &one).unwrap_err().to_string().contains("takes 110 bytes of memory, 45 block by block"));
        assert_eq!(Schedule::choose(limit(44, false), &one).unwrap(), Schedule::Blockwise { states: 5 });
        let both = [("llama", need(100, 30, true)), ("unet", need(100, 100, false))];
        assert_eq!(Schedule::choose(limit(210, true), &both).unwrap(), Schedule::Resident);
        let refused = Schedule::choose(limit(209, true), &both).unwrap_err().to_string();
        assert!(refused.contains("`unet`") && refused.contains("two values cross"), "{refused}");
        assert_eq!(Schedule::choose(limit(209, false), &both).unwrap(), Schedule::Resident);
    }

    #[test]
    fn large_models_have_a_compact_schedule_if_it_saves_memory() {
        let model = |parameters, blocks, cut| [("llama", need(parameters, blocks, cut))];
        assert_eq!(Schedule::compact(&model(LARGE - 1, 0, true)), None);
        assert_eq!(Schedule::compact(&model(LARGE, 0, true)), Some(Schedule::Blockwise { states: STATES }));
        assert_eq!(Schedule::compact(&model(LARGE, 1, true)), None);
        assert_eq!(Schedule::compact(&model(16 * STATES, 6 * STATES, true)), Some(Schedule::Blockwise { states: 2 * STATES }));
        assert_eq!(Schedule::compact(&model(16 * STATES, 6 * STATES + 1, true)), None);
        assert_eq!(Schedule::compact(&model(16 * STATES, STATES, false)), None);
        let with_state = |state| Schedule::compact(&[("llama", MemoryNeed { state, ..need(16 * STATES, 1, true) })]);
        assert_eq!((with_state(2 * STATES), with_state(2 * STATES + 1)), (Some(Schedule::Blockwise { states: 2 * STATES }), None));
    }

    #[test]
    fn needs_are_computed_from_a_graph() {
        let text = "input x: float[batch, 4]\nparam w: float[8, 4]\nparam v: float[2, 8]\nparam u: float[2, 2]\na = Linear(x, w) -> float[batch, 8]\nb = Linear(a, v) -> float[batch, 2]\nc = Linear(b, u) -> float[batch, 2]\noutput logits = c\n";
        let graph: Graph = text.parse().unwrap();
        let mut weights = Weights::default();
        for (name, shape) in [("w", [8, 4]), ("v", [2, 8]), ("u", [2, 2])] {
            weights.by_name.insert(name.into(), crate::store::Computed { values: || Ok(Vec::new()) }.weight(shape.to_vec()));
        }
        let need = MemoryNeed::estimate(&graph, &weights, DType::F32, Residence::Stored, &[("batch".to_owned(), 3)].into());
        assert_eq!((need.parameters, need.blocks, need.count), (4 * (32 + 16 + 4), 4 * (32 + 16), 3));
        // Of three samples: `x` and `a`.
        assert_eq!((need.activations, need.state), (4 * 3 * 12, 4 * 3 * 12));
        assert_eq!((need.total(), need.blockwise()), (208 + 144, 192 + 288));
    }
}
