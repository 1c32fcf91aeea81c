//! Multi-head latent attention: keys and values are computed from a low-rank latent vector per token, and
//! all heads share one rotary key (DeepSeek-AI, *DeepSeek-V2*, 2024, <https://arxiv.org/abs/2405.04434>).

pub use super::layout::Latent;
use super::layout::{Decoder, Layer, LayerNames};
use super::parts::{rms_norm, slices};
use super::rope::{neighbors, pairs};
use crate::error::Result;
use crate::ir::ops::{Concat, RmsNorm, Rotary, Slice, SplitHeads};
use crate::ir::{Builder, ValueId};

/// Normalization of latent vectors, independent of the configuration.
const NORM: RmsNorm = RmsNorm { epsilon: 1e-6, offset: 0.0 };

impl Latent {
    /// Heads of queries, keys and values. The rotary part of queries and keys precedes the other part.
    pub fn heads(&self, decoder: &Decoder, b: &mut Builder, at: &LayerNames, layer: &Layer, x: ValueId) -> Result<[ValueId; 3]> {
        let q = self.queries(decoder, b, at, x)?;
        let mut parts = match self.interleaved {
            true => pairs(b, &at.node("self_attn.q"), q, self.nope, self.rope)?.to_vec(),
            false => vec![b.node(&at.node("self_attn.q_rope"), Slice::last_axis(self.nope, self.rope), &[q])?],
        };
        parts.push(b.node(&at.node("self_attn.q_plain"), Slice::last_axis(0, self.nope), &[q])?);
        let mut q = b.node(&at.node("self_attn.q"), Concat::default(), &parts)?;

        let all = decoder.linear(b, at, "self_attn.kv_a_proj_with_mqa", x, self.rank.saturating_add(self.rope), decoder.qkv_bias)?;
        let [latent, shared] = slices(b, ["latent", "shared_key"].map(|part| at.node(&format!("self_attn.{part}"))), all, [self.rank, self.rope])?;
        let latent = rms_norm(b, &at.node("self_attn.kv_a_layernorm"), &at.module("self_attn.kv_a_layernorm"), latent, NORM)?;
        let wide = self.nope.saturating_add(self.values);
        let kv = decoder.linear(b, at, "self_attn.kv_b_proj", latent, decoder.heads.saturating_mul(wide), false)?;
        let kv = b.node(&at.node("self_attn.kv_heads"), SplitHeads { head_dim: wide }, &[kv])?;
        let [k, v] = slices(b, ["k_plain", "v"].map(|part| at.node(&format!("self_attn.{part}"))), kv, [self.nope, self.values])?;
        let shared = b.node(&at.node("self_attn.shared_key_heads"), SplitHeads { head_dim: self.rope }, &[shared])?;
        let mut shared = if self.interleaved { neighbors(b, &at.node("self_attn.shared_key"), shared, None)? } else { shared };
        if let Some(rotary) = &layer.rotary {
            q = b.node(&at.node("self_attn.q_rotary"), Rotary { width: Some(self.rope), ..rotary.clone() }, &[q])?;
            shared = b.node(&at.node("self_attn.shared_key_rotary"), rotary.clone(), &[shared])?;
        }
        let shared = b.node(&at.node("self_attn.shared_keys"), Concat { axis: 1 }, &vec![shared; decoder.heads])?;
        let k = b.node(&at.node("self_attn.k"), Concat::default(), &[shared, k])?;
        Ok([q, k, v])
    }

    fn queries(&self, decoder: &Decoder, b: &mut Builder, at: &LayerNames, x: ValueId) -> Result<ValueId> {
        let wide = decoder.heads.saturating_mul(self.head_dim());
        let flat = match self.query_rank {
            None => decoder.linear(b, at, "self_attn.q_proj", x, wide, false)?,
            Some(rank) => {
                let low = decoder.linear(b, at, "self_attn.q_a_proj", x, rank, decoder.qkv_bias)?;
                let low = rms_norm(b, &at.node("self_attn.q_a_layernorm"), &at.module("self_attn.q_a_layernorm"), low, NORM)?;
                decoder.linear(b, at, "self_attn.q_b_proj", low, wide, false)?
            }
        };
        b.node(&at.node("self_attn.q_heads"), SplitHeads { head_dim: self.head_dim() }, &[flat])
    }
}
