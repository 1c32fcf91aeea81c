//! Scaled dot-product attention.

use std::ops::Range;

use candle_core::{DType, Device, Result as Computed, Tensor};
use serde::{Deserialize, Serialize};

use super::attention_inputs::{Extras, extras, with_batch_axis};
use super::constants::{ScalarOps, constant};
use super::decoding::{DecodingState, Forward, Incremental};
use super::gradient::wide;
use super::softmax::{ProbabilityFactors, back, softmax, times};
use super::{Backward, OpSpec, attention_sinks, elements, require_floats};
use crate::ir::{Bindings, Dim, Element, TensorType};

/// `softmax(capped(scale · q kᵀ) + bias + mask) v` for each head (Vaswani et al., 2017).
///
/// Inputs: q `[batch, heads, sequence, d]`, k `[batch, groups, keys, d]`, v `[batch, groups, keys, e]`,
/// optionally an integer mask `[batch, keys]` that is zero for padding keys, optionally a bias `[heads,
/// sequence, keys]` (see [`RelativeBias`](super::RelativeBias)) or `[1, sequence, keys]` (see
/// [`ChunkBias`](super::ChunkBias)) or `[batch, heads, sequence, keys]`, of which any axis may be 1, and
/// optionally attention sinks `[heads]`: the softmax of a head includes its sink as the score of a key
/// without a value (OpenAI, *gpt-oss-120b & gpt-oss-20b Model Card*, 2025). Query head `i` reads key head
/// `i / (heads / groups)`. If the attention is causal and there are more keys than queries, as in
/// incremental decoding, the last query has the position of the last key.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Attention {
    /// Factor on the products of queries and keys, usually `1 / sqrt(d)`.
    pub scale: f64,
    /// Whether a query attends only to keys at its own and earlier positions.
    pub causal: bool,
    /// Sliding window: a query attends only to keys less than this many positions away; with `causal`, to
    /// at most this many keys including its own.
    pub window: Option<usize>,
    /// Soft cap on the products: they become `cap · tanh(product / cap)` (Gemma 2).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub soft_cap: Option<f64>,
    /// Whether a query all of whose keys have a bias of minus infinity returns zeros instead of NaN.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub zero_where_hidden: bool,
    /// Whether the mask numbers the segments of each row, from 1: a query attends only to keys with the
    /// number of its own position. The positions of a segment are consecutive. Requires `causal`.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub segments: bool,
}

impl Default for Attention {
    fn default() -> Self {
        Self { scale: 1.0, causal: false, window: None, soft_cap: None, zero_where_hidden: false, segments: false }
    }
}

/// Replaces products with masked keys. A query all of whose keys are masked, by this or by a bias of this
/// number, attends to all keys equally.
const HIDDEN: f32 = f32::MIN;
/// Maximum number of query-key products in memory, unless [`ROWS`] queries need more.
const PRODUCTS: usize = if cfg!(test) { 1 << 10 } else { 1 << 24 };
/// Minimum number of queries in a block.
const ROWS: usize = 64;

/// A block of queries and the range of keys that they attend to.
pub(super) struct Block {
    pub(super) queries: Range<usize>,
    pub(super) keys: Range<usize>,
    /// Number of keys before the position of the first query of the sequence.
    pub(super) past: usize,
}

impl Block {
    fn ranges(&self) -> [&Range<usize>; 2] {
        [&self.queries, &self.keys]
    }

    /// The rows of the keys of `[batch, heads, rows, width]`.
    pub(super) fn of_keys(&self, tensor: &Tensor) -> Computed<Tensor> {
        tensor.narrow(2, self.keys.start, self.keys.len())?.contiguous()
    }

    /// The rows of the queries of `[batch, heads, rows, width]`, as `[batch, groups, rows, width]` with
    /// the queries that share a key head concatenated.
    pub(super) fn of_queries(&self, tensor: &Tensor, groups: usize) -> Computed<Tensor> {
        let (batch, _, _, width) = tensor.dims4()?;
        tensor.narrow(2, self.queries.start, self.queries.len())?.contiguous()?.reshape((batch, groups, (), width))
    }

