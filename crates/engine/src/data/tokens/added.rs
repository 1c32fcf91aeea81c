//! Tokens of a tokenizer that are never split, from other files than `tokenizer.json`, as in transformers 5.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::{Map, Value};
use tokenizers::AddedToken;

use super::{SETTINGS, Target};
use crate::error::{Error, Result};
use crate::model::{SynthesizedFiles, auxiliary_path, open_auxiliary_config};

/// Key of the ids and flags of all tokens, without which older files are read.
const DECODER: &str = "added_tokens_decoder";
/// Keys of special tokens without a name of their own.
const EXTRA: &str = "extra_special_tokens";
const ADDITIONAL: &str = "additional_special_tokens";

/// A file of older versions of transformers, which is read only without `added_tokens_decoder`.
fn older_file(folder: &Path, synthesized: &SynthesizedFiles, settings: &Map<String, Value>, name: &str) -> Result<Map<String, Value>> {
    if settings.contains_key(DECODER) {
        return Ok(Map::new());
    }
    open_auxiliary_config(folder, synthesized, name).map(|file| file.values().clone())
}

/// The special tokens with names of `special_tokens_map.json`, which takes precedence as a file of older
/// versions, and of `tokenizer_config.json`.
pub fn special_tokens(folder: &Path, synthesized: &SynthesizedFiles, settings: &Map<String, Value>) -> Result<Map<String, Value>> {
    let older = older_file(folder, synthesized, settings, "special_tokens_map.json")?;
    let mut named = settings.clone();
    named.extend(older);
    named.retain(|name, value| name.ends_with("_token") && token_text(value).is_some());
    Ok(named)
}

/// The text of a special token, which is stored as a string or as an object with `content`.
pub fn token_text(token: &Value) -> Option<&str> {
    token.as_str().or_else(|| token.get("content")?.as_str())
}

/// The special tokens in a list, or in an object by their names.
fn listed<'v>(values: &'v Map<String, Value>, key: &str, path: &Path) -> Result<Vec<&'v Value>> {
    match values.get(key) {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(Value::Array(list)) => Ok(list.iter().collect()),
        Some(Value::Object(named)) => Ok(named.values().collect()),
        Some(other) => Err(Error::malformed(path, format!("`{key}` is {other}: store a list of tokens or an object, or remove it"))),
    }
}

