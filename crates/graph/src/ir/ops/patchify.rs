//! Images as token sequences.

use std::ops::Range;

use candle_core::Tensor;
use serde::{Deserialize, Serialize};

use super::{Backward, OpSpec, require_floats};
use crate::ir::{Dim, Element, TensorType};

/// `[batch, channels, height, width]` to `[batch, height · width, channels]`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Patchify {}

impl OpSpec for Patchify {
    fn arity(&self) -> Range<usize> {
        1..2
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        require_floats(inputs[0], 4, "the input")?;
        let shape = &inputs[0].shape;
        let (Some(height), Some(width)) = (shape[2].fixed(), shape[3].fixed()) else { return Err("the size of the image must be fixed".into()) };
        Ok(TensorType { element: Element::Float, shape: vec![shape[0].clone(), Dim::product(height, width)?, shape[1].clone()] })
    }

    fn axes(&self, _inputs: &[&TensorType]) -> String {
        "b c h! w! -> b (h! w!) c".into()
    }

    fn eval(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
        inputs[0].flatten_from(2)?.transpose(1, 2)?.contiguous()
    }

    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        Ok(vec![backward.gradient_of(0, || backward.gradient.transpose(1, 2)?.reshape(backward.inputs[0].dims()))?])
    }

    fn reads_input(&self, _input: usize) -> bool {
        false
    }
}
