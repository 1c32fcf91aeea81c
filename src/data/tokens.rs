//! Texts as tokens, by the model's own `tokenizer.json`.

mod stream;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use candle_core::{Device, Tensor};
use serde_json::{Map, Value};
use tokenizers::normalizers::{BertNormalizer, NormalizerWrapper};
use tokenizers::{AddedToken, PostProcessor, TruncationParams, TruncationStrategy};

pub(super) use self::stream::TokenStream;
use super::sentences::Sentences;
use super::{Target, shaped};
use crate::error::{Error, Result};
use crate::model::{Made, config_beside, text_beside};

const FILE: &str = "tokenizer.json";
const SETTINGS: &str = "tokenizer_config.json";
/// `model_max_length` above this stands for "no limit".
const NO_LIMIT: u64 = 1 << 24;

/// A text as the model takes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Tokens {
    pub ids: Vec<i64>,
    /// Which text of a pair each token belongs to.
    pub types: Vec<i64>,
}

/// A model's tokenizer.
pub(crate) struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// The same, for texts that are cut by others.
    uncut: OnceLock<tokenizers::Tokenizer>,
    path: PathBuf,
    pad: i64,
    longest: Option<usize>,
    /// Special tokens around a pair of texts.
    around_pairs: usize,
    /// Whether texts are written in lower case first.
    lower_case: bool,
}

impl Tokenizer {
    /// Opens the tokenizer of a model; texts are cut at `max_length` tokens, or where the model ends.
    pub fn open(target: &Target, max_length: Option<usize>) -> Result<Tokenizer> {
        let path = target.folder.join(FILE);
        let Some(text) = text_beside(target.folder, target.made, FILE)? else {
            return Err(Error::Unsupported {
                what: format!("{}: text without {FILE}", target.folder.display()),
                hint: "save the tokenizer with `AutoTokenizer.from_pretrained(...).save_pretrained(folder)` in transformers, which writes this file".into(),
            });
        };
        let mut inner = text.parse::<tokenizers::Tokenizer>().map_err(|e| Error::malformed(&path, e))?;
        let settings = config_beside(target.folder, target.made, SETTINGS)?;
        let pad = pad(&inner, settings.values(), target.config);
        normalize(&mut inner, settings.values());
        add_named(&mut inner, target, settings.values())?;
        let sentences = Sentences::open(target.folder)?;
        let limit = limit(target, settings.values(), sentences.max_length);
        if let (Some(wanted), Some(limit)) = (max_length, limit)
            && wanted > limit
        {
            return Err(Error::option("data", format!("`max_length` is {wanted}, the model takes {limit} tokens")));
        }
        let longest = max_length.or(limit);
        let around = |pairs: bool| inner.get_post_processor().map_or(0, |processor| processor.added_tokens(pairs));
        let around_pairs = around(true);
        require_room(longest, around(false))?;
        // What the file says of both is for its own training, not for this run.
        inner.with_padding(None);
        let truncation = longest.map(|max_length| TruncationParams { max_length, strategy: TruncationStrategy::LongestFirst, ..Default::default() });
        inner.with_truncation(truncation).map_err(|e| Error::option("data", format!("`max_length`: {e}")))?;
        Ok(Tokenizer { inner, uncut: OnceLock::new(), path, pad, longest, around_pairs, lower_case: sentences.lower_case })
    }

    /// Most tokens of a text.
    pub fn longest(&self) -> Option<usize> {
        self.longest
    }

    /// A text, or a pair of texts, with the special tokens around them.
    pub fn encode(&self, text: &str, pair: Option<&str>) -> Result<Tokens> {
        let text = self.cased(text);
        self.tokens(match pair {
            Some(pair) => {
                require_room(self.longest, self.around_pairs)?;
                self.inner.encode_fast((text, self.cased(pair)), true)
            }
            None => self.inner.encode_fast(text, true),
        })
    }

    /// A text in which the special tokens stand that it needs.
    pub fn encode_as_it_is(&self, text: &str) -> Result<Tokens> {
        self.tokens(self.inner.encode_fast(self.cased(text), false))
    }

