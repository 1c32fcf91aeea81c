//! `tokenizer.json`: its tokens, the tokens that a token is merged from, and the file with fewer tokens.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::retained::{Retained, number};
use crate::error::{Error, Result};
use crate::model::{Model, auxiliary_path, read_auxiliary_text};

pub(super) const FILE: &str = "tokenizer.json";

/// Number of byte tokens, such as `<0x0A>`, with which a tokenizer represents every text.
const BYTES: usize = 256;

/// The contents of `tokenizer.json`.
pub(super) struct TokenizerFile {
    path: PathBuf,
    json: Value,
    model: TokenizerModel,
    /// Tokens of the model by id, without added tokens.
    tokens: BTreeMap<usize, String>,
    ids: HashMap<String, usize>,
}

/// The algorithm that splits words into tokens.
enum TokenizerModel {
    Bpe(Merges),
    /// The scores of the tokens.
    Unigram(Vec<f64>),
    WordPiece,
    WordLevel,
}

/// Merges of byte-pair encoding.
#[derive(Default)]
struct Merges {
    /// Rank and result by the two ids that are merged.
    ranks: HashMap<[usize; 2], (usize, usize)>,
    byte_fallback: bool,
}

impl TokenizerFile {
    /// Reads the tokenizer of a model. Fails if it has none, or if its vocabulary is not supported.
    pub fn open(model: &Model) -> Result<TokenizerFile> {
        let path = auxiliary_path(&model.path, FILE);
        let text = read_auxiliary_text(&model.path, &model.auxiliary.synthesized, FILE)?.ok_or_else(|| Error::Unsupported {
            what: format!("{}: removing tokens without a {FILE}", model.path.display()),
            hint: "save the tokenizer with `AutoTokenizer.from_pretrained(...).save_pretrained(folder)` in transformers, which writes this file".into(),
        })?;
        TokenizerFile::parse(&path, &text)
    }

    pub(super) fn parse(path: &Path, text: &str) -> Result<TokenizerFile> {
        let wrong = |reason: String| Error::malformed(path, reason);
        let json: Value = serde_json::from_str(text).map_err(|e| wrong(e.to_string()))?;
        let at = |pointer: &str| json.pointer(pointer).unwrap_or(&Value::Null);
        let tokens: BTreeMap<usize, String> = match at("/model/vocab") {
            Value::Object(tokens) => tokens.iter().filter_map(|(token, id)| Some((number(id)?, token.clone()))).collect(),
            Value::Array(tokens) => tokens.iter().enumerate().filter_map(|(id, token)| Some((id, token.get(0)?.as_str()?.to_owned()))).collect(),
            _ => BTreeMap::new(),
        };
        let count = match at("/model/vocab") {
            Value::Object(tokens) => tokens.len(),
            Value::Array(tokens) => tokens.len(),
            _ => return Err(wrong("has no vocabulary under `model.vocab`".into())),
        };
        if tokens.len() != count {
            return Err(wrong("`model.vocab` has entries without an id, or two with the same id".into()));
        }
        let ids: HashMap<String, usize> = tokens.iter().map(|(id, token)| (token.clone(), *id)).collect();
        let model = match (at("/model/type").as_str(), at("/model/vocab")) {
            (Some("BPE"), Value::Object(_)) => TokenizerModel::Bpe(Merges::parse(&json, &ids).map_err(wrong)?),
            (Some("Unigram"), Value::Array(entries)) => {
                let scores: Option<Vec<f64>> = entries.iter().map(|entry| entry.get(1)?.as_f64()).collect();
                TokenizerModel::Unigram(scores.ok_or_else(|| wrong("`model.vocab` has a token without a score".into()))?)
            }
            (Some("WordPiece"), Value::Object(_)) => TokenizerModel::WordPiece,
            (Some("WordLevel"), Value::Object(_)) => TokenizerModel::WordLevel,
            (kind, _) => {
                return Err(Error::Unsupported {
                    what: format!("{}: removing tokens from a tokenizer of the type {}", path.display(), kind.unwrap_or("null")),
                    hint: "supported types of `model`: BPE, Unigram, WordPiece and WordLevel; save the tokenizer with a newer version of transformers".into(),
                });
            }
        };
        let file = TokenizerFile { path: path.to_owned(), json, model, tokens, ids };
        for (id, token) in file.added() {
            if let Some(other) = file.tokens.get(&id).filter(|other| *other != token) {
                return Err(Error::malformed(path, format!("the added token `{token}` has the id of `{other}`")));
            }
        }
        Ok(file)
    }

