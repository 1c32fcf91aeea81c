//! The vocabulary of a GGUF file, from `tokenizer.json` and what belongs to it.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use serde_json::Value as Json;

use super::describe::Keys;
use super::tokenizer::{BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED};
use super::words::Words;
use crate::error::{Error, Result};
use crate::model::{Model, text_beside};
use crate::store::gguf::Value;

const FILE: &str = "tokenizer.json";

/// What a file says of tokens; `rows` is how many the model has. Without a `tokenizer.json`, that there are none, and a note.
///
/// # Errors
/// The tokenizer is of a kind that llama.cpp does not have, or that is not known here.
pub(crate) fn vocabulary(model: &Model, rows: usize) -> Result<(Keys, Option<String>)> {
    let key = |name: &str| format!("tokenizer.ggml.{name}");
    let read = |name: &str| -> Result<Json> {
        let text = text_beside(&model.path, &model.beside.made, name)?;
        text.map_or(Ok(Json::Null), |text| serde_json::from_str(&text).map_err(|e| Error::malformed(&model.path.join(name), e)))
    };
    let (file, settings, generation) = (read(FILE)?, read("tokenizer_config.json")?, read("generation_config.json")?);
    if file.is_null() {
        let note = "there is no tokenizer.json: the file holds no vocabulary, and runtimes take numbers of tokens alone".to_owned();
        return Ok((vec![(key("model"), Value::Text("no_vocab".into()))], Some(note)));
    }
    let refused = |what: String| Error::Unsupported {
        what: format!("gguf: {}: {what}", model.path.join(FILE).display()),
        hint: "without a tokenizer.json in the folder, the file is written without a vocabulary".into(),
    };
    let of_model = at(&file, "/model");
    if at(of_model, "/type") != "BPE" {
        return Err(refused(format!("a tokenizer of the kind {}", at(of_model, "/type"))));
    }
    let mut by_id: BTreeMap<usize, &str> = BTreeMap::new();
    let entries = at(of_model, "/vocab").as_object().into_iter().flatten().filter_map(|(token, id)| Some((token.as_str(), id.as_u64()?)));
    let added: Vec<(&str, u64, bool)> = at(&file, "/added_tokens")
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|token| Some((at(token, "/content").as_str()?, at(token, "/id").as_u64()?, at(token, "/special").as_bool().unwrap_or(false))))
        .collect();
    let mut beyond = 0usize;
    for (token, id) in entries.chain(added.iter().map(|(token, id, _)| (*token, *id))) {
        match usize::try_from(id).ok().filter(|id| *id < rows) {
            Some(id) => drop(by_id.insert(id, token)),
            None => beyond = beyond.saturating_add(1),
        }
    }
    let note = (beyond > 0).then(|| format!("{beyond} tokens of tokenizer.json are left out: their numbers are beyond the {rows} rows of the embedding"));
    let bytes = at(of_model, "/byte_fallback") == true;
    let unknown = at(of_model, "/unk_token").as_str();
    let special: HashMap<&str, bool> = added.iter().map(|(token, _, special)| (*token, *special)).collect();
    let kind_of = |token: &str| match special.get(token) {
        _ if bytes && unknown == Some(token) => UNKNOWN,
        Some(true) => CONTROL,
        Some(false) => USER_DEFINED,
        None if bytes && is_byte(token) => BYTE,
        None => NORMAL,
    };
    let tokens: Vec<String> = (0..rows).map(|id| by_id.get(&id).map_or_else(|| format!("[PAD{id}]"), |token| (*token).to_owned())).collect();
    let kinds: Vec<i64> = (0..rows).map(|id| by_id.get(&id).map_or(UNUSED, |token| kind_of(token))).collect();
    let merges = merges(at(of_model, "/merges")).ok_or_else(|| refused("merges that are no pairs".into()))?;
    let mut values = Vec::new();
    if bytes {
        let prefix =
            file.to_string().contains(r#""type":"Prepend""#) || at(&file, "/pre_tokenizer/prepend_scheme").as_str().is_some_and(|scheme| scheme != "never");
        values.extend([(key("model"), Value::Text("llama".into())), (key("scores"), Value::Floats(scores(&tokens, &merges)))]);
        values.push((key("add_space_prefix"), Value::Bool(prefix)));
    } else {
        let words = Words::cutting(at(&file, "/pre_tokenizer")).ok_or_else(|| {
            refused(format!(
                "a way to cut texts into words that is not known here ({})",
                at(&file, "/pre_tokenizer").to_string().chars().take(120).collect::<String>()
            ))
        })?;
        if !at(&file, "/normalizer").is_null() && at(&file, "/normalizer/type") != "NFC" {
            return Err(refused(format!("a normalizer ({}), which a byte-level vocabulary of llama.cpp has none of", at(&file, "/normalizer/type"))));
        }
        let names = words.names.first().copied().unwrap_or_default();
        values.extend([(key("model"), Value::Text("gpt2".into())), (key("pre"), Value::Text(names.into()))]);
        values.push((key("merges"), Value::Texts(merges.iter().map(|[left, right]| format!("{left} {right}")).collect())));
    }
    values.extend([(key("tokens"), Value::Texts(tokens)), (key("token_type"), Value::Integers(kinds))]);
    let id_of = |token: &str| by_id.iter().find(|(_, other)| **other == token).map(|(id, _)| *id as u64);
    let mut named: BTreeMap<&str, u64> = BTreeMap::new();
    for (here, there) in [("bos", "bos"), ("eos", "eos"), ("padding", "pad"), ("unknown", "unk")] {
        let said = |values: Option<&Json>| values.and_then(|id| id.as_u64().or_else(|| id.get(0)?.as_u64()));
        let token = at(&settings, &format!("/{there}_token"));
        let token = token.as_str().or_else(|| at(token, "/content").as_str()).or(unknown.filter(|_| here == "unknown"));
        let id = said(model.config.get(&format!("{there}_token_id"))).or_else(|| said(generation.get(format!("{there}_token_id"))));
        let id = token.and_then(id_of).or(id).filter(|id| usize::try_from(*id).is_ok_and(|id| id < rows));
        named.extend(id.map(|id| (here, id)));
    }
    if let Some(turn) = at(&generation, "/eos_token_id").as_array().and_then(|ids| ids.iter().filter_map(Json::as_u64).find(|id| named.get("eos") != Some(id)))
    {
        named.insert("eot", turn);
    }
    values.extend(named.iter().map(|(name, id)| (key(&format!("{name}_token_id")), Value::Unsigned(*id))));
    let around = around(at(&file, "/post_processor"));
    let puts = |name: &str| named.get(name).and_then(|id| by_id.get(&usize::try_from(*id).ok()?)).is_some_and(|token| around.contains(*token));
    values.extend([(key("add_bos_token"), Value::Bool(puts("bos"))), (key("add_eos_token"), Value::Bool(puts("eos")))]);
    let template = at(&settings, "/chat_template").as_str().map(str::to_owned);
    if let Some(template) = template.map_or_else(|| text_beside(&model.path, &model.beside.made, "chat_template.jinja"), |text| Ok(Some(text)))? {
        values.push(("tokenizer.chat_template".into(), Value::Text(template)));
    }
    Ok((values, note))
}

