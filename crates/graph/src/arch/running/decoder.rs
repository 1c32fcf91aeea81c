//! Decoders like Llama: rotary position embeddings, RMS normalization and gated feed-forward networks.
//!
//! A family specifies its differences from Llama in fields of [`Decoder`].

use super::layout::PARTS;
pub use super::layout::{Decoder, HeadNorms, Layer, LayerNames, NORMS_BEFORE, Norm, Norms, TokenMixer};
use super::parts::{language_head, slices, text_inputs};
use super::rope::{RopeDefaults, neighbors, rotary};
use super::{Settings, indivisible, unknown_layer_type};
use crate::arch::family::PREFIXES;
use crate::error::{Error, Result};
use crate::ir::ops::{Add, Attention, ChunkBias, Embedding, Linear, MergeHeads, Mul, Normalize, RmsNorm, Scale, Sigmoid, SplitHeads, Tanh};
use crate::ir::{Builder, ValueId};

const HEAD: &str = "lm_head.weight";
/// The output head in published files with the second prefix.
const INNER_HEAD: &str = "language_model.lm_head.weight";

impl<'s, 'c> Decoder<'s, 'c> {
    /// A Llama with this configuration. The default width of heads is `head_dim`, or else the width of
    /// the residual stream divided by their number.
    pub fn new(s: &'s Settings<'c>, head_dim: Option<usize>) -> Result<Decoder<'s, 'c>> {
        Self::with_epsilon(s, head_dim, 1e-6)
    }

    /// As [`new`](Self::new), with another default epsilon of normalizations.
    pub fn with_epsilon(s: &'s Settings<'c>, head_dim: Option<usize>, epsilon: f64) -> Result<Decoder<'s, 'c>> {
        let norm = RmsNorm { epsilon: s.number_or("rms_norm_eps", epsilon)?, ..RmsNorm::default() };
        Self::with_norm(s, head_dim, None, Norm::Rms(norm))
    }

    /// As [`new`](Self::new), with a default number of key-value heads, if it is not that of query heads,
    /// and these normalizations.
    pub fn with_norm(s: &'s Settings<'c>, head_dim: Option<usize>, groups: Option<usize>, norm: Norm) -> Result<Decoder<'s, 'c>> {
        const GROUPS: &str = "num_key_value_heads";
        let heads = s.size("num_attention_heads")?;
        let groups = s.size_or(GROUPS, groups.filter(|_| !s.is_null(GROUPS)).unwrap_or(heads))?;
        if !heads.is_multiple_of(groups) {
            return Err(indivisible(("num_attention_heads", heads), (GROUPS, groups)));
        }
        let head_dim = match (s.get("head_dim"), head_dim) {
            (Some(_), _) => s.size("head_dim")?,
            (None, Some(width)) => width,
            (None, None) => s.head_dim("hidden_size", "num_attention_heads")?,
        };
        let bias = s.flag_or("attention_bias", false)?;
        Ok(Decoder {
            s,
            heads,
            groups,
            head_dim,
            scale: 1.0 / (head_dim as f64).sqrt(),
            soft_cap: None,
            sinks: false,
            causal: s.flag_or("is_causal", true)?,
            norm,
            norms: NORMS_BEFORE,
            last_norm: "norm",
            parallel: false,
            head_norms: HeadNorms::None,
            head_norm_names: ["q_norm", "k_norm"],
            interleaved: false,
            fused_qkv: false,
            fused_gate: None,
            qkv_bias: bias,
            query_gate: false,
            out: "o_proj",
            out_bias: bias,
            mixer: None,
            network: "mlp",
            parts: PARTS,
            neurons: None,
            ungated: None,
            mlp_bias: s.flag_or("mlp_bias", false)?,
            activation: s.text_or("hidden_act", "silu")?,
            embedding_scale: None,
            residual_scale: None,
            head_bias: false,
            logit_scale: None,
            logit_cap: None,
            experts: None,
            latent: None,
        })
    }