    fn tokens(&self, encoding: tokenizers::Result<tokenizers::Encoding>) -> Result<Tokens> {
        let encoding = encoding.map_err(|e| Error::malformed(&self.path, e))?;
        let wide = |values: &[u32]| values.iter().map(|v| i64::from(*v)).collect();
        Ok(Tokens { ids: wide(encoding.get_ids()), types: wide(encoding.get_type_ids()) })
    }

    pub(super) fn cased<'t>(&self, text: &'t str) -> Cow<'t, str> {
        if self.lower_case { text.to_lowercase().into() } else { text.into() }
    }

    /// The tokens of a text of any length, nothing around them.
    pub fn plain(&self, text: &str) -> Result<Vec<i64>> {
        self.uncut(text, false)
    }

    /// The tokens of a text of any length, with special tokens around them or without.
    pub fn uncut(&self, text: &str, special: bool) -> Result<Vec<i64>> {
        let encoding = self.without_truncation().encode_fast(self.cased(text), special).map_err(|e| Error::malformed(&self.path, e))?;
        Ok(encoding.get_ids().iter().map(|v| i64::from(*v)).collect())
    }

    /// Tokenizes text to which [`cased`](Tokenizer::cased) was applied, without special tokens; returns each token with its start in bytes.
    pub(super) fn with_offsets(&self, text: &str) -> Result<Vec<(i64, usize)>> {
        let encoding = self.without_truncation().encode(text, false).map_err(|e| Error::malformed(&self.path, e))?;
        Ok(encoding.get_ids().iter().zip(encoding.get_offsets()).map(|(id, (start, _))| (i64::from(*id), *start)).collect())
    }

    fn without_truncation(&self) -> &tokenizers::Tokenizer {
        self.uncut.get_or_init(|| {
            let mut uncut = self.inner.clone();
            // Removing the limit cannot fail.
            let _ = uncut.with_truncation(None);
            uncut
        })
    }

    /// The text of tokens, without special ones.
    pub fn decode(&self, tokens: &[i64]) -> Result<String> {
        let ids: Vec<u32> = tokens.iter().filter_map(|token| u32::try_from(*token).ok()).collect();
        self.inner.decode(&ids, true).map_err(|e| Error::malformed(&self.path, e))
    }

    /// A token as it stands in the vocabulary.
    pub fn token(&self, token: i64) -> Option<String> {
        self.inner.id_to_token(u32::try_from(token).ok()?)
    }

    /// All tokens, with their numbers.
    pub fn vocabulary(&self) -> BTreeMap<String, u32> {
        self.inner.get_vocab(true).into_iter().collect()
    }

    /// The beginning-of-text token, if the tokenizer adds exactly one token before a text; tokens that it appends are ignored.
    pub fn first(&self) -> Result<Option<i64>> {
        let (with, without) = (self.uncut("a", true)?, self.plain("a")?);
        // Text that starts with its first token twice has no prefix.
        Ok(with.split_first().filter(|(_, rest)| rest.starts_with(&without) && !with.starts_with(&without)).map(|(first, _)| *first))
    }

    /// Rows of one length, filled up with padding that the mask hides.
    pub fn collate(&self, rows: &[Tokens]) -> Result<BTreeMap<String, Tensor>> {
        let width = rows.iter().map(|row| row.ids.len()).max().unwrap_or(0);
        if rows.iter().any(|row| row.ids.is_empty()) {
            return Err(Error::malformed(&self.path, "makes no token of a text; empty texts cannot be run"));
        }
        let (mut ids, mut mask, mut types) = (Vec::new(), Vec::new(), Vec::new());
        for row in rows {
            let rest = width.saturating_sub(row.ids.len());
            ids.extend(row.ids.iter().copied().chain(std::iter::repeat_n(self.pad, rest)));
            types.extend(row.types.iter().copied().chain(std::iter::repeat_n(0, rest)));
            mask.extend(std::iter::repeat_n(1i64, row.ids.len()).chain(std::iter::repeat_n(0, rest)));
        }
        let tensor = |values: Vec<i64>| Tensor::from_vec(values, (rows.len(), width), &Device::Cpu).map_err(shaped);
        let named = [("input_ids", tensor(ids)?), ("attention_mask", tensor(mask)?), ("token_type_ids", tensor(types)?)];
        Ok(named.map(|(name, tensor)| (name.to_owned(), tensor)).into())
    }
}

