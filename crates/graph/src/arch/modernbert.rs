//! ModernBERT: an encoder with rotary position embeddings, gated networks and local attention in most
//! layers (Warner et al., 2024).

use super::{ENCODER, Family, Keys, Sizes, classifier};

pub(super) const MODERNBERT: Family = Family {
    model_type: "modernbert",
    graph: graph!(running::build),
    keys: Keys {
        harmless: &[
            "attention_dropout",
            "classifier_activation",
            "classifier_bias",
            "classifier_dropout",
            "classifier_pooling",
            "cls_token_id",
            "decoder_bias",
            "deterministic_flash_attn",
            "embedding_dropout",
            "global_attn_every_n_layers",
            "global_rope_theta",
            "initializer_cutoff_factor",
            "layer_norm_eps",
            "local_rope_theta",
            "max_position_embeddings",
            "mlp_dropout",
            "position_embedding_type",
            "reference_compile",
            "repad_logits_with_grad",
            "sparse_pred_ignore_index",
            "sparse_prediction",
        ],
        neutral: &[("head_dim", "null"), ("partial_rotary_factor", "1.0"), ("rope_scaling", "null"), ("sliding_window", "null")],
    },
    sizes: Some(&Sizes {
        prefixes: &["model.", ""],
        hidden: ("hidden_size", "embeddings.tok_embeddings.weight", 1),
        heads: ("num_attention_heads", "layers.0.attn.Wo.weight", 1),
        decoder_heads: None,
        groups: None,
        head_dim: None,
        custom_head_dim_default: false,
        heads_must_divide: false,
        other_sizes: &[("intermediate_size", "layers.0.mlp.Wo.weight", 1)],
        layers: "num_hidden_layers",
        unread: &[],
    }),
    classifier: classifier("ModernBertForSequenceClassification", "model.", &["head.dense", "head.norm", "classifier"]),
    tied: &[("decoder.weight", "model.embeddings.tok_embeddings.weight")],
    heads: &["decoder"],
    ..ENCODER
};

#[cfg(feature = "run")]
mod running {
    use crate::arch::running::Settings;
    use crate::arch::running::decoder::slides;
    use crate::arch::running::parts::{activate, has_head, language_head, layer_norm_with, linear_with, slices, text_inputs};
    use crate::arch::running::rope::{RopeDefaults, by_layer_type};
    use crate::error::{Error, Result};
    use crate::ir::ops::{Add, Attention, Embedding, Linear, MaskedMean, MergeHeads, Mul, Rotary, Select, SplitHeads};
    use crate::ir::{Builder, ValueId};

    /// Properties shared by all layers.
    struct Encoder<'s, 'c> {
        s: &'s Settings<'c>,
        prefix: &'static str,
        mask: ValueId,
        hidden: usize,
        head_dim: usize,
        /// Rotary embeddings of layers with global and with local attention.
        rotary: [Rotary; 2],
    }

    pub fn build(s: &Settings, b: &mut Builder) -> Result<()> {
        let prefix = if b.has("model.embeddings.tok_embeddings.weight") { "model." } else { "" };
        let (hidden, head_dim) = (s.size("hidden_size")?, s.head_dim("hidden_size", "num_attention_heads")?);
        let (tokens, mask) = text_inputs(b)?;
        let rotary = |layers, key, theta| by_layer_type(s, layers, (key, theta), head_dim, None, RopeDefaults::default());
        let rotary = [rotary("full_attention", "global_rope_theta", 160_000.0)?, rotary("sliding_attention", "local_rope_theta", 10_000.0)?];
        let encoder = Encoder { s, prefix, mask, hidden, head_dim, rotary };
        let table = b.param(&format!("{prefix}embeddings.tok_embeddings.weight"), &[s.size("vocab_size")?, hidden])?;
        let x = b.node("embeddings.tok_embeddings", Embedding {}, &[tokens, table])?;
        let mut x = encoder.norm(b, "embeddings.norm", &format!("{prefix}embeddings.norm"), x)?;
        for index in 0..s.size("num_hidden_layers")? {
            x = encoder.layer(b, index, x)?;
        }
        let x = encoder.norm(b, "final_norm", &format!("{prefix}final_norm"), x)?;
        b.output("last_hidden_state", x);
        match s.class() {
            "ModernBertForMaskedLM" if has_head(b, prefix, "head.dense") => {
                let x = encoder.head(b, x)?;
                let mut inputs = vec![x, language_head(s, b, "decoder.weight", table)?];
                if s.flag_or("decoder_bias", true)? {
                    inputs.push(b.param("decoder.bias", &[s.size("vocab_size")?])?);
                }
                let logits = b.node("decoder", Linear { input_major: false }, &inputs)?;
                b.output("logits", logits);
            }
            "ModernBertForSequenceClassification" => {
                let pooled = match s.text_or("classifier_pooling", "cls")? {
                    "cls" => b.node("classifier.first", Select { index: 0 }, &[x])?,
                    "mean" => b.node("classifier.mean", MaskedMean {}, &[x, mask])?,
                    other => return Err(Error::graph("config.json", format!("`classifier_pooling` is \"{other}\", expected \"cls\" or \"mean\""))),
                };
                let x = encoder.head(b, pooled)?;
                let logits = linear_with(b, "classifier", "classifier", x, s.labels()?, true)?;
                b.output("logits", logits);
            }
            _ => {}
        }
        Ok(())
    }

