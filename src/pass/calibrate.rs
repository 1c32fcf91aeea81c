//! Runs the model on calibration data.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use candle_core::{D, DType, Device, Tensor};

use crate::analysis;
use crate::calibration::{Request, ValueStatistics, calibrate, calibrate_blockwise, observe_blockwise, sample_sizes, select_rows};
use crate::data::{Batch, DataSet, Padding, Target, TokenAxis};
use crate::error::{Error, Result};
use crate::evaluation::Subject;
use crate::exec::transfer::{self, Cause};
use crate::exec::{BlockwiseOptions, Executor, MemoryNeed, Parameters, Residence, Schedule, floats_on_host, read, sizes_of};
use crate::ir::ops::contiguous;
use crate::ir::{Bindings, Graph, Node, Op, Port, ValueId};
use crate::kernel::columns;
use crate::model::Model;
use crate::pass::Context;
use crate::run_state::ModelRun;

/// Maximum memory of suspended runs per model, in bytes.
const SUSPENDED_BYTES: u64 = 1 << 29;

/// Calls `consume` for each batch of the calibration data.
pub(in crate::pass) fn for_each(stage: &str, model: &Model, context: &Context, consume: impl FnMut(Batch) -> Result<()>) -> Result<()> {
    open(model, context)?.for_each_batch(stage, &context.work, consume)
}

fn open(model: &Model, context: &Context) -> Result<Arc<DataSet>> {
    let options = context.data.calibration.as_ref().ok_or_else(|| Error::option("data: calibration", "is missing: the pass needs calibration samples"))?;
    context.data.open(options, Subject::from_model(model.clone())?.target())
}

/// Runs the model on the calibration data and calls `observe` with the selected graph values of each
/// batch. The model runs block by block if its parameters do not fit into memory.
pub(in crate::pass) fn observe(
    graph: &Graph,
    model: &Model,
    selected: impl Fn(&str) -> bool,
    context: &Context,
    mut observe: impl FnMut(&Batch, &str, &Tensor) -> Result<()> + Send,
) -> Result<()> {
    let data = open(model, context)?;
    let need = MemoryNeed::estimate(graph, &model.weights, DType::F32, Residence::Computed, &sizes_of(graph, &data.first()?.inputs));
    if let Schedule::Blockwise { states } = Schedule::choose(context.memory, &[(model.config.model_type(), need)])? {
        let tracker = context.memory_tracker.clone();
        let options = BlockwiseOptions { residence: Residence::Computed, limit: states / 2, tracker, ..BlockwiseOptions::on(&context.device) };
        let computed = |name: &str| selected(name) && graph.inputs().all(|(_, value)| value.name != name);
        return observe_blockwise((graph, &model.weights), &options, states / 2, &data, computed, &context.work, observe);
    }
    let executor = Executor::new(graph, parameters(graph, model, context)?, context.device.clone()).tracked(context.memory_tracker.as_ref());
    let observation = executor.observation(selected);
    data.for_each_batch("Observing", &context.work, |batch| {
        let mut contiguous = |name: &str, value: &Tensor| observe(&batch, name, &contiguous(value).map_err(tensor_error)?);
        executor.run_observed(&observation, &batch.inputs, &mut contiguous)
    })
}

/// A run of a model up to the selected values.
pub(in crate::pass) fn run_to(graph: &Graph, selected: impl Fn(&str) -> bool) -> ModelRun {
    let values: BTreeSet<String> = graph.values().iter().map(|value| &value.name).filter(|name| selected(name)).cloned().collect();
    let graph = graph.clone();
    ModelRun::new(move |sizes| analysis::cost_of_values(&graph, sizes, |name| values.contains(name)))
}

/// A run of a model that computes all outputs.
pub(in crate::pass) fn whole_run(graph: &Graph) -> ModelRun {
    let outputs: BTreeSet<&str> = graph.outputs().iter().map(|(_, id)| graph.value(*id).name.as_str()).collect();
    run_to(graph, |name| outputs.contains(name))
}