/// The special tokens that `tokenizer_config.json` names, or `special_tokens_map.json` of files from before the former named all.
pub(crate) fn special_tokens(folder: &Path, made: &Made, settings: &Map<String, Value>) -> Result<Map<String, Value>> {
    let older = config_beside(folder, made, "special_tokens_map.json")?;
    let older = Some(older.values()).filter(|_| !settings.contains_key("added_tokens_decoder"));
    let named = settings.iter().chain(older.into_iter().flatten().filter(|(name, _)| !settings.contains_key(*name)));
    Ok(named.filter(|(name, value)| name.ends_with("_token") && token_text(value).is_some()).map(|(name, value)| (name.clone(), value.clone())).collect())
}

/// The text of a token that a file names, as such or with what else is to be known of it.
pub(crate) fn token_text(token: &Value) -> Option<&str> {
    token.as_str().or_else(|| token.get("content")?.as_str())
}

/// Tokens that are named beside `tokenizer.json` and are in its vocabulary are whole wherever they stand in a text, as in transformers.
fn add_named(tokenizer: &mut tokenizers::Tokenizer, target: &Target, settings: &Map<String, Value>) -> Result<()> {
    let named = special_tokens(target.folder, target.made, settings)?;
    let lists = ["additional_special_tokens", "extra_special_tokens"].into_iter().filter_map(|key| settings.get(key)?.as_array()).flatten();
    let decoder = settings.get("added_tokens_decoder").and_then(Value::as_object);
    let known = |text: &str| tokenizer.get_added_vocabulary().get_vocab().contains_key(text) || tokenizer.token_to_id(text).is_none();
    let flag = |token: &Value, key: &str, missing: bool| token.get(key).and_then(Value::as_bool).unwrap_or(missing);
    let added = |(token, special): (&Value, bool)| {
        let text = token_text(token).filter(|text| !text.is_empty() && !known(text))?;
        let special = flag(token, "special", special);
        let made = AddedToken::from(text, special).lstrip(flag(token, "lstrip", false)).rstrip(flag(token, "rstrip", false));
        Some(made.single_word(flag(token, "single_word", false)).normalized(flag(token, "normalized", !special)))
    };
    let all = named.values().chain(lists).map(|token| (token, true)).chain(decoder.into_iter().flat_map(Map::values).map(|token| (token, false)));
    let (special, others): (Vec<AddedToken>, Vec<AddedToken>) = all.filter_map(added).partition(|token| token.special);
    let wrong = |e: tokenizers::Error| Error::malformed(&target.folder.join(SETTINGS), e);
    tokenizer.add_special_tokens(special).map_err(wrong)?;
    tokenizer.add_tokens(others).map(drop).map_err(wrong)
}

/// What `tokenizer_config.json` says of a BERT's words counts more than `tokenizer.json`, but for the class that knows nothing of it.
fn normalize(tokenizer: &mut tokenizers::Tokenizer, settings: &Map<String, Value>) {
    let class = settings.get("tokenizer_class").and_then(Value::as_str).unwrap_or("");
    let Some(NormalizerWrapper::BertNormalizer(stored)) = tokenizer.get_normalizer() else { return };
    if ["PreTrainedTokenizerFast", "TokenizersBackend"].contains(&class) {
        return;
    }
    let said = |key: &str, stored: bool| settings.get(key).and_then(Value::as_bool).unwrap_or(stored);
    let lower_case = said("do_lower_case", stored.lowercase);
    let chinese = said("tokenize_chinese_chars", stored.handle_chinese_chars);
    let accents = settings.get("strip_accents").map_or(stored.strip_accents, Value::as_bool);
    let normalizer = BertNormalizer::new(stored.clean_text, chinese, accents, lower_case);
    // Only a normalizer that changes special tokens could be refused.
    let _ = tokenizer.with_normalizer(Some(normalizer));
}

/// Whether a limit on tokens has room for the special ones.
fn require_room(longest: Option<usize>, around: usize) -> Result<()> {
    match longest {
        Some(longest) if longest < around => Err(Error::option("data", format!("texts are cut at {longest} tokens, the special ones alone are {around}"))),
        _ => Ok(()),
    }
}

