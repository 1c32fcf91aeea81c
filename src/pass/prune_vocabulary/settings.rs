//! Token ids in `config.json`, `generation_config.json` and the settings of tokenizers.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use super::retained::{Retained, number};

/// How a key uses token ids.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Use {
    /// A token, or a list or map of tokens, all of which remain.
    Tokens,
    /// Pairs of a position and a token, which remains.
    Forced,
    /// A list of tokens, of lists of tokens, or of pairs of such a list and a number. Entries with removed
    /// tokens have no effect and are removed.
    Entries,
    /// The number of rows of the embedding.
    Size,
    /// Numbers of an unknown meaning.
    Unknown,
}

/// Keys that end like those of token ids, but contain other numbers. `extra_ids` of T5 is the number of
/// sentinel tokens, which are added tokens and remain.
const OTHER_IDS: [&str; 3] = ["type_vocab_size", "pad_token_type_id", "extra_ids"];
/// Keys of tokens without a common ending.
const TOKENS: [&str; 9] =
    ["lang_to_id", "task_to_id", "language_token_map", "force_words_ids", "bos_index", "eos_index", "pad_index", "unk_index", "mask_index"];
/// Names of the size of the vocabulary without `vocab_size`.
const SIZES: [&str; 3] = ["n_vocab", "n_words", "vocabulary_size"];

fn use_of(key: &str) -> Option<Use> {
    let ends = |endings: &[&str]| endings.iter().any(|ending| key.ends_with(ending));
    match key {
        _ if OTHER_IDS.contains(&key) => None,
        "suppress_tokens" | "begin_suppress_tokens" | "bad_words_ids" | "sequence_bias" => Some(Use::Entries),
        "forced_decoder_ids" => Some(Use::Forced),
        _ if TOKENS.contains(&key) => Some(Use::Tokens),
        _ if ends(&["_token_id", "_token_ids", "_token_index"]) => Some(Use::Tokens),
        _ if key.contains("vocab_size") || SIZES.contains(&key) => Some(Use::Size),
        _ if ends(&["_id", "_ids"]) => Some(Use::Unknown),
        _ => None,
    }
}

type OnValue<'f> = &'f mut dyn FnMut(&str, Use, &mut Value) -> Result<(), String>;

/// Calls a function with every value that uses token ids, also in nested objects.
fn visit(values: &mut Map<String, Value>, on_value: OnValue) -> Result<(), String> {
    for (key, value) in values.iter_mut() {
        match (use_of(key), &mut *value) {
            (Some(kind), value) => on_value(key, kind, value)?,
            (None, Value::Object(nested)) => visit(nested, on_value)?,
            (None, Value::Array(list)) => {
                for nested in list.iter_mut().filter_map(Value::as_object_mut) {
                    visit(nested, on_value)?;
                }
            }
            _ => {}
        }
    }
    Ok(())
}

/// Calls a function with every number of a value.
fn for_each_number(value: &mut Value, on_number: &mut dyn FnMut(&mut Value) -> Result<(), String>) -> Result<(), String> {
    match value {
        Value::Number(_) => on_number(value),
        Value::Array(list) => list.iter_mut().try_for_each(|value| for_each_number(value, on_number)),
        Value::Object(map) => map.values_mut().try_for_each(|value| for_each_number(value, on_number)),
        _ => Ok(()),
    }
}

/// The second elements of pairs, each a position and a token.
fn forced(value: &mut Value) -> impl Iterator<Item = &mut Value> {
    value.as_array_mut().into_iter().flatten().filter_map(|pair| pair.get_mut(1))
}

/// The ids of tokens that settings require, of an embedding with `rows` rows.
pub(super) fn required(values: &Map<String, Value>, rows: usize) -> BTreeSet<usize> {
    let mut required = BTreeSet::new();
    let mut on_number = |value: &mut Value| {
        required.extend(number(value).filter(|id| *id < rows));
        Ok(())
    };
    let on_value: OnValue = &mut |_, kind, value| match kind {
        Use::Tokens => for_each_number(value, &mut on_number),
        Use::Forced => forced(value).try_for_each(&mut on_number),
        Use::Entries | Use::Size | Use::Unknown => Ok(()),
    };
    visit(&mut values.clone(), on_value).unwrap_or_default();
    required
}

