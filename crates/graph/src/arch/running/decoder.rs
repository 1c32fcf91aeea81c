//! Decoders like Llama: rotary position embeddings, RMS normalization and gated feed-forward networks.
//!
//! A family specifies its differences from Llama in fields of [`Decoder`].

use super::Settings;
use super::experts::Experts;
use super::latent::Latent;
use super::parts::{activate, language_head, linear_with, rms_norm, slices, text_inputs};
use super::rope::{RopeDefaults, rotary};
use crate::error::{Error, Result};
use crate::ir::ops::{Add, Attention, Embedding, Linear, MergeHeads, Mul, RmsNorm, Rotary, Scale, SplitHeads, Tanh};
use crate::ir::{Builder, ValueId};

/// Names of the normalizations of a layer: before and after attention, before and after the feed-forward
/// network.
pub type Norms = [Option<&'static str>; 4];

/// Pre-norm, as most families have it.
pub const NORMS_BEFORE: Norms = [Some("input_layernorm"), None, Some("post_attention_layernorm"), None];

/// Names of the gate, up and down projections of most families.
pub const PARTS: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];

/// Normalization of queries and keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeadNorms {
    /// No normalization.
    None,
    /// Over each head.
    Head,
    /// Over all heads.
    Projection,
}

/// Properties of one layer.
pub struct Layer {
    /// Rotary embedding of queries and keys; `None` for layers without positions.
    pub rotary: Option<Rotary>,
    /// Sliding window: the maximum number of keys that a query attends to.
    pub window: Option<usize>,
}

/// A model, described by its differences from Llama.
pub struct Decoder<'s, 'c> {
    /// The configuration.
    pub s: &'s Settings<'c>,
    /// Number of query heads.
    pub heads: usize,
    /// Number of key-value heads.
    pub groups: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Factor on attention scores.
    pub scale: f64,
    /// Soft cap on attention scores.
    pub soft_cap: Option<f64>,
    /// Whether attention is causal.
    pub causal: bool,
    /// Parameters of all normalizations.
    pub norm: RmsNorm,
    /// Positions of the normalizations.
    pub norms: Norms,
    /// Normalization of queries and keys.
    pub head_norms: HeadNorms,
    /// Whether queries, keys and values are one projection, and gate and up another.
    pub fused: bool,
    /// Whether the projections of queries, keys and values have biases.
    pub qkv_bias: bool,
    /// Whether the output projection of attention has a bias.
    pub out_bias: bool,
    /// Whether the projections of the feed-forward network have biases.
    pub mlp_bias: bool,
    /// Activation function of the gate.
    pub activation: &'c str,
    /// Factor on embeddings.
    pub embedding_scale: Option<f64>,
    /// Soft cap on logits.
    pub logit_cap: Option<f64>,
    /// Experts, for families with mixtures of experts.
    pub experts: Option<Experts>,
    /// Latent attention, for families with low-rank keys and values.
    pub latent: Option<Latent>,
}

impl<'s, 'c> Decoder<'s, 'c> {
    /// A Llama with this configuration. The default width of heads is `head_dim`, or else the width of
    /// the residual stream divided by their number.
    pub fn new(s: &'s Settings<'c>, head_dim: Option<usize>) -> Result<Decoder<'s, 'c>> {
        Self::with_epsilon(s, head_dim, 1e-6)
    }

