//! CLIP and SigLIP: an image encoder and a text encoder, and the similarity of their embeddings (Radford
//! et al., 2021; Zhai et al., 2023).
//!
//! A model with both towers is one graph, which reads images and texts. The model classes of one tower
//! yield a graph of that tower.

use super::{EMPTY, Family, Keys, ModelKind, Positions};

pub(super) const CLIP: Family = Family {
    model_type: "clip",
    kind: ModelKind::DualEncoder,
    graph: graph!(running::build),
    keys: Keys {
        harmless: &[
            "attention_dropout",
            "dropout",
            "initializer_factor",
            "logit_scale_init_value",
            // For a tower in a dual encoder, and a tower without a projection.
            "projection_dim",
            "projection_size",
            "eos_token_id",
        ],
        neutral: &[("head_dim", "null"), ("is_causal", "true"), ("text_config_dict", "null"), ("vision_config_dict", "null")],
    },
    fused: &[&["q_proj", "k_proj", "v_proj"]],
    embeddings: &["embeddings"],
    positions: Positions { default: Some(77), ..Positions::DEFAULT },
    ..EMPTY
};

pub(super) const CLIP_TEXT: Family = Family { model_type: "clip_text_model", kind: ModelKind::Encoder, graph: graph!(running::build_text), ..CLIP };

pub(super) const CLIP_VISION: Family =
    Family { model_type: "clip_vision_model", kind: ModelKind::VisionTransformer, graph: graph!(running::build_vision), ..CLIP };

pub(super) const SIGLIP: Family =
    Family { model_type: "siglip", graph: graph!(running::build_siglip), positions: Positions { default: Some(64), ..Positions::DEFAULT }, ..CLIP };

pub(super) const SIGLIP_TEXT: Family =
    Family { model_type: "siglip_text_model", kind: ModelKind::Encoder, graph: graph!(running::build_siglip_text), ..SIGLIP };

pub(super) const SIGLIP_VISION: Family =
    Family { model_type: "siglip_vision_model", kind: ModelKind::VisionTransformer, graph: graph!(running::build_siglip_vision), ..SIGLIP };

#[cfg(feature = "run")]
mod running {
    use crate::arch::running::Settings;
    use crate::arch::running::block::{Block, Names, NormPosition};
    use crate::arch::running::parts::{activate, attend, image_input, layer_norm, linear, linear_with};
    use crate::arch::vit::running::{patch_embeddings, patches};
    use crate::error::{Error, Result};
    use crate::ir::ops::{
        Add, Attention, Embedding, Exp, Linear, MatMul, Mul, Normalize, Positions, Prepend, Reshape, Select, Slice, TargetSize, TokenChoice, TokenPool,
        Transpose,
    };
    use crate::ir::{Builder, Dim, TensorType, ValueId};

    const NAMES: Names = Names {
        attention: "self_attn",
        qkv: ["q_proj", "k_proj", "v_proj"],
        out: "self_attn.out_proj",
        attended: "attended",
        norms: ["layer_norm1", "layer_norm2"],
        network: ["mlp.fc1", "mlp.act", "mlp.fc2"],
        sum: "",
        scales: None,
    };

    /// The two families.
    #[derive(Clone, Copy, PartialEq, Eq)]
    enum Kind {
        Clip,
        Siglip,
    }

    impl Kind {
        fn function(self) -> &'static str {
            if self == Kind::Clip { "quick_gelu" } else { "gelu_pytorch_tanh" }
        }

        fn epsilon(self) -> f64 {
            if self == Kind::Clip { 1e-5 } else { 1e-6 }
        }

