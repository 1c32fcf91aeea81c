//! BERT: base, sequence classification, masked language model.

use super::{ENCODER, Family, Keys, Sizes, classifier};

pub(super) const KEYS: Keys =
    Keys { harmless: &["attention_probs_dropout_prob", "classifier_dropout", "hidden_dropout_prob"], neutral: &[("position_embedding_type", "\"absolute\"")] };

pub(super) const SIZES: Sizes = Sizes {
    prefixes: &["bert.", "roberta.", ""],
    hidden: ("hidden_size", "embeddings.word_embeddings.weight", 1),
    heads: ("num_attention_heads", "encoder.layer.0.attention.self.query.weight", 0),
    decoder_heads: None,
    groups: None,
    head_dim: None,
    custom_head_dim_default: false,
    heads_must_divide: false,
    other_sizes: &[("intermediate_size", "encoder.layer.0.intermediate.dense.weight", 0)],
    layers: "num_hidden_layers",
    unread: &[],
};

pub(super) const BERT: Family = Family {
    model_type: "bert",
    graph: graph!(running::build),
    keys: KEYS,
    sizes: Some(&SIZES),
    classifier: classifier("BertForSequenceClassification", "bert.", &["bert.pooler.dense", "classifier"]),
    tied: &[("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight")],
    fused: &[&["query", "key", "value"]],
    heads: &["cls.predictions"],
    ..ENCODER
};

#[cfg(feature = "run")]
pub(super) mod running {
    use crate::arch::running::Settings;
    use crate::arch::running::block::{Block, Names, NormPosition};
    use crate::arch::running::parts::{activate, has_head, layer_norm, linear, text_inputs};
    use crate::error::Result;
    use crate::ir::ops::{Add, Attention, Embedding, Gelu, Linear, Positions, Select, Tanh};
    use crate::ir::{Builder, Dim, TensorType, ValueId};

    pub const NAMES: Names = Names {
        attention: "attention.self",
        qkv: ["query", "key", "value"],
        out: "attention.output.dense",
        attended: "attention.output.sum",
        norms: ["attention.output.LayerNorm", "output.LayerNorm"],
        network: ["intermediate.dense", "intermediate.act", "output.dense"],
        sum: "output.sum",
        scales: None,
    };

    pub fn build(s: &Settings, b: &mut Builder) -> Result<()> {
        let prefix = if b.has("bert.embeddings.word_embeddings.weight") { "bert." } else { "" };
        let (tokens, mask) = text_inputs(b)?;
        let types = b.input("token_type_ids", TensorType::int([Dim::named("batch"), Dim::named("sequence")]))?;
        let positions = b.node("embeddings.positions", Positions::default(), &[tokens])?;
        let type_table = b.param(&format!("{prefix}embeddings.token_type_embeddings.weight"), &[s.size("type_vocab_size")?, s.size("hidden_size")?])?;
        let types = b.node("embeddings.token_type_embeddings", Embedding {}, &[types, type_table])?;
        let hidden = encode(s, b, prefix, tokens, positions, types, mask)?;
        b.output("last_hidden_state", hidden);
        let pooled = pooler(b, prefix, hidden)?;
        match (s.class(), pooled) {
            ("BertForSequenceClassification", Some(pooled)) => {
                let logits = linear(b, "classifier", "classifier", pooled, s.labels()?)?;
                b.output("logits", logits);
            }
            ("BertForMaskedLM" | "BertForPreTraining" | "BertLMHeadModel", _) if has_head(b, prefix, "cls.predictions.transform.dense") => {
                let dense = linear(b, "cls.predictions.transform.dense", "cls.predictions.transform.dense", hidden, s.size("hidden_size")?)?;
                let active = activate(b, "cls.predictions.transform.act", s.text_or("hidden_act", "gelu")?, dense)?;
                let normed =
                    layer_norm(b, "cls.predictions.transform.LayerNorm", "cls.predictions.transform.LayerNorm", active, s.number_or("layer_norm_eps", 1e-12)?)?;
                let logits = tied_head(s, b, "cls.predictions.decoder", &format!("{prefix}embeddings.word_embeddings.weight"), "cls.predictions.bias", normed)?;
                b.output("logits", logits);
            }
            _ => {}
        }
        Ok(())
    }

