//! Mixture of experts: routing of tokens, dispatch to experts, and the weighted sum of expert outputs
//! (Shazeer et al., *Outrageously Large Neural Networks*, 2017).
//!
//! The input of an expert is as long as the sequence, with zero rows for tokens that are not routed to
//! it. Linear layers without a bias map them to zeros, and kernels skip them.

use std::ops::Range;

use candle_core::{D, Tensor};
use candle_nn::ops::sigmoid;
use serde::{Deserialize, Serialize};

use super::constants::{ScalarOps, constant};
use super::gradient::wide;
use super::softmax::{back, softmax};
use super::{Backward, OpSpec, Saved, last, require, require_vector};
use crate::ir::{Element, TensorType};

/// Routing weights `[…, experts]` from router logits of the same shape: their softmax or sigmoid with all but
/// the top experts set to zero. An optional bias `[experts]` is added to these scores to select experts,
/// but not to their weights (DeepSeek-AI, *DeepSeek-V3*, 2024). Ties are resolved in favor of the first
/// expert.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Route {
    /// Number of experts per token.
    pub top: usize,
    /// Whether the routing weights are normalized to a sum of 1.
    pub normalised: bool,
    /// Factor on the routing weights.
    #[serde(skip_serializing_if = "is_one")]
    pub scale: f64,
    /// Group-limited routing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub groups: Option<ExpertGroups>,
    /// Whether the score of an expert is the sigmoid of its logit instead of the softmax.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub sigmoid: bool,
}

/// Group-limited routing: consecutive experts form groups of equal size, and tokens are routed only to
/// experts of the groups with the highest score: the maximum of its experts (DeepSeek-AI, *DeepSeek-V2*,
/// 2024), or the sum of the two highest (*DeepSeek-V3*, 2024).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExpertGroups {
    /// Number of groups.
    pub count: usize,
    /// Number of groups that a token can be routed to.
    pub top: usize,
    /// Whether the score of a group is the sum of the two highest scores of its experts.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub pairs: bool,
}

fn is_one(scale: &f64) -> bool {
    *scale == 1.0
}

/// Below all scores and sums of them: the score of experts that cannot be selected.
const LEAST: f64 = -1e30;

/// 1 for the `top` largest elements of the last axis, else 0.
fn largest(values: &Tensor, top: usize) -> candle_core::Result<Tensor> {
    let count = values.dim(D::Minus1)?;
    let numbers = constant(format!("numbers of {count}"), values.device(), |device| Tensor::arange(0u32, u32::try_from(count).unwrap_or(0), device))?;
    let (mut left, mut selected, taken) = (values.clone(), values.zeros_like()?, values.ones_like()?.affine(2.0 * LEAST, 0.0)?);
    for _ in 0..top.min(count) {
        let best = left.argmax_keepdim(D::Minus1)?.broadcast_eq(&numbers)?;
        selected = (selected + best.to_dtype(values.dtype())?)?;
        left = best.where_cond(&taken, &left)?;
    }
    Ok(selected)
}

impl Default for Route {
    fn default() -> Self {
        Self { top: 1, normalised: false, scale: 1.0, groups: None, sigmoid: false }
    }
}

impl Route {
    /// The scores of router logits, in at least 32 bits.
    fn scores(&self, logits: &Tensor) -> candle_core::Result<Tensor> {
        if self.sigmoid { sigmoid(&wide(logits)?) } else { softmax(&wide(logits)?) }
    }

    /// 1 for selected experts, else 0, from their scores.
    fn selected(&self, scores: &Tensor, bias: Option<&Tensor>) -> candle_core::Result<Tensor> {
        let scores = &bias.map_or(Ok(scores.clone()), |bias| scores.broadcast_add(&wide(bias)?))?;
        let Some(groups) = self.groups else { return largest(scores, self.top) };
        let (all, mut dims) = (scores.dims(), scores.dims().to_vec());
        let experts = dims.pop().unwrap_or(0);
        dims.extend([groups.count, experts / groups.count]);
        let by_group = scores.reshape(&dims[..])?;
        let of_groups = if groups.pairs { (&by_group * largest(&by_group, 2)?)?.sum(D::Minus1)? } else { by_group.max(D::Minus1)? };
        let seen = largest(&of_groups, groups.top)?.unsqueeze(D::Minus1)?.broadcast_as(&dims[..])?.reshape(all)?;
        // Experts of other groups keep a weight of zero, even if one of them is among the top.
        let candidates = seen.ne_scalar(0.0)?.where_cond(scores, &scores.ones_like()?.affine(LEAST, 0.0)?)?;
        largest(&candidates, self.top)? * seen
    }
}

