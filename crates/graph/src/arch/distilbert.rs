//! DistilBERT: BERT without token types and pooler, with its own names.

use super::{ENCODER, Family, Keys, Sizes, bert, classifier};

pub(super) const DISTILBERT: Family = Family {
    model_type: "distilbert",
    graph: graph!(running::build),
    keys: Keys {
        // Sinusoids only initialize a position embedding table that is not stored.
        harmless: &["attention_dropout", "dropout", "qa_dropout", "seq_classif_dropout", "sinusoidal_pos_embds"],
        neutral: &[],
    },
    sizes: Some(&Sizes {
        prefixes: &["distilbert.", ""],
        hidden: ("dim", "embeddings.word_embeddings.weight", 1),
        heads: ("n_heads", "transformer.layer.0.attention.q_lin.weight", 0),
        other_sizes: &[("hidden_dim", "transformer.layer.0.ffn.lin1.weight", 0)],
        layers: "n_layers",
        ..bert::SIZES
    }),
    classifier: classifier("DistilBertForSequenceClassification", "distilbert.", &["pre_classifier", "classifier"]),
    tied: &[("vocab_projector.weight", "distilbert.embeddings.word_embeddings.weight")],
    fused: &[&["q_lin", "k_lin", "v_lin"]],
    heads: &["vocab_projector"],
    ..ENCODER
};

#[cfg(feature = "run")]
mod running {
    use crate::arch::bert::running::tied_head;
    use crate::arch::running::Settings;
    use crate::arch::running::block::{Block, Names, NormPosition};
    use crate::arch::running::parts::{activate, has_head, layer_norm, linear, text_inputs};
    use crate::error::Result;
    use crate::ir::Builder;
    use crate::ir::ops::{Add, Attention, Embedding, Positions, Relu, Select};

    const EPSILON: f64 = 1e-12;

    const NAMES: Names = Names {
        attention: "attention",
        qkv: ["q_lin", "k_lin", "v_lin"],
        out: "attention.out_lin",
        attended: "attention.sum",
        norms: ["sa_layer_norm", "output_layer_norm"],
        network: ["ffn.lin1", "ffn.act", "ffn.lin2"],
        sum: "ffn.sum",
        scales: None,
    };

    pub fn build(s: &Settings, b: &mut Builder) -> Result<()> {
        let prefix = if b.has("distilbert.embeddings.word_embeddings.weight") { "distilbert." } else { "" };
        let width = s.size("dim")?;
        let head_dim = s.head_dim("dim", "n_heads")?;
        let (tokens, mask) = text_inputs(b)?;
        let words = b.param(&format!("{prefix}embeddings.word_embeddings.weight"), &[s.size("vocab_size")?, width])?;
        let words = b.node("embeddings.word_embeddings", Embedding {}, &[tokens, words])?;
        let positions = b.node("embeddings.positions", Positions::default(), &[tokens])?;
        let table = b.param(&format!("{prefix}embeddings.position_embeddings.weight"), &[s.size("max_position_embeddings")?, width])?;
        let positions = b.node("embeddings.position_embeddings", Embedding {}, &[positions, table])?;
        let sum = b.node("embeddings.sum", Add {}, &[words, positions])?;
        let x = layer_norm(b, "embeddings.LayerNorm", &format!("{prefix}embeddings.LayerNorm"), sum, EPSILON)?;
        let block = Block {
            names: &NAMES,
            norms: NormPosition::After,
            epsilon: EPSILON,
            head_dim,
            attention: Attention::default(),
            extras: &[mask],
            qkv_bias: None,
            cross: None,
            neurons: s.size("hidden_dim")?,
            activation: Some(s.text_or("activation", "gelu")?),
        };
        let x = block.stack(b, prefix, "transformer.layer", s.size("n_layers")?, x)?;
        b.output("last_hidden_state", x);
        if s.class() == "DistilBertForSequenceClassification" {
            let first = b.node("pre_classifier.first", Select { index: 0 }, &[x])?;
            let dense = linear(b, "pre_classifier", "pre_classifier", first, width)?;
            let active = b.node("pre_classifier.act", Relu {}, &[dense])?;
            let logits = linear(b, "classifier", "classifier", active, s.labels()?)?;
            b.output("logits", logits);
        } else if s.class() == "DistilBertForMaskedLM" && has_head(b, prefix, "vocab_transform") {
            let dense = linear(b, "vocab_transform", "vocab_transform", x, width)?;
            let active = activate(b, "vocab_transform.act", s.text_or("activation", "gelu")?, dense)?;
            let normed = layer_norm(b, "vocab_layer_norm", "vocab_layer_norm", active, EPSILON)?;
            let logits = tied_head(s, b, "vocab_projector", &format!("{prefix}embeddings.word_embeddings.weight"), "vocab_projector.bias", normed)?;
            b.output("logits", logits);
        }
        Ok(())
    }
}
