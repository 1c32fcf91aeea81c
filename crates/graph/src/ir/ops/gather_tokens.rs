//! Selection of tokens by computed indices.

use std::ops::Range;

use candle_core::{DType, Tensor};
use serde::{Deserialize, Serialize};

use super::gradient::wide;
use super::kernels::sum_rows_by_index;
use super::{Backward, OpSpec, require, require_floats, require_rank};
use crate::ir::{Element, TensorType};

/// Selects tokens in each sample: `[batch, sequence, width]` and integer indices `[batch, count]` to `[batch,
/// count, width]`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GatherTokens {}

/// Indices into the token axis of all samples together.
fn flat(indices: &Tensor, sequence: usize) -> candle_core::Result<Tensor> {
    let batch = indices.dim(0)?;
    let first = Tensor::arange(0i64, batch as i64, indices.device())?.affine(sequence as f64, 0.0)?.unsqueeze(1)?;
    indices.to_dtype(DType::I64)?.broadcast_add(&first)?.flatten_all()
}

impl OpSpec for GatherTokens {
    fn arity(&self) -> Range<usize> {
        2..3
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        let (x, indices) = (inputs[0], inputs[1]);
        require_floats(x, 3, "the input")?;
        require(indices, Element::Int, "the indices")?;
        require_rank(indices, 2, "the indices")?;
        if indices.shape[0] != x.shape[0] {
            return Err(format!("{} rows of indices do not match {} rows of tokens", indices.shape[0], x.shape[0]));
        }
        Ok(TensorType { element: Element::Float, shape: vec![x.shape[0].clone(), indices.shape[1].clone(), x.shape[2].clone()] })
    }

    fn axes(&self, _inputs: &[&TensorType]) -> String {
        "b _ c, b k! -> b k! c".into()
    }

    fn eval(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
        let (batch, sequence, width) = inputs[0].dims3()?;
        let rows = inputs[0].contiguous()?.reshape((batch * sequence, width))?;
        rows.index_select(&flat(&inputs[1], sequence)?, 0)?.reshape((batch, inputs[1].dim(1)?, width))
    }

    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        let of_input = backward.gradient_of(0, || {
            let (dims, width) = (backward.inputs[0].dims(), backward.gradient.dim(2)?);
            let indices = flat(backward.inputs[1].tensor()?, dims[1])?;
            let rows = wide(backward.gradient)?.contiguous()?.reshape((indices.elem_count(), width))?;
            sum_rows_by_index(&rows, &indices, dims[0] * dims[1])?.reshape(dims)?.to_dtype(backward.gradient.dtype())
        })?;
        Ok(vec![of_input, None])
    }

    fn reads_input(&self, input: usize) -> bool {
        input == 1
    }
}
