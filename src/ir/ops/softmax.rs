//! Softmax.

use std::ops::Range;

use candle_core::{D, Device, Tensor};
use serde::{Deserialize, Serialize};

use super::gradient::{is_half, wide};
use super::host::{by_rows, combined_rows, readable};
use super::{Backward, Mode, OpSpec, last, require};
use crate::ir::{Element, TensorType};
use crate::kernel::{rows, rows_gradient};

/// `exp(x) / Σ exp(x)` over the last axis.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Softmax {}

impl OpSpec for Softmax {
    fn arity(&self) -> Range<usize> {
        1..2
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
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

    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        Ok(vec![backward.of(0, || back(backward.output.tensor()?, backward.gradient))?])
    }

    fn reads_input(&self, _input: usize) -> bool {
        false
    }

    fn reads_output(&self) -> bool {
        true
    }
}

/// The gradient of a softmax's argument, out of its result.
pub(super) fn back(y: &Tensor, gradient: &Tensor) -> candle_core::Result<Tensor> {
    let width = y.dim(D::Minus1)?;
    let (y, gradient) = (y.contiguous()?, gradient.contiguous()?);
    let kernel = |y: &[f32], g: &[f32], out: &mut [f32]| {
        out.copy_from_slice(g);
        rows_gradient::softmax(y, out, width, 1.0);
    };
    if readable([&y, &gradient])
        && let Some(result) = combined_rows(&y, &gradient, width, kernel)
    {
        return result;
    }
    let (wide_y, wide_gradient) = (wide(&y)?, wide(&gradient)?);
    let along = (&wide_y * &wide_gradient)?.sum_keepdim(D::Minus1)?;
    (wide_gradient.broadcast_sub(&along)? * wide_y)?.to_dtype(gradient.dtype())
}

/// Over the last axis, in 32 bits; the fused kernel has no gradient, and on the CPU sums in the type of its argument.
pub(super) fn softmax(x: &Tensor, mode: Mode) -> candle_core::Result<Tensor> {
    if is_half(x) && (mode == Mode::Train || matches!(x.device(), Device::Cpu)) {
        return softmax(&wide(x)?, mode)?.to_dtype(x.dtype());
    }
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
