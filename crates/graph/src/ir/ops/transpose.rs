//! Permutation of axes.

use std::ops::Range;

use candle_core::Tensor;
use serde::{Deserialize, Serialize};

use super::{Backward, OpSpec, shape_error};
use crate::ir::TensorType;

/// Permutes the axes of a float or integer tensor.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Transpose {
    /// The input axis of each output axis; empty for the reversed order.
    pub perm: Vec<usize>,
}

impl Transpose {
    fn order(&self, rank: usize) -> Result<Vec<usize>, String> {
        if self.perm.is_empty() {
            return Ok((0..rank).rev().collect());
        }
        let mut sorted = self.perm.clone();
        sorted.sort_unstable();
        if sorted.into_iter().eq(0..rank) { Ok(self.perm.clone()) } else { Err(format!("{:?} is not a permutation of {rank} axes", self.perm)) }
    }
}

impl OpSpec for Transpose {
    fn arity(&self) -> Range<usize> {
        1..2
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        let shape = &inputs[0].shape;
        Ok(TensorType { element: inputs[0].element, shape: self.order(shape.len())?.into_iter().map(|axis| shape[axis].clone()).collect() })
    }

    fn axes(&self, inputs: &[&TensorType]) -> String {
        let rank = inputs[0].shape.len();
        let named = |axes: &mut dyn Iterator<Item = usize>| axes.map(|axis| format!("x{axis}")).collect::<Vec<_>>().join(" ");
        let order = self.order(rank).unwrap_or_default();
        format!("{} -> {}", named(&mut (0..rank)), named(&mut order.into_iter()))
    }

    fn eval(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
        inputs[0].permute(self.order(inputs[0].rank()).map_err(shape_error)?)
    }

    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        let order = self.order(backward.gradient.rank()).map_err(shape_error)?;
        let mut back = vec![0; order.len()];
        order.into_iter().enumerate().for_each(|(place, axis)| back[axis] = place);
        Ok(vec![backward.gradient_of(0, || backward.gradient.permute(back))?])
    }

    fn reads_input(&self, _input: usize) -> bool {
        false
    }
}
