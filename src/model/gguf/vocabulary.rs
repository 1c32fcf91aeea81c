//! The vocabulary of a GGUF file, from `tokenizer.json` and what belongs to it.

use std::collections::{BTreeMap, HashMap, HashSet};

use serde_json::Value as Json;

use super::describe::Keys;
use super::tokenizer::{BYTE, CONTROL, NORMAL, SPACE, TEMPLATE, TEMPLATES, UNKNOWN, UNUSED, USER_DEFINED};
use super::words::Words;
use crate::error::{Error, Result};
use crate::model::{Model, text_beside};
use crate::store::gguf::Value;

const FILE: &str = "tokenizer.json";

/// What a file says of tokens, and notes; `rows` is how many the model has. Without a `tokenizer.json`, that there are none.
///
/// # Errors
/// The tokenizer is of a kind that llama.cpp does not have, or that is not known here.
pub(crate) fn vocabulary(model: &Model, rows: usize) -> Result<(Keys, Vec<String>)> {
    let key = |name: &str| format!("tokenizer.ggml.{name}");
    let read = |name: &str| -> Result<Json> {
        let text = text_beside(&model.path, &model.beside.made, name)?;
        text.map_or(Ok(Json::Null), |text| serde_json::from_str(&text).map_err(|e| Error::malformed(&model.path.join(name), e)))
    };
    let (file, settings, generation) = (read(FILE)?, read("tokenizer_config.json")?, read("generation_config.json")?);
    if file.is_null() {
        let note = "there is no tokenizer.json: the file holds no vocabulary, and runtimes take numbers of tokens alone".to_owned();
        return Ok((vec![(key("model"), Value::Text("no_vocab".into()))], vec![note]));
    }
    let refused = |what: String| Error::Unsupported {
        what: format!("gguf: {}: {what}", model.path.join(FILE).display()),
        hint: "without a tokenizer.json in the folder, the file is written without a vocabulary".into(),
    };
    let of_model = at(&file, "/model");
    if at(of_model, "/type") != "BPE" {
        return Err(refused(format!("a tokenizer of the kind {}", at(of_model, "/type"))));
    }
    for place in ["/continuing_subword_prefix", "/end_of_word_suffix"] {
        if let Some(said) = at(of_model, place).as_str().filter(|said| !said.is_empty()) {
            return Err(refused(format!("`model{}` of `{said}`, which vocabularies of llama.cpp have none of", place.replace('/', "."))));
        }
    }
    let mut by_id: BTreeMap<usize, &str> = BTreeMap::new();
    let entries = at(of_model, "/vocab").as_object().into_iter().flatten().filter_map(|(token, id)| Some((token.as_str(), id.as_u64()?)));
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
                Some(other) if other != token => return Err(refused(format!("number {id} is of the tokens `{other}` and `{token}`"))),
                _ => {}
            },
            None => beyond = beyond.saturating_add(1),
        }
    }
    if beyond > 0 {
        notes.push(format!("{beyond} tokens of tokenizer.json are left out: their numbers are beyond the {rows} rows of the embedding"));
    }
    let words = Words::cutting(at(&file, "/pre_tokenizer"));
    let pieces = words.is_none() && at(of_model, "/byte_fallback") == true;
    let unknown = at(of_model, "/unk_token").as_str();
    let special: HashMap<&str, bool> = added.iter().map(|(token, _, special)| (*token, *special)).collect();
    let kind_of = |token: &str| match special.get(token) {
        _ if pieces && unknown == Some(token) => UNKNOWN,
        Some(true) => CONTROL,
        Some(false) => USER_DEFINED,
        None if pieces && is_byte(token) => BYTE,
        None => NORMAL,
    };
    // llama.cpp looks for these in texts as they are.
    let text_of = |token: &str| if pieces && kind_of(token) == USER_DEFINED { token.replace(SPACE, " ") } else { token.to_owned() };
    let tokens: Vec<String> = (0..rows).map(|id| by_id.get(&id).map_or_else(|| format!("[PAD{id}]"), |token| text_of(token))).collect();
    let mut once = HashSet::new();
    if let Some(twice) = tokens.iter().find(|token| !once.insert(token.as_str())) {
        return Err(refused(format!("two tokens are `{twice}` in a file of GGUF")));
    }
    let kinds: Vec<i64> = (0..rows).map(|id| by_id.get(&id).map_or(UNUSED, |token| kind_of(token))).collect();
    let merges = merges(at(of_model, "/merges")).ok_or_else(|| refused("merges that are no pairs".into()))?;
    let mut values = Vec::new();
    if pieces {
        let prefix = before_pieces(at(&file, "/normalizer"), at(&file, "/pre_tokenizer")).map_err(refused)?;
        values.extend([(key("model"), Value::Text("llama".into())), (key("scores"), Value::Floats(scores(&tokens, &merges)))]);
        values.push((key("add_space_prefix"), Value::Bool(prefix)));
    } else {
        let words = words.ok_or_else(|| refused(format!("a way to cut texts into words that is not known here ({})", short(at(&file, "/pre_tokenizer")))))?;
        let names = words.names.first().copied().unwrap_or_default();
        if !at(&file, "/normalizer").is_null() && at(&file, "/normalizer/type") != "NFC" {
            return Err(refused(format!("a normalizer ({}), which a byte-level vocabulary of llama.cpp has none of", at(&file, "/normalizer/type"))));
        }
        if (at(of_model, "/ignore_merges") == true) != words.ignore_merges {
            return Err(refused(format!("`model.ignore_merges` is {}, and llama.cpp does otherwise for `{names}`", !words.ignore_merges)));
        }
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
        named.extend(token.and_then(id_of).or(id).map(|id| (here, id)));
    }
    if let Some(turn) = at(&generation, "/eos_token_id").as_array().and_then(|ids| ids.iter().filter_map(Json::as_u64).find(|id| named.get("eos") != Some(id)))
    {
        named.insert("eot", turn);
    }
    named.retain(|name, id| {
        let there = usize::try_from(*id).is_ok_and(|id| id < rows);
        if !there {
            notes.push(format!("`{name}_token_id` of {id} is left out: it is beyond the {rows} rows of the embedding"));
        }
        there
    });
    values.extend(named.iter().map(|(name, id)| (key(&format!("{name}_token_id")), Value::Unsigned(*id))));
    let sides = around(at(&file, "/post_processor")).map_err(refused)?;
    for (side, name) in ["bos", "eos"].into_iter().enumerate() {
        let known = named.get(name).and_then(|id| by_id.get(&usize::try_from(*id).ok()?)).copied();
        let puts = match sides.as_ref().and_then(|sides| sides.get(side)).map(Vec::as_slice) {
            None => known.is_some() && at(&settings, &format!("/add_{name}_token")) == true,
            Some([]) => false,
            Some([token]) if Some(*token) == known => true,
            Some(others) => {
                let place = if side == 0 { "before" } else { "behind" };
                return Err(refused(format!("`{}` {place} every text, where a file of GGUF can only put the `{name}_token`", others.join("`, `"))));
            }
        };
        values.push((key(&format!("add_{name}_token")), Value::Bool(puts)));
    }
    let template = at(&settings, "/chat_template");
    if let Some(several) = template.as_array() {
        values.extend(templates(several).map_err(refused)?);
    } else if let Some(template) =
        template.as_str().map_or_else(|| text_beside(&model.path, &model.beside.made, "chat_template.jinja"), |text| Ok(Some(text.to_owned())))?
    {
        values.push((TEMPLATE.into(), Value::Text(template)));
    }
    Ok((values, notes))
}

