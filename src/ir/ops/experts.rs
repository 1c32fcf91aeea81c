//! Mixtures of experts: which experts see a token, what they read, and the sum of what they say (Shazeer et al., *Outrageously Large
//! Neural Networks*, 2017).
//!
//! What an expert reads is as long as the sequence: the rows of tokens that it does not see are zeros. Linear layers without a bias make
//! zeros of them, and kernels leave them out.

use std::ops::Range;

use candle_core::{D, Tensor};
use serde::{Deserialize, Serialize};

use super::constants::constant;
use super::gradient::wide;
use super::softmax::{back, softmax};
use super::{Backward, OpSpec, last, require};
use crate::ir::{Element, TensorType};

/// Weights of experts for each token, of scores `[…, experts]`: their softmax, and zero for all but the largest. Of equal ones, the first
/// are taken.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Route {
    /// How many experts see a token.
    pub top: usize,
    /// Whether their weights are divided by their sum.
    pub normalised: bool,
    /// What weights are multiplied by in the end.
    #[serde(skip_serializing_if = "is_one")]
    pub scale: f64,
    /// Groups of experts, of which a token sees few.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub groups: Option<ExpertGroups>,
}

/// Experts stand in groups of neighbours, all of one size. A token sees experts of those groups alone whose best ones have the largest scores
/// (DeepSeek-AI, *DeepSeek-V2*, 2024).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExpertGroups {
    /// How many groups there are.
    pub count: usize,
    /// How many of them a token sees.
    pub top: usize,
}

fn is_one(scale: &f64) -> bool {
    *scale == 1.0
}

/// One for the `top` largest of the last axis, else zero.
fn largest(values: &Tensor, top: usize) -> candle_core::Result<Tensor> {
    let count = values.dim(D::Minus1)?;
    let numbers = constant(format!("numbers of {count}"), values.device(), |device| Tensor::arange(0u32, u32::try_from(count).unwrap_or(0), device))?;
    let (mut left, mut taken) = (values.clone(), values.zeros_like()?);
    for _ in 0..top.min(count) {
        let best = left.argmax_keepdim(D::Minus1)?.broadcast_eq(&numbers)?.to_dtype(left.dtype())?;
        taken = (taken + &best)?;
        // Below all probabilities.
        left = (left - (best * 2.0)?)?;
    }
    Ok(taken)
}

impl Default for Route {
    fn default() -> Self {
        Self { top: 1, normalised: false, scale: 1.0, groups: None }
    }
}

impl Route {
    /// One for experts that are taken, else zero; of probabilities.
    fn taken(&self, probabilities: &Tensor) -> candle_core::Result<Tensor> {
        let Some(groups) = self.groups else { return largest(probabilities, self.top) };
        let (all, mut dims) = (probabilities.dims(), probabilities.dims().to_vec());
        let experts = dims.pop().unwrap_or(0);
        dims.extend([groups.count, experts / groups.count]);
        let seen = largest(&probabilities.reshape(&dims[..])?.max(D::Minus1)?, groups.top)?;
        let seen = seen.unsqueeze(D::Minus1)?.broadcast_as(&dims[..])?.reshape(all)?;
        // Experts of other groups have a weight of zero, even where one of them fills a place.
        largest(&(probabilities * &seen)?, self.top)? * seen
    }
}

impl OpSpec for Route {
    fn arity(&self) -> Range<usize> {
        1..2
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        require(inputs[0], Element::Float, "the scores")?;
        match last(inputs[0])?.fixed() {
            Some(experts) if (1..=experts).contains(&self.top) => match self.groups {
                Some(ExpertGroups { count, top }) if count == 0 || !experts.is_multiple_of(count) || !(1..=count).contains(&top) => {
                    Err(format!("{experts} experts cannot stand in {count} groups, of which a token sees {top}"))
                }
                _ => Ok(inputs[0].clone()),
            },
            Some(experts) => Err(format!("{} experts of {experts} cannot see a token", self.top)),
            None => Err("the number of experts must be known".into()),
        }
    }

    fn axes(&self, _inputs: &[&TensorType]) -> String {
        "* e! -> * e!".into()
    }

