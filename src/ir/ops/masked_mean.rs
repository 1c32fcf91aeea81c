//! The mean of the tokens that are no padding.

use std::ops::Range;

use candle_core::Tensor;
use serde::{Deserialize, Serialize};

use super::{Mode, OpSpec, require, require_arity, require_rank};
use crate::ir::{Element, TensorType};

/// `[batch, sequence, width]` and a mask `[batch, sequence]` to `[batch, width]`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MaskedMean {}

impl OpSpec for MaskedMean {
    fn arity(&self) -> Range<usize> {
        2..3
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        require_arity(self, inputs)?;
        require(inputs[0], Element::Float, "the input")?;
        require_rank(inputs[0], 3, "the input")?;
        require(inputs[1], Element::Int, "the mask")?;
        if inputs[1].shape != inputs[0].shape[..2] {
            return Err("the mask must be [batch, sequence]".into());
        }
        Ok(TensorType { element: Element::Float, shape: vec![inputs[0].shape[0].clone(), inputs[0].shape[2].clone()] })
    }

    fn axes(&self, _inputs: usize) -> String {
        "b s! c, b s! -> b c".into()
    }

    fn eval(&self, inputs: &[Tensor], _mode: Mode) -> candle_core::Result<Tensor> {
        let mask = inputs[1].to_dtype(inputs[0].dtype())?.unsqueeze(2)?;
        let sum = inputs[0].broadcast_mul(&mask)?.sum(1)?;
        sum.broadcast_div(&mask.sum(1)?.clamp(1e-9, f64::MAX)?)
    }
}
