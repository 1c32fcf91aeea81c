//! Latency of a graph in the built-in executor, independent of its weights.

use std::sync::Arc;
use std::time::Instant;

use candle_core::DType;

use crate::analysis;
use crate::data;
use crate::error::Result;
use crate::exec::{Executor, Parameters, Residence};
use crate::ir::Graph;
use crate::pass::Context;
use crate::run_state::ModelRun;
use crate::store::{self, Block, BlockSink, Encoding, View, Weight, WeightSource, Weights};

/// Number of measured runs.
const RUNS: usize = 7;

/// Weight source of small constant values.
struct Constant(usize);

impl WeightSource for Constant {
    fn visit(&self, unit: usize, sink: BlockSink) -> Result<()> {
        let block = store::block_elements(unit).min(self.0.max(1));
        let bytes: Vec<u8> = std::iter::repeat_n(0.01f32.to_le_bytes(), block).flatten().collect();
        let mut remaining = self.0;
        while remaining > 0 {
            let count = remaining.min(block);
            sink(Block::untouched(View::dense(store::DType::F32, &bytes[..4 * count])))?;
            remaining -= count;
        }
        Ok(())
    }
}

/// The runs that measure the latency of a graph, and those of this many smaller graphs, at most.
pub(super) fn runs(graph: &Graph, smaller: usize) -> ModelRun {
    let (macs, _) = analysis::cost(graph, &analysis::usual_sizes(graph));
    let macs = macs.saturating_mul((RUNS * (1 + smaller)) as u64);
    ModelRun { batches: Some((1, 1)), at_most: true, ..ModelRun::new(move |_| macs) }
}

/// Median latency in seconds for one synthetic sample of default size.
pub(super) fn seconds(graph: &Graph, context: &Context) -> Result<f64> {
    let weight = |shape: Vec<usize>| {
        let elements = shape.iter().product();
        Weight::new(store::DType::F32, shape, Encoding::Dense, Arc::new(Constant(elements)))
    };
    let shape = |value: &crate::ir::Value| value.ty.shape.iter().map(|dim| dim.fixed().unwrap_or(1)).collect();
    let by_name = graph.params().map(|(_, value)| (value.name.clone(), weight(shape(value)))).collect();
    let weights = Weights { by_name, ..Weights::default() };
    let parameters = Parameters::load(graph, &weights, &context.device, DType::F32, Residence::Computed, &context.work)?;
    let inputs = data::synthetic_with_sizes(graph, context.seed, &analysis::usual_sizes(graph))?.inputs;
    let executor = Executor::new(graph, parameters, context.device.clone());
    let mut times = Vec::with_capacity(RUNS);
    for _ in 0..RUNS {
        context.work.cancel.check()?;
        let start = Instant::now();
        executor.run(&inputs)?;
        times.push(start.elapsed().as_secs_f64());
    }
    times.sort_by(f64::total_cmp);
    Ok(times[RUNS / 2])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constant_weights_have_all_their_elements() {
        for elements in [0, 1, 7, 300_000] {
            let weight = Weight::new(store::DType::F32, vec![elements], Encoding::Dense, Arc::new(Constant(elements)));
            let values = weight.floats("x").unwrap();
            assert!(values.len() == elements && values.iter().all(|value| *value == 0.01));
        }
    }
}
