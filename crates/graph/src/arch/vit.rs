//! Vision transformer: base model and image classification.

use super::{Family, Keys, Sizes, VISION_TRANSFORMER, bert, classifier};

pub(super) const SIZES: Sizes = Sizes {
    prefixes: &["vit.", ""],
    hidden: ("hidden_size", "embeddings.cls_token", 2),
    heads: ("num_attention_heads", "encoder.layer.0.attention.attention.query.weight", 0),
    unread: &[("embeddings.mask_token", 2)],
    ..bert::SIZES
};

/// New names of modules in transformers 5.
pub(super) const RENAMES: &[(&str, &str)] = &[
    ("encoder.layer.", "layers."),
    ("attention.query", "q_proj"),
    ("attention.key", "k_proj"),
    ("attention.value", "v_proj"),
    ("attention.output.dense", "attention.o_proj"),
    ("intermediate.dense", "mlp.fc1"),
    ("output.dense", "mlp.fc2"),
];

pub(super) const VIT: Family = Family {
    model_type: "vit",
    graph: graph!(running::build),
    keys: Keys {
        // The keys of the pooler, for models without one.
        harmless: &["attention_probs_dropout_prob", "encoder_stride", "hidden_dropout_prob", "pooler_act", "pooler_output_size"],
        neutral: &[],
    },
    sizes: Some(&SIZES),
    classifier: classifier("ViTForImageClassification", "vit.", &["classifier"]),
    renames: RENAMES,
    ..VISION_TRANSFORMER
};

#[cfg(feature = "run")]
pub(super) mod running {
    use crate::arch::running::Settings;
    use crate::arch::running::block::{Block, Names, NormPosition};
    use crate::arch::running::parts::{activate, image_input, layer_norm, linear};
    use crate::error::{Error, Result};
    use crate::ir::ops::{Add, Attention, Conv, Patchify, Prepend, Select};
    use crate::ir::{Builder, Dim, ValueId};

    /// Names of the nodes of the patch embedding.
    pub const PATCH_NODES: [&str; 2] = ["embeddings.patch_embeddings.projection", "embeddings.patch_embeddings"];

    pub const NAMES: Names = Names {
        attention: "attention.attention",
        qkv: ["query", "key", "value"],
        out: "attention.output.dense",
        attended: "attended",
        norms: ["layernorm_before", "layernorm_after"],
        network: ["intermediate.dense", "intermediate.act", "output.dense"],
        sum: "",
        scales: None,
    };

    pub fn build(s: &Settings, b: &mut Builder) -> Result<()> {
        let prefix = if b.has("vit.embeddings.cls_token") { "vit." } else { "" };
        let (hidden, epsilon) = (s.size("hidden_size")?, s.number_or("layer_norm_eps", 1e-12)?);
        let head_dim = s.head_dim("hidden_size", "num_attention_heads")?;
        let (image, patch, side) = patches(s, (224, 16))?;
        let pixels = image_input(b, s.size_or("num_channels", 3)?, Dim::Fixed(image), Dim::Fixed(image))?;
        let patches = patch_embeddings(b, PATCH_NODES, &format!("{prefix}embeddings.patch_embeddings.projection"), (hidden, patch), true, pixels)?;
        let token = b.param(&format!("{prefix}embeddings.cls_token"), &[1, 1, hidden])?;
        let sequence = b.node("embeddings.with_cls_token", Prepend {}, &[token, patches])?;
        let positions = b.param(&format!("{prefix}embeddings.position_embeddings"), &[1, side.saturating_mul(side).saturating_add(1), hidden])?;
        let qkv_bias = s.flag_or("qkv_bias", true)?;
        let x = b.node("embeddings", Add {}, &[sequence, positions])?;
        let block = Block {
            names: &NAMES,
            norms: NormPosition::Before,
            epsilon,
            head_dim,
            attention: Attention::default(),
            extras: &[],
            qkv_bias: Some(qkv_bias),
            cross: None,
            neurons: s.size("intermediate_size")?,
            activation: Some(s.text_or("hidden_act", "gelu")?),
        };
        let x = block.stack(b, prefix, "encoder.layer", s.size("num_hidden_layers")?, x)?;
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
            let pooled = activate(b, "pooler", s.text_or("pooler_act", "tanh")?, dense)?;
            b.output("pooler_output", pooled);
        }
        Ok(())
    }

    /// Side lengths of the image and of a patch, with these defaults, and the number of complete patches per
    /// side. Pixels beyond them are not read, as in SigLIP with 384 pixels and patches of 14.
    pub fn patches(s: &Settings, (image, patch): (usize, usize)) -> Result<(usize, usize, usize)> {
        let (image, patch) = (s.size_or("image_size", image)?, s.size_or("patch_size", patch)?);
        let side = image.checked_div(patch).filter(|side| *side > 0);
        let side = side.ok_or_else(|| Error::graph("config.json", format!("`image_size` {image} is less than `patch_size` {patch}")))?;
        Ok((image, patch, side))
    }

    /// Patch embeddings, `[batch, patches, width]`; `nodes` are the names of the convolution and of the
    /// result.
    pub fn patch_embeddings(b: &mut Builder, nodes: [&str; 2], module: &str, (width, patch): (usize, usize), bias: bool, pixels: ValueId) -> Result<ValueId> {
        let channels = b.ty(pixels).shape.get(1).and_then(Dim::fixed).unwrap_or(0);
        let mut inputs = vec![pixels, b.param(&format!("{module}.weight"), &[width, channels, patch, patch])?];
        if bias {
            inputs.push(b.param(&format!("{module}.bias"), &[width])?);
        }
        let [convolution, tokens] = nodes;
        let images = b.node(convolution, Conv { stride: patch.into(), ..Conv::default() }, &inputs)?;
        b.node(tokens, Patchify {}, &[images])
    }
}