/// Chat templates by name: the default one, and others with a list of their names.
fn templates(list: &[Json]) -> Result<Keys, String> {
    let mut found = BTreeMap::new();
    for entry in list {
        let (Some(name), Some(text)) = (at(entry, "/name").as_str(), at(entry, "/template").as_str()) else {
            return Err("`chat_template` of tokenizer_config.json is a list of something else than names and templates".into());
        };
        // As the converter writes them.
        let name: String = name.chars().map(|letter| if letter.is_ascii_alphanumeric() { letter } else { '_' }).collect();
        if found.insert(name.clone(), text.to_owned()).is_some() {
            return Err(format!("two chat templates are called `{name}`"));
        }
    }
    let mut values: Keys = found.remove("default").map(|text| (TEMPLATE.to_owned(), Value::Text(text))).into_iter().collect();
    if !found.is_empty() {
        values.push((TEMPLATES.into(), Value::Texts(found.keys().cloned().collect())));
    }
    values.extend(found.into_iter().map(|(name, text)| (format!("{TEMPLATE}.{name}"), Value::Text(text))));
    Ok(values)
}

/// The beginning of a value.
fn short(value: &Json) -> String {
    value.to_string().chars().take(120).collect()
}

/// Whether a space is put before texts that are cut into pieces, of what a `tokenizer.json` does to them first.
fn before_pieces(normalizer: &Json, cut: &Json) -> Result<bool, String> {
    let unknown = |what: &str, value: &Json| format!("a {what} that vocabularies of pieces have none of in llama.cpp ({})", short(value));
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
        _ => return Err(unknown("normalizer", normalizer)),
    };
    match at(cut, "/type").as_str() {
        None if cut.is_null() && replaced => Ok(prefix),
        Some("Split") if replaced && at(cut, "/pattern/String") == " " => Ok(prefix),
        Some("Metaspace") if at(cut, "/replacement") == SPACE => {
            let scheme = at(cut, "/prepend_scheme").as_str();
            Ok(prefix || scheme.map_or(at(cut, "/add_prefix_space") != false, |scheme| scheme != "never"))
        }
        _ if cut.is_null() => Err(unknown("normalizer", normalizer)),
        _ => Err(unknown("pre_tokenizer", cut)),
    }
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

