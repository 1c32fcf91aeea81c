//! Part of a width.

use std::ops::Range;

use candle_core::{D, Tensor};
use serde::{Deserialize, Serialize};

use super::{Backward, OpSpec, last, require};
use crate::ir::{Dim, Element, TensorType};

/// Elements `start .. start + length` of the last axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Slice {
    /// First element.
    pub start: usize,
    /// How many.
    pub length: usize,
}

impl Default for Slice {
    fn default() -> Self {
        Self { start: 0, length: 1 }
    }
}

impl OpSpec for Slice {
    fn arity(&self) -> Range<usize> {
        1..2
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        require(inputs[0], Element::Float, "the input")?;
        let width = last(inputs[0])?;
        match (width.fixed(), self.start.checked_add(self.length)) {
            (Some(width), Some(end)) if self.length > 0 && end <= width => {
                let mut shape = inputs[0].shape.clone();
                shape.pop();
                shape.push(Dim::Fixed(self.length));
                Ok(TensorType { element: Element::Float, shape })
            }
            _ => Err(format!("elements {} to {} are not inside a width of {width}", self.start, self.start.saturating_add(self.length))),
        }
    }

    fn axes(&self, _inputs: usize) -> String {
        format!("* (a={}+k={}+b) -> * k", self.start, self.length)
    }

    fn resize(&mut self, size: &dyn Fn(&str) -> usize) {
        (self.start, self.length) = (size("a"), size("k"));
    }

    fn eval(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
        inputs[0].narrow(D::Minus1, self.start, self.length)?.contiguous()
    }

    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        let width = backward.inputs[0].dims().last().copied().unwrap_or(0);
        Ok(vec![backward.of(0, || backward.gradient.pad_with_zeros(D::Minus1, self.start, width - self.start - self.length))?])
    }

    fn reads_input(&self, _input: usize) -> bool {
        false
    }
}
