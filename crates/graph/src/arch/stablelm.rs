//! StableLM: layer normalization, partial rotary embeddings, and optionally attention and feed-forward
//! network side by side.

use super::gguf::{self, GgufFamily, GgufHead, Setting};
use super::{DECODER, DECODER_SIZES, Family, Keys, Sizes};

pub(super) const STABLELM: Family = Family {
    model_type: "stablelm",
    graph: graph!(running::build),
    keys: Keys { harmless: &["attention_dropout", "hidden_dropout", "max_position_embeddings"], neutral: &[("qk_layernorm", "false"), ("rope_pct", "0.25")] },
    sizes: Some(&Sizes { head_dim: None, heads_must_divide: true, ..DECODER_SIZES }),
    gguf: Some(&GgufFamily {
        architecture: "stablelm",
        class: "StableLmForCausalLM",
        interleaved_rope: false,
        epsilon: gguf::LAYER_EPSILON,
        flags: &[("use_qkv_bias", "attn_q.bias")],
        // llama.cpp ignores the key of the file, which its converter sets if config.json has none.
        absences: &[("use_parallel_residual", "ffn_norm.weight")],
        settings: &[Setting::optional("use_parallel_residual", "use_parallel_residual", ["false", "false"])],
        required: &[("qk_layernorm", "false")],
        has_implied_heads: true,
        partial_rotary: Some(("partial_rotary_factor", 0.25)),
        head: GgufHead::Separate,
        key_value_heads: Some(32),
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
        let norm = Norm::Layer { epsilon: s.number_or("layer_norm_eps", 1e-5)?, bias: true };
        let decoder = Decoder {
            parallel: s.flag_or("use_parallel_residual", false)?,
            qkv_bias: s.flag_or("use_qkv_bias", false)?,
            out_bias: false,
            mlp_bias: false,
            ..Decoder::with_norm(s, None, Some(32), norm)?
        };
        let rope = RopeDefaults { partial: Some(("partial_rotary_factor", 0.25)), ..RopeDefaults::default() };
        decoder.build(b, every_layer(s, decoder.head_dim, rope, |_| Ok(false))?)
    }
}
