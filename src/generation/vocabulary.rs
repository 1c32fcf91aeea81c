//! Texts as tokens, and tokens as texts.

use crate::data::{Target, Tokenizer};
use crate::error::{Error, Result};
use crate::ir::{Graph, Port};
use crate::model::Model;

/// A model's tokenizer.
pub struct Vocabulary {
    tokenizer: Tokenizer,
    folder: String,
}

impl Vocabulary {
    pub(super) fn open(model: &Model, graph: &Graph) -> Result<Vocabulary> {
        let (inputs, outputs) = Port::of(graph);
        let target = Target { folder: &model.path, made: &model.beside.made, config: model.config.values(), inputs: &inputs, outputs: &outputs };
        Ok(Vocabulary { tokenizer: Tokenizer::open(&target, None)?, folder: model.path.display().to_string() })
    }

    /// The tokens of a text, with those around it that the tokenizer puts there.
    ///
    /// # Errors
    /// The tokenizer does not take it.
    pub fn encode(&self, text: &str) -> Result<Vec<i64>> {
        self.tokenizer.uncut(text, true)
    }

    /// The tokens of a text that a chat template has made, which holds the special ones.
    ///
    /// # Errors
    /// The tokenizer does not take it.
    pub fn encode_chat(&self, text: &str) -> Result<Vec<i64>> {
        self.tokenizer.uncut(text, false)
    }

    /// The text of a continuation, which depends on what stands before: a blank may belong to its first token. Special tokens are left out.
    ///
    /// # Errors
    /// The tokenizer does not take the tokens.
    pub fn continuation(&self, prompt: &[i64], tokens: &[i64]) -> Result<String> {
        let (before, whole) = (self.tokenizer.decode(prompt)?, self.tokenizer.decode(&[prompt, tokens].concat())?);
        match whole.strip_prefix(&before) {
            Some(text) => Ok(text.to_owned()),
            // The last character of the prompt is made of tokens of both.
            None => self.tokenizer.decode(tokens),
        }
    }

    /// The text of tokens, without special ones.
    ///
    /// # Errors
    /// The tokenizer does not take them.
    pub fn decode(&self, tokens: &[i64]) -> Result<String> {
        self.tokenizer.decode(tokens)
    }

    /// A token by name.
    pub fn token(&self, token: i64) -> String {
        self.tokenizer.token(token).unwrap_or_else(|| format!("<{token}>"))
    }

    /// Holds another model's tokenizer to have the same tokens.
    ///
    /// # Errors
    /// It has others.
    pub fn require_same(&self, other: &Vocabulary) -> Result<()> {
        let (own, others) = (self.tokenizer.vocabulary(), other.tokenizer.vocabulary());
        if own == others {
            return Ok(());
        }
        let differs =
            own.iter().find(|(token, number)| others.get(*token) != Some(number)).or_else(|| others.iter().find(|(token, _)| !own.contains_key(*token)));
        let example = differs.map_or(String::new(), |(token, _)| format!("; they differ in `{token}`"));
        Err(Error::option(
            "--against",
            format!("{} has {} tokens and {} has {}{example}: continuations cannot be compared", self.folder, own.len(), other.folder, others.len()),
        ))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Map, json};

    use super::*;

    fn opened(tokenizer: &serde_json::Value) -> Vocabulary {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
        let target = Target { folder: folder.path(), made: &crate::model::Made::new(), config: &Map::new(), inputs: &[], outputs: &[] };
        Vocabulary { tokenizer: Tokenizer::open(&target, None).unwrap(), folder: "here".into() }
    }

    fn of_bytes() -> serde_json::Value {
        let bytes = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true });
        json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null, "pre_tokenizer": bytes, "post_processor": null, "decoder": bytes,
            "model": { "type": "BPE", "vocab": { "Ã": 0, "¤": 1, "a": 2, "Ġ": 3 }, "merges": [] },
        })
    }

    #[test]
    fn characters_of_several_tokens_are_whole() {
        let vocabulary = opened(&of_bytes());
        assert_eq!(vocabulary.encode("a ä").unwrap(), [2, 3, 0, 1]);
        assert_eq!(vocabulary.continuation(&[2], &[3, 0, 1, 2]).unwrap(), " äa");
        // The prompt ends within a character, or the continuation does.
        assert_eq!(vocabulary.continuation(&[2, 0], &[1, 2]).unwrap(), "\u{fffd}a");
        assert_eq!(vocabulary.continuation(&[2], &[2, 0]).unwrap(), "a\u{fffd}");
        assert_eq!((vocabulary.token(3), vocabulary.token(77)), ("Ġ".into(), "<77>".into()));
    }

    #[test]
    fn blanks_between_prompt_and_continuation_stay() {
        let blanks = json!({ "type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": false });
        let vocabulary = opened(&json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null, "pre_tokenizer": blanks, "post_processor": null, "decoder": blanks,
            "model": { "type": "BPE", "vocab": { "▁": 0, "a": 1, "b": 2 }, "merges": [] },
        }));
        assert_eq!(vocabulary.encode("a").unwrap(), [0, 1]);
        assert_eq!(vocabulary.continuation(&[0, 1], &[0, 2, 1]).unwrap(), " ba");
        let refused = vocabulary.require_same(&opened(&of_bytes())).unwrap_err().to_string();
        assert!(refused.contains("has 3 tokens and here has 4"), "{refused}");
    }
}