/// A run of a model up to the inputs of the layers with these weights.
pub(in crate::pass) fn run_to_inputs(graph: &Graph, weights: &BTreeSet<String>) -> ModelRun {
    let reads = |node: &&Node| node.inputs.iter().skip(1).any(|id| weights.contains(&graph.value(*id).name));
    let inputs: BTreeSet<ValueId> = graph.nodes().iter().filter(reads).filter_map(|node| node.inputs.first().copied()).collect();
    let names: BTreeSet<&str> = inputs.into_iter().map(|id| graph.value(id).name.as_str()).collect();
    run_to(graph, |name| names.contains(name))
}

/// Options of a model that runs in f32 from value to value, block by block. Suspended runs beyond a limit of
/// memory are stored in temporary files.
pub(in crate::pass) fn blockwise_options(context: &Context) -> BlockwiseOptions {
    BlockwiseOptions {
        compute: DType::F32,
        residence: Residence::Computed,
        limit: SUSPENDED_BYTES,
        spill: Some(std::env::temp_dir()),
        tracker: context.memory_tracker.clone(),
        ..BlockwiseOptions::on(&context.device)
    }
}

/// A mask `[n, 1]` of the rows `[n, size]` that are not all zeros. Tokens that are not routed to an
/// expert have zero rows.
pub(super) fn nonzero_rows(rows: &Tensor) -> candle_core::Result<Tensor> {
    rows.abs()?.max_keepdim(D::Minus1)?.gt(0.0)?.to_dtype(rows.dtype())
}

/// Opens the calibration data for a graph of the model.
fn samples(pass: &str, graph: &Graph, model: &Model, context: &Context) -> Result<Arc<DataSet>> {
    let Some(options) = &context.data.calibration else {
        return Err(Error::option(pass, "needs calibration samples: add `data: { calibration: ... }`"));
    };
    let (inputs, outputs) = Port::from_graph(graph);
    let (folder, config) = model.preprocessing()?;
    let described = Target::new(&folder, &model.auxiliary.synthesized, config.values());
    let target = Target { inputs: &inputs, outputs: &outputs, branches: model.branches(), ..described };
    context.data.open(options, target)
}

/// The sizes of a graph's named axes for the first batch of the calibration data.
pub(in crate::pass) fn first_sizes(pass: &str, graph: &Graph, model: &Model, context: &Context) -> Result<Bindings> {
    Ok(sizes_of(graph, &samples(pass, graph, model, context)?.first()?.inputs))
}

/// Collects statistics of the requested values on the calibration data. The model runs block by block if
/// its parameters do not fit into memory.
pub(in crate::pass) fn statistics(
    pass: &str,
    graph: &Graph,
    model: &Model,
    requests: &BTreeMap<String, Request>,
    context: &Context,
) -> Result<BTreeMap<String, ValueStatistics>> {
    let data = samples(pass, graph, model, context)?;
    let need = MemoryNeed::estimate(graph, &model.weights, DType::F32, Residence::Stored, &sizes_of(graph, &data.first()?.inputs));
    if let Schedule::Blockwise { states } = Schedule::choose(context.memory, &[(model.config.model_type(), need)])? {
        // The other half is for activations cached within a block.
        let options = BlockwiseOptions { limit: states / 2, tracker: context.memory_tracker.clone(), ..BlockwiseOptions::on(&context.device) };
        let mut statistics = calibrate_blockwise((graph, &model.weights), &options, states / 2, &data, requests, &context.work)?;
        add_parameters(graph, model, requests, &mut statistics)?;
        return Ok(statistics);
    }
    let parameters = Parameters::load(graph, &model.weights, &context.device, DType::F32, Residence::Stored, &context.work)?;
    let executor = Executor::new(graph, parameters, context.device.clone()).tracked(context.memory_tracker.as_ref());
    let mut statistics = calibrate(&executor, &data, requests, &context.work)?;
    add_parameters(graph, model, requests, &mut statistics)?;
    Ok(statistics)
}

