//! ERNIE 4.5: rotary embeddings of neighboring elements.

use super::gguf::{self, GgufFamily, Setting};
use super::{DECODER, DECODER_SIZES, Family, Keys, Sizes};

pub(super) const ERNIE4_5: Family = Family {
    model_type: "ernie4_5",
    graph: graph!(running::build),
    keys: Keys { harmless: &["max_position_embeddings"], neutral: &[("partial_rotary_factor", "1.0")] },
    // The default head width is not derived from the residual stream.
    sizes: Some(&Sizes { custom_head_dim_default: true, ..DECODER_SIZES }),
    gguf: Some(&GgufFamily {
        architecture: "ernie4_5",
        class: "Ernie4_5ForCausalLM",
        interleaved_rope: false,
        epsilon: Setting { default: "1e-5", ..gguf::RMS_EPSILON },
        flags: &[],
        required: &[("use_bias", "false")],
        head_dim: Some(128),
        theta: 500_000.0,
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
        let norm = Norm::rms(s, 1e-5)?;
        let head_dim = Some(128).filter(|_| !s.is_null("head_dim"));
        let bias = s.flag_or("use_bias", false)?;
        let decoder = Decoder { interleaved: true, qkv_bias: bias, out_bias: bias, mlp_bias: bias, ..Decoder::with_norm(s, head_dim, Some(2), norm)? };
        decoder.build(b, every_layer(s, decoder.head_dim, RopeDefaults { theta: 500_000.0, ..RopeDefaults::default() }, |_| Ok(false))?)
    }
}
