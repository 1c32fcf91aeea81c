//! Conversion of a GGUF vocabulary to `tokenizer.json`, `tokenizer_config.json` and
//! `generation_config.json`.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::HashMap;

use serde_json::{Map, Value as Json, json};

use super::pre_tokenizer::PreTokenizer;
use super::token_types::{CONTROL, NORMAL, SPACE, TEMPLATE, TEMPLATES, UNKNOWN, UNUSED, USER_DEFINED};
use super::values::Values;
use crate::error::Result;

/// Maximum length of a SentencePiece token, in bytes.
const MAX_PIECE_BYTES: usize = 512;

/// Synthesized tokenizer files.
#[derive(Default)]
pub(super) struct Tokenizer {
    /// Files by name.
    pub files: Vec<(&'static str, Json)>,
    /// Reason why `tokenizer.json` could not be synthesized.
    pub missing: Option<String>,
}

struct Vocabulary {
    tokens: Vec<String>,
    /// Token types.
    kinds: Vec<i64>,
}

/// Special tokens: name in GGUF keys, and key in `tokenizer_config.json`.
const SPECIAL_TOKENS: [(&str, &str); 5] = [("bos", "bos_token"), ("eos", "eos_token"), ("unknown", "unk_token"), ("padding", "pad_token"), ("eot", "")];

/// Synthesizes the tokenizer files of a model with this configuration.
pub(super) fn tokenizer(values: &mut Values, config: &Map<String, Json>) -> Result<Tokenizer> {
    let own = |key: &str| format!("tokenizer.ggml.{key}");
    let model = values.text(&own("model"))?;
    let pre_tokenizer = values.text(&own("pre"))?;
    let (tokens, kinds) = (values.texts(&own("tokens"))?, values.integers(&own("token_type"))?);
    let (scores, merges) = (values.floats(&own("scores"))?, values.texts(&own("merges"))?);
    let template = template(values)?;
    let [first, last, space] = ["add_bos_token", "add_eos_token", "add_space_prefix"].map(|key| values.flag(&own(key)));
    let (first, last, space) = (first?, last?, space?);
    let mut ids = HashMap::new();
    for (name, _) in SPECIAL_TOKENS {
        let configured = config.get(&format!("{}_token_id", if name == "padding" { "pad" } else { name })).and_then(Json::as_u64);
        let id = configured.or(values.size(&own(&format!("{name}_token_id")))?);
        ids.insert(name, id.or((name == "unknown" && model.as_deref() == Some("llama")).then_some(0)));
    }
    let mut found = Tokenizer::default();
    let Some(tokens) = tokens else {
        found.missing = Some("the file contains no vocabulary, so that tokenizer.json is missing".into());
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
    for name in SPECIAL_TOKENS.map(|(name, _)| name) {
        if id(name).is_some_and(|id| vocabulary.token(id).is_none()) {
            return Err(values.wrong(format!("`{}` is {}, but there are only {count} tokens", own(&format!("{name}_token_id")), id(name).unwrap_or(0))));
        }
    }
    let special = |first: bool| [(first, "bos"), (last.unwrap_or(false), "eos")].map(|(is_added, name)| id(name).filter(|_| is_added));
    let json = match model.as_deref() {
        Some("gpt2") => {
            let supported = pre_tokenizer.as_deref().and_then(PreTokenizer::from_name);
            match (supported, merges) {
                (Some(pre_tokenizer), Some(merges)) => {
                    vocabulary.byte_level_tokenizer(pre_tokenizer, merges, special(first.unwrap_or(pre_tokenizer.adds_first)))
                }
                (None, _) => Err(format!(
                    "its pre-tokenizer is not supported (`tokenizer.ggml.pre` is {}; supported: {})",
                    pre_tokenizer.as_ref().map_or("missing".to_owned(), |name| format!("`{name}`")),
                    PreTokenizer::names()
                )),
                (_, None) => Err("`tokenizer.ggml.merges` is missing".into()),
            }
        }
        Some("llama") => match scores {
            Some(scores) => vocabulary.sentencepiece_tokenizer(&scores, space.unwrap_or(true), special(first.unwrap_or(true)), id("unknown")),
            None => Err("`tokenizer.ggml.scores` is missing".into()),
        },
        other => {
            Err(format!("its vocabulary has the type `{}` (`tokenizer.ggml.model`), but only `gpt2` and `llama` are supported", other.unwrap_or("missing")))
        }
    };
    match json {
        Ok(json) => found.files.push(("tokenizer.json", json)),
        Err(reason) => found.missing = Some(format!("tokenizer.json cannot be created: {reason}; copy the one of the original model into the output")),
    }
    let mut settings = Map::new();
    let mut set = |key: &str, value: Json| drop(settings.insert(key.to_owned(), value));
    set("tokenizer_class", json!("PreTrainedTokenizerFast"));
    set("clean_up_tokenization_spaces", json!(false));
    for (name, key) in SPECIAL_TOKENS {
        if let Some(token) = id(name).and_then(|id| vocabulary.token(id)).filter(|_| !key.is_empty()) {
            set(key, json!(token));
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
        let end_of_turn = id("eot").filter(|turn| key == "eos_token_id" && value.as_u64() != Some(*turn));
        generation.insert(key.to_owned(), end_of_turn.map_or_else(|| value.clone(), |turn| json!([value, turn])));
    }
    if !generation.is_empty() {
        found.files.push(("generation_config.json", Json::Object(generation)));
    }
    Ok(found)
}

/// The chat template of a file, or a list of named templates.
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

    /// Token ids by token, without padding of the embedding table.
    fn ids(&self) -> Result<Map<String, Json>, String> {
        let mut ids = Map::new();
        for (id, (token, kind)) in self.tokens.iter().zip(&self.kinds).enumerate() {
            if *kind == UNUSED && *token == format!("[PAD{id}]") {
                continue;
            }
            if let Some(other) = ids.insert(token.clone(), json!(id)) {
                return Err(format!("token ids {other} and {id} are both `{token}`"));
            }
        }
        Ok(ids)
    }

    /// The entries of `added_tokens`: special and user-defined tokens.
    fn added(&self) -> Vec<Json> {
        let tokens = self.tokens.iter().zip(&self.kinds).enumerate();
        let added = tokens.filter(|(_, (_, kind))| [UNKNOWN, CONTROL, USER_DEFINED].contains(kind));
        let entry = |(id, (token, kind)): (usize, (&String, &i64))| json!({ "id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": *kind != USER_DEFINED });
        added.map(entry).collect()
    }

    /// The post-processor that adds special tokens before and after a text.
    fn processor(&self, special_tokens: [Option<u64>; 2]) -> Json {
        if special_tokens == [None, None] {
            return Json::Null;
        }
        let mut used = Map::new();
        let mut special = |id: Option<u64>, type_id: u8| {
            let id = id?;
            let token = self.token(id)?;
            used.insert(token.to_owned(), json!({ "id": token, "ids": [id], "tokens": [token] }));
            Some(json!({ "SpecialToken": { "id": token, "type_id": type_id } }))
        };
        let [first, last] = special_tokens;
        let mut text = |name: &str, type_id: u8| {
            let text = json!({ "Sequence": { "id": name, "type_id": type_id } });
            [special(first, type_id), Some(text), special(last, type_id)].into_iter().flatten().collect::<Vec<_>>()
        };
        let (single, second) = (text("A", 0), text("B", 1));
        let pair: Vec<Json> = single.iter().cloned().chain(second).collect();
        json!({ "type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": used })
    }

    /// A byte-level BPE tokenizer.
    fn byte_level_tokenizer(&self, pre_tokenizer: &PreTokenizer, merges: Vec<String>, special_tokens: [Option<u64>; 2]) -> Result<Json, String> {
        let pairs: Vec<[&str; 2]> = merges.iter().filter_map(|merge| merge.split_once(' ')).map(|(left, right)| [left, right]).collect();
        if pairs.len() != merges.len() {
            return Err("`tokenizer.ggml.merges` contains entries that are not pairs".into());
        }
        let ids = self.ids()?;
        if let Some([left, right]) = pairs.iter().find(|[left, right]| ![*left, *right, &format!("{left}{right}")].iter().all(|token| ids.contains_key(*token)))
        {
            return Err(format!("`tokenizer.ggml.merges` joins `{left}` and `{right}`, which are not tokens"));
        }
        Ok(json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": self.added(),
            "normalizer": if pre_tokenizer.is_nfc { json!({ "type": "NFC" }) } else { Json::Null },
            "pre_tokenizer": pre_tokenizer.to_json(),
            "post_processor": self.processor(special_tokens),
            "decoder": { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true },
            "model": {
                "type": "BPE",
                "dropout": null,
                "unk_token": null,
                "continuing_subword_prefix": null,
                "end_of_word_suffix": null,
                "fuse_unk": false,
                "byte_fallback": false,
                "ignore_merges": pre_tokenizer.ignore_merges,
                "vocab": ids,
                "merges": pairs,
            },
        }))
    }

