//! OPT: learned position embeddings, which start at the third row of their table; ReLU; optionally
//! embeddings narrower than the stream.

use super::{DECODER, Family, Keys, Sizes};

pub(super) const OPT: Family = Family {
    model_type: "opt",
    graph: graph!(running::build),
    keys: Keys {
        harmless: &["activation_dropout", "attention_dropout", "dropout", "init_std", "layerdrop"],
        neutral: &[("layer_norm_elementwise_affine", "true")],
    },
    sizes: Some(&Sizes {
        prefixes: &["model.decoder.", "decoder.", ""],
        hidden: ("hidden_size", "embed_positions.weight", 1),
        heads: ("num_attention_heads", "layers.0.self_attn.q_proj.weight", 0),
        decoder_heads: None,
        groups: None,
        head_dim: None,
        custom_head_dim_default: false,
        heads_must_divide: false,
        other_sizes: &[("ffn_dim", "layers.0.fc1.weight", 0), ("word_embed_proj_dim", "embed_tokens.weight", 1)],
        layers: "num_hidden_layers",
        unread: &[],
    }),
    tied: &[("lm_head.weight", "model.decoder.embed_tokens.weight")],
    fused: &[&["q_proj", "k_proj", "v_proj"]],
    embeddings: &["embed_tokens", "embed_positions"],
    ..DECODER
};

#[cfg(feature = "run")]
mod running {
    use crate::arch::running::Settings;
    use crate::arch::running::parts::{activate, attend, language_head, layer_norm, linear_with, text_inputs};
    use crate::error::Result;
    use crate::ir::Builder;
    use crate::ir::ops::{Add, Attention, Embedding, Linear, Positions};

    const EPSILON: f64 = 1e-5;
    /// Unused rows at the start of the position embedding table.
    const OFFSET: usize = 2;

    pub fn build(s: &Settings, b: &mut Builder) -> Result<()> {
        let prefix = ["model.decoder.", "decoder."].into_iter().find(|prefix| b.has(&format!("{prefix}embed_tokens.weight"))).unwrap_or("");
        let (width, head_dim) = (s.size("hidden_size")?, s.head_dim("hidden_size", "num_attention_heads")?);
        let (narrow, bias) = (s.size_or("word_embed_proj_dim", width)?, s.flag_or("enable_bias", true)?);
        let (before, causal) = (s.flag_or("do_layer_norm_before", true)?, s.flag_or("is_causal", true)?);
        let (tokens, mask) = text_inputs(b)?;
        let table = b.param(&format!("{prefix}embed_tokens.weight"), &[s.size("vocab_size")?, narrow])?;
        let mut words = b.node("embed_tokens", Embedding {}, &[tokens, table])?;
        if narrow != width {
            words = linear_with(b, "project_in", &format!("{prefix}project_in"), words, width, false)?;
        }
        // Positions count from the first token that is not padding.
        let positions = b.node("positions", Positions { padding: Some(0), offset: 1 }, &[mask])?;
        let rows = s.size("max_position_embeddings")?.saturating_add(OFFSET);
        let places = b.param(&format!("{prefix}embed_positions.weight"), &[rows, width])?;
        let places = b.node("embed_positions", Embedding {}, &[positions, places])?;
        let mut x = b.node("embeddings", Add {}, &[words, places])?;
        for index in 0..s.size("num_hidden_layers")? {
            let node = format!("layers.{index}");
            let module = format!("{prefix}{node}");
            let linear = |b: &mut Builder, name: &str, x, out| linear_with(b, &format!("{node}.{name}"), &format!("{module}.{name}"), x, out, bias);
            let norm = |b: &mut Builder, name: &str, x, enabled: bool| {
                if enabled { layer_norm(b, &format!("{node}.{name}"), &format!("{module}.{name}"), x, EPSILON) } else { Ok(x) }
            };
            let normed = norm(b, "self_attn_layer_norm", x, before)?;
            let mut qkv = [normed; 3];
            for (value, part) in qkv.iter_mut().zip(["q_proj", "k_proj", "v_proj"]) {
                *value = linear(b, &format!("self_attn.{part}"), normed, width)?;
            }
            let context = attend(b, &format!("{node}.self_attn"), qkv, head_dim, Attention { causal, ..Attention::default() }, &[mask])?;
            let out = linear(b, "self_attn.out_proj", context, width)?;
            let sum = b.node(&format!("{node}.attended"), Add {}, &[x, out])?;
            let attended = norm(b, "self_attn_layer_norm", sum, !before)?;
            let normed = norm(b, "final_layer_norm", attended, before)?;
            let wide = linear(b, "fc1", normed, s.size("ffn_dim")?)?;
            let active = activate(b, &format!("{node}.act"), s.text_or("activation_function", "relu")?, wide)?;
            let out = linear(b, "fc2", active, width)?;
            let sum = b.node(&format!("{node}.sum"), Add {}, &[attended, out])?;
            x = norm(b, "final_layer_norm", sum, !before)?;
        }
        let removed = s.flag_or("_remove_final_layer_norm", false)?;
        if before && !removed {
            x = layer_norm(b, "final_layer_norm", &format!("{prefix}final_layer_norm"), x, EPSILON)?;
        }
        if narrow != width {
            x = linear_with(b, "project_out", &format!("{prefix}project_out"), x, narrow, false)?;
        }
        b.output("last_hidden_state", x);
        if s.class() == "OPTForCausalLM" || b.has("lm_head.weight") {
            let weight = language_head(s, b, "lm_head.weight", table)?;
            let logits = b.node("lm_head", Linear { input_major: false }, &[x, weight])?;
            b.output("logits", logits);
        }
        Ok(())
    }
}
