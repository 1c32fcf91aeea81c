//! OLMo 2: post-norm of attention and network; queries and keys are normalized over all heads.

use super::decoder::{Decoder, HeadNorms, every_layer};
use super::rope::RopeDefaults;
use super::{Keys, Settings};
use crate::error::Result;
use crate::ir::Builder;

pub(super) const KEYS: Keys =
    Keys { harmless: &["attention_dropout", "max_position_embeddings"], neutral: &[("clip_qkv", "null"), ("partial_rotary_factor", "1.0")] };

pub(super) fn build(s: &Settings, b: &mut Builder) -> Result<()> {
    let norms = [None, Some("post_attention_layernorm"), None, Some("post_feedforward_layernorm")];
    let decoder = Decoder { norms, head_norms: HeadNorms::Projection, mlp_bias: false, ..Decoder::with_epsilon(s, None, 1e-5)? };
    decoder.build(b, every_layer(s, decoder.head_dim, RopeDefaults::default(), |_| Ok(false))?)
}