/// Adds statistics of requested parameters, such as a table that a layer reads. They are not observed
/// while running the model.
fn add_parameters(graph: &Graph, model: &Model, requests: &BTreeMap<String, Request>, statistics: &mut BTreeMap<String, ValueStatistics>) -> Result<()> {
    for (_, value) in graph.params() {
        if let Some(request) = requests.get(&value.name) {
            let weight = model.weights.get(&value.name)?;
            let parameter = ValueStatistics::from_parameter(&value.name, &weight.floats(&value.name)?, &weight.shape, request)?;
            statistics.insert(value.name.clone(), parameter);
        }
    }
    Ok(())
}

/// Loads the named parameters of a graph as f32.
pub(in crate::pass) fn some_parameters(names: Vec<&String>, model: &Model, context: &Context) -> Result<Parameters> {
    Parameters::load_named(names, &model.weights, &context.device, DType::F32, Residence::Computed, &context.work.quiet())
}

/// Loads all parameters of a graph as f32.
pub(in crate::pass) fn parameters(graph: &Graph, model: &Model, context: &Context) -> Result<Parameters> {
    Parameters::load(graph, &model.weights, &context.device, DType::F32, Residence::Computed, &context.work)
}

/// Loads the parameters of a graph for backpropagation. Also returns the node indices at which blocks
/// with activation checkpointing end: none if all parameters fit into memory, else those of all blocks,
/// whose parameters are streamed from their files.
pub(in crate::pass) fn parameters_to_differentiate(graph: &Graph, model: &Model, context: &Context) -> Result<(Parameters, Vec<usize>)> {
    let sizes = sizes_of(graph, &open(model, context)?.first()?.inputs);
    let need = MemoryNeed::estimate(graph, &model.weights, DType::F32, Residence::Computed, &sizes);
    let (checkpoints, count) = (need.state.saturating_mul(need.count.saturating_sub(1) as u64), need.count);
    let Schedule::Blockwise { states } = Schedule::choose(context.memory, &[(model.config.model_type(), need)])? else {
        return Ok((parameters(graph, model, context)?, Vec::new()));
    };
    if checkpoints > states && context.memory.explicit {
        return Err(Error::run(
            "computing gradients of the model",
            format!("the activations between {count} blocks take {checkpoints} bytes, but the memory limit leaves {states}"),
            "use a smaller `batch_size` or `max_length` of the calibration data, or `importance: activation`, which needs no gradients",
        ));
    }
    let names = graph.params().map(|(_, value)| &value.name).collect();
    let (parameters, _) = Parameters::streamed(names, &model.weights, &context.device, DType::F32, Residence::Computed)?;
    Ok((parameters, analysis::block_ends(graph)))
}

/// Reshapes the input of a layer to `[n, features]` and removes padding tokens.
pub(in crate::pass) fn rows(value: &Tensor, op: &Op, batch: &Batch, tokens: TokenAxis) -> Result<Tensor> {
    Ok(rows_by_sample(value, op, batch, tokens)?.0)
}

/// Like [`rows`]. Also returns the number of rows of each sample.
pub(in crate::pass) fn rows_by_sample(value: &Tensor, op: &Op, batch: &Batch, tokens: TokenAxis) -> Result<(Tensor, Vec<usize>)> {
    let flat = || {
        if matches!(op, Op::Conv(_) | Op::BatchNorm(_)) && value.rank() > 2 {
            let rows = value.flatten_from(2)?.transpose(1, 2)?.contiguous()?.flatten_to(1)?;
            let sizes = sample_sizes(rows.dim(0)?, batch.samples, None);
            return Ok((rows, sizes));
        }
        let rows = value.flatten_to(value.rank().saturating_sub(2))?;
        let padding = Padding::from_batch(batch)?;
        let kept = padding.token_rows(tokens, value.dims());
        let sizes = sample_sizes(rows.dim(0)?, batch.samples, kept.as_deref());
        let Some(kept) = kept else { return Ok((rows, sizes)) };
        let indices = (0..).zip(&*kept).filter(|(_, kept)| **kept).map(|(at, _)| at).collect();
        Ok((select_rows(&rows, indices)?, sizes))
    };
    flat().map_err(tensor_error)
}

