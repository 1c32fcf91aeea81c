//! Softmax.

use std::ops::Range;

use candle_core::{D, Tensor};
use serde::{Deserialize, Serialize};

use super::host::by_rows;
use super::{Mode, OpSpec, last, require, require_arity};
use crate::ir::{Element, TensorType};
use crate::kernel::rows;

/// `exp(x) / Σ exp(x)` over the last axis.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Softmax {}

impl OpSpec for Softmax {
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
        "* c! -> * c!".into()
    }

    fn eval(&self, inputs: &[Tensor], mode: Mode) -> candle_core::Result<Tensor> {
        softmax(&inputs[0], mode)
    }
}

/// Over the last axis; the fused kernel has no gradient.
pub(super) fn softmax(x: &Tensor, mode: Mode) -> candle_core::Result<Tensor> {
    match mode {
        Mode::Infer => {
            let width = x.dim(D::Minus1)?;
            let fast = by_rows(x, [], |x, y, []| {
                y.copy_from_slice(x);
                rows::softmax(y, width);
            })?;
            fast.map_or_else(|| candle_nn::ops::softmax_last_dim(&x.contiguous()?), Ok)
        }
        Mode::Train => candle_nn::ops::softmax(x, D::Minus1),
    }
}
