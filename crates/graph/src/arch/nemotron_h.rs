//! Nemotron-H: each layer is a state space layer of Mamba 2, attention without positions, a feed-forward
//! network without a gate, or a mixture of such experts.

use super::gguf::{self, Divisors, GgufExperts, GgufFamily, GgufHead, Recurrent, Setting};
use super::{DECODER, DECODER_SIZES, ExpertLayout, Family, Groups, Keys, SELECTION_BIAS, Sizes};
use crate::store::Role;

pub(super) const NEMOTRON_H: Family = Family {
    model_type: "nemotron_h",
    graph: graph!(running::build),
    keys: Keys {
        harmless: &[
            "attention_bias",
            "attention_dropout",
            "chunk_size",
            "expand",
            "hidden_act",
            "hidden_dropout",
            "mamba_chunk_size",
            "mamba_dt_init_floor",
            "mamba_dt_limit",
            "mamba_dt_max",
            "mamba_expand",
            "mamba_proj_bias",
            "mamba_ssm_cache_dtype",
            "max_position_embeddings",
            "moe_shared_expert_overlap",
            "mtp_hybrid_override_pattern",
            "mtp_layers_block_type",
            "n_shared_experts",
            "norm_eps",
            "num_hidden_layers",
            "num_logits_to_keep",
            "num_nextn_predict_layers",
            "output_router_logits",
            "partial_rotary_factor",
            "rescale_prenorm_residual",
            "residual_in_fp32",
            "rms_norm_eps",
            "rope_theta",
            "sliding_window",
            "time_step_floor",
            "time_step_limit",
            "time_step_max",
            "use_mamba_kernels",
            // Of layers that a model may not have.
            "intermediate_size",
            "mamba_conv_bias",
            "mamba_d_conv",
            "mamba_dt_min",
            "mamba_n_groups",
            "moe_intermediate_size",
            "moe_latent_size",
            "moe_shared_expert_intermediate_size",
            "n_group",
            "n_routed_experts",
            "norm_topk_prob",
            "num_experts_per_tok",
            "routed_scaling_factor",
            "topk_group",
        ],
        neutral: &[],
    },
    sizes: Some(&Sizes {
        prefixes: &["backbone.", "model.", ""],
        hidden: ("hidden_size", "embeddings.weight", 1),
        heads: ("num_attention_heads", "layers.0.mixer.o_proj.weight", 1),
        groups: Some(("num_key_value_heads", "layers.0.mixer.k_proj.weight", Groups::Separate)),
        custom_head_dim_default: true,
        other_sizes: &[
            ("intermediate_size", "layers.0.mixer.down_proj.weight", 1),
            ("moe_intermediate_size", "layers.0.mixer.experts.0.down_proj.weight", 1),
            ("moe_shared_expert_intermediate_size", "layers.0.mixer.shared_experts.down_proj.weight", 1),
        ],
        ..DECODER_SIZES
    }),
    tied: &[],
    fused: &[&["q_proj", "k_proj", "v_proj"]],
    embeddings: &["embeddings", "embedding"],
    routers: &["mixer.gate"],
    exempt: &[("mixer.conv1d", Role::Other)],
    float32: SELECTION_BIAS,
    experts: Some(ExpertLayout { keys: &["n_routed_experts"], parts: None, ..ExpertLayout::SEPARATE }),
    renames: &[("backbone.", "model.")],
    gguf: Some(&GGUF),
    ..DECODER
};

/// Parts of layers, without networks.
const MIXERS: &[gguf::Pair] = &[
    ("attn_norm", "norm"),
    ("attn_q", "mixer.q_proj"),
    ("attn_k", "mixer.k_proj"),
    ("attn_v", "mixer.v_proj"),
    ("attn_output", "mixer.o_proj"),
    ("ssm_in", "mixer.in_proj"),
    ("ssm_conv1d", "mixer.conv1d"),
    ("ssm_norm", "mixer.norm"),
    ("ssm_out", "mixer.out_proj"),
];
const STATE_SPACE_SIZES: [Setting; 4] = [
    Setting::required("ssm.conv_kernel", "conv_kernel", "4"),
    Setting::required("ssm.state_size", "ssm_state_size", "128"),
    Setting::required("ssm.group_count", "n_groups", "8"),
    Setting::required("ssm.time_step_rank", "mamba_num_heads", "128"),
];

