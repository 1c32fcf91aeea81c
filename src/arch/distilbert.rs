//! DistilBERT: BERT without token types and pooler, and with its own names.

use super::bert::tied_head;
use super::parts::{activation, attend, layer_norm, linear, text_inputs};
use super::resize::Sizes;
use super::{Keys, Settings};
use crate::error::Result;
use crate::ir::Builder;
use crate::ir::ops::{Add, Embedding, Positions, Relu, Select};

const EPSILON: f64 = 1e-12;

pub(super) const KEYS: Keys = Keys {
    // Sinusoids only fill the table of positions where none is stored.
    harmless: &["attention_dropout", "dropout", "qa_dropout", "seq_classif_dropout", "sinusoidal_pos_embds"],
    neutral: &[],
};

pub(super) const SIZES: Sizes = Sizes {
    prefixes: &["distilbert.", ""],
    hidden: ("dim", "embeddings.word_embeddings.weight", 1),
    heads: ("n_heads", "transformer.layer.0.attention.q_lin.weight", 0),
    groups: None,
    head_dim: None,
    own_head_dim: false,
    heads_divide: false,
    others: &[("hidden_dim", "transformer.layer.0.ffn.lin1.weight", 0)],
    layers: "n_layers",
};

pub(super) fn build(s: &Settings, b: &mut Builder) -> Result<()> {
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
    let mut x = layer_norm(b, "embeddings.LayerNorm", &format!("{prefix}embeddings.LayerNorm"), sum, EPSILON)?;
    for index in 0..s.size("n_layers")? {
        let node = format!("transformer.layer.{index}");
        let module = format!("{prefix}{node}");
        let mut qkv = [x; 3];
        for (value, part) in qkv.iter_mut().zip(["q_lin", "k_lin", "v_lin"]) {
            *value = linear(b, &format!("{node}.attention.{part}"), &format!("{module}.attention.{part}"), x, width)?;
        }
        let context = attend(b, &format!("{node}.attention"), qkv, head_dim, Some(mask), false)?;
        let dense = linear(b, &format!("{node}.attention.out_lin"), &format!("{module}.attention.out_lin"), context, width)?;
        let sum = b.node(&format!("{node}.attention.sum"), Add {}, &[dense, x])?;
        let attended = layer_norm(b, &format!("{node}.sa_layer_norm"), &format!("{module}.sa_layer_norm"), sum, EPSILON)?;
        let wide = linear(b, &format!("{node}.ffn.lin1"), &format!("{module}.ffn.lin1"), attended, s.size("hidden_dim")?)?;
        let active = b.node(&format!("{node}.ffn.act"), activation(s.text_or("activation", "gelu")?)?, &[wide])?;
        let dense = linear(b, &format!("{node}.ffn.lin2"), &format!("{module}.ffn.lin2"), active, width)?;
        let sum = b.node(&format!("{node}.ffn.sum"), Add {}, &[dense, attended])?;
        x = layer_norm(b, &format!("{node}.output_layer_norm"), &format!("{module}.output_layer_norm"), sum, EPSILON)?;
    }
    b.output("last_hidden_state", x);
    if s.class() == "DistilBertForSequenceClassification" {
        let first = b.node("pre_classifier.first", Select { index: 0 }, &[x])?;
        let dense = linear(b, "pre_classifier", "pre_classifier", first, width)?;
        let active = b.node("pre_classifier.act", Relu {}, &[dense])?;
        let logits = linear(b, "classifier", "classifier", active, s.labels()?)?;
        b.output("logits", logits);
    } else if s.class() == "DistilBertForMaskedLM" {
        let dense = linear(b, "vocab_transform", "vocab_transform", x, width)?;
        let active = b.node("vocab_transform.act", activation(s.text_or("activation", "gelu")?)?, &[dense])?;
        let normed = layer_norm(b, "vocab_layer_norm", "vocab_layer_norm", active, EPSILON)?;
        let logits = tied_head(s, b, "vocab_projector", &format!("{prefix}embeddings.word_embeddings.weight"), "vocab_projector.bias", normed)?;
        b.output("logits", logits);
    }
    Ok(())
}
