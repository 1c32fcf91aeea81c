//! DeepSeek-V2 and V3: latent attention, partial rotary embeddings, and experts after the first layers. The
//! routers of V3 have a bias that balances the load of experts.

use super::gguf::{self, GgufExperts, GgufFamily, Setting};
use super::{DECODER, DECODER_SIZES, DenseLayers, ExpertLayout, Family, Keys, SELECTION_BIAS, Sizes};

const SIZES: Sizes = Sizes {
    heads: ("num_attention_heads", "layers.0.self_attn.q_proj.weight", 0),
    groups: None,
    head_dim: None,
    other_sizes: &[("moe_intermediate_size", "layers.0.mlp.experts.0.down_proj.weight", 1), ("intermediate_size", "layers.0.mlp.down_proj.weight", 1)],
    ..DECODER_SIZES
};

/// Keys without an effect in both versions, and further keys of one version. Load balancing of experts only
/// affects training, and the head widths are derived from other keys.
macro_rules! harmless {
    ($($other:literal),+) => {
        &[
            "attention_dropout",
            "aux_loss_alpha",
            "ep_size",
            "head_dim",
            "intermediate_size",
            "max_position_embeddings",
            "output_router_logits",
            "pretraining_tp",
            "seq_aux",
            $($other),+
        ]
    };
}

pub(super) const DEEPSEEK_V2: Family = Family {
    model_type: "deepseek_v2",
    graph: graph!(running::build),
    keys: Keys {
        harmless: harmless!("qk_head_dim"),
        neutral: &[
            ("layer_types", "[]"),
            ("moe_layer_freq", "1"),
            ("norm_topk_prob", "false"),
            ("partial_rotary_factor", "1.0"),
            ("scoring_func", "\"softmax\""),
        ],
    },
    sizes: Some(&Sizes { heads_must_divide: true, ..SIZES }),
    fused: &[&["q_a_proj", "kv_a_proj_with_mqa"], &["gate_proj", "up_proj"]],
    routers: &["mlp.gate"],
    experts: Some(ExpertLayout { keys: &["n_routed_experts"], dense: &[DenseLayers::Count("first_k_dense_replace")], ..ExpertLayout::SEPARATE }),
    gguf: Some(&GGUF_2),
    ..DECODER
};

pub(super) const DEEPSEEK_V3: Family = Family {
    model_type: "deepseek_v3",
    graph: graph!(running::build_3),
    keys: Keys {
        // Layers that predict further tokens follow those of the graph.
        harmless: harmless!("num_mtp_layers", "num_nextn_predict_layers"),
        neutral: &[("moe_layer_freq", "1"), ("partial_rotary_factor", "1.0"), ("scoring_func", "\"sigmoid\""), ("topk_method", "\"noaux_tc\"")],
    },
    sizes: Some(&SIZES),
    heads: &["lm_head", "score", "shared_head.head"],
    float32: SELECTION_BIAS,
    gguf: Some(&GGUF),
    ..DEEPSEEK_V2
};

const GGUF: GgufFamily = GgufFamily {
    architecture: "deepseek2",
    class: "DeepseekV3ForCausalLM",
    layer: &[
        gguf::NORM_OF_ATTENTION,
        &[
            ("attn_q", "self_attn.q_proj"),
            ("attn_q_a", "self_attn.q_a_proj"),
            ("attn_q_a_norm", "self_attn.q_a_layernorm"),
            ("attn_q_b", "self_attn.q_b_proj"),
            ("attn_kv_a_mqa", "self_attn.kv_a_proj_with_mqa"),
            ("attn_kv_a_norm", "self_attn.kv_a_layernorm"),
            ("attn_output", "self_attn.o_proj"),
        ],
        gguf::NORM_BEFORE,
        gguf::NETWORK,
        gguf::ROUTER,
        gguf::SHARED_EXPERTS,
    ],
    tensors: gguf::SELECTION_BIAS,
    interleaved_rope: false,
    flags: &[],
    settings: &[
        KEY_VALUE_RANK,
        VALUE_WIDTH,
        shared_experts("1"),
        dense_layers("3"),
        expert_scale("2.5"),
        normalized("true"),
        Setting::optional("expert_group_count", "n_group", ["8", "1"]),
        Setting::optional("expert_group_used_count", "topk_group", ["4", "1"]),
    ],
    constants: &[gguf::SIGMOID_SCORES],
    required: &[
        gguf::NO_ATTENTION_BIAS,
        ("moe_layer_freq", "1"),
        // The epsilon of the normalizations of latent vectors is constant in transformers.
        ("rms_norm_eps", "1e-6"),
        ("rope_interleave", "true"),
        ("scoring_func", "\"sigmoid\""),
        ("topk_method", "\"noaux_tc\""),
    ],
    accepted: &["auto_map"],
    key_value_heads: Some(128),
    is_latent: true,
    experts: Some(GgufExperts { count: "n_routed_experts", normalized: None, ..gguf::QWEN_EXPERTS }),
    ..gguf::LLAMA
};

