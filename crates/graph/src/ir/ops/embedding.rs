//! Embedding lookup.

use std::ops::Range;

use candle_core::Tensor;
use serde::{Deserialize, Serialize};

use super::gradient::wide;
use super::kernels::sum_rows_by_index;
use super::{Backward, OpSpec, ScalarOps, require, require_floats};
use crate::ir::{Element, TensorType};

/// Rows of `table: [rows, width]` selected by integer indices. Negative ones count from the end, as in ONNX's
/// `Gather`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Embedding {}

/// Flattened indices, with those from the end replaced by those from the start.
pub(super) fn from_start(indices: &Tensor, rows: usize) -> candle_core::Result<Tensor> {
    let indices = indices.flatten_all()?;
    let negative = indices.lt_scalar(0.0)?.to_dtype(indices.dtype())?;
    indices + negative.affine(rows as f64, 0.0)?
}

impl OpSpec for Embedding {
    fn arity(&self) -> Range<usize> {
        2..3
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        require(inputs[0], Element::Int, "the indices")?;
        require_floats(inputs[1], 2, "the table")?;
        let shape = inputs[0].shape.iter().chain([&inputs[1].shape[1]]).cloned().collect();
        Ok(TensorType { element: Element::Float, shape })
    }

    fn axes(&self, _inputs: &[&TensorType]) -> String {
        "*, _ c -> * c".into()
    }

    fn eval(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
        let (indices, table) = (&inputs[0], &inputs[1]);
        let rows = table.index_select(&from_start(indices, table.dim(0)?)?, 0)?;
        let mut shape = indices.dims().to_vec();
        shape.push(table.dim(1)?);
        rows.reshape(shape)
    }

    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        let table = backward.inputs[1].dims();
        let of_table = backward.gradient_of(1, || {
            let indices = from_start(backward.inputs[0].tensor()?, table[0])?;
            let rows = wide(&backward.gradient.reshape((indices.elem_count(), table[1]))?)?;
            sum_rows_by_index(&rows, &indices, table[0])?.to_dtype(backward.gradient.dtype())
        })?;
        Ok(vec![None, of_table])
    }

    fn reads_input(&self, input: usize) -> bool {
        input == 0
    }

    fn accepts_half(&self, input: usize) -> bool {
        input == 1
    }

    fn accepts_codes(&self, input: usize) -> bool {
        input == 1
    }
}
