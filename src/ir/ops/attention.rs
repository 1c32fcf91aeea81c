//! Scaled dot-product attention.

use std::ops::Range;

use candle_core::{DType, Device, Result as Computed, Tensor};
use serde::{Deserialize, Serialize};

use super::constants::constant;
use super::gradient::wide;
use super::past::{Forward, Past, Sequential};
use super::softmax::{back, softmax};
use super::{Backward, OpSpec, elements, require_floats};
use crate::ir::{Bindings, Dim, Element, TensorType};

/// `softmax(capped(scale · q kᵀ) + bias + mask) v` for each head (Vaswani et al., 2017).
///
/// Inputs: q `[batch, heads, sequence, d]`, k `[batch, groups, keys, d]`, v `[batch, groups, keys, e]`, then
/// optionally a mask `[batch, keys]` of whole numbers, zero for keys that are padding, and optionally a bias
/// `[heads, sequence, keys]` (see [`RelativeBias`](super::RelativeBias)) or `[batch, heads, sequence, keys]`, of which any may be 1. Query
/// head `i` reads key head `i / (heads / groups)`. Where order counts and there are more keys than queries, as where a sequence goes on, the last
/// query stands at the last key.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Attention {
    /// Factor on the products, usually `1 / sqrt(d)`.
    pub scale: f64,
    /// Whether a query sees only keys at its own position and before.
    pub causal: bool,
    /// A query sees keys alone that are fewer places than this away: when causal, that many at most, its own included.
    pub window: Option<usize>,
    /// What products come near to and never pass: `cap · tanh(product / cap)` takes their place (Gemma 2).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub soft_cap: Option<f64>,
    /// Whether a query from which a bias of minus infinity hides every key gets zeros, and not what is no number.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub zero_where_hidden: bool,
}

impl Default for Attention {
    fn default() -> Self {
        Self { scale: 1.0, causal: false, window: None, soft_cap: None, zero_where_hidden: false }
    }
}

/// Stands for products with keys that a query may not see. A query that sees none at all looks at all keys alike.
const HIDDEN: f32 = f32::MIN;
/// Products of queries and keys that are held at a time, unless [`ROWS`] queries make more.
const PRODUCTS: usize = if cfg!(test) { 1 << 10 } else { 1 << 24 };
/// Queries that are worked on together at least.
const ROWS: usize = 64;

/// Queries that are worked on together, and the keys that any of them sees.
struct Block {
    queries: Range<usize>,
    keys: Range<usize>,
    /// Keys before the one at which the first query of all stands.
    past: usize,
}

impl Block {
    /// Rows `[batch, heads, rows, width]` of the keys.
    fn of_keys(&self, tensor: &Tensor) -> Computed<Tensor> {
        tensor.narrow(2, self.keys.start, self.keys.len())?.contiguous()
    }

    /// Rows `[batch, heads, rows, width]` of the queries, those of each key head one below the other.
    fn of_queries(&self, tensor: &Tensor, groups: usize) -> Computed<Tensor> {
        let (batch, _, _, width) = tensor.dims4()?;
        tensor.narrow(2, self.queries.start, self.queries.len())?.contiguous()?.reshape((batch, groups, (), width))
    }

    /// Adds to the rows of the keys, in 32 bits at least.
    fn add(&self, sum: &mut Option<Tensor>, part: &Tensor, keys: usize) -> Computed<()> {
        let part = wide(part)?.pad_with_zeros(2, self.keys.start, keys - self.keys.end)?;
        *sum = Some(sum.take().map_or(Ok(part.clone()), |sum| sum + part)?);
        Ok(())
    }
}

/// The mask and the bias, where they are.
type Extras<'t> = (Option<&'t Tensor>, Option<&'t Tensor>);

/// The mask and the bias among what follows the values: they differ in their number of axes.
pub(super) fn extras(rest: &[Tensor]) -> Extras<'_> {
    let of = |rank: usize| rest.iter().find(|extra| extra.rank() == rank);
    (of(2), of(3).or_else(|| of(4)))
}

/// A bias `[batch, heads, sequence, keys]`.
pub(super) fn by_sample(bias: &Tensor) -> Computed<Tensor> {
    if bias.rank() == 3 { bias.unsqueeze(0) } else { Ok(bias.clone()) }
}

