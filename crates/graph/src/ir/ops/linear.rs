//! Linear layer: a matrix product over the last axis.

use std::ops::Range;

use candle_core::Tensor;
use serde::{Deserialize, Serialize};

use super::gradient::summed_to;
use super::{Backward, OpSpec, last, require, require_rank, require_vector, sums};
use crate::ir::{Bindings, Element, TensorType};

/// `y = x Wᵀ + b` with `W: [out, in]`, or `y = x W + b` with `W: [in, out]`; the bias is optional.
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
        let [x, weight] = [inputs[0], inputs[1]];
        require(x, Element::Float, "the input")?;
        require_rank(weight, 2, "the weight")?;
        let (out, inner) = if self.input_major { (&weight.shape[1], &weight.shape[0]) } else { (&weight.shape[0], &weight.shape[1]) };
        if last(x)? != inner {
            return Err(format!("the last axis of the input has size {}, but the weight requires {inner}", last(x)?));
        }
        if let Some(bias) = inputs.get(2) {
            require_vector(bias, out, "the bias")?;
        }
        let mut shape = x.shape.clone();
        shape.pop();
        shape.push(out.clone());
        Ok(TensorType { element: Element::Float, shape })
    }

    fn axes(&self, inputs: &[&TensorType]) -> String {
        let weight = if self.input_major { "k o" } else { "o k" };
        format!("* k, {weight}{} -> * o", if inputs.len() > 2 { ", o" } else { "" })
    }

    fn eval(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
        let x = &inputs[0];
        let weight = inputs[1].to_dtype(x.dtype())?;
        let weight = if self.input_major { weight } else { weight.t()? };
        let y = by_row(x, weight.dim(0)?)?.matmul(&weight)?;
        let y = match inputs.get(2) {
            Some(bias) => y.broadcast_add(&bias.to_dtype(x.dtype())?)?,
            None => y,
        };
        let mut shape = x.dims().to_vec();
        shape.pop();
        shape.push(weight.dim(1)?);
        y.reshape(shape)
    }

    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        let weight = backward.inputs[1].dims();
        let (out, inner) = if self.input_major { (weight[1], weight[0]) } else { (weight[0], weight[1]) };
        let gradient = by_row(backward.gradient, out)?;
        let of_input = backward.gradient_of(0, || {
            // A linear layer with the transposed weight.
            Linear { input_major: !self.input_major }.eval(&[backward.gradient.clone(), backward.inputs[1].tensor()?.clone()])
        })?;
        let of_weight = backward.gradient_of(1, || {
            let x = by_row(backward.inputs[0].tensor()?, inner)?;
            let product = if self.input_major { x.t()?.matmul(&gradient) } else { gradient.t()?.matmul(&x) };
            product?.to_dtype(backward.inputs[1].tensor()?.dtype())
        })?;
        let of_bias = backward.gradient_of(2, || summed_to(&gradient, &[out]))?;
        Ok([of_input, of_weight, of_bias].into_iter().take(backward.inputs.len()).collect())
    }

    fn reads_input(&self, input: usize) -> bool {
        input < 2
    }

    fn accepts_half(&self, input: usize) -> bool {
        input == 1
    }

    fn accepts_codes(&self, input: usize) -> bool {
        input == 1 && !self.input_major
    }

    fn macs(&self, inputs: &[&TensorType], output: &TensorType, bindings: &Bindings) -> u64 {
        sums(output, inputs[0].shape.last(), bindings)
    }
}

/// Flattens all axes except the last one.
pub(super) fn by_row(x: &Tensor, width: usize) -> candle_core::Result<Tensor> {
    x.reshape((x.elem_count() / width.max(1), width))
}