impl OpSpec for Route {
    fn arity(&self) -> Range<usize> {
        1..3
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        require(inputs[0], Element::Float, "the scores")?;
        if let Some(bias) = inputs.get(1) {
            require_vector(bias, last(inputs[0])?, "the bias")?;
        }
        match last(inputs[0])?.fixed() {
            Some(experts) if (1..=experts).contains(&self.top) => match self.groups {
                Some(ExpertGroups { count, top, .. }) if count == 0 || !experts.is_multiple_of(count) || !(1..=count).contains(&top) => {
                    Err(format!("{experts} experts cannot be divided into {count} groups with {top} groups per token"))
                }
                Some(ExpertGroups { count, pairs: true, .. }) if experts / count < 2 => Err("groups need at least two experts".into()),
                _ => Ok(inputs[0].clone()),
            },
            Some(experts) => Err(format!("{} of {experts} experts cannot be selected per token", self.top)),
            None => Err("the number of experts must be fixed".into()),
        }
    }

    fn axes(&self, inputs: &[&TensorType]) -> String {
        if inputs.len() > 1 { "* e!, e! -> * e!" } else { "* e! -> * e!" }.into()
    }

    fn eval(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
        let scores = self.scores(&inputs[0])?;
        let weights = (&scores * self.selected(&scores, inputs.get(1))?)?;
        let weights = if self.normalised { weights.broadcast_div(&weights.sum_keepdim(D::Minus1)?)? } else { weights };
        let weights = if self.scale == 1.0 { weights } else { (weights * self.scale)? };
        weights.to_dtype(inputs[0].dtype())
    }

    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        let of_scores = backward.gradient_of(0, || {
            let scores = self.scores(backward.inputs[0].tensor()?)?;
            let bias = backward.inputs.get(1).map(Saved::tensor).transpose()?;
            let (selected, gradient) = (self.selected(&scores, bias)?, (wide(backward.gradient)? * self.scale)?);
            let weights = (&scores * &selected)?;
            let sum = weights.sum_keepdim(D::Minus1)?;
            let of_logits = match (self.sigmoid, self.normalised) {
                // The normalized weights are a softmax over the selected experts.
                (false, true) => back(&weights.broadcast_div(&sum)?, &gradient)?,
                (false, false) => back(&scores, &(gradient * selected)?)?,
                (true, normalised) => {
                    let of_weights = if normalised {
                        let mean = (&weights.broadcast_div(&sum)? * &gradient)?.sum_keepdim(D::Minus1)?;
                        gradient.broadcast_sub(&mean)?.broadcast_div(&sum)?
                    } else {
                        gradient
                    };
                    // The derivative of the sigmoid.
                    ((of_weights * weights)? * (1.0 - scores)?)?
                }
            };
            of_logits.to_dtype(backward.gradient.dtype())
        })?;
        // The selection has no gradient with respect to the bias.
        let of_bias = |bias: &Saved| backward.gradient_of(1, || bias.tensor()?.zeros_like());
        Ok([Some(of_scores), backward.inputs.get(1).map(of_bias).transpose()?].into_iter().flatten().collect())
    }
}

/// The input of one expert: values `[…, width]`, with zero rows for tokens with a routing weight of zero
/// in `[…, experts]`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Dispatch {
    /// Index of the expert.
    pub expert: usize,
    /// Whether the rows are multiplied by the routing weights (Llama 4).
    #[serde(skip_serializing_if = "super::is_zero")]
    pub weighted: bool,
}

impl Dispatch {
    fn masked(&self, x: &Tensor, weights: &Tensor) -> candle_core::Result<Tensor> {
        let sees = weights.narrow(D::Minus1, self.expert, 1)?.ne_scalar(0.0)?;
        sees.broadcast_as(x.shape())?.contiguous()?.where_cond(&x.contiguous()?, &x.zeros_like()?)
    }

    /// The rows, multiplied by the routing weights if they are weighted.
    fn rows(&self, x: &Tensor, weights: &Tensor) -> candle_core::Result<Tensor> {
        let rows = self.masked(x, weights)?;
        if self.weighted { rows.broadcast_mul(&weights.narrow(D::Minus1, self.expert, 1)?.to_dtype(x.dtype())?) } else { Ok(rows) }
    }
}

