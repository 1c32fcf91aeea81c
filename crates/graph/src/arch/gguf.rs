//! Model families in GGUF files: tensor names in GGUF files and in Hugging Face checkpoints.
//!
//! Names are those of `gguf-py/gguf/tensor_mapping.py` in llama.cpp.

mod names;
mod recurrent;

use serde_json::Value as Json;

pub(super) use self::recurrent::{DELTA, DELTA_HEADS, DELTA_SETTINGS, STATE_SPACE, STATE_SPACE_HEADS};
pub use self::recurrent::{Recurrent, StoredShape, Tiling};

/// A model family in GGUF files.
#[derive(Debug, Clone, Copy)]
pub struct GgufFamily {
    /// `general.architecture`.
    pub architecture: &'static str,
    /// Model class in transformers.
    pub class: &'static str,
    /// Start of the names of layers in checkpoints.
    pub(super) prefix: &'static str,
    /// Modules outside of layers, in GGUF files and in checkpoints.
    pub(super) global: &'static [Pair],
    /// Module names within a layer: in GGUF files, and in checkpoints.
    pub(super) layer: &'static [&'static [Pair]],
    /// Tensors within a layer that are neither the weight nor the bias of a module, by their complete names.
    pub(super) tensors: &'static [Pair],
    /// Tensors of checkpoints with the rows of two tensors of GGUF files, for experts those of each expert,
    /// by their complete names within a layer.
    pub(super) concatenated: &'static [(&'static str, [&'static str; 2])],
    /// The names of models without experts, if they are another variant.
    pub without_experts: Option<&'static GgufFamily>,
    /// The names of models without state space layers, if they are another variant.
    pub without_recurrent: Option<&'static GgufFamily>,
    /// Whether rows of query and key weights are permuted for interleaved rotary embeddings.
    pub interleaved_rope: bool,
    /// Divisors of rotary frequencies that llama.cpp reads, if they do not follow from `interleaved_rope`.
    pub(super) other_divisors: Option<Divisors>,
    /// The number of layers of which the last one has no rotary embedding, if there are such layers:
    /// llama.cpp has one number for the family.
    pub rope_period: Option<u64>,
    /// Key of the number of neurons of dense networks.
    pub neurons: &'static str,
    /// Whether GGUF files store norm weights plus one, since the family computes `(1 + weight) * x`.
    pub norms_plus_one: bool,
    /// Keys of the epsilon of normalizations, and its default in transformers.
    pub epsilon: Setting,
    /// Keys of `config.json` that specify whether a tensor of a layer is present, with that tensor.
    pub flags: &'static [Pair],
    /// Keys of `config.json` that specify whether a tensor of the first layer is absent, with that tensor.
    pub absences: &'static [Pair],
    /// Other keys with the same meaning in both files.
    pub settings: &'static [Setting],
    /// Keys of GGUF files with the only value that the family has.
    pub constants: &'static [(&'static str, u64)],
    /// Keys of `config.json` with the only JSON value that llama.cpp supports, which is the default of
    /// transformers.
    pub required: &'static [Pair],
    /// Keys of `config.json` that other families refuse, but that have no effect.
    pub accepted: &'static [&'static str],
    /// The default number of key-value heads in transformers, if it is not `num_attention_heads`.
    pub key_value_heads: Option<u64>,
    /// The default `head_dim` of transformers, if it is not `hidden_size / num_attention_heads`.
    pub head_dim: Option<u64>,
    /// Whether llama.cpp supports only heads of `hidden_size / num_attention_heads`.
    pub has_implied_heads: bool,
    /// Default base of rotary embeddings in transformers.
    pub theta: f64,
    /// Key of the rotated part of a head and its default, if it may be less than the whole.
    pub partial_rotary: Option<(&'static str, f64)>,
    /// The value of `truncate` in rope scaling of the kind `yarn`, which GGUF files do not contain, if it is
    /// not the default.
    pub yarn_truncate: Option<bool>,
    /// Key of the number of rotated elements of a head, which files of some families have instead.
    pub rotary_width: Option<&'static str>,
    /// Whether `rope_parameters` has a group for each type of layer, with its own base.
    pub has_rope_groups: bool,
    /// Whether rope scaling of the kind `dynamic` with `alpha` raises the base.
    pub has_alpha_scaling: bool,
    /// Key and value of the activation function.
    pub activation: (&'static str, &'static str),
    /// A key that takes precedence over that of `activation`. Without it, `gelu` means the tanh
    /// approximation.
    pub newer_activation_key: Option<&'static str>,
    /// The output heads that llama.cpp supports.
    pub head: GgufHead,
    /// Pattern of sliding-window attention.
    pub windows: Windows,
    /// The sliding window of files that do not specify one.
    pub default_window: Option<u64>,
    /// Whether `config.json` has a divisor of attention scores and soft caps, as in Gemma 2 and 3.
    pub has_query_scalar: bool,
    /// Default soft caps of attention scores and of logits in transformers. Other families cap only logits.
    pub default_soft_caps: Option<[f64; 2]>,
    /// Whether layers with a sliding window have their own base of rotary embeddings.
    pub has_local_rope: bool,
    /// Whether a sliding window in `config.json` cannot be represented.
    pub drops_window: bool,
    /// Number of layers of the model size that scales attention scores by
    /// `hidden_size / num_attention_heads` instead of `head_dim`.
    pub hidden_size_scaled_layers: Option<u64>,
    /// Whether keys and values are computed from latent vectors, as in DeepSeek-V3.
    pub is_latent: bool,
    /// Whether `topk_method` specifies whether routers select groups of experts, by the largest score of
    /// each group, as in DeepSeek-V2.
    pub has_group_methods: bool,
    /// Layers without attention.
    pub recurrent: Recurrent,
    /// Whether query projections compute an output gate for each head, in addition to queries.
    pub has_query_gate: bool,
    /// Mixture-of-experts layout, if the family has experts.
    pub experts: Option<GgufExperts>,
    /// Keys of factors on parts of the model: in GGUF files, and in `config.json`.
    pub multipliers: &'static [Pair],
}

