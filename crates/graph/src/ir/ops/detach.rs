//! A value without a gradient.

use std::ops::Range;

use candle_core::Tensor;
use serde::{Deserialize, Serialize};

use super::{Backward, OpSpec, require};
use crate::ir::{Element, TensorType};

/// The input, through which no gradient flows back.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Detach {}

impl OpSpec for Detach {
    fn arity(&self) -> Range<usize> {
        1..2
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        require(inputs[0], Element::Float, "the input")?;
        Ok(inputs[0].clone())
    }

    fn axes(&self, _inputs: &[&TensorType]) -> String {
        "* c -> * c".into()
    }

    fn eval(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
        Ok(inputs[0].clone())
    }

    fn backward(&self, _backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        Ok(vec![None])
    }

    fn reads_input(&self, _input: usize) -> bool {
        false
    }
}