    /// Adds inputs, nodes and outputs; `layer` returns the properties of the layer with an index.
    pub fn build(&self, b: &mut Builder, layer: impl Fn(usize) -> Result<Layer>) -> Result<()> {
        let s = self.s;
        let prefix = prefix(b);
        let (tokens, mask) = text_inputs(b)?;
        let table = b.param(&format!("{prefix}embed_tokens.weight"), &[s.size("vocab_size")?, s.size("hidden_size")?])?;
        let mut x = b.node("embed_tokens", Embedding {}, &[tokens, table])?;
        x = scaled(b, "embeddings", self.embedding_scale, x)?;
        for index in 0..s.size("num_hidden_layers")? {
            x = self.layer(b, &LayerNames::new(prefix, index), layer(index)?, x, mask)?;
        }
        let x = self.norm.add(b, self.last_norm, &format!("{prefix}{}", self.last_norm), x)?;
        b.output("last_hidden_state", x);
        let head = if prefix == PREFIXES[1] && b.stores(INNER_HEAD) { INNER_HEAD } else { HEAD };
        // transformers loads a model with a vision tower with its head, whatever its class.
        if s.class().ends_with("ForCausalLM") || s.is_inside() || b.has(head) {
            let weight = language_head(s, b, head, table)?;
            let mut inputs = vec![x, weight];
            if self.head_bias {
                inputs.push(b.param("lm_head.bias", &[s.size("vocab_size")?])?);
            }
            let mut logits = b.node("lm_head", Linear { input_major: false }, &inputs)?;
            logits = scaled(b, "lm_head.scaled", self.logit_scale, logits)?;
            if let Some(cap) = self.logit_cap {
                let part = b.node("lm_head.part", Scale { factor: 1.0 / cap }, &[logits])?;
                let held = b.node("lm_head.held", Tanh {}, &[part])?;
                logits = b.node("lm_head.capped", Scale { factor: cap }, &[held])?;
            }
            b.output("logits", logits);
        }
        Ok(())
    }

    fn layer(&self, b: &mut Builder, at: &LayerNames, layer: Layer, x: ValueId, mask: ValueId) -> Result<ValueId> {
        let [before_attention, after_attention, before_network, after_network] = self.norms;
        let normed = self.normed(b, at, before_attention, x)?;
        let mixed = self.mixer.map_or(Ok(None), |mixer| mixer.add(self, b, at, normed, mask))?;
        let y = mixed.map_or_else(|| self.attention(b, at, layer, normed, mask), Ok)?;
        let y = self.normed(b, at, after_attention, y)?;
        let y = scaled(b, &at.node("self_attn.scaled"), self.residual_scale, y)?;
        let x = b.node(&at.node("attended"), Add {}, &[x, y])?;
        let y = if self.parallel { normed } else { self.normed(b, at, before_network, x)? };
        let y = self.network(b, at, y)?;
        let y = self.normed(b, at, after_network, y)?;
        let y = scaled(b, &at.node("mlp.scaled"), self.residual_scale, y)?;
        b.node(&at.node, Add {}, &[x, y])
    }

    fn normed(&self, b: &mut Builder, at: &LayerNames, name: Option<&str>, x: ValueId) -> Result<ValueId> {
        name.map_or(Ok(x), |name| self.norm.add(b, &at.node(name), &at.module(name), x))
    }

