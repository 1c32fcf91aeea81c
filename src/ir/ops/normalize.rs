//! Vectors of length one.

use std::ops::Range;

use candle_core::{D, Tensor};
use serde::{Deserialize, Serialize};

use super::{Mode, OpSpec, last, require, require_arity};
use crate::ir::{Element, TensorType};

/// `x / max(‖x‖₂, 1e-12)` over the last axis.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Normalize {}

impl OpSpec for Normalize {
    fn arity(&self) -> Range<usize> {
        1..2
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        require_arity(self, inputs)?;
        require(inputs[0], Element::Float, "the input")?;
        last(inputs[0])?;
        Ok(inputs[0].clone())
    }

    fn axes(&self, _inputs: usize) -> String {
        "* c~ -> * c~".into()
    }

    fn eval(&self, inputs: &[Tensor], _mode: Mode) -> candle_core::Result<Tensor> {
        let norm = inputs[0].sqr()?.sum_keepdim(D::Minus1)?.sqrt()?;
        inputs[0].broadcast_div(&norm.clamp(1e-12, f64::MAX)?)
    }
}
