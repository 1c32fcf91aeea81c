//! Vision transformer: base, image classification.

use super::parts::{activation, attend, image_input, layer_norm, linear, linear_with};
use super::resize::Sizes;
use super::{Keys, Settings};
use crate::error::{Error, Result};
use crate::ir::ops::{Add, Conv, Patchify, Prepend, Select};
use crate::ir::{Builder, Dim};

pub(super) const KEYS: Keys = Keys {
    // The pooler's only where there is none.
    harmless: &["attention_probs_dropout_prob", "encoder_stride", "hidden_dropout_prob", "pooler_act", "pooler_output_size"],
    neutral: &[],
};

pub(super) const SIZES: Sizes = Sizes {
    prefixes: &["vit.", ""],
    hidden: ("hidden_size", "embeddings.cls_token", 2),
    heads: ("num_attention_heads", "encoder.layer.0.attention.attention.query.weight", 0),
    groups: None,
    head_dim: None,
    own_head_dim: false,
    heads_divide: false,
    others: &[("intermediate_size", "encoder.layer.0.intermediate.dense.weight", 0)],
    layers: "num_hidden_layers",
};

pub(super) fn build(s: &Settings, b: &mut Builder) -> Result<()> {
    let prefix = if b.has("vit.embeddings.cls_token") { "vit." } else { "" };
    let (hidden, epsilon) = (s.size("hidden_size")?, s.number_or("layer_norm_eps", 1e-12)?);
    let head_dim = s.head_dim("hidden_size", "num_attention_heads")?;
    let (image, patch, channels) = (s.size_or("image_size", 224)?, s.size_or("patch_size", 16)?, s.size_or("num_channels", 3)?);
    let side = image.checked_div(patch).filter(|_| image.is_multiple_of(patch));
    let side = side.ok_or_else(|| Error::graph("config.json", format!("`image_size` {image} is no multiple of `patch_size` {patch}")))?;
    let pixels = image_input(b, channels, Dim::Fixed(image), Dim::Fixed(image))?;
    let projection = format!("{prefix}embeddings.patch_embeddings.projection");
    let inputs = [pixels, b.param(&format!("{projection}.weight"), &[hidden, channels, patch, patch])?, b.param(&format!("{projection}.bias"), &[hidden])?];
    let patches = b.node("embeddings.patch_embeddings.projection", Conv { stride: patch.into(), ..Conv::default() }, &inputs)?;
    let patches = b.node("embeddings.patch_embeddings", Patchify {}, &[patches])?;
    let token = b.param(&format!("{prefix}embeddings.cls_token"), &[1, 1, hidden])?;
    let sequence = b.node("embeddings.with_cls_token", Prepend {}, &[token, patches])?;
    let positions = b.param(&format!("{prefix}embeddings.position_embeddings"), &[1, side.saturating_mul(side).saturating_add(1), hidden])?;
    let qkv_bias = s.flag_or("qkv_bias", true)?;
    let mut x = b.node("embeddings", Add {}, &[sequence, positions])?;
    for index in 0..s.size("num_hidden_layers")? {
        let node = format!("encoder.layer.{index}");
        let module = format!("{prefix}{node}");
        let normed = layer_norm(b, &format!("{node}.layernorm_before"), &format!("{module}.layernorm_before"), x, epsilon)?;
        let mut qkv = [normed; 3];
        for (value, part) in qkv.iter_mut().zip(["query", "key", "value"]) {
            *value = linear_with(b, &format!("{node}.attention.attention.{part}"), &format!("{module}.attention.attention.{part}"), normed, hidden, qkv_bias)?;
        }
        let context = attend(b, &format!("{node}.attention.attention"), qkv, head_dim, None, false)?;
        let out = linear(b, &format!("{node}.attention.output.dense"), &format!("{module}.attention.output.dense"), context, hidden)?;
        x = b.node(&format!("{node}.attended"), Add {}, &[out, x])?;
        let normed = layer_norm(b, &format!("{node}.layernorm_after"), &format!("{module}.layernorm_after"), x, epsilon)?;
        let wide = linear(b, &format!("{node}.intermediate.dense"), &format!("{module}.intermediate.dense"), normed, s.size("intermediate_size")?)?;
        let active = b.node(&format!("{node}.intermediate.act"), activation(s.text_or("hidden_act", "gelu")?)?, &[wide])?;
        let out = linear(b, &format!("{node}.output.dense"), &format!("{module}.output.dense"), active, hidden)?;
        x = b.node(&node, Add {}, &[out, x])?;
    }
    let x = layer_norm(b, "layernorm", &format!("{prefix}layernorm"), x, epsilon)?;
    b.output("last_hidden_state", x);
    let pooler = format!("{prefix}pooler.dense");
    if s.class() == "ViTForImageClassification" {
        let first = b.node("classifier.first", Select { index: 0 }, &[x])?;
        let logits = linear(b, "classifier", "classifier", first, s.labels()?)?;
        b.output("logits", logits);
    } else if b.has(&format!("{pooler}.weight")) {
        let first = b.node("pooler.first", Select { index: 0 }, &[x])?;
        let dense = linear(b, "pooler.dense", &pooler, first, s.size_or("pooler_output_size", hidden)?)?;
        let pooled = b.node("pooler", activation(s.text_or("pooler_act", "tanh")?)?, &[dense])?;
        b.output("pooler_output", pooled);
    }
    Ok(())
}