/// Mixture-of-experts layout of a family.
#[derive(Debug, Clone, Copy)]
pub struct GgufExperts {
    /// Module that contains the numbered experts of a layer.
    pub(super) block: &'static str,
    /// Names of the gate, up and down projections of an expert; the first one is empty without a gate.
    pub(super) parts: [&'static str; 3],
    /// Key of the number of experts in the `config.json` of models that are read from GGUF files.
    pub count: &'static str,
    /// Whether llama.cpp normalizes the weights of the selected experts to sum to one, and requires experts
    /// in all layers; `None` if other keys specify that.
    pub normalized: Option<bool>,
    /// Key of the hidden size of experts in `config.json`, if GGUF files have it in addition to that of dense
    /// layers.
    pub inner: Option<&'static str>,
    /// Whether there is a shared expert.
    pub shared: bool,
    /// Whether checkpoints store projections of all experts as `[experts, in, out]`, and their biases.
    pub is_input_major: bool,
    /// Whether outputs of gate and up alternate in these tensors; otherwise, those of gate precede those of
    /// up.
    pub alternates: bool,
}

/// GGUF tensors that contain one projection of all experts.
const FUSED: [&str; 3] = ["ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"];

/// GGUF tensors with the keys and the values of the projection of latent vectors, and the module in
/// checkpoints.
const LATENT: ([&str; 2], &str) = (["attn_k_b", "attn_v_b"], "self_attn.kv_b_proj");

/// Properties of a file by which families with the same architecture are distinguished.
#[derive(Debug, Clone, Copy)]
pub struct GgufTraits {
    /// Whether there are experts.
    pub experts: bool,
    /// Whether layers have a sliding window.
    pub windows: bool,
    /// The function of the scores of experts.
    pub scores: u64,
    /// Whether there are sizes of state space layers or gated delta networks.
    pub state_space: bool,
    /// Whether the size of a shared expert is specified.
    pub shared: bool,
}

/// Divisors of rotary frequencies in files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Divisors {
    /// None.
    None,
    /// One tensor, as in Llama 3.
    Single,
    /// A tensor for short and one for long texts, as in Phi-3.
    ShortAndLong,
}

impl GgufFamily {
    /// The JSON value that llama.cpp requires for a key of `config.json` instead of this one.
    pub fn required_instead(&self, key: &str, value: &Json) -> Option<&'static str> {
        // Files have numbers of 32 bits.
        let number = |value: &Json| value.as_f64().map(|number| number as f32);
        let is_other = |expected: Json| expected != *value && (number(value).is_none() || number(value) != number(&expected));
        self.required.iter().find(|(name, expected)| *name == key && is_other(parsed(expected))).map(|(_, expected)| *expected)
    }

    /// Divisors of rotary frequencies that llama.cpp reads.
    pub fn divisors(&self) -> Divisors {
        self.other_divisors.unwrap_or(if self.interleaved_rope { Divisors::Single } else { Divisors::None })
    }
}

