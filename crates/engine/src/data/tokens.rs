//! Tokenization with the model's `tokenizer.json`.

mod added;
mod class;
mod settings;
mod stream;
mod tiktoken;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::OnceLock;

use candle_core::{Device, Tensor};
use serde_json::{Map, Value};
use tokenizers::normalizers::{BertNormalizer, NormalizerWrapper};
use tokenizers::{PostProcessor, TruncationParams, TruncationStrategy};

pub use self::added::{special_tokens, token_text};
pub(super) use self::stream::TokenStream;
use super::sentences::Sentences;
use super::{Target, shaped};
use crate::arch::{self, PositionOffset, Positions};
use crate::error::{Error, Result};
use crate::model::{auxiliary_path, open_auxiliary_config, read_auxiliary_text};

const FILE: &str = "tokenizer.json";
const SETTINGS: &str = "tokenizer_config.json";
/// Larger values of `model_max_length` mean "no limit".
const NO_LIMIT: u64 = 1 << 24;

/// A tokenized text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tokens {
    pub ids: Vec<i64>,
    /// Token type ids: which text of a pair each token belongs to.
    pub types: Vec<i64>,
}

/// A model's tokenizer.
pub struct Tokenizer {
    /// The tokenizer without truncation.
    inner: tokenizers::Tokenizer,
    truncation: Option<TruncationParams>,
    /// The same with truncation, copied when a text is truncated first: vocabularies take much memory.
    truncated: OnceLock<tokenizers::Tokenizer>,
    path: PathBuf,
    pad: i64,
    /// The end-of-text token, if the model has one.
    end: Option<i64>,
    max_length: Option<usize>,
    /// Number of special tokens of a pair of texts.
    pair_special_tokens: usize,
    /// Whether texts are lowercased first.
    lower_case: bool,
    /// Whether the token type ids of the tokenizer are used; otherwise they are zero.
    has_token_types: bool,
}

/// Why the tokenizers package does not read the text of a `tokenizer.json`.
pub fn unreadable_tokenizer(text: &str) -> Option<String> {
    text.parse::<tokenizers::Tokenizer>().err().map(|reason| reason.to_string())
}

impl Tokenizer {
    /// Opens the tokenizer of a model; texts are truncated to `max_length` tokens, or to the model's
    /// maximum.
    pub fn open(target: &Target, max_length: Option<usize>) -> Result<Tokenizer> {
        let path = auxiliary_path(target.folder, FILE);
        let stored = read_auxiliary_text(target.folder, target.synthesized, FILE)?;
        let Some(text) = stored.map_or_else(|| tiktoken::tokenizer_json(target), |text| Ok(Some(text)))? else {
            return Err(Error::Unsupported {
                what: format!("{}: text data for a model without {FILE}", target.folder.display()),
                hint: "save the tokenizer with `AutoTokenizer.from_pretrained(...).save_pretrained(folder)` in transformers, which writes this file".into(),
            });
        };
        let mut inner = text.parse::<tokenizers::Tokenizer>().map_err(|e| Error::malformed(&path, e))?;
        let settings = open_auxiliary_config(target.folder, target.synthesized, SETTINGS)?;
        let settings_path = auxiliary_path(target.folder, SETTINGS);
        let stored_direction = inner.get_truncation().map(|truncation| truncation.direction);
        let direction = settings::truncation_direction(settings.values(), stored_direction, &settings_path)?;
        let has_token_types = settings::has_token_types(settings.values(), target.config, &settings_path)?;
        let pad = pad(&inner, settings.values(), target.config);
        override_normalizer(&mut inner, settings.values());
        settings::configure_splitting(&mut inner, settings.values(), target.config);
        added::add_tokens(&mut inner, target, settings.values())?;
        let end = end(&inner, settings.values(), target.config);
        let sentences = Sentences::open(target.folder)?;
        let limit = limit(target, settings.values(), sentences.max_length);
        if let (Some(requested), Some(limit)) = (max_length, limit)
            && requested > limit
        {
            return Err(Error::option("data", format!("`max_length` is {requested}, but the model accepts at most {limit} tokens")));
        }
        let max_length = max_length.or(limit);
        let special_tokens = |pairs: bool| inner.get_post_processor().map_or(0, |processor| processor.added_tokens(pairs));
        let pair_special_tokens = special_tokens(true);
        require_room(max_length, special_tokens(false))?;
        // The padding and the maximum length stored in the file are settings of the tokenizer's training.
        // `padding_side` has no effect: padding is masked, and positions are those without padding.
        inner.with_padding(None);
        let truncation =
            max_length.map(|max_length| TruncationParams { max_length, strategy: TruncationStrategy::LongestFirst, direction, ..Default::default() });
        inner.with_truncation(truncation.clone()).map_err(|e| Error::option("data", format!("`max_length`: {e}")))?;
        inner.with_truncation(None).map_err(|e| Error::malformed(&path, e))?;
        let lower_case = sentences.lower_case;
        Ok(Tokenizer { inner, truncation, truncated: OnceLock::new(), path, pad, end, max_length, pair_special_tokens, lower_case, has_token_types })
    }

