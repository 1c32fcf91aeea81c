//! Reductions over axes.

use std::ops::Range;

use candle_core::Tensor;
use serde::{Deserialize, Serialize};

use super::constants::ScalarOps;
use super::gradient::wide;
use super::{Backward, OpSpec, axis_of, require, shape_error};
use crate::ir::{Element, TensorType};

/// A reduction.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReduceKind {
    /// Mean.
    #[default]
    Mean,
    /// Sum.
    Sum,
    /// Maximum; equal elements share the gradient.
    Max,
    /// Minimum; equal elements share the gradient.
    Min,
    /// Sum of absolute values.
    L1,
    /// Square root of the sum of squares.
    L2,
    /// Sum of squares.
    SumOfSquares,
}

/// Reduces axes to one element each.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Reduce {
    /// The reduction.
    pub kind: ReduceKind,
    /// The axes, with negative numbers counting from the last axis; empty for all axes.
    pub axes: Vec<i64>,
    /// Whether the reduced axes remain, with one element each.
    #[serde(rename = "keep")]
    pub keep_dims: bool,
}

impl Default for Reduce {
    fn default() -> Self {
        Self { kind: ReduceKind::Mean, axes: vec![-1], keep_dims: true }
    }
}

impl Reduce {
    /// The reduced axes of a tensor with `rank` axes, in order.
    fn reduced_axes(&self, rank: usize) -> Result<Vec<usize>, String> {
        if self.axes.is_empty() {
            return Ok((0..rank).collect());
        }
        let mut axes = self.axes.iter().map(|axis| axis_of(*axis, rank)).collect::<Result<Vec<_>, _>>()?;
        axes.sort_unstable();
        match axes.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => Err(format!("axis {} is specified twice", pair[0])),
            None => Ok(axes),
        }
    }

    /// The output with the reduced axes reinserted.
    fn with_reduced_axes(&self, y: &Tensor, dims: &[usize]) -> candle_core::Result<Tensor> {
        let over = self.reduced_axes(dims.len()).map_err(shape_error)?;
        y.reshape(dims.iter().enumerate().map(|(axis, size)| if over.contains(&axis) { 1 } else { *size }).collect::<Vec<_>>())
    }
}

impl OpSpec for Reduce {
    fn arity(&self) -> Range<usize> {
        1..2
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        require(inputs[0], Element::Float, "the input")?;
        let over = self.reduced_axes(inputs[0].shape.len())?;
        let size = |(axis, size): (usize, &crate::ir::Dim)| match over.contains(&axis) {
            true => self.keep_dims.then(|| 1.into()),
            false => Some(size.clone()),
        };
        Ok(TensorType { element: Element::Float, shape: inputs[0].shape.iter().enumerate().filter_map(size).collect() })
    }

    fn axes(&self, inputs: &[&TensorType]) -> String {
        let rank = inputs[0].shape.len();
        let Ok(over) = self.reduced_axes(rank) else { return String::new() };
        let suffix = match self.kind {
            ReduceKind::Mean => "~",
            ReduceKind::Max | ReduceKind::Min => "!",
            _ => "",
        };
        let before = (0..rank).map(|axis| if over.contains(&axis) { format!("x{axis}{suffix}") } else { format!("x{axis}") });
        let after = (0..rank).filter_map(|axis| match over.contains(&axis) {
            true => self.keep_dims.then(|| "_".to_owned()),
            false => Some(format!("x{axis}")),
        });
        format!("{} -> {}", before.collect::<Vec<_>>().join(" "), after.collect::<Vec<_>>().join(" "))
    }

    fn eval(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
        let x = wide(&inputs[0])?;
        let over = self.reduced_axes(x.rank()).map_err(shape_error)?;
        let one_by_one = |of: &dyn Fn(&Tensor, usize) -> candle_core::Result<Tensor>| over.iter().try_fold(x.clone(), |x, axis| of(&x, *axis));
        let y = match self.kind {
            _ if over.is_empty() => x.clone(),
            ReduceKind::Mean => x.mean_keepdim(over.as_slice())?,
            ReduceKind::Sum => x.sum_keepdim(over.as_slice())?,
            ReduceKind::Max => one_by_one(&|x, axis| x.max_keepdim(axis))?,
            ReduceKind::Min => one_by_one(&|x, axis| x.min_keepdim(axis))?,
            ReduceKind::L1 => x.abs()?.sum_keepdim(over.as_slice())?,
            ReduceKind::L2 => x.sqr()?.sum_keepdim(over.as_slice())?.sqrt()?,
            ReduceKind::SumOfSquares => x.sqr()?.sum_keepdim(over.as_slice())?,
        };
        let y = y.to_dtype(inputs[0].dtype())?;
        if self.keep_dims {
            return Ok(y);
        }
        let left: Vec<usize> = y.dims().iter().enumerate().filter(|(axis, _)| !over.contains(axis)).map(|(_, size)| *size).collect();
        y.reshape(left)
    }

    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        let dims = backward.inputs[0].dims();
        let of_input = backward.gradient_of(0, || {
            let spread = wide(&self.with_reduced_axes(backward.gradient, dims)?)?.broadcast_as(dims)?;
            let x = || wide(backward.inputs[0].tensor()?);
            let y = || wide(&self.with_reduced_axes(backward.output.tensor()?, dims)?);
            let found = match self.kind {
                ReduceKind::Sum => spread.contiguous()?,
                ReduceKind::Mean => {
                    let count = dims.iter().product::<usize>() / backward.gradient.elem_count().max(1);
                    (spread / count.max(1) as f64)?
                }
                ReduceKind::Max | ReduceKind::Min => {
                    let selected = x()?.broadcast_eq(&y()?)?.to_dtype(spread.dtype())?;
                    let over = self.reduced_axes(dims.len()).map_err(shape_error)?;
                    let count = selected.sum_keepdim(over.as_slice())?;
                    (spread * selected.broadcast_div(&count)?)?
                }
                ReduceKind::L1 => {
                    let x = x()?;
                    let sign = (x.gt_scalar(0.0)?.to_dtype(x.dtype())? - x.lt_scalar(0.0)?.to_dtype(x.dtype())?)?;
                    (spread * sign)?
                }
                ReduceKind::L2 => {
                    // The gradient of the norm of a zero vector is defined as zero.
                    let y = y()?;
                    let root = (&y + y.eq_scalar(0.0)?.to_dtype(y.dtype())?)?;
                    (spread * x()?.broadcast_div(&root)?)?
                }
                ReduceKind::SumOfSquares => ((spread * x()?)? * 2.0)?,
            };
            found.to_dtype(backward.gradient.dtype())
        })?;
        Ok(vec![of_input])
    }

    fn reads_input(&self, _input: usize) -> bool {
        !matches!(self.kind, ReduceKind::Mean | ReduceKind::Sum)
    }

    fn reads_output(&self) -> bool {
        matches!(self.kind, ReduceKind::Max | ReduceKind::Min | ReduceKind::L2)
    }
}
