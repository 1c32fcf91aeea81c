//! OLMo 2: post-norm of attention and network; queries and keys are normalized over all heads.

use super::gguf::{self, GgufFamily, GgufHead, Setting};
use super::{DECODER, Family, Keys};

pub(super) const GGUF: GgufFamily = GgufFamily {
    architecture: "olmo2",
    class: "Olmo2ForCausalLM",
    layer: &[gguf::ATTENTION, gguf::HEAD_NORMS, gguf::NORMS_AFTER, gguf::NETWORK],
    interleaved_rope: false,
    epsilon: Setting { default: "1e-5", ..gguf::RMS_EPSILON },
    flags: &[],
    required: &[gguf::NO_ATTENTION_BIAS],
    has_implied_heads: true,
    head: GgufHead::Separate,
    ..gguf::LLAMA
};

pub(super) const OLMO2: Family = Family {
    model_type: "olmo2",
    graph: graph!(running::build),
    keys: Keys { harmless: &["attention_dropout", "max_position_embeddings"], neutral: &[("clip_qkv", "null"), ("partial_rotary_factor", "1.0")] },
    gguf: Some(&GGUF),
    ..DECODER
};

#[cfg(feature = "run")]
mod running {
    use crate::arch::running::Settings;
    use crate::arch::running::decoder::{Decoder, HeadNorms, every_layer};
    use crate::arch::running::rope::RopeDefaults;
    use crate::error::Result;
    use crate::ir::Builder;

    pub fn build(s: &Settings, b: &mut Builder) -> Result<()> {
        let norms = [None, Some("post_attention_layernorm"), None, Some("post_feedforward_layernorm")];
        let decoder = Decoder { norms, head_norms: HeadNorms::Projection, mlp_bias: false, ..Decoder::with_epsilon(s, None, 1e-5)? };
        decoder.build(b, every_layer(s, decoder.head_dim, RopeDefaults::default(), |_| Ok(false))?)
    }
}
