//! Axes to one number.

use std::ops::Range;

use candle_core::Tensor;
use serde::{Deserialize, Serialize};

use super::gradient::wide;
use super::{Backward, OpSpec, axis_of, require, unfit};
use crate::ir::{Element, TensorType};

/// What becomes of the numbers of an axis.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReduceKind {
    /// Their mean.
    #[default]
    Mean,
    /// Their sum.
    Sum,
    /// The largest; equal ones share the gradient.
    Max,
    /// The smallest; equal ones share the gradient.
    Min,
    /// The sum of their values without signs.
    L1,
    /// The root of the sum of their squares.
    L2,
    /// The sum of their squares.
    SumOfSquares,
}

/// Axes to one number each.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Reduce {
    /// What is made of the numbers.
    pub kind: ReduceKind,
    /// The axes, negative numbers counting from behind; none for all.
    pub axes: Vec<i64>,
    /// Whether the axes stay, with one element each.
    pub keep: bool,
}

impl Default for Reduce {
    fn default() -> Self {
        Self { kind: ReduceKind::Mean, axes: vec![-1], keep: true }
    }
}

impl Reduce {
    /// The axes of a tensor that go, in order.
    fn over(&self, rank: usize) -> Result<Vec<usize>, String> {
        if self.axes.is_empty() {
            return Ok((0..rank).collect());
        }
        let mut axes = self.axes.iter().map(|axis| axis_of(*axis, rank)).collect::<Result<Vec<_>, _>>()?;
        axes.sort_unstable();
        match axes.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => Err(format!("axis {} is named twice", pair[0])),
            None => Ok(axes),
        }
    }

    /// The output with the axes that went.
    fn kept(&self, y: &Tensor, dims: &[usize]) -> candle_core::Result<Tensor> {
        let over = self.over(dims.len()).map_err(unfit)?;
        y.reshape(dims.iter().enumerate().map(|(axis, size)| if over.contains(&axis) { 1 } else { *size }).collect::<Vec<_>>())
    }
}

impl OpSpec for Reduce {
    fn arity(&self) -> Range<usize> {
        1..2
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        require(inputs[0], Element::Float, "the input")?;
        let over = self.over(inputs[0].shape.len())?;
        let size = |(axis, size): (usize, &crate::ir::Dim)| match over.contains(&axis) {
            true => self.keep.then(|| 1.into()),
            false => Some(size.clone()),
        };
        Ok(TensorType { element: Element::Float, shape: inputs[0].shape.iter().enumerate().filter_map(size).collect() })
    }

    fn axes(&self, inputs: &[&TensorType]) -> String {
        let rank = inputs[0].shape.len();
        let Ok(over) = self.over(rank) else { return String::new() };
        let hold = match self.kind {
            ReduceKind::Mean => "~",
            ReduceKind::Max | ReduceKind::Min => "!",
            _ => "",
        };
        let before = (0..rank).map(|axis| if over.contains(&axis) { format!("x{axis}{hold}") } else { format!("x{axis}") });
        let after = (0..rank).filter_map(|axis| match over.contains(&axis) {
            true => self.keep.then(|| "_".to_owned()),
            false => Some(format!("x{axis}")),
        });
        format!("{} -> {}", before.collect::<Vec<_>>().join(" "), after.collect::<Vec<_>>().join(" "))
    }

    fn eval(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
        let x = wide(&inputs[0])?;
        let over = self.over(x.rank()).map_err(unfit)?;
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
        if self.keep {
            return Ok(y);
        }
        let left: Vec<usize> = y.dims().iter().enumerate().filter(|(axis, _)| !over.contains(axis)).map(|(_, size)| *size).collect();
        y.reshape(left)
    }

    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        let dims = backward.inputs[0].dims();
        let of_input = backward.of(0, || {
            let spread = wide(&self.kept(backward.gradient, dims)?)?.broadcast_as(dims)?;
            let x = || wide(backward.inputs[0].tensor()?);
            let y = || wide(&self.kept(backward.output.tensor()?, dims)?);
            let found = match self.kind {
                ReduceKind::Sum => spread.contiguous()?,
                ReduceKind::Mean => {
                    let count = dims.iter().product::<usize>() / backward.gradient.elem_count().max(1);
                    (spread / count.max(1) as f64)?
                }
                ReduceKind::Max | ReduceKind::Min => {
                    let taken = x()?.broadcast_eq(&y()?)?.to_dtype(spread.dtype())?;
                    let over = self.over(dims.len()).map_err(unfit)?;
                    let count = taken.sum_keepdim(over.as_slice())?;
                    (spread * taken.broadcast_div(&count)?)?
                }
                ReduceKind::L1 => {
                    let x = x()?;
                    let sign = (x.gt(0.0)?.to_dtype(x.dtype())? - x.lt(0.0)?.to_dtype(x.dtype())?)?;
                    (spread * sign)?
                }
                ReduceKind::L2 => {
                    // Of nothing but zeros, the root has no slope; zero is taken.
                    let y = y()?;
                    let root = (&y + y.eq(0.0)?.to_dtype(y.dtype())?)?;
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
