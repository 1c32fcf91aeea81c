//! `tokenizer.json` and what belongs to it, from the vocabulary of a GGUF file.

// What is read here, anybody may have written.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::HashMap;

use serde_json::{Map, Value as Json, json};

use super::values::Values;
use super::words::Words;
use crate::error::Result;

/// What stands for a space in SentencePiece's vocabularies.
pub(super) const SPACE: &str = "\u{2581}";

/// The key of a chat template, and that of a list of names of others.
pub(super) const TEMPLATE: &str = "tokenizer.chat_template";
pub(super) const TEMPLATES: &str = "tokenizer.chat_templates";

/// Longest piece whose parts are looked for, in bytes.
const LONGEST_PIECE: usize = 512;

/// Types of tokens.
pub(super) const NORMAL: i64 = 1;
pub(super) const UNKNOWN: i64 = 2;
pub(super) const CONTROL: i64 = 3;
pub(super) const USER_DEFINED: i64 = 4;
pub(super) const UNUSED: i64 = 5;
pub(super) const BYTE: i64 = 6;

/// The files of a tokenizer, and what is to be said of it.
#[derive(Default)]
pub(super) struct Tokenizer {
    /// Files by name.
    pub files: Vec<(&'static str, Json)>,
    /// Why there is no `tokenizer.json`, if there is none.
    pub missing: Option<String>,
}

struct Vocabulary {
    tokens: Vec<String>,
    kinds: Vec<i64>,
}

/// Numbers of tokens that files name.
const NAMED: [(&str, &str); 5] = [("bos", "bos_token"), ("eos", "eos_token"), ("unknown", "unk_token"), ("padding", "pad_token"), ("eot", "")];

/// The tokenizer of a file whose model has this configuration.
pub(super) fn tokenizer(values: &mut Values, config: &Map<String, Json>) -> Result<Tokenizer> {
    let own = |key: &str| format!("tokenizer.ggml.{key}");
    let model = values.text(&own("model"))?;
    let words = values.text(&own("pre"))?;
    let (tokens, kinds) = (values.texts(&own("tokens"))?, values.integers(&own("token_type"))?);
    let (scores, merges) = (values.floats(&own("scores"))?, values.texts(&own("merges"))?);
    let template = template(values)?;
    let [first, last, space] = ["add_bos_token", "add_eos_token", "add_space_prefix"].map(|key| values.flag(&own(key)));
    let (first, last, space) = (first?, last?, space?);
    let mut ids = HashMap::new();
    for (here, _) in NAMED {
        let known = config.get(&format!("{}_token_id", if here == "padding" { "pad" } else { here })).and_then(Json::as_u64);
        let said = known.or(values.size(&own(&format!("{here}_token_id")))?);
        ids.insert(here, said.or((here == "unknown" && model.as_deref() == Some("llama")).then_some(0)));
    }
    let mut found = Tokenizer::default();
    let Some(tokens) = tokens else {
        found.missing = Some("the file holds no vocabulary: no tokenizer.json is made".into());
        return Ok(found);
    };
    let count = tokens.len();
    let kinds = kinds.unwrap_or_else(|| vec![NORMAL; count]);
    for (key, length) in [("token_type", Some(kinds.len())), ("scores", scores.as_ref().map(Vec::len))] {
        if let Some(length) = length.filter(|length| *length != count) {
            return Err(values.wrong(format!("`{}` has {length} values for {count} tokens", own(key))));
        }
    }
    let vocabulary = Vocabulary { tokens, kinds };
    let id = |name: &str| ids.get(name).copied().flatten();
    for name in NAMED.map(|(name, _)| name) {
        if id(name).is_some_and(|id| vocabulary.token(id).is_none()) {
            return Err(values.wrong(format!("`{}` is {}, and there are {count} tokens", own(&format!("{name}_token_id")), id(name).unwrap_or(0))));
        }
    }
    let around = |first: bool| [(first, "bos"), (last.unwrap_or(false), "eos")].map(|(asked, name)| id(name).filter(|_| asked));
    let json = match model.as_deref() {
        Some("gpt2") => {
            let named = words.as_deref().and_then(Words::named);
            match (named, merges) {
                (Some(words), Some(merges)) => vocabulary.of_bytes(words, merges, around(first.unwrap_or(words.first))),
                (None, _) => Err(format!(
                    "the file cuts texts into words in a way that is not known here (`tokenizer.ggml.pre` is {}; known: {})",
                    words.as_ref().map_or("missing".to_owned(), |words| format!("`{words}`")),
                    Words::names()
                )),
                (_, None) => Err("`tokenizer.ggml.merges` is missing".into()),
            }
        }
        Some("llama") => match scores {
            Some(scores) => vocabulary.of_pieces(&scores, space.unwrap_or(true), around(first.unwrap_or(true)), id("unknown")),
            None => Err("`tokenizer.ggml.scores` is missing".into()),
        },
        other => Err(format!("its vocabulary is of the kind `{}` (`tokenizer.ggml.model`), and `gpt2` and `llama` are read", other.unwrap_or("nothing"))),
    };
    match json {
        Ok(json) => found.files.push(("tokenizer.json", json)),
        Err(reason) => found.missing = Some(format!("no tokenizer.json is made: {reason}; put that of the original model beside the result")),
    }
    let mut settings = Map::new();
    let mut set = |key: &str, value: Json| drop(settings.insert(key.to_owned(), value));
    set("tokenizer_class", json!("PreTrainedTokenizerFast"));
    set("clean_up_tokenization_spaces", json!(false));
    for (here, there) in NAMED {
        if let Some(token) = id(here).and_then(|id| vocabulary.token(id)).filter(|_| !there.is_empty()) {
            set(there, json!(token));
        }
    }
    if let Some(length) = config.get("max_position_embeddings") {
        set("model_max_length", length.clone());
    }
    if let Some(template) = template {
        set("chat_template", template);
    }
    found.files.push(("tokenizer_config.json", Json::Object(settings)));
    let mut generation = Map::new();
    for (key, value) in ["bos_token_id", "eos_token_id", "pad_token_id"].into_iter().filter_map(|key| Some((key, config.get(key)?))) {
        let several = id("eot").filter(|turn| key == "eos_token_id" && value.as_u64() != Some(*turn));
        generation.insert(key.to_owned(), several.map_or_else(|| value.clone(), |turn| json!([value, turn])));
    }
    if !generation.is_empty() {
        found.files.push(("generation_config.json", Json::Object(generation)));
    }
    Ok(found)
}

/// The chat template of a file, or a list of them with names.
fn template(values: &mut Values) -> Result<Option<Json>> {
    let first = values.text(TEMPLATE)?;
    let Some(names) = values.texts(TEMPLATES)? else { return Ok(first.map(Json::from)) };
    let mut list: Vec<Json> = first.map(|text| json!({ "name": "default", "template": text })).into_iter().collect();
    for name in names {
        let text = values.text(&format!("{TEMPLATE}.{name}"))?;
        list.extend(text.map(|text| json!({ "name": name, "template": text })));
    }
    Ok(Some(Json::Array(list)))
}

impl Vocabulary {
    fn token(&self, id: u64) -> Option<&str> {
        self.tokens.get(usize::try_from(id).ok()?).map(String::as_str)
    }

