//! The tokens that a decoder behind an encoder begins with.

use serde_json::Value;

use super::settings::Settings;
use crate::error::{Error, Result};

/// The first tokens, of which the language may be open: then it is the likeliest behind those before it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Opening {
    /// The first tokens.
    pub first: Vec<i64>,
    /// Tokens of languages, one of which comes next; none where there is no choice.
    pub languages: Vec<i64>,
    /// Tokens behind that.
    pub rest: Vec<i64>,
}

impl Opening {
    /// The token that decoders of texts begin with.
    ///
    /// # Errors
    /// None is named.
    pub fn of_texts(settings: &Settings) -> Result<Opening> {
        let start = match settings.token("decoder_start_token_id")? {
            Some(token) => Some(token),
            None => settings.token("bos_token_id")?,
        };
        let missing = || Error::graph("generation_config.json", "and config.json name no `decoder_start_token_id`: what a text begins with is not known");
        Ok(Opening { first: vec![start.ok_or_else(missing)?], languages: Vec::new(), rest: Vec::new() })
    }

    /// The tokens of Whisper: what a text begins with, its language, what is to be done, and that there are no times, as
    /// `WhisperGenerationMixin` of transformers puts them.
    ///
    /// # Errors
    /// Settings contradict each other, or ask for something that is not done; the message names the key.
    pub fn of_speech(settings: &Settings) -> Result<Opening> {
        let mut found = Opening::of_texts(settings)?;
        if settings.get("return_timestamps").is_some_and(|value| *value != Value::Bool(false)) {
            return Err(settings.wrong("return_timestamps", "false: times are not written"));
        }
        let (task, language) = (settings.get("task"), settings.get("language"));
        let mut open = true;
        if let (None, None, Some(forced)) = (task, language, settings.get_anywhere("forced_decoder_ids")) {
            (open, found.rest) = forced_tokens(forced).ok_or_else(|| settings.wrong("forced_decoder_ids", "pairs of a place, counted from 1, and a token"))?;
        }
        if let Some(language) = language {
            let name = language.as_str().map(str::to_lowercase).ok_or_else(|| settings.wrong("language", "the name of a language"))?;
            let known = |name: &str| settings.get("lang_to_id")?.get(name)?.as_i64();
            let token = known(&name).or_else(|| known(&format!("<|{name}|>")));
            found.first.push(token.ok_or_else(|| settings.wrong("language", "one of `lang_to_id`, or its two letters"))?);
        } else if let Some(languages) = settings.get("lang_to_id").filter(|_| open) {
            let tokens: Option<Vec<i64>> = languages.as_object().and_then(|languages| languages.values().map(Value::as_i64).collect());
            found.languages = tokens.ok_or_else(|| settings.wrong("lang_to_id", "tokens by language"))?;
        }
        if task.is_some() || language.is_some() {
            let task = task.and_then(Value::as_str).unwrap_or("transcribe");
            let token = settings.get("task_to_id").map(|tasks| tasks.get(task).and_then(Value::as_i64));
            match token {
                Some(Some(token)) => found.rest.push(token),
                None if settings.get("task").is_none() => {}
                _ => return Err(settings.wrong("task", "one of `task_to_id`")),
            }
        }
        if let Some(token) = settings.token("no_timestamps_token_id")?.filter(|token| found.rest.last() != Some(token)) {
            found.rest.push(token);
        }
        Ok(found)
    }

    /// The tokens, where no language is open.
    pub fn tokens(&self, language: Option<i64>) -> Vec<i64> {
        self.first.iter().copied().chain(language).chain(self.rest.iter().copied()).collect()
    }
}

/// Whether the first place, which is that of the language, is open, and the tokens.
fn forced_tokens(forced: &Value) -> Option<(bool, Vec<i64>)> {
    let (mut open, mut tokens) = (true, Vec::new());
    for (place, pair) in (1..).zip(forced.as_array()?) {
        let [at, token] = pair.as_array()?.as_slice() else { return None };
        match (at.as_i64()? == place, token) {
            (true, Value::Null) if place == 1 => {}
            (true, token) => {
                open &= place != 1;
                tokens.push(token.as_i64()?);
            }
            _ => return None,
        }
    }
    Some((open, tokens))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn settings_of(said: Value) -> Settings {
        Settings::new(said.as_object().cloned().unwrap_or_default(), serde_json::Map::new())
    }

    fn of(value: Value) -> Result<Opening> {
        let mut all = json!({ "decoder_start_token_id": 50 });
        all.as_object_mut().unwrap().extend(value.as_object().unwrap().clone());
        Opening::of_speech(&settings_of(all))
    }

    #[test]
    fn tokens_of_speech_come_in_their_order() {
        let languages = json!({ "<|en|>": 51, "<|de|>": 52 });
        let tasks = json!({ "transcribe": 60, "translate": 61 });
        let found = |value: Value| of(value).unwrap();
        assert_eq!(found(json!({ "forced_decoder_ids": [[1, 70]], "no_timestamps_token_id": 70 })).tokens(None), [50, 70]);
        let both = found(json!({ "forced_decoder_ids": [[1, null], [2, 60]], "no_timestamps_token_id": 70, "lang_to_id": languages }));
        assert_eq!((both.tokens(Some(52)), both.languages), (vec![50, 52, 60, 70], vec![51, 52]));
        let told = json!({ "language": "de", "lang_to_id": languages, "task_to_id": tasks, "no_timestamps_token_id": 70 });
        assert_eq!(found(told).tokens(None), [50, 52, 60, 70]);
        let told = json!({ "task": "translate", "lang_to_id": languages, "task_to_id": tasks });
        assert_eq!((found(told.clone()).tokens(Some(51)), found(told).languages), (vec![50, 51, 61], vec![51, 52]));
        assert_eq!(found(json!({ "lang_to_id": languages, "forced_decoder_ids": [[1, 51]] })).languages, [0i64; 0]);
        for (value, key) in [
            (json!({ "return_timestamps": true }), "`return_timestamps` is true"),
            (json!({ "forced_decoder_ids": [[2, 60]] }), "`forced_decoder_ids`"),
            (json!({ "language": "xx", "lang_to_id": languages }), "`language` is \"xx\""),
            (json!({ "task": "sing", "task_to_id": tasks }), "`task` is \"sing\""),
        ] {
            let refused = of(value).unwrap_err().to_string();
            assert!(refused.contains(key), "{refused}");
        }
        let nothing = Opening::of_texts(&settings_of(json!({}))).unwrap_err().to_string();
        assert!(nothing.contains("`decoder_start_token_id`"), "{nothing}");
    }
}
