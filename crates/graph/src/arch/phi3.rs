//! Phi-3 and Phi-4: fused projections of queries, keys and values and of gate and up, and partial rotary
//! embeddings.

use super::decoder::{self, Decoder, every_layer};
use super::resize::{Groups, Sizes};
use super::rope::{RopeDefaults, kind, parameters};
use super::{Keys, Settings};
use crate::error::{Error, Result};
use crate::ir::Builder;

pub(super) const KEYS: Keys = Keys {
    harmless: &["attention_dropout", "embd_pdrop", "max_position_embeddings", "original_max_position_embeddings", "resid_pdrop"],
    neutral: &[("full_attn_mod", "1"), ("interpolate_factor", "1"), ("lm_head_bias", "false")],
};

pub(super) const SIZES: Sizes = Sizes { groups: Some(("num_key_value_heads", "layers.0.self_attn.qkv_proj.weight", Groups::Fused)), ..decoder::SIZES };

pub(super) fn build(s: &Settings, b: &mut Builder) -> Result<()> {
    // Published folders refer to custom code, which transformers now includes.
    let _ = s.get("auto_map");
    let decoder = Decoder { fused: true, qkv_bias: false, out_bias: false, ..Decoder::with_epsilon(s, None, 1e-5)? };
    let kind = parameters(s)?.map_or(Ok("default"), |p| kind(&p))?;
    if !["default", "longrope", "su"].contains(&kind) {
        return Err(Error::Unsupported { what: format!("rope scaling `{kind}` of Phi-3"), hint: "supported: default, longrope".into() });
    }
    let rope = RopeDefaults { partial: Some(("partial_rotary_factor", 1.0)), original: Some(4096), ..RopeDefaults::default() };
    decoder.build(b, every_layer(s, decoder.head_dim, rope, |_| Ok(s.get("sliding_window").is_some()))?)
}
