//! Running the model on calibration data.

use std::collections::BTreeMap;
use std::sync::Arc;

use candle_core::{D, DType, Device, Tensor};

use crate::analysis;
use crate::calibration::{Request, ValueStatistics, calibrate, calibrate_blockwise, observe_blockwise};
use crate::data::{Batch, DataSet, Padding, Target, TokenAxis};
use crate::error::{Error, Result};
use crate::evaluation::Subject;
use crate::exec::transfer::{self, Cause};
use crate::exec::{BlockwiseOptions, Executor, MemoryNeed, Parameters, Residence, Schedule, floats_on_host, read, sizes_of};
use crate::ir::{Graph, Op, Port};
use crate::kernel::columns;
use crate::model::Model;
use crate::pass::Context;

/// Goes through the calibration data.
///
/// # Errors
/// There is none, it does not fit the model, or the consumer fails.
pub(in crate::pass) fn for_each(stage: &str, model: &Model, context: &Context, consume: impl FnMut(Batch) -> Result<()>) -> Result<()> {
    open(model, context)?.for_each_batch(stage, &context.work, consume)
}

fn open(model: &Model, context: &Context) -> Result<Arc<DataSet>> {
    let options = context.data.calibration.as_ref().ok_or_else(|| Error::option("data: calibration", "is missing: the pass runs the model on samples"))?;
    context.data.open(options, Subject::of(model.clone())?.target())
}

/// Shows values that nodes of the running model compute, by name, for every batch: with all parameters in memory, or block by block where they do not fit.
///
/// # Errors
/// As [`for_each`], or memory that was asked for is too small.
pub(in crate::pass) fn observe(
    graph: &Graph,
    model: &Model,
    wanted: impl Fn(&str) -> bool,
    context: &Context,
    mut see: impl FnMut(&Batch, &str, &Tensor) -> Result<()>,
) -> Result<()> {
    let data = open(model, context)?;
    let need = MemoryNeed::of(graph, &model.weights, DType::F32, Residence::Computed, &sizes_of(graph, &data.first()?.inputs));
    if let Schedule::Blockwise { states } = context.memory.schedule(&[(model.config.model_type(), need)])? {
        let tracker = context.memory_tracker.clone();
        let options = BlockwiseOptions { residence: Residence::Computed, limit: states / 2, tracker, ..BlockwiseOptions::on(&context.device) };
        let computed = |name: &str| wanted(name) && graph.inputs().all(|(_, value)| value.name != name);
        return observe_blockwise((graph, &model.weights), &options, states / 2, &data, computed, &context.work, see);
    }
    let executor = Executor::new(graph, parameters(graph, model, context)?, context.device.clone()).tracked(context.memory_tracker.as_ref());
    let observation = executor.observation(wanted);
    data.for_each_batch("Observing", &context.work, |batch| executor.run_observed(&observation, &batch.inputs, &mut |name, value| see(&batch, name, value)))
}

/// One for each of rows `[n, size]` that is not all zeros, which are tokens that an expert does not see; `[n, 1]`.
///
/// # Errors
/// The device runs out of memory.
pub(super) fn seen(rows: &Tensor) -> candle_core::Result<Tensor> {
    rows.abs()?.max_keepdim(D::Minus1)?.gt(0.0)?.to_dtype(rows.dtype())
}