    /// Adds the pooler of the first token and its output, if the checkpoint contains it.
    pub fn pooler(b: &mut Builder, prefix: &str, x: ValueId) -> Result<Option<ValueId>> {
        let module = format!("{prefix}pooler.dense");
        if !b.has(&format!("{module}.weight")) {
            return Ok(None);
        }
        let (first, width) = (b.node("pooler.first", Select { index: 0 }, &[x])?, b.width(x)?);
        let dense = linear(b, "pooler.dense", &module, first, width)?;
        let pooled = b.node("pooler", Tanh {}, &[dense])?;
        b.output("pooler_output", pooled);
        Ok(Some(pooled))
    }

    /// RoBERTa's classification head with two layers.
    pub fn classes(s: &Settings, b: &mut Builder, x: ValueId) -> Result<()> {
        let (first, width) = (b.node("classifier.first", Select { index: 0 }, &[x])?, b.width(x)?);
        let dense = linear(b, "classifier.dense", "classifier.dense", first, width)?;
        let active = b.node("classifier.act", Tanh {}, &[dense])?;
        let logits = linear(b, "classifier.out_proj", "classifier.out_proj", active, s.labels()?)?;
        b.output("logits", logits);
        Ok(())
    }

    /// RoBERTa's language-model head, if the checkpoint contains it.
    pub fn words(s: &Settings, b: &mut Builder, prefix: &str, x: ValueId) -> Result<()> {
        if !has_head(b, prefix, "lm_head.dense") {
            return Ok(());
        }
        let width = b.width(x)?;
        let dense = linear(b, "lm_head.dense", "lm_head.dense", x, width)?;
        let active = b.node("lm_head.act", Gelu { tanh: false }, &[dense])?;
        let normed = layer_norm(b, "lm_head.layer_norm", "lm_head.layer_norm", active, s.number_or("layer_norm_eps", 1e-12)?)?;
        let logits = tied_head(s, b, "lm_head.decoder", &format!("{prefix}embeddings.word_embeddings.weight"), "lm_head.bias", normed)?;
        b.output("logits", logits);
        Ok(())
    }

    /// A head whose weight is the embedding table, unless it is stored under its own name. Its bias has two
    /// names, of which its own takes precedence; transformers 4 only stores the other name, even without tied
    /// embeddings.
    pub fn tied_head(s: &Settings, b: &mut Builder, module: &str, table: &str, bias: &str, x: ValueId) -> Result<ValueId> {
        let shape = [s.size("vocab_size")?, b.width(x)?];
        let [own, own_bias] = ["weight", "bias"].map(|part| format!("{module}.{part}"));
        let tied = s.flag_or("tie_word_embeddings", true)?;
        let weight = b.param(if b.stores(&own) || !tied { &own } else { table }, &shape)?;
        let bias = b.param(if b.stores(&own_bias) || (!tied && !b.stores(bias)) { &own_bias } else { bias }, &shape[..1])?;
        b.node(module, Linear { input_major: false }, &[x, weight, bias])
    }

    /// Embeddings and encoder layers, shared with RoBERTa.
    pub fn encode(s: &Settings, b: &mut Builder, prefix: &str, tokens: ValueId, positions: ValueId, types: ValueId, mask: ValueId) -> Result<ValueId> {
        let (hidden, epsilon) = (s.size("hidden_size")?, s.number_or("layer_norm_eps", 1e-12)?);
        let head_dim = s.head_dim("hidden_size", "num_attention_heads")?;
        let causal = s.flag_or("is_decoder", false)? && s.flag_or("is_causal", true)?;
        let words = b.param(&format!("{prefix}embeddings.word_embeddings.weight"), &[s.size("vocab_size")?, hidden])?;
        let words = b.node("embeddings.word_embeddings", Embedding {}, &[tokens, words])?;
        let table = b.param(&format!("{prefix}embeddings.position_embeddings.weight"), &[s.size("max_position_embeddings")?, hidden])?;
        let positions = b.node("embeddings.position_embeddings", Embedding {}, &[positions, table])?;
        let sum = b.node("embeddings.with_types", Add {}, &[words, types])?;
        let sum = b.node("embeddings.sum", Add {}, &[sum, positions])?;
        let x = layer_norm(b, "embeddings.LayerNorm", &format!("{prefix}embeddings.LayerNorm"), sum, epsilon)?;
        let block = Block {
            names: &NAMES,
            norms: NormPosition::After,
            epsilon,
            head_dim,
            attention: Attention { causal, ..Attention::default() },
            extras: &[mask],
            qkv_bias: None,
            cross: None,
            neurons: s.size("intermediate_size")?,
            activation: Some(s.text_or("hidden_act", "gelu")?),
        };
        block.stack(b, prefix, "encoder.layer", s.size("num_hidden_layers")?, x)
    }
}
