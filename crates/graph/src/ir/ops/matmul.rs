//! Matrix product of two activations.

use std::ops::Range;

use candle_core::Tensor;
use serde::{Deserialize, Serialize};

use super::elementwise::broadcast_sizes;
use super::gradient::summed_to;
use super::{Backward, OpSpec, require, sums};
use crate::ir::{Bindings, Dim, Element, TensorType};

/// Batched product of the matrices in the last two axes, `[…, m, k]` and `[…, k, n]` to `[…, m, n]`;
/// leading axes are broadcast. A vector is a row on the left and a column on the right. Products with a
/// weight are [`Linear`](super::Linear).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MatMul {}

/// The shape as a matrix: a vector becomes a row or a column.
fn matrix(shape: &[Dim], left: bool) -> Vec<Dim> {
    match shape {
        [size] if left => vec![1.into(), size.clone()],
        [size] => vec![size.clone(), 1.into()],
        other => other.to_vec(),
    }
}

/// As [`matrix`], for a tensor.
fn as_matrix(x: &Tensor, left: bool) -> candle_core::Result<Tensor> {
    match x.rank() {
        1 => x.unsqueeze(if left { 0 } else { 1 }),
        _ => Ok(x.clone()),
    }
}

fn product(a: &Tensor, b: &Tensor) -> candle_core::Result<Tensor> {
    a.contiguous()?.broadcast_matmul(&b.contiguous()?)
}

impl OpSpec for MatMul {
    fn arity(&self) -> Range<usize> {
        2..3
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        require(inputs[0], Element::Float, "the first input")?;
        require(inputs[1], Element::Float, "the second input")?;
        let (a, b) = (matrix(&inputs[0].shape, true), matrix(&inputs[1].shape, false));
        let ([outer_a @ .., rows, inner], [outer_b @ .., other, columns]) = (a.as_slice(), b.as_slice()) else {
            return Err("both inputs need at least one axis".into());
        };
        inner.same(other).ok_or_else(|| format!("{inner} columns do not match {other} rows"))?;
        let mut shape = broadcast_sizes(outer_a, outer_b)?;
        shape.extend((inputs[0].shape.len() > 1).then(|| rows.clone()));
        shape.extend((inputs[1].shape.len() > 1).then(|| columns.clone()));
        Ok(TensorType { element: Element::Float, shape })
    }

    fn axes(&self, inputs: &[&TensorType]) -> String {
        match [inputs[0].shape.len(), inputs[1].shape.len()] {
            [1, 1] => "k, k -> ",
            [1, _] => "k, * k n -> * n",
            [_, 1] => "* m k, k -> * m",
            _ => "* m k, * k n -> * m n",
        }
        .into()
    }

    fn eval(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
        let (a, b) = (&inputs[0], &inputs[1]);
        let mut y = product(&as_matrix(a, true)?, &as_matrix(b, false)?)?;
        if b.rank() == 1 {
            y = y.squeeze(y.rank() - 1)?;
        }
        if a.rank() == 1 { y.squeeze(if b.rank() == 1 { y.rank() - 1 } else { y.rank() - 2 }) } else { Ok(y) }
    }

    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        let (x, y) = (backward.inputs[0].tensor()?, backward.inputs[1].tensor()?);
        let (a, b) = (as_matrix(x, true)?, as_matrix(y, false)?);
        let mut gradient = backward.gradient.clone();
        if x.rank() == 1 {
            gradient = gradient.unsqueeze(if y.rank() == 1 { gradient.rank() } else { gradient.rank() - 1 })?;
        }
        if y.rank() == 1 {
            gradient = gradient.unsqueeze(gradient.rank())?;
        }
        let of_first = backward.gradient_of(0, || summed_to(&product(&gradient, &b.transpose(b.rank() - 2, b.rank() - 1)?)?, a.dims())?.reshape(x.dims()))?;
        let of_second = backward.gradient_of(1, || summed_to(&product(&a.transpose(a.rank() - 2, a.rank() - 1)?, &gradient)?, b.dims())?.reshape(y.dims()))?;
        Ok(vec![of_first, of_second])
    }

    fn macs(&self, inputs: &[&TensorType], output: &TensorType, bindings: &Bindings) -> u64 {
        sums(output, inputs[0].shape.last(), bindings)
    }
}
