//! Which tokens count.

use candle_core::{DType, Device, Result, Tensor};

use crate::data::{Batch, Side};
use crate::exec::transfer::{self, Cause};

/// 1 for tokens of a side and 0 for padding, `[batch, sequence]` in f32; nothing where samples have no padding, or rows are no tokens.
pub(super) fn of(batch: &Batch, tokens: Option<Side>, device: &Device) -> Result<Option<Tensor>> {
    let mask = tokens.and_then(|side| batch.mask(side));
    mask.map(|mask| transfer::to_device(mask, device, Cause::Batch)?.ne(0i64)?.to_dtype(DType::F32)).transpose()
}

/// How many tokens of a side there are; samples, where rows are no tokens.
pub(super) fn count(batch: &Batch, tokens: Option<Side>) -> Result<f64> {
    let Some(side) = tokens else { return Ok(batch.samples as f64) };
    match (batch.mask(side), batch.tokens(side)) {
        (Some(mask), _) => Ok(transfer::read::<i64>(mask)?.iter().filter(|real| **real != 0).count() as f64),
        (None, Some(ids)) => Ok(ids.elem_count() as f64),
        (None, None) => Ok(batch.samples as f64),
    }
}

/// What each place of a value `[batch, ...]` counts: a token 1, padding 0; where places are no tokens, all those of a sample 1 together.
///
/// # Errors
/// There are not as many tokens as places.
pub(super) fn weights(value: &Tensor, batch: &Batch, tokens: Option<Side>) -> Result<Tensor> {
    let Some(real) = tokens.and_then(|side| batch.mask(side).or_else(|| batch.tokens(side))) else {
        require_rows_of_samples("a value of the loss", value, batch)?;
        return value.ones_like()? / (value.elem_count() / value.dim(0)?.max(1)).max(1) as f64;
    };
    if real.dims() != value.dims() {
        candle_core::bail!("a value has places {:?}, its tokens or their mask are {:?}", value.dims(), real.dims());
    }
    of(batch, tokens, value.device())?.map_or_else(|| value.ones_like(), Ok)
}

/// Refuses values whose first axis is not that of samples, as those of a run file that holds several.
///
/// # Errors
/// There are more or fewer rows than samples.
pub(super) fn require_rows_of_samples(name: &str, value: &Tensor, batch: &Batch) -> Result<()> {
    let rows = value.dim(0)?;
    if rows != batch.samples {
        candle_core::bail!(
            "{name} has {rows} rows for {} samples: a file for each run of the model counts as one sample, so give files of one row, \
             or arrays with a row for each sample in one file",
            batch.samples
        );
    }
    Ok(())
}