    fn eval(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
        let probabilities = softmax(&wide(&inputs[0])?)?;
        let kept = (&probabilities * self.taken(&probabilities)?)?;
        let kept = if self.normalised { kept.broadcast_div(&kept.sum_keepdim(D::Minus1)?)? } else { kept };
        let kept = if self.scale == 1.0 { kept } else { (kept * self.scale)? };
        kept.to_dtype(inputs[0].dtype())
    }

    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        let of_scores = backward.of(0, || {
            let probabilities = softmax(&wide(backward.inputs[0].tensor()?)?)?;
            let (taken, gradient) = (self.taken(&probabilities)?, (wide(backward.gradient)? * self.scale)?);
            let of_scores = if self.normalised {
                // A softmax of those that are taken.
                let kept = (probabilities * taken)?;
                back(&kept.broadcast_div(&kept.sum_keepdim(D::Minus1)?)?, &gradient)?
            } else {
                back(&probabilities, &(gradient * taken)?)?
            };
            of_scores.to_dtype(backward.gradient.dtype())
        })?;
        Ok(vec![of_scores])
    }
}

/// What an expert reads of values `[…, width]`, by the weights `[…, experts]` of all: zeros for tokens that it does not see.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Dispatch {
    /// The number of the expert.
    pub expert: usize,
}

impl Dispatch {
    fn masked(&self, x: &Tensor, weights: &Tensor) -> candle_core::Result<Tensor> {
        let sees = weights.narrow(D::Minus1, self.expert, 1)?.ne(0.0)?;
        sees.broadcast_as(x.shape())?.contiguous()?.where_cond(&x.contiguous()?, &x.zeros_like()?)
    }
}

fn require_weights(values: &TensorType, weights: &TensorType) -> Result<usize, String> {
    require(values, Element::Float, "the values")?;
    require(weights, Element::Float, "the weights")?;
    let (Some((_, tokens)), Some((experts, leading))) = (values.shape.split_last(), weights.shape.split_last()) else {
        return Err("values and weights need axes".into());
    };
    match experts.fixed() {
        Some(experts) if tokens == leading => Ok(experts),
        _ => Err(format!("the weights {weights} are not those of experts for each of {values}")),
    }
}

impl OpSpec for Dispatch {
    fn arity(&self) -> Range<usize> {
        2..3
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        let experts = require_weights(inputs[0], inputs[1])?;
        if self.expert >= experts {
            return Err(format!("there is no expert {} among {experts}", self.expert));
        }
        Ok(inputs[0].clone())
    }

    fn axes(&self, _inputs: &[&TensorType]) -> String {
        "* c, * _ -> * c".into()
    }

    fn eval(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
        self.masked(&inputs[0], &inputs[1])
    }

    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        let weights = backward.inputs[1].tensor()?;
        let of_values = backward.of(0, || self.masked(backward.gradient, weights))?;
        Ok(vec![of_values, backward.of(1, || weights.zeros_like())?])
    }

    fn reads_input(&self, input: usize) -> bool {
        input == 1
    }
}

/// The sum of what experts say, `[…, width]` each, by their weights `[…, experts]`, which come first.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Combine {}

impl OpSpec for Combine {
    fn arity(&self) -> Range<usize> {
        2..1026
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        let experts = require_weights(inputs[1], inputs[0])?;
        if experts + 1 != inputs.len() {
            return Err(format!("there are weights of {experts} experts, and values of {}", inputs.len() - 1));
        }
        match inputs[1..].iter().position(|ty| *ty != inputs[1]) {
            Some(other) => Err(format!("expert {other} gives {}, the first {}", inputs[other + 1], inputs[1])),
            None => Ok(inputs[1].clone()),
        }
    }

    fn axes(&self, inputs: &[&TensorType]) -> String {
        format!("* _{} -> * c", ", * c".repeat(inputs.len() - 1))
    }

    fn eval(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
        let weight = |expert: usize| inputs[0].narrow(D::Minus1, expert, 1);
        let mut sum = inputs[1].broadcast_mul(&weight(0)?)?;
        for (expert, values) in inputs[1..].iter().enumerate().skip(1) {
            sum = (sum + values.broadcast_mul(&weight(expert)?)?)?;
        }
        Ok(sum)
    }

    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        let (weights, gradient) = (backward.inputs[0].tensor()?, backward.gradient);
        let mut parts = Vec::with_capacity(backward.inputs.len());
        let mut found = vec![None; backward.inputs.len()];
        for (expert, values) in backward.inputs[1..].iter().enumerate() {
            if backward.wants(0) {
                parts.push((wide(values.tensor()?)? * wide(gradient)?)?.sum_keepdim(D::Minus1)?);
            }
            found[expert + 1] = backward.of(expert + 1, || gradient.broadcast_mul(&weights.narrow(D::Minus1, expert, 1)?))?;
        }
        found[0] = backward.of(0, || Tensor::cat(&parts, D::Minus1)?.to_dtype(weights.dtype()))?;
        Ok(found)
    }
}