/// What stands at a place of a file; null where there is nothing.
pub(super) fn at<'j>(value: &'j Json, place: &str) -> &'j Json {
    value.pointer(place).unwrap_or(&Json::Null)
}

/// Whether a token stands for a byte: `<0x0A>`.
fn is_byte(token: &str) -> bool {
    token.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>')).is_some_and(|digits| digits.len() == 2 && u8::from_str_radix(digits, 16).is_ok())
}

/// Pairs, each a text with a space or a list of two.
fn merges(list: &Json) -> Option<Vec<[&str; 2]>> {
    list.as_array()?
        .iter()
        .map(|merge| match merge {
            Json::String(text) => text.split_once(' ').map(|(left, right)| [left, right]),
            other => Some([other.get(0)?.as_str()?, other.get(1)?.as_str()?]),
        })
        .collect()
}

/// Scores that join neighbours in the order of merges: that of a token falls with the first merge that gives it, and those that none gives
/// come last.
fn scores(tokens: &[String], merges: &[[&str; 2]]) -> Vec<f64> {
    let mut first: HashMap<String, usize> = HashMap::new();
    for (rank, [left, right]) in merges.iter().enumerate() {
        first.entry(format!("{left}{right}")).or_insert(rank);
    }
    let last = merges.len();
    tokens.iter().enumerate().map(|(id, token)| -(first.get(token).copied().unwrap_or(last.saturating_add(id)) as f64)).collect()
}

/// Tokens that are put around every text.
fn around(processor: &Json) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let parts = at(processor, "/processors").as_array().into_iter().flatten().chain([processor]);
    for part in parts {
        let single = at(part, "/single").as_array().into_iter().flatten();
        found.extend(single.filter_map(|piece| at(piece, "/SpecialToken/id").as_str()).map(str::to_owned));
    }
    found
}
