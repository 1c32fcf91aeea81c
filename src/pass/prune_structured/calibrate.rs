//! Running the model on calibration data.

use std::collections::BTreeMap;

use candle_core::{DType, Tensor};

use crate::data::{Batch, DataSet, Padding};
use crate::error::{Error, Result};
use crate::evaluation::Subject;
use crate::exec::transfer::{self, Cause};
use crate::exec::{Parameters, Residence};
use crate::ir::{Graph, Op};
use crate::model::Model;
use crate::pass::Context;

use super::NAME;

/// Goes through the calibration data.
///
/// # Errors
/// There is none, it does not fit the model, or the consumer fails.
pub(super) fn for_each(stage: &str, model: &Model, context: &Context, consume: impl FnMut(Batch) -> Result<()>) -> Result<()> {
    let options = context.data.calibration.as_ref().ok_or_else(|| Error::option(NAME, "needs calibration data"))?;
    let subject = Subject::of(model.clone())?;
    let data = DataSet::open(options, subject.target())?;
    data.sweep(stage, &context.sweep, consume)
}

/// The parameters of a graph, as floats in 32 bits.
///
/// # Errors
/// Reading fails, or memory runs out.
pub(super) fn parameters(graph: &Graph, model: &Model, context: &Context) -> Result<Parameters> {
    Parameters::load(graph, &model.weights, &context.device, DType::F32, Residence::Computed, &context.sweep)
}

/// The rows `[n, features]` of a value that a layer reads, padding left out.
///
/// # Errors
/// Memory runs out.
pub(super) fn rows(value: &Tensor, op: &Op, batch: &Batch) -> Result<Tensor> {
    let flat = || {
        if matches!(op, Op::Conv(_) | Op::BatchNorm(_)) && value.rank() == 4 {
            return value.permute((0, 2, 3, 1))?.contiguous()?.flatten_to(2);
        }
        let rows = value.flatten_to(value.rank().saturating_sub(2))?;
        match Padding::of(batch)?.kept(value.dims()) {
            None => Ok(rows),
            Some(kept) => {
                let kept: Vec<u32> = (0..).zip(kept).filter(|(_, kept)| **kept).map(|(at, _)| at).collect();
                rows.index_select(&Tensor::from_vec(kept.clone(), kept.len(), rows.device())?, 0)
            }
        }
    };
    flat().map_err(computed)
}

/// Sums of squares of each feature of the values that nodes read, by node.
pub(super) type Squares = BTreeMap<usize, Vec<f64>>;

/// An error of a tensor that could not be computed.
pub(super) fn computed(e: candle_core::Error) -> Error {
    Error::run(NAME, e, "")
}

/// A tensor's numbers.
///
/// # Errors
/// It cannot be copied to main memory.
pub(super) fn numbers(tensor: &Tensor) -> Result<Vec<f64>> {
    let read = || transfer::values::<f64>(tensor, Cause::Statistics);
    read().map_err(computed)
}
