//! DeepSeek-V2: latent attention, partial rotary embeddings, and experts after the first layers.

use super::decoder::{self, Decoder, every_layer};
use super::experts;
use super::latent::Latent;
use super::resize::Sizes;
use super::rope::{RopeDefaults, attention_scale, parameters};
use super::{Keys, Settings};
use crate::error::{Error, Result};
use crate::ir::Builder;

pub(super) const KEYS: Keys = Keys {
    // Load balancing of experts only affects training, and the head widths are derived from other keys.
    harmless: &[
        "attention_dropout",
        "aux_loss_alpha",
        "ep_size",
        "head_dim",
        "intermediate_size",
        "max_position_embeddings",
        "output_router_logits",
        "pretraining_tp",
        "qk_head_dim",
        "seq_aux",
    ],
    neutral: &[("layer_types", "[]"), ("moe_layer_freq", "1"), ("norm_topk_prob", "false"), ("partial_rotary_factor", "1.0"), ("scoring_func", "\"softmax\"")],
};

pub(super) const SIZES: Sizes = Sizes {
    heads: ("num_attention_heads", "layers.0.self_attn.q_proj.weight", 0),
    groups: None,
    head_dim: None,
    heads_must_divide: true,
    other_sizes: &[("moe_intermediate_size", "layers.0.mlp.experts.0.down_proj.weight", 1), ("intermediate_size", "layers.0.mlp.down_proj.weight", 1)],
    ..decoder::SIZES
};

pub(super) fn build(s: &Settings, b: &mut Builder) -> Result<()> {
    // Published folders refer to custom code, which transformers now includes.
    let _ = s.get("auto_map");
    let latent = Latent::new(s)?;
    let plain = Decoder::new(s, Some(latent.head_dim()))?;
    if plain.groups != plain.heads {
        return Err(Error::graph(
            "config.json",
            format!(
                "`num_key_value_heads` is {}, expected as many as `num_attention_heads`, {}: the keys of all heads are computed from one latent vector",
                plain.groups, plain.heads
            ),
        ));
    }
    let head_dim = latent.head_dim();
    let mscale = match parameters(s)? {
        Some(p) => attention_scale(&p)?,
        None => 1.0,
    };
    let decoder = Decoder { head_dim, scale: mscale * mscale / (head_dim as f64).sqrt(), experts: Some(experts::deepseek(s)?), latent: Some(latent), ..plain };
    decoder.build(b, every_layer(s, latent.rope, RopeDefaults::default(), |_| Ok(false))?)
}
