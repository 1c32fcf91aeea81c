//! Scaled dot-product attention.

use std::ops::Range;

use candle_core::{DType, Device, Tensor};
use serde::{Deserialize, Serialize};

use super::gradient::{is_half, wide};
use super::host::{Host, heads, readable};
use super::softmax::{back, softmax};
use super::{Backward, Mode, OpSpec, Saved, elements, require, require_floats};
use crate::ir::{Bindings, Element, TensorType};
use crate::kernel::attention;
use crate::kernel::attention_gradient::Given;

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
        let (batch, heads_count, sequence, _) = q.dims4()?;
        let out = v.dim(3)?;
        let padding = padding(q, mask)?;
        let compute = || {
            let hosts = [Host::of(q)?, Host::of(k)?, Host::of(v)?];
            let shape = self.sizes([q, k, v], padding.as_deref())?;
            let mut y = vec![0.0; batch * heads_count * sequence * out];
            shape.run(heads(&hosts[0])?, heads(&hosts[1])?, heads(&hosts[2])?, &mut y);
            Some(y)
        };
        compute().map(|values| Tensor::from_vec(values, (batch, heads_count, sequence, out), q.device())).transpose()
    }

    /// As the kernels are told.
    fn sizes<'p>(&self, [q, _, v]: [&Tensor; 3], padding: Option<&'p [bool]>) -> Option<attention::Attention<'p>> {
        let (_, heads, sequence, width) = q.dims4().ok()?;
        let (_, groups, keys, out) = v.dims4().ok()?;
        Some(attention::Attention {
            heads,
            groups,
            sequence,
            keys,
            width,
            out,
            scale: self.scale as f32,
            causal: self.causal,
            window: self.window,
            padding: padding.filter(|p| p.contains(&true)),
        })
    }

    /// Gradients of queries, keys and values by the kernels.
    fn fast_back(&self, backward: &Backward, tensors: [&Tensor; 3], mask: Option<&Tensor>) -> candle_core::Result<Option<Vec<Option<Tensor>>>> {
        let [q, k, v] = tensors;
        if !readable([q, k, v, backward.gradient]) {
            return Ok(None);
        }
        // Rows of a head must be runs in memory.
        let in_rows = |t: &Tensor| if t.stride()[3] == 1 { Ok(t.clone()) } else { t.contiguous() };
        let (q, k, v, gradient) = (in_rows(q)?, in_rows(k)?, in_rows(v)?, in_rows(backward.gradient)?);
        let padding = padding(&q, mask)?;
        let compute = || {
            let hosts = [Host::of(&q)?, Host::of(&k)?, Host::of(&v)?, Host::of(&gradient)?];
            let given = Given { queries: heads(&hosts[0])?, keys: heads(&hosts[1])?, values: heads(&hosts[2])?, gradient: heads(&hosts[3])? };
            let mut found = [&q, &k, &v].into_iter().enumerate().map(|(input, t)| vec![0.0; if backward.wants(input) { t.elem_count() } else { 0 }]);
            let mut found: [Vec<f32>; 3] = [found.next()?, found.next()?, found.next()?];
            self.sizes([&q, &k, &v], padding.as_deref())?.gradients(given, found.each_mut().map(Vec::as_mut_slice), q.dim(0).ok()?);
            Some(found)
        };
        let Some(found) = compute() else { return Ok(None) };
        let mut gradients = Vec::new();
        for ((input, values), like) in found.into_iter().enumerate().zip([&q, &k, &v]) {
            // Heads of one row are neighbours, as where they were split.
            let (batch, heads, rows, width) = like.dims4()?;
            gradients.push(backward.of(input, || Tensor::from_vec(values, (batch, rows, heads, width), like.device())?.transpose(1, 2))?);
        }
        Ok(Some(gradients))
    }

    /// The queries of each key head one below the other, scaled, and how strongly they look at keys, in 32 bits at least.
    fn probabilities(&self, q: &Tensor, k: &Tensor, mask: Option<&Tensor>, mode: Mode) -> candle_core::Result<(Tensor, Tensor)> {
        let (batch, heads, sequence, width) = q.dims4()?;
        let (_, groups, keys, _) = k.dims4()?;
        let shared = heads / groups;
        let q = (q * self.scale)?.reshape((batch, groups, shared * sequence, width))?;
        let scores = q.matmul(&k.contiguous()?.transpose(2, 3)?)?;
        let scores = if is_half(&scores) && (mode == Mode::Train || matches!(scores.device(), Device::Cpu)) { wide(&scores)? } else { scores };
        let scores = match self.bias(mask, sequence, keys, scores.dtype(), scores.device())? {
            Some(bias) => scores.reshape((batch, groups, shared, sequence, keys))?.broadcast_add(&bias)?.reshape((batch, groups, shared * sequence, keys))?,
            None => scores,
        };
        Ok((q, softmax(&scores, mode)?))
    }
}

