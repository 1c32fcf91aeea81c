//! Numbers of positions.

use std::ops::Range;

use candle_core::{DType, Tensor};
use serde::{Deserialize, Serialize};

use super::{Backward, OpSpec, require, require_rank};
use crate::ir::{Element, TensorType};

/// Positions of tokens `[batch, sequence]`: 0, 1, 2, … in every row; or, with a padding token, counted from
/// `padding + 1` over the tokens that are no padding, which have position `padding` (RoBERTa).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Positions {
    /// The padding token.
    pub padding: Option<i64>,
    /// Added to every position.
    #[serde(skip_serializing_if = "super::is_zero")]
    pub offset: i64,
}

impl Positions {
    /// The position of the first token that is no padding.
    pub fn first(&self) -> usize {
        let first = self.padding.map_or(0, |padding| padding.saturating_add(1)).saturating_add(self.offset);
        usize::try_from(first).unwrap_or(0)
    }
}

impl OpSpec for Positions {
    fn arity(&self) -> Range<usize> {
        1..2
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        require(inputs[0], Element::Int, "the tokens")?;
        require_rank(inputs[0], 2, "the tokens")?;
        Ok(inputs[0].clone())
    }

    fn axes(&self, _inputs: &[&TensorType]) -> String {
        "b s! -> b s!".into()
    }

    fn eval(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
        let tokens = &inputs[0];
        let (batch, sequence) = tokens.dims2()?;
        let Some(padding) = self.padding else {
            return Tensor::arange(self.offset, self.offset + sequence as i64, tokens.device())?.unsqueeze(0)?.broadcast_as((batch, sequence))?.contiguous();
        };
        let real = tokens.ne(padding)?.to_dtype(DType::F32)?;
        ((real.cumsum(1)? * &real)?.to_dtype(DType::I64)? + (padding + self.offset) as f64)?.contiguous()
    }

    fn backward(&self, _backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        Ok(vec![None])
    }

    fn reads_input(&self, _input: usize) -> bool {
        false
    }
}