impl Attention {
    /// Blocks of queries in their order. Memory for products grows with the number of keys at most, not with its square
    /// (Rabe and Staats, *Self-attention Does Not Need O(n²) Memory*, 2021).
    fn blocks(&self, q: &Tensor, k: &Tensor, padded: bool) -> Computed<impl Iterator<Item = Block>> {
        let ((batch, heads, sequence, _), keys) = (q.dims4()?, k.dim(2)?);
        let rows = (PRODUCTS / (batch * heads * keys).max(1)).clamp(ROWS, sequence.max(ROWS));
        let (causal, window) = (self.causal, self.window);
        let ordered = !padded && (causal || window.is_some());
        let past = if causal { keys.saturating_sub(sequence) } else { 0 };
        Ok((0..sequence).step_by(rows).map(move |first| {
            let queries = first..(first + rows).min(sequence);
            // A query that sees nothing but padding looks at all keys.
            let ahead = if causal { 0 } else { window.map_or(keys, |window| window.saturating_sub(1)) };
            let end = if ordered { (past + queries.end).saturating_add(ahead).min(keys) } else { keys };
            let start = window.filter(|_| ordered).map_or(0, |window| (past + first + 1).saturating_sub(window).min(end));
            Block { queries, keys: start..end, past }
        }))
    }

    /// [`HIDDEN`] where a query of a block may not look, else 0, `[queries, keys]`.
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

    /// What is added to products `[batch, groups, shared, queries, keys]`, in 32 bits: half as many hold no number that is low enough.
    fn hidden(&self, mask: Option<&Tensor>, block: &Block, device: &Device) -> Computed<Option<Tensor>> {
        let (queries, keys) = (block.queries.len(), block.keys.len());
        let order = if self.causal || self.window.is_some() { Some(self.order(block, device)?.reshape((1, 1, 1, queries, keys))?) } else { None };
        let padding = match mask {
            Some(mask) => Some((mask.eq(0i64)?.to_dtype(DType::F32)? * f64::from(HIDDEN))?.reshape((mask.dim(0)?, 1, 1, 1, keys))?),
            None => None,
        };
        Ok(match (order, padding) {
            (Some(a), Some(b)) => Some(a.broadcast_minimum(&b)?),
            (a, b) => a.or(b),
        })
    }

    /// The queries of a block, scaled, how strongly they look at keys, in 32 bits at least, and the slope of the cap on products.
    fn probabilities(
        &self,
        block: &Block,
        (q, keys): (&Tensor, &Tensor),
        (mask, bias): Extras,
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
        let hidden = self.hidden(mask, block, scores.device())?;
        let bias = match bias {
            Some(bias) => {
                // What there is one of holds for all.
                let part = |bias: Tensor, axis: usize, of: &Range<usize>| if bias.dim(axis)? == 1 { Ok(bias) } else { bias.narrow(axis, of.start, of.len()) };
                let part = wide(&part(part(by_sample(bias)?, 2, &block.queries)?, 3, &block.keys)?)?;
                let (samples, heads, rows, columns) = part.dims4()?;
                Some(part.contiguous()?.reshape((samples, if heads == 1 { 1 } else { groups }, (), rows, columns))?)
            }
            None => None,
        };
        let shape = scores.shape().clone();
        let mut five = scores.reshape((batch, groups, (), block.queries.len(), span))?;
        for added in [bias, hidden].into_iter().flatten() {
            five = five.broadcast_add(&added.to_dtype(five.dtype())?)?;
        }
        let mut probabilities = softmax(&five.reshape(shape)?)?;
        if self.zero_where_hidden {
            // What is no number is not equal to itself.
            probabilities = probabilities.eq(&probabilities)?.where_cond(&probabilities, &probabilities.zeros_like()?)?;
        }
        Ok((q, probabilities, slope))
    }

    /// The output, with this way to make a softmax over the last axis.
    pub(super) fn attend(&self, inputs: &[Tensor], softmax: fn(&Tensor) -> Computed<Tensor>) -> Computed<Tensor> {
        let (q, k, v) = (&inputs[0], &inputs[1], &inputs[2]);
        let (batch, heads, _, _) = q.dims4()?;
        let extras = extras(&inputs[3..]);
        let part = |block: Block| {
            let (_, probabilities, _) = self.probabilities(&block, (q, &block.of_keys(k)?), extras, softmax)?;
            let rows = probabilities.to_dtype(v.dtype())?.matmul(&block.of_keys(v)?)?;
            rows.reshape((batch, heads, block.queries.len(), v.dim(3)?))
        };
        Tensor::cat(&self.blocks(q, k, extras.0.is_some())?.map(part).collect::<Computed<Vec<_>>>()?, 2)
    }
}