const KEY_VALUE_RANK: Setting = Setting::required("attention.kv_lora_rank", "kv_lora_rank", "512");
const VALUE_WIDTH: Setting = Setting::required("attention.value_length_mla", "v_head_dim", "128");

const fn shared_experts(default: &'static str) -> Setting {
    Setting::optional("expert_shared_count", "n_shared_experts", [default, "0"])
}

const fn dense_layers(default: &'static str) -> Setting {
    Setting::optional("leading_dense_block_count", "first_k_dense_replace", [default, "0"])
}

const fn expert_scale(default: &'static str) -> Setting {
    Setting::optional("expert_weights_scale", "routed_scaling_factor", [default, "1.0"])
}

const fn normalized(default: &'static str) -> Setting {
    Setting::optional("expert_weights_norm", "norm_topk_prob", [default, "false"])
}

const GGUF_2: GgufFamily = GgufFamily {
    class: "DeepseekV2ForCausalLM",
    tensors: &[],
    settings: &[KEY_VALUE_RANK, VALUE_WIDTH, shared_experts("2"), dense_layers("0"), expert_scale("1.0"), normalized("false")],
    constants: &[gguf::SOFTMAX_SCORES],
    has_group_methods: true,
    key_value_heads: None,
    required: &[
        gguf::NO_ATTENTION_BIAS,
        ("mlp_bias", "false"),
        ("moe_layer_freq", "1"),
        ("norm_topk_prob", "false"),
        ("rms_norm_eps", "1e-6"),
        ("scoring_func", "\"softmax\""),
    ],
    ..GGUF
};

/// Kimi K2, whose checkpoints contain a copy of the code of DeepSeek-V3.
pub(super) const KIMI_K2: Family = Family { model_type: "kimi_k2", ..DEEPSEEK_V3 };

#[cfg(feature = "run")]
pub(super) mod running {
    use crate::arch::running::Settings;
    use crate::arch::running::decoder::{Decoder, Norm, every_layer};
    use crate::arch::running::experts::{Experts, Shared};
    use crate::arch::running::latent::Latent;
    use crate::arch::running::rope::{RopeDefaults, attention_scale, parameters};
    use crate::error::{Error, Result};
    use crate::ir::Builder;
    use crate::ir::ops::{ExpertGroups, Route};

    pub fn build(s: &Settings, b: &mut Builder) -> Result<()> {
        decoder(s, b, Latent::new(s)?, mixture(s)?, (None, 1e-6))
    }

    pub fn build_3(s: &Settings, b: &mut Builder) -> Result<()> {
        let experts = Defaults { count: 256, top: 8, inner: 2048, scale: 2.5, groups: [8, 4], dense: 3 }.experts(s)?;
        decoder(s, b, latent(s, Latent::new(s)?)?, experts, (Some(128), 1e-6))
    }

    /// Latent attention with the options of DeepSeek-V3.
    pub fn latent(s: &Settings, latent: Latent) -> Result<Latent> {
        let width = s.size_or("qk_head_dim", latent.head_dim())?;
        if width != latent.head_dim() {
            return Err(Error::graph("config.json", format!("`qk_head_dim` is {width}, expected the sum of `qk_nope_head_dim` and `qk_rope_head_dim`")));
        }
        Ok(Latent { interleaved: s.flag_or("rope_interleave", true)?, ..latent })
    }

    /// A decoder with latent attention and experts, with defaults of the number of key-value heads, if it is
    /// not that of query heads, and of the epsilon of normalizations.
    pub fn decoder(s: &Settings, b: &mut Builder, latent: Latent, experts: Experts, (groups, epsilon): (Option<usize>, f64)) -> Result<()> {
        // Published folders refer to custom code, which transformers now includes.
        let _ = s.get("auto_map");
        let norm = Norm::rms(s, epsilon)?;
        let plain = Decoder::with_norm(s, Some(latent.head_dim()), groups, norm)?;
        if plain.groups != plain.heads {
            return Err(Error::graph(
                "config.json",
                format!(
                    "`num_key_value_heads` is {}, expected as many as `num_attention_heads`, {}: the keys of all heads are computed from one latent vector",
                    plain.groups, plain.heads
                ),
            ));
        }
        let head_dim = latent.head_dim();
        let mscale = match parameters(s)? {
            Some(p) => attention_scale(&p)?,
            None => 1.0,
        };
        let decoder = Decoder { head_dim, scale: mscale * mscale / (head_dim as f64).sqrt(), experts: Some(experts), latent: Some(latent), ..plain };
        decoder.build(b, every_layer(s, latent.rope, RopeDefaults::default(), |_| Ok(false))?)
    }

