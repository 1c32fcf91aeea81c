//! Arbitrary text as `graph.json`: the forward and backward passes of the graph return tensors of the
//! inferred shapes, or an error. The names of tensors specify their shapes: `w3x4` is `[3, 4]`.

#![no_main]

use std::sync::Arc;

use candle_core::{DType, Device};
use compress_graph::analysis::cost;
use compress_engine::data::synthetic_with_sizes;
use compress_engine::exec::{Executor, Inputs, MemoryTracker, Parameters, Residence, Tape};
use compress_graph::ir::{Catalog, Graph, GraphFile};
use compress_core::store::{self, Block, BlockSink, Encoding, View, Weight, WeightSource, Weights};
use compress_core::work::{Cancel, Silent, Work};
use libfuzzer_sys::fuzz_target;

/// Limits: elements of a tensor, multiply-accumulates of a graph, and bytes of its values.
const LIMITS: (usize, u64, u64) = (1024, 1 << 18, 1 << 20);

struct Named;

impl Catalog for Named {
    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        let shape: Vec<usize> = name.strip_prefix('w')?.split('x').map(|size| size.parse().ok()).collect::<Option<_>>()?;
        let elements = shape.iter().try_fold(1usize, |all, size| all.checked_mul(*size));
        elements.is_some_and(|elements| elements <= LIMITS.0).then_some(shape)
    }

    fn nearest(&self, _name: &str) -> Option<String> {
        None
    }
}

struct Floats(Vec<u8>);

impl WeightSource for Floats {
    fn visit(&self, _unit: usize, sink: BlockSink) -> compress::Result<()> {
        sink(Block::untouched(View::dense(store::DType::F32, &self.0)))
    }
}

fn weights(graph: &Graph) -> Weights {
    let weight = |name: &str| {
        let shape = Named.shape(name).unwrap_or_default();
        let values = (0..shape.iter().product::<usize>()).map(|i| (i as f32 * 0.7).sin());
        Weight::new(store::DType::F32, shape, Encoding::Dense, Arc::new(Floats(values.flat_map(f32::to_le_bytes).collect())))
    };
    Weights { by_name: graph.params().map(|(_, value)| (value.name.clone(), weight(&value.name))).collect(), ..Weights::default() }
}

/// Backward pass from gradients of ones at every output.
fn backward(graph: &Graph, parameters: &Parameters, inputs: &Inputs) -> Option<()> {
    let taps = graph.outputs().iter().map(|(_, id)| *id).collect();
    let (tape, ledger) = (Tape::new(graph, Device::Cpu, taps, &|_| true, &[]), MemoryTracker::default());
    let Ok(forward) = tape.forward(parameters, inputs, &ledger, None) else { return None };
    let ones = forward.taps().iter().filter(|(_, tensor)| tensor.dtype().is_float()).map(|(id, tensor)| Some((*id, tensor.ones_like().ok()?)));
    let from = ones.collect::<Option<_>>()?;
    tape.backward(forward, from, parameters, &ledger, &mut |name, gradient| {
        assert_eq!(Named.shape(name).as_deref(), Some(gradient.dims()), "{name}");
        Ok(())
    })
    .ok()
}

fuzz_target!(|text: &str| {
    let Ok(file) = serde_json::from_str::<GraphFile>(text) else { return };
    let Ok(graph) = file.build(&Named) else { return };
    // Sizes from 1 to 8, derived from the names of the axes.
    let sizes = graph.bind(|name| name.bytes().fold(0, |a, b| (a + usize::from(b)) % 8) + 1);
    let (macs, bytes) = cost(&graph, &sizes);
    if macs > LIMITS.1 || bytes > LIMITS.2 {
        return;
    }
    let Ok(batch) = synthetic_with_sizes(&graph, 0, &sizes) else { return };
    let work = Work { threads: 1, progress: &Silent, cancel: &Cancel::default() };
    let parameters = Parameters::load(&graph, &weights(&graph), &Device::Cpu, DType::F32, Residence::Computed, &work);
    if let Ok(parameters) = &parameters {
        let _ = backward(&graph, parameters, &batch.inputs);
    }
    let Ok(answers) = parameters.and_then(|parameters| Executor::new(&graph, parameters, Device::Cpu).run(&batch.inputs)) else { return };
    for (name, id) in graph.outputs() {
        let wanted: Option<Vec<usize>> = graph.value(*id).ty.shape.iter().map(|dim| dim.evaluate(&sizes)).collect();
        if let (Some(wanted), Some(answer)) = (wanted, answers.get(name)) {
            assert_eq!(answer.dims(), wanted, "{name}");
        }
    }
});
