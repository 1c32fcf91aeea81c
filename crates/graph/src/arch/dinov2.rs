//! DINOv2: a vision transformer with layer scale, and gated networks in the largest model (Oquab et al.,
//! 2023).
//!
//! Position embeddings are used for the configured image size only; transformers interpolates them for
//! other sizes.

use super::{Family, Keys, Sizes, VISION_TRANSFORMER, classifier, vit};

/// New names of modules in transformers 5.
pub(super) const RENAMES: &[(&str, &str)] = &[
    ("attention.attention.query", "attention.q_proj"),
    ("attention.attention.key", "attention.k_proj"),
    ("attention.attention.value", "attention.v_proj"),
    ("attention.output.dense", "attention.o_proj"),
    ("mlp.weights_out", "mlp.down_proj"),
];

pub(super) const DINOV2: Family = Family {
    model_type: "dinov2",
    graph: graph!(running::build),
    keys: Keys {
        harmless: &[
            "_out_features",
            "_out_indices",
            "apply_layernorm",
            "attention_probs_dropout_prob",
            "drop_path_rate",
            "hidden_act",
            "hidden_dropout_prob",
            "layerscale_value",
            "out_features",
            "out_indices",
            "reshape_hidden_states",
            "stage_names",
            "use_mask_token",
        ],
        neutral: &[("head_dim", "null")],
    },
    sizes: Some(&Sizes { prefixes: &["dinov2.", ""], other_sizes: &[], unread: &[("embeddings.mask_token", 1)], ..vit::SIZES }),
    classifier: classifier("Dinov2ForImageClassification", "dinov2.", &["classifier"]),
    renames: RENAMES,
    ..VISION_TRANSFORMER
};

#[cfg(feature = "run")]
mod running {
    use crate::arch::running::Settings;
    use crate::arch::running::block::{Block, Names, NormPosition};
    use crate::arch::running::parts::{image_input, layer_norm, linear};
    use crate::arch::vit::running::{self as vit, PATCH_NODES, patch_embeddings, patches};
    use crate::error::Result;
    use crate::ir::ops::{Add, Attention, Concat, Prepend, Reduce, ReduceKind, Select, Slice};
    use crate::ir::{Builder, Dim};

    const NAMES: Names = Names {
        norms: ["norm1", "norm2"],
        network: ["mlp.fc1", "mlp.act", "mlp.fc2"],
        scales: Some(["layer_scale1.lambda1", "layer_scale2.lambda1"]),
        ..vit::NAMES
    };

    pub fn build(s: &Settings, b: &mut Builder) -> Result<()> {
        let prefix = if b.has("dinov2.embeddings.cls_token") { "dinov2." } else { "" };
        let (hidden, epsilon) = (s.size("hidden_size")?, s.number_or("layer_norm_eps", 1e-6)?);
        let (image, patch, side) = patches(s, (224, 14))?;
        let pixels = image_input(b, s.size_or("num_channels", 3)?, Dim::Fixed(image), Dim::Fixed(image))?;
        let patches = patch_embeddings(b, PATCH_NODES, &format!("{prefix}embeddings.patch_embeddings.projection"), (hidden, patch), true, pixels)?;
        let token = b.param(&format!("{prefix}embeddings.cls_token"), &[1, 1, hidden])?;
        let sequence = b.node("embeddings.with_cls_token", Prepend {}, &[token, patches])?;
        let positions = b.param(&format!("{prefix}embeddings.position_embeddings"), &[1, side.saturating_mul(side).saturating_add(1), hidden])?;
        let x = b.node("embeddings", Add {}, &[sequence, positions])?;
        let (gated, wide) = (s.flag_or("use_swiglu_ffn", false)?, (hidden as f64 * s.number_or("mlp_ratio", 4.0)?) as usize);
        // Two thirds of the neurons for a similar number of weights, rounded up to a multiple of 8.
        let neurons = if gated { ((wide as f64 * 2.0 / 3.0) as usize).div_ceil(8).saturating_mul(8) } else { wide };
        let names = if gated { Names { network: ["mlp.weights_in", "mlp.gated", "mlp.weights_out"], ..NAMES } } else { NAMES };
        let block = Block {
            names: &names,
            norms: NormPosition::Before,
            epsilon,
            head_dim: s.head_dim("hidden_size", "num_attention_heads")?,
            attention: Attention::default(),
            extras: &[],
            qkv_bias: Some(s.flag_or("qkv_bias", true)?),
            cross: None,
            neurons,
            activation: if gated { None } else { Some(s.text_or("hidden_act", "gelu")?) },
        };
        let x = block.stack(b, prefix, "encoder.layer", s.size("num_hidden_layers")?, x)?;
        let x = layer_norm(b, "layernorm", &format!("{prefix}layernorm"), x, epsilon)?;
        b.output("last_hidden_state", x);
        let first = b.node("pooler", Select { index: 0 }, &[x])?;
        if s.class() == "Dinov2ForImageClassification" {
            let rest = b.node("classifier.patches", Slice { start: 1, axis: 1, length: None, ..Slice::default() }, &[x])?;
            let mean = b.node("classifier.mean", Reduce { kind: ReduceKind::Mean, axes: vec![1], keep_dims: false }, &[rest])?;
            let both = b.node("classifier.both", Concat::default(), &[first, mean])?;
            let logits = linear(b, "classifier", "classifier", both, s.labels()?)?;
            b.output("logits", logits);
        } else {
            b.output("pooler_output", first);
        }
        Ok(())
    }
}