/// The token that fills rows up: what the tokenizer says, then the configuration, then 0.
fn pad(tokenizer: &tokenizers::Tokenizer, settings: &Map<String, Value>, config: &Map<String, Value>) -> i64 {
    let named = settings.get("pad_token").and_then(token_text);
    tokenizer
        .get_padding()
        .map(|padding| i64::from(padding.pad_id))
        .or_else(|| named.and_then(|token| tokenizer.token_to_id(token)).map(i64::from))
        .or_else(|| config.get("pad_token_id").and_then(Value::as_i64))
        .unwrap_or(0)
}

/// Most tokens that a model takes.
fn limit(target: &Target, settings: &Map<String, Value>, sentences: Option<usize>) -> Option<usize> {
    let number = |values: &Map<String, Value>, key: &str| values.get(key).and_then(Value::as_u64).filter(|n| (1..NO_LIMIT).contains(n)).map(|n| n as usize);
    let kind = target.config.get("model_type").and_then(Value::as_str).unwrap_or("");
    // Of two towers, the one for texts; these leave out what is usual.
    let text = target.config.get("text_config").and_then(Value::as_object).unwrap_or(target.config);
    let usual = match kind {
        "clip" | "clip_text_model" => Some(77),
        "siglip" | "siglip_text_model" => Some(64),
        _ => None,
    };
    // T5 has relative positions: the number is that of its training, and no end.
    let absolute = || number(text, "n_positions").filter(|_| !["t5", "mt5"].contains(&kind));
    let positions = number(text, "max_position_embeddings").or_else(absolute).or(usual);
    // These count positions from the one after the padding token's id.
    let offset = match kind {
        "roberta" | "xlm-roberta" | "camembert" => number(target.config, "pad_token_id").unwrap_or(1).saturating_add(1),
        "mpnet" => 2,
        _ => 0,
    };
    let limits = [number(settings, "model_max_length"), positions.map(|p| p.saturating_sub(offset)), sentences];
    limits.into_iter().flatten().min()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A byte-level BPE tokenizer like GPT-2's, with a few merges and a template for special tokens.
    pub fn byte_level(folder: &Path, template: &str, prefix: bool) -> Tokenizer {
        // GPT-2 maps each byte to a printable character.
        let printable = |byte: u32| matches!(byte, 33..=126 | 161..=172 | 174..=255);
        let mut others = 256u32..;
        let letters = (0..256u32).filter_map(|byte| if printable(byte) { char::from_u32(byte) } else { char::from_u32(others.next()?) });
        let mut vocabulary: Map<String, Value> = letters.enumerate().map(|(id, letter)| (letter.to_string(), id.into())).collect();
        let merges = ["a b", "ab a", "\u{120} a", "\u{10a} \u{10a}", "\u{120} \u{120}", "e r", "er n"];
        for (id, token) in (256..).zip(merges.iter().map(|merge| merge.replace(' ', "")).chain(["<s>".into(), "</s>".into()])) {
            vocabulary.insert(token, id.into());
        }
        let part = |part: &str| {
            if part == "A" {
                serde_json::json!({ "Sequence": { "id": "A", "type_id": 0 } })
            } else {
                serde_json::json!({ "SpecialToken": { "id": part, "type_id": 0 } })
            }
        };
        let id = |token: &str| serde_json::json!({ "id": token, "ids": [vocabulary[token]], "tokens": [token] });
        let whole = serde_json::json!({
            "version": "1.0",
            "pre_tokenizer": { "type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": true, "use_regex": true },
            "post_processor": {
                "type": "TemplateProcessing", "single": template.split(' ').map(part).collect::<Vec<_>>(), "pair": [part("A")],
                "special_tokens": { "<s>": id("<s>"), "</s>": id("</s>") },
            },
            "model": { "type": "BPE", "vocab": vocabulary, "merges": merges },
        });
        std::fs::write(folder.join(FILE), whole.to_string()).unwrap();
        let (made, config) = (Made::new(), Map::new());
        Tokenizer::open(&Target { folder, made: &made, config: &config, inputs: &[], outputs: &[] }, None).unwrap()
    }

    #[test]
    fn the_first_token_is_known_also_where_one_is_appended() {
        let folder = tempfile::tempdir().unwrap();
        for (template, first) in [("A", None), ("<s> A", Some(263)), ("<s> A </s>", Some(263)), ("A </s>", None), ("<s> <s> A", None)] {
            assert_eq!(byte_level(folder.path(), template, false).first().unwrap(), first, "{template}");
        }
    }
}
