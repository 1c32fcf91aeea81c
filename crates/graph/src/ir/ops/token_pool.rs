//! Pooling of a sequence of tokens to one vector.

use std::ops::Range;

use candle_core::{DType, Tensor};
use serde::{Deserialize, Serialize};

use super::constants::ScalarOps;
use super::gradient::wide;
use super::{Backward, OpSpec, pooled_type};
use crate::ir::TensorType;

/// The pooling method. Its second input holds an integer for each token: the mask or the token id.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TokenChoice {
    /// The maximum of each column over unmasked tokens.
    #[default]
    Max,
    /// The sum over unmasked tokens, divided by the square root of their number.
    RootMean,
    /// The mean over unmasked tokens, weighted by position: 1 for the first, 2 for the second, and so on.
    WeightedMean,
    /// The last unmasked token; the last token if all are masked.
    Last,
    /// The first token with the largest integer.
    Largest,
    /// The first token with this integer; the first token if there is none.
    Named(i64),
}

/// Pools `[batch, sequence, width]`, with an integer `[batch, sequence]` for each token, its mask or its
/// id, to `[batch, width]`. Masked means are [`MaskedMean`](super::MaskedMean).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TokenPool {
    /// The pooling method.
    pub choice: TokenChoice,
}

impl TokenPool {
    /// Added to masked tokens, so that they are not the maximum.
    pub const MASKED: f64 = -1e9;

    /// Weights of the tokens, `[batch, sequence, 1]`; `None` for maximum pooling.
    fn weights(&self, numbers: &Tensor) -> candle_core::Result<Option<Tensor>> {
        let (batch, sequence) = numbers.dims2()?;
        let device = numbers.device();
        let real = || numbers.ne_scalar(0.0)?.to_dtype(DType::F32);
        let places = |from: f64, step: f64| {
            let row = Tensor::arange(0f32, sequence as f32, device)?.affine(step, from)?;
            row.unsqueeze(0)?.broadcast_as((batch, sequence))?.contiguous()
        };
        // Selected tokens precede all others, and ties are broken by position: of distinct ranks, exactly
        // one is the largest.
        let one = |chosen: Tensor, order: Tensor| {
            let rank = ((chosen * (2 * sequence) as f64)? + order)?;
            rank.broadcast_eq(&rank.max_keepdim(1)?)?.to_dtype(DType::F32)
        };
        let early = || places(sequence as f64, -1.0);
        let weights = match self.choice {
            TokenChoice::Max => return Ok(None),
            TokenChoice::RootMean => {
                let real = real()?;
                real.broadcast_div(&real.sum_keepdim(1)?.clamp_scalar(1e-9, f64::MAX)?.sqrt()?)?
            }
            TokenChoice::WeightedMean => {
                let counted = (real()? * places(1.0, 1.0)?)?;
                counted.broadcast_div(&counted.sum_keepdim(1)?.clamp_scalar(1e-9, f64::MAX)?)?
            }
            TokenChoice::Last => one(real()?, places(0.0, 1.0)?)?,
            TokenChoice::Largest => one(numbers.broadcast_eq(&numbers.max_keepdim(1)?)?.to_dtype(DType::F32)?, early()?)?,
            TokenChoice::Named(name) => one(numbers.eq_scalar(name as f64)?.to_dtype(DType::F32)?, early()?)?,
        };
        weights.unsqueeze(2).map(Some)
    }

    /// Tokens in at least 32 bits, with [`MASKED`](Self::MASKED) added to masked ones.
    fn lowered(x: &Tensor, numbers: &Tensor) -> candle_core::Result<Tensor> {
        let (x, hidden) = (wide(x)?, (numbers.eq_scalar(0.0)?.to_dtype(DType::F32)? * Self::MASKED)?.unsqueeze(2)?);
        x.broadcast_add(&hidden.to_dtype(x.dtype())?)
    }
}

impl OpSpec for TokenPool {
    fn arity(&self) -> Range<usize> {
        2..3
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        pooled_type(inputs, "the integers of the tokens")
    }

    fn axes(&self, _inputs: &[&TensorType]) -> String {
        "b s! c, b s! -> b c".into()
    }

    fn eval(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
        let pooled = match self.weights(&inputs[1])? {
            Some(weights) => {
                let x = wide(&inputs[0])?;
                x.broadcast_mul(&weights.to_dtype(x.dtype())?)?.sum(1)?
            }
            None => Self::lowered(&inputs[0], &inputs[1])?.max(1)?,
        };
        pooled.to_dtype(inputs[0].dtype())
    }

    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        let of_input = backward.gradient_of(0, || {
            let numbers = backward.inputs[1].tensor()?;
            let gradient = wide(backward.gradient)?.unsqueeze(1)?;
            let weights = match self.weights(numbers)? {
                Some(weights) => weights.to_dtype(gradient.dtype())?,
                None => {
                    let x = Self::lowered(backward.inputs[0].tensor()?, numbers)?;
                    let selected = x.broadcast_eq(&x.max_keepdim(1)?)?.to_dtype(gradient.dtype())?;
                    selected.broadcast_div(&selected.sum_keepdim(1)?)?
                }
            };
            gradient.broadcast_mul(&weights)?.to_dtype(backward.gradient.dtype())
        })?;
        Ok(vec![of_input, None])
    }

    fn reads_input(&self, input: usize) -> bool {
        input == 1 || self.choice == TokenChoice::Max
    }
}
