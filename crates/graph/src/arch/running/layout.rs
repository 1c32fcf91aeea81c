//! Description of a decoder and its layers, and the linear layers that all of them share.

use super::Settings;
use super::parts::{activate, layer_norm_with, linear_with, rms_norm, slices};
use crate::error::Result;
use crate::ir::ops::{Mul, PositionScale, RmsNorm, Rotary, Route};
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
    /// Over each head, after the rotary embedding.
    AfterRotary,
    /// Over all heads.
    Projection,
}

/// Normalization of hidden states.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Norm {
    /// Root mean square normalization.
    Rms(RmsNorm),
    /// Layer normalization, with or without a bias.
    Layer { epsilon: f64, bias: bool },
}

impl Norm {
    /// Root mean square normalization with a default epsilon.
    pub fn rms(s: &Settings, epsilon: f64) -> Result<Norm> {
        Ok(Self::Rms(RmsNorm { epsilon: s.number_or("rms_norm_eps", epsilon)?, ..RmsNorm::default() }))
    }

    /// The normalization over the last axis with the parameters of `module`.
    pub fn add(self, b: &mut Builder, node: &str, module: &str, x: ValueId) -> Result<ValueId> {
        match self {
            Self::Rms(norm) => rms_norm(b, node, module, x, norm),
            Self::Layer { epsilon, bias } => layer_norm_with(b, node, module, x, epsilon, bias),
        }
    }
}

/// Properties of one layer.
#[derive(Default)]
pub struct Layer {
    /// Rotary embedding of queries and keys; `None` for layers without positions.
    pub rotary: Option<Rotary>,
    /// Sliding window: the maximum number of keys that a query attends to.
    pub window: Option<usize>,
    /// Number of tokens in a chunk, if queries attend only to keys of their chunk.
    pub chunk: Option<usize>,
    /// Epsilon of a root mean square normalization without weights of each head of queries and keys, after
    /// the rotary embedding.
    pub unit_norm: Option<f64>,
    /// Scale of queries by their position.
    pub query_scale: Option<PositionScale>,
}

