//! Mean over the tokens that are not padding.

use std::ops::Range;

use candle_core::{DType, Tensor};
use serde::{Deserialize, Serialize};

use super::constants::ScalarOps;
use super::gradient::wide;
use super::{Backward, OpSpec, pooled_type};
use crate::ir::TensorType;

/// Masked mean over the sequence: `[batch, sequence, width]` and a mask `[batch, sequence]` to `[batch,
/// width]`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MaskedMean {}

impl OpSpec for MaskedMean {
    fn arity(&self) -> Range<usize> {
        2..3
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        pooled_type(inputs, "the mask")
    }

    fn axes(&self, _inputs: &[&TensorType]) -> String {
        "b s! c, b s! -> b c".into()
    }

    fn eval(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
        let x = wide(&inputs[0])?;
        let (mask, count) = counted(&inputs[1], x.dtype())?;
        x.broadcast_mul(&mask)?.sum(1)?.broadcast_div(&count)?.to_dtype(inputs[0].dtype())
    }

    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        let of_input = backward.gradient_of(0, || {
            let gradient = wide(backward.gradient)?;
            let (mask, count) = counted(backward.inputs[1].tensor()?, gradient.dtype())?;
            gradient.broadcast_div(&count)?.unsqueeze(1)?.broadcast_mul(&mask)?.to_dtype(backward.gradient.dtype())
        })?;
        Ok(vec![of_input, None])
    }

    fn reads_input(&self, input: usize) -> bool {
        input == 1
    }
}

/// The mask with a width axis, and the number of unmasked tokens in each row.
fn counted(mask: &Tensor, dtype: DType) -> candle_core::Result<(Tensor, Tensor)> {
    let mask = mask.to_dtype(dtype)?.unsqueeze(2)?;
    let count = mask.sum(1)?.clamp_scalar(1e-9, f64::MAX)?;
    Ok((mask, count))
}
