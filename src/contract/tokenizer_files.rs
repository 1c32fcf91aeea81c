//! Files of a tokenizer that runtimes do not read.
//!
//! All runtimes of model folders open them with the tokenizers package and transformers. The rows were tried
//! with tokenizers 0.23 and transformers 5.23.

use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Map, Value};

use super::running::unreadable_tokenizer;
use super::{Runtime, facts};
use crate::error::{Error, Result};
use crate::files;
use crate::model::parse_config;

const SETTINGS: &str = "tokenizer_config.json";
/// Files that are read only if the settings do not contain their tokens.
const TOKEN_FILES: [&str; 2] = ["special_tokens_map.json", "added_tokens.json"];
/// Key of the settings with these tokens.
const ADDED: &str = "added_tokens_decoder";
/// Keys of special tokens in the settings.
const SPECIAL: [&str; 7] = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// A file that a runtime does not read, with the reason.
pub(super) struct Damage {
    pub file: String,
    pub reason: String,
    only: Option<Runtime>,
}

impl Damage {
    fn new(file: &str, reason: String) -> Damage {
        Damage { file: file.to_owned(), reason, only: None }
    }

    /// Whether a runtime is affected.
    pub(super) fn affects(&self, runtime: Runtime) -> bool {
        self.only.is_none_or(|only| only == runtime)
    }
}

/// The parts of `tokenizer.json` besides its vocabulary.
#[derive(Deserialize)]
struct Outline {
    added_tokens: Option<IgnoredAny>,
    post_processor: Option<Value>,
}

/// The files of a tokenizer among these paths and names that runtimes do not read.
pub(super) fn damaged(files: &[(PathBuf, PathBuf)]) -> Result<Vec<Damage>> {
    let path_of = |name: &str| files.iter().find(|(_, other)| other == Path::new(name)).map(|(path, _)| path);
    let is_fast = path_of(facts::FAST_TOKENIZER).is_some();
    let mut found = Vec::new();
    for (path, name) in files.iter().filter(|(_, name)| facts::is_parsed_with_tokenizer(name, is_fast)) {
        let name = name.display().to_string();
        if name == facts::FAST_TOKENIZER {
            found.extend(in_tokenizer(path)?);
        } else if let Some(reason) = facts::invalid_json(path)? {
            found.push(Damage::new(&name, invalid(&reason)));
        }
    }
    if found.iter().any(|damage| damage.file == SETTINGS) {
        return Ok(found);
    }
    let settings = path_of(SETTINGS).map(|path| object(path)).transpose()?;
    match settings {
        Some(Err(reason)) => found.push(Damage::new(SETTINGS, reason)),
        Some(Ok(settings)) if settings.contains_key(ADDED) => found.extend(in_settings(&settings)),
        settings => {
            found.extend(settings.and_then(|settings| in_settings(&settings.ok()?)));
            for name in TOKEN_FILES {
                let reason = path_of(name).map(|path| object(path)).transpose()?.and_then(|values| values.err());
                found.extend(reason.map(|reason| Damage::new(name, reason)));
            }
        }
    }
    Ok(found)
}

fn invalid(reason: &str) -> String {
    format!("is not valid JSON ({reason}), so that the tokenizer does not load")
}

/// The values of a file, or the reason why runtimes do not read it.
fn object(path: &Path) -> Result<std::result::Result<Map<String, Value>, String>> {
    let text = files::read_to_string(path).map_err(Error::io("read", path))?;
    Ok(parse_config(&text).map_err(|e| format!("is not a JSON object ({e}), so that the tokenizer does not load")))
}

fn in_tokenizer(path: &Path) -> Result<Option<Damage>> {
    let bytes = files::read(path).map_err(Error::io("read", path))?;
    let damage = |reason: String| Some(Damage::new(facts::FAST_TOKENIZER, reason));
    let text = match std::str::from_utf8(&bytes) {
        Ok(text) => text,
        Err(reason) => return Ok(damage(invalid(&reason.to_string()))),
    };
    let outline = serde_json::from_str::<Outline>(text);
    if let Some(reason) = outline.as_ref().err().filter(|reason| !reason.is_data()) {
        return Ok(damage(invalid(&reason.to_string())));
    }
    if let Some(reason) = unreadable_tokenizer(text) {
        return Ok(damage(format!("is not read by the tokenizers package ({reason})")));
    }
    let Ok(outline) = outline else { return Ok(damage("is not an object, so that the tokenizer does not load".into())) };
    if let Some(token) = outline.post_processor.as_ref().and_then(undefined_token) {
        return Ok(damage(format!("adds `{token}` to texts (`post_processor`), but `special_tokens` does not define it")));
    }
    let without_added =
        damage("has no `added_tokens`, which transformers requires".into()).map(|damage| Damage { only: Some(Runtime::Transformers), ..damage });
    Ok(without_added.filter(|_| outline.added_tokens.is_none()))
}