impl OpSpec for Attention {
    fn arity(&self) -> Range<usize> {
        3..6
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        let [q, k, v] = [inputs[0], inputs[1], inputs[2]];
        for (ty, what) in [(q, "the queries"), (k, "the keys"), (v, "the values")] {
            require_floats(ty, 4, what)?;
        }
        let heads = |ty: &TensorType| ty.shape[1].fixed().ok_or("the number of heads must be known");
        if k.shape[..3] != v.shape[..3] || q.shape[3] != k.shape[3] || q.shape[0] != k.shape[0] {
            return Err("queries, keys and values do not fit each other".into());
        }
        if !heads(q)?.is_multiple_of(heads(k)?.max(1)) {
            return Err(format!("{} query heads cannot share {} key heads evenly", heads(q)?, heads(k)?));
        }
        if (self.causal || self.window.is_some()) && q.shape[2] != k.shape[2] {
            return Err("causal attention, and one with a window, needs as many queries as keys".into());
        }
        let bias = [&q.shape[0], &q.shape[1], &q.shape[2], &k.shape[2]];
        let is_bias = |extra: &TensorType| match extra.shape.len() {
            3 => extra.shape.iter().eq(bias[1..].iter().copied()),
            4 => extra.shape.iter().zip(bias).all(|(size, wanted)| size == wanted || *size == Dim::Fixed(1)),
            _ => false,
        };
        for (place, extra) in inputs.iter().skip(3).enumerate() {
            match extra.element {
                Element::Int if place > 0 => return Err("the mask comes before the bias, and there is one".into()),
                Element::Int if extra.shape != [k.shape[0].clone(), k.shape[2].clone()] => return Err("the mask must be [batch, keys]".into()),
                Element::Float if !is_bias(extra) => {
                    return Err("the bias must be [heads, sequence, keys], or [batch, heads, sequence, keys] with sizes of 1 where it is the same".into());
                }
                Element::Float if place + 4 < inputs.len() => return Err("the bias comes last".into()),
                _ => {}
            }
        }
        let mut shape = q.shape.clone();
        shape[3] = v.shape[3].clone();
        Ok(TensorType { element: Element::Float, shape })
    }

    fn axes(&self, inputs: &[&TensorType]) -> String {
        let extras = inputs.iter().skip(3).map(|extra| match extra.shape.len() {
            2 => ", b t!".to_owned(),
            3 => ", (g r) s! t!".to_owned(),
            _ => {
                let letters = extra.shape.iter().zip(["b", "(g r)", "s!", "t!"]);
                format!(", {}", letters.map(|(size, letter)| if *size == Dim::Fixed(1) { "_" } else { letter }).collect::<Vec<_>>().join(" "))
            }
        });
        format!("b (g r) s! d, b g t! d, b g t! e{} -> b (g r) s! e", extras.collect::<String>())
    }

    fn eval(&self, inputs: &[Tensor]) -> Computed<Tensor> {
        self.attend(inputs, softmax)
    }

    fn sequential(&self) -> Option<&dyn Sequential> {
        Some(self)
    }