    pub(super) fn at(&self, pointer: &str) -> &Value {
        self.json.pointer(pointer).unwrap_or(&Value::Null)
    }

    /// Ids and texts of the added tokens.
    fn added(&self) -> impl Iterator<Item = (usize, &str)> {
        let tokens = self.at("/added_tokens").as_array().into_iter().flatten();
        tokens.filter_map(|token| Some((number(token.get("id")?)?, token.get("content")?.as_str()?)))
    }

    /// Ids of all tokens, including added ones.
    pub fn all(&self) -> BTreeSet<usize> {
        self.tokens.keys().copied().chain(self.added().map(|(id, _)| id)).collect()
    }

    /// The token of this id.
    pub fn token(&self, id: usize) -> Option<&str> {
        self.tokens.get(&id).map(String::as_str).or_else(|| self.added().find(|(added, _)| *added == id).map(|(_, token)| token))
    }

    /// The id of a token.
    pub fn id(&self, token: &str) -> Option<usize> {
        self.ids.get(token).copied().or_else(|| self.added().find(|(_, text)| *text == token).map(|(id, _)| id))
    }

    /// Tokens that every text may need, and that other parts of the file refer to: added tokens, the
    /// post-processor's tokens, the unknown token, and all bytes or characters.
    pub fn required(&self) -> BTreeSet<usize> {
        let mut required = BTreeSet::new();
        for_each_id(&mut self.json.clone(), &mut |id| {
            required.extend(number(id));
            Ok(())
        })
        .unwrap_or_default();
        required.extend(self.at("/model/unk_token").as_str().and_then(|token| self.id(token)));
        let bytes: Vec<usize> = self.byte_tokens().collect();
        let is_complete = bytes.len() == BYTES && self.at("/model/byte_fallback") == true;
        required.extend(bytes);
        if !is_complete && !matches!(self.model, TokenizerModel::WordLevel) {
            required.extend(self.tokens.iter().filter(|(_, token)| self.is_character(token)).map(|(id, _)| *id));
        }
        // The penalty of unknown characters depends on the lowest score.
        if let TokenizerModel::Unigram(scores) = &self.model {
            required.extend(scores.iter().enumerate().min_by(|a, b| a.1.total_cmp(b.1)).map(|(id, _)| id));
        }
        required
    }

    /// Ids of the tokens for single bytes, such as `<0x0A>`.
    fn byte_tokens(&self) -> impl Iterator<Item = usize> {
        (0..BYTES).filter_map(|byte| self.ids.get(&format!("<0x{byte:02X}>")).copied())
    }

    /// Prefix of tokens that continue a word, and suffix of tokens that end one.
    pub(super) fn affixes(&self) -> [&str; 2] {
        ["/model/continuing_subword_prefix", "/model/end_of_word_suffix"].map(|pointer| self.at(pointer).as_str().unwrap_or(""))
    }

    /// Whether a token is one character, possibly with a prefix or suffix.
    fn is_character(&self, token: &str) -> bool {
        let [prefix, suffix] = self.affixes();
        let is_one = |text: &str| text.chars().take(2).count() == 1;
        let without_prefix = token.strip_prefix(prefix).unwrap_or(token);
        is_one(token) || is_one(without_prefix) || is_one(without_prefix.strip_suffix(suffix).unwrap_or(without_prefix))
    }

    /// Tokens from which a token is merged, including intermediate ones. Empty for tokens that no merges
    /// produce.
    pub fn parts(&self, id: usize) -> Vec<usize> {
        match (&self.model, self.tokens.get(&id)) {
            (TokenizerModel::Bpe(merges), Some(token)) => merges.parts(id, self.symbols(token, merges)),
            _ => Vec::new(),
        }
    }

    /// The characters of a token as tokens, before merging. Empty if a character has none.
    fn symbols(&self, token: &str, merges: &Merges) -> Vec<usize> {
        let [prefix, suffix] = self.affixes();
        let ends = !suffix.is_empty() && token.len() > suffix.len() && token.ends_with(suffix);
        let body = if ends { token.strip_suffix(suffix).unwrap_or(token) } else { token };
        let continues = !prefix.is_empty() && body.len() > prefix.len() && body.starts_with(prefix);
        let body = if continues { body.strip_prefix(prefix).unwrap_or(body) } else { body };
        let last = body.chars().count().saturating_sub(1);
        let mut symbols = Vec::new();
        for (position, character) in body.chars().enumerate() {
            let before = if position > 0 || continues { prefix } else { "" };
            let after = if position == last && ends { suffix } else { "" };
            match self.ids.get(&format!("{before}{character}{after}")) {
                Some(id) => symbols.push(*id),
                None if merges.byte_fallback => {
                    let bytes: Option<Vec<usize>> = character.to_string().bytes().map(|byte| self.ids.get(&format!("<0x{byte:02X}>")).copied()).collect();
                    symbols.extend(bytes.unwrap_or_default());
                }
                None => return Vec::new(),
            }
        }
        symbols
    }

