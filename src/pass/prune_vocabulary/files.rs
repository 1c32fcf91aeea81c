//! Files of a model that contain tokens or their ids.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::retained::{Retained, number};
use super::settings;
use super::tokenizer::{self, TokenizerFile, pair};
use crate::data::token_text;
use crate::error::{Error, Result};
use crate::model::{ExclusionReason, Model, auxiliary_path, parse_config, read_auxiliary_text, render_python};

const TOKENIZER_SETTINGS: &str = "tokenizer_config.json";
/// Ids by token: added tokens, and the vocabularies of byte-pair encoding.
const ID_MAPS: [&str; 2] = ["added_tokens.json", "vocab.json"];
const MERGES: &str = "merges.txt";
const TOKEN_LIST: &str = "vocab.txt";
/// Files of settings with token ids, except for `config.json`.
const SETTINGS: [&str; 4] = ["generation_config.json", TOKENIZER_SETTINGS, "processor_config.json", "preprocessor_config.json"];
/// Names and extensions of vocabularies in other formats.
const OTHER_NAMES: [&str; 10] = [
    "encoder.json",
    "tekken.json",
    "dict.txt",
    "bpe.codes",
    "source_vocab.json",
    "target_vocab.json",
    "vocab.src.json",
    "vocab.tgt.json",
    "tokenizer.bin",
    "tokens.txt",
];
const OTHER_EXTENSIONS: [&str; 5] = ["model", "spm", "bpe", "tiktoken", "vocab"];
/// Files with tokens but without ids.
const WITHOUT_IDS: [&str; 1] = ["special_tokens_map.json"];

/// Files of one model.
struct Files<'m>(&'m Model);

impl Files<'_> {
    fn text(&self, name: &str) -> Result<Option<String>> {
        read_auxiliary_text(&self.0.path, &self.0.auxiliary.synthesized, name)
    }

    /// A JSON object; `None` if the file does not exist.
    fn object(&self, name: &str) -> Result<Option<Map<String, Value>>> {
        let parse = |text: String| parse_config(&text).map_err(|e| self.malformed(name, e));
        self.text(name)?.map(parse).transpose()
    }

    fn malformed(&self, name: &str, reason: impl std::fmt::Display) -> Error {
        Error::malformed(&auxiliary_path(&self.0.path, name), reason)
    }
}

/// Ids of the tokens that the configuration and the settings of the tokenizer name, of an embedding with
/// `rows` rows.
///
/// # Errors
/// A file is malformed, or the tokenizer is code of the repository.
pub(super) fn required(model: &Model, tokenizer: &TokenizerFile, rows: usize) -> Result<BTreeSet<usize>> {
    let files = Files(model);
    let mut required = settings::required(model.config.values(), rows);
    for name in SETTINGS {
        let Some(values) = files.object(name)? else { continue };
        required.extend(settings::required(&values, rows));
        if name == TOKENIZER_SETTINGS {
            if values.get("auto_map").is_some_and(|map| map.get("AutoTokenizer").is_some()) {
                return Err(Error::Unsupported {
                    what: format!("{}: removing tokens if the tokenizer is code of the repository (`auto_map`)", model.path.display()),
                    hint: "remove `auto_map` if tokenizer.json is equivalent to that code".into(),
                });
            }
            required.extend(values.get("added_tokens_decoder").and_then(Value::as_object).into_iter().flatten().filter_map(|(id, _)| id.parse::<usize>().ok()));
            required.extend(named_tokens(&values).iter().filter_map(|token| tokenizer.id(token)));
        }
    }
    let older = files.object("special_tokens_map.json")?.unwrap_or_default();
    required.extend(named_tokens(&older).iter().filter_map(|token| tokenizer.id(token)));
    Ok(required)
}

/// Texts of special tokens in the settings of a tokenizer.
fn named_tokens(values: &Map<String, Value>) -> Vec<&str> {
    let single = values.iter().filter(|(key, _)| key.ends_with("_token")).filter_map(|(_, token)| token_text(token));
    let lists = ["additional_special_tokens", "extra_special_tokens"].into_iter().filter_map(|key| values.get(key));
    let listed = lists.flat_map(|list| match list {
        Value::Array(list) => list.iter().filter_map(token_text).collect(),
        Value::Object(map) => map.values().filter_map(token_text).collect::<Vec<_>>(),
        _ => Vec::new(),
    });
    single.chain(listed).collect()
}

