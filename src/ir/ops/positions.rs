//! Numbers of positions.

use std::ops::Range;

use candle_core::{DType, Tensor};
use serde::{Deserialize, Serialize};

use super::past::{Forward, Past, Sequential};
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

    /// Positions of tokens behind others, of which so many are no padding (`[batch, 1]`, where that counts); and how many are none now.
    fn following(&self, tokens: &Tensor, past: usize, before: Option<&Tensor>) -> candle_core::Result<(Tensor, Option<Tensor>)> {
        let (batch, sequence) = tokens.dims2()?;
        let Some(padding) = self.padding else {
            let first = self.offset + past as i64;
            let row = Tensor::arange(first, first + sequence as i64, tokens.device())?.unsqueeze(0)?;
            return Ok((row.broadcast_as((batch, sequence))?.contiguous()?, None));
        };
        let real = tokens.ne(padding)?.to_dtype(DType::F32)?;
        let mut counts = real.cumsum(1)?;
        if let Some(before) = before {
            counts = counts.broadcast_add(before)?;
        }
        let last = counts.narrow(1, sequence - 1, 1)?.contiguous()?;
        let positions = ((counts * &real)?.to_dtype(DType::I64)? + (padding + self.offset) as f64)?.contiguous()?;
        Ok((positions, Some(last)))
    }

    /// Positions of tokens behind others, none of which is padding: the largest that there can be.
    pub(crate) fn at_most(&self, tokens: &Tensor, past: usize) -> candle_core::Result<Tensor> {
        match past {
            0 => self.eval(std::slice::from_ref(tokens)),
            past => Positions { padding: None, offset: self.first() as i64 }.following(tokens, past, None).map(|(positions, _)| positions),
        }
    }
}

impl Sequential for Positions {
    fn axis(&self, _input: usize) -> Option<usize> {
        Some(1)
    }

    fn follow(&self, inputs: &[Tensor], past: &mut Past, _forward: &Forward) -> candle_core::Result<Tensor> {
        let (positions, counts) = self.following(&inputs[0], past.tokens(), past.counts.as_ref())?;
        past.counts = counts;
        Ok(positions)
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
        self.following(&inputs[0], 0, None).map(|(positions, _)| positions)
    }

    fn sequential(&self) -> Option<&dyn Sequential> {
        Some(self)
    }

    fn backward(&self, _backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        Ok(vec![None])
    }

    fn reads_input(&self, _input: usize) -> bool {
        false
    }
}
