//! Conversion of `tokenizer.json` and related files to a GGUF vocabulary.

use std::collections::{BTreeMap, HashMap, HashSet};

use serde_json::Value as Json;

use super::describe::Keys;
use super::pre_tokenizer::{PreTokenizer, at};
use super::token_types::{BYTE, CONTROL, NORMAL, SPACE, TEMPLATE, TEMPLATES, UNKNOWN, UNUSED, USER_DEFINED};
use crate::error::{Error, Result, counted};
use crate::model::{DEFAULT_TEMPLATE, Model, chat_templates, parse_json, read_auxiliary_text};
use crate::store::gguf::Value;

const FILE: &str = "tokenizer.json";

/// Builds the vocabulary metadata for an embedding with `rows` rows, and notes. Without a
/// `tokenizer.json`, the vocabulary is empty.
pub fn vocabulary(model: &Model, rows: usize) -> Result<(Keys, Vec<String>)> {
    let key = |name: &str| format!("tokenizer.ggml.{name}");
    let read = |name: &str| -> Result<Json> {
        let text = read_auxiliary_text(&model.path, &model.auxiliary.synthesized, name)?;
        text.map_or(Ok(Json::Null), |text| parse_json(&text).map_err(|e| Error::malformed(&model.path.join(name), e)))
    };
    let (file, settings, generation) = (read(FILE)?, read("tokenizer_config.json")?, read("generation_config.json")?);
    if file.is_null() {
        let note = "tokenizer.json is missing: the file contains no vocabulary, and runtimes accept only token ids".to_owned();
        return Ok((vec![(key("model"), Value::Text("no_vocab".into()))], vec![note]));
    }
    let refused = |what: String| Error::Unsupported {
        what: format!("gguf: {}: {what}", model.path.join(FILE).display()),
        hint: "without a tokenizer.json in the folder, the file is written without a vocabulary".into(),
    };
    let bpe = at(&file, "/model");
    if at(bpe, "/type") != "BPE" {
        return Err(refused(format!("a tokenizer of the type {}", at(bpe, "/type"))));
    }
    for pointer in ["/continuing_subword_prefix", "/end_of_word_suffix"] {
        if let Some(value) = at(bpe, pointer).as_str().filter(|value| !value.is_empty()) {
            return Err(refused(format!("`model{}` of `{value}`, which llama.cpp does not support", pointer.replace('/', "."))));
        }
    }
    let mut by_id: BTreeMap<usize, &str> = BTreeMap::new();
    let entries = at(bpe, "/vocab").as_object().into_iter().flatten().filter_map(|(token, id)| Some((token.as_str(), id.as_u64()?)));
    let added: Vec<(&str, u64, bool)> = at(&file, "/added_tokens")
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|token| Some((at(token, "/content").as_str()?, at(token, "/id").as_u64()?, at(token, "/special").as_bool().unwrap_or(false))))
        .collect();
    let (mut beyond, mut notes) = (0usize, Vec::new());
    for (token, id) in entries.chain(added.iter().map(|(token, id, _)| (*token, *id))) {
        match usize::try_from(id).ok().filter(|id| *id < rows) {
            Some(id) => match by_id.insert(id, token) {
                Some(other) if other != token => return Err(refused(format!("the tokens `{other}` and `{token}` with the same id {id}"))),
                _ => {}
            },
            None => beyond = beyond.saturating_add(1),
        }
    }
    if beyond > 0 {
        notes.push(format!("{} of tokenizer.json omitted: ids beyond the {rows} rows of the embedding", counted(beyond, "token")));
    }
    let pre_tokenizer = PreTokenizer::from_json(at(&file, "/pre_tokenizer"));
    let is_sentencepiece = pre_tokenizer.is_none() && at(bpe, "/byte_fallback") == true;
    let unknown = at(bpe, "/unk_token").as_str();
    let special: HashMap<&str, bool> = added.iter().map(|(token, _, special)| (*token, *special)).collect();
    let kind_of = |token: &str| match special.get(token) {
        _ if is_sentencepiece && unknown == Some(token) => UNKNOWN,
        Some(true) => CONTROL,
        Some(false) => USER_DEFINED,
        None if is_sentencepiece && is_byte(token) => BYTE,
        None => NORMAL,
    };
    // llama.cpp searches for user-defined tokens in the original text.
    let text_of = |token: &str| if is_sentencepiece && kind_of(token) == USER_DEFINED { token.replace(SPACE, " ") } else { token.to_owned() };
    let tokens: Vec<String> = (0..rows).map(|id| by_id.get(&id).map_or_else(|| format!("[PAD{id}]"), |token| text_of(token))).collect();
    let mut unique = HashSet::new();
    if let Some(duplicate) = tokens.iter().find(|token| !unique.insert(token.as_str())) {
        return Err(refused(format!("two tokens that become `{duplicate}` in a GGUF file")));
    }
    let kinds: Vec<i64> = (0..rows).map(|id| by_id.get(&id).map_or(UNUSED, |token| kind_of(token))).collect();
    let merges = merges(at(bpe, "/merges")).ok_or_else(|| refused("merges that are not pairs".into()))?;
    let mut values = Vec::new();
    if is_sentencepiece {
        let prefix = adds_space_prefix(at(&file, "/normalizer"), at(&file, "/pre_tokenizer")).map_err(refused)?;
        values.extend([(key("model"), Value::Text("llama".into())), (key("scores"), Value::Floats(scores(&tokens, &merges)))]);
        values.push((key("add_space_prefix"), Value::Bool(prefix)));
    } else {
        let pre_tokenizer = pre_tokenizer.ok_or_else(|| refused(format!("the pre-tokenizer {}", short(at(&file, "/pre_tokenizer")))))?;
        let name = pre_tokenizer.names.first().copied().unwrap_or_default();
        let has_normalizer = !at(&file, "/normalizer").is_null() && at(&file, "/normalizer/normalizers").as_array().is_none_or(|list| !list.is_empty());
        if has_normalizer && at(&file, "/normalizer/type") != "NFC" {
            return Err(refused(format!("a normalizer ({}), which llama.cpp does not support for byte-level vocabularies", at(&file, "/normalizer/type"))));
        }
        let words = at(bpe, "/vocab").as_object().into_iter().flatten().map(|(token, _)| token.as_str()).filter(|token| !special.contains_key(token));
        if (at(bpe, "/ignore_merges") == true) != pre_tokenizer.ignore_merges
            && let Some(word) = first_unmerged(words, &merges)
        {
            let word: String = word.chars().take(40).collect();
            let reason = format!(
                "`model.ignore_merges` of {}, which llama.cpp does not support for `{name}`: it changes how `{word}` is tokenized",
                !pre_tokenizer.ignore_merges
            );
            return Err(refused(reason));
        }
        values.extend([(key("model"), Value::Text("gpt2".into())), (key("pre"), Value::Text(name.into()))]);
        values.push((key("merges"), Value::Texts(merges.iter().map(|[left, right]| format!("{left} {right}")).collect())));
    }
    values.extend([(key("tokens"), Value::Texts(tokens)), (key("token_type"), Value::Integers(kinds))]);
    let id_of = |token: &str| by_id.iter().find(|(_, other)| **other == token).map(|(id, _)| *id as u64);
    let mut named: BTreeMap<&str, u64> = BTreeMap::new();
    for (name, key_name) in [("bos", "bos"), ("eos", "eos"), ("padding", "pad"), ("unknown", "unk")] {
        let first_id = |values: Option<&Json>| values.and_then(|id| id.as_u64().or_else(|| id.get(0)?.as_u64()));
        let token = at(&settings, &format!("/{key_name}_token"));
        let token = token.as_str().or_else(|| at(token, "/content").as_str()).or(unknown.filter(|_| name == "unknown"));
        let id = first_id(model.config.get(&format!("{key_name}_token_id"))).or_else(|| first_id(generation.get(format!("{key_name}_token_id"))));
        named.extend(token.and_then(id_of).or(id).map(|id| (name, id)));
    }
    if let Some(turn) = at(&generation, "/eos_token_id").as_array().and_then(|ids| ids.iter().filter_map(Json::as_u64).find(|id| named.get("eos") != Some(id)))
    {
        named.insert("eot", turn);
    }
    named.retain(|name, id| {
        let is_valid = usize::try_from(*id).is_ok_and(|id| id < rows);
        if !is_valid {
            notes.push(format!("`{name}_token_id` of {id} is omitted: it exceeds the {rows} rows of the embedding"));
        }
        is_valid
    });
    values.extend(named.iter().map(|(name, id)| (key(&format!("{name}_token_id")), Value::Unsigned(*id))));
    let sides = added_tokens(at(&file, "/post_processor")).map_err(refused)?;
    for (side, name) in ["bos", "eos"].into_iter().enumerate() {
        let token = named.get(name).and_then(|id| by_id.get(&usize::try_from(*id).ok()?)).copied();
        let is_added = match sides.as_ref().and_then(|sides| sides.get(side)).map(Vec::as_slice) {
            None => token.is_some() && at(&settings, &format!("/add_{name}_token")) == true,
            Some([]) => false,
            Some([added]) if Some(*added) == token => true,
            Some(others) => {
                let position = if side == 0 { "before" } else { "after" };
                return Err(refused(format!("`{}` {position} every text, but GGUF files can add only the `{name}_token` there", others.join("`, `"))));
            }
        };
        values.push((key(&format!("add_{name}_token")), Value::Bool(is_added)));
    }
    let stored = chat_templates(&model.path, &model.auxiliary.synthesized, settings.get("chat_template"))?;
    values.extend(templates(stored).map_err(refused)?);
    Ok((values, notes))
}