        /// Default sizes of the text tower.
        fn text_sizes(self) -> &'static [(&'static str, usize)] {
            match self {
                Kind::Clip => {
                    &[("vocab_size", 49408), ("hidden_size", 512), ("intermediate_size", 2048), ("num_hidden_layers", 12), ("num_attention_heads", 8)]
                }
                Kind::Siglip => {
                    &[("vocab_size", 32000), ("hidden_size", 768), ("intermediate_size", 3072), ("num_hidden_layers", 12), ("num_attention_heads", 12)]
                }
            }
        }
    }

    /// Default sizes of the vision tower.
    const VISION_SIZES: [(&str, usize); 4] = [("hidden_size", 768), ("intermediate_size", 3072), ("num_hidden_layers", 12), ("num_attention_heads", 12)];

    pub fn build(s: &Settings, b: &mut Builder) -> Result<()> {
        both(Kind::Clip, s, b)
    }

    pub fn build_siglip(s: &Settings, b: &mut Builder) -> Result<()> {
        both(Kind::Siglip, s, b)
    }

    pub fn build_text(s: &Settings, b: &mut Builder) -> Result<()> {
        text_alone(Kind::Clip, s.class(), s, b)
    }

    pub fn build_siglip_text(s: &Settings, b: &mut Builder) -> Result<()> {
        text_alone(Kind::Siglip, s.class(), s, b)
    }

    pub fn build_vision(s: &Settings, b: &mut Builder) -> Result<()> {
        vision_alone(Kind::Clip, s.class(), s, b)
    }

    pub fn build_siglip_vision(s: &Settings, b: &mut Builder) -> Result<()> {
        vision_alone(Kind::Siglip, s.class(), s, b)
    }

    /// The outputs of a tower: token or patch embeddings, and the pooled embedding.
    struct Tower {
        tokens: ValueId,
        pooled: Option<ValueId>,
    }

    fn both(kind: Kind, s: &Settings, b: &mut Builder) -> Result<()> {
        match s.class() {
            class @ ("CLIPTextModel" | "CLIPTextModelWithProjection" | "SiglipTextModel") => {
                return text_alone(kind, class, &group(kind, s, ["text_config", "text_config_dict"], true)?, b);
            }
            class @ ("CLIPVisionModel" | "CLIPVisionModelWithProjection" | "SiglipVisionModel") => {
                return vision_alone(kind, class, &group(kind, s, ["vision_config", "vision_config_dict"], true)?, b);
            }
            _ => {}
        }
        let image = vision(kind, &group(kind, s, ["vision_config", "vision_config_dict"], false)?, b)?.pooled;
        let image = image.ok_or_else(|| Error::graph("config.json", "`vision_use_head` is false, but comparing images with texts requires it"))?;
        let text = text(kind, &group(kind, s, ["text_config", "text_config_dict"], false)?, b)?.pooled.unwrap_or(image);
        let [image, text] = match kind {
            Kind::Clip => {
                let width = s.size_or("projection_dim", 512)?;
                [
                    linear_with(b, "visual_projection", "visual_projection", image, width, false)?,
                    linear_with(b, "text_projection", "text_projection", text, width, false)?,
                ]
            }
            Kind::Siglip => [image, text],
        };
        let image = b.node("image_features", Normalize::default(), &[image])?;
        let text = b.node("text_features", Normalize::default(), &[text])?;
        let scale = b.param("logit_scale", if kind == Kind::Clip { &[] } else { &[1] })?;
        let scale = b.node("logit_scale.flat", Reshape { shape: vec![TargetSize::Number(1)] }, &[scale])?;
        let scale = b.node("logit_scale.exp", Exp {}, &[scale])?;
        let columns = b.node("image_features.columns", Transpose { perm: vec![1, 0] }, &[image])?;
        let fit = b.node("fit", MatMul {}, &[text, columns])?;
        let mut logits = b.node("fit.scaled", Mul {}, &[fit, scale])?;
        if kind == Kind::Siglip {
            let bias = b.param("logit_bias", &[1])?;
            logits = b.node("fit.moved", Add {}, &[logits, bias])?;
        }
        let by_image = b.node("fit.by_image", Transpose { perm: vec![1, 0] }, &[logits])?;
        b.output("logits_per_image", by_image);
        b.output("logits_per_text", logits);
        b.output("text_embeds", text);
        b.output("image_embeds", image);
        Ok(())
    }

    /// The configuration of a tower. In a CLIP model with both towers, the older group replaces the newer one
    /// if it exists, including defaults for the keys that it omits; models with one tower ignore it.
    fn group<'c>(kind: Kind, s: &Settings<'c>, [name, older]: [&'static str; 2], alone: bool) -> Result<Settings<'c>> {
        let replaced = kind == Kind::Clip && s.get(older).is_some() && !alone;
        let group = s.group_or_empty(name)?;
        if replaced { s.group_or_empty(older) } else { Ok(group) }
    }

    fn text_alone(kind: Kind, class: &str, s: &Settings, b: &mut Builder) -> Result<()> {
        let tower = text(kind, s, b)?;
        alone(s, b, class, tower, ("text_projection", "text_embeds"))
    }

    fn vision_alone(kind: Kind, class: &str, s: &Settings, b: &mut Builder) -> Result<()> {
        let tower = vision(kind, s, b)?;
        alone(s, b, class, tower, ("visual_projection", "image_embeds"))
    }

    fn alone(s: &Settings, b: &mut Builder, class: &str, tower: Tower, (projection, embeds): (&str, &str)) -> Result<()> {
        b.output("last_hidden_state", tower.tokens);
        let Some(pooled) = tower.pooled else { return Ok(()) };
        let projects = if class.is_empty() { b.has(&format!("{projection}.weight")) } else { class.ends_with("WithProjection") };
        if projects {
            let pooled = linear_with(b, projection, projection, pooled, s.size_or("projection_dim", 512)?, false)?;
            b.output(embeds, pooled);
        } else {
            b.output("pooler_output", pooled);
        }
        Ok(())
    }

    /// The transformer layers of a tower.
    fn encode(kind: Kind, s: &Settings, b: &mut Builder, prefixes: [&str; 2], mut x: ValueId, attention: Attention, extras: &[ValueId]) -> Result<ValueId> {
        let block = Block {
            names: &NAMES,
            norms: NormPosition::Before,
            epsilon: s.number_or("layer_norm_eps", kind.epsilon())?,
            head_dim: s.head_dim("hidden_size", "num_attention_heads")?,
            attention,
            extras,
            qkv_bias: Some(true),
            cross: None,
            neurons: s.size("intermediate_size")?,
            activation: Some(s.text_or("hidden_act", kind.function())?),
        };
        let [node, module] = prefixes;
        for index in 0..s.size("num_hidden_layers")? {
            let layer = format!("encoder.layers.{index}");
            x = block.add(b, &format!("{node}.{layer}"), &format!("{module}{layer}"), x)?;
        }
        Ok(x)
    }

    fn text(kind: Kind, s: &Settings, b: &mut Builder) -> Result<Tower> {
        const NODE: &str = "text_model";
        let s = &s.with_sizes(kind.text_sizes());
        let prefix = if b.has("text_model.embeddings.token_embedding.weight") { "text_model." } else { "" };
        let (hidden, epsilon) = (s.size("hidden_size")?, s.number_or("layer_norm_eps", kind.epsilon())?);
        let longest = s.size_or("max_position_embeddings", if kind == Kind::Clip { 77 } else { 64 })?;
        // SigLIP is trained on texts of fixed length, and attends to their padding.
        let sequence = if kind == Kind::Clip { Dim::named("sequence") } else { Dim::Fixed(longest) };
        let tokens = b.input("input_ids", TensorType::int([Dim::named("batch"), sequence.clone()]))?;
        let words = b.param(&format!("{prefix}embeddings.token_embedding.weight"), &[s.size("vocab_size")?, hidden])?;
        let words = b.node(&format!("{NODE}.embeddings.token_embedding"), Embedding {}, &[tokens, words])?;
        let positions = b.node(&format!("{NODE}.embeddings.positions"), Positions::default(), &[tokens])?;
        let table = b.param(&format!("{prefix}embeddings.position_embedding.weight"), &[longest, hidden])?;
        let positions = b.node(&format!("{NODE}.embeddings.position_embedding"), Embedding {}, &[positions, table])?;
        let x = b.node(&format!("{NODE}.embeddings"), Add {}, &[words, positions])?;
        let mask = match kind {
            Kind::Clip => vec![b.input("attention_mask", TensorType::int([Dim::named("batch"), sequence]))?],
            Kind::Siglip => Vec::new(),
        };
        let attention = Attention { causal: kind == Kind::Clip, ..Attention::default() };
        let x = encode(kind, s, b, [NODE, prefix], x, attention, &mask)?;
        let x = layer_norm(b, &format!("{NODE}.final_layer_norm"), &format!("{prefix}final_layer_norm"), x, epsilon)?;
        let pooled = match kind {
            Kind::Clip => {
                // `eos_token_id` of the first checkpoints is wrong; their last token has the largest id.
                let choice = match s.token_or("eos_token_id", 49407)? {
                    2 => TokenChoice::Largest,
                    end => TokenChoice::Named(end),
                };
                b.node(&format!("{NODE}.pooled"), TokenPool { choice }, &[x, tokens])?
            }
            Kind::Siglip => {
                let last = b.node(&format!("{NODE}.last"), Select { index: longest.saturating_sub(1) }, &[x])?;
                let width = s.size_or("projection_size", hidden)?;
                linear_with(b, &format!("{NODE}.head"), &format!("{prefix}head"), last, width, true)?
            }
        };
        Ok(Tower { tokens: x, pooled: Some(pooled) })
    }

    fn vision(kind: Kind, s: &Settings, b: &mut Builder) -> Result<Tower> {
        const NODE: &str = "vision_model";
        let s = &s.with_sizes(&VISION_SIZES);
        let prefix = if b.has("vision_model.embeddings.patch_embedding.weight") { "vision_model." } else { "" };
        let (hidden, epsilon) = (s.size("hidden_size")?, s.number_or("layer_norm_eps", kind.epsilon())?);
        let (image, patch, side) = patches(s, (224, if kind == Kind::Clip { 32 } else { 16 }))?;
        let pixels = image_input(b, s.size_or("num_channels", 3)?, Dim::Fixed(image), Dim::Fixed(image))?;
        let nodes = ["patch_embedding", "patches"].map(|part| format!("{NODE}.embeddings.{part}"));
        let nodes = nodes.each_ref().map(String::as_str);
        let mut x = patch_embeddings(b, nodes, &format!("{prefix}embeddings.patch_embedding"), (hidden, patch), kind == Kind::Siglip, pixels)?;
        let mut count = side.saturating_mul(side);
        if kind == Kind::Clip {
            let class = b.param(&format!("{prefix}embeddings.class_embedding"), &[hidden])?;
            let shape = vec![TargetSize::Number(1), TargetSize::Number(1), TargetSize::Rest];
            let class = b.node(&format!("{NODE}.embeddings.class_token"), Reshape { shape }, &[class])?;
            x = b.node(&format!("{NODE}.embeddings.with_class"), Prepend {}, &[class, x])?;
            count = count.saturating_add(1);
        }
        let positions = b.param(&format!("{prefix}embeddings.position_embedding.weight"), &[count, hidden])?;
        x = b.node(&format!("{NODE}.embeddings"), Add {}, &[x, positions])?;
        if kind == Kind::Clip {
            // The module is spelled this way in checkpoints.
            x = layer_norm(b, &format!("{NODE}.pre_layrnorm"), &format!("{prefix}pre_layrnorm"), x, epsilon)?;
        }
        let x = encode(kind, s, b, [NODE, prefix], x, Attention::default(), &[])?;
        let norm = |b: &mut Builder, x: ValueId| layer_norm(b, &format!("{NODE}.post_layernorm"), &format!("{prefix}post_layernorm"), x, epsilon);
        if kind == Kind::Clip {
            let first = b.node(&format!("{NODE}.first"), Select { index: 0 }, &[x])?;
            return Ok(Tower { tokens: x, pooled: Some(norm(b, first)?) });
        }
        let x = norm(b, x)?;
        let pooled = if s.flag_or("vision_use_head", true)? { Some(attended(s, b, prefix, x, epsilon)?) } else { None };
        Ok(Tower { tokens: x, pooled })
    }

    /// Attention pooling with one learned query (SigLIP).
    fn attended(s: &Settings, b: &mut Builder, prefix: &str, x: ValueId, epsilon: f64) -> Result<ValueId> {
        const NODE: &str = "vision_model.head";
        let hidden = b.width(x)?;
        let module = |part: &str| format!("{prefix}head.{part}");
        let probe = b.param(&module("probe"), &[1, 1, hidden])?;
        // Queries, keys and values are one projection, which reads the query and the patches together.
        let all = b.node(&format!("{NODE}.with_probe"), Prepend {}, &[probe, x])?;
        let wide = hidden.saturating_mul(3);
        let inputs = [all, b.param(&module("attention.in_proj_weight"), &[wide, hidden])?, b.param(&module("attention.in_proj_bias"), &[wide])?];
        let all = b.node(&format!("{NODE}.attention.in_proj"), Linear { input_major: false }, &inputs)?;
        let mut qkv = [all; 3];
        for ((value, part), at) in qkv.iter_mut().zip(["query", "key", "value"]).zip(0usize..) {
            let columns = b.node(&format!("{NODE}.attention.{part}.columns"), Slice::last_axis(at.saturating_mul(hidden), hidden), &[all])?;
            let rows = if part == "query" {
                Slice { length: Some(1), axis: 1, ..Slice::default() }
            } else {
                Slice { start: 1, axis: 1, length: None, ..Slice::default() }
            };
            *value = b.node(&format!("{NODE}.attention.{part}"), rows, &[columns])?;
        }
        let head_dim = s.head_dim("hidden_size", "num_attention_heads")?;
        let context = attend(b, &format!("{NODE}.attention"), qkv, head_dim, Attention::default(), &[])?;
        let y = linear(b, &format!("{NODE}.attention.out_proj"), &module("attention.out_proj"), context, hidden)?;
        let normed = layer_norm(b, &format!("{NODE}.layernorm"), &module("layernorm"), y, epsilon)?;
        let wide = linear(b, &format!("{NODE}.mlp.fc1"), &module("mlp.fc1"), normed, s.size("intermediate_size")?)?;
        let active = activate(b, &format!("{NODE}.mlp.act"), s.text_or("hidden_act", Kind::Siglip.function())?, wide)?;
        let out = linear(b, &format!("{NODE}.mlp.fc2"), &module("mlp.fc2"), active, hidden)?;
        let sum = b.node(&format!("{NODE}.sum"), Add {}, &[y, out])?;
        b.node(NODE, Select { index: 0 }, &[sum])
    }
}
