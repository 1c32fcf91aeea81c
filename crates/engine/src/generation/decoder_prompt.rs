//! The first tokens of the decoder of an encoder-decoder model.

use serde_json::Value;

use super::settings::Settings;
use crate::error::{Error, Result};

/// The first tokens of a decoder. If the language is not specified, the most likely language token is
/// detected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct DecoderPrompt {
    /// Tokens before the language.
    pub first: Vec<i64>,
    /// Candidate language tokens; empty if the language is not detected.
    pub languages: Vec<i64>,
    /// Tokens after the language.
    pub rest: Vec<i64>,
}

impl DecoderPrompt {
    /// The start token of a text decoder. Fails if none is configured.
    pub fn for_text(settings: &Settings) -> Result<DecoderPrompt> {
        let start = match settings.token("decoder_start_token_id")? {
            Some(token) => Some(token),
            None => settings.token("bos_token_id")?,
        };
        let missing = || Error::graph("generation_config.json", "and config.json have no `decoder_start_token_id`, the first token of the decoder");
        Ok(DecoderPrompt { first: vec![start.ok_or_else(missing)?], languages: Vec::new(), rest: Vec::new() })
    }

    /// The tokens of Whisper: start, language, task, and no timestamps, as in `WhisperGenerationMixin`
    /// of transformers. Fails if settings contradict each other or are not supported.
    pub fn for_speech(settings: &Settings) -> Result<DecoderPrompt> {
        let mut prompt = DecoderPrompt::for_text(settings)?;
        if settings.get("return_timestamps").is_some_and(|value| *value != Value::Bool(false)) {
            return Err(settings.wrong("return_timestamps", "false: timestamps are not supported"));
        }
        let (task, language) = (settings.get("task"), settings.get("language"));
        let mut detects_language = true;
        if let (None, None, Some(forced)) = (task, language, settings.get_anywhere("forced_decoder_ids")) {
            (detects_language, prompt.rest) =
                forced_tokens(forced).ok_or_else(|| settings.wrong("forced_decoder_ids", "pairs of a position, counted from 1, and a token"))?;
        }
        if let Some(language) = language {
            let name = language.as_str().map(str::to_lowercase).ok_or_else(|| settings.wrong("language", "the name of a language"))?;
            let token_of = |name: &str| settings.get("lang_to_id")?.get(name)?.as_i64();
            let token = token_of(&name).or_else(|| token_of(&format!("<|{name}|>")));
            prompt.first.push(token.ok_or_else(|| settings.wrong("language", "a key of `lang_to_id`, or its two-letter code"))?);
        } else if let Some(languages) = settings.get("lang_to_id").filter(|_| detects_language) {
            let tokens: Option<Vec<i64>> = languages.as_object().and_then(|languages| languages.values().map(Value::as_i64).collect());
            prompt.languages = tokens.ok_or_else(|| settings.wrong("lang_to_id", "tokens by language"))?;
        }
        if task.is_some() || language.is_some() {
            let task = task.and_then(Value::as_str).unwrap_or("transcribe");
            let token = settings.get("task_to_id").map(|tasks| tasks.get(task).and_then(Value::as_i64));
            match token {
                Some(Some(token)) => prompt.rest.push(token),
                None if settings.get("task").is_none() => {}
                _ => return Err(settings.wrong("task", "a key of `task_to_id`")),
            }
        }
        if let Some(token) = settings.token("no_timestamps_token_id")?.filter(|token| prompt.rest.last() != Some(token)) {
            prompt.rest.push(token);
        }
        Ok(prompt)
    }

    /// All tokens, with the given language token.
    pub fn tokens(&self, language: Option<i64>) -> Vec<i64> {
        self.first.iter().copied().chain(language).chain(self.rest.iter().copied()).collect()
    }
}

/// Whether the first position, the language, is not forced, and the forced tokens.
fn forced_tokens(forced: &Value) -> Option<(bool, Vec<i64>)> {
    let (mut detects_language, mut tokens) = (true, Vec::new());
    for (position, pair) in (1..).zip(forced.as_array()?) {
        let [at, token] = pair.as_array()?.as_slice() else { return None };
        match (at.as_i64()? == position, token) {
            (true, Value::Null) if position == 1 => {}
            (true, token) => {
                detects_language &= position != 1;
                tokens.push(token.as_i64()?);
            }
            _ => return None,
        }
    }
    Some((detects_language, tokens))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn settings_of(values: Value) -> Settings {
        Settings::new(values.as_object().cloned().unwrap_or_default(), serde_json::Map::new())
    }

    fn prompt(value: Value) -> Result<DecoderPrompt> {
        let mut all = json!({ "decoder_start_token_id": 50 });
        all.as_object_mut().unwrap().extend(value.as_object().unwrap().clone());
        DecoderPrompt::for_speech(&settings_of(all))
    }

    #[test]
    fn speech_prompts_follow_the_settings() {
        let languages = json!({ "<|en|>": 51, "<|de|>": 52 });
        let tasks = json!({ "transcribe": 60, "translate": 61 });
        let found = |value: Value| prompt(value).unwrap();
        assert_eq!(found(json!({ "forced_decoder_ids": [[1, 70]], "no_timestamps_token_id": 70 })).tokens(None), [50, 70]);
        let both = found(json!({ "forced_decoder_ids": [[1, null], [2, 60]], "no_timestamps_token_id": 70, "lang_to_id": languages }));
        assert_eq!((both.tokens(Some(52)), both.languages), (vec![50, 52, 60, 70], vec![51, 52]));
        let specified = json!({ "language": "de", "lang_to_id": languages, "task_to_id": tasks, "no_timestamps_token_id": 70 });
        assert_eq!(found(specified).tokens(None), [50, 52, 60, 70]);
        let specified = json!({ "task": "translate", "lang_to_id": languages, "task_to_id": tasks });
        assert_eq!((found(specified.clone()).tokens(Some(51)), found(specified).languages), (vec![50, 51, 61], vec![51, 52]));
        assert_eq!(found(json!({ "lang_to_id": languages, "forced_decoder_ids": [[1, 51]] })).languages, [0i64; 0]);
        for (value, key) in [
            (json!({ "return_timestamps": true }), "`return_timestamps` is true"),
            (json!({ "forced_decoder_ids": [[2, 60]] }), "`forced_decoder_ids`"),
            (json!({ "language": "xx", "lang_to_id": languages }), "`language` is \"xx\""),
            (json!({ "task": "sing", "task_to_id": tasks }), "`task` is \"sing\""),
        ] {
            let refused = prompt(value).unwrap_err().to_string();
            assert!(refused.contains(key), "{refused}");
        }
        let missing = DecoderPrompt::for_text(&settings_of(json!({}))).unwrap_err().to_string();
        assert!(missing.contains("`decoder_start_token_id`"), "{missing}");
    }
}