/// Metadata of named chat templates: the default one, a list of the other names, and the other templates.
fn templates(stored: BTreeMap<String, String>) -> Result<Keys, String> {
    let mut found = BTreeMap::new();
    for (name, text) in stored {
        // As in llama.cpp's converter.
        let name: String = name.chars().map(|letter| if letter.is_ascii_alphanumeric() { letter } else { '_' }).collect();
        if found.insert(name.clone(), text).is_some() {
            return Err(format!("two chat templates have the name `{name}`"));
        }
    }
    let mut values: Keys = found.remove(DEFAULT_TEMPLATE).map(|text| (TEMPLATE.to_owned(), Value::Text(text))).into_iter().collect();
    if !found.is_empty() {
        values.push((TEMPLATES.into(), Value::Texts(found.keys().cloned().collect())));
    }
    values.extend(found.into_iter().map(|(name, text)| (format!("{TEMPLATE}.{name}"), Value::Text(text))));
    Ok(values)
}

/// A shortened value, for messages.
fn short(value: &Json) -> String {
    value.to_string().chars().take(120).collect()
}

/// Whether a SentencePiece-like tokenizer adds a space before a text. Fails for other normalizers and
/// pre-tokenizers.
fn adds_space_prefix(normalizer: &Json, pre_tokenizer: &Json) -> Result<bool, String> {
    let unsupported = |what: &str, value: &Json| format!("a {what} that llama.cpp does not support for SentencePiece vocabularies ({})", short(value));
    let steps: Vec<&Json> = match at(normalizer, "/normalizers").as_array() {
        Some(steps) => steps.iter().collect(),
        None if normalizer.is_null() => Vec::new(),
        None => vec![normalizer],
    };
    let prepends = |step: &Json| at(step, "/type") == "Prepend" && at(step, "/prepend") == SPACE;
    let replaces = |step: &Json| at(step, "/type") == "Replace" && at(step, "/pattern/String") == " " && at(step, "/content") == SPACE;
    let (prefix, replaced) = match steps.as_slice() {
        [] => (false, false),
        [replace] if replaces(replace) => (false, true),
        [prepend, replace] if prepends(prepend) && replaces(replace) => (true, true),
        _ => return Err(unsupported("normalizer", normalizer)),
    };
    match at(pre_tokenizer, "/type").as_str() {
        None if pre_tokenizer.is_null() && replaced => Ok(prefix),
        Some("Split") if replaced && at(pre_tokenizer, "/pattern/String") == " " => Ok(prefix),
        Some("Metaspace") if at(pre_tokenizer, "/replacement") == SPACE => {
            let scheme = at(pre_tokenizer, "/prepend_scheme").as_str();
            Ok(prefix || scheme.map_or(at(pre_tokenizer, "/add_prefix_space") != false, |scheme| scheme != "never"))
        }
        _ if pre_tokenizer.is_null() => Err(unsupported("normalizer", normalizer)),
        _ => Err(unsupported("pre_tokenizer", pre_tokenizer)),
    }
}