    /// As [`new`](Self::new), with another default epsilon of normalizations.
    pub fn with_epsilon(s: &'s Settings<'c>, head_dim: Option<usize>, epsilon: f64) -> Result<Decoder<'s, 'c>> {
        let heads = s.size("num_attention_heads")?;
        let groups = s.size_or("num_key_value_heads", heads)?;
        if !heads.is_multiple_of(groups) {
            return Err(Error::graph("config.json", format!("`num_attention_heads` {heads} is not a multiple of `num_key_value_heads` {groups}")));
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
            causal: s.flag_or("is_causal", true)?,
            norm: RmsNorm { epsilon: s.number_or("rms_norm_eps", epsilon)?, ..RmsNorm::default() },
            norms: NORMS_BEFORE,
            head_norms: HeadNorms::None,
            fused: false,
            qkv_bias: bias,
            out_bias: bias,
            mlp_bias: s.flag_or("mlp_bias", false)?,
            activation: s.text_or("hidden_act", "silu")?,
            embedding_scale: None,
            logit_cap: None,
            experts: None,
            latent: None,
        })
    }

    /// Adds inputs, nodes and outputs; `layer` returns the properties of the layer with an index.
    pub fn build(&self, b: &mut Builder, layer: impl Fn(usize) -> Result<Layer>) -> Result<()> {
        let s = self.s;
        let prefix = if b.has("model.embed_tokens.weight") { "model." } else { "" };
        let (tokens, mask) = text_inputs(b)?;
        let table = b.param(&format!("{prefix}embed_tokens.weight"), &[s.size("vocab_size")?, s.size("hidden_size")?])?;
        let mut x = b.node("embed_tokens", Embedding {}, &[tokens, table])?;
        if let Some(factor) = self.embedding_scale {
            x = b.node("embeddings", Scale { factor }, &[x])?;
        }
        for index in 0..s.size("num_hidden_layers")? {
            x = self.layer(b, &LayerNames::new(prefix, index), layer(index)?, x, mask)?;
        }
        let x = rms_norm(b, "norm", &format!("{prefix}norm"), x, self.norm)?;
        b.output("last_hidden_state", x);
        if s.class().ends_with("ForCausalLM") || b.has("lm_head.weight") {
            let weight = language_head(s, b, "lm_head.weight", table)?;
            let mut logits = b.node("lm_head", Linear { input_major: false }, &[x, weight])?;
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
        let y = self.normed(b, at, before_attention, x)?;
        let y = self.attention(b, at, layer, y, mask)?;
        let y = self.normed(b, at, after_attention, y)?;
        let x = b.node(&at.node("attended"), Add {}, &[x, y])?;
        let y = self.normed(b, at, before_network, x)?;
        let y = self.network(b, at, y)?;
        let y = self.normed(b, at, after_network, y)?;
        b.node(&at.node, Add {}, &[x, y])
    }

    fn normed(&self, b: &mut Builder, at: &LayerNames, name: Option<&str>, x: ValueId) -> Result<ValueId> {
        name.map_or(Ok(x), |name| rms_norm(b, &at.node(name), &at.module(name), x, self.norm))
    }

    pub fn linear(&self, b: &mut Builder, at: &LayerNames, name: &str, x: ValueId, out: usize, bias: bool) -> Result<ValueId> {
        linear_with(b, &at.node(name), &at.module(name), x, out, bias)
    }

    fn attention(&self, b: &mut Builder, at: &LayerNames, layer: Layer, x: ValueId, mask: ValueId) -> Result<ValueId> {
        let [q, k, v] = match &self.latent {
            Some(latent) => latent.heads(self, b, at, &layer, x)?,
            None => self.split(b, at, &layer, x)?,
        };
        let attention = Attention { scale: self.scale, causal: self.causal, window: layer.window, soft_cap: self.soft_cap, ..Attention::default() };
        let context = b.node(&at.node("self_attn.context_heads"), attention, &[q, k, v, mask])?;
        let context = b.node(&at.node("self_attn.context"), MergeHeads {}, &[context])?;
        self.linear(b, at, "self_attn.o_proj", context, self.s.size("hidden_size")?, self.out_bias)
    }

    /// Heads of queries, keys and values, `[batch, heads, sequence, head_dim]`, with rotary embedding.
    fn split(&self, b: &mut Builder, at: &LayerNames, layer: &Layer, x: ValueId) -> Result<[ValueId; 3]> {
        let mut heads = self.projections(b, at, x)?;
        for (part, value) in ["q", "k", "v"].into_iter().zip(&mut heads) {
            let name = format!("self_attn.{part}");
            let norm = |b: &mut Builder, over: HeadNorms, value: ValueId| {
                if self.head_norms != over || part == "v" {
                    return Ok(value);
                }
                rms_norm(b, &at.node(&format!("{name}_norm")), &at.module(&format!("{name}_norm")), value, self.norm)
            };
            let flat = norm(b, HeadNorms::Projection, *value)?;
            let split = b.node(&at.node(&format!("{name}_heads")), SplitHeads { head_dim: self.head_dim }, &[flat])?;
            *value = norm(b, HeadNorms::Head, split)?;
            if let Some(rotary) = layer.rotary.as_ref().filter(|_| part != "v") {
                *value = b.node(&at.node(&format!("{name}_rotary")), rotary.clone(), &[*value])?;
            }
        }
        Ok(heads)
    }

    /// Queries, keys and values, `[batch, sequence, heads · head_dim]`.
    fn projections(&self, b: &mut Builder, at: &LayerNames, x: ValueId) -> Result<[ValueId; 3]> {
        let widths = [self.heads, self.groups, self.groups].map(|count| count.saturating_mul(self.head_dim));
        if self.fused {
            let all = self.linear(b, at, "self_attn.qkv_proj", x, widths.into_iter().fold(0, usize::saturating_add), self.qkv_bias)?;
            return slices(b, ["q", "k", "v"].map(|part| at.node(&format!("self_attn.{part}"))), all, widths);
        }
        let [q, k, v] = widths;
        Ok([
            self.linear(b, at, "self_attn.q_proj", x, q, self.qkv_bias)?,
            self.linear(b, at, "self_attn.k_proj", x, k, self.qkv_bias)?,
            self.linear(b, at, "self_attn.v_proj", x, v, self.qkv_bias)?,
        ])
    }

    fn network(&self, b: &mut Builder, at: &LayerNames, x: ValueId) -> Result<ValueId> {
        match self.experts.as_ref().filter(|experts| experts.are_in_layer(at.index)) {
            Some(experts) => experts.build(self, b, at, x),
            None => self.gated(b, at, ("mlp", PARTS), x, self.s.size("intermediate_size")?, self.mlp_bias),
        }
    }

    /// The activation function of a gate.
    pub fn act(&self, b: &mut Builder, at: &LayerNames, network: &str, gate: ValueId) -> Result<ValueId> {
        activate(b, &at.node(&format!("{network}.act")), self.activation, gate)
    }

    /// A gated feed-forward network with these names and `wide` neurons.
    pub fn gated(
        &self,
        b: &mut Builder,
        at: &LayerNames,
        (network, [gate, up, down]): (&str, [&str; 3]),
        x: ValueId,
        wide: usize,
        bias: bool,
    ) -> Result<ValueId> {
        let name = |part: &str| format!("{network}.{part}");
        let [gate, up] = if self.fused {
            let both = self.linear(b, at, &name("gate_up_proj"), x, wide.saturating_mul(2), bias)?;
            let [gate, up] = slices(b, ["gate", "up"].map(|part| at.node(&name(part))), both, [wide; 2])?;
            [self.act(b, at, network, gate)?, up]
        } else {
            let gate = self.linear(b, at, &name(gate), x, wide, bias)?;
            [self.act(b, at, network, gate)?, self.linear(b, at, &name(up), x, wide, bias)?]
        };
        let gated = b.node(&at.node(&name("gated")), Mul {}, &[gate, up])?;
        self.linear(b, at, &name(down), gated, self.s.size("hidden_size")?, bias)
    }
}

