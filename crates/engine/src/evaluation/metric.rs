//! Accumulation of a metric over the outputs of a model.

use std::collections::BTreeMap;
use std::ops::Range;

use candle_core::Tensor;

use super::Score;
use crate::data::Batch;
use crate::error::{Error, Result};

/// Named outputs of a model.
pub type Outputs = BTreeMap<String, Tensor>;

/// Accumulates a task metric over batches.
pub(super) trait Metric {
    /// Adds a batch and the outputs of the model for it.
    fn add(&mut self, batch: &Batch, outputs: &Outputs) -> Result<()>;
    /// The score of all batches.
    fn score(&self) -> Result<Score>;
}

/// Selects the output that a metric reads: the first of the names that exists, else the only output of
/// this rank.
pub(super) fn select_output<'o>(outputs: &'o Outputs, names: &[&str], rank: usize) -> Result<(&'o str, &'o Tensor)> {
    let named = names.iter().find_map(|name| outputs.get_key_value(*name));
    let mut fitting = outputs.iter().filter(|(_, tensor)| tensor.rank() == rank);
    let mut only = || fitting.next().filter(|_| fitting.next().is_none());
    let selected = match named {
        Some(named) => Some(named).filter(|(_, tensor)| tensor.rank() == rank),
        None => only(),
    };
    selected.map(|(name, tensor)| (name.as_str(), tensor)).ok_or_else(|| {
        let all = outputs.iter().map(|(name, tensor)| format!("`{name}` {:?}", tensor.dims())).collect::<Vec<_>>().join(", ");
        Error::option("task", format!("needs an output `{}` with {rank} dimensions; the outputs of the model are {all}", names.first().unwrap_or(&"")))
    })
}

/// Converts an error of a tensor operation.
pub(super) fn tensor_error(e: candle_core::Error) -> Error {
    Error::option("evaluation", e)
}

/// Maximum number of `f64` elements that are reduced on a device in one operation.
const MAX_CHUNK_ELEMENTS: usize = 1 << 24;

/// Applies a reduction to chunks of rows that have at most [`MAX_CHUNK_ELEMENTS`] elements, and
/// concatenates the results.
pub(super) fn in_chunks<T>(rows: usize, width: usize, reduce: impl Fn(Range<usize>) -> candle_core::Result<Vec<T>>) -> candle_core::Result<Vec<T>> {
    let step = (MAX_CHUNK_ELEMENTS / width.max(1)).max(1);
    let chunks = (0..rows).step_by(step).map(|first| reduce(first..rows.min(first + step)));
    Ok(chunks.collect::<candle_core::Result<Vec<_>>>()?.into_iter().flatten().collect())
}
