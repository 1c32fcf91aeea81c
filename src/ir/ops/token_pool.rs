//! One vector of a sequence of tokens.

use std::ops::Range;

use candle_core::{DType, Tensor};
use serde::{Deserialize, Serialize};

use super::gradient::wide;
use super::{Backward, OpSpec, require, require_floats};
use crate::ir::{Element, TensorType};

/// How tokens become one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TokenChoice {
    /// The largest number of each column, of tokens whose number is not zero.
    #[default]
    Max,
    /// The sum of tokens whose number is not zero, divided by the root of how many there are.
    RootMean,
    /// The mean of tokens whose number is not zero, the first one counting once, the second one twice, and so on.
    WeightedMean,
    /// The last token whose number is not zero; without one, the last.
    Last,
    /// The first of the tokens with the largest number.
    Largest,
    /// The first token with this number; without one, the first.
    Named(i64),
}

/// `[batch, sequence, width]` and a whole number for each token, a mask or its name, to `[batch, width]`. Means over a mask are those of
/// [`MaskedMean`](super::MaskedMean).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TokenPool {
    /// Which tokens count, and how.
    pub choice: TokenChoice,
}

impl TokenPool {
    /// Stands for what may not be the largest.
    pub(crate) const LOW: f64 = -1e9;

    /// What each token counts, `[batch, sequence, 1]`; nothing for the largest numbers of columns.
    fn weights(&self, numbers: &Tensor) -> candle_core::Result<Option<Tensor>> {
        let (batch, sequence) = numbers.dims2()?;
        let device = numbers.device();
        let real = || numbers.ne(0i64)?.to_dtype(DType::F32);
        let places = |from: f64, step: f64| {
            let row = Tensor::arange(0f32, sequence as f32, device)?.affine(step, from)?;
            row.unsqueeze(0)?.broadcast_as((batch, sequence))?.contiguous()
        };
        // The chosen are before all others, and ordered by place: of distinct numbers one is the largest.
        let one = |chosen: Tensor, order: Tensor| {
            let rank = ((chosen * (2 * sequence) as f64)? + order)?;
            rank.broadcast_eq(&rank.max_keepdim(1)?)?.to_dtype(DType::F32)
        };
        let early = || places(sequence as f64, -1.0);
        let weights = match self.choice {
            TokenChoice::Max => return Ok(None),
            TokenChoice::RootMean => {
                let real = real()?;
                real.broadcast_div(&real.sum_keepdim(1)?.clamp(1e-9, f64::MAX)?.sqrt()?)?
            }
            TokenChoice::WeightedMean => {
                let counted = (real()? * places(1.0, 1.0)?)?;
                counted.broadcast_div(&counted.sum_keepdim(1)?.clamp(1e-9, f64::MAX)?)?
            }
            TokenChoice::Last => one(real()?, places(0.0, 1.0)?)?,
            TokenChoice::Largest => one(numbers.broadcast_eq(&numbers.max_keepdim(1)?)?.to_dtype(DType::F32)?, early()?)?,
            TokenChoice::Named(name) => one(numbers.eq(name)?.to_dtype(DType::F32)?, early()?)?,
        };
        weights.unsqueeze(2).map(Some)
    }

    /// Tokens, in 32 bits at least, with a low number in the place of those that may not be the largest.
    fn lowered(x: &Tensor, numbers: &Tensor) -> candle_core::Result<Tensor> {
        let (x, hidden) = (wide(x)?, (numbers.eq(0i64)?.to_dtype(DType::F32)? * Self::LOW)?.unsqueeze(2)?);
        x.broadcast_add(&hidden.to_dtype(x.dtype())?)
    }
}

impl OpSpec for TokenPool {
    fn arity(&self) -> Range<usize> {
        2..3
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        require_floats(inputs[0], 3, "the input")?;
        require(inputs[1], Element::Int, "the numbers of tokens")?;
        if inputs[1].shape != inputs[0].shape[..2] {
            return Err("the numbers of tokens must be [batch, sequence]".into());
        }
        Ok(TensorType { element: Element::Float, shape: vec![inputs[0].shape[0].clone(), inputs[0].shape[2].clone()] })
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
        let of_input = backward.of(0, || {
            let numbers = backward.inputs[1].tensor()?;
            let gradient = wide(backward.gradient)?.unsqueeze(1)?;
            let weights = match self.weights(numbers)? {
                Some(weights) => weights.to_dtype(gradient.dtype())?,
                None => {
                    let x = Self::lowered(backward.inputs[0].tensor()?, numbers)?;
                    let taken = x.broadcast_eq(&x.max_keepdim(1)?)?.to_dtype(gradient.dtype())?;
                    taken.broadcast_div(&taken.sum_keepdim(1)?)?
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