/// For each key whether it is padding, where the kernels will read it.
fn padding(q: &Tensor, mask: Option<&Tensor>) -> candle_core::Result<Option<Vec<bool>>> {
    match mask {
        Some(mask) if matches!(q.device(), Device::Cpu) => Ok(Some(mask.flatten_all()?.to_vec1::<i64>()?.into_iter().map(|m| m == 0).collect())),
        _ => Ok(None),
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

    fn eval(&self, inputs: &[Tensor], mode: Mode) -> candle_core::Result<Tensor> {
        let (q, k, v) = (&inputs[0], &inputs[1], &inputs[2]);
        if mode == Mode::Infer
            && let Some(y) = self.fast([q, k, v], inputs.get(3))?
        {
            return Ok(y);
        }
        let (batch, heads, sequence, _) = q.dims4()?;
        let (_, probabilities) = self.probabilities(q, k, inputs.get(3), mode)?;
        probabilities.to_dtype(v.dtype())?.matmul(&v.contiguous()?)?.reshape((batch, heads, sequence, v.dim(3)?))
    }

    fn backward(&self, backward: &Backward) -> candle_core::Result<Vec<Option<Tensor>>> {
        let [q, k, v] = [backward.inputs[0].tensor()?, backward.inputs[1].tensor()?, backward.inputs[2].tensor()?];
        let mask = backward.inputs.get(3).map(Saved::tensor).transpose()?;
        let mut gradients = match self.fast_back(backward, [q, k, v], mask)? {
            Some(gradients) => gradients,
            None => {
                let (batch, groups, _, out) = v.dims4()?;
                let (scaled, probabilities) = self.probabilities(q, k, mask, Mode::Train)?;
                let gradient = backward.gradient.reshape((batch, groups, (), out))?;
                let of_values = backward.of(2, || probabilities.to_dtype(v.dtype())?.transpose(2, 3)?.contiguous()?.matmul(&gradient))?;
                let derivatives = if backward.wants(0) || backward.wants(1) {
                    Some(back(&probabilities, &wide(&gradient.matmul(&v.contiguous()?.transpose(2, 3)?)?)?)?.to_dtype(q.dtype())?)
                } else {
                    None
                };
                let of = |input: usize, product: &dyn Fn(&Tensor) -> candle_core::Result<Tensor>| {
                    derivatives.as_ref().and_then(|s| backward.of(input, || product(s)).transpose()).transpose()
                };
                let of_queries = of(0, &|derivatives| (derivatives.matmul(&k.contiguous()?)? * self.scale)?.reshape(q.dims()))?;
                let of_keys = of(1, &|derivatives| derivatives.transpose(2, 3)?.contiguous()?.matmul(&scaled))?;
                vec![of_queries, of_keys, of_values]
            }
        };
        gradients.resize(backward.inputs.len(), None);
        Ok(gradients)
    }

    fn macs(&self, inputs: &[&TensorType], output: &TensorType, bindings: &Bindings) -> u64 {
        let keys = inputs[1].shape[2].evaluate(bindings).unwrap_or(0) as u64;
        elements(inputs[0], bindings).saturating_add(elements(output, bindings)).saturating_mul(keys)
    }
}