/// Without experts. Queries and keys are permuted as for rotary embeddings, which the family does not have.
const DENSE_GGUF: GgufFamily = GgufFamily {
    architecture: "nemotron_h",
    class: "NemotronHForCausalLM",
    prefix: "backbone.",
    global: &[("token_embd", "backbone.embeddings"), ("output_norm", "backbone.norm_f"), ("output", "lm_head")],
    layer: &[MIXERS, &[("ffn_up", "mixer.up_proj"), ("ffn_down", "mixer.down_proj")]],
    tensors: &[("ssm_a", "mixer.A_log"), ("ssm_d", "mixer.D"), ("ssm_dt.bias", "mixer.dt_bias"), ("exp_probs_b.bias", "mixer.gate.e_score_correction_bias")],
    other_divisors: Some(Divisors::None),
    epsilon: Setting { key: "layer_norm_epsilon", ..gguf::LAYER_EPSILON },
    flags: &[("use_conv_bias", "ssm_conv1d.bias"), ("mlp_bias", "ffn_up.bias")],
    settings: &STATE_SPACE_SIZES,
    // llama.cpp needs biases of convolutions.
    required: &[("mamba_hidden_act", "\"silu\""), ("time_step_min", "0.001"), ("use_bias", "false"), ("use_conv_bias", "true")],
    accepted: &["auto_map", "partial_rotary_factor"],
    key_value_heads: Some(8),
    head_dim: Some(128),
    activation: ("mlp_hidden_act", "relu2"),
    head: GgufHead::Separate,
    recurrent: Recurrent::SingleParts,
    ..gguf::LLAMA
};

/// With experts instead of dense networks.
const GGUF: GgufFamily = GgufFamily {
    architecture: "nemotron_h_moe",
    layer: &[
        MIXERS,
        &[
            ("ffn_gate_inp", "mixer.gate"),
            ("ffn_up_shexp", "mixer.shared_experts.up_proj"),
            ("ffn_down_shexp", "mixer.shared_experts.down_proj"),
            ("ffn_latent_down", "mixer.fc1_latent_proj"),
            ("ffn_latent_up", "mixer.fc2_latent_proj"),
        ],
    ],
    without_experts: Some(&DENSE_GGUF),
    settings: &{
        let [kernel, state, groups, heads] = STATE_SPACE_SIZES;
        [
            kernel,
            state,
            groups,
            heads,
            Setting::required(gguf::SHARED_NEURONS, "moe_shared_expert_intermediate_size", "7688"),
            Setting::optional("expert_shared_count", "n_shared_experts", ["1", "0"]),
            Setting::optional("expert_weights_scale", "routed_scaling_factor", ["1.0", "1.0"]),
            Setting::optional("expert_weights_norm", "norm_topk_prob", ["true", "false"]),
            Setting::optional("expert_group_count", "n_group", ["1", "1"]),
            Setting::optional("expert_group_used_count", "topk_group", ["1", "1"]),
        ]
    },
    flags: &[("use_conv_bias", "ssm_conv1d.bias")],
    required: &[("mamba_hidden_act", "\"silu\""), ("mlp_bias", "false"), ("time_step_min", "0.001"), ("use_bias", "false"), ("use_conv_bias", "true")],
    experts: Some(GgufExperts {
        block: "mixer.experts",
        parts: ["", "up_proj", "down_proj"],
        count: "n_routed_experts",
        normalized: None,
        ..gguf::QWEN_EXPERTS
    }),
    ..DENSE_GGUF
};

#[cfg(feature = "run")]
mod running {
    use serde_json::Value;

    use crate::arch::deepseek::running::Defaults;
    use crate::arch::layer_list::{LAYER_PATTERN, TYPE_LISTS};
    use crate::arch::mamba2::running::blocks;
    use crate::arch::running::Settings;
    use crate::arch::running::decoder::{Decoder, LayerNames, Norm};
    use crate::arch::running::experts::{Experts, Shared};
    use crate::arch::running::parts::attend;
    use crate::arch::running::state_space::StateSpace;
    use crate::error::{Error, Result};
    use crate::ir::ops::{Attention, RmsNorm};
    use crate::ir::{Builder, ValueId};