/// Converts an error of a tensor operation.
pub(in crate::pass) fn tensor_error(e: candle_core::Error) -> Error {
    match Error::candle("calibration", e) {
        Error::OutOfMemory { what, reason } => {
            Error::run(what, reason, "the GPU has too little memory: use `--device cpu`, or fewer or shorter calibration samples")
        }
        other => other,
    }
}

/// The error for a graph value that is infinite or NaN.
pub(in crate::pass) fn not_finite(name: &str) -> Error {
    Error::run(
        format!("graph value `{name}`"),
        "is not finite for a calibration sample",
        "the model overflows on this sample, or a weight is not finite: run `compress eval` on the same data for details",
    )
}

/// Copies the elements of a tensor to the host.
pub(in crate::pass) fn numbers(tensor: &Tensor) -> Result<Vec<f64>> {
    let read = || transfer::values::<f64>(tensor, Cause::Statistics);
    read().map_err(tensor_error)
}

/// Computes the sum and the sum of squares of each column of a matrix.
pub(in crate::pass) fn column_moments(rows: &Tensor) -> Result<[Vec<f64>; 2]> {
    if matches!(rows.device(), Device::Cpu) {
        let width = rows.dims().last().copied().unwrap_or(0);
        return floats_on_host(rows, Cause::Statistics).and_then(|rows| read(&rows, |values| Ok(columns::moments(values, width)))).map_err(tensor_error);
    }
    let sums = |rows: candle_core::Result<Tensor>| rows.and_then(|rows| rows.sum(0)).map_err(tensor_error).and_then(|sums| numbers(&sums));
    Ok([sums(Ok(rows.clone()))?, sums(rows.sqr())?])
}

/// Accumulates the mean and variance of features.
#[derive(Default)]
pub(in crate::pass) struct Moments {
    count: f64,
    sums: Vec<f64>,
    pub squares: Vec<f64>,
}

impl Moments {
    /// Adds rows of shape `[n, features]`.
    pub fn add(&mut self, rows: &Tensor) -> Result<()> {
        self.count += rows.dims()[0] as f64;
        for (total, found) in [&mut self.sums, &mut self.squares].into_iter().zip(column_moments(rows)?) {
            total.resize(found.len(), 0.0);
            total.iter_mut().zip(found).for_each(|(total, found)| *total += found);
        }
        Ok(())
    }

    /// Adds the moments of other rows.
    pub fn merge(&mut self, other: &Moments) {
        self.count += other.count;
        for (total, added) in [(&mut self.sums, &other.sums), (&mut self.squares, &other.squares)] {
            total.resize(added.len(), 0.0);
            total.iter_mut().zip(added).for_each(|(total, added)| *total += added);
        }
    }

    /// Number of features.
    pub fn features(&self) -> usize {
        self.sums.len()
    }

    /// Mean and variance of a feature.
    pub fn mean_variance(&self, at: usize) -> (f64, f64) {
        let mean = self.sums[at] / self.count;
        (mean, (self.squares[at] / self.count - mean * mean).max(0.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_gpu_has_a_hint() {
        let hint = |reason: &str| tensor_error(candle_core::Error::Msg(reason.into())).hint();
        assert!(hint("DriverError(CUDA_ERROR_OUT_OF_MEMORY, \"out of memory\")").is_some_and(|hint| hint.contains("--device cpu")));
        assert_eq!(hint("shape mismatch"), None);
    }
}