    /// Ids in the order in which a smaller vocabulary retains tokens, without added ones: by the rank of
    /// the first merge, by descending score, or by id.
    pub fn order(&self) -> Vec<usize> {
        let mut ids: Vec<usize> = self.tokens.keys().copied().collect();
        match &self.model {
            TokenizerModel::Bpe(merges) => {
                let mut first: HashMap<usize, usize> = HashMap::new();
                for (rank, result) in merges.ranks.values() {
                    first.entry(*result).and_modify(|other| *other = (*other).min(*rank)).or_insert(*rank);
                }
                ids.sort_by_key(|id| first.get(id).copied().unwrap_or(usize::MAX));
            }
            TokenizerModel::Unigram(scores) => {
                let score = |id: &usize| scores.get(*id).copied().unwrap_or(f64::MIN);
                ids.sort_by(|a, b| score(b).total_cmp(&score(a)));
            }
            TokenizerModel::WordPiece | TokenizerModel::WordLevel => {}
        }
        ids
    }

    /// The file with only the retained tokens and the merges between them.
    pub fn reduced(&self, retained: &Retained) -> Result<Value> {
        let mut json = self.json.clone();
        let wrong = |reason: String| Error::malformed(&self.path, reason);
        for_each_id(&mut json, &mut |id| retained.renumber(id)).map_err(wrong)?;
        match json.pointer_mut("/model/vocab") {
            Some(Value::Object(tokens)) => {
                tokens.retain(|_, id| number(id).is_some_and(|id| retained.contains(id)));
                tokens.values_mut().try_for_each(|id| retained.renumber(id)).map_err(wrong)?;
            }
            Some(Value::Array(tokens)) => {
                let mut ids = 0usize..;
                tokens.retain(|_| ids.next().is_some_and(|id| retained.contains(id)));
            }
            _ => {}
        }
        if let Some(Value::Array(merges)) = json.pointer_mut("/model/merges") {
            merges.retain(|merge| pair(merge).is_some_and(|pair| self.keeps_merge(pair, retained)));
        }
        Ok(json)
    }

    /// Whether a merge and both of its operands are retained.
    pub fn keeps_merge(&self, pair: [&str; 2], retained: &Retained) -> bool {
        let TokenizerModel::Bpe(merges) = &self.model else { return false };
        let ids = pair.map(|token| self.ids.get(token).copied());
        let [Some(left), Some(right)] = ids else { return false };
        merges.ranks.get(&[left, right]).is_some_and(|(_, result)| [left, right, *result].into_iter().all(|id| retained.contains(id)))
    }

    /// The type of the tokenizer, for reports.
    pub fn kind(&self) -> &'static str {
        match self.model {
            TokenizerModel::Bpe(_) => "BPE",
            TokenizerModel::Unigram(_) => "Unigram",
            TokenizerModel::WordPiece => "WordPiece",
            TokenizerModel::WordLevel => "WordLevel",
        }
    }

    /// Ids of the tokens without added ones, the most frequent first; otherwise in the
    /// [`order`](TokenizerFile::order).
    pub fn by_frequency(&self, count: impl Fn(usize) -> u64) -> Vec<usize> {
        let mut ids = self.order();
        ids.sort_by_key(|id| Reverse(count(*id)));
        ids
    }
}

impl Merges {
    /// Parses the merges of a file; `ids` are those of its tokens.
    fn parse(json: &Value, ids: &HashMap<String, usize>) -> Result<Merges, String> {
        let prefix = json.pointer("/model/continuing_subword_prefix").and_then(Value::as_str).unwrap_or("");
        let mut ranks = HashMap::new();
        for (rank, merge) in json.pointer("/model/merges").and_then(Value::as_array).into_iter().flatten().enumerate() {
            let [left, right] = pair(merge).ok_or_else(|| format!("the merge {merge} is not a pair"))?;
            let result = format!("{left}{}", right.strip_prefix(prefix).unwrap_or(right));
            let id = |token: &str| ids.get(token).copied().ok_or_else(|| format!("`{token}` of the merge {merge} is not in the vocabulary"));
            ranks.insert([id(left)?, id(right)?], (rank, id(&result)?));
        }
        Ok(Merges { ranks, byte_fallback: json.pointer("/model/byte_fallback").is_some_and(|fallback| *fallback == true) })
    }

