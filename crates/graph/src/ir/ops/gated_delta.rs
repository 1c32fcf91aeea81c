//! Gated delta rule: linear attention with a state that decays and is corrected; without the correction, the
//! state space recurrence of Mamba 2.

use std::ops::Range;

use candle_core::{Result as Computed, Tensor};
use serde::{Deserialize, Serialize};

use super::causal_conv::masked;
use super::decoding::{DecodingState, Forward, Incremental};
use super::gradient::wide;
use super::{Backward, OpSpec, elements, require, require_floats, sums};
use crate::ir::{Bindings, Element, TensorType};

/// Linear attention by the gated delta rule (Yang et al., *Gated Delta Networks*, 2025). Each head has a
/// state `S`, `[d, e]`, initially zero. For each token with query `q`, key `k`, value `v`, logarithmic decay
/// `a` and rate `r`:
///
/// ```text
/// S ← exp(a) S
/// S ← S + k (r (v - Sᵀ k))ᵀ
/// output = scale Sᵀ q
/// ```
///
/// If it is additive, `S ← S + k (r v)ᵀ` instead: the recurrence of Mamba 2 (Dao and Gu, *Transformers are
/// SSMs*, 2024), whose `C`, `B`, `x` and step sizes are queries, keys, values and rates.
///
/// Inputs: queries and keys `[batch, groups, sequence, d]`, values `[batch, heads, sequence, e]`, decays and
/// rates `[batch, sequence, heads]`. Head `i` reads query and key `i / (heads / groups)`. Optional: an
/// integer mask `[batch, sequence]`, zero for padding, which leaves the state unchanged. With the state
/// before the first token, `[batch, heads, d, e]`, as the last input, the rows of the output are followed by
/// those of the new state; only incremental decoding passes it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GatedDelta {
    /// Factor on the output, usually `1 / sqrt(d)`.
    pub scale: f64,
    /// Whether values are added without the correction by those in the state.
    #[serde(skip_serializing_if = "super::is_zero")]
    pub additive: bool,
}

impl Default for GatedDelta {
    fn default() -> Self {
        Self { scale: 1.0, additive: false }
    }
}

/// The number of inputs that are always present.
pub(super) const INPUTS: usize = 5;

/// The mask and the state before the first token, where present.
#[derive(Clone, Copy)]
pub(super) struct Extras<'t> {
    pub(super) mask: Option<&'t Tensor>,
    pub(super) state: Option<&'t Tensor>,
}

/// Finds the inputs after the first ones by their rank.
pub(super) fn extras<'t>(inputs: &[&'t Tensor]) -> Extras<'t> {
    let of = |rank: usize| inputs.iter().skip(INPUTS).find(|extra| extra.rank() == rank).copied();
    Extras { mask: of(2), state: of(4) }
}

/// Values of one token: `[batch, heads, 1, width]`, or `[batch, heads, 1, 1]`.
struct Token {
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    rate: Tensor,
}

/// Values of one step.
struct Step {
    /// The state after the decay.
    decayed: Tensor,
    /// The difference of the value from that in the state, or the value if the op is additive.
    error: Tensor,
    /// The difference times the rate.
    change: Tensor,
    /// The new state.
    state: Tensor,
}

impl Step {
    fn new(state: &Tensor, token: &Token, additive: bool) -> Computed<Step> {
        let decayed = state.broadcast_mul(&token.decay)?;
        let error = if additive { token.value.clone() } else { (&token.value - token.key.matmul(&decayed)?)? };
        let change = error.broadcast_mul(&token.rate)?;
        let state = (&decayed + token.key.transpose(2, 3)?.contiguous()?.matmul(&change)?)?;
        Ok(Step { decayed, error, change, state })
    }
}

/// The inputs in at least 32 bits, with a query and a key for each head.
struct Operands {
    heads: [Tensor; 3],
    numbers: [Tensor; 2],
}

impl Operands {
    fn new(inputs: &[&Tensor]) -> Computed<Operands> {
        let (batch, heads, sequence, _) = inputs[2].dims4()?;
        let repeated = |x: &Tensor| {
            let (_, groups, _, width) = x.dims4()?;
            let each = heads / groups.max(1);
            wide(x)?.unsqueeze(2)?.broadcast_as((batch, groups, each, sequence, width))?.reshape((batch, heads, sequence, width))
        };
        let mask = extras(inputs).mask;
        let number = |x: &Tensor| masked(&wide(x)?, mask)?.transpose(1, 2)?.unsqueeze(3)?.contiguous();
        Ok(Operands {
            heads: [repeated(inputs[0])?, repeated(inputs[1])?, wide(inputs[2])?.contiguous()?],
            numbers: [number(inputs[3])?.exp()?, number(inputs[4])?],
        })
    }

