//! gpt-oss: attention sinks, sliding windows in every second layer, and mixtures of experts with clamped
//! values and biases.

use super::gguf::{self, GgufExperts, GgufFamily, GgufHead, Setting, Windows};
use super::{DECODER, DECODER_SIZES, ExpertLayout, Family, Keys, Sizes};

pub(super) const GPT_OSS: Family = Family {
    model_type: "gpt_oss",
    graph: graph!(running::build),
    keys: Keys {
        // Load balancing of experts only affects training. Published files have two names of some keys.
        harmless: &[
            "attention_dropout",
            "experts_per_token",
            "initial_context_length",
            "max_position_embeddings",
            "output_router_logits",
            "router_aux_loss_coef",
        ],
        neutral: &[("partial_rotary_factor", "1.0")],
    },
    // The default head width is not derived from the residual stream.
    sizes: Some(&Sizes { custom_head_dim_default: true, other_sizes: &[("intermediate_size", "layers.0.mlp.experts.down_proj", 1)], ..DECODER_SIZES }),
    fused: &[&["q_proj", "k_proj", "v_proj"]],
    routers: &["mlp.router"],
    experts: Some(ExpertLayout { keys: &["num_local_experts"], parts: None, ..ExpertLayout::SEPARATE }),
    gguf: Some(&GgufFamily {
        architecture: "gpt-oss",
        class: "GptOssForCausalLM",
        layer: &[gguf::NORM_OF_ATTENTION, gguf::ATTENTION, &[("post_attention_norm", "post_attention_layernorm"), ("ffn_gate_inp", "mlp.router")]],
        tensors: &[("attn_sinks.weight", "self_attn.sinks")],
        interleaved_rope: false,
        epsilon: Setting { default: "1e-5", ..gguf::RMS_EPSILON },
        flags: &[],
        required: &[("attention_bias", "true"), ("swiglu_alpha", "1.702"), ("swiglu_limit", "7.0")],
        head_dim: Some(64),
        theta: 150_000.0,
        yarn_truncate: Some(false),
        head: GgufHead::Separate,
        windows: Windows::Listed(2),
        default_window: Some(128),
        experts: Some(GgufExperts {
            count: "num_local_experts",
            normalized: None,
            inner: Some("intermediate_size"),
            is_input_major: true,
            alternates: true,
            ..gguf::QWEN_EXPERTS
        }),
        key_value_heads: Some(8),
        ..gguf::LLAMA
    }),
    ..DECODER
};

#[cfg(feature = "run")]
mod running {
    use crate::arch::running::Settings;
    use crate::arch::running::decoder::{Decoder, Layer, Norm, is_local, required_window};
    use crate::arch::running::experts::{Clamped, Experts};
    use crate::arch::running::rope::{RopeDefaults, parameters, rotary};
    use crate::error::{Error, Result};
    use crate::ir::Builder;
    use crate::ir::ops::Route;

    pub fn build(s: &Settings, b: &mut Builder) -> Result<()> {
        let norm = Norm::rms(s, 1e-5)?;
        let head_dim = Some(64).filter(|_| !s.is_null("head_dim"));
        let bias = s.flag_or("attention_bias", true)?;
        let experts = Experts {
            count: s.size_or("num_local_experts", 128)?,
            // Routers select by logits, and normalize the weights of the selected experts.
            route: Route { top: s.size_or("num_experts_per_tok", 4)?, normalised: true, ..Route::default() },
            inner: s.size("intermediate_size")?,
            router: "router",
            router_bias: true,
            clamped: Some(Clamped { slope: s.number_or("swiglu_alpha", 1.702)?, limit: s.number_or("swiglu_limit", 7.0)? }),
            ..Experts::default()
        };
        let decoder = Decoder { sinks: true, qkv_bias: bias, out_bias: bias, experts: Some(experts), ..Decoder::with_norm(s, head_dim, Some(8), norm)? };
        if parameters(s)?.is_none() {
            return Err(Error::graph("config.json", "has neither `rope_parameters` nor `rope_scaling`"));
        }
        let rotary = rotary(s, decoder.head_dim, RopeDefaults { theta: 150_000.0, ..RopeDefaults::default() })?;
        decoder.build(b, |index| {
            let window = required_window(s, is_local(s, index, 2)?)?;
            Ok(Layer { rotary: Some(rotary.clone()), window: window.map(|_| s.size_or("sliding_window", 128)).transpose()?, ..Layer::default() })
        })
    }
}