    /// Maximum number of tokens of a text.
    pub fn max_length(&self) -> Option<usize> {
        self.max_length
    }

    /// Tokenizes a text or a pair of texts, with special tokens.
    pub fn encode(&self, text: &str, pair: Option<&str>) -> Result<Tokens> {
        let text = self.apply_case(text);
        self.tokens(match pair {
            Some(pair) => {
                require_room(self.max_length, self.pair_special_tokens)?;
                self.with_truncation().encode_fast((text, self.apply_case(pair)), true)
            }
            None => self.with_truncation().encode_fast(text, true),
        })
    }

    /// Tokenizes a text that already contains its special tokens, such as a rendered chat.
    pub fn encode_rendered(&self, text: &str) -> Result<Tokens> {
        self.tokens(self.with_truncation().encode_fast(self.apply_case(text), false))
    }

    fn tokens(&self, encoding: tokenizers::Result<tokenizers::Encoding>) -> Result<Tokens> {
        let encoding = encoding.map_err(|e| Error::malformed(&self.path, e))?;
        let wide = |values: &[u32]| values.iter().map(|v| i64::from(*v)).collect::<Vec<i64>>();
        let ids = wide(encoding.get_ids());
        let types = if self.has_token_types { wide(encoding.get_type_ids()) } else { vec![0; ids.len()] };
        Ok(Tokens { ids, types })
    }