    /// Tokens by number, but for those that only fill the embedding up.
    fn ids(&self) -> Result<Map<String, Json>, String> {
        let mut ids = Map::new();
        for (id, (token, kind)) in self.tokens.iter().zip(&self.kinds).enumerate() {
            if *kind == UNUSED && *token == format!("[PAD{id}]") {
                continue;
            }
            if let Some(other) = ids.insert(token.clone(), json!(id)) {
                return Err(format!("tokens {other} and {id} are both `{token}`"));
            }
        }
        Ok(ids)
    }

    fn added(&self) -> Vec<Json> {
        let tokens = self.tokens.iter().zip(&self.kinds).enumerate();
        let added = tokens.filter(|(_, (_, kind))| [UNKNOWN, CONTROL, USER_DEFINED].contains(kind));
        let entry = |(id, (token, kind)): (usize, (&String, &i64))| json!({ "id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": *kind != USER_DEFINED });
        added.map(entry).collect()
    }

    /// What puts tokens around a text.
    fn processor(&self, around: [Option<u64>; 2]) -> Json {
        if around == [None, None] {
            return Json::Null;
        }
        let mut known = Map::new();
        let mut special = |id: Option<u64>, of: u8| {
            let id = id?;
            let token = self.token(id)?;
            known.insert(token.to_owned(), json!({ "id": token, "ids": [id], "tokens": [token] }));
            Some(json!({ "SpecialToken": { "id": token, "type_id": of } }))
        };
        let [first, last] = around;
        let mut text = |name: &str, of: u8| {
            let text = json!({ "Sequence": { "id": name, "type_id": of } });
            [special(first, of), Some(text), special(last, of)].into_iter().flatten().collect::<Vec<_>>()
        };
        let (single, second) = (text("A", 0), text("B", 1));
        let pair: Vec<Json> = single.iter().cloned().chain(second).collect();
        json!({ "type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": known })
    }

