//! Splitting a hidden state into attention heads, and merging them.

use std::ops::Range;

use candle_core::Tensor;
use serde::{Deserialize, Serialize};

use super::{Backward, OpSpec, require_floats};
use crate::ir::{Dim, Element, TensorType};

/// `[batch, sequence, heads · head_dim]` to `[batch, heads, sequence, head_dim]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SplitHeads {
    /// Width of a head.
    pub head_dim: usize,
}

impl Default for SplitHeads {
    fn default() -> Self {
        Self { head_dim: 64 }
    }
}

impl OpSpec for SplitHeads {
    fn arity(&self) -> Range<usize> {
        1..2
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        require_floats(inputs[0], 3, "the input")?;
        let [batch, sequence, width] = [0, 1, 2].map(|i| inputs[0].shape[i].clone());
        match width.fixed() {
            Some(width) if self.head_dim > 0 && width.is_multiple_of(self.head_dim) => {
                Ok(TensorType { element: Element::Float, shape: vec![batch, Dim::Fixed(width / self.head_dim), sequence, Dim::Fixed(self.head_dim)] })
            }
            _ => Err(format!("width {width} is not a multiple of head_dim {}", self.head_dim)),
        }
    }

    fn axes(&self, _inputs: &[&TensorType]) -> String {
        "b s (h d!) -> b h s d!".into()
    }

    fn eval(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
        let (batch, sequence, width) = inputs[0].dims3()?;
        inputs[0].reshape((batch, sequence, width / self.head_dim, self.head_dim))?.transpose(1, 2)
    }

    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        Ok(vec![backward.gradient_of(0, || MergeHeads {}.eval(std::slice::from_ref(backward.gradient)))?])
    }

    fn reads_input(&self, _input: usize) -> bool {
        false
    }
}

/// `[batch, heads, sequence, head_dim]` to `[batch, sequence, heads · head_dim]`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MergeHeads {}

impl OpSpec for MergeHeads {
    fn arity(&self) -> Range<usize> {
        1..2
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        require_floats(inputs[0], 4, "the input")?;
        let shape = &inputs[0].shape;
        let (Some(heads), Some(width)) = (shape[1].fixed(), shape[3].fixed()) else { return Err("the number of heads and their width must be fixed".into()) };
        Ok(TensorType { element: Element::Float, shape: vec![shape[0].clone(), shape[2].clone(), Dim::product(heads, width)?] })
    }

    fn axes(&self, _inputs: &[&TensorType]) -> String {
        "b h s d! -> b s (h d!)".into()
    }

    fn eval(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
        let (batch, heads, sequence, width) = inputs[0].dims4()?;
        inputs[0].transpose(1, 2)?.reshape((batch, sequence, heads * width))
    }

    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        let head_dim = backward.inputs[0].dims()[3];
        Ok(vec![backward.gradient_of(0, || SplitHeads { head_dim }.eval(std::slice::from_ref(backward.gradient)))?])
    }

    fn reads_input(&self, _input: usize) -> bool {
        false
    }
}
