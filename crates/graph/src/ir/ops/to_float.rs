//! Conversion of integers to floats.

use std::ops::Range;

use candle_core::{DType, Tensor};
use serde::{Deserialize, Serialize};

use super::{Backward, OpSpec, require};
use crate::ir::{Element, TensorType};

/// Converts integers, such as those of a mask, to floats.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ToFloat {}

impl OpSpec for ToFloat {
    fn arity(&self) -> Range<usize> {
        1..2
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        require(inputs[0], Element::Int, "the input")?;
        Ok(TensorType { element: Element::Float, shape: inputs[0].shape.clone() })
    }

    fn axes(&self, _inputs: &[&TensorType]) -> String {
        "* c -> * c".into()
    }

    fn eval(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
        inputs[0].to_dtype(DType::F32)
    }

    fn backward(&self, _backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        Ok(vec![None])
    }

    fn reads_input(&self, _input: usize) -> bool {
        false
    }
}