    /// Accumulates `part` into the rows of the keys, in at least 32 bits.
    pub(super) fn add(&self, sum: &mut Option<Tensor>, part: &Tensor, keys: usize) -> Computed<()> {
        let part = wide(part)?.pad_with_zeros(2, self.keys.start, keys - self.keys.end)?;
        *sum = Some(sum.take().map_or(Ok(part.clone()), |sum| sum + part)?);
        Ok(())
    }
}

impl Attention {
    /// Blocks of queries in order, so that memory for products grows linearly with the number of keys
    /// (Rabe and Staats, *Self-attention Does Not Need O(n²) Memory*, 2021).
    pub(super) fn blocks(&self, q: &Tensor, k: &Tensor, padded: bool) -> Computed<impl Iterator<Item = Block>> {
        let ((batch, heads, sequence, _), keys) = (q.dims4()?, k.dim(2)?);
        let rows = (PRODUCTS / (batch * heads * keys).max(1)).clamp(ROWS, sequence.max(ROWS));
        let (causal, window) = (self.causal, self.window);
        let ordered = !padded && (causal || window.is_some());
        let past = if causal { keys.saturating_sub(sequence) } else { 0 };
        Ok((0..sequence).step_by(rows).map(move |first| {
            let queries = first..(first + rows).min(sequence);
            // A query whose visible keys are all padding attends to all keys.
            let ahead = if causal { 0 } else { window.map_or(keys, |window| window.saturating_sub(1)) };
            let end = if ordered { (past + queries.end).saturating_add(ahead).min(keys) } else { keys };
            let start = window.filter(|_| ordered).map_or(0, |window| (past + first + 1).saturating_sub(window).min(end));
            Block { queries, keys: start..end, past }
        }))
    }

    /// [`HIDDEN`] where a query of a block may not attend to a key because of its position, else 0,
    /// `[queries, keys]`.
    fn order(&self, block: &Block, device: &Device) -> Computed<Tensor> {
        let count = (block.past + block.queries.end).max(block.keys.end).next_multiple_of(1024);
        let positions = constant(format!("positions {count}"), device, |device| Tensor::arange(0f32, count as f32, device))?;
        let query = positions.narrow(0, block.past + block.queries.start, block.queries.len())?.unsqueeze(1)?;
        let key = positions.narrow(0, block.keys.start, block.keys.len())?.unsqueeze(0)?;
        let behind = |window: usize| (&key + window as f64)?.broadcast_le(&query);
        let ahead = |window: usize| key.broadcast_ge(&(&query + window as f64)?);
        let hidden = match (self.causal, self.window) {
            (true, Some(window)) => ahead(1)?.maximum(&behind(window)?)?,
            (false, Some(window)) => ahead(window)?.maximum(&behind(window)?)?,
            (_, None) => ahead(1)?,
        };
        hidden.to_dtype(DType::F32)? * f64::from(HIDDEN)
    }

    /// The additive mask for products `[batch, groups, shared, queries, keys]`, in f32 because [`HIDDEN`]
    /// is out of range in 16 bits.
    fn hidden(&self, mask: Option<&Tensor>, block: &Block, device: &Device) -> Computed<Option<Tensor>> {
        let (queries, keys) = (block.queries.len(), block.keys.len());
        let order = if self.causal || self.window.is_some() { Some(self.order(block, device)?.reshape((1, 1, 1, queries, keys))?) } else { None };
        let padding = match mask {
            Some(mask) if self.segments => {
                let numbers = mask.to_dtype(DType::F32)?;
                let own = numbers.narrow(1, block.queries.start, queries)?.unsqueeze(2)?;
                let others = own.broadcast_ne(&numbers.unsqueeze(1)?)?.to_dtype(DType::F32)?;
                Some((others * f64::from(HIDDEN))?.reshape((mask.dim(0)?, 1, 1, queries, keys))?)
            }
            Some(mask) => Some((mask.eq_scalar(0.0)?.to_dtype(DType::F32)? * f64::from(HIDDEN))?.reshape((mask.dim(0)?, 1, 1, 1, keys))?),
            None => None,
        };
        Ok(match (order, padding) {
            (Some(a), Some(b)) => Some(a.broadcast_minimum(&b)?),
            (a, b) => a.or(b),
        })
    }