    /// The part that a layer consists of.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    enum Kind {
        StateSpace,
        Attention,
        Dense,
        Experts,
    }

    pub fn build(s: &Settings, b: &mut Builder) -> Result<()> {
        // Published folders refer to custom code, which transformers now includes.
        let _ = s.get("auto_map");
        let (kinds, norm) = (kinds(s)?, RmsNorm { epsilon: s.number_or("layer_norm_epsilon", 1e-5)?, ..RmsNorm::default() });
        let experts = if kinds.contains(&Kind::Experts) { Some(experts(s)?) } else { None };
        let decoder = Decoder {
            network: "mixer",
            ungated: Some(["up_proj", "down_proj"]),
            activation: s.text_or("mlp_hidden_act", "relu2")?,
            ..Decoder::with_norm(s, Some(128), Some(8), Norm::Rms(norm))?
        };
        // transformers never ties the head.
        blocks(s, b, norm, kinds.len(), false, |b, at, x, mask| match (kinds.get(at.index), &experts) {
            (Some(Kind::StateSpace), _) => state_space(s, norm)?.add(b, at, x, mask),
            (Some(Kind::Experts), Some(experts)) => experts.build(&decoder, b, at, x),
            (Some(Kind::Dense), _) => decoder.dense(b, at, x),
            _ => attention(&decoder, b, at, x, mask),
        })
    }

    fn attention(decoder: &Decoder, b: &mut Builder, at: &LayerNames, x: ValueId, mask: ValueId) -> Result<ValueId> {
        let (width, head_dim) = (b.width(x)?, decoder.head_dim);
        let mut project = |part: &str, heads: usize| decoder.linear(b, at, &format!("mixer.{part}"), x, heads.saturating_mul(head_dim), false);
        let qkv = [project("q_proj", decoder.heads)?, project("k_proj", decoder.groups)?, project("v_proj", decoder.groups)?];
        let attention = Attention { scale: 1.0, causal: decoder.causal, ..Attention::default() };
        let context = attend(b, &at.node("mixer"), qkv, head_dim, attention, &[mask])?;
        decoder.linear(b, at, "mixer.o_proj", context, width, false)
    }

    fn state_space<'c>(s: &Settings<'c>, norm: RmsNorm) -> Result<StateSpace<'c>> {
        // Names of older files, which take precedence.
        let name = |older: &'static str, key: &'static str| if s.get(older).is_some() { older } else { key };
        Ok(StateSpace {
            module: "mixer",
            heads: s.size_or("mamba_num_heads", 128)?,
            head_dim: s.size_or("mamba_head_dim", 64)?,
            groups: s.size_or(name("mamba_n_groups", "n_groups"), 8)?,
            state: s.size_or("ssm_state_size", 128)?,
            kernel: s.size_or(name("mamba_d_conv", "conv_kernel"), 4)?,
            conv_bias: s.flag_or(name("mamba_conv_bias", "use_conv_bias"), true)?,
            bias: s.flag_or("use_bias", false)?,
            // transformers has no upper limit, regardless of `time_step_limit`.
            limits: [s.number_or(name("mamba_dt_min", "time_step_min"), 0.001)?, f64::INFINITY],
            activation: s.text_or("mamba_hidden_act", "silu")?,
            norm,
        })
    }

    fn experts(s: &Settings) -> Result<Experts> {
        let defaults = Defaults { count: 8, top: 2, inner: 7688, scale: 1.0, groups: [1, 1], dense: 0 };
        let latent = s.get("moe_latent_size").map(|_| s.size("moe_latent_size")).transpose()?;
        Ok(Experts {
            block: "mixer",
            latent: latent.map(|width| (["fc1_latent_proj", "fc2_latent_proj"], width)),
            shared: Some(Shared { module: "mixer.shared_experts", inner: s.size_or("moe_shared_expert_intermediate_size", 7688)?, gated: false }),
            ..defaults.experts(s)?
        })
    }

    /// The kinds of all layers: from a list, or from a letter for each layer.
    fn kinds(s: &Settings) -> Result<Vec<Kind>> {
        let wrong = |key: &str, value: &dyn std::fmt::Debug| Err(Error::graph("config.json", format!("`{key}` has a layer of unknown type {value:?}")));
        if let Some((key, types)) = TYPE_LISTS.into_iter().find_map(|key| Some((key, s.get(key)?))) {
            let Some(types) = types.as_array().filter(|types| !types.is_empty()) else {
                return Err(Error::graph("config.json", format!("`{key}` is {types}, expected a list of types")));
            };
            let kind = |kind: &Value| match kind.as_str() {
                Some("linear_attention" | "mamba") => Ok(Kind::StateSpace),
                Some("full_attention" | "attention") => Ok(Kind::Attention),
                Some("mlp") => Ok(Kind::Dense),
                Some("moe") => Ok(Kind::Experts),
                _ => wrong(key, kind),
            };
            // The list takes precedence.
            let _ = s.get(LAYER_PATTERN);
            return types.iter().map(kind).collect();
        }
        let kind = |letter: char| match letter {
            'M' => Ok(Kind::StateSpace),
            '*' => Ok(Kind::Attention),
            '-' => Ok(Kind::Dense),
            'E' => Ok(Kind::Experts),
            _ => wrong(LAYER_PATTERN, &letter),
        };
        s.text_or(LAYER_PATTERN, "ME*-")?.chars().map(kind).collect()
    }
}