/// Whether a token represents a byte, such as `<0x0A>`.
fn is_byte(token: &str) -> bool {
    token.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>')).is_some_and(|digits| digits.len() == 2 && u8::from_str_radix(digits, 16).is_ok())
}

/// Merges, each stored as a text with a space or as a list of two.
fn merges(list: &Json) -> Option<Vec<[&str; 2]>> {
    list.as_array()?
        .iter()
        .map(|merge| match merge {
            Json::String(text) => text.split_once(' ').map(|(left, right)| [left, right]),
            other => Some([other.get(0)?.as_str()?, other.get(1)?.as_str()?]),
        })
        .collect()
}

/// Length in bytes of the longest word that is merged.
const MAX_WORD: usize = 1 << 12;

/// The first word that its merges do not produce, or that is too long to be merged. Without such words,
/// `ignore_merges` has no effect.
fn first_unmerged<'t>(mut words: impl Iterator<Item = &'t str>, merges: &[[&str; 2]]) -> Option<&'t str> {
    let mut ranks: HashMap<[&str; 2], usize> = HashMap::new();
    for (rank, pair) in merges.iter().enumerate() {
        ranks.entry(*pair).or_insert(rank);
    }
    words.find(|word| {
        if word.len() > MAX_WORD {
            return true;
        }
        let mut bounds: Vec<usize> = word.char_indices().map(|(at, _)| at).chain([word.len()]).collect();
        loop {
            let pair = |bounds: &[usize]| match *bounds {
                [start, middle, end] => Some([word.get(start..middle)?, word.get(middle..end)?]),
                _ => None,
            };
            let ranked = bounds.windows(3).enumerate().filter_map(|(at, bounds)| Some((*ranks.get(&pair(bounds)?)?, at)));
            match ranked.min() {
                Some((_, at)) => {
                    bounds.remove(at.saturating_add(1));
                }
                None => return bounds.len() > 2,
            }
        }
    })
}