    /// The scaled queries of a block, the attention probabilities in at least 32 bits, and the derivative
    /// of the soft cap.
    fn probabilities(
        &self,
        block: &Block,
        (q, keys): (&Tensor, &Tensor),
        extras: Extras,
        softmax: fn(&Tensor) -> Computed<Tensor>,
    ) -> Computed<(Tensor, Tensor, Option<Tensor>)> {
        let (batch, groups, span, _) = keys.dims4()?;
        let q = (block.of_queries(q, groups)? * self.scale)?;
        let mut scores = wide(&q.matmul(&keys.transpose(2, 3)?)?)?;
        let mut slope = None;
        if let Some(cap) = self.soft_cap {
            let part = (scores / cap)?.tanh()?;
            slope = Some((1.0 - part.sqr()?)?);
            scores = (part * cap)?;
        }
        let hidden = self.hidden(extras.mask, block, scores.device())?;
        let bias = match extras.bias {
            Some(bias) => {
                // Axes of size 1 are broadcast.
                let part = |bias: Tensor, axis: usize, of: &Range<usize>| if bias.dim(axis)? == 1 { Ok(bias) } else { bias.narrow(axis, of.start, of.len()) };
                let part = wide(&part(part(with_batch_axis(bias)?, 2, &block.queries)?, 3, &block.keys)?)?;
                let (samples, heads, rows, columns) = part.dims4()?;
                Some(part.contiguous()?.reshape((samples, if heads == 1 { 1 } else { groups }, (), rows, columns))?)
            }
            None => None,
        };
        let shape = scores.shape().clone();
        let mut five = scores.reshape((batch, groups, (), block.queries.len(), span))?;
        let added = match (bias, hidden) {
            (Some(bias), Some(hidden)) => {
                // Not their sum, in which keys that both hide would be below keys that one hides.
                let hidden = bias.zeros_like()?.broadcast_add(&hidden.to_dtype(bias.dtype())?)?;
                Some(hidden.lt_scalar(0.0)?.where_cond(&hidden, &bias.broadcast_as(hidden.shape())?.contiguous()?)?)
            }
            (bias, hidden) => bias.or(hidden),
        };
        if let Some(added) = added {
            five = five.broadcast_add(&added.to_dtype(five.dtype())?)?;
        }
        let scores = five.reshape(shape)?;
        let mut probabilities = match extras.sinks {
            Some(sinks) => attention_sinks::softmax_with(&scores, sinks, softmax)?,
            None => softmax(&scores)?,
        };
        if self.zero_where_hidden {
            // NaN differs from itself.
            probabilities = probabilities.eq(&probabilities)?.where_cond(&probabilities, &probabilities.zeros_like()?)?;
        }
        Ok((q, probabilities, slope))
    }

    /// The output, computed with the given softmax over the last axis, and with factors on the probabilities
    /// if there are any.
    pub(super) fn attend(&self, inputs: &[Tensor], softmax: fn(&Tensor) -> Computed<Tensor>, factors: Option<ProbabilityFactors>) -> Computed<Tensor> {
        let (q, k, v) = (&inputs[0], &inputs[1], &inputs[2]);
        let (batch, heads, _, _) = q.dims4()?;
        let extras = extras(&inputs[3..]);
        let part = |block: Block| {
            let (_, probabilities, _) = self.probabilities(&block, (q, &block.of_keys(k)?), extras, softmax)?;
            let rows = times(&probabilities, block.ranges(), heads, factors)?.to_dtype(v.dtype())?.matmul(&block.of_keys(v)?)?;
            rows.reshape((batch, heads, block.queries.len(), v.dim(3)?))
        };
        Tensor::cat(&self.blocks(q, k, extras.mask.is_some())?.map(part).collect::<Computed<Vec<_>>>()?, 2)
    }

