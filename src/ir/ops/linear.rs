//! A matrix applied to the last axis.

use std::ops::Range;

use candle_core::{CpuStorage, Tensor};
use serde::{Deserialize, Serialize};

use super::host::{Host, Steps, column_sums, readable};
use super::{After, Backward, Mode, OpSpec, elements, last, require, require_rank, require_vector};
use crate::ir::{Bindings, Element, TensorType};
use crate::kernel::matmul::{Columns, Finish, Left, Rows, StoredFloat, product};
use crate::kernel::matmul_gradient::long_product;

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

    fn eval(&self, inputs: &[Tensor], mode: Mode) -> candle_core::Result<Tensor> {
        if mode == Mode::Infer
            && let Some(y) = self.eval_then(inputs, &[])?
        {
            return Ok(y);
        }
        let x = &inputs[0];
        let weight = inputs[1].to_dtype(x.dtype())?;
        let weight = if self.input_major { weight } else { weight.t()? };
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

    fn eval_then(&self, inputs: &[Tensor], after: &[After]) -> candle_core::Result<Option<Tensor>> {
        let (x, weight) = (inputs[0].contiguous()?, inputs[1].contiguous()?);
        let (first, second) = weight.dims2()?;
        let out = if self.input_major { second } else { first };
        let mut shape = x.dims().to_vec();
        if let Some(width) = shape.last_mut() {
            *width = out;
        }
        let fits = |like: &Tensor| like.dims() == shape && like.is_contiguous();
        let compute = || {
            let bias = match inputs.get(2) {
                Some(bias) if bias.is_contiguous() => Some(Host::of(bias)?),
                Some(_) => return None,
                None => None,
            };
            let steps = Steps::new(after, fits)?;
            let mut finish = Vec::new();
            if let Some(bias) = &bias {
                finish.push(Finish::AddToColumns(bias.floats()?));
            }
            // A linear layer's channels are columns.
            let steps = steps.finish()?;
            if steps.iter().any(|s| matches!(s, Finish::AddToRows(_) | Finish::MultiplyRows(_))) {
                return None;
            }
            finish.extend(steps);
            let (x, weight) = (Host::of(&x)?, Host::of(&weight)?);
            match weight.storage()? {
                (CpuStorage::F32(kept), start) => self.multiply(x.floats()?, &kept[start..], first, second, shape.iter().product(), &finish),
                (CpuStorage::BF16(kept), start) => self.multiply(x.floats()?, &kept[start..], first, second, shape.iter().product(), &finish),
                (CpuStorage::F16(kept), start) => self.multiply(x.floats()?, &kept[start..], first, second, shape.iter().product(), &finish),
                _ => None,
            }
        };
        compute().map(|values| Tensor::from_vec(values, shape.as_slice(), x.device())).transpose()
    }

    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        let (gradient, weight) = (backward.gradient, backward.inputs[1].dims());
        let out = if self.input_major { weight[1] } else { weight[0] };
        let by_row = |x: &Tensor, width: usize| x.reshape((x.elem_count() / width.max(1), width));
        let gradient_rows = by_row(gradient, out)?;
        let of_input = backward.of(0, || {
            // the gradient is the layer with its weight turned.
            Linear { input_major: !self.input_major }.eval(&[gradient.clone(), backward.inputs[1].tensor()?.clone()], Mode::Infer)
        })?;
        let of_weight = backward.of(1, || {
            let x = by_row(backward.inputs[0].tensor()?, if self.input_major { weight[0] } else { weight[1] })?;
            let product = if self.input_major { transposed_product(&x, &gradient_rows) } else { transposed_product(&gradient_rows, &x) };
            product?.to_dtype(backward.inputs[1].tensor()?.dtype())
        })?;
        let of_bias = backward.of(2, || column_sums(&gradient_rows))?;
        Ok([of_input, of_weight, of_bias].into_iter().take(backward.inputs.len()).collect())
    }

    fn reads_input(&self, input: usize) -> bool {
        input < 2
    }

    fn takes_kept(&self, input: usize) -> bool {
        input == 1
    }

    fn macs(&self, inputs: &[&TensorType], output: &TensorType, bindings: &Bindings) -> u64 {
        let inner = inputs[0].shape.last().and_then(|d| d.evaluate(bindings)).unwrap_or(0);
        elements(output, bindings).saturating_mul(inner as u64)
    }
}

impl Linear {
    fn multiply<T: StoredFloat>(&self, x: &[f32], weight: &[T], first: usize, second: usize, count: usize, finish: &[Finish]) -> Option<Vec<f32>> {
        let (inner, out) = if self.input_major { (first, second) } else { (second, first) };
        let rows = count.checked_div(out)?;
        let left = Left::pack(x, rows, inner, inner);
        let mut y = vec![0.0; count];
        if self.input_major {
            product(&left, &Rows { values: weight, count: out, stride: out }, out, finish, &mut y);
        } else {
            product(&left, &Columns { values: weight, count: out, stride: inner }, out, finish, &mut y);
        }
        Some(y)
    }
}

/// `aᵀ b` of two matrices with the same rows.
fn transposed_product(a: &Tensor, b: &Tensor) -> candle_core::Result<Tensor> {
    let ((inner, rows), (_, width)) = (a.dims2()?, b.dims2()?);
    if !readable([a, b]) {
        return a.t()?.matmul(b);
    }
    let (a, b) = (a.contiguous()?, b.contiguous()?);
    let compute = || {
        let (left, right) = (Host::of(&a)?, Host::of(&b)?);
        let (left, right) = (left.floats()?, right.floats()?);
        let mut y = vec![0.0; rows * width];
        long_product(
            [rows, inner, width],
            |range: Range<usize>| Left::pack_transposed(&left[range.start * rows..], rows, range.len(), rows),
            |range: Range<usize>| Rows { values: &right[range.start * width..], count: width, stride: width },
            &mut y,
        );
        Some(y)
    };
    compute().map_or_else(|| a.t()?.matmul(&b), |values| Tensor::from_vec(values, (rows, width), a.device()))
}
