//! Conversion between texts and tokens.

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
        let (inputs, outputs) = Port::from_graph(graph);
        let target = Target { inputs: &inputs, outputs: &outputs, ..Target::new(&model.path, &model.auxiliary.synthesized, model.config.values()) };
        Ok(Vocabulary { tokenizer: Tokenizer::open(&target, None)?, folder: model.path.display().to_string() })
    }

    /// Tokenizes a text, with special tokens.
    pub fn encode(&self, text: &str) -> Result<Vec<i64>> {
        self.tokenizer.untruncated(text, true)
    }

    /// Tokenizes a rendered chat, which already contains its special tokens.
    pub fn encode_chat(&self, text: &str) -> Result<Vec<i64>> {
        self.tokenizer.untruncated(text, false)
    }

    /// Decodes a continuation in the context of its prompt, since its first token may include a space.
    /// Special tokens are omitted.
    pub fn continuation(&self, prompt: &[i64], tokens: &[i64]) -> Result<String> {
        let (before, whole) = (self.tokenizer.decode(prompt)?, self.tokenizer.decode(&[prompt, tokens].concat())?);
        match whole.strip_prefix(&before) {
            Some(text) => Ok(text.to_owned()),
            // A character consists of tokens from both prompt and continuation.
            None => self.tokenizer.decode(tokens),
        }
    }

    /// Decodes tokens, without special tokens.
    pub fn decode(&self, tokens: &[i64]) -> Result<String> {
        self.tokenizer.decode(tokens)
    }

    /// The vocabulary entry of a token, or its id in angle brackets.
    pub fn token(&self, token: i64) -> String {
        self.tokenizer.token(token).unwrap_or_else(|| format!("<{token}>"))
    }

    /// Checks that another model's tokenizer has the same vocabulary.
    pub fn require_same(&self, other: &Vocabulary) -> Result<()> {
        let (own, others) = (self.tokenizer.vocabulary(), other.tokenizer.vocabulary());
        if own == others {
            return Ok(());
        }
        let differs =
            own.iter().find(|(token, number)| others.get(*token) != Some(number)).or_else(|| others.iter().find(|(token, _)| !own.contains_key(*token)));
        let example = differs.map_or(String::new(), |(token, _)| format!("; they differ, for example, in `{token}`"));
        Err(Error::option(
            "--against",
            format!(
                "the vocabulary of {} has {} tokens, that of {} has {}{example}: continuations cannot be compared",
                self.folder,
                own.len(),
                other.folder,
                others.len()
            ),
        ))
    }

    /// Checks that each token of this model has the same id in a draft's vocabulary. The draft may have
    /// additional tokens.
    pub fn require_draft(&self, draft: &Vocabulary) -> Result<()> {
        let (own, others) = (self.tokenizer.vocabulary(), draft.tokenizer.vocabulary());
        let Some((token, id)) = own.iter().filter(|(token, id)| others.get(*token) != Some(id)).min_by_key(|(_, id)| **id) else { return Ok(()) };
        let difference = others.get(token).map_or("does not have it".to_owned(), |other| format!("has it with id {other}"));
        Err(Error::option(
            "--draft",
            format!(
                "`{token}` has id {id} in the vocabulary of {} ({} tokens), but {} ({} tokens) {difference}: both models must have the same tokens",
                self.folder,
                own.len(),
                draft.folder,
                others.len()
            ),
        ))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn vocabulary(tokenizer: &serde_json::Value) -> Vocabulary {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
        let (synthesized, config) = Default::default();
        let target = Target::new(folder.path(), &synthesized, &config);
        Vocabulary { tokenizer: Tokenizer::open(&target, None).unwrap(), folder: "here".into() }
    }

    fn byte_tokenizer() -> serde_json::Value {
        let bytes = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true });
        json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null, "pre_tokenizer": bytes, "post_processor": null, "decoder": bytes,
            "model": { "type": "BPE", "vocab": { "Ã": 0, "¤": 1, "a": 2, "Ġ": 3 }, "merges": [] },
        })
    }

    #[test]
    fn characters_of_several_tokens_are_decoded() {
        let vocabulary = vocabulary(&byte_tokenizer());
        assert_eq!(vocabulary.encode("a ä").unwrap(), [2, 3, 0, 1]);
        assert_eq!(vocabulary.continuation(&[2], &[3, 0, 1, 2]).unwrap(), " äa");
        // The prompt ends within a character, or the continuation does.
        assert_eq!(vocabulary.continuation(&[2, 0], &[1, 2]).unwrap(), "\u{fffd}a");
        assert_eq!(vocabulary.continuation(&[2], &[2, 0]).unwrap(), "a\u{fffd}");
        assert_eq!((vocabulary.token(3), vocabulary.token(77)), ("Ġ".into(), "<77>".into()));
    }

    #[test]
    fn spaces_between_prompt_and_continuation_are_kept() {
        let blanks = json!({ "type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": false });
        let metaspace = vocabulary(&json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null, "pre_tokenizer": blanks, "post_processor": null, "decoder": blanks,
            "model": { "type": "BPE", "vocab": { "▁": 0, "a": 1, "b": 2 }, "merges": [] },
        }));
        assert_eq!(metaspace.encode("a").unwrap(), [0, 1]);
        assert_eq!(metaspace.continuation(&[0, 1], &[0, 2, 1]).unwrap(), " ba");
        let refused = metaspace.require_same(&vocabulary(&byte_tokenizer())).unwrap_err().to_string();
        assert!(refused.contains("has 3 tokens, that of here has 4"), "{refused}");
    }

    /// A draft may have more tokens, but none with another id, as after `prune-vocabulary`.
    #[test]
    fn drafts_have_the_tokens_of_the_model() {
        let with = |tokens: serde_json::Value| {
            let mut tokenizer = byte_tokenizer();
            tokenizer["model"]["vocab"] = tokens;
            vocabulary(&tokenizer)
        };
        let model = vocabulary(&byte_tokenizer());
        let draft = |tokens: serde_json::Value| model.require_draft(&with(tokens)).map_err(|e| e.to_string());
        assert_eq!(draft(json!({ "Ã": 0, "¤": 1, "a": 2, "Ġ": 3 })), Ok(()));
        assert_eq!(draft(json!({ "Ã": 0, "¤": 1, "a": 2, "Ġ": 3, "b": 4 })), Ok(()));
        let refused = draft(json!({ "Ã": 0, "a": 1, "Ġ": 2 })).unwrap_err();
        assert!(refused.contains("`¤` has id 1") && refused.contains("(3 tokens) does not have it"), "{refused}");
        let refused = draft(json!({ "Ã": 0, "¤": 1, "a": 3, "Ġ": 2 })).unwrap_err();
        assert!(refused.contains("`a` has id 2") && refused.contains("has it with id 3"), "{refused}");
    }
}