    fn attention(&self, b: &mut Builder, at: &LayerNames, layer: Layer, x: ValueId, mask: ValueId) -> Result<ValueId> {
        let ([q, k, v], gate) = match &self.latent {
            Some(latent) => (latent.heads(self, b, at, &layer, x)?, None),
            None => self.split(b, at, &layer, x)?,
        };
        // Keys of a chunk are less than its size away.
        let window = layer.window.or(layer.chunk);
        let attention = Attention { scale: self.scale, causal: self.causal, window, soft_cap: self.soft_cap, ..Attention::default() };
        let mut inputs = vec![q, k, v, mask];
        if let Some(size) = layer.chunk {
            inputs.push(b.node(&at.node("self_attn.chunks"), ChunkBias { size }, &[mask])?);
        }
        if self.sinks {
            inputs.push(b.param(&at.module("self_attn.sinks"), &[self.heads])?);
        }
        let context = b.node(&at.node("self_attn.context_heads"), attention, &inputs)?;
        let mut context = b.node(&at.node("self_attn.context"), MergeHeads {}, &[context])?;
        if let Some(gate) = gate {
            let gate = b.node(&at.node("self_attn.gate"), MergeHeads {}, &[gate])?;
            let gate = b.node(&at.node("self_attn.gate.sigmoid"), Sigmoid {}, &[gate])?;
            context = b.node(&at.node("self_attn.gated"), Mul {}, &[context, gate])?;
        }
        self.linear(b, at, &format!("self_attn.{}", self.out), context, self.s.size("hidden_size")?, self.out_bias)
    }

    /// Heads of queries, keys and values, `[batch, heads, sequence, head_dim]`, with rotary embedding, and of
    /// the gate, if there is one.
    pub fn split(&self, b: &mut Builder, at: &LayerNames, layer: &Layer, x: ValueId) -> Result<([ValueId; 3], Option<ValueId>)> {
        let (mut heads, mut gate) = (self.projections(b, at, x)?, None);
        let norms = self.head_norm_names.map(Some).into_iter().chain([None]);
        for ((part, norm), value) in ["q", "k", "v"].into_iter().zip(norms).zip(&mut heads) {
            let name = format!("self_attn.{part}");
            let norm = |b: &mut Builder, over: HeadNorms, value: ValueId| {
                let norm = norm.filter(|_| self.head_norms == over).map(|norm| format!("self_attn.{norm}"));
                norm.map_or(Ok(value), |norm| self.norm.add(b, &at.node(&norm), &at.module(&norm), value))
            };
            let flat = norm(b, HeadNorms::Projection, *value)?;
            let is_gated = self.query_gate && part == "q";
            let head_dim = if is_gated { self.head_dim.saturating_mul(2) } else { self.head_dim };
            let mut split = b.node(&at.node(&format!("{name}_heads")), SplitHeads { head_dim }, &[flat])?;
            if is_gated {
                let nodes = ["q_of_heads", "gate_of_heads"].map(|part| at.node(&format!("self_attn.{part}")));
                let [query, own] = slices(b, nodes, split, [self.head_dim; 2])?;
                (split, gate) = (query, Some(own));
            }
            *value = norm(b, HeadNorms::Head, split)?;
            if let Some(rotary) = layer.rotary.as_ref().filter(|_| part != "v") {
                if self.interleaved {
                    *value = neighbors(b, &at.node(&name), *value, rotary.width)?;
                }
                *value = b.node(&at.node(&format!("{name}_rotary")), rotary.clone(), &[*value])?;
            }
            *value = norm(b, HeadNorms::AfterRotary, *value)?;
            if let Some(epsilon) = layer.unit_norm.filter(|_| part != "v") {
                let width = self.head_dim as f64;
                let unit = b.node(&at.node(&format!("{name}_unit")), Normalize { epsilon: epsilon * width }, &[*value])?;
                *value = b.node(&at.node(&format!("{name}_normed")), Scale { factor: width.sqrt() }, &[unit])?;
            }
            if let Some(scale) = layer.query_scale.filter(|_| part == "q") {
                *value = b.node(&at.node(&format!("{name}_scaled")), scale, &[*value])?;
            }
        }
        Ok((heads, gate))
    }