    /// Lowercases the text if the model requires it.
    pub(super) fn apply_case<'t>(&self, text: &'t str) -> Cow<'t, str> {
        if self.lower_case { text.to_lowercase().into() } else { text.into() }
    }

    /// Tokenizes a text of any length, without special tokens.
    pub fn plain(&self, text: &str) -> Result<Vec<i64>> {
        self.untruncated(text, false)
    }

    /// Tokenizes a text of any length, optionally with special tokens.
    pub fn untruncated(&self, text: &str, special: bool) -> Result<Vec<i64>> {
        let encoding = self.inner.encode_fast(self.apply_case(text), special).map_err(|e| Error::malformed(&self.path, e))?;
        Ok(encoding.get_ids().iter().map(|v| i64::from(*v)).collect())
    }

    /// Tokenizes text to which [`apply_case`](Tokenizer::apply_case) was applied, without special
    /// tokens; returns each token with its start in bytes.
    pub(super) fn with_offsets(&self, text: &str) -> Result<Vec<(i64, usize)>> {
        let encoding = self.inner.encode(text, false).map_err(|e| Error::malformed(&self.path, e))?;
        Ok(encoding.get_ids().iter().zip(encoding.get_offsets()).map(|(id, (start, _))| (i64::from(*id), *start)).collect())
    }

    /// Tokenizes a text of any length that already contains its special tokens; returns each token, and
    /// whether its text overlaps one of the `targets`, ranges of bytes.
    pub(super) fn with_targets(&self, text: &str, targets: &[Range<usize>]) -> Result<Vec<(i64, bool)>> {
        let in_case = |at: usize| text.get(..at).map_or(at, |before| self.apply_case(before).len());
        let targets: Vec<Range<usize>> = targets.iter().map(|target| in_case(target.start)..in_case(target.end)).collect();
        let encoding = self.inner.encode(self.apply_case(text), false).map_err(|e| Error::malformed(&self.path, e))?;
        let overlaps = |(start, end): (usize, usize)| targets.iter().any(|target| start < target.end && target.start < end);
        Ok(encoding.get_ids().iter().zip(encoding.get_offsets()).map(|(id, offsets)| (i64::from(*id), overlaps(*offsets))).collect())
    }

    fn with_truncation(&self) -> &tokenizers::Tokenizer {
        let Some(truncation) = &self.truncation else { return &self.inner };
        self.truncated.get_or_init(|| {
            let mut truncated = self.inner.clone();
            // The parameters were accepted when the tokenizer was opened.
            let _ = truncated.with_truncation(Some(truncation.clone()));
            truncated
        })
    }

    /// Decodes tokens to text, without special tokens.
    pub fn decode(&self, tokens: &[i64]) -> Result<String> {
        let ids: Vec<u32> = tokens.iter().filter_map(|token| u32::try_from(*token).ok()).collect();
        self.inner.decode(&ids, true).map_err(|e| Error::malformed(&self.path, e))
    }

    /// The vocabulary entry of a token.
    pub fn token(&self, token: i64) -> Option<String> {
        self.inner.id_to_token(u32::try_from(token).ok()?)
    }

    /// All tokens with their ids.
    pub fn vocabulary(&self) -> BTreeMap<String, u32> {
        self.inner.get_vocab(true).into_iter().collect()
    }

    /// The beginning-of-text token, if the tokenizer adds exactly one token before a text; tokens that
    /// it appends are ignored.
    pub fn first(&self) -> Result<Option<i64>> {
        let (with, without) = (self.untruncated("a", true)?, self.plain("a")?);
        // Text that starts with its first token twice has no prefix.
        Ok(with.split_first().filter(|(_, rest)| rest.starts_with(&without) && !with.starts_with(&without)).map(|(first, _)| *first))
    }

    /// The end-of-text token: `eos_token` of the tokenizer, or else `eos_token_id` of the configuration.
    pub(super) fn end(&self) -> Option<i64> {
        self.end
    }

    /// Pads rows to one length. Returns `input_ids`, `attention_mask` and `token_type_ids`.
    pub fn collate(&self, rows: &[Tokens]) -> Result<BTreeMap<String, Tensor>> {
        let width = rows.iter().map(|row| row.ids.len()).max().unwrap_or(0);
        if rows.iter().any(|row| row.ids.is_empty()) {
            return Err(Error::malformed(&self.path, "produces no tokens for a text; empty texts are not supported"));
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

/// Overrides the BERT normalizer with the settings of `tokenizer_config.json`, except for tokenizer
/// classes that ignore them.
fn override_normalizer(tokenizer: &mut tokenizers::Tokenizer, settings: &Map<String, Value>) {
    let class = settings.get("tokenizer_class").and_then(Value::as_str).unwrap_or("");
    let Some(NormalizerWrapper::BertNormalizer(stored)) = tokenizer.get_normalizer() else { return };
    if ["PreTrainedTokenizerFast", "TokenizersBackend"].contains(&class) {
        return;
    }
    let setting = |key: &str, stored: bool| settings.get(key).and_then(Value::as_bool).unwrap_or(stored);
    let lower_case = setting("do_lower_case", stored.lowercase);
    let chinese = setting("tokenize_chinese_chars", stored.handle_chinese_chars);
    let accents = settings.get("strip_accents").map_or(stored.strip_accents, Value::as_bool);
    let normalizer = BertNormalizer::new(stored.clean_text, chinese, accents, lower_case);
    // Fails only for normalizers that change special tokens.
    let _ = tokenizer.with_normalizer(Some(normalizer));
}

/// Checks that the maximum length has room for the special tokens.
fn require_room(max_length: Option<usize>, special_tokens: usize) -> Result<()> {
    match max_length {
        Some(limit) if limit < special_tokens => {
            Err(Error::option("data", format!("texts are truncated to {limit} tokens, fewer than the {special_tokens} special tokens")))
        }
        _ => Ok(()),
    }
}

/// The padding token: from the tokenizer, otherwise from the configuration, otherwise 0.
fn pad(tokenizer: &tokenizers::Tokenizer, settings: &Map<String, Value>, config: &Map<String, Value>) -> i64 {
    let named = settings.get("pad_token").and_then(token_text);
    tokenizer
        .get_padding()
        .map(|padding| i64::from(padding.pad_id))
        .or_else(|| named.and_then(|token| tokenizer.token_to_id(token)).map(i64::from))
        .or_else(|| arch::token(config, "pad_token_id").and_then(Value::as_i64))
        .unwrap_or(0)
}

/// The end-of-text token: from the tokenizer, otherwise the first one of the configuration.
fn end(tokenizer: &tokenizers::Tokenizer, settings: &Map<String, Value>, config: &Map<String, Value>) -> Option<i64> {
    let named = settings.get("eos_token").and_then(token_text).and_then(|token| tokenizer.token_to_id(token)).map(i64::from);
    let stored = arch::token(config, "eos_token_id").and_then(|ids| ids.as_array().map_or(Some(ids), |ids| ids.first())).and_then(Value::as_i64);
    named.or(stored)
}

/// Maximum number of tokens that a model accepts.
fn limit(target: &Target, settings: &Map<String, Value>, sentences: Option<usize>) -> Option<usize> {
    let number = |values: &Map<String, Value>, key: &str| values.get(key).and_then(Value::as_u64).filter(|n| (1..NO_LIMIT).contains(n)).map(|n| n as usize);
    let kind = target.config.get("model_type").and_then(Value::as_str).unwrap_or("");
    // The text configuration of CLIP-like models omits default values.
    let text = arch::text_values(target.config);
    let Positions { keys, default, offset } = arch::family(kind).map_or(Positions::DEFAULT, |family| family.positions);
    let positions = keys.iter().find_map(|key| number(text, key)).or(default);
    let offset = match offset {
        PositionOffset::Fixed(offset) => offset,
        PositionOffset::AfterPadding => number(target.config, "pad_token_id").unwrap_or(1).saturating_add(1),
    };
    let limits = [number(settings, "model_max_length"), positions.map(|p| p.saturating_sub(offset)), sentences];
    limits.into_iter().flatten().min()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::model::SynthesizedFiles;

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
        let (synthesized, config) = (SynthesizedFiles::new(), Map::new());
        Tokenizer::open(&Target::new(folder, &synthesized, &config), None).unwrap()
    }

    /// The values of `AutoTokenizer` of transformers 5.
    #[test]
    fn prefix_spaces_and_special_tokens_follow_the_settings() {
        let folder = tempfile::tempdir().unwrap();
        let ids = |settings: &Value, prefix: bool, text: &str| {
            std::fs::write(folder.path().join(SETTINGS), settings.to_string()).unwrap();
            byte_level(folder.path(), "A", prefix).plain(text).unwrap()
        };
        let (plain, prefixed) = (97i64, 258i64);
        for (class, key, stored, expected) in [
            ("GPT2Tokenizer", Some(true), false, prefixed),
            ("RobertaTokenizerFast", Some(false), true, plain),
            ("GPTNeoXTokenizer", None, true, plain),
            ("PreTrainedTokenizerFast", Some(true), false, plain),
            ("PreTrainedTokenizerFast", Some(false), true, prefixed),
        ] {
            let mut settings = serde_json::json!({ "tokenizer_class": class });
            if let Some(key) = key {
                settings["add_prefix_space"] = key.into();
            }
            assert_eq!(ids(&settings, stored, "a"), [expected], "{settings}");
        }
        let special = |split: bool| ids(&serde_json::json!({ "bos_token": "<s>", "split_special_tokens": split }), false, "<s>");
        assert_eq!(special(false), [263i64]);
        assert_eq!(special(true), [60i64, 115, 62]);
    }

    #[test]
    fn the_first_token_is_found_with_and_without_an_appended_token() {
        let folder = tempfile::tempdir().unwrap();
        for (template, first) in [("A", None), ("<s> A", Some(263)), ("<s> A </s>", Some(263)), ("A </s>", None), ("<s> <s> A", None)] {
            assert_eq!(byte_level(folder.path(), template, false).first().unwrap(), first, "{template}");
        }
    }

    /// The files that tokenizers 0.23 and transformers 5.23 refuse.
    #[test]
    fn tokenizers_without_a_valid_vocabulary_are_not_read() {
        use serde_json::json;
        let read = |whole: Value| unreadable_tokenizer(&whole.to_string()).is_none();
        let with = |model: Value| json!({ "added_tokens": [], "model": model });
        assert!(read(with(json!({ "type": "BPE", "vocab": {}, "merges": [] }))));
        assert!(read(with(json!({ "type": "Unigram", "vocab": [["a", 0.0]], "unk_id": 0 }))));
        for model in [
            json!(null),
            json!({ "type": "BPE", "merges": [] }),
            json!({ "type": "BPE", "vocab": ["a"], "merges": [] }),
            json!({ "type": "BPE", "vocab": { "a": "1" }, "merges": [] }),
            json!({ "type": "BPE", "vocab": { "a": 0 }, "merges": ["a c"] }),
            json!({ "type": "WordLevel", "vocab": { "a": 0 } }),
            json!({ "type": "Unigram", "vocab": { "a": 0 } }),
            json!({ "type": "Unigram", "vocab": [["a", 0.0]], "unk_id": 5 }),
            json!({ "type": "None", "vocab": {} }),
        ] {
            assert!(!read(with(model.clone())), "{model}");
        }
        let model = json!({ "type": "BPE", "vocab": {}, "merges": [] });
        for added in [json!([{ "content": "<s>" }]), json!([{ "id": 0, "content": "<s>" }]), json!(null)] {
            assert!(!read(json!({ "added_tokens": added, "model": model })), "{added}");
        }
        assert!(!read(json!({})) && !read(json!({ "added_tokens": [], "model": model, "pre_tokenizer": { "type": "None" } })));
    }
}