    /// All tokens that merging yields on the way from these symbols to a token, including both. Empty if
    /// they do not yield it.
    fn parts(&self, id: usize, mut symbols: Vec<usize>) -> Vec<usize> {
        let mut found = symbols.clone();
        loop {
            let ranked = symbols.windows(2).enumerate().filter_map(|(position, pair)| {
                let [left, right] = pair else { return None };
                self.ranks.get(&[*left, *right]).map(|(rank, result)| (*rank, position, *result))
            });
            let Some((_, position, result)) = ranked.min() else { break };
            symbols.remove(position);
            if let Some(merged) = symbols.get_mut(position) {
                *merged = result;
            }
            found.push(result);
        }
        if symbols == [id] { found } else { Vec::new() }
    }
}

/// The two operands of a merge, which is stored as a text with a space or as a list.
pub(super) fn pair(merge: &Value) -> Option<[&str; 2]> {
    match merge {
        Value::String(text) => text.split_once(' ').map(|(left, right)| [left, right]),
        Value::Array(pair) => match pair.as_slice() {
            [left, right] => Some([left.as_str()?, right.as_str()?]),
            _ => None,
        },
        _ => None,
    }
}

type OnId<'f> = &'f mut dyn FnMut(&mut Value) -> Result<(), String>;

/// Calls a function with every token id of the file, except for those of the vocabulary.
fn for_each_id(json: &mut Value, on_id: OnId) -> Result<(), String> {
    for token in json.get_mut("added_tokens").and_then(Value::as_array_mut).into_iter().flatten() {
        token.get_mut("id").map_or(Ok(()), &mut *on_id)?;
    }
    for pointer in ["/padding/pad_id", "/model/unk_id"] {
        json.pointer_mut(pointer).filter(|id| !id.is_null()).map_or(Ok(()), &mut *on_id)?;
    }
    json.get_mut("post_processor").map_or(Ok(()), |processor| for_each_processor_id(processor, on_id))
}

