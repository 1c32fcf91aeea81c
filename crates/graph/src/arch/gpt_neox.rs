//! GPT-NeoX (Pythia): queries, keys and values are interleaved by head, and attention and network read
//! the same stream.

use super::{DECODER, Family, Keys, Sizes};

pub(super) const GPT_NEOX: Family = Family {
    model_type: "gpt_neox",
    graph: graph!(running::build),
    keys: Keys {
        harmless: &[
            "attention_dropout",
            "classifier_dropout",
            "hidden_dropout",
            "max_position_embeddings",
            "partial_rotary_factor",
            "rope_theta",
            "rotary_emb_base",
            "rotary_pct",
        ],
        neutral: &[],
    },
    sizes: Some(&Sizes {
        prefixes: &["gpt_neox.", ""],
        hidden: ("hidden_size", "embed_in.weight", 1),
        heads: ("num_attention_heads", "layers.0.attention.query_key_value.weight", 0),
        decoder_heads: None,
        groups: None,
        head_dim: None,
        custom_head_dim_default: false,
        heads_must_divide: true,
        other_sizes: &[("intermediate_size", "layers.0.mlp.dense_h_to_4h.weight", 0)],
        layers: "num_hidden_layers",
        unread: &[],
    }),
    tied: &[("embed_out.weight", "gpt_neox.embed_in.weight")],
    fused: &[],
    embeddings: &["embed_in"],
    heads: &["embed_out", "lm_head", "score"],
    renames: &[("embed_out", "lm_head")],
    ..DECODER
};

#[cfg(feature = "run")]
mod running {
    use crate::arch::running::Settings;
    use crate::arch::running::parts::{activate, language_head, layer_norm, linear, linear_with, slices, text_inputs};
    use crate::arch::running::rope::{RopeDefaults, parameters, scaled};
    use crate::error::Result;
    use crate::ir::Builder;
    use crate::ir::ops::{Add, Attention, Embedding, Linear, MergeHeads, SplitHeads};

    pub fn build(s: &Settings, b: &mut Builder) -> Result<()> {
        let prefix = if b.has("gpt_neox.embed_in.weight") { "gpt_neox." } else { "" };
        let (width, epsilon) = (s.size("hidden_size")?, s.number_or("layer_norm_eps", 1e-5)?);
        let (head_dim, bias) = (s.head_dim("hidden_size", "num_attention_heads")?, s.flag_or("attention_bias", true)?);
        // This family has its own key instead of `rope_theta`, which it ignores.
        let theta = match s.group("rope_parameters").filter(|p| p.get("rope_theta").is_some()) {
            Some(p) => p.number("rope_theta")?,
            None => s.number_or("rotary_emb_base", 10_000.0)?,
        };
        let rope = RopeDefaults { partial: Some(("rotary_pct", 0.25)), ..RopeDefaults::default() };
        let rotary = scaled(s, parameters(s)?, theta, head_dim, rope)?;
        let parallel = s.flag_or("use_parallel_residual", true)?;
        let attention = Attention { scale: 1.0 / (head_dim as f64).sqrt(), causal: s.flag_or("is_causal", true)?, ..Attention::default() };
        let (tokens, mask) = text_inputs(b)?;
        let table = b.param(&format!("{prefix}embed_in.weight"), &[s.size("vocab_size")?, width])?;
        let mut x = b.node("embed_in", Embedding {}, &[tokens, table])?;
        for index in 0..s.size("num_hidden_layers")? {
            let node = format!("layers.{index}");
            let module = format!("{prefix}{node}");
            let at = |name: &str| (format!("{node}.{name}"), format!("{module}.{name}"));
            let (name, norm) = at("input_layernorm");
            let normed = layer_norm(b, &name, &norm, x, epsilon)?;
            let (name, projection) = at("attention.query_key_value");
            let all = linear_with(b, &name, &projection, normed, width.saturating_mul(3), bias)?;
            let all = b.node(&format!("{node}.attention.heads"), SplitHeads { head_dim: head_dim.saturating_mul(3) }, &[all])?;
            let [q, k, v] = slices(b, ["query", "key", "value"].map(|part| format!("{node}.attention.{part}")), all, [head_dim; 3])?;
            let q = b.node(&format!("{node}.attention.query_rotary"), rotary.clone(), &[q])?;
            let k = b.node(&format!("{node}.attention.key_rotary"), rotary.clone(), &[k])?;
            let context = b.node(&format!("{node}.attention.context_heads"), attention, &[q, k, v, mask])?;
            let context = b.node(&format!("{node}.attention.context"), MergeHeads {}, &[context])?;
            let (name, projection) = at("attention.dense");
            let out = linear_with(b, &name, &projection, context, width, bias)?;
            let attended = b.node(&format!("{node}.attended"), Add {}, &[out, x])?;
            let (name, norm) = at("post_attention_layernorm");
            let normed = layer_norm(b, &name, &norm, if parallel { x } else { attended }, epsilon)?;
            let (name, projection) = at("mlp.dense_h_to_4h");
            let wide = linear(b, &name, &projection, normed, s.size("intermediate_size")?)?;
            let active = activate(b, &format!("{node}.mlp.act"), s.text_or("hidden_act", "gelu")?, wide)?;
            let (name, projection) = at("mlp.dense_4h_to_h");
            let out = linear(b, &name, &projection, active, width)?;
            x = b.node(&node, Add {}, &[out, attended])?;
        }
        let x = layer_norm(b, "final_layer_norm", &format!("{prefix}final_layer_norm"), x, epsilon)?;
        b.output("last_hidden_state", x);
        // Published files use embed_out; transformers 5 uses the name of other families.
        let head = if b.has("embed_out.weight") { "embed_out.weight" } else { "lm_head.weight" };
        if s.class() == "GPTNeoXForCausalLM" || b.has(head) {
            let weight = language_head(s, b, head, table)?;
            let logits = b.node("embed_out", Linear { input_major: false }, &[x, weight])?;
            b.output("logits", logits);
        }
        Ok(())
    }
}
