//! RoBERTa and XLM-R: BERT with positions counted behind the padding token, and heads of their own.

use super::Settings;
use super::bert::{encode, tied_head};
use super::parts::{has_head, layer_norm, linear, text_inputs};
use crate::error::{Error, Result};
use crate::ir::Builder;
use crate::ir::ops::{Gelu, Positions, Select, Tanh};

pub(super) fn build(s: &Settings, b: &mut Builder) -> Result<()> {
    let prefix = if b.has("roberta.embeddings.word_embeddings.weight") { "roberta." } else { "" };
    let hidden = s.size("hidden_size")?;
    let (tokens, mask) = text_inputs(b)?;
    let positions = b.node("embeddings.positions", Positions { padding: Some(s.token_or("pad_token_id", 1)?), offset: 0 }, &[tokens])?;
    if s.size_or("type_vocab_size", 2)? != 1 {
        return Err(Error::Unsupported {
            what: format!("a {} model with several token types", s.text("model_type")?),
            hint: "type_vocab_size must be 1".into(),
        });
    }
    // All tokens have the only type there is: its one row stands for every position.
    let types = b.param(&format!("{prefix}embeddings.token_type_embeddings.weight"), &[1, hidden])?;
    let x = encode(s, b, prefix, tokens, positions, types, mask)?;
    b.output("last_hidden_state", x);
    let pooler = format!("{prefix}pooler.dense");
    if b.has(&format!("{pooler}.weight")) {
        let first = b.node("pooler.first", Select { index: 0 }, &[x])?;
        let dense = linear(b, "pooler.dense", &pooler, first, hidden)?;
        let pooled = b.node("pooler", Tanh {}, &[dense])?;
        b.output("pooler_output", pooled);
    }
    if s.class().ends_with("ForSequenceClassification") {
        let first = b.node("classifier.first", Select { index: 0 }, &[x])?;
        let dense = linear(b, "classifier.dense", "classifier.dense", first, hidden)?;
        let active = b.node("classifier.act", Tanh {}, &[dense])?;
        let logits = linear(b, "classifier.out_proj", "classifier.out_proj", active, s.labels()?)?;
        b.output("logits", logits);
    } else if (s.class().ends_with("ForMaskedLM") || s.class().ends_with("ForCausalLM")) && has_head(b, prefix, "lm_head.dense") {
        let dense = linear(b, "lm_head.dense", "lm_head.dense", x, hidden)?;
        let active = b.node("lm_head.act", Gelu { tanh: false }, &[dense])?;
        let normed = layer_norm(b, "lm_head.layer_norm", "lm_head.layer_norm", active, s.number_or("layer_norm_eps", 1e-12)?)?;
        let logits = tied_head(s, b, "lm_head.decoder", &format!("{prefix}embeddings.word_embeddings.weight"), "lm_head.bias", normed)?;
        b.output("logits", logits);
    }
    Ok(())
}