    fn backward(&self, backward: &Backward) -> Computed<Vec<Option<Tensor>>> {
        let [q, k, v] = [backward.inputs[0].tensor()?, backward.inputs[1].tensor()?, backward.inputs[2].tensor()?];
        let rest = backward.inputs[3..].iter().map(|saved| saved.tensor().cloned()).collect::<Computed<Vec<_>>>()?;
        let (extras, last) = (extras(&rest), backward.inputs.len() - 1);
        let bias = extras.1.filter(|_| backward.wants(last)).map(by_sample).transpose()?;
        let ((_, groups, keys, _), mut parts, mut sums) = (k.dims4()?, Vec::new(), [None, None]);
        let mut bias_parts = Vec::new();
        let [of_keys, of_values] = &mut sums;
        for block in self.blocks(q, k, extras.0.is_some())? {
            let (k, v) = (block.of_keys(k)?, block.of_keys(v)?);
            let (scaled, probabilities, slope) = self.probabilities(&block, (q, &k), extras, softmax)?;
            let gradient = block.of_queries(backward.gradient, groups)?;
            if backward.wants(2) {
                block.add(of_values, &probabilities.to_dtype(v.dtype())?.transpose(2, 3)?.contiguous()?.matmul(&gradient)?, keys)?;
            }
            if backward.wants(0) || backward.wants(1) || bias.is_some() {
                let of_scores = back(&probabilities, &wide(&gradient.matmul(&v.transpose(2, 3)?)?)?)?;
                drop(probabilities);
                if let Some(bias) = &bias {
                    let (batch, heads, _, _) = q.dims4()?;
                    let part = of_scores.reshape((batch, heads, block.queries.len(), block.keys.len()))?;
                    let part = if bias.dim(0)? == 1 { part.sum_keepdim(0)? } else { part };
                    bias_parts.push(part.pad_with_zeros(3, block.keys.start, keys - block.keys.end)?);
                }
                let of_scores = slope.map_or(Ok(of_scores.clone()), |slope| of_scores * slope)?.to_dtype(q.dtype())?;
                if backward.wants(0) {
                    let (batch, heads, _, width) = q.dims4()?;
                    parts.push((of_scores.matmul(&k)? * self.scale)?.reshape((batch, heads, block.queries.len(), width))?);
                }
                if backward.wants(1) {
                    block.add(of_keys, &of_scores.transpose(2, 3)?.contiguous()?.matmul(&scaled)?, keys)?;
                }
            }
        }
        let sum = |sum: Option<Tensor>| sum.map(|sum| sum.to_dtype(q.dtype())).transpose();
        let [of_keys, of_values] = sums;
        let mut gradients = vec![backward.of(0, || Tensor::cat(&parts, 2))?, sum(of_keys)?, sum(of_values)?];
        gradients.resize(backward.inputs.len(), None);
        if let Some(bias) = bias {
            let mut sum = Tensor::cat(&bias_parts, 2)?;
            for axis in (1..4).filter(|axis| bias.dims()[*axis] == 1) {
                sum = sum.sum_keepdim(axis)?;
            }
            gradients[last] = Some(sum.reshape(backward.inputs[last].dims())?.to_dtype(q.dtype())?);
        }
        Ok(gradients)
    }

    fn macs(&self, inputs: &[&TensorType], output: &TensorType, bindings: &Bindings) -> u64 {
        let keys = inputs[1].shape[2].evaluate(bindings).unwrap_or(0) as u64;
        elements(inputs[0], bindings).saturating_add(elements(output, bindings)).saturating_mul(keys)
    }
}

impl Sequential for Attention {
    fn axis(&self, input: usize) -> Option<usize> {
        Some(if input < 3 { 2 } else { 1 })
    }

    fn is_by_token(&self, along: &dyn Fn(usize) -> bool) -> bool {
        !self.causal && self.window.is_none() && along(0) && !(1..6).any(along)
    }

    fn reads_pairs(&self, input: usize) -> bool {
        input > 2
    }