    /// Queries, keys and values, `[batch, sequence, heads · head_dim]`.
    fn projections(&self, b: &mut Builder, at: &LayerNames, x: ValueId) -> Result<[ValueId; 3]> {
        let widths = [self.heads, self.groups, self.groups].map(|count| count.saturating_mul(self.head_dim));
        if self.fused_qkv {
            let all = self.linear(b, at, "self_attn.qkv_proj", x, widths.into_iter().fold(0, usize::saturating_add), self.qkv_bias)?;
            return slices(b, ["q", "k", "v"].map(|part| at.node(&format!("self_attn.{part}"))), all, widths);
        }
        let [q, k, v] = widths;
        let q = if self.query_gate { q.saturating_mul(2) } else { q };
        Ok([
            self.linear(b, at, "self_attn.q_proj", x, q, self.qkv_bias)?,
            self.linear(b, at, "self_attn.k_proj", x, k, self.qkv_bias)?,
            self.linear(b, at, "self_attn.v_proj", x, v, self.qkv_bias)?,
        ])
    }

    fn network(&self, b: &mut Builder, at: &LayerNames, x: ValueId) -> Result<ValueId> {
        match self.experts.as_ref().filter(|experts| experts.are_in_layer(at.index)) {
            Some(experts) => experts.build(self, b, at, x),
            None => self.dense(b, at, x),
        }
    }
}

/// The prefix of the names of weights.
pub fn prefix(b: &Builder) -> &'static str {
    let within = PREFIXES.into_iter().find(|prefix| b.stores(&format!("{prefix}embed_tokens.weight")));
    within.unwrap_or_else(|| if b.has("model.embed_tokens.weight") { "model." } else { "" })
}

/// `x` times a factor, if there is one other than 1.
fn scaled(b: &mut Builder, node: &str, factor: Option<f64>, x: ValueId) -> Result<ValueId> {
    factor.filter(|factor| *factor != 1.0).map_or(Ok(x), |factor| b.node(node, Scale { factor }, &[x]))
}

/// Layers with the same rotary embedding, and a sliding window where `slides` returns true.
pub fn every_layer(s: &Settings, head_dim: usize, rope: RopeDefaults, slides: impl Fn(usize) -> Result<bool>) -> Result<impl Fn(usize) -> Result<Layer>> {
    let rotary = rotary(s, head_dim, rope)?;
    Ok(move |index| Ok(Layer { rotary: Some(rotary.clone()), window: window(s, slides(index)?)?, ..Layer::default() }))
}

/// The sliding window of a layer, if `slides` is true.
pub fn window(s: &Settings, slides: bool) -> Result<Option<usize>> {
    if !slides || s.is_null("sliding_window") {
        return Ok(None);
    }
    if !s.flag_or("is_causal", true)? {
        return Err(Error::Unsupported {
            what: "config.json: `is_causal` of false with a `sliding_window`".into(),
            hint: "sliding windows are supported only with causal attention".into(),
        });
    }
    s.size_or("sliding_window", 4096).map(Some)
}

/// As [`window`], but a layer that requires a sliding window must have one.
pub fn required_window(s: &Settings, slides: bool) -> Result<Option<usize>> {
    if slides && s.is_null("sliding_window") {
        return Err(Error::graph("config.json", "`sliding_window` is null, but layers require one"));
    }
    window(s, slides)
}

/// Whether a layer has a sliding window: by its type, or all except every `pattern`-th.
pub fn is_local(s: &Settings, layer: usize, pattern: usize) -> Result<bool> {
    let by_type = slides(s, layer, true)?;
    Ok(by_type.unwrap_or_else(|| layer.checked_add(1).is_none_or(|number| !number.is_multiple_of(pattern))))
}

/// Whether a layer has a sliding window according to `layer_types`; `None` without that key. Sliding
/// windows are an error unless they are `allowed`.
pub fn slides(s: &Settings, layer: usize, allowed: bool) -> Result<Option<bool>> {
    match s.get("layer_types").map(|types| types.get(layer).and_then(serde_json::Value::as_str)) {
        None => Ok(None),
        Some(Some("sliding_attention")) if allowed => Ok(Some(true)),
        Some(Some("full_attention")) => Ok(Some(false)),
        Some(other) => Err(unknown_layer_type("layer_types", layer, other, "full_attention, or sliding_attention with `use_sliding_window`")),
    }
}
