//! Scaled dot-product attention.

use std::ops::Range;

use candle_core::{DType, Device, Tensor};
use serde::{Deserialize, Serialize};

use super::host::{Host, heads};
use super::softmax::softmax;
use super::{Mode, OpSpec, elements, require, require_arity, require_rank};
use crate::ir::{Bindings, Element, TensorType};
use crate::kernel::attention;

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

impl Attention {
    /// What is added to the products: 0 where a query may look, and the smallest number elsewhere.
    fn bias(&self, mask: Option<&Tensor>, sequence: usize, keys: usize, dtype: DType, device: &Device) -> candle_core::Result<Option<Tensor>> {
        let lowest = if dtype == DType::F16 { -65504f32 } else { f32::MIN };
        let order = if self.causal {
            let hidden = |query: usize, key: usize| key > query || self.window.is_some_and(|w| query - key >= w);
            let values: Vec<f32> = (0..sequence).flat_map(|q| (0..keys).map(move |k| if hidden(q, k) { lowest } else { 0.0 })).collect();
            Some(Tensor::from_vec(values, (1, 1, 1, sequence, keys), device)?)
        } else {
            None
        };
        let padding = match mask {
            Some(mask) => {
                let hidden = mask.eq(0i64)?.to_dtype(DType::F32)?;
                Some((hidden * f64::from(lowest))?.reshape((mask.dim(0)?, 1, 1, 1, keys))?)
            }
            None => None,
        };
        let bias = match (order, padding) {
            (Some(a), Some(b)) => Some(a.broadcast_minimum(&b)?),
            (a, b) => a.or(b),
        };
        bias.map(|b| b.to_dtype(dtype)).transpose()
    }
}

impl Attention {
    fn fast(&self, [q, k, v]: [&Tensor; 3], mask: Option<&Tensor>) -> candle_core::Result<Option<Tensor>> {
        let (batch, heads_count, sequence, width) = q.dims4()?;
        let (_, groups, keys, out) = v.dims4()?;
        let padding = match mask {
            Some(mask) if matches!(q.device(), Device::Cpu) => Some(mask.flatten_all()?.to_vec1::<i64>()?.into_iter().map(|m| m == 0).collect::<Vec<_>>()),
            _ => None,
        };
        let compute = || {
            let hosts = [Host::of(q)?, Host::of(k)?, Host::of(v)?];
            let shape = attention::Attention {
                heads: heads_count,
                groups,
                sequence,
                keys,
                width,
                out,
                scale: self.scale as f32,
                causal: self.causal,
                window: self.window,
                padding: padding.as_deref().filter(|p| p.contains(&true)),
            };
            let mut y = vec![0.0; batch * heads_count * sequence * out];
            shape.run(heads(&hosts[0])?, heads(&hosts[1])?, heads(&hosts[2])?, &mut y);
            Some(y)
        };
        compute().map(|values| Tensor::from_vec(values, (batch, heads_count, sequence, out), q.device())).transpose()
    }
}

impl OpSpec for Attention {
    fn arity(&self) -> Range<usize> {
        3..5
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<TensorType, String> {
        require_arity(self, inputs)?;
        let [q, k, v] = [inputs[0], inputs[1], inputs[2]];
        for (ty, what) in [(q, "the queries"), (k, "the keys"), (v, "the values")] {
            require(ty, Element::Float, what)?;
            require_rank(ty, 4, what)?;
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

    fn eval(&self, inputs: &[Tensor], mode: Mode) -> candle_core::Result<Tensor> {
        let (q, k, v) = (&inputs[0], &inputs[1], &inputs[2]);
        if mode == Mode::Infer
            && let Some(y) = self.fast([q, k, v], inputs.get(3))?
        {
            return Ok(y);
        }
        let (batch, heads, sequence, width) = q.dims4()?;
        let (_, groups, keys, out) = v.dims4()?;
        let shared = heads / groups;
        let q = (q * self.scale)?.reshape((batch, groups, shared * sequence, width))?;
        let scores = q.matmul(&k.contiguous()?.transpose(2, 3)?)?;
        let scores = match self.bias(inputs.get(3), sequence, keys, scores.dtype(), scores.device())? {
            Some(bias) => scores.reshape((batch, groups, shared, sequence, keys))?.broadcast_add(&bias)?.reshape((batch, groups, shared * sequence, keys))?,
            None => scores,
        };
        softmax(&scores, mode)?.matmul(&v.contiguous()?)?.reshape((batch, heads, sequence, out))
    }

    fn macs(&self, inputs: &[&TensorType], output: &TensorType, bindings: &Bindings) -> u64 {
        let keys = inputs[1].shape[2].evaluate(bindings).unwrap_or(0) as u64;
        (elements(inputs[0], bindings) + elements(output, bindings)) * keys
    }
}