    fn looks_ahead(&self) -> Option<&'static str> {
        (!self.causal).then_some("tokens see those behind them")
    }

    /// Keys and values are kept, those alone that later queries see, and with them which of them are padding.
    fn follow(&self, inputs: &[Tensor], past: &mut Past, forward: &Forward) -> Computed<Tensor> {
        let seen = self.window.map_or(usize::MAX, |window| window.saturating_sub(1));
        let mut all = vec![inputs[0].clone()];
        for (input, new) in inputs.iter().enumerate().skip(1) {
            let new = match (input, new.rank()) {
                (1 | 2, _) => past.rows(input - 1).push(new, 2, seen)?,
                (_, 2) => past.rows(input - 1).push(new, 1, seen)?,
                // A bias has a column for each token; those of keys that no query sees are forgotten with them.
                (_, rank) => {
                    let (keys, columns) = (all[1].dim(2)?, new.dim(rank - 1)?);
                    if columns > keys { new.narrow(rank - 1, columns - keys, keys)? } else { new.clone() }
                }
            };
            all.push(new);
        }
        forward(&all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ir::ops::{Op, PreparedOp, Saved};

    /// The op as it is meant, several blocks long, beside its kernel, which holds no block.
    #[test]
    fn blocks_of_queries_do_not_show() {
        let device = Device::Cpu;
        let (batch, heads, groups, sequence, width, out) = (2, 4, 2, 150, 8, 12);
        let random = |shape: (usize, usize, usize, usize)| Tensor::randn(0f32, 1f32, shape, &device).unwrap();
        let (q, k, v) = (random((batch, heads, sequence, width)), random((batch, groups, sequence, width)), random((batch, groups, sequence, out)));
        let gradient = random((batch, heads, sequence, out));
        // Of the second sample, every early key is padding: its first queries see nothing when causal.
        let mask: Vec<i64> = (0..batch * sequence).map(|i| i64::from(i < sequence || i > sequence + 70)).collect();
        let mask = Tensor::from_vec(mask, (batch, sequence), &device).unwrap();
        let biases = |shape: &[usize]| Tensor::randn(0f32, 1f32, shape, &device).unwrap();
        let (by_head, whole, by_key) = (biases(&[heads, sequence, sequence]), biases(&[batch, heads, sequence, sequence]), biases(&[batch, 1, 1, sequence]));
        // From the third query of the second sample every key is hidden.
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
            (false, None, false, None, Some(&whole)),
            (false, None, false, None, Some(&by_key)),
            (false, None, false, None, Some(&by_query)),
        ] {
            let op = Attention { scale: 0.4, causal, window, soft_cap, zero_where_hidden: bias.is_some_and(|bias| bias.rank() == 4) };
            let mut inputs = vec![q.clone(), k.clone(), v.clone()];
            inputs.extend(padded.then(|| mask.clone()));
            inputs.extend(bias.cloned());
            let blocks = op.blocks(&q, &k, padded).unwrap().count();
            assert_eq!(blocks, 3);
            let kernel = PreparedOp::new(&Op::Attention(op), &device, DType::F32);
            let apart = |a: &Tensor, b: &Tensor| (a - b).unwrap().abs().unwrap().flatten_all().unwrap().max(0).unwrap().to_scalar::<f32>().unwrap();
            let output = op.eval(&inputs).unwrap();
            assert!(apart(&output, &kernel.forward(&inputs).unwrap()) < 1e-5, "{op:?}");
            if bias.is_some_and(|bias| bias.dims()[1..] == [1, sequence, 1]) {
                assert!(output.flatten_all().unwrap().to_vec1::<f32>().unwrap().iter().all(|value| value.is_finite()));
                let plain = Attention { zero_where_hidden: false, ..op };
                let kernel = PreparedOp::new(&Op::Attention(plain), &device, DType::F32);
                for answer in [plain.eval(&inputs).unwrap(), kernel.forward(&inputs).unwrap()] {
                    let values = answer.flatten_all().unwrap().to_vec1::<f32>().unwrap();
                    assert_eq!(values.iter().filter(|value| value.is_nan()).count(), heads * out);
                }
            }
            let saved: Vec<Saved> = inputs.iter().cloned().map(Saved::whole).collect();
            let wanted: Vec<bool> = inputs.iter().map(|input| input.rank() > 2).collect();
            let backward = Backward { inputs: &saved, output: &Saved::whole(output), gradient: &gradient, wanted: &wanted };
            let (ours, theirs) = (op.backward(&backward).unwrap(), kernel.backward(&backward).unwrap());
            for (a, b) in ours.iter().flatten().zip(theirs.iter().flatten()) {
                assert!(apart(a, &b.contiguous().unwrap()) < 2e-5, "{op:?}");
            }
            assert_eq!(ours.iter().flatten().count(), if bias.is_some() { 4 } else { 3 });
            assert!(bias.zip(ours.last().unwrap().as_ref()).is_none_or(|(bias, gradient)| bias.dims() == gradient.dims()), "{op:?}");
        }
    }

    #[test]
    fn order_needs_as_many_queries_as_keys() {
        let ty = |rows: usize| TensorType { element: Element::Float, shape: [1, 2, rows, 4].map(crate::ir::Dim::from).to_vec() };
        let infer = |causal: bool, keys: usize| Attention { causal, ..Attention::default() }.infer(&[&ty(6), &ty(keys), &ty(keys)]);
        assert!(infer(true, 6).is_ok() && infer(false, 5).is_ok());
        assert!(infer(true, 5).unwrap_err().contains("as many queries as keys"));
    }
}