    /// The gradients, with factors on the probabilities if there are any.
    pub(super) fn differentiate(&self, backward: &Backward, factors: Option<ProbabilityFactors>) -> Computed<Vec<Option<Tensor>>> {
        let [q, k, v] = [backward.inputs[0].tensor()?, backward.inputs[1].tensor()?, backward.inputs[2].tensor()?];
        let rest = backward.inputs[3..].iter().map(|saved| saved.tensor().cloned()).collect::<Computed<Vec<_>>>()?;
        let extras = extras(&rest);
        // The input of this rank, if it needs a gradient.
        let wanted =
            |ranks: Range<usize>| (3..backward.inputs.len()).find(|at| ranks.contains(&backward.inputs[*at].dims().len()) && backward.needs_gradient(*at));
        let (of_bias, of_sinks) = (wanted(3..5), wanted(1..2));
        let bias = extras.bias.filter(|_| of_bias.is_some()).map(with_batch_axis).transpose()?;
        let ((_, groups, keys, _), mut parts, mut sums) = (k.dims4()?, Vec::new(), [None, None]);
        let (mut bias_parts, mut sink_sum) = (Vec::new(), None::<Tensor>);
        let [of_keys, of_values] = &mut sums;
        for block in self.blocks(q, k, extras.mask.is_some())? {
            let (k, v) = (block.of_keys(k)?, block.of_keys(v)?);
            let (scaled, probabilities, slope) = self.probabilities(&block, (q, &k), extras, softmax)?;
            let gradient = block.of_queries(backward.gradient, groups)?;
            if backward.needs_gradient(2) {
                let read = times(&probabilities, block.ranges(), q.dim(1)?, factors)?.to_dtype(v.dtype())?;
                block.add(of_values, &read.transpose(2, 3)?.contiguous()?.matmul(&gradient)?, keys)?;
            }
            if backward.needs_gradient(0) || backward.needs_gradient(1) || bias.is_some() || of_sinks.is_some() {
                let of_probabilities = times(&wide(&gradient.matmul(&v.transpose(2, 3)?)?)?, block.ranges(), q.dim(1)?, factors)?;
                if of_sinks.is_some() {
                    let part = attention_sinks::gradient(&probabilities, &of_probabilities, q.dim(1)?)?;
                    sink_sum = Some(sink_sum.map_or(Ok(part.clone()), |sum| sum + part)?);
                }
                let of_scores = back(&probabilities, &of_probabilities)?;
                drop((probabilities, of_probabilities));
                if let Some(bias) = &bias {
                    let (batch, heads, _, _) = q.dims4()?;
                    let part = of_scores.reshape((batch, heads, block.queries.len(), block.keys.len()))?;
                    let part = if bias.dim(0)? == 1 { part.sum_keepdim(0)? } else { part };
                    bias_parts.push(part.pad_with_zeros(3, block.keys.start, keys - block.keys.end)?);
                }
                let of_scores = slope.map_or(Ok(of_scores.clone()), |slope| of_scores * slope)?.to_dtype(q.dtype())?;
                if backward.needs_gradient(0) {
                    let (batch, heads, _, width) = q.dims4()?;
                    parts.push((of_scores.matmul(&k)? * self.scale)?.reshape((batch, heads, block.queries.len(), width))?);
                }
                if backward.needs_gradient(1) {
                    block.add(of_keys, &of_scores.transpose(2, 3)?.contiguous()?.matmul(&scaled)?, keys)?;
                }
            }
        }
        let sum = |sum: Option<Tensor>| sum.map(|sum| sum.to_dtype(q.dtype())).transpose();
        let [of_keys, of_values] = sums;
        let mut gradients = vec![backward.gradient_of(0, || Tensor::cat(&parts, 2))?, sum(of_keys)?, sum(of_values)?];
        gradients.resize(backward.inputs.len(), None);
        if let (Some(at), Some(sum)) = (of_sinks, sink_sum) {
            gradients[at] = Some(sum.to_dtype(q.dtype())?);
        }
        if let (Some(bias), Some(at)) = (bias, of_bias) {
            let mut sum = Tensor::cat(&bias_parts, 2)?;
            for axis in (1..4).filter(|axis| bias.dims()[*axis] == 1) {
                sum = sum.sum_keepdim(axis)?;
            }
            gradients[at] = Some(sum.reshape(backward.inputs[at].dims())?.to_dtype(q.dtype())?);
        }
        Ok(gradients)
    }
}

