//! Concatenation of tensors.

use std::ops::Range;

use candle_core::Tensor;
use serde::{Deserialize, Serialize};

use super::{Backward, OpSpec, axis_of, letters, shape_error};
use crate::ir::{Dim, TensorType};

/// Concatenates float or integer tensors that have the same sizes except on one axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Concat {
    /// The axis; negative numbers count from the last axis.
    pub axis: i64,
}

impl Default for Concat {
    fn default() -> Self {
        Self { axis: -1 }
    }
}

impl OpSpec for Concat {
    fn arity(&self) -> Range<usize> {
        1..1025
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        let rank = inputs[0].shape.len();
        let axis = axis_of(self.axis, rank)?;
        let mut shape = inputs[0].shape.clone();
        for (index, ty) in inputs.iter().enumerate().skip(1) {
            if ty.element != inputs[0].element || ty.shape.len() != rank {
                return Err(format!("input {index} is {ty}, but the first input is {}", inputs[0]));
            }
            for (at, (size, other)) in shape.iter_mut().zip(&ty.shape).enumerate() {
                let both = if at == axis { size.plus(other) } else { size.same(other) };
                *size = both.ok_or_else(|| format!("axis {at} of input {index} has size {other}, but the other inputs have {size}"))?;
            }
        }
        Ok(TensorType { element: inputs[0].element, shape })
    }

    fn axes(&self, inputs: &[&TensorType]) -> String {
        let rank = inputs[0].shape.len();
        let Ok(axis) = axis_of(self.axis, rank) else { return String::new() };
        let open = inputs.iter().any(|ty| ty.shape.get(axis).and_then(Dim::fixed).is_none());
        let part = |index: usize| if open { "_".to_owned() } else { format!("c{index}") };
        let with = |text: String| letters(rank, |at| (at == axis).then(|| text.clone()));
        let parts: Vec<String> = (0..inputs.len()).map(part).collect();
        let all = if open { "_".to_owned() } else { format!("({})", parts.join("+")) };
        format!("{} -> {}", parts.into_iter().map(&with).collect::<Vec<_>>().join(", "), with(all))
    }

    fn eval(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
        Tensor::cat(inputs, axis_of(self.axis, inputs[0].rank()).map_err(shape_error)?)
    }

    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        let axis = axis_of(self.axis, backward.gradient.rank()).map_err(shape_error)?;
        let mut start = 0;
        let mut found = Vec::with_capacity(backward.inputs.len());
        for (index, input) in backward.inputs.iter().enumerate() {
            let length = input.dims()[axis];
            found.push(backward.gradient_of(index, || backward.gradient.narrow(axis, start, length)?.contiguous())?);
            start += length;
        }
        Ok(found)
    }

    fn reads_input(&self, _input: usize) -> bool {
        false
    }
}