/// Renumbers the ids of tokens in settings, and sets sizes of the vocabulary that are `rows`. Returns notes
/// on ids that no row of the embedding has; these are left unchanged.
///
/// # Errors
/// A key may contain token ids, but its meaning is not known.
pub(super) fn renumber(values: &mut Map<String, Value>, retained: &Retained, rows: usize) -> Result<Vec<String>, String> {
    let mut notes = Vec::new();
    let on_value: OnValue = &mut |key, kind, value| {
        let mut outside = None;
        let mut on_number = |value: &mut Value| match number(value) {
            Some(id) if id < rows => retained.renumber(value),
            Some(id) => {
                outside = Some(id);
                Ok(())
            }
            // A negative number means that the token is undefined.
            None => Ok(()),
        };
        match kind {
            Use::Tokens => for_each_number(value, &mut on_number)?,
            Use::Forced => forced(value).filter(|token| token.is_number()).try_for_each(&mut on_number)?,
            Use::Entries if value.is_object() => return Err(format!("`{key}` is an object: store a list of pairs, as transformers 5 does")),
            Use::Entries => {
                for entry in value.as_array_mut().into_iter().flat_map(|list| {
                    list.retain_mut(|entry| remains(entry, retained, rows));
                    list.iter_mut()
                }) {
                    match entry {
                        Value::Array(pair) if matches!(pair.first(), Some(Value::Array(_))) => {
                            pair.first_mut().map_or(Ok(()), |tokens| for_each_number(tokens, &mut on_number))?;
                        }
                        entry => for_each_number(entry, &mut on_number)?,
                    }
                }
            }
            Use::Size if number(value) == Some(rows) => *value = json!(retained.0.len()),
            Use::Size => {}
            Use::Unknown => {
                let mut found = None;
                for_each_number(value, &mut |value| {
                    found = found.or(number(value));
                    Ok(())
                })?;
                if let Some(id) = found {
                    return Err(format!("`{key}` may contain token ids ({id}), but its meaning is not known: remove it if it does not"));
                }
            }
        }
        if let Some(id) = outside {
            notes.push(format!("`{key}` of {id} is left unchanged: the embedding has only {rows} rows"));
        }
        Ok(())
    };
    visit(values, on_value)?;
    Ok(notes)
}

/// Whether all tokens in an entry remain.
fn remains(entry: &mut Value, retained: &Retained, rows: usize) -> bool {
    let tokens = match entry {
        Value::Array(pair) if matches!(pair.first(), Some(Value::Array(_))) => pair.first_mut(),
        entry => Some(entry),
    };
    let mut all = true;
    let mut on_number = |value: &mut Value| {
        all &= number(value).is_none_or(|id| id >= rows || retained.contains(id));
        Ok(())
    };
    tokens.map_or(Ok(()), |tokens| for_each_number(tokens, &mut on_number)).unwrap_or_default();
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_renumbered_and_entries_of_removed_tokens_dropped() {
        let mut values = json!({
            "vocab_size": 10, "type_vocab_size": 10, "hidden_size": 10, "extra_ids": 7, "bos_token_id": 2, "eos_token_id": [2, 7], "pad_token_id": null,
            "unk_token_id": -1, "sep_token_id": 12, "pad_token_type_id": 0, "pad_index": 2, "text_config": { "n_vocab": 10, "image_token_index": 7 },
            "vision_config": { "n_words": 10, "vocabulary_size": 9 }, "language_token_map": { "en": 7 },
            "suppress_tokens": [-1, 3, 7], "bad_words_ids": [[3], [2, 7]], "sequence_bias": [[[3, 2], 5.0], [[7], 2]],
            "forced_decoder_ids": [[1, 7], [2, null]], "lang_to_id": { "<|en|>": 2 },
        });
        let retained = Retained(&[0, 2, 7]);
        assert_eq!(required(values.as_object().unwrap(), 10), BTreeSet::from([2, 7]));
        let notes = renumber(values.as_object_mut().unwrap(), &retained, 10).unwrap();
        let expected = json!({
            "vocab_size": 3, "type_vocab_size": 10, "hidden_size": 10, "extra_ids": 7, "bos_token_id": 1, "eos_token_id": [1, 2], "pad_token_id": null,
            "unk_token_id": -1, "sep_token_id": 12, "pad_token_type_id": 0, "pad_index": 1, "text_config": { "n_vocab": 3, "image_token_index": 2 },
            "vision_config": { "n_words": 3, "vocabulary_size": 9 }, "language_token_map": { "en": 2 },
            "suppress_tokens": [-1, 2], "bad_words_ids": [[1, 2]], "sequence_bias": [[[2], 2]],
            "forced_decoder_ids": [[1, 2], [2, null]], "lang_to_id": { "<|en|>": 1 },
        });
        assert_eq!(values, expected);
        assert!(notes.len() == 1 && notes[0].contains("`sep_token_id` of 12"), "{notes:?}");
    }

    #[test]
    fn unknown_ids_are_refused_by_name() {
        let renumber = |mut values: Value| renumber(values.as_object_mut().unwrap(), &Retained(&[0]), 10).unwrap_err();
        assert!(renumber(json!({ "patch_ids": [3] })).contains("`patch_ids` may contain token ids (3)"));
        assert!(renumber(json!({ "sequence_bias": { "(3,)": 1.0 } })).contains("`sequence_bias` is an object"));
        assert!(renumber(json!({ "eos_token_id": 3 })).contains("3 is not the id of a remaining token"));
    }
}