/// Adds the tokens to a tokenizer. Tokens that are not in its vocabulary get the next ids, whatever their
/// stored ids are.
pub(super) fn add_tokens(tokenizer: &mut tokenizers::Tokenizer, target: &Target, settings: &Map<String, Value>) -> Result<()> {
    let (folder, path) = (target.folder, auxiliary_path(target.folder, SETTINGS));
    let file = |name: &str| older_file(folder, target.synthesized, settings, name);
    let (older, ids) = (file("special_tokens_map.json")?, file("added_tokens.json")?);
    let named = special_tokens(folder, target.synthesized, settings)?;
    let mut extra = listed(settings, if settings.contains_key(EXTRA) { EXTRA } else { ADDITIONAL }, &path)?;
    let has_extra = [settings, &older].iter().any(|values| values.contains_key(EXTRA)) || settings.contains_key(ADDITIONAL);
    extra.extend(listed(&older, if has_extra { EXTRA } else { ADDITIONAL }, &auxiliary_path(folder, "special_tokens_map.json"))?);
    let special: BTreeSet<&str> = named.values().chain(extra.iter().copied()).filter_map(token_text).collect();
    let named_texts: BTreeSet<&str> = named.values().filter_map(token_text).collect();

    let flag = |token: &Value, key: &str, missing: bool| token.get(key).and_then(Value::as_bool).unwrap_or(missing);
    let to_added_token = |token: &Value, is_special: bool| {
        let (text, normalized) = (token_text(token)?, !flag(token, "special", is_special));
        let added = AddedToken::from(text, flag(token, "special", is_special) || named_texts.contains(text));
        let added = added.lstrip(flag(token, "lstrip", false)).rstrip(flag(token, "rstrip", false));
        Some(added.single_word(flag(token, "single_word", false)).normalized(flag(token, "normalized", normalized)))
    };
    let mut numbered: Vec<(u64, Option<AddedToken>)> = Vec::new();
    let decoder = settings.get(DECODER).and_then(Value::as_object);
    numbered.extend(decoder.into_iter().flatten().map(|(id, token)| (id.parse().unwrap_or(u64::MAX), to_added_token(token, false))));
    numbered.extend(ids.iter().map(|(text, id)| {
        let added = AddedToken::from(text.as_str(), special.contains(text.as_str()));
        (id.as_u64().unwrap_or(u64::MAX), Some(added))
    }));
    numbered.sort_by_key(|(id, _)| *id);
    let others = named.values().chain(extra).filter_map(|token| to_added_token(token, true));
    let mut known: BTreeSet<String> = tokenizer.get_added_vocabulary().get_vocab().keys().cloned().collect();
    let all = numbered.into_iter().filter_map(|(_, token)| token).chain(others);
    let new: Vec<AddedToken> = all.filter(|token| known.insert(token.content.clone())).collect();
    tokenizer.add_tokens(new).map(drop).map_err(|e| Error::malformed(&path, e))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::Tokenizer;
    use super::*;

    /// The ids that `AutoTokenizer` of transformers 5.17 returns.
    #[test]
    fn tokens_of_all_files_are_not_split() {
        let texts = ["<unk>", "a", "b", "g", "ga", "x", "<", "s", ">", "<s>", "game"];
        let vocabulary: Map<String, Value> = (0..).zip(texts).map(|(id, text): (i64, &str)| (text.to_owned(), id.into())).collect();
        let model = json!({ "type": "BPE", "unk_token": "<unk>", "vocab": vocabulary, "merges": [["g", "a"]] });
        let tokenizer = json!({ "version": "1.0", "added_tokens": [], "normalizer": { "type": "Lowercase" }, "model": model });
        let ids = |settings: &Value, files: &[(&str, Value)]| {
            let folder = tempfile::tempdir().unwrap();
            let all = [("tokenizer.json", &tokenizer), (SETTINGS, settings)].into_iter().chain(files.iter().map(|(name, value)| (*name, value)));
            all.for_each(|(name, value)| std::fs::write(folder.path().join(name), value.to_string()).unwrap());
            let (synthesized, config) = (SynthesizedFiles::new(), Map::new());
            let opened = Tokenizer::open(&Target::new(folder.path(), &synthesized, &config), None);
            opened.map(|opened| opened.plain("<s>gameb<n><N>").unwrap()).map_err(|e| e.to_string())
        };
        let split = |begin: &[i64], game: &[i64], new: &[i64], upper: &[i64]| [begin, game, &[2], new, upper].concat();
        let (begin, game, new): ([i64; 3], [i64; 3], [i64; 3]) = ([6, 7, 8], [4, 0, 0], [6, 0, 8]);
        let flags = |text: &str, special: bool| json!({ "content": text, "lstrip": false, "rstrip": false, "normalized": false, "single_word": false, "special": special });
        let (none, map, added) = (json!({}), "special_tokens_map.json", "added_tokens.json");
        let (is_begin, is_game) = (split(&[9], &game, &new, &new), split(&begin, &[10], &new, &new));
        // The stored id is not that of the embedding.
        let [is_next, is_second] = [11, 12].map(|id| split(&begin, &game, &[id], &new));
        let is_any_case = split(&begin, &game, &[11], &[11]);
        for (settings, files, expected) in [
            (none.clone(), vec![], split(&begin, &game, &new, &new)),
            (json!({ "extra_special_tokens": { "a_token": "<s>" } }), vec![], is_begin.clone()),
            (json!({ "extra_special_tokens": ["<s>"] }), vec![], is_begin.clone()),
            (json!({ "image_token": "<s>" }), vec![], is_begin.clone()),
            (none.clone(), vec![(map, json!({ "additional_special_tokens": ["<s>"] }))], is_begin.clone()),
            (none.clone(), vec![(map, json!({ "extra_special_tokens": { "a_token": "<s>" } }))], is_begin.clone()),
            (json!({ "additional_special_tokens": ["game"] }), vec![(map, json!({ "additional_special_tokens": ["<s>"] }))], is_game.clone()),
            (json!({ "eos_token": "<s>" }), vec![(map, json!({ "eos_token": "game" }))], is_game.clone()),
            (
                json!({ "added_tokens_decoder": {} }),
                vec![(map, json!({ "eos_token": "game" })), (added, json!({ "<s>": 9 }))],
                split(&begin, &game, &new, &new),
            ),
            (none.clone(), vec![(added, json!({ "game": 3 }))], is_game.clone()),
            (none.clone(), vec![(added, json!({ "<n>": 50 }))], is_any_case.clone()),
            (json!({ "bos_token": "<n>" }), vec![(added, json!({ "<n>": 11 }))], is_next.clone()),
            (json!({ "added_tokens_decoder": { "60": flags("<n>", false) } }), vec![], is_next.clone()),
            (json!({ "added_tokens_decoder": { "10": flags("<n>", false) } }), vec![], is_next.clone()),
            (json!({ "added_tokens_decoder": { "12": flags("<n>", true), "9": flags("<m>", false) } }), vec![], is_second.clone()),
            (json!({ "bos_token": "<n>" }), vec![], is_next.clone()),
        ] {
            assert_eq!(ids(&settings, &files).unwrap(), expected, "{settings} {files:?}");
        }
        let error = ids(&json!({ "extra_special_tokens": "<s>" }), &[]).unwrap_err();
        assert!(error.contains("tokenizer_config.json: `extra_special_tokens` is \"<s>\": store a list"), "{error}");
    }
}