/// What is seen of the values that are asked for, with all parameters in memory, or block by block where they do not fit.
///
/// # Errors
/// As [`for_each`], or memory that was asked for is too small.
pub(in crate::pass) fn statistics(
    pass: &str,
    graph: &Graph,
    model: &Model,
    requests: &BTreeMap<String, Request>,
    context: &Context,
) -> Result<BTreeMap<String, ValueStatistics>> {
    let Some(options) = &context.data.calibration else {
        return Err(Error::option(pass, "needs samples to run the model on: add `data: { calibration: ... }`"));
    };
    let (inputs, outputs) = Port::of(graph);
    let (folder, config) = model.preprocessing()?;
    let target = Target { folder: &folder, made: &model.beside.made, config: config.values(), inputs: &inputs, outputs: &outputs };
    let data = context.data.open(options, target)?;
    let need = MemoryNeed::of(graph, &model.weights, DType::F32, Residence::Stored, &sizes_of(graph, &data.first()?.inputs));
    if let Schedule::Blockwise { states } = context.memory.schedule(&[(model.config.model_type(), need)])? {
        // Half of them while samples wait at a value within a block.
        let options = BlockwiseOptions { limit: states / 2, tracker: context.memory_tracker.clone(), ..BlockwiseOptions::on(&context.device) };
        let mut seen = calibrate_blockwise((graph, &model.weights), &options, states / 2, &data, requests, &context.work)?;
        see_parameters(graph, model, requests, &mut seen)?;
        return Ok(seen);
    }
    let parameters = Parameters::load(graph, &model.weights, &context.device, DType::F32, Residence::Stored, &context.work)?;
    let executor = Executor::new(graph, parameters, context.device.clone()).tracked(context.memory_tracker.as_ref());
    let mut seen = calibrate(&executor, &data, requests, &context.work)?;
    see_parameters(graph, model, requests, &mut seen)?;
    Ok(seen)
}

/// Adds the parameters that are asked for, like a table that a layer reads: no sample shows them.
fn see_parameters(graph: &Graph, model: &Model, requests: &BTreeMap<String, Request>, seen: &mut BTreeMap<String, ValueStatistics>) -> Result<()> {
    for (_, value) in graph.params() {
        if let Some(request) = requests.get(&value.name) {
            let weight = model.weights.get(&value.name)?;
            seen.insert(value.name.clone(), ValueStatistics::of_parameter(&value.name, &weight.floats(&value.name)?, &weight.shape, *request)?);
        }
    }
    Ok(())
}

/// Parameters of a graph by name, as floats in 32 bits.
///
/// # Errors
/// As [`parameters`].
pub(in crate::pass) fn some_parameters(names: Vec<&String>, model: &Model, context: &Context) -> Result<Parameters> {
    Parameters::load_named(names, &model.weights, &context.device, DType::F32, Residence::Computed, &context.work.quiet())
}

/// The parameters of a graph, as floats in 32 bits.
///
/// # Errors
/// Reading fails, or memory runs out.
pub(in crate::pass) fn parameters(graph: &Graph, model: &Model, context: &Context) -> Result<Parameters> {
    Parameters::load(graph, &model.weights, &context.device, DType::F32, Residence::Computed, &context.work)
}

/// The parameters of a graph for differentiation, and the positions of nodes at which blocks begin that are computed again: none where all
/// parameters are in memory, else those of all blocks, whose parameters come from their files when they are used.
///
/// # Errors
/// As [`parameters`], or memory that was asked for is too small for what blocks hand on.
pub(in crate::pass) fn parameters_to_differentiate(graph: &Graph, model: &Model, context: &Context) -> Result<(Parameters, Vec<usize>)> {
    let sizes = sizes_of(graph, &open(model, context)?.first()?.inputs);
    let need = MemoryNeed::of(graph, &model.weights, DType::F32, Residence::Computed, &sizes);
    let (kept, count) = (need.state.saturating_mul(need.count.saturating_sub(1) as u64), need.count);
    let Schedule::Blockwise { states } = context.memory.schedule(&[(model.config.model_type(), need)])? else {
        return Ok((parameters(graph, model, context)?, Vec::new()));
    };
    if kept > states && context.memory.asked {
        return Err(Error::run(
            "differentiating the model",
            format!("{count} blocks hand on {kept} bytes, and {states} of the memory given are left for that"),
            "a smaller `batch_size` or `max_length` of the calibration data needs less, and importance activation no such memory",
        ));
    }
    let names = graph.params().map(|(_, value)| &value.name).collect();
    let (parameters, _) = Parameters::streamed(names, &model.weights, &context.device, DType::F32, Residence::Computed)?;
    Ok((parameters, analysis::block_ends(graph)))
}

