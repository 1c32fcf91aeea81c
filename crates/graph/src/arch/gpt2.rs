//! GPT-2: linear layers stored as `[in, out]`, with a fused projection of queries, keys and values.

use super::{DECODER, Family, Keys, Sizes};

pub(super) const GPT2: Family = Family {
    model_type: "gpt2",
    graph: graph!(running::build),
    keys: Keys {
        harmless: &[
            "attn_pdrop",
            "embd_pdrop",
            "n_ctx",
            "reorder_and_upcast_attn",
            "resid_pdrop",
            "summary_activation",
            "summary_first_dropout",
            "summary_proj_to_labels",
            "summary_type",
            "summary_use_proj",
        ],
        neutral: &[],
    },
    sizes: Some(&Sizes {
        prefixes: &["transformer.", ""],
        hidden: ("n_embd", "wte.weight", 1),
        heads: ("n_head", "h.0.attn.c_proj.weight", 0),
        decoder_heads: None,
        groups: None,
        head_dim: None,
        custom_head_dim_default: false,
        heads_must_divide: false,
        other_sizes: &[("n_inner", "h.0.mlp.c_fc.weight", 1)],
        layers: "n_layer",
        unread: &[],
    }),
    // The first published files have no prefix.
    tied: &[("lm_head.weight", "transformer.wte.weight"), ("lm_head.weight", "wte.weight")],
    fused: &[],
    embeddings: &["wte", "wpe"],
    is_input_major: true,
    ..DECODER
};

#[cfg(feature = "run")]
mod running {
    use crate::arch::running::Settings;
    use crate::arch::running::parts::{activate, language_head, layer_norm, slices, text_inputs};
    use crate::error::Result;
    use crate::ir::ops::{Add, Attention, Embedding, Linear, MergeHeads, Positions, SplitHeads};
    use crate::ir::{Builder, ValueId};

    pub fn build(s: &Settings, b: &mut Builder) -> Result<()> {
        let prefix = if b.has("transformer.wte.weight") { "transformer." } else { "" };
        let (width, epsilon) = (s.size("n_embd")?, s.number_or("layer_norm_epsilon", 1e-5)?);
        let head_dim = s.head_dim("n_embd", "n_head")?;
        let inner = s.size_or("n_inner", width.saturating_mul(4))?;
        let (tokens, mask) = text_inputs(b)?;
        let table = b.param(&format!("{prefix}wte.weight"), &[s.size("vocab_size")?, width])?;
        let words = b.node("wte", Embedding {}, &[tokens, table])?;
        let positions = b.node("positions", Positions::default(), &[tokens])?;
        let places = b.param(&format!("{prefix}wpe.weight"), &[s.size("n_positions")?, width])?;
        let places = b.node("wpe", Embedding {}, &[positions, places])?;
        let mut x = b.node("embeddings", Add {}, &[words, places])?;
        for (index, number) in (0..s.size("n_layer")?).zip(1u64..) {
            let node = format!("h.{index}");
            let module = format!("{prefix}{node}");
            let normed = layer_norm(b, &format!("{node}.ln_1"), &format!("{module}.ln_1"), x, epsilon)?;
            let all = conv1d(b, &format!("{node}.attn.c_attn"), &format!("{module}.attn.c_attn"), normed, width.saturating_mul(3))?;
            let mut heads = Vec::with_capacity(4);
            let parts = ["query", "key", "value"];
            for (part, flat) in parts.into_iter().zip(slices(b, parts.map(|part| format!("{node}.attn.{part}")), all, [width; 3])?) {
                heads.push(b.node(&format!("{node}.attn.{part}_heads"), SplitHeads { head_dim }, &[flat])?);
            }
            heads.push(mask);
            let mut scale = if s.flag_or("scale_attn_weights", true)? { 1.0 / (head_dim as f64).sqrt() } else { 1.0 };
            if s.flag_or("scale_attn_by_inverse_layer_idx", false)? {
                scale /= number as f64;
            }
            let context =
                b.node(&format!("{node}.attn.context_heads"), Attention { scale, causal: s.flag_or("is_causal", true)?, ..Attention::default() }, &heads)?;
            let context = b.node(&format!("{node}.attn.context"), MergeHeads {}, &[context])?;
            let out = conv1d(b, &format!("{node}.attn.c_proj"), &format!("{module}.attn.c_proj"), context, width)?;
            x = b.node(&format!("{node}.attended"), Add {}, &[out, x])?;
            let normed = layer_norm(b, &format!("{node}.ln_2"), &format!("{module}.ln_2"), x, epsilon)?;
            let wide = conv1d(b, &format!("{node}.mlp.c_fc"), &format!("{module}.mlp.c_fc"), normed, inner)?;
            let active = activate(b, &format!("{node}.mlp.act"), s.text_or("activation_function", "gelu_new")?, wide)?;
            let out = conv1d(b, &format!("{node}.mlp.c_proj"), &format!("{module}.mlp.c_proj"), active, width)?;
            x = b.node(&node, Add {}, &[x, out])?;
        }
        let x = layer_norm(b, "ln_f", &format!("{prefix}ln_f"), x, epsilon)?;
        b.output("last_hidden_state", x);
        if s.class() == "GPT2LMHeadModel" || b.has("lm_head.weight") {
            let weight = language_head(s, b, "lm_head.weight", table)?;
            let logits = b.node("lm_head", Linear { input_major: false }, &[x, weight])?;
            b.output("logits", logits);
        }
        Ok(())
    }

    fn conv1d(b: &mut Builder, node: &str, module: &str, x: ValueId, out: usize) -> Result<ValueId> {
        let width = b.width(x)?;
        let inputs = [x, b.param(&format!("{module}.weight"), &[width, out])?, b.param(&format!("{module}.bias"), &[out])?];
        b.node(node, Linear { input_major: true }, &inputs)
    }
}
