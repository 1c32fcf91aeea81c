//! Which tokens count.

use candle_core::{DType, Device, Result, Tensor};

use crate::data::Batch;
use crate::exec::transfer::{self, Cause};

/// 1 for tokens and 0 for padding, `[batch, sequence]` in f32; nothing where samples have no padding.
pub(super) fn of(batch: &Batch, device: &Device) -> Result<Option<Tensor>> {
    let mask = batch.mask();
    mask.map(|mask| transfer::to_device(mask, device, Cause::Batch)?.ne(0i64)?.to_dtype(DType::F32)).transpose()
}

/// How many tokens there are; samples, where they are no sequences.
pub(super) fn tokens(batch: &Batch) -> Result<f64> {
    match batch.inputs.get("attention_mask") {
        Some(mask) => Ok(transfer::read::<i64>(mask)?.iter().filter(|real| **real != 0).count() as f64),
        None => Ok(match batch.inputs.get("input_ids") {
            Some(ids) => ids.elem_count() as f64,
            None => batch.samples as f64,
        }),
    }
}

/// Whether samples are sequences of tokens.
pub(super) fn are_tokens(batch: &Batch) -> bool {
    batch.inputs.contains_key("input_ids") || batch.inputs.contains_key("attention_mask")
}

/// What each place of a value `[batch, ...]` counts: a token 1, padding 0; where places are no tokens, all those of a sample 1 together.
pub(super) fn weights(value: &Tensor, batch: &Batch, by_token: bool) -> Result<Tensor> {
    if !by_token {
        return value.ones_like()? / (value.elem_count() / value.dim(0)?.max(1)).max(1) as f64;
    }
    match of(batch, value.device())?.filter(|mask| mask.dims() == value.dims()) {
        Some(mask) => Ok(mask),
        None => value.ones_like(),
    }
}
