//! MPNet: BERT without token types, with relative position bias (Song et al., 2020).

use super::{ENCODER, Family, Keys, PositionOffset, Positions, Sizes, bert, classifier};
use crate::store::Role;

pub(super) const MPNET: Family = Family {
    model_type: "mpnet",
    graph: graph!(running::build),
    keys: Keys { harmless: bert::KEYS.harmless, neutral: &[("is_decoder", "false")] },
    sizes: Some(&Sizes { prefixes: &["mpnet.", ""], heads: ("num_attention_heads", "encoder.layer.0.attention.attn.q.weight", 0), ..bert::SIZES }),
    classifier: classifier("MPNetForSequenceClassification", "mpnet.", &["classifier.dense", "classifier.out_proj"]),
    tied: &[("lm_head.decoder.weight", "mpnet.embeddings.word_embeddings.weight")],
    fused: &[&["attn.q", "attn.k", "attn.v"]],
    heads: &["lm_head"],
    exempt: &[("relative_attention_bias", Role::Other)],
    positions: Positions { offset: PositionOffset::Fixed(2), ..Positions::DEFAULT },
    ..ENCODER
};

#[cfg(feature = "run")]
mod running {
    use crate::arch::bert::running as bert;
    use crate::arch::bert::running::{classes, pooler};
    use crate::arch::running::Settings;
    use crate::arch::running::block::{Block, Names, NormPosition};
    use crate::arch::running::parts::{layer_norm, text_inputs};
    use crate::error::Result;
    use crate::ir::Builder;
    use crate::ir::ops::{Add, Attention, Embedding, Positions, RelativeBias};

    const NAMES: Names = Names {
        attention: "attention.attn",
        qkv: ["q", "k", "v"],
        out: "attention.attn.o",
        attended: "attention.sum",
        norms: ["attention.LayerNorm", "output.LayerNorm"],
        ..bert::NAMES
    };

    /// The padding token for positions, regardless of the configuration.
    const PADDING: i64 = 1;

    pub fn build(s: &Settings, b: &mut Builder) -> Result<()> {
        let prefix = if b.has("mpnet.embeddings.word_embeddings.weight") { "mpnet." } else { "" };
        let (hidden, epsilon) = (s.size("hidden_size")?, s.number_or("layer_norm_eps", 1e-12)?);
        let (tokens, mask) = text_inputs(b)?;
        let words = b.param(&format!("{prefix}embeddings.word_embeddings.weight"), &[s.size("vocab_size")?, hidden])?;
        let words = b.node("embeddings.word_embeddings", Embedding {}, &[tokens, words])?;
        let positions = b.node("embeddings.positions", Positions { padding: Some(PADDING), offset: 0 }, &[tokens])?;
        let table = b.param(&format!("{prefix}embeddings.position_embeddings.weight"), &[s.size_or("max_position_embeddings", 512)?, hidden])?;
        let positions = b.node("embeddings.position_embeddings", Embedding {}, &[positions, table])?;
        let sum = b.node("embeddings.sum", Add {}, &[words, positions])?;
        let mut x = layer_norm(b, "embeddings.LayerNorm", &format!("{prefix}embeddings.LayerNorm"), sum, epsilon)?;
        // The bias uses 32 buckets, regardless of the number of rows in the table.
        let rows = [s.size_or("relative_attention_num_buckets", 32)?, s.size("num_attention_heads")?];
        let table = b.param(&format!("{prefix}encoder.relative_attention_bias.weight"), &rows)?;
        let block = Block {
            names: &NAMES,
            norms: NormPosition::After,
            epsilon,
            head_dim: s.head_dim("hidden_size", "num_attention_heads")?,
            attention: Attention::default(),
            extras: &[],
            qkv_bias: None,
            cross: None,
            neurons: s.size("intermediate_size")?,
            activation: Some(s.text_or("hidden_act", "gelu")?),
        };
        for index in 0..s.size("num_hidden_layers")? {
            let node = format!("encoder.layer.{index}");
            // Each layer recomputes the bias, so that the residual stream is the only activation passed
            // between layers.
            let bias = b.node(&format!("{node}.attention.bias"), RelativeBias::default(), &[tokens, table])?;
            let block = Block { extras: &[mask, bias], ..block };
            x = block.add(b, &node, &format!("{prefix}{node}"), x)?;
        }
        b.output("last_hidden_state", x);
        pooler(b, prefix, x)?;
        if s.class() == "MPNetForSequenceClassification" {
            classes(s, b, x)?;
        } else if s.class() == "MPNetForMaskedLM" {
            bert::words(s, b, prefix, x)?;
        }
        Ok(())
    }
}