impl OpSpec for Attention {
    fn arity(&self) -> Range<usize> {
        3..7
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        let [q, k, v] = [inputs[0], inputs[1], inputs[2]];
        for (ty, what) in [(q, "the queries"), (k, "the keys"), (v, "the values")] {
            require_floats(ty, 4, what)?;
        }
        let heads = |ty: &TensorType| ty.shape[1].fixed().ok_or("the number of heads must be fixed");
        if k.shape[..3] != v.shape[..3] || q.shape[3] != k.shape[3] || q.shape[0] != k.shape[0] {
            return Err("the shapes of queries, keys and values do not match".into());
        }
        if !heads(q)?.is_multiple_of(heads(k)?.max(1)) {
            return Err(format!("{} query heads cannot share {} key heads evenly", heads(q)?, heads(k)?));
        }
        if (self.causal || self.window.is_some()) && q.shape[2] != k.shape[2] {
            return Err("causal and sliding-window attention require as many queries as keys".into());
        }
        if self.segments && !(self.causal && inputs.get(3).is_some_and(|mask| mask.element == Element::Int)) {
            return Err("segments require causal attention with a mask".into());
        }
        let bias = [&q.shape[0], &q.shape[1], &q.shape[2], &k.shape[2]];
        let is_bias = |extra: &TensorType| match extra.shape.len() {
            3 => extra.shape[1..].iter().eq(bias[2..].iter().copied()) && (extra.shape[0] == *bias[1] || extra.shape[0] == Dim::Fixed(1)),
            4 => extra.shape.iter().zip(bias).all(|(size, wanted)| size == wanted || *size == Dim::Fixed(1)),
            _ => false,
        };
        for (place, extra) in inputs.iter().skip(3).enumerate() {
            match extra.element {
                Element::Int if place > 0 => return Err("the mask must precede the bias and the sinks, and there can be only one".into()),
                Element::Int if extra.shape != [k.shape[0].clone(), k.shape[2].clone()] => return Err("the mask must be [batch, keys]".into()),
                Element::Float if extra.shape.len() == 1 && extra.shape != q.shape[1..2] => return Err("the sinks must be [heads]".into()),
                Element::Float if extra.shape.len() > 1 && !is_bias(extra) => {
                    return Err("the bias must be [heads or 1, sequence, keys], or [batch, heads, sequence, keys] with any axis of size 1".into());
                }
                Element::Float if inputs[place + 4..].iter().any(|next| next.shape.len() > 1 || extra.shape.len() == 1) => {
                    return Err("the bias must be the last input, except for the sinks".into());
                }
                _ => {}
            }
        }
        let mut shape = q.shape.clone();
        shape[3] = v.shape[3].clone();
        Ok(TensorType { element: Element::Float, shape })
    }

    fn axes(&self, inputs: &[&TensorType]) -> String {
        let extras = inputs.iter().skip(3).map(|extra| match extra.shape.len() {
            1 => ", (g r)".to_owned(),
            2 => ", b t!".to_owned(),
            3 if extra.shape[0] != inputs[0].shape[1] => ", _ s! t!".to_owned(),
            3 => ", (g r) s! t!".to_owned(),
            _ => {
                let letters = extra.shape.iter().zip(["b", "(g r)", "s!", "t!"]);
                format!(", {}", letters.map(|(size, letter)| if *size == Dim::Fixed(1) { "_" } else { letter }).collect::<Vec<_>>().join(" "))
            }
        });
        format!("b (g r) s! d, b g t! d, b g t! e{} -> b (g r) s! e", extras.collect::<String>())
    }

    fn eval(&self, inputs: &[Tensor]) -> Computed<Tensor> {
        self.attend(inputs, softmax, None)
    }

    fn incremental(&self) -> Option<&dyn Incremental> {
        Some(self)
    }