/// Rewrites all files of a model for the remaining tokens, and `config.json`. Excludes vocabularies in
/// formats that are not supported. Returns notes.
///
/// # Errors
/// A file is malformed, or may contain token ids of unknown meaning.
pub(super) fn rewrite(model: &mut Model, tokenizer: &TokenizerFile, retained: &Retained, rows: usize) -> Result<Vec<String>> {
    let mut notes = Vec::new();
    let mut texts: Vec<(&str, String)> = vec![(tokenizer::FILE, render(&tokenizer.reduced(retained)?))];
    let files = Files(model);
    for name in SETTINGS {
        let Some(before) = files.object(name)? else { continue };
        let mut values = before.clone();
        let found = settings::renumber(&mut values, retained, rows).map_err(|reason| files.malformed(name, reason))?;
        notes.extend(found.into_iter().map(|note| format!("{name}: {note}")));
        if let Some(Value::Object(decoder)) = values.get_mut("added_tokens_decoder") {
            let entries = std::mem::take(decoder).into_iter().map(|(id, token)| {
                let new = id.parse().ok().and_then(|id| retained.new_id(id));
                new.map(|new| (new.to_string(), token))
                    .ok_or_else(|| files.malformed(name, format!("`added_tokens_decoder` has the id {id}, which the embedding lacks")))
            });
            *decoder = entries.collect::<Result<_>>()?;
        }
        if values != before {
            texts.push((name, render_python(&Value::Object(values))));
        }
    }
    for name in ID_MAPS {
        let Some(mut ids) = files.object(name)? else { continue };
        ids.retain(|_, id| number(id).is_some_and(|id| retained.contains(id)));
        ids.values_mut().try_for_each(|id| retained.renumber(id)).map_err(|reason| files.malformed(name, reason))?;
        texts.push((name, render(&Value::Object(ids))));
    }
    if let Some(text) = files.text(MERGES)? {
        let keeps = |line: &&str| line.starts_with("#version") || pair(&json!(line)).is_none_or(|pair| tokenizer.keeps_merge(pair, retained));
        texts.push((MERGES, lines(text.lines().filter(keeps))));
    }
    let mut others: Vec<&str> = Vec::new();
    if let Some(text) = files.text(TOKEN_LIST)? {
        if text.lines().enumerate().all(|(id, token)| tokenizer.token(id) == Some(token)) {
            texts.push((TOKEN_LIST, lines(text.lines().enumerate().filter(|(id, _)| retained.contains(*id)).map(|(_, token)| token))));
        } else {
            others.push(TOKEN_LIST);
        }
    }
    rewrite_config(model, retained, rows, &mut notes)?;
    let auxiliary = &mut model.auxiliary;
    let is_other = |file: &Path| {
        let (name, extension) = (file.to_str().unwrap_or_default(), file.extension().and_then(|e| e.to_str()).unwrap_or_default());
        others.contains(&name) || OTHER_NAMES.contains(&name) || (OTHER_EXTENSIONS.contains(&extension) && file.components().count() == 1)
    };
    auxiliary.exclude(ExclusionReason::Vocabulary, is_other);
    let is_known = |file: &Path| SETTINGS.iter().chain(&ID_MAPS).chain(&WITHOUT_IDS).chain([&tokenizer::FILE, &TOKEN_LIST]).any(|name| file == Path::new(name));
    let unknown = auxiliary.files.iter().filter(|file| may_contain_tokens(file) && !is_known(file));
    let unknown: Vec<String> = unknown.map(|file| file.display().to_string()).collect();
    if !unknown.is_empty() {
        notes.push(format!("{}: copied unchanged: remove these files if they contain tokens or ids of the original vocabulary", unknown.join(", ")));
    }
    for (name, text) in texts {
        auxiliary.files.retain(|file| file != Path::new(name));
        auxiliary.synthesized.insert(name.into(), Arc::new(text));
    }
    Ok(notes)
}

/// Whether the name of a file suggests that it contains tokens. Code does not contain ids of a model.
fn may_contain_tokens(file: &Path) -> bool {
    let name = file.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
    (name.contains("vocab") || name.contains("token")) && file.extension().is_none_or(|extension| extension != "py")
}

/// Renumbers the token ids of `config.json`, and sets the size of the vocabulary.
fn rewrite_config(model: &mut Model, retained: &Retained, rows: usize, notes: &mut Vec<String>) -> Result<()> {
    let mut values = model.config.values().clone();
    let found = settings::renumber(&mut values, retained, rows).map_err(|reason| Files(model).malformed("config.json", reason))?;
    notes.extend(found.into_iter().map(|note| format!("config.json: {note}")));
    let has_size = |values: &Map<String, Value>| values.contains_key("vocab_size");
    let nested = values.get("text_config").and_then(Value::as_object).is_some_and(has_size);
    if !has_size(&values) && !nested && !values.is_empty() {
        let size = json!(retained.0.len());
        match values.get_mut("text_config").and_then(Value::as_object_mut) {
            Some(text) => text.insert("vocab_size".into(), size),
            None => values.insert("vocab_size".into(), size),
        };
    }
    for (key, value) in values {
        if model.config.get(&key) != Some(&value) {
            model.config.set(&key, value);
        }
    }
    Ok(())
}

fn render(value: &Value) -> String {
    format!("{value:#}\n")
}

fn lines<'t>(lines: impl Iterator<Item = &'t str>) -> String {
    lines.flat_map(|line| [line, "\n"]).collect()
}
