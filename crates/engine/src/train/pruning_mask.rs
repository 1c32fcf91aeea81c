//! Masks of pruned weights.

use candle_core::{D, DType, Tensor};

use crate::exec::transfer::{self, Cause};
use crate::ir::ops::ScalarOps;

/// Fraction of zeros of unknown origin above which a note is written; fewer can be the row of a padding
/// token, or chance.
pub(super) const NOTED_FRACTION: f64 = 0.005;

/// The pruning mask of a matrix with zeros, and their number.
pub(super) fn pruning_mask(tensor: &Tensor) -> candle_core::Result<Option<(Tensor, u64)>> {
    if tensor.rank() < 2 {
        return Ok(None);
    }
    let mask = tensor.ne_scalar(0.0)?.to_dtype(DType::F32)?;
    // Sums of more than 2^24 ones are not exact in f32.
    let kept = transfer::number(&mask.sum(D::Minus1)?.to_dtype(DType::F64)?.sum_all()?, Cause::Weights)?;
    let zeros = tensor.elem_count() as u64 - kept as u64;
    Ok((zeros > 0).then_some((mask, zeros)))
}