/// A token of a template whose ids are not specified, with which every text fails.
fn undefined_token(processor: &Value) -> Option<String> {
    if let Some(processors) = processor.get("processors").and_then(Value::as_array) {
        return processors.iter().find_map(undefined_token);
    }
    let defined = processor.get("special_tokens")?.as_object()?;
    let pieces = ["single", "pair"].into_iter().filter_map(|template| processor.get(template)?.as_array()).flatten();
    let mut tokens = pieces.filter_map(|piece| piece.get("SpecialToken")?.get("id")?.as_str());
    tokens.find(|token| !defined.contains_key(*token)).map(str::to_owned)
}

fn in_settings(settings: &Map<String, Value>) -> Option<Damage> {
    let of = |key: &str| settings.get(key).filter(|value| !value.is_null());
    let wrong = |key: &str, value: &Value, expected: &str| Damage::new(SETTINGS, format!("has `{key}` of {value}, expected {expected}"));
    let is_token = |value: &Value| value.is_string() || value.is_object();
    if let Some((key, value)) = SPECIAL.into_iter().find_map(|key| Some((key, of(key).filter(|value| !is_token(value))?))) {
        return Some(wrong(key, value, "a token"));
    }
    if let Some(value) = of("tokenizer_class").filter(|value| !value.is_string()) {
        return Some(wrong("tokenizer_class", value, "the name of a class"));
    }
    if let Some(value) = of("padding_side").filter(|value| !matches!(value.as_str(), Some("left" | "right"))) {
        return Some(wrong("padding_side", value, "`left` or `right`"));
    }
    let key = of(ADDED)?.as_object()?.keys().find(|key| key.parse::<i64>().is_err())?;
    Some(Damage::new(SETTINGS, format!("has the key `{key}` in `{ADDED}`, expected token ids")))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const TOKENIZER: &str = r#"{"added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}"#;

    /// The damaged files of a folder with these, for vLLM and for transformers.
    fn files(contents: &[(&str, &str)]) -> [Vec<String>; 2] {
        let folder = tempfile::tempdir().unwrap();
        let file = |(name, text): &(&str, &str)| {
            std::fs::write(folder.path().join(name), text).unwrap();
            (folder.path().join(name), PathBuf::from(name))
        };
        let found = damaged(&contents.iter().map(file).collect::<Vec<_>>()).unwrap();
        [Runtime::Vllm, Runtime::Transformers].map(|runtime| found.iter().filter(|damage| damage.affects(runtime)).map(|damage| damage.file.clone()).collect())
    }

    fn both(name: &str) -> [Vec<String>; 2] {
        [vec![name.to_owned()], vec![name.to_owned()]]
    }

    #[test]
    fn settings_that_transformers_refuses_are_damaged() {
        let none: [Vec<String>; 2] = [Vec::new(), Vec::new()];
        for (settings, is_damaged) in [
            (json!({}), false),
            (json!([]), true),
            (json!(5), true),
            (json!({ "bos_token": "<s>", "eos_token": { "content": "</s>" }, "pad_token": null }), false),
            (json!({ "bos_token": 5 }), true),
            (json!({ "tokenizer_class": 5 }), true),
            (json!({ "padding_side": "up" }), true),
            (json!({ "padding_side": "left" }), false),
            (json!({ "added_tokens_decoder": { "x": { "content": "q" } } }), true),
            (json!({ "added_tokens_decoder": { "5": {} } }), false),
        ] {
            let found = files(&[("tokenizer.json", TOKENIZER), (SETTINGS, &settings.to_string())]);
            assert_eq!(found, if is_damaged { both(SETTINGS) } else { none.clone() }, "{settings}");
        }
    }

    #[test]
    fn files_of_tokens_are_read_without_a_list_in_the_settings() {
        for name in TOKEN_FILES {
            for (text, settings, is_damaged) in [("{", "{}", true), ("[]", "{}", true), ("{}", "{}", false), ("{", r#"{"added_tokens_decoder": {}}"#, false)] {
                let found = files(&[("tokenizer.json", TOKENIZER), (SETTINGS, settings), (name, text)]);
                assert_eq!(found, if is_damaged { both(name) } else { [Vec::new(), Vec::new()] }, "{name}: {text}");
            }
            assert_eq!(files(&[("tokenizer.json", TOKENIZER), (name, "{")]), both(name));
        }
    }

    #[test]
    fn templates_with_undefined_tokens_are_found() {
        let template =
            |defined: Value| json!({ "type": "TemplateProcessing", "single": [{ "SpecialToken": { "id": "<s>", "type_id": 0 } }], "special_tokens": defined });
        assert_eq!(undefined_token(&template(json!({}))).as_deref(), Some("<s>"));
        assert_eq!(undefined_token(&template(json!({ "<s>": { "id": "<s>", "ids": [0], "tokens": ["<s>"] } }))), None);
        assert_eq!(undefined_token(&json!({ "type": "Sequence", "processors": [template(json!({}))] })).as_deref(), Some("<s>"));
        assert_eq!(undefined_token(&json!({ "type": "ByteLevel" })), None);
    }

    #[test]
    fn only_transformers_requires_a_list_of_added_tokens() {
        let without = r#"{"model": {"type": "BPE", "vocab": {}, "merges": []}}"#;
        assert_eq!(files(&[("tokenizer.json", without)]), [Vec::new(), vec!["tokenizer.json".to_owned()]]);
        assert_eq!(files(&[("tokenizer.json", "[]")]), both("tokenizer.json"));
    }
}
