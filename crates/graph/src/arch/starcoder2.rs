//! StarCoder2: layer normalization, and feed-forward networks without a gate.

use super::gguf::{self, GgufFamily, Setting};
use super::{DECODER, DECODER_SIZES, Family, Keys, Sizes};

pub(super) const STARCODER2: Family = Family {
    model_type: "starcoder2",
    graph: graph!(running::build),
    keys: Keys {
        harmless: &[
            "attention_dropout",
            "attention_softmax_in_fp32",
            "embedding_dropout",
            "layer_norm_epsilon",
            "max_position_embeddings",
            "residual_dropout",
            "scale_attention_softmax_in_fp32",
        ],
        neutral: &[("mlp_type", "\"default\""), ("norm_type", "\"layer_norm\""), ("partial_rotary_factor", "1.0"), ("scale_attn_weights", "true")],
    },
    sizes: Some(&Sizes { other_sizes: &[("intermediate_size", "layers.0.mlp.c_proj.weight", 1)], ..DECODER_SIZES }),
    fused: &[&["q_proj", "k_proj", "v_proj"]],
    gguf: Some(&GgufFamily {
        architecture: "starcoder2",
        class: "Starcoder2ForCausalLM",
        layer: &[gguf::NORM_OF_ATTENTION, gguf::ATTENTION, gguf::NORM_BEFORE, &[("ffn_up", "mlp.c_fc"), ("ffn_down", "mlp.c_proj")]],
        interleaved_rope: false,
        epsilon: Setting { key: "norm_epsilon", ..gguf::LAYER_EPSILON },
        flags: &[],
        required: &[("use_bias", "true")],
        has_implied_heads: true,
        activation: ("hidden_act", "gelu_pytorch_tanh"),
        drops_window: true,
        key_value_heads: Some(2),
        ..gguf::LLAMA
    }),
    ..DECODER
};

#[cfg(feature = "run")]
mod running {
    use crate::arch::running::Settings;
    use crate::arch::running::decoder::{Decoder, Norm, every_layer};
    use crate::arch::running::rope::RopeDefaults;
    use crate::error::Result;
    use crate::ir::Builder;

    pub fn build(s: &Settings, b: &mut Builder) -> Result<()> {
        let norm = Norm::Layer { epsilon: s.number_or("norm_epsilon", 1e-5)?, bias: true };
        let bias = s.flag_or("use_bias", true)?;
        let decoder = Decoder {
            qkv_bias: bias,
            out_bias: bias,
            mlp_bias: bias,
            ungated: Some(["c_fc", "c_proj"]),
            activation: s.text_or("hidden_act", "gelu_pytorch_tanh")?,
            ..Decoder::with_norm(s, None, Some(2), norm)?
        };
        decoder.build(b, every_layer(s, decoder.head_dim, RopeDefaults::default(), |_| Ok(s.get("sliding_window").is_some()))?)
    }
}
