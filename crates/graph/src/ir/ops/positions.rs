//! Position ids.

use candle_core::{DType, Tensor};
use serde::{Deserialize, Serialize};

use super::constants::ScalarOps;
use super::decoding::{DecodingState, Forward, Incremental, of_tokens};
use super::{OpSpec, require, require_rank};
use crate::ir::{Element, TensorType};

/// Position ids for tokens `[batch, sequence]`: 0, 1, 2, … in every row. With a padding token, padding
/// has position `padding` and other tokens count from `padding + 1` (RoBERTa).
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
    /// The position of the first token that is not padding.
    pub fn first(&self) -> usize {
        let first = self.padding.map_or(0, |padding| padding.saturating_add(1)).saturating_add(self.offset);
        usize::try_from(first).unwrap_or(0)
    }

    /// Positions of new tokens after `past` cached ones, of which `before` (`[batch, 1]`) are not
    /// padding, and the updated count after each token.
    fn following(&self, tokens: &Tensor, past: usize, before: Option<&Tensor>) -> candle_core::Result<(Tensor, Option<Tensor>)> {
        let (batch, sequence) = tokens.dims2()?;
        let Some(padding) = self.padding else {
            let first = self.offset + past as i64;
            let row = Tensor::arange(first, first + sequence as i64, tokens.device())?.unsqueeze(0)?;
            return Ok((row.broadcast_as((batch, sequence))?.contiguous()?, None));
        };
        let real = tokens.ne_scalar(padding as f64)?.to_dtype(DType::F32)?;
        let mut counts = real.cumsum(1)?;
        if let Some(before) = before {
            counts = counts.broadcast_add(before)?;
        }
        let positions = ((&counts * &real)?.to_dtype(DType::I64)? + (padding + self.offset) as f64)?.contiguous()?;
        Ok((positions, Some(counts)))
    }

    /// Positions of new tokens after `past` cached ones that are not padding: the largest possible
    /// positions.
    pub fn at_most(&self, tokens: &Tensor, past: usize) -> candle_core::Result<Tensor> {
        match past {
            0 => self.eval(std::slice::from_ref(tokens)),
            past => Positions { padding: None, offset: self.first() as i64 }.following(tokens, past, None).map(|(positions, _)| positions),
        }
    }
}

impl Incremental for Positions {
    fn token_axis(&self, _input: usize) -> Option<usize> {
        Some(1)
    }

    fn forward_next(&self, inputs: &[Tensor], past: &mut DecodingState, _forward: &Forward) -> candle_core::Result<Tensor> {
        let (positions, counts) = self.following(&inputs[0], past.tokens(), past.last(0, 1)?.as_ref())?;
        counts.map_or(Ok(()), |counts| past.push(0, &counts, 1, 1).map(drop))?;
        Ok(positions)
    }
}

impl OpSpec for Positions {
    of_tokens!();

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
}
