//! What a model's own files say of how its texts are made.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use crate::error::{Error, Result};
use crate::model::{Model, config_beside};

/// The file beside `config.json`.
const FILE: &str = "generation_config.json";
/// Keys that change which token is the likeliest one and are not used, and what they do at rest.
const CHANGING: [(&str, f64); 14] = [
    ("repetition_penalty", 1.0),
    ("encoder_repetition_penalty", 1.0),
    ("no_repeat_ngram_size", 0.0),
    ("encoder_no_repeat_ngram_size", 0.0),
    ("min_length", 0.0),
    ("min_new_tokens", 0.0),
    ("num_beams", 1.0),
    ("bad_words_ids", f64::NAN),
    ("forced_bos_token_id", f64::NAN),
    ("forced_eos_token_id", f64::NAN),
    ("sequence_bias", f64::NAN),
    ("guidance_scale", 1.0),
    ("exponential_decay_length_penalty", f64::NAN),
    ("stop_strings", f64::NAN),
];

/// What `generation_config.json` says, or `config.json` where there is none, as in transformers.
pub(super) struct Settings {
    file: &'static str,
    said: Map<String, Value>,
    /// `config.json`, which counts where the other says nothing of some keys.
    config: Map<String, Value>,
}

impl Settings {
    /// Reads them.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn of(model: &Model) -> Result<Settings> {
        let settings = config_beside(&model.path, &model.beside.made, FILE)?;
        let config = model.config.values().clone();
        Ok(Settings::from_values(settings.values().clone(), config))
    }

    /// What both files say.
    pub fn from_values(said: Map<String, Value>, config: Map<String, Value>) -> Settings {
        if said.is_empty() { Settings { file: "config.json", said: config.clone(), config } } else { Settings { file: FILE, said, config } }
    }

    /// A value that is there and not null.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.said.get(key).filter(|value| !value.is_null())
    }

    /// The same, of `config.json` where there is none.
    pub fn get_anywhere(&self, key: &str) -> Option<&Value> {
        self.get(key).or_else(|| self.config.get(key).filter(|value| !value.is_null()))
    }

    /// A value that is not what it should be.
    pub fn wrong(&self, key: &str, wanted: &str) -> Error {
        let value = self.get_anywhere(key).cloned().unwrap_or_default();
        Error::graph(self.file, format!("`{key}` is {value}, expected {wanted}"))
    }

    /// A token.
    ///
    /// # Errors
    /// It is none.
    pub fn token(&self, key: &str) -> Result<Option<i64>> {
        self.get_anywhere(key).map(|value| value.as_i64().ok_or_else(|| self.wrong(key, "a token"))).transpose()
    }

    /// Tokens, of one or of a list of them.
    ///
    /// # Errors
    /// They are none.
    pub fn tokens(&self, key: &str) -> Result<BTreeSet<i64>> {
        self.numbers(key, self.get(key))
    }

    /// Tokens that end a text.
    ///
    /// # Errors
    /// They are no tokens.
    pub fn ends(&self) -> Result<BTreeSet<i64>> {
        self.numbers("eos_token_id", self.get_anywhere("eos_token_id"))
    }

    fn numbers(&self, key: &str, value: Option<&Value>) -> Result<BTreeSet<i64>> {
        let found = match value {
            None => Some(BTreeSet::new()),
            Some(Value::Array(list)) => list.iter().map(Value::as_i64).collect(),
            Some(value) => value.as_i64().map(|number| [number].into()),
        };
        found.ok_or_else(|| self.wrong(key, "a token or a list of them"))
    }

    /// Settings that would change what is the likeliest token and are not used, each with a word.
    pub fn changing(&self) -> Vec<String> {
        let changes = |(key, rest): &(&str, f64)| {
            let value = self.get(key)?;
            let changes = value.as_f64() != Some(*rest) && value.as_array().is_none_or(|list| !list.is_empty());
            changes.then(|| format!("{}: `{key}` of {value} is not used", self.file))
        };
        CHANGING.iter().filter_map(changes).collect()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn told(said: Value) -> Settings {
        Settings::from_values(said.as_object().cloned().unwrap_or_default(), Map::new())
    }

    #[test]
    fn settings_that_are_not_used_are_told() {
        let settings = |value: Value| told(value).changing();
        assert!(settings(json!({ "repetition_penalty": 1.0, "temperature": 0.6, "do_sample": true, "num_beams": 1, "bad_words_ids": [] })).is_empty());
        let told = settings(json!({ "repetition_penalty": 1.1, "bad_words_ids": [[3]] }));
        assert!(told.len() == 2 && told[0].contains("`repetition_penalty` of 1.1"), "{told:?}");
        let tokens = |value: Value| told(json!({ "suppress_tokens": value })).tokens("suppress_tokens");
        assert_eq!(tokens(json!([2, 7])).unwrap(), [2, 7].into());
        assert_eq!(tokens(json!(2)).unwrap(), [2].into());
        assert!(tokens(json!("2")).unwrap_err().to_string().contains("`suppress_tokens` is \"2\""));
        assert!(tokens(Value::Null).unwrap().is_empty());
    }
}
