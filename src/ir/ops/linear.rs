//! A matrix applied to the last axis.

use std::ops::Range;

use candle_core::Tensor;
use serde::{Deserialize, Serialize};

use super::{Mode, OpSpec, elements, last, require, require_arity, require_rank, require_vector};
use crate::ir::{Bindings, Element, TensorType};

/// `y = x Wᵀ + b` with `W: [out, in]`, or `y = x W + b` with `W: [in, out]`; the bias may be left out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Linear {
    /// Whether the weight is stored as `[in, out]` (transformers' `Conv1D`).
    pub input_major: bool,
}

impl OpSpec for Linear {
    fn arity(&self) -> Range<usize> {
        2..4
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        require_arity(self, inputs)?;
        let [x, weight] = [inputs[0], inputs[1]];
        require(x, Element::Float, "the input")?;
        require_rank(weight, 2, "the weight")?;
        let (out, inner) = if self.input_major { (&weight.shape[1], &weight.shape[0]) } else { (&weight.shape[0], &weight.shape[1]) };
        if last(x)? != inner {
            return Err(format!("the input has width {}, the weight takes {inner}", last(x)?));
        }
        if let Some(bias) = inputs.get(2) {
            require_vector(bias, out, "the bias")?;
        }
        let mut shape = x.shape.clone();
        shape.pop();
        shape.push(out.clone());
        Ok(TensorType { element: Element::Float, shape })
    }

    fn axes(&self, inputs: usize) -> String {
        let weight = if self.input_major { "k o" } else { "o k" };
        format!("* k, {weight}{} -> * o", if inputs > 2 { ", o" } else { "" })
    }

    fn eval(&self, inputs: &[Tensor], _mode: Mode) -> candle_core::Result<Tensor> {
        let x = &inputs[0];
        let weight = if self.input_major { inputs[1].clone() } else { inputs[1].t()? };
        let (inner, out) = weight.dims2()?;
        let rows = x.elem_count() / inner.max(1);
        let y = x.reshape((rows, inner))?.matmul(&weight)?;
        let y = match inputs.get(2) {
            Some(bias) => y.broadcast_add(bias)?,
            None => y,
        };
        let mut shape = x.dims().to_vec();
        if let Some(width) = shape.last_mut() {
            *width = out;
        }
        y.reshape(shape)
    }

    fn macs(&self, inputs: &[&TensorType], output: &TensorType, bindings: &Bindings) -> u64 {
        let inner = inputs[0].shape.last().and_then(|d| d.evaluate(bindings)).unwrap_or(0);
        elements(output, bindings) * inner as u64
    }
}