fn for_each_processor_id(processor: &mut Value, on_id: OnId) -> Result<(), String> {
    match processor.get("type").and_then(Value::as_str) {
        Some("Sequence") => {
            let parts = processor.get_mut("processors").and_then(Value::as_array_mut).into_iter().flatten();
            for part in parts {
                for_each_processor_id(part, on_id)?;
            }
            Ok(())
        }
        Some("TemplateProcessing") => {
            let tokens = processor.get_mut("special_tokens").and_then(Value::as_object_mut).into_iter().flat_map(|tokens| tokens.values_mut());
            for ids in tokens.filter_map(|token| token.get_mut("ids")?.as_array_mut()) {
                ids.iter_mut().try_for_each(&mut *on_id)?;
            }
            Ok(())
        }
        Some("BertProcessing" | "RobertaProcessing") => {
            for name in ["sep", "cls"] {
                processor.get_mut(name).and_then(|token| token.get_mut(1)).map_or(Ok(()), &mut *on_id)?;
            }
            Ok(())
        }
        Some("ByteLevel") | None => Ok(()),
        Some(other) => Err(format!("the post-processor `{other}` is not supported when tokens are removed")),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parse(model: &Value, rest: Value) -> TokenizerFile {
        let mut json = rest;
        json["model"] = model.clone();
        TokenizerFile::parse(Path::new(FILE), &json.to_string()).unwrap()
    }

    fn bpe() -> TokenizerFile {
        let vocab = json!({ "a": 0, "b": 1, "c": 2, "ab": 3, "bc": 4, "abc": 5, "cc": 6, "<s>": 7, "abcc": 8, "lost": 9 });
        let merges = json!(["b c", ["a", "b"], "a bc", "c c", "abc c"]);
        let processor = json!({ "type": "Sequence", "processors": [{ "type": "ByteLevel" },
            { "type": "TemplateProcessing", "single": [], "special_tokens": { "<s>": { "id": "<s>", "ids": [7], "tokens": ["<s>"] } } }] });
        parse(
            &json!({ "type": "BPE", "vocab": vocab, "merges": merges }),
            json!({ "added_tokens": [{ "id": 7, "content": "<s>" }], "post_processor": processor, "retained": [1] }),
        )
    }

    #[test]
    fn tokens_need_the_merges_that_produce_them() {
        let file = bpe();
        let parts = |id| file.parts(id).into_iter().collect::<BTreeSet<_>>();
        // `b c` has the lowest rank, so that `abc` is not merged from `ab`.
        assert_eq!(parts(5), BTreeSet::from([0, 1, 2, 4, 5]));
        assert_eq!(parts(8), BTreeSet::from([0, 1, 2, 4, 5, 8]));
        assert_eq!(parts(9), BTreeSet::new());
        assert_eq!(file.required(), BTreeSet::from([0, 1, 2, 7]));
        assert_eq!(file.order(), [4, 3, 5, 6, 8, 0, 1, 2, 7, 9]);
    }

    #[test]
    fn merges_ids_and_unknown_keys_are_rewritten() {
        let retained = [0, 1, 2, 4, 5, 7];
        let reduced = bpe().reduced(&Retained(&retained)).unwrap();
        assert_eq!(reduced["model"]["vocab"], json!({ "a": 0, "b": 1, "c": 2, "bc": 3, "abc": 4, "<s>": 5 }));
        assert_eq!(reduced["model"]["merges"], json!(["b c", "a bc"]));
        assert_eq!(reduced["added_tokens"][0]["id"], 5);
        assert_eq!(reduced["post_processor"]["processors"][1]["special_tokens"]["<s>"]["ids"], json!([5]));
        assert_eq!(reduced["retained"], json!([1]));
    }

    #[test]
    fn characters_of_words_keep_their_affixes() {
        let vocab = json!({ "a": 0, "a</w>": 1, "b": 2, "b</w>": 3, "ab</w>": 4 });
        let file = parse(&json!({ "type": "BPE", "vocab": vocab, "merges": ["a b</w>"], "end_of_word_suffix": "</w>" }), json!({}));
        assert_eq!(file.parts(4), [0, 3, 4]);
        assert_eq!(file.required(), BTreeSet::from([0, 1, 2, 3]));
        let vocab = json!({ "[UNK]": 0, "a": 1, "##a": 2, "##ab": 3, "ab": 4 });
        let words = parse(&json!({ "type": "WordPiece", "vocab": vocab, "unk_token": "[UNK]", "continuing_subword_prefix": "##" }), json!({}));
        assert_eq!(words.required(), BTreeSet::from([0, 1, 2]));
        assert_eq!(words.parts(3), Vec::<usize>::new());
    }

    #[test]
    fn unigram_keeps_its_lowest_score_and_numbers_by_position() {
        let vocab = json!([["<unk>", 0.0], ["a", -2.0], ["b", -3.0], ["ab", -1.0], ["ba", -9.0], ["aa", -4.0]]);
        let file = parse(&json!({ "type": "Unigram", "unk_id": 0, "vocab": vocab }), json!({}));
        assert_eq!(file.required(), BTreeSet::from([0, 1, 2, 4]));
        assert_eq!(file.order(), [0, 3, 1, 2, 5, 4]);
        let retained = [0, 1, 2, 4];
        assert_eq!(file.reduced(&Retained(&retained)).unwrap()["model"]["vocab"], json!([["<unk>", 0.0], ["a", -2.0], ["b", -3.0], ["ba", -9.0]]));
        // Byte tokens represent all characters.
        let mut vocab = vec![json!(["<unk>", 0.0]), json!(["a", -2.0])];
        vocab.extend((0..256).map(|byte| json!([format!("<0x{byte:02X}>"), -1.0])));
        let bytes = parse(&json!({ "type": "Unigram", "unk_id": 0, "byte_fallback": true, "vocab": vocab }), json!({}));
        assert_eq!(bytes.required().len(), 258, "with the lowest score");
    }

    #[test]
    fn unsupported_files_are_refused_by_name() {
        let error = |json: Value| TokenizerFile::parse(Path::new(FILE), &json.to_string()).map(drop).unwrap_err().to_string();
        assert!(error(json!({ "model": { "type": "Foo", "vocab": {} } })).contains("of the type Foo"));
        assert!(error(json!({ "model": { "type": "BPE" } })).contains("has no vocabulary"));
        assert!(error(json!({ "model": { "type": "BPE", "vocab": { "a": 0, "b": 0 } } })).contains("two with the same id"));
        assert!(error(json!({ "model": { "type": "BPE", "vocab": { "a": 0 }, "merges": ["a b"] } })).contains("`b` of the merge"));
        let added = json!({ "model": { "type": "WordLevel", "vocab": { "a": 0 } }, "added_tokens": [{ "id": 0, "content": "b" }] });
        assert!(error(added).contains("has the id of `a`"));
        let file = parse(&json!({ "type": "WordLevel", "vocab": { "a": 0 } }), json!({ "post_processor": { "type": "Foo" } }));
        assert!(file.reduced(&Retained(&[0])).unwrap_err().to_string().contains("the post-processor `Foo`"));
    }
}
