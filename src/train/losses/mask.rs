//! Which tokens count.

use candle_core::{DType, Device, Result, Tensor};

use crate::data::Batch;
use crate::exec::transfer::{self, Cause};

/// 1 for tokens and 0 for padding, `[batch, sequence]` in f32; nothing where samples have no padding.
pub(super) fn of(batch: &Batch, device: &Device) -> Result<Option<Tensor>> {
    let mask = batch.inputs.get("attention_mask");
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

/// 1 for each token of a value `[batch, sequence]`, and 0 for padding.
pub(super) fn weights(value: &Tensor, batch: &Batch) -> Result<Tensor> {
    match of(batch, value.device())?.filter(|mask| mask.dims() == value.dims()) {
        Some(mask) => Ok(mask),
        None => value.ones_like(),
    }
}