    fn token(&self, at: usize) -> Computed<Token> {
        let row = |x: &Tensor| x.narrow(2, at, 1)?.contiguous();
        let ([query, key, value], [decay, rate]) = (&self.heads, &self.numbers);
        Ok(Token { query: row(query)?, key: row(key)?, value: row(value)?, decay: row(decay)?, rate: row(rate)? })
    }

    /// A state of zeros.
    fn start(&self) -> Computed<Tensor> {
        let ((batch, heads, _, d), e) = (self.heads[0].dims4()?, self.heads[2].dim(3)?);
        Tensor::zeros((batch, heads, d, e), self.heads[0].dtype(), self.heads[0].device())
    }
}

/// Gradients of the inputs, by token from last to first.
#[derive(Default)]
struct Gradients {
    heads: [Vec<Tensor>; 3],
    numbers: [Vec<Tensor>; 2],
}

impl GatedDelta {
    /// Number of tokens between the states that the backward pass starts from again.
    pub(super) fn chunk(sequence: usize) -> usize {
        sequence.isqrt().max(1)
    }

    /// One step of the backward pass: from the gradient of the new state, without the output of this token,
    /// to that of the state before it.
    fn step_back(&self, before: &Tensor, token: &Token, gradient: &Tensor, of_state: &Tensor, found: &mut Gradients) -> Computed<Tensor> {
        let step = Step::new(before, token, self.additive)?;
        let t = |x: &Tensor| x.transpose(2, 3)?.contiguous();
        let gradient = (gradient * self.scale)?;
        let of_state = (of_state + t(&token.query)?.matmul(&gradient)?)?;
        let of_change = token.key.matmul(&of_state)?;
        let of_error = of_change.broadcast_mul(&token.rate)?;
        let (mut of_decayed, mut of_key) = (of_state.clone(), step.change.matmul(&t(&of_state)?)?);
        if !self.additive {
            of_decayed = (of_decayed - t(&token.key)?.matmul(&of_error)?)?;
            of_key = (of_key - of_error.matmul(&t(&step.decayed)?)?)?;
        }
        for (all, part) in found.heads.iter_mut().zip([gradient.matmul(&t(&step.state)?)?, of_key, of_error.clone()]) {
            all.push(part);
        }
        let of_rate = (of_change * step.error)?.sum_keepdim(3)?;
        let of_decay = (&of_decayed * step.decayed)?.sum_keepdim((2, 3))?;
        for (all, part) in found.numbers.iter_mut().zip([of_decay, of_rate]) {
            all.push(part);
        }
        of_decayed.broadcast_mul(&token.decay)
    }
}

impl OpSpec for GatedDelta {
    fn arity(&self) -> Range<usize> {
        INPUTS..INPUTS + 2
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        let [q, k, v] = [inputs[0], inputs[1], inputs[2]];
        for (ty, what) in [(q, "the queries"), (k, "the keys"), (v, "the values")] {
            require_floats(ty, 4, what)?;
        }
        let heads = |ty: &TensorType| ty.shape[1].fixed().ok_or("the number of heads must be fixed");
        if q.shape != k.shape || q.shape[0] != v.shape[0] || q.shape[2] != v.shape[2] {
            return Err("the shapes of queries, keys and values do not match".into());
        }
        if !heads(v)?.is_multiple_of(heads(k)?.max(1)) {
            return Err(format!("{} heads cannot share {} keys evenly", heads(v)?, heads(k)?));
        }
        let numbers = TensorType::float([v.shape[0].clone(), v.shape[2].clone(), v.shape[1].clone()]);
        if inputs[3..INPUTS].iter().any(|ty| **ty != numbers) {
            return Err(format!("decays and rates must be {numbers}"));
        }
        if let Some(mask) = inputs.get(INPUTS) {
            require(mask, Element::Int, "the mask")?;
            if mask.shape != numbers.shape[..2] {
                return Err("the mask must be [batch, sequence]".into());
            }
        }
        Ok(TensorType { element: Element::Float, shape: v.shape.clone() })
    }

    fn axes(&self, inputs: &[&TensorType]) -> String {
        let mask = if inputs.len() > INPUTS { ", b s!" } else { "" };
        format!("b g s! d, b g s! d, b (g r) s! e, b s! (g r), b s! (g r){mask} -> b (g r) s! e")
    }

    fn eval(&self, inputs: &[Tensor]) -> Computed<Tensor> {
        let all: Vec<&Tensor> = inputs.iter().collect();
        let (operands, given) = (Operands::new(&all)?, extras(&all).state);
        let mut state = given.map_or_else(|| operands.start(), wide)?;
        let mut rows = Vec::new();
        for at in 0..inputs[0].dim(2)? {
            let token = operands.token(at)?;
            state = Step::new(&state, &token, self.additive)?.state;
            rows.push((token.query.matmul(&state)? * self.scale)?);
        }
        rows.extend(given.map(|_| state));
        Tensor::cat(&rows, 2)?.to_dtype(inputs[0].dtype())
    }

