//! Embedding lookup.

use std::ops::Range;

use candle_core::Tensor;
use serde::{Deserialize, Serialize};

use super::gradient::wide;
use super::kernels::sum_rows_by_index;
use super::{Backward, OpSpec, require, require_floats};
use crate::ir::{Element, TensorType};

/// Rows of `table: [rows, width]` selected by integer indices.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Embedding {}

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
        let rows = table.index_select(&indices.flatten_all()?, 0)?;
        let mut shape = indices.dims().to_vec();
        shape.push(table.dim(1)?);
        rows.reshape(shape)
    }

    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        let table = backward.inputs[1].dims();
        let of_table = backward.gradient_of(1, || {
            let indices = backward.inputs[0].tensor()?.flatten_all()?;
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
}