/// Layers with sliding-window attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Windows {
    /// None.
    None,
    /// All layers except every n-th.
    AllBut(usize),
    /// Those that the file lists, by default all except every n-th.
    Listed(usize),
    /// All, or none if the size is zero; llama.cpp attends to all tokens.
    Ignored,
    /// Chunks of a constant length in all layers with rotary embedding.
    Chunks,
}

impl Windows {
    /// Whether a layer has a window by default.
    pub fn slides(self, layer: u64) -> bool {
        match self {
            Windows::None | Windows::Ignored | Windows::Chunks => false,
            Windows::AllBut(every) | Windows::Listed(every) => !layer.saturating_add(1).is_multiple_of(every as u64),
        }
    }
}

/// Output heads that llama.cpp supports for a family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GgufHead {
    /// Only the embedding table.
    Tied,
    /// The embedding table or a separate head.
    Any,
    /// Only a separate head.
    Separate,
}

/// A key with the same meaning in both files.
#[derive(Debug, Clone, Copy)]
pub struct Setting {
    /// Key in GGUF files, without the architecture.
    pub gguf: &'static str,
    /// Key in `config.json`.
    pub key: &'static str,
    /// Default in transformers, as JSON: a boolean, an integer, or a number with a decimal point.
    pub(super) default: &'static str,
    /// As JSON; `None` if llama.cpp requires the key.
    pub(super) missing: Option<&'static str>,
}

impl Setting {
    /// The default in transformers.
    pub fn default_value(&self) -> Json {
        parsed(self.default)
    }

    /// The meaning of a missing key in GGUF files; `None` if llama.cpp requires the key.
    pub fn missing_value(&self) -> Option<Json> {
        self.missing.map(parsed)
    }

    pub(super) const fn required(gguf: &'static str, key: &'static str, default: &'static str) -> Setting {
        Setting { gguf, key, default, missing: None }
    }