/// The rows `[n, features]` of a value that a layer reads, without those of padding.
///
/// # Errors
/// Memory runs out.
pub(in crate::pass) fn rows(value: &Tensor, op: &Op, batch: &Batch, tokens: TokenAxis) -> Result<Tensor> {
    let flat = || {
        if matches!(op, Op::Conv(_) | Op::BatchNorm(_)) && value.rank() > 2 {
            return value.flatten_from(2)?.transpose(1, 2)?.contiguous()?.flatten_to(1);
        }
        let rows = value.flatten_to(value.rank().saturating_sub(2))?;
        match Padding::of(batch)?.kept(tokens, value.dims()) {
            None => Ok(rows),
            Some(kept) => {
                let kept: Vec<u32> = (0..).zip(&*kept).filter(|(_, kept)| **kept).map(|(at, _)| at).collect();
                rows.index_select(&Tensor::from_vec(kept.clone(), kept.len(), rows.device())?, 0)
            }
        }
    };
    flat().map_err(computed)
}

/// An error of a tensor that could not be computed.
pub(in crate::pass) fn computed(e: candle_core::Error) -> Error {
    Error::run("calibration", e, "")
}

/// A value of the graph that a sample has made infinite, or no number.
pub(in crate::pass) fn not_finite(name: &str) -> Error {
    Error::run(
        format!("graph value `{name}`"),
        "is not finite for a calibration sample",
        "the model cannot compute this sample, or a weight is not finite: `compress eval` on the same data shows more",
    )
}

/// A tensor's numbers.
///
/// # Errors
/// It cannot be copied to main memory.
pub(in crate::pass) fn numbers(tensor: &Tensor) -> Result<Vec<f64>> {
    let read = || transfer::values::<f64>(tensor, Cause::Statistics);
    read().map_err(computed)
}

/// For each column of a matrix, the sum of its elements and that of their squares.
///
/// # Errors
/// It cannot be copied to main memory.
pub(in crate::pass) fn column_moments(rows: &Tensor) -> Result<[Vec<f64>; 2]> {
    if matches!(rows.device(), Device::Cpu) {
        let width = rows.dims().last().copied().unwrap_or(0);
        return floats_on_host(rows, Cause::Statistics).and_then(|rows| read(&rows, |values| Ok(columns::moments(values, width)))).map_err(computed);
    }
    let sums = |rows: candle_core::Result<Tensor>| rows.and_then(|rows| rows.sum(0)).map_err(computed).and_then(|sums| numbers(&sums));
    Ok([sums(Ok(rows.clone()))?, sums(rows.sqr())?])
}

/// Sums and sums of squares of features.
#[derive(Default)]
pub(in crate::pass) struct Moments {
    count: f64,
    sums: Vec<f64>,
    pub squares: Vec<f64>,
}

impl Moments {
    /// Takes rows, one number for each feature in each.
    ///
    /// # Errors
    /// As [`column_moments`].
    pub fn add(&mut self, rows: &Tensor) -> Result<()> {
        self.count += rows.dims()[0] as f64;
        for (total, found) in [&mut self.sums, &mut self.squares].into_iter().zip(column_moments(rows)?) {
            total.resize(found.len(), 0.0);
            total.iter_mut().zip(found).for_each(|(total, found)| *total += found);
        }
        Ok(())
    }

    /// How many features there are.
    pub fn features(&self) -> usize {
        self.sums.len()
    }

    /// Mean and variance of a feature.
    pub fn of(&self, at: usize) -> (f64, f64) {
        let mean = self.sums[at] / self.count;
        (mean, (self.squares[at] / self.count - mean * mean).max(0.0))
    }
}