    fn backward(&self, backward: &Backward) -> Computed<Vec<Option<Tensor>>> {
        self.differentiate(backward, None)
    }

    fn macs(&self, inputs: &[&TensorType], output: &TensorType, bindings: &Bindings) -> u64 {
        let keys = inputs[1].shape[2].evaluate(bindings).unwrap_or(0) as u64;
        elements(inputs[0], bindings).saturating_add(elements(output, bindings)).saturating_mul(keys)
    }
}

impl Incremental for Attention {
    fn token_axis(&self, input: usize) -> Option<usize> {
        Some(if input < 3 { 2 } else { 1 })
    }

    fn is_tokenwise(&self, along: &dyn Fn(usize) -> bool) -> bool {
        !self.causal && self.window.is_none() && along(0) && !(1..7).any(along)
    }

    fn reads_pairs(&self, input: usize) -> bool {
        input > 2
    }

    fn looks_ahead(&self) -> Option<&'static str> {
        (!self.causal).then_some("tokens attend to later tokens")
    }

    fn supports_branches(&self, inputs: &[&TensorType]) -> bool {
        self.causal && self.window.is_none() && inputs.iter().skip(3).all(|extra| extra.shape.len() < 3)
    }

    /// Caches the keys, values and mask entries that later queries can attend to.
    fn forward_next(&self, inputs: &[Tensor], past: &mut DecodingState, forward: &Forward) -> Computed<Tensor> {
        let seen = self.window.map_or(usize::MAX, |window| window.saturating_sub(1));
        let mut all = vec![inputs[0].clone()];
        for (input, new) in inputs.iter().enumerate().skip(1) {
            let new = match (input, new.rank()) {
                (1 | 2, _) => past.push(input - 1, new, 2, seen)?,
                (_, 2) => past.push(input - 1, new, 1, seen)?,
                (_, 1) => new.clone(),
                // A bias has a column for each token; columns of evicted keys are dropped.
                (_, rank) => {
                    let (keys, columns) = (all[1].dim(2)?, new.dim(rank - 1)?);
                    if columns > keys { new.narrow(rank - 1, columns - keys, keys)? } else { new.clone() }
                }
            };
            all.push(new);
        }
        if let Some(branches) = past.branches() {
            // The bias precedes the sinks.
            let at = all.iter().position(|input| input.rank() == 1).unwrap_or(all.len());
            all.insert(at, branches.hidden().clone());
        }
        forward(&all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ir::ops::{ChunkBias, Op, PreparedOp, Saved};

    /// Compares the blocked reference implementation, with several blocks, with the kernel, which does
    /// not use blocks.
    #[test]
    fn blocked_attention_matches_the_kernel() {
        let device = Device::Cpu;
        let (batch, heads, groups, sequence, width, out) = (2, 4, 2, 150, 8, 12);
        let random = |shape: (usize, usize, usize, usize)| Tensor::randn(0f32, 1f32, shape, &device).unwrap();
        let (q, k, v) = (random((batch, heads, sequence, width)), random((batch, groups, sequence, width)), random((batch, groups, sequence, out)));
        let gradient = random((batch, heads, sequence, out));
        // In the second sample, every early key is padding: with causal attention, its first queries have
        // no visible key. In the first sample, every late key is: with chunks, its last queries have none.
        let mask: Vec<i64> = (0..batch * sequence).map(|i| i64::from(i < sequence - 55 || i > sequence + 70)).collect();
        let mask = Tensor::from_vec(mask, (batch, sequence), &device).unwrap();
        let biases = |shape: &[usize]| Tensor::randn(0f32, 1f32, shape, &device).unwrap();
        let (by_head, whole, by_key) = (biases(&[heads, sequence, sequence]), biases(&[batch, heads, sequence, sequence]), biases(&[batch, 1, 1, sequence]));
        let chunks = ChunkBias { size: 40 }.eval(std::slice::from_ref(&mask)).unwrap();
        // All keys of the third query of the second sample are hidden.
        let numbers: Vec<f32> = (0..batch * sequence).map(|row| if row == sequence + 2 { f32::NEG_INFINITY } else { row as f32 * 0.01 }).collect();
        let by_query = Tensor::from_vec(numbers, (batch, 1, sequence, 1), &device).unwrap();
        for (causal, window, padded, soft_cap, bias) in [
            (false, None, false, None, None),
            (true, None, false, None, None),
            (true, Some(17), false, None, None),
            (true, Some(90), true, Some(0.7), None),
            (false, None, true, None, None),
            (true, None, true, None, None),
            (false, Some(17), false, None, None),
            (false, Some(60), true, None, None),
            (false, Some(9), true, Some(0.7), Some(&by_head)),
            (false, None, false, None, Some(&by_head)),
            (true, None, true, None, Some(&by_head)),
            (true, Some(40), false, None, Some(&chunks)),
            (true, Some(40), true, None, Some(&chunks)),
            (false, None, false, None, Some(&whole)),
            (false, None, false, None, Some(&by_key)),
            (false, None, false, None, Some(&by_query)),
        ] {
            let op = Attention { scale: 0.4, causal, window, soft_cap, zero_where_hidden: bias.is_some_and(|bias| bias.rank() == 4), segments: false };
            let mut inputs = vec![q.clone(), k.clone(), v.clone()];
            inputs.extend(padded.then(|| mask.clone()));
            inputs.extend(bias.cloned());
            let blocks = op.blocks(&q, &k, padded).unwrap().count();
            assert_eq!(blocks, 3);
            let kernel = PreparedOp::new(&Op::Attention(op), &device, DType::F32);
            let distance = |a: &Tensor, b: &Tensor| (a - b).unwrap().abs().unwrap().flatten_all().unwrap().max(0).unwrap().to_scalar::<f32>().unwrap();
            let output = op.eval(&inputs).unwrap();
            assert!(distance(&output, &kernel.forward(&inputs).unwrap()) < 1e-5, "{op:?}");
            if bias.is_some_and(|bias| bias.dims()[1..] == [1, sequence, 1]) {
                assert!(output.flatten_all().unwrap().to_vec1::<f32>().unwrap().iter().all(|value| value.is_finite()));
                let plain = Attention { zero_where_hidden: false, ..op };
                let kernel = PreparedOp::new(&Op::Attention(plain), &device, DType::F32);
                for answer in [plain.eval(&inputs).unwrap(), kernel.forward(&inputs).unwrap()] {
                    let values = answer.flatten_all().unwrap().to_vec1::<f32>().unwrap();
                    assert_eq!(values.iter().filter(|value| value.is_nan()).count(), heads * out);
                }
            }
            let saved: Vec<Saved> = inputs.iter().cloned().map(Saved::full).collect();
            let wanted: Vec<bool> = inputs.iter().map(|input| input.rank() > 2).collect();
            let backward = Backward { inputs: &saved, output: &Saved::full(output), gradient: &gradient, needs_gradient: &wanted };
            let (expected, found) = (op.backward(&backward).unwrap(), kernel.backward(&backward).unwrap());
            for (a, b) in expected.iter().flatten().zip(found.iter().flatten()) {
                assert!(distance(a, &b.contiguous().unwrap()) < 2e-5, "{op:?}");
            }
            assert_eq!(expected.iter().flatten().count(), if bias.is_some() { 4 } else { 3 });
            assert!(bias.zip(expected.last().unwrap().as_ref()).is_none_or(|(bias, gradient)| bias.dims() == gradient.dims()), "{op:?}");
        }
    }

    #[test]
    fn causal_attention_requires_as_many_queries_as_keys() {
        let ty = |rows: usize| TensorType { element: Element::Float, shape: [1, 2, rows, 4].map(crate::ir::Dim::from).to_vec() };
        let infer = |causal: bool, keys: usize| Attention { causal, ..Attention::default() }.infer(&[&ty(6), &ty(keys), &ty(keys)]);
        assert!(infer(true, 6).is_ok() && infer(false, 5).is_ok());
        assert!(infer(true, 5).unwrap_err().contains("as many queries as keys"));
    }
}