/// SentencePiece scores that reproduce the order of merges: the negative rank of the first merge that
/// produces a token. Tokens without a merge have the lowest scores.
fn scores(tokens: &[String], merges: &[[&str; 2]]) -> Vec<f64> {
    let mut first: HashMap<String, usize> = HashMap::new();
    for (rank, [left, right]) in merges.iter().enumerate() {
        first.entry(format!("{left}{right}")).or_insert(rank);
    }
    let last = merges.len();
    tokens.iter().enumerate().map(|(id, token)| -(first.get(token).copied().unwrap_or(last.saturating_add(id)) as f64)).collect()
}

/// Tokens that a post-processor adds before and after every text; `None` without a post-processor.
fn added_tokens(processor: &Json) -> Result<Option<[Vec<&str>; 2]>, String> {
    if processor.is_null() {
        return Ok(None);
    }
    let [mut before, mut after] = [Vec::new(), Vec::new()];
    match at(processor, "/type").as_str() {
        Some("ByteLevel") => {}
        Some("Sequence") => {
            for part in at(processor, "/processors").as_array().into_iter().flatten() {
                let [first, last] = added_tokens(part)?.unwrap_or_default();
                before.splice(0..0, first);
                after.extend(last);
            }
        }
        Some("TemplateProcessing") => {
            let mut text = false;
            for piece in at(processor, "/single").as_array().into_iter().flatten() {
                match at(piece, "/SpecialToken/id").as_str() {
                    Some(token) if text => after.push(token),
                    Some(token) => before.push(token),
                    None => text = true,
                }
            }
        }
        _ => return Err(format!("a post-processor that GGUF files cannot represent ({})", short(processor))),
    }
    Ok(Some([before, after]))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn space_prefixes_follow_normalizer_and_pre_tokenizer() {
        let prepend = json!({ "type": "Prepend", "prepend": SPACE });
        let replace = json!({ "type": "Replace", "pattern": { "String": " " }, "content": SPACE });
        let both = json!({ "type": "Sequence", "normalizers": [prepend, replace] });
        let split = json!({ "type": "Split", "pattern": { "String": " " }, "behavior": "MergedWithPrevious", "invert": false });
        let space = |more: Json| {
            let mut space = json!({ "type": "Metaspace", "replacement": SPACE });
            space.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            space
        };
        let null = Json::Null;
        assert_eq!(adds_space_prefix(&both, &null), Ok(true));
        assert_eq!(adds_space_prefix(&replace, &null), Ok(false));
        assert_eq!(adds_space_prefix(&replace, &split), Ok(false));
        assert_eq!(adds_space_prefix(&null, &space(json!({ "add_prefix_space": true }))), Ok(true));
        assert_eq!(adds_space_prefix(&null, &space(json!({ "add_prefix_space": false }))), Ok(false));
        assert_eq!(adds_space_prefix(&null, &space(json!({ "add_prefix_space": true, "prepend_scheme": "never" }))), Ok(false));
        assert_eq!(adds_space_prefix(&null, &space(json!({ "prepend_scheme": "first" }))), Ok(true));
        assert!(adds_space_prefix(&null, &null).unwrap_err().contains("a normalizer"));
        assert!(adds_space_prefix(&json!({ "type": "NFKC" }), &null).unwrap_err().contains("NFKC"));
        assert!(adds_space_prefix(&replace, &json!({ "type": "Whitespace" })).unwrap_err().contains("a pre_tokenizer"));
    }

    #[test]
    fn added_tokens_are_found_on_both_sides() {
        let special = |id: &str| json!({ "SpecialToken": { "id": id, "type_id": 0 } });
        let text = json!({ "Sequence": { "id": "A", "type_id": 0 } });
        let template = json!({ "type": "TemplateProcessing", "single": [special("<s>"), text, special("</s>"), special("<e>")] });
        let sequence = json!({ "type": "Sequence", "processors": [{ "type": "ByteLevel" }, template] });
        assert_eq!(added_tokens(&sequence), Ok(Some([vec!["<s>"], vec!["</s>", "<e>"]])));
        assert_eq!(added_tokens(&Json::Null), Ok(None));
        assert_eq!(added_tokens(&json!({ "type": "ByteLevel" })), Ok(Some([vec![], vec![]])));
        assert!(added_tokens(&json!({ "type": "RobertaProcessing" })).unwrap_err().contains("RobertaProcessing"));
    }

    #[test]
    fn chat_templates_have_names() {
        let stored = |names: [&str; 2]| names.map(str::to_owned).into_iter().zip(["b".to_owned(), "a".to_owned()]).collect();
        let text = |key: &str, text: &str| (key.to_owned(), Value::Text(text.to_owned()));
        let names = ("tokenizer.chat_templates".to_owned(), Value::Texts(vec!["tool_use".to_owned()]));
        assert_eq!(
            templates(stored(["tool-use", "default"])),
            Ok(vec![text("tokenizer.chat_template", "a"), names, text("tokenizer.chat_template.tool_use", "b")])
        );
        assert!(templates(stored(["a-b", "a_b"])).is_err());
    }
}
