//! Padding masks and weights of token positions.

use candle_core::{DType, Device, Result, Tensor};

use crate::data::{Batch, SequenceRole};
use crate::exec::transfer::{self, Cause};
use crate::ir::ops::ScalarOps;

/// The padding mask `[batch, sequence]` in f32: 1 for tokens, 0 for padding. `None` without padding, or
/// if positions are not tokens.
pub(super) fn token_mask(batch: &Batch, tokens: Option<SequenceRole>, device: &Device) -> Result<Option<Tensor>> {
    let mask = tokens.and_then(|side| batch.mask(side));
    mask.map(|mask| transfer::to_device(mask, device, Cause::Batch)?.ne_scalar(0.0)?.to_dtype(DType::F32)).transpose()
}

/// Number of tokens without padding; the number of samples if positions are not tokens.
pub(super) fn count(batch: &Batch, tokens: Option<SequenceRole>) -> Result<f64> {
    let Some(side) = tokens else { return Ok(batch.rows() as f64) };
    match (batch.mask(side), batch.tokens(side)) {
        (Some(mask), _) => Ok(transfer::read::<i64>(mask)?.iter().filter(|real| **real != 0).count() as f64),
        (None, Some(ids)) => Ok(ids.elem_count() as f64),
        (None, None) => Ok(batch.rows() as f64),
    }
}

/// Weight of each position of a value `[batch, ...]`: 1 for a token, 0 for padding. If positions are not
/// tokens, the weights of each sample sum to 1. Fails if the shape differs from that of the tokens.
pub(super) fn weights(value: &Tensor, batch: &Batch, tokens: Option<SequenceRole>) -> Result<Tensor> {
    let Some(real) = tokens.and_then(|side| batch.mask(side).or_else(|| batch.tokens(side))) else {
        require_rows_of_samples("a value of the loss", value, batch)?;
        return value.ones_like()? / (value.elem_count() / value.dim(0)?.max(1)).max(1) as f64;
    };
    if real.dims() != value.dims() {
        candle_core::bail!("the value has the shape {:?}, but its tokens or their mask {:?}", value.dims(), real.dims());
    }
    token_mask(batch, tokens, value.device())?.map_or_else(|| value.ones_like(), Ok)
}

/// Rejects values without one row per sample, such as those of a run file that holds several samples.
pub(super) fn require_rows_of_samples(name: &str, value: &Tensor, batch: &Batch) -> Result<()> {
    let rows = value.dim(0)?;
    if rows != batch.rows() {
        candle_core::bail!(
            "{name} has {rows} rows for {} samples: each run file counts as one sample, so use run files with one row, \
             or a single file of arrays with one row per sample",
            batch.samples
        );
    }
    Ok(())
}