    impl Encoder<'_, '_> {
        fn norm(&self, b: &mut Builder, node: &str, module: &str, x: ValueId) -> Result<ValueId> {
            layer_norm_with(b, node, module, x, self.s.number_or("norm_eps", 1e-5)?, self.s.flag_or("norm_bias", false)?)
        }

        /// Whether a layer has global attention.
        fn is_global(&self, layer: usize) -> Result<bool> {
            let by_type = slides(self.s, layer, true)?.map(|slides| !slides);
            let every = self.s.size_or("global_attn_every_n_layers", 3)?;
            Ok(by_type.unwrap_or_else(|| layer.is_multiple_of(every)))
        }

        fn layer(&self, b: &mut Builder, index: usize, x: ValueId) -> Result<ValueId> {
            let (s, node) = (self.s, format!("layers.{index}"));
            let module = format!("{}{node}", self.prefix);
            // The embeddings are already normalized.
            let normed = if index == 0 { x } else { self.norm(b, &format!("{node}.attn_norm"), &format!("{module}.attn_norm"), x)? };
            let y = self.attention(b, (&node, &module), self.is_global(index)?, normed)?;
            let x = b.node(&format!("{node}.attended"), Add {}, &[x, y])?;
            let y = self.norm(b, &format!("{node}.mlp_norm"), &format!("{module}.mlp_norm"), x)?;
            let (wide, bias) = (s.size("intermediate_size")?, s.flag_or("mlp_bias", false)?);
            let both = linear_with(b, &format!("{node}.mlp.Wi"), &format!("{module}.mlp.Wi"), y, wide.saturating_mul(2), bias)?;
            let [gate, up] = slices(b, ["gate", "up"].map(|part| format!("{node}.mlp.{part}")), both, [wide; 2])?;
            let gate = activate(b, &format!("{node}.mlp.act"), s.text_or("hidden_activation", "gelu")?, gate)?;
            let gated = b.node(&format!("{node}.mlp.gated"), Mul {}, &[gate, up])?;
            let y = linear_with(b, &format!("{node}.mlp.Wo"), &format!("{module}.mlp.Wo"), gated, self.hidden, bias)?;
            b.node(&node, Add {}, &[x, y])
        }

        fn attention(&self, b: &mut Builder, (node, module): (&str, &str), is_global: bool, x: ValueId) -> Result<ValueId> {
            let (s, bias) = (self.s, self.s.flag_or("attention_bias", false)?);
            let [global, local] = &self.rotary;
            let rotary = if is_global { global } else { local };
            let all = linear_with(b, &format!("{node}.attn.Wqkv"), &format!("{module}.attn.Wqkv"), x, self.hidden.saturating_mul(3), bias)?;
            let mut heads = Vec::with_capacity(4);
            let parts = slices(b, ["q", "k", "v"].map(|part| format!("{node}.attn.{part}")), all, [self.hidden; 3])?;
            for (part, flat) in ["q", "k", "v"].into_iter().zip(parts) {
                let split = b.node(&format!("{node}.attn.{part}_heads"), SplitHeads { head_dim: self.head_dim }, &[flat])?;
                heads.push(if part == "v" { split } else { b.node(&format!("{node}.attn.{part}_rotary"), rotary.clone(), &[split])? });
            }
            heads.push(self.mask);
            // `local_attention` counts both sides; the window includes the token itself.
            let around = (s.size_or("local_attention", 128)? / 2).saturating_add(1);
            let attention = Attention { scale: 1.0 / (self.head_dim as f64).sqrt(), window: (!is_global).then_some(around), ..Attention::default() };
            let context = b.node(&format!("{node}.attn.context_heads"), attention, &heads)?;
            let context = b.node(&format!("{node}.attn.context"), MergeHeads {}, &[context])?;
            linear_with(b, &format!("{node}.attn.Wo"), &format!("{module}.attn.Wo"), context, self.hidden, bias)
        }

        /// The layers before the classifier or decoder.
        fn head(&self, b: &mut Builder, x: ValueId) -> Result<ValueId> {
            let s = self.s;
            let dense = linear_with(b, "head.dense", "head.dense", x, self.hidden, s.flag_or("classifier_bias", false)?)?;
            let active = activate(b, "head.act", s.text_or("classifier_activation", "gelu")?, dense)?;
            self.norm(b, "head.norm", "head.norm", active)
        }
    }
}