    fn incremental(&self) -> Option<&dyn Incremental> {
        Some(self)
    }

    /// Keeps only some of the states, and computes those of each chunk again.
    fn backward(&self, backward: &Backward) -> Computed<Vec<Option<Tensor>>> {
        let inputs = backward.inputs.iter().map(super::Saved::tensor).collect::<Computed<Vec<_>>>()?;
        let (operands, gradient) = (Operands::new(&inputs)?, wide(backward.gradient)?);
        let ((batch, groups, sequence, width), (_, heads, ..)) = (inputs[0].dims4()?, inputs[2].dims4()?);
        let (chunk, mut state) = (Self::chunk(sequence), operands.start()?);
        let mut states = Vec::new();
        for at in 0..sequence {
            if at % chunk == 0 {
                states.push(state.clone());
            }
            state = Step::new(&state, &operands.token(at)?, self.additive)?.state;
        }
        let (mut found, mut of_state) = (Gradients::default(), state.zeros_like()?);
        for (number, state) in states.iter().enumerate().rev() {
            let range = number * chunk..sequence.min((number + 1) * chunk);
            let mut before = vec![state.clone()];
            for at in range.clone().take(range.len() - 1) {
                before.push(Step::new(&before[before.len() - 1], &operands.token(at)?, self.additive)?.state);
            }
            for (at, before) in range.zip(&before).rev() {
                of_state = self.step_back(before, &operands.token(at)?, &gradient.narrow(2, at, 1)?.contiguous()?, &of_state, &mut found)?;
            }
        }
        let ordered = |parts: &[Tensor]| Tensor::cat(&parts.iter().rev().collect::<Vec<_>>(), 2);
        let dtype = backward.gradient.dtype();
        let of_group = |parts: &[Tensor]| ordered(parts)?.reshape((batch, groups, heads / groups.max(1), sequence, width))?.sum(2)?.to_dtype(dtype);
        let mask = extras(&inputs).mask;
        let of_number = |parts: &[Tensor]| masked(&ordered(parts)?.squeeze(3)?.transpose(1, 2)?.to_dtype(dtype)?, mask)?.contiguous();
        let Gradients { heads: [q, k, v], numbers: [decay, rate] } = &found;
        let gradients = [
            backward.gradient_of(0, || of_group(q))?,
            backward.gradient_of(1, || of_group(k))?,
            backward.gradient_of(2, || ordered(v)?.to_dtype(dtype))?,
            backward.gradient_of(3, || of_number(decay))?,
            backward.gradient_of(4, || of_number(rate))?,
        ];
        Ok(gradients.into_iter().chain(mask.map(|_| None)).collect())
    }

    /// The products of queries, and of keys unless it is additive, with the state, and its change.
    fn macs(&self, inputs: &[&TensorType], output: &TensorType, bindings: &Bindings) -> u64 {
        sums(output, [&inputs[0].shape[3]], bindings).saturating_mul(if self.additive { 2 } else { 3 })
    }
}

impl Incremental for GatedDelta {
    fn token_axis(&self, input: usize) -> Option<usize> {
        Some(if input < 3 { 2 } else { 1 })
    }

    /// The states, each with the inputs of the tokens after it.
    fn state_elements(&self, inputs: &[&TensorType], removable: usize, bindings: &Bindings) -> u64 {
        let [k, v] = [1, 2].map(|input: usize| &inputs[input].shape);
        let state = elements(&TensorType::float([v[0].clone(), v[1].clone(), k[3].clone(), v[3].clone()]), bindings);
        let retained: u64 = inputs.iter().map(|ty| elements(ty, bindings)).fold(0, u64::saturating_add);
        state.saturating_mul(removable.saturating_add(2) as u64).saturating_add(retained.saturating_mul(2))
    }

    fn forward_next(&self, inputs: &[Tensor], past: &mut DecodingState, forward: &Forward) -> Computed<Tensor> {
        past.recur(inputs, &|input| if input < 3 { 2 } else { 1 }, &|inputs, state| {
            let ((batch, _, sequence, d), (_, heads, _, e)) = (inputs[0].dims4()?, inputs[2].dims4()?);
            let state = state.map_or_else(|| Tensor::zeros((batch, heads, d, e), inputs[0].dtype(), inputs[0].device()), |state| Ok(state.clone()))?;
            let all = forward(&[inputs, &[state][..]].concat())?;
            Ok((all.narrow(2, 0, sequence)?, all.narrow(2, sequence, d)?.contiguous()?))
        })
    }
}