/// Names of a layer's nodes and of its modules in the checkpoint.
pub struct LayerNames {
    index: usize,
    /// The last node of the layer.
    node: String,
    module: String,
}

impl LayerNames {
    fn new(prefix: &str, index: usize) -> LayerNames {
        LayerNames { index, node: format!("layers.{index}"), module: format!("{prefix}layers.{index}") }
    }

    /// The name of a node in the layer.
    pub fn node(&self, name: &str) -> String {
        format!("{}.{name}", self.node)
    }

    /// The name of a module in the layer.
    pub fn module(&self, name: &str) -> String {
        format!("{}.{name}", self.module)
    }
}

/// Layers with the same rotary embedding, and a sliding window where `slides` returns true.
pub fn every_layer(s: &Settings, head_dim: usize, rope: RopeDefaults, slides: impl Fn(usize) -> Result<bool>) -> Result<impl Fn(usize) -> Result<Layer>> {
    let rotary = rotary(s, head_dim, rope)?;
    Ok(move |index| Ok(Layer { rotary: Some(rotary.clone()), window: window(s, slides(index)?)? }))
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

/// Whether a layer has a sliding window according to `layer_types`; `None` without that key. Sliding
/// windows are an error unless they are `allowed`.
pub fn slides(s: &Settings, layer: usize, allowed: bool) -> Result<Option<bool>> {
    match s.get("layer_types").map(|types| types.get(layer).and_then(serde_json::Value::as_str)) {
        None => Ok(None),
        Some(Some("sliding_attention")) if allowed => Ok(Some(true)),
        Some(Some("full_attention")) => Ok(Some(false)),
        Some(other) => Err(Error::graph(
            "config.json",
            format!("`layer_types` of layer {layer} is {other:?}, expected full_attention, or sliding_attention with `use_sliding_window`"),
        )),
    }
}
