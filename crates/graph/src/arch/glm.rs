//! GLM-4: partial rotary embeddings of neighboring elements, and one projection for gate and up. The later
//! version also normalizes the outputs of attention and feed-forward network.

use super::gguf::{self, GgufFamily, Pair, Setting};
use super::{DECODER, DECODER_SIZES, Family, Keys, Sizes};

const FUSED_NETWORK: &[Pair] = &[("ffn_up", "mlp.gate_up_proj"), ("ffn_down", "mlp.down_proj")];

const GGUF: GgufFamily = GgufFamily {
    architecture: "chatglm",
    class: "GlmForCausalLM",
    layer: &[gguf::NORM_OF_ATTENTION, gguf::ATTENTION, gguf::NORM_BEFORE, FUSED_NETWORK],
    interleaved_rope: false,
    epsilon: Setting { default: "1.5625e-7", ..gguf::RMS_EPSILON },
    flags: &[gguf::ATTENTION_BIAS],
    head_dim: Some(128),
    has_implied_heads: true,
    partial_rotary: Some(("partial_rotary_factor", 0.5)),
    key_value_heads: Some(2),
    ..gguf::LLAMA
};

pub(super) const GLM: Family = Family {
    model_type: "glm",
    graph: graph!(running::build),
    keys: Keys { harmless: &["attention_dropout", "max_position_embeddings"], neutral: &[] },
    // The default head width is not derived from the residual stream.
    sizes: Some(&Sizes { custom_head_dim_default: true, ..DECODER_SIZES }),
    fused: &[&["q_proj", "k_proj", "v_proj"]],
    gguf: Some(&GGUF),
    ..DECODER
};

pub(super) const GLM4: Family = Family {
    model_type: "glm4",
    graph: graph!(running::build_4),
    gguf: Some(&GgufFamily {
        architecture: "glm4",
        class: "Glm4ForCausalLM",
        layer: &[
            gguf::NORM_OF_ATTENTION,
            gguf::ATTENTION,
            &[("post_attention_norm", "post_self_attn_layernorm"), ("ffn_norm", "post_attention_layernorm"), ("post_ffw_norm", "post_mlp_layernorm")],
            FUSED_NETWORK,
        ],
        has_implied_heads: false,
        ..GGUF
    }),
    ..GLM
};

#[cfg(feature = "run")]
mod running {
    use crate::arch::running::Settings;
    use crate::arch::running::decoder::{Decoder, NORMS_BEFORE, Norm, Norms, every_layer};
    use crate::arch::running::rope::RopeDefaults;
    use crate::error::Result;
    use crate::ir::Builder;

    pub fn build(s: &Settings, b: &mut Builder) -> Result<()> {
        glm(s, b, NORMS_BEFORE)
    }

    pub fn build_4(s: &Settings, b: &mut Builder) -> Result<()> {
        glm(s, b, [Some("input_layernorm"), Some("post_self_attn_layernorm"), Some("post_attention_layernorm"), Some("post_mlp_layernorm")])
    }

    fn glm(s: &Settings, b: &mut Builder, norms: Norms) -> Result<()> {
        let norm = Norm::rms(s, 1.5625e-7)?;
        let decoder = Decoder {
            norms,
            interleaved: true,
            fused_gate: Some("gate_up_proj"),
            qkv_bias: s.flag_or("attention_bias", true)?,
            out_bias: false,
            mlp_bias: false,
            ..Decoder::with_norm(s, Some(128), Some(2), norm)?
        };
        let rope = RopeDefaults { partial: Some(("partial_rotary_factor", 0.5)), ..RopeDefaults::default() };
        decoder.build(b, every_layer(s, decoder.head_dim, rope, |_| Ok(false))?)
    }
}
