//! Scaled dot-product attention.

use std::ops::Range;

use candle_core::{DType, Device, Result as Computed, Tensor};
use serde::{Deserialize, Serialize};

use super::constants::constant;
use super::gradient::wide;
use super::softmax::{back, softmax};
use super::{Backward, OpSpec, Saved, elements, require, require_floats};
use crate::ir::{Bindings, Element, TensorType};

/// `softmax(scale · q kᵀ + mask) v` for each head (Vaswani et al., 2017).
///
/// Inputs: q `[batch, heads, sequence, d]`, k `[batch, groups, keys, d]`, v `[batch, groups, keys, e]`, and
/// optionally a mask `[batch, keys]` of whole numbers, zero for keys that are padding. Query head `i` reads
/// key head `i / (heads / groups)`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Attention {
    /// Factor on the products, usually `1 / sqrt(d)`.
    pub scale: f64,
    /// Whether a query sees only keys at its own position and before.
    pub causal: bool,
    /// How many keys a query sees at most, its own included, when causal.
    pub window: Option<usize>,
}

impl Default for Attention {
    fn default() -> Self {
        Self { scale: 1.0, causal: false, window: None }
    }
}

/// Stands for products with keys that a query may not see. A query that sees none at all looks at all keys alike.
const HIDDEN: f32 = f32::MIN;

impl Attention {
    /// 0 where a query may look as far as order goes, `[sequence, keys]`, else [`HIDDEN`].
    fn order(&self, sequence: usize, keys: usize, device: &Device) -> Computed<Tensor> {
        let window = self.window;
        constant(format!("order {window:?} {sequence} {keys}"), device, |device| {
            let hidden = |query: usize, key: usize| key > query || window.is_some_and(|w| query - key >= w);
            let values: Vec<f32> = (0..sequence).flat_map(|q| (0..keys).map(move |k| if hidden(q, k) { HIDDEN } else { 0.0 })).collect();
            Tensor::from_vec(values, (sequence, keys), device)
        })
    }

    /// What is added to products `[batch, groups, shared, sequence, keys]`, in 32 bits: half as many hold no number that is low enough.
    fn bias(&self, mask: Option<&Tensor>, sequence: usize, keys: usize, device: &Device) -> Computed<Option<Tensor>> {
        let order = if self.causal { Some(self.order(sequence, keys, device)?.reshape((1, 1, 1, sequence, keys))?) } else { None };
        let padding = match mask {
            Some(mask) => Some((mask.eq(0i64)?.to_dtype(DType::F32)? * f64::from(HIDDEN))?.reshape((mask.dim(0)?, 1, 1, 1, keys))?),
            None => None,
        };
        Ok(match (order, padding) {
            (Some(a), Some(b)) => Some(a.broadcast_minimum(&b)?),
            (a, b) => a.or(b),
        })
    }

    /// The queries of each key head one below the other, scaled, and how strongly they look at keys, in 32 bits at least.
    fn probabilities(&self, q: &Tensor, k: &Tensor, mask: Option<&Tensor>, softmax: fn(&Tensor) -> Computed<Tensor>) -> Computed<(Tensor, Tensor)> {
        let (batch, heads, sequence, width) = q.dims4()?;
        let (_, groups, keys, _) = k.dims4()?;
        let shared = heads / groups;
        let q = (q * self.scale)?.reshape((batch, groups, shared * sequence, width))?;
        let scores = wide(&q.matmul(&k.contiguous()?.transpose(2, 3)?)?)?;
        let scores = match self.bias(mask, sequence, keys, scores.device())? {
            Some(bias) => {
                let scores = scores.reshape((batch, groups, shared, sequence, keys))?.broadcast_add(&bias.to_dtype(scores.dtype())?)?;
                scores.reshape((batch, groups, shared * sequence, keys))?
            }
            None => scores,
        };
        Ok((q, softmax(&scores)?))
    }

    /// The output, with this way to make a softmax over the last axis.
    pub(super) fn attend(&self, inputs: &[Tensor], softmax: fn(&Tensor) -> Computed<Tensor>) -> Computed<Tensor> {
        let (q, k, v) = (&inputs[0], &inputs[1], &inputs[2]);
        let (batch, heads, sequence, _) = q.dims4()?;
        let (_, probabilities) = self.probabilities(q, k, inputs.get(3), softmax)?;
        probabilities.to_dtype(v.dtype())?.matmul(&v.contiguous()?)?.reshape((batch, heads, sequence, v.dim(3)?))
    }
}

impl OpSpec for Attention {
    fn arity(&self) -> Range<usize> {
        3..5
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
        if let Some(mask) = inputs.get(3) {
            require(mask, Element::Int, "the mask")?;
            if mask.shape != [k.shape[0].clone(), k.shape[2].clone()] {
                return Err("the mask must be [batch, keys]".into());
            }
        }
        let mut shape = q.shape.clone();
        shape[3] = v.shape[3].clone();
        Ok(TensorType { element: Element::Float, shape })
    }

    fn axes(&self, inputs: usize) -> String {
        format!("b (g r) s! d, b g t! d, b g t! e{} -> b (g r) s! e", if inputs > 3 { ", b t!" } else { "" })
    }

    fn eval(&self, inputs: &[Tensor]) -> Computed<Tensor> {
        self.attend(inputs, softmax)
    }

    fn backward(&self, backward: &Backward) -> Computed<Vec<Option<Tensor>>> {
        let [q, k, v] = [backward.inputs[0].tensor()?, backward.inputs[1].tensor()?, backward.inputs[2].tensor()?];
        let mask = backward.inputs.get(3).map(Saved::tensor).transpose()?;
        let (batch, groups, _, out) = v.dims4()?;
        let (scaled, probabilities) = self.probabilities(q, k, mask, softmax)?;
        let gradient = backward.gradient.reshape((batch, groups, (), out))?;
        let of_values = backward.of(2, || probabilities.to_dtype(v.dtype())?.transpose(2, 3)?.contiguous()?.matmul(&gradient))?;
        let mut gradients = vec![None, None, of_values];
        if backward.wants(0) || backward.wants(1) {
            let of_scores = back(&probabilities, &wide(&gradient.matmul(&v.contiguous()?.transpose(2, 3)?)?)?)?.to_dtype(q.dtype())?;
            gradients[0] = backward.of(0, || (of_scores.matmul(&k.contiguous()?)? * self.scale)?.reshape(q.dims()))?;
            gradients[1] = backward.of(1, || of_scores.transpose(2, 3)?.contiguous()?.matmul(&scaled))?;
        }
        gradients.resize(backward.inputs.len(), None);
        Ok(gradients)
    }

    fn macs(&self, inputs: &[&TensorType], output: &TensorType, bindings: &Bindings) -> u64 {
        let keys = inputs[1].shape[2].evaluate(bindings).unwrap_or(0) as u64;
        elements(inputs[0], bindings).saturating_add(elements(output, bindings)).saturating_mul(keys)
    }
}
