//! Llama and similar families: Mistral, Qwen2, Qwen3.

use super::gguf::{self, GgufFamily};
use super::{DECODER, DECODER_SIZES, Family, Keys, Sizes};

pub(super) const KEYS: Keys = Keys {
    // Llama has no sliding window, and `max_position_embeddings` only matters for some kinds of rope
    // scaling.
    harmless: &["attention_dropout", "max_position_embeddings", "max_window_layers", "pretraining_tp", "sliding_window", "use_sliding_window"],
    neutral: &[("layer_types", "[]"), ("partial_rotary_factor", "1.0")],
};

pub(super) const LLAMA: Family = Family {
    model_type: "llama",
    graph: graph!(running::build),
    keys: KEYS,
    sizes: Some(&Sizes { heads_must_divide: true, ..DECODER_SIZES }),
    gguf: Some(&gguf::LLAMA),
    genai: "llama",
    ..DECODER
};

pub(super) const MISTRAL: Family = Family {
    model_type: "mistral",
    graph: graph!(running::build_mistral),
    keys: KEYS,
    gguf: Some(&GgufFamily { drops_window: true, ..gguf::LLAMA }),
    genai: "mistral",
    ..DECODER
};

pub(super) const QWEN2: Family = Family {
    model_type: "qwen2",
    graph: graph!(running::build_qwen2),
    keys: KEYS,
    gguf: Some(&GgufFamily {
        architecture: "qwen2",
        class: "Qwen2ForCausalLM",
        interleaved_rope: false,
        flags: &[],
        required: &[gguf::NO_ATTENTION_BIAS],
        ..gguf::LLAMA
    }),
    genai: "qwen2",
    ..DECODER
};

pub(super) const QWEN3: Family = Family {
    model_type: "qwen3",
    graph: graph!(running::build_qwen3),
    keys: KEYS,
    // The default head width is not derived from the residual stream.
    sizes: Some(&Sizes { custom_head_dim_default: true, ..DECODER_SIZES }),
    gguf: Some(&GgufFamily {
        architecture: "qwen3",
        class: "Qwen3ForCausalLM",
        layer: &[gguf::NORM_OF_ATTENTION, gguf::ATTENTION, gguf::HEAD_NORMS, gguf::NORM_BEFORE, gguf::NETWORK],
        interleaved_rope: false,
        flags: &[gguf::ATTENTION_BIAS],
        required: &[gguf::NO_ATTENTION_BIAS],
        head_dim: Some(128),
        ..gguf::LLAMA
    }),
    genai: "qwen3",
    ..DECODER
};

#[cfg(feature = "run")]
pub(super) mod running {
    use crate::arch::running::Settings;
    use crate::arch::running::decoder::{Decoder, HeadNorms, every_layer, slides};
    use crate::arch::running::rope::RopeDefaults;
    use crate::error::Result;
    use crate::ir::Builder;

    pub fn build(s: &Settings, b: &mut Builder) -> Result<()> {
        let decoder = Decoder::new(s, None)?;
        decoder.build(b, every_layer(s, decoder.head_dim, RopeDefaults::default(), |_| Ok(false))?)
    }

    pub fn build_mistral(s: &Settings, b: &mut Builder) -> Result<()> {
        let decoder = Decoder::new(s, None)?;
        decoder.build(b, every_layer(s, decoder.head_dim, RopeDefaults::default(), |_| Ok(true))?)
    }

    pub fn build_qwen2(s: &Settings, b: &mut Builder) -> Result<()> {
        let decoder = Decoder { qkv_bias: true, out_bias: false, ..Decoder::new(s, None)? };
        decoder.build(b, every_layer(s, decoder.head_dim, RopeDefaults::default(), |index| slides_by_number(s, index, 28))?)
    }

    pub fn build_qwen3(s: &Settings, b: &mut Builder) -> Result<()> {
        let decoder = Decoder { head_norms: HeadNorms::Head, ..Decoder::new(s, Some(128))? };
        decoder.build(b, every_layer(s, decoder.head_dim, RopeDefaults::default(), |index| slides_by_number(s, index, 28))?)
    }

    /// Whether a layer of Qwen has a sliding window: by its type, or by its index, from a number on with this
    /// default.
    pub fn slides_by_number(s: &Settings, layer: usize, default: i64) -> Result<bool> {
        let (first, used) = (s.token_or("max_window_layers", default)?, s.flag_or("use_sliding_window", false)?);
        let by_type = slides(s, layer, used)?;
        Ok(by_type.unwrap_or_else(|| used && i64::try_from(layer).is_ok_and(|layer| layer >= first)))
    }
}