fn require_weights(values: &TensorType, weights: &TensorType) -> Result<usize, String> {
    require(values, Element::Float, "the values")?;
    require(weights, Element::Float, "the weights")?;
    let (Some((_, tokens)), Some((experts, leading))) = (values.shape.split_last(), weights.shape.split_last()) else {
        return Err("values and routing weights need at least one axis".into());
    };
    match experts.fixed() {
        Some(experts) if tokens == leading => Ok(experts),
        _ => Err(format!("routing weights {weights} do not match values {values}")),
    }
}

impl OpSpec for Dispatch {
    fn arity(&self) -> Range<usize> {
        2..3
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        let experts = require_weights(inputs[0], inputs[1])?;
        if self.expert >= experts {
            return Err(format!("expert {} is out of range for {experts} experts", self.expert));
        }
        Ok(inputs[0].clone())
    }

    fn axes(&self, _inputs: &[&TensorType]) -> String {
        "* c, * _ -> * c".into()
    }

    fn eval(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
        self.rows(&inputs[0], &inputs[1])
    }

    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        let weights = backward.inputs[1].tensor()?;
        let of_values = backward.gradient_of(0, || self.rows(backward.gradient, weights))?;
        let of_weights = backward.gradient_of(1, || {
            if !self.weighted {
                return weights.zeros_like();
            }
            // Weights of zero select no expert.
            let own = (wide(backward.inputs[0].tensor()?)? * wide(&self.masked(backward.gradient, weights)?)?)?.sum_keepdim(D::Minus1)?;
            let after = weights.dim(D::Minus1)? - self.expert - 1;
            own.pad_with_zeros(D::Minus1, self.expert, after)?.to_dtype(weights.dtype())
        })?;
        Ok(vec![of_values, of_weights])
    }

    fn reads_input(&self, input: usize) -> bool {
        input == 1 || self.weighted
    }
}

/// The sum of expert outputs `[…, width]`, weighted by the routing weights `[…, experts]`, which are the
/// first input.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Combine {
    /// Whether the outputs of the experts of a token are added without the weights, which then multiply the
    /// inputs ([`Dispatch::weighted`]).
    #[serde(skip_serializing_if = "super::is_zero")]
    pub plain: bool,
}

impl Combine {
    /// The factors on the outputs, from the routing weights.
    fn factors(self, weights: &Tensor) -> candle_core::Result<Tensor> {
        if self.plain { weights.ne_scalar(0.0)?.to_dtype(weights.dtype()) } else { Ok(weights.clone()) }
    }
}

impl OpSpec for Combine {
    fn arity(&self) -> Range<usize> {
        2..1026
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        let experts = require_weights(inputs[1], inputs[0])?;
        if experts + 1 != inputs.len() {
            return Err(format!("got routing weights of {experts} experts, but outputs of {}", inputs.len() - 1));
        }
        match inputs[1..].iter().position(|ty| *ty != inputs[1]) {
            Some(other) => Err(format!("the output of expert {other} is {}, but that of the first expert is {}", inputs[other + 1], inputs[1])),
            None => Ok(inputs[1].clone()),
        }
    }

    fn axes(&self, inputs: &[&TensorType]) -> String {
        format!("* _{} -> * c", ", * c".repeat(inputs.len() - 1))
    }

    fn eval(&self, inputs: &[Tensor]) -> candle_core::Result<Tensor> {
        let factors = self.factors(&inputs[0])?;
        let weight = |expert: usize| factors.narrow(D::Minus1, expert, 1);
        let mut sum = inputs[1].broadcast_mul(&weight(0)?)?;
        for (expert, values) in inputs[1..].iter().enumerate().skip(1) {
            sum = (sum + values.broadcast_mul(&weight(expert)?)?)?;
        }
        Ok(sum)
    }

    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        let (weights, gradient) = (backward.inputs[0].tensor()?, backward.gradient);
        let factors = self.factors(weights)?;
        let mut parts = Vec::with_capacity(backward.inputs.len());
        let mut found = vec![None; backward.inputs.len()];
        for (expert, values) in backward.inputs[1..].iter().enumerate() {
            if backward.needs_gradient(0) && !self.plain {
                parts.push((wide(values.tensor()?)? * wide(gradient)?)?.sum_keepdim(D::Minus1)?);
            }
            found[expert + 1] = backward.gradient_of(expert + 1, || gradient.broadcast_mul(&factors.narrow(D::Minus1, expert, 1)?))?;
        }
        let of_weights = || if self.plain { weights.zeros_like() } else { Tensor::cat(&parts, D::Minus1)?.to_dtype(weights.dtype()) };
        found[0] = backward.gradient_of(0, of_weights)?;
        Ok(found)
    }
}