/// Layers that combine tokens in another way than attention.
pub trait TokenMixer {
    /// Adds the layer at this position instead of attention: its output for the normalized stream `x` and the
    /// attention mask. `None` if this layer has attention.
    fn add(&self, decoder: &Decoder, b: &mut Builder, at: &LayerNames, x: ValueId, mask: ValueId) -> Result<Option<ValueId>>;
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
    /// Whether each head has an attention sink.
    pub sinks: bool,
    /// Whether attention is causal.
    pub causal: bool,
    /// All normalizations.
    pub norm: Norm,
    /// Positions of the normalizations.
    pub norms: Norms,
    /// Name of the normalization after the last layer.
    pub last_norm: &'static str,
    /// Whether attention and feed-forward network read the same normalized values, and are added to the
    /// residual stream together.
    pub parallel: bool,
    /// Normalization of queries and keys.
    pub head_norms: HeadNorms,
    /// Names of these normalizations.
    pub head_norm_names: [&'static str; 2],
    /// Whether rotary embeddings rotate pairs of neighboring elements.
    pub interleaved: bool,
    /// Whether queries, keys and values are one projection.
    pub fused_qkv: bool,
    /// Name of the projection of gate and up, if they are one.
    pub fused_gate: Option<&'static str>,
    /// Whether the projections of queries, keys and values have biases.
    pub qkv_bias: bool,
    /// Whether the projection of queries also computes a gate of the output of each head.
    pub query_gate: bool,
    /// Name of the output projection of attention.
    pub out: &'static str,
    /// Whether the output projection of attention has a bias.
    pub out_bias: bool,
    /// Layers without attention, for hybrid families.
    pub mixer: Option<&'s dyn TokenMixer>,
    /// Name of the feed-forward network.
    pub network: &'static str,
    /// Names of its gate, up and down projections.
    pub parts: [&'static str; 3],
    /// Number of its neurons; `None` for `intermediate_size`.
    pub neurons: Option<usize>,
    /// Names of the layers of a feed-forward network without a gate; `None` for networks with a gate.
    pub ungated: Option<[&'static str; 2]>,
    /// Whether the projections of the feed-forward network have biases.
    pub mlp_bias: bool,
    /// Activation function of the feed-forward network.
    pub activation: &'c str,
    /// Factor on embeddings.
    pub embedding_scale: Option<f64>,
    /// Factor on the outputs of attention and feed-forward networks before they are added to the residual
    /// stream.
    pub residual_scale: Option<f64>,
    /// Whether the output head has a bias.
    pub head_bias: bool,
    /// Factor on logits.
    pub logit_scale: Option<f64>,
    /// Soft cap on logits.
    pub logit_cap: Option<f64>,
    /// Experts, for families with mixtures of experts.
    pub experts: Option<Experts>,
    /// Latent attention, for families with low-rank keys and values.
    pub latent: Option<Latent>,
}

impl Decoder<'_, '_> {
    pub fn linear(&self, b: &mut Builder, at: &LayerNames, name: &str, x: ValueId, out: usize, bias: bool) -> Result<ValueId> {
        linear_with(b, &at.node(name), &at.module(name), x, out, bias)
    }

    /// The activation function of a feed-forward network.
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
        let (name, width) = (|part: &str| format!("{network}.{part}"), b.width(x)?);
        let [gate, up] = if let Some(both) = self.fused_gate {
            let both = self.linear(b, at, &name(both), x, wide.saturating_mul(2), bias)?;
            let [gate, up] = slices(b, ["gate", "up"].map(|part| at.node(&name(part))), both, [wide; 2])?;
            [self.act(b, at, network, gate)?, up]
        } else {
            let gate = self.linear(b, at, &name(gate), x, wide, bias)?;
            [self.act(b, at, network, gate)?, self.linear(b, at, &name(up), x, wide, bias)?]
        };
        let gated = b.node(&at.node(&name("gated")), Mul {}, &[gate, up])?;
        self.linear(b, at, &name(down), gated, width, bias)
    }

    /// The feed-forward network of a layer without experts.
    pub fn dense(&self, b: &mut Builder, at: &LayerNames, x: ValueId) -> Result<ValueId> {
        let wide = self.neurons.map_or_else(|| self.s.size("intermediate_size"), Ok)?;
        self.feed_forward(b, at, (self.network, self.parts), x, wide, self.mlp_bias)
    }

    /// A feed-forward network, with or without a gate; `parts` are the names of one with a gate.
    pub fn feed_forward(&self, b: &mut Builder, at: &LayerNames, (network, parts): (&str, [&str; 3]), x: ValueId, wide: usize, bias: bool) -> Result<ValueId> {
        let Some([up, down]) = self.ungated else { return self.gated(b, at, (network, parts), x, wide, bias) };
        let width = b.width(x)?;
        let up = self.linear(b, at, &format!("{network}.{up}"), x, wide, bias)?;
        let active = self.act(b, at, network, up)?;
        self.linear(b, at, &format!("{network}.{down}"), active, width, bias)
    }
}

/// Names of a layer's nodes and of its modules in the checkpoint.
pub struct LayerNames {
    pub index: usize,
    /// The last node of the layer.
    pub node: String,
    module: String,
}

impl LayerNames {
    pub fn new(prefix: &str, index: usize) -> LayerNames {
        LayerNames { index, node: format!("layers.{index}"), module: format!("{prefix}layers.{index}") }
    }

    /// The first layer, with names of its last node and of its module.
    pub fn with_nodes(node: String, module: String) -> LayerNames {
        LayerNames { index: 0, node, module }
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

/// The experts of a layer, and the layers that have experts.
pub struct Experts {
    pub count: usize,
    pub route: Route,
    /// Number of neurons of an expert.
    pub inner: usize,
    /// The module that contains the experts.
    pub block: &'static str,
    /// Name of the router.
    pub router: &'static str,
    /// Whether the router has a bias.
    pub router_bias: bool,
    /// Name of a bias for the selection of experts.
    pub selection_bias: Option<&'static str>,
    /// Names of the gate, up and down projections.
    pub parts: [&'static str; 3],
    /// Names of the tensors that stack gate and up, and down projections of all experts.
    pub stacked: [&'static str; 2],
    /// Whether these tensors have the axes `[experts, in, out]` instead of `[experts, out, in]`.
    pub input_major: bool,
    /// Whether the routing weights multiply the inputs of experts instead of their outputs.
    pub weighted_inputs: bool,
    /// The feed-forward network of experts like those of gpt-oss.
    pub clamped: Option<Clamped>,
    /// Names of projections before and after the experts, and the width between them.
    pub latent: Option<([&'static str; 2], usize)>,
    /// The shared expert, which processes all tokens.
    pub shared: Option<Shared>,
    /// Layers with a dense network.
    pub plain: Vec<usize>,
    /// The first layer with experts.
    pub first: usize,
    /// Every `step`-th layer has experts.
    pub step: usize,
}

/// The feed-forward network `(up + 1) · gate · sigmoid(slope · gate)` of clamped values.
#[derive(Debug, Clone, Copy)]
pub struct Clamped {
    pub slope: f64,
    /// Upper bound of gate and up, and the lower bound of up with the opposite sign.
    pub limit: f64,
}

impl Default for Experts {
    fn default() -> Self {
        Self {
            count: 1,
            route: Route::default(),
            inner: 1,
            block: "mlp",
            router: "gate",
            router_bias: false,
            selection_bias: None,
            parts: PARTS,
            stacked: ["experts.gate_up_proj", "experts.down_proj"],
            input_major: false,
            weighted_inputs: false,
            clamped: None,
            latent: None,
            shared: None,
            plain: Vec::new(),
            first: 0,
            step: 1,
        }
    }
}

/// An expert that processes all tokens.
pub struct Shared {
    /// Name of its module.
    pub module: &'static str,
    /// Number of neurons.
    pub inner: usize,
    /// Whether its output is weighted by a gate.
    pub gated: bool,
}

impl Experts {
    /// Whether the layer with this index has experts.
    pub fn are_in_layer(&self, layer: usize) -> bool {
        layer >= self.first && !self.plain.contains(&layer) && layer.checked_add(1).is_some_and(|number| number.is_multiple_of(self.step))
    }
}

/// Sizes of latent attention.
#[derive(Debug, Clone, Copy)]
pub struct Latent {
    /// Rank of the query projection; `None` if queries are projected directly from the stream.
    pub query_rank: Option<usize>,
    /// Rank of the latent vector for keys and values.
    pub rank: usize,
    /// Width of the part of a head without rotary embedding.
    pub nope: usize,
    /// Width of the part of a head with rotary embedding.
    pub rope: usize,
    /// Width of a head of values.
    pub values: usize,
    /// Whether rotary embeddings rotate pairs of neighboring elements.
    pub interleaved: bool,
}

impl Latent {
    /// The sizes from the configuration, with the defaults of DeepSeek-V2.
    pub fn new(s: &Settings) -> Result<Latent> {
        Self::with_defaults(s, [1536, 128, 128])
    }

    /// As [`new`](Self::new), with other defaults of the rank of queries, of the width of a head without
    /// rotary embedding, and of that of values.
    pub fn with_defaults(s: &Settings, [query_rank, nope, values]: [usize; 3]) -> Result<Latent> {
        const QUERY_RANK: &str = "q_lora_rank";
        Ok(Latent {
            query_rank: if s.is_null(QUERY_RANK) { None } else { Some(s.size_or(QUERY_RANK, query_rank)?) },
            rank: s.size_or("kv_lora_rank", 512)?,
            nope: s.size_or("qk_nope_head_dim", nope)?,
            rope: s.size_or("qk_rope_head_dim", 64)?,
            values: s.size_or("v_head_dim", values)?,
            interleaved: true,
        })
    }

    /// Width of a head of queries or keys.
    pub fn head_dim(&self) -> usize {
        self.nope.saturating_add(self.rope)
    }
}
