//! RoBERTa and XLM-R: BERT with positions after the padding id, and different heads.

use super::bert::BERT;
use super::{Family, PositionOffset, Positions, classifier};

pub(super) const ROBERTA: Family = Family {
    model_type: "roberta",
    graph: graph!(running::build),
    classifier: classifier("RobertaForSequenceClassification", "roberta.", &["classifier.dense", "classifier.out_proj"]),
    tied: &[("lm_head.decoder.weight", "roberta.embeddings.word_embeddings.weight")],
    heads: &["lm_head"],
    positions: Positions { offset: PositionOffset::AfterPadding, ..Positions::DEFAULT },
    ..BERT
};

pub(super) const XLM_ROBERTA: Family = Family {
    model_type: "xlm-roberta",
    classifier: classifier("XLMRobertaForSequenceClassification", "roberta.", &["classifier.dense", "classifier.out_proj"]),
    ..ROBERTA
};

pub(super) const CAMEMBERT: Family = Family { model_type: "camembert", graph: None, classifier: None, ..ROBERTA };

#[cfg(feature = "run")]
mod running {
    use crate::arch::bert::running::{classes, encode, pooler, words};
    use crate::arch::running::Settings;
    use crate::arch::running::parts::text_inputs;
    use crate::error::{Error, Result};
    use crate::ir::Builder;
    use crate::ir::ops::Positions;

    pub fn build(s: &Settings, b: &mut Builder) -> Result<()> {
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
        // There is only one token type: its row is broadcast to all positions.
        let types = b.param(&format!("{prefix}embeddings.token_type_embeddings.weight"), &[1, hidden])?;
        let x = encode(s, b, prefix, tokens, positions, types, mask)?;
        b.output("last_hidden_state", x);
        pooler(b, prefix, x)?;
        if s.class().ends_with("ForSequenceClassification") {
            classes(s, b, x)?;
        } else if s.class().ends_with("ForMaskedLM") || s.class().ends_with("ForCausalLM") {
            words(s, b, prefix, x)?;
        }
        Ok(())
    }
}