    pub(super) const fn optional(gguf: &'static str, key: &'static str, [default, missing]: [&'static str; 2]) -> Setting {
        Setting { gguf, key, default, missing: Some(missing) }
    }
}

fn parsed(json: &str) -> Json {
    serde_json::from_str(json).unwrap_or(Json::Null)
}

/// Names in GGUF files and in checkpoints.
pub type Pair = (&'static str, &'static str);

const GLOBAL: &[Pair] = &[("token_embd", "model.embed_tokens"), ("output_norm", "model.norm"), ("output", "lm_head")];

/// Gated feed-forward networks.
pub(super) const NETWORK: &[Pair] = &[("ffn_gate", "mlp.gate_proj"), ("ffn_up", "mlp.up_proj"), ("ffn_down", "mlp.down_proj")];
pub(super) const NORM_BEFORE: &[Pair] = &[("ffn_norm", "post_attention_layernorm")];
pub(super) const NORMS_AROUND: &[Pair] =
    &[("ffn_norm", "pre_feedforward_layernorm"), ("post_attention_norm", "post_attention_layernorm"), ("post_ffw_norm", "post_feedforward_layernorm")];
pub(super) const NORM_AFTER_ATTENTION: &[Pair] = &[("post_attention_norm", "post_attention_layernorm")];
pub(super) const NORM_OF_ATTENTION: &[Pair] = &[("attn_norm", "input_layernorm")];
pub(super) const NORMS_AFTER: &[Pair] = &[("post_attention_norm", "post_attention_layernorm"), ("post_ffw_norm", "post_feedforward_layernorm")];
pub(super) const ATTENTION: &[Pair] =
    &[("attn_q", "self_attn.q_proj"), ("attn_k", "self_attn.k_proj"), ("attn_v", "self_attn.v_proj"), ("attn_output", "self_attn.o_proj")];
pub(super) const ROUTER: &[Pair] = &[("ffn_gate_inp", "mlp.gate")];
pub(super) const SHARED_EXPERT: &[Pair] = &[
    ("ffn_gate_inp_shexp", "mlp.shared_expert_gate"),
    ("ffn_gate_shexp", "mlp.shared_expert.gate_proj"),
    ("ffn_up_shexp", "mlp.shared_expert.up_proj"),
    ("ffn_down_shexp", "mlp.shared_expert.down_proj"),
];
/// Shared experts without a gate, as one network.
pub(super) const SHARED_EXPERTS: &[Pair] =
    &[("ffn_gate_shexp", "mlp.shared_experts.gate_proj"), ("ffn_up_shexp", "mlp.shared_experts.up_proj"), ("ffn_down_shexp", "mlp.shared_experts.down_proj")];
/// The bias by which routers select experts.
pub(super) const SELECTION_BIAS: &[Pair] = &[("exp_probs_b.bias", "mlp.gate.e_score_correction_bias")];
pub(super) const QWEN_EXPERTS: GgufExperts = GgufExperts {
    block: "mlp.experts",
    parts: ["gate_proj", "up_proj", "down_proj"],
    count: "num_experts",
    normalized: Some(true),
    inner: Some("moe_intermediate_size"),
    shared: false,
    is_input_major: false,
    alternates: false,
};
pub(super) const HEAD_NORMS: &[Pair] = &[("attn_q_norm", "self_attn.q_norm"), ("attn_k_norm", "self_attn.k_norm")];

pub(super) const LLAMA: GgufFamily = GgufFamily {
    architecture: "llama",
    class: "LlamaForCausalLM",
    prefix: "model.",
    global: GLOBAL,
    layer: &[NORM_OF_ATTENTION, ATTENTION, NORM_BEFORE, NETWORK],
    tensors: &[],
    concatenated: &[],
    without_experts: None,
    without_recurrent: None,
    interleaved_rope: true,
    other_divisors: None,
    rope_period: None,
    neurons: "intermediate_size",
    norms_plus_one: false,
    epsilon: RMS_EPSILON,
    flags: &[ATTENTION_BIAS, ("mlp_bias", "ffn_gate.bias")],
    absences: &[],
    settings: &[],
    constants: &[],
    required: &[],
    accepted: &[],
    key_value_heads: None,
    head_dim: None,
    has_implied_heads: false,
    theta: 1e4,
    partial_rotary: None,
    yarn_truncate: None,
    rotary_width: None,
    has_rope_groups: false,
    has_alpha_scaling: false,
    activation: ("hidden_act", "silu"),
    newer_activation_key: None,
    head: GgufHead::Any,
    windows: Windows::None,
    default_window: None,
    has_query_scalar: false,
    default_soft_caps: None,
    has_local_rope: false,
    drops_window: false,
    hidden_size_scaled_layers: None,
    is_latent: false,
    has_group_methods: false,
    recurrent: Recurrent::None,
    has_query_gate: false,
    experts: None,
    multipliers: &[],
};

/// RMS normalization.
pub(super) const RMS_EPSILON: Setting = Setting::required("attention.layer_norm_rms_epsilon", "rms_norm_eps", "1e-6");
/// Layer normalization.
pub(super) const LAYER_EPSILON: Setting = Setting::required("attention.layer_norm_epsilon", "layer_norm_eps", "1e-5");
/// Biases of attention.
pub(super) const ATTENTION_BIAS: Pair = ("attention_bias", "attn_q.bias");
/// Families without biases of output projections.
pub(super) const NO_ATTENTION_BIAS: Pair = ("attention_bias", "false");

/// Key of the number of neurons of a shared expert.
pub(super) const SHARED_NEURONS: &str = "expert_shared_feed_forward_length";

/// Scores of experts are a softmax, or sigmoids.
pub(super) const SOFTMAX_SCORES: (&str, u64) = (EXPERT_SCORES, 1);
pub(super) const SIGMOID_SCORES: (&str, u64) = (EXPERT_SCORES, 2);
/// Key of the function of the scores of experts.
pub const EXPERT_SCORES: &str = "expert_gating_func";

/// Key of the factor on attention scores.
pub const ATTENTION_MULTIPLIER: &str = "attention.scale";
/// Key of the divisor of logits.
pub const LOGIT_DIVISOR: &str = "logit_scale";

pub(super) const GRANITE_MULTIPLIERS: &[Pair] = &[
    (ATTENTION_MULTIPLIER, "attention_multiplier"),
    ("embedding_scale", "embedding_multiplier"),
    ("residual_scale", "residual_multiplier"),
    (LOGIT_DIVISOR, "logits_scaling"),
];