    fn of_bytes(&self, words: &Words, merges: Vec<String>, around: [Option<u64>; 2]) -> Result<Json, String> {
        let pairs: Vec<[&str; 2]> = merges.iter().filter_map(|merge| merge.split_once(' ')).map(|(left, right)| [left, right]).collect();
        if pairs.len() != merges.len() {
            return Err("`tokenizer.ggml.merges` holds something else than pairs".into());
        }
        let ids = self.ids()?;
        if let Some([left, right]) = pairs.iter().find(|[left, right]| ![*left, *right, &format!("{left}{right}")].iter().all(|token| ids.contains_key(*token)))
        {
            return Err(format!("`tokenizer.ggml.merges` joins `{left}` and `{right}`, which are no tokens"));
        }
        Ok(json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": self.added(),
            "normalizer": if words.composed { json!({ "type": "NFC" }) } else { Json::Null },
            "pre_tokenizer": words.pre_tokenizer(),
            "post_processor": self.processor(around),
            "decoder": { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true },
            "model": {
                "type": "BPE",
                "dropout": null,
                "unk_token": null,
                "continuing_subword_prefix": null,
                "end_of_word_suffix": null,
                "fuse_unk": false,
                "byte_fallback": false,
                "ignore_merges": words.ignore_merges,
                "vocab": ids,
                "merges": pairs,
            },
        }))
    }

    /// SentencePiece joins the neighbours whose piece scores highest, the leftmost of equals, until none are a piece. Here a merge comes
    /// before another because of its place in a list; runs of spaces, whose scores are equal, fill from the left, as merges do that have the
    /// longer left part first.
    fn of_pieces(&self, scores: &[f64], space: bool, around: [Option<u64>; 2], unknown: Option<u64>) -> Result<Json, String> {
        let ids = self.ids()?;
        let normal =
            |token: &str| ids.get(token).and_then(Json::as_u64).and_then(|id| self.kinds.get(usize::try_from(id).ok()?)).is_some_and(|kind| *kind == NORMAL);
        let pieces = || self.tokens.iter().zip(&self.kinds).zip(scores).filter(|((_, kind), _)| **kind == NORMAL);
        if let Some(((token, _), _)) = pieces().find(|((token, _), _)| token.len() > LONGEST_PIECE) {
            return Err(format!("a token of {} bytes is longer than any piece", token.len()));
        }
        let mut merges = Vec::new();
        for ((token, _), score) in pieces() {
            for (cut, _) in token.char_indices().skip(1) {
                let (left, right) = token.split_at(cut);
                if normal(left) && normal(right) {
                    merges.push((*score, left, right));
                }
            }
        }
        // Unigram models and vocabularies of byte pairs whose order was lost are written so.
        if let [(first, ..), rest @ ..] = merges.as_slice()
            && !rest.is_empty()
            && rest.iter().all(|(score, ..)| score == first)
        {
            return Err(format!("its scores are all equal ({first}), and say no order of merges"));
        }
        merges.sort_by(|a, b| b.0.total_cmp(&a.0).then(b.1.len().cmp(&a.1.len())));
        let replace = json!({ "type": "Replace", "pattern": { "String": " " }, "content": SPACE });
        let normalizers = if space { vec![json!({ "type": "Prepend", "prepend": SPACE }), replace] } else { vec![replace] };
        let mut decoders =
            vec![json!({ "type": "Replace", "pattern": { "String": SPACE }, "content": " " }), json!({ "type": "ByteFallback" }), json!({ "type": "Fuse" })];
        if space {
            decoders.push(json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 }));
        }
        Ok(json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": self.added(),
            "normalizer": { "type": "Sequence", "normalizers": normalizers },
            "pre_tokenizer": null,
            "post_processor": self.processor(around),
            "decoder": { "type": "Sequence", "decoders": decoders },
            "model": {
                "type": "BPE",
                "dropout": null,
                "unk_token": unknown.and_then(|id| self.token(id)),
                "continuing_subword_prefix": null,
                "end_of_word_suffix": null,
                "fuse_unk": true,
                "byte_fallback": true,
                "ignore_merges": false,
                "vocab": ids,
                "merges": merges.iter().map(|(_, left, right)| [left, right]).collect::<Vec<_>>(),
            },
        }))
    }
}
