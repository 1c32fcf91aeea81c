//! Generation settings of a model.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use crate::arch;
use crate::error::{Error, Result};
use crate::model::{Model, open_auxiliary_config};

/// File with the generation settings.
const FILE: &str = "generation_config.json";
/// Unsupported keys that change the selected tokens, with their neutral values.
const UNSUPPORTED: [(&str, f64); 18] = [
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
    ("watermarking_config", f64::NAN),
    ("force_words_ids", f64::NAN),
    ("dola_layers", f64::NAN),
    ("penalty_alpha", 0.0),
];

/// Values of `generation_config.json`, or of `config.json` without such a file, as in transformers.
pub(super) struct Settings {
    file: &'static str,
    values: Map<String, Value>,
    /// `config.json`, the fallback for some keys.
    config: Map<String, Value>,
}

impl Settings {
    /// Reads the settings of a model.
    pub fn open(model: &Model) -> Result<Settings> {
        let settings = open_auxiliary_config(&model.path, &model.auxiliary.synthesized, FILE)?;
        let config = model.config.values().clone();
        Ok(Settings::new(settings.values().clone(), config))
    }

    /// Settings from the values of both files; `config.json` is used if the first are empty.
    pub fn new(values: Map<String, Value>, config: Map<String, Value>) -> Settings {
        if values.is_empty() { Settings { file: "config.json", values: config.clone(), config } } else { Settings { file: FILE, values, config } }
    }

    /// A value, unless it is null.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.values.get(key).filter(|value| !value.is_null())
    }

    /// A value, with `config.json` as the fallback.
    pub fn get_anywhere(&self, key: &str) -> Option<&Value> {
        self.get(key).or_else(|| arch::token(&self.config, key))
    }

    /// An error for an invalid value.
    pub fn wrong(&self, key: &str, expected: &str) -> Error {
        let value = self.get_anywhere(key).cloned().unwrap_or_default();
        Error::graph(self.file, format!("`{key}` is {value}, expected {expected}"))
    }

    /// A token id.
    pub fn token(&self, key: &str) -> Result<Option<i64>> {
        self.get_anywhere(key).map(|value| value.as_i64().ok_or_else(|| self.wrong(key, "a token id"))).transpose()
    }

    /// A token id or a list of them.
    pub fn tokens(&self, key: &str) -> Result<BTreeSet<i64>> {
        self.numbers(key, self.get(key))
    }

    /// End-of-sequence tokens.
    pub fn ends(&self) -> Result<BTreeSet<i64>> {
        self.numbers("eos_token_id", self.get_anywhere("eos_token_id"))
    }

    fn numbers(&self, key: &str, value: Option<&Value>) -> Result<BTreeSet<i64>> {
        let found = match value {
            None => Some(BTreeSet::new()),
            Some(Value::Array(list)) => list.iter().map(Value::as_i64).collect(),
            Some(value) => value.as_i64().map(|number| [number].into()),
        };
        found.ok_or_else(|| self.wrong(key, "a token id or a list of them"))
    }

    /// Notes on unsupported settings that would change the selected tokens.
    pub fn unsupported_notes(&self) -> Vec<String> {
        let note = |(key, neutral): &(&str, f64)| {
            let value = self.get(key)?;
            let has_effect = value.as_f64() != Some(*neutral) && value.as_array().is_none_or(|list| !list.is_empty());
            has_effect.then(|| format!("{}: `{key}` of {value} is unsupported and ignored", self.file))
        };
        UNSUPPORTED.iter().filter_map(note).collect()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn settings_of(values: Value) -> Settings {
        Settings::new(values.as_object().cloned().unwrap_or_default(), Map::new())
    }

    #[test]
    fn unsupported_settings_are_reported() {
        let settings = |value: Value| settings_of(value).unsupported_notes();
        assert!(settings(json!({ "repetition_penalty": 1.0, "temperature": 0.6, "do_sample": true, "num_beams": 1, "bad_words_ids": [] })).is_empty());
        let notes = settings(json!({ "repetition_penalty": 1.1, "bad_words_ids": [[3]] }));
        assert!(notes.len() == 2 && notes[0].contains("`repetition_penalty` of 1.1"), "{notes:?}");
        let tokens = |value: Value| settings_of(json!({ "suppress_tokens": value })).tokens("suppress_tokens");
        assert_eq!(tokens(json!([2, 7])).unwrap(), [2, 7].into());
        assert_eq!(tokens(json!(2)).unwrap(), [2].into());
        assert!(tokens(json!("2")).unwrap_err().to_string().contains("`suppress_tokens` is \"2\""));
        assert!(tokens(Value::Null).unwrap().is_empty());
    }
}
