//! Elementwise functions of two tensors other than sum and product.

use std::ops::Range;

use candle_core::Tensor;
use serde::{Deserialize, Serialize};

use super::constants::ScalarOps;
use super::elementwise::broadcast;
use super::gradient::{summed_to, wide};
use super::{Backward, OpSpec};
use crate::ir::TensorType;

/// An elementwise function of two operands.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BinaryKind {
    /// The first operand minus the second.
    #[default]
    Sub,
    /// The first operand divided by the second.
    Div,
    /// The first operand to the power of the second. Negative bases have powers with integer exponents
    /// only. Exponents of bases that are not positive have no gradient.
    Pow,
    /// The larger operand; among equal operands the first receives the gradient.
    Max,
    /// The smaller operand; among equal operands the first receives the gradient.
    Min,
}

/// An elementwise function of two operands, with broadcasting. [`Add`](super::Add) and
/// [`Mul`](super::Mul) are separate ops.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Binary {
    /// The function.
    pub kind: BinaryKind,
}

/// `a` to the power of `b`, for tensors of the same shape.
fn power(a: &Tensor, b: &Tensor) -> candle_core::Result<Tensor> {
    let one = a.ones_like()?;
    let half = (b * 0.5)?;
    let whole = b.floor()?.eq(b)?.to_dtype(b.dtype())?;
    let even = half.floor()?.eq(&half)?.to_dtype(b.dtype())?;
    // 1 or -1; NaN for exponents that are not integers.
    let sign = (even.affine(2.0, -1.0)? + (whole - 1.0)?.sqrt()?)?;
    let magnitude = (a.abs()?.log()? * b)?.exp()?;
    let signed = (a.lt_scalar(0.0)?.where_cond(&sign, &one)? * magnitude)?;
    b.eq_scalar(0.0)?.where_cond(&one, &signed)
}

impl OpSpec for Binary {
    fn arity(&self) -> Range<usize> {
        2..3
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        broadcast(inputs[0], inputs[1])
    }

    fn axes(&self, _inputs: &[&TensorType]) -> String {
        "* c, * c -> * c".into()
    }

    fn eval(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
        let (a, b) = (&inputs[0], &inputs[1]);
        match self.kind {
            BinaryKind::Sub => a.broadcast_sub(b),
            BinaryKind::Div => a.broadcast_div(b),
            BinaryKind::Max => a.broadcast_maximum(b),
            BinaryKind::Min => a.broadcast_minimum(b),
            BinaryKind::Pow => {
                let shape = a.shape().broadcast_shape_binary_op(b.shape(), "pow")?;
                power(&wide(&a.broadcast_as(&shape)?)?, &wide(&b.broadcast_as(&shape)?)?)?.to_dtype(a.dtype())
            }
        }
    }

    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        let gradient = backward.gradient;
        let spread = |input: usize| wide(&backward.inputs[input].tensor()?.broadcast_as(gradient.shape())?);
        let of = |input: usize, part: &dyn Fn(&Tensor) -> candle_core::Result<Tensor>| {
            backward.gradient_of(input, || summed_to(&part(&wide(gradient)?)?.to_dtype(gradient.dtype())?, backward.inputs[input].dims()))
        };
        // 1 where the first operand is selected, else 0.
        let first = |g: &Tensor| {
            let (a, b) = (spread(0)?, spread(1)?);
            if self.kind == BinaryKind::Max { a.ge(&b) } else { a.le(&b) }?.to_dtype(g.dtype())
        };
        let (of_first, of_second) = match self.kind {
            BinaryKind::Sub => (of(0, &|g| Ok(g.clone()))?, of(1, &|g| g.neg())?),
            BinaryKind::Div => (of(0, &|g| g / spread(1)?)?, of(1, &|g| ((g * spread(0)?)? / spread(1)?.sqr()?)?.neg())?),
            BinaryKind::Max | BinaryKind::Min => (of(0, &|g| g * first(g)?)?, of(1, &|g| g * (1.0 - first(g)?)?)?),
            BinaryKind::Pow => {
                let of_base = of(0, &|g| {
                    let (a, b) = (spread(0)?, spread(1)?);
                    (g * &b)? * power(&a, &(&b - 1.0)?)?
                })?;
                let of_exponent = of(1, &|g| {
                    let (a, b) = (spread(0)?, spread(1)?);
                    let positive = a.gt_scalar(0.0)?;
                    let logarithm = positive.where_cond(&a, &a.ones_like()?)?.log()?;
                    let powers = positive.where_cond(&power(&a, &b)?, &a.zeros_like()?)?;
                    (g * powers)? * logarithm
                })?;
                (of_base, of_exponent)
            }
        };
        Ok(vec![of_first, of_second])
    }

    fn reads_input(&self, _input: usize) -> bool {
        self.kind != BinaryKind::Sub
    }
}