    /// A BPE tokenizer that is equivalent to SentencePiece.
    ///
    /// SentencePiece repeatedly joins the adjacent pieces with the highest score, the leftmost first.
    /// Merges are therefore ordered by score. Runs of spaces have equal scores and are joined from the
    /// left, as by merges with the longer left part first.
    fn sentencepiece_tokenizer(&self, scores: &[f64], space: bool, special_tokens: [Option<u64>; 2], unknown: Option<u64>) -> Result<Json, String> {
        let ids = self.ids()?;
        let is_normal =
            |token: &str| ids.get(token).and_then(Json::as_u64).and_then(|id| self.kinds.get(usize::try_from(id).ok()?)).is_some_and(|kind| *kind == NORMAL);
        let pieces = || self.tokens.iter().zip(&self.kinds).zip(scores).filter(|((_, kind), _)| **kind == NORMAL);
        if let Some(((token, _), _)) = pieces().find(|((token, _), _)| token.len() > MAX_PIECE_BYTES) {
            return Err(format!("a token of {} bytes is too long", token.len()));
        }
        let mut merges = Vec::new();
        for ((token, _), score) in pieces() {
            for (cut, _) in token.char_indices().skip(1) {
                let (left, right) = token.split_at(cut);
                if is_normal(left) && is_normal(right) {
                    merges.push((*score, left, right));
                }
            }
        }
        // This is the case for unigram models, and for BPE vocabularies whose order was lost.
        if let [(first, ..), rest @ ..] = merges.as_slice()
            && !rest.is_empty()
            && rest.iter().all(|(score, ..)| score == first)
        {
            return Err(format!("its scores are all equal ({first}), so that the order of merges is unknown"));
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
            "post_processor": self.processor(special_tokens),
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
