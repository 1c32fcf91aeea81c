//! Llama and its nearest relatives: Mistral, Qwen2, Qwen3.

use super::decoder::{self, Decoder, HeadNorms, every_layer, slides};
use super::resize::Sizes;
use super::rope::RopeDefaults;
use super::{Keys, Settings};
use crate::error::Result;
use crate::ir::Builder;

pub(super) const KEYS: Keys = Keys {
    // Llama has no windows, and only some scalings of rotary positions know how many there are.
    harmless: &["attention_dropout", "max_position_embeddings", "max_window_layers", "pretraining_tp", "sliding_window", "use_sliding_window"],
    neutral: &[("layer_types", "[]"), ("partial_rotary_factor", "1.0")],
};

pub(super) const SIZES: Sizes = Sizes { heads_divide: true, ..decoder::SIZES };

/// Heads of Qwen3 have a width of their own where nothing is said.
pub(super) const QWEN3_SIZES: Sizes = Sizes { own_head_dim: true, ..decoder::SIZES };

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

/// Whether a layer of Qwen has a window: by its type, or from a number on.
pub(super) fn slides_by_number(s: &Settings, layer: usize) -> Result<bool> {
    let (first, used) = (s.token_or("max_window_layers", 28)?, s.flag_or("use_sliding_window", false)?);
    let by_type = slides(s, layer, used)?;
    Ok(by_type.unwrap_or_else(|| used && i64::try_from(layer).is_ok_and(|layer| layer >= first)))
}
