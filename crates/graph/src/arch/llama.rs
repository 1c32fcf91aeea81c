//! Llama and similar families: Mistral, Qwen2, Qwen3.

use super::decoder::{self, Decoder, HeadNorms, every_layer, slides};
use super::resize::Sizes;
use super::rope::RopeDefaults;
use super::{Keys, Settings};
use crate::error::Result;
use crate::ir::Builder;

pub(super) const KEYS: Keys = Keys {
    // Llama has no sliding window, and `max_position_embeddings` only matters for some kinds of rope
    // scaling.
    harmless: &["attention_dropout", "max_position_embeddings", "max_window_layers", "pretraining_tp", "sliding_window", "use_sliding_window"],
    neutral: &[("layer_types", "[]"), ("partial_rotary_factor", "1.0")],
};

pub(super) const SIZES: Sizes = Sizes { heads_must_divide: true, ..decoder::SIZES };

/// The default head width of Qwen3 is not derived from the residual stream.
pub(super) const QWEN3_SIZES: Sizes = Sizes { custom_head_dim_default: true, ..decoder::SIZES };

pub(super) fn build(s: &Settings, b: &mut Builder) -> Result<()> {
    let decoder = Decoder::new(s, None)?;
    decoder.build(b, every_layer(s, decoder.head_dim, RopeDefaults::default(), |_| Ok(false))?)
}

pub(super) fn build_mistral(s: &Settings, b: &mut Builder) -> Result<()> {
    let decoder = Decoder::new(s, None)?;
    decoder.build(b, every_layer(s, decoder.head_dim, RopeDefaults::default(), |_| Ok(true))?)
}

pub(super) fn build_qwen2(s: &Settings, b: &mut Builder) -> Result<()> {
    let decoder = Decoder { qkv_bias: true, out_bias: false, ..Decoder::new(s, None)? };
    decoder.build(b, every_layer(s, decoder.head_dim, RopeDefaults::default(), |index| slides_by_number(s, index))?)
}

pub(super) fn build_qwen3(s: &Settings, b: &mut Builder) -> Result<()> {
    let decoder = Decoder { head_norms: HeadNorms::Head, ..Decoder::new(s, Some(128))? };
    decoder.build(b, every_layer(s, decoder.head_dim, RopeDefaults::default(), |index| slides_by_number(s, index))?)
}

/// Whether a layer of Qwen has a sliding window: by its type, or by its index.
pub(super) fn slides_by_number(s: &Settings, layer: usize) -> Result<bool> {
    let (first, used) = (s.token_or("max_window_layers", 28)?, s.flag_or("use_sliding_window", false)?);
    let by_type = slides(s, layer, used)?;
    Ok(by_type.unwrap_or_else(|| used && i64::try_from(layer).is_ok_and(|layer| layer >= first)))
}