    /// The experts: from layer `first_k_dense_replace` on, with shared experts as one network
    /// of their total width.
    fn mixture(s: &Settings) -> Result<Experts> {
        const METHOD: &str = "topk_method";
        const SHARED: &str = "n_shared_experts";
        let experts = s.size_or("n_routed_experts", 64)?;
        // The greedy method ignores groups, but configurations may specify them.
        let [count, top] = ["n_group", "topk_group"].map(|key| if s.get(key).is_some() { s.size(key).map(Some) } else { Ok(None) });
        let (count, top) = (count?, top?);
        let groups = match s.text_or(METHOD, "greedy")? {
            "greedy" => None,
            "group_limited_greedy" => match (count, top) {
                (Some(count), Some(top)) if experts.is_multiple_of(count) && top <= count => limiting(ExpertGroups { count, top, pairs: false }),
                (Some(count), Some(top)) => {
                    let reason = format!("`n_group` of {count} does not divide `n_routed_experts`, {experts}, or `topk_group` of {top} is more than that");
                    return Err(Error::graph("config.json", reason));
                }
                _ => return Err(Error::graph("config.json", format!("`{METHOD}` of group_limited_greedy needs `n_group` and `topk_group`"))),
            },
            other => {
                return Err(Error::Unsupported { what: format!("config.json: `{METHOD}` of {other}"), hint: "supported: greedy, group_limited_greedy".into() });
            }
        };
        let inner = s.size_or("moe_intermediate_size", 1407)?;
        let shared = match s.is_null(SHARED) {
            true => None,
            false => Some(Shared { module: "mlp.shared_experts", inner: inner.saturating_mul(s.size_or(SHARED, 2)?), gated: false }),
        };
        Ok(Experts {
            count: experts,
            route: Route { top: s.size("num_experts_per_tok")?, scale: s.number_or("routed_scaling_factor", 1.0)?, groups, ..Route::default() },
            inner,
            shared,
            first: first_layer(s, 0)?,
            ..Experts::default()
        })
    }

    /// Groups, unless routers select all of them.
    fn limiting(groups: ExpertGroups) -> Option<ExpertGroups> {
        Some(groups).filter(|groups| groups.top < groups.count)
    }

    /// Defaults of a mixture of experts with the routers of DeepSeek-V3.
    pub struct Defaults {
        /// Number of experts.
        pub count: usize,
        /// Number of experts per token.
        pub top: usize,
        /// Number of neurons of an expert.
        pub inner: usize,
        /// Factor on routing weights.
        pub scale: f64,
        /// Number of groups, and of groups per token.
        pub groups: [usize; 2],
        /// Number of layers without experts.
        pub dense: usize,
    }

    impl Defaults {
        /// The experts of a configuration.
        pub fn experts(&self, s: &Settings) -> Result<Experts> {
            let inner = s.size_or("moe_intermediate_size", self.inner)?;
            let [count, top] = [s.size_or("n_routed_experts", self.count)?, s.size_or("num_experts_per_tok", self.top)?];
            let [all, selected] = self.groups;
            let groups = ExpertGroups { count: s.size_or("n_group", all)?, top: s.size_or("topk_group", selected)?, pairs: true };
            let each = count.checked_div(groups.count).filter(|_| count.is_multiple_of(groups.count));
            if each.is_none_or(|each| groups.top > groups.count || each.saturating_mul(groups.top) < top) {
                let reason = format!(
                    "`n_group` of {} does not divide `n_routed_experts`, {count}, or `topk_group` of {} leaves less than `num_experts_per_tok`, {top}",
                    groups.count, groups.top
                );
                return Err(Error::graph("config.json", reason));
            }
            Ok(Experts {
                count,
                route: Route {
                    top,
                    normalised: s.flag_or("norm_topk_prob", true)?,
                    scale: s.number_or("routed_scaling_factor", self.scale)?,
                    groups: limiting(groups),
                    sigmoid: true,
                },
                inner,
                selection_bias: Some("gate.e_score_correction_bias"),
                shared: Some(Shared { module: "mlp.shared_experts", inner: inner.saturating_mul(s.size_or("n_shared_experts", 1)?), gated: false }),
                first: first_layer(s, self.dense)?,
                ..Experts::default()
            })
        }
    }

    fn first_layer(s: &Settings, default: usize) -> Result<usize> {
        const KEY: &str = "first_k_dense_replace";
        let Some(value) = s.get(KEY) else { return Ok(default) };
        let found = value.as_u64().and_then(|number| usize::try_from(number).ok());
        found.ok_or_else(|| Error::graph("config.json", format!("`{KEY}` is {value}, expected the number of layers without experts")))
    }
}
