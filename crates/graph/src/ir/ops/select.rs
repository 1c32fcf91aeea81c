//! Selection of one token of a sequence.

use std::ops::Range;

use candle_core::Tensor;
use serde::{Deserialize, Serialize};

use super::{Backward, OpSpec, require_floats};
use crate::ir::{Element, TensorType};

/// Selects the token at `index`: `[batch, sequence, width]` to `[batch, width]`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Select {
    /// Position in the sequence.
    pub index: usize,
}

impl OpSpec for Select {
    fn arity(&self) -> Range<usize> {
        1..2
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        require_floats(inputs[0], 3, "the input")?;
        let shape = &inputs[0].shape;
        if shape[1].fixed().is_some_and(|length| length <= self.index) {
            return Err(format!("token {} is out of range for a sequence of {}", self.index, shape[1]));
        }
        Ok(TensorType { element: Element::Float, shape: vec![shape[0].clone(), shape[2].clone()] })
    }

    fn axes(&self, _inputs: &[&TensorType]) -> String {
        "b s! c -> b c".into()
    }

    fn eval(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
        inputs[0].narrow(1, self.index, 1)?.squeeze(1)?.contiguous()
    }

    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        let length = backward.inputs[0].dims()[1];
        Ok(vec![backward.gradient_of(0, || backward.gradient.unsqueeze(1)?.pad_with_zeros(1, self.index, length - self.index - 1))?])
    }

    fn reads_input(&self, _input: usize) -> bool {
        false
    }
}