/// Tokens that are put before and behind every text; nothing where a `tokenizer.json` does not say.
fn around(processor: &Json) -> Result<Option<[Vec<&str>; 2]>, String> {
    if processor.is_null() {
        return Ok(None);
    }
    let [mut before, mut behind] = [Vec::new(), Vec::new()];
    match at(processor, "/type").as_str() {
        Some("ByteLevel") => {}
        Some("Sequence") => {
            for part in at(processor, "/processors").as_array().into_iter().flatten() {
                let [first, last] = around(part)?.unwrap_or_default();
                before.splice(0..0, first);
                behind.extend(last);
            }
        }
        Some("TemplateProcessing") => {
            let mut text = false;
            for piece in at(processor, "/single").as_array().into_iter().flatten() {
                match at(piece, "/SpecialToken/id").as_str() {
                    Some(token) if text => behind.push(token),
                    Some(token) => before.push(token),
                    None => text = true,
                }
            }
        }
        _ => return Err(format!("a post-processor that a file of GGUF cannot say ({})", short(processor))),
    }
    Ok(Some([before, behind]))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_comes_before_pieces_is_known_or_refused() {
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
        assert_eq!(before_pieces(&both, &null), Ok(true));
        assert_eq!(before_pieces(&replace, &null), Ok(false));
        assert_eq!(before_pieces(&replace, &split), Ok(false));
        assert_eq!(before_pieces(&null, &space(json!({ "add_prefix_space": true }))), Ok(true));
        assert_eq!(before_pieces(&null, &space(json!({ "add_prefix_space": false }))), Ok(false));
        assert_eq!(before_pieces(&null, &space(json!({ "add_prefix_space": true, "prepend_scheme": "never" }))), Ok(false));
        assert_eq!(before_pieces(&null, &space(json!({ "prepend_scheme": "first" }))), Ok(true));
        assert!(before_pieces(&null, &null).unwrap_err().contains("a normalizer"));
        assert!(before_pieces(&json!({ "type": "NFKC" }), &null).unwrap_err().contains("NFKC"));
        assert!(before_pieces(&replace, &json!({ "type": "Whitespace" })).unwrap_err().contains("a pre_tokenizer"));
    }

    #[test]
    fn tokens_around_texts_are_told_by_their_side() {
        let special = |id: &str| json!({ "SpecialToken": { "id": id, "type_id": 0 } });
        let text = json!({ "Sequence": { "id": "A", "type_id": 0 } });
        let template = json!({ "type": "TemplateProcessing", "single": [special("<s>"), text, special("</s>"), special("<e>")] });
        let several = json!({ "type": "Sequence", "processors": [{ "type": "ByteLevel" }, template] });
        assert_eq!(around(&several), Ok(Some([vec!["<s>"], vec!["</s>", "<e>"]])));
        assert_eq!(around(&Json::Null), Ok(None));
        assert_eq!(around(&json!({ "type": "ByteLevel" })), Ok(Some([vec![], vec![]])));
        assert!(around(&json!({ "type": "RobertaProcessing" })).unwrap_err().contains("RobertaProcessing"));
    }

    #[test]
    fn chat_templates_have_names() {
        let list = [json!({ "name": "tool-use", "template": "b" }), json!({ "name": "default", "template": "a" })];
        let text = |key: &str, text: &str| (key.to_owned(), Value::Text(text.to_owned()));
        let names = ("tokenizer.chat_templates".to_owned(), Value::Texts(vec!["tool_use".to_owned()]));
        assert_eq!(templates(&list), Ok(vec![text("tokenizer.chat_template", "a"), names, text("tokenizer.chat_template.tool_use", "b")]));
        assert!(templates(&[json!("a")]).is_err());
    }
}
