//! Metadata of a GGUF file. Keys are removed as they are read; remaining keys are rejected unless they
//! have no effect.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::{Value as Json, json};

use crate::arch::{EXPERT_SCORES, GgufTraits, Setting};
use crate::error::{Error, Result};
use crate::store::Weight;
use crate::store::gguf::{ImportanceFile, Value};

/// Sizes above this are invalid.
const LIMIT: u64 = 1 << 32;

/// Keys of the rank of queries that are computed from latent vectors.
pub(super) const QUERY_RANK: (&str, &str) = ("attention.q_lora_rank", "q_lora_rank");
/// Key of the number of key-value heads, of the model or of each layer.
pub(super) const HEADS: &str = "attention.head_count_kv";
/// Key with the width of the values of all heads.
pub(super) const INNER: &str = "ssm.inner_size";

/// Keys for which llama.cpp takes zero as a missing value.
const ZERO_IS_MISSING: [&str; 4] = ["expert_group_count", "expert_group_used_count", "expert_weights_scale", "logit_scale"];

/// Keys of an architecture that have no effect, for any value.
const HARMLESS: [&str; 6] = ["attention.value_length", "rope.scaling.finetuned", "tensor_data_layout", "rope.dimension_count", "vocab_size", "context_length"];

/// Keys that change the computation, with their neutral values.
const NEUTRAL: [(&str, Value); 15] = [
    ("attention.causal", Value::Bool(true)),
    ("attention.clamp_kqv", Value::Float(0.0)),
    ("attention.max_alibi_bias", Value::Float(0.0)),
    ("expert_count", Value::Unsigned(0)),
    ("expert_used_count", Value::Unsigned(0)),
    // Softmax.
    ("expert_gating_func", Value::Unsigned(1)),
    ("expert_shared_feed_forward_length", Value::Unsigned(0)),
    ("expert_weights_scale", Value::Float(1.0)),
    ("leading_dense_block_count", Value::Unsigned(0)),
    ("logit_scale", Value::Float(1.0)),
    ("nextn_predict_layers", Value::Unsigned(0)),
    ("pooling_type", Value::Unsigned(0)),
    ("rope.scaling.attn_factor", Value::Float(1.0)),
    ("rope.scaling.yarn_attn_factor", Value::Float(1.0)),
    ("use_parallel_residual", Value::Bool(false)),
];

/// Unread metadata of a file.
pub(super) struct Values {
    pub path: PathBuf,
    pub architecture: String,
    values: BTreeMap<String, Value>,
}

impl Values {
    pub fn new(path: &Path, values: BTreeMap<String, Value>) -> Result<Values> {
        let mut values = Values { path: path.to_owned(), architecture: String::new(), values };
        match values.text("general.type")?.filter(|kind| kind != "model") {
            None => {}
            Some(kind) if kind == ImportanceFile::TYPE => {
                return Err(Error::Unsupported {
                    what: format!("{}: opening an importance matrix of llama.cpp as a model", path.display()),
                    hint: "open the model, and name this file in the export of a recipe: `export: [{ gguf: { type: Q4_K_M, imatrix: FILE } }]`".into(),
                });
            }
            Some(kind) => return Err(values.wrong(format!("contains a `{kind}`, not a model"))),
        }
        let architecture = values.text("general.architecture")?;
        values.architecture = architecture.ok_or_else(|| values.wrong("does not specify its architecture (`general.architecture`)".into()))?;
        Ok(values)
    }

    pub fn wrong(&self, reason: String) -> Error {
        Error::malformed(&self.path, reason)
    }

    fn expected<T>(&self, key: &str, value: &Value, what: &str) -> Result<T> {
        Err(self.wrong(format!("`{key}` is {value}, expected {what}")))
    }

    /// The properties by which families with the same architecture are distinguished.
    pub fn traits(&self) -> GgufTraits {
        let is_positive = |key: &str| self.values.get(&self.own(key)).is_some_and(|value| !is_zero(value));
        GgufTraits {
            experts: is_positive("expert_count"),
            windows: is_positive("attention.sliding_window"),
            scores: self.expert_scores(),
            state_space: is_positive("ssm.conv_kernel"),
            shared: is_positive("expert_shared_feed_forward_length"),
        }
    }

    /// The function of the scores of experts, by default a softmax. llama.cpp recognizes GLM-4.7-Flash, whose
    /// scores are sigmoids.
    fn expert_scores(&self) -> u64 {
        let number = |key: &str| match self.values.get(&self.own(key)) {
            Some(Value::Unsigned(number)) => Some(*number),
            Some(Value::Signed(number)) => u64::try_from(*number).ok(),
            _ => None,
        };
        let is_flash = || self.architecture == "deepseek2" && matches!(number("block_count"), Some(47 | 48)) && number("vocab_size") == Some(154_880);
        number(EXPERT_SCORES).unwrap_or_else(|| if is_flash() { 2 } else { 1 })
    }

    pub fn take(&mut self, key: &str) -> Option<Value> {
        self.values.remove(key)
    }

    /// Renames a key, unless there already is one with the other name.
    pub fn rename_missing(&mut self, from: &str, to: &str) {
        if !self.values.contains_key(to)
            && let Some(value) = self.take(from)
        {
            self.values.insert(to.to_owned(), value);
        }
    }

    /// Whether a key has this text; does not remove the key.
    pub fn has_text(&self, key: &str, text: &str) -> bool {
        self.values.get(key) == Some(&Value::Text(text.to_owned()))
    }

    pub fn text(&mut self, key: &str) -> Result<Option<String>> {
        match self.take(key) {
            None => Ok(None),
            Some(Value::Text(text)) => Ok(Some(text)),
            Some(other) => self.expected(key, &other, "a text"),
        }
    }

    pub fn texts(&mut self, key: &str) -> Result<Option<Vec<String>>> {
        match self.take(key) {
            None => Ok(None),
            Some(Value::Texts(list)) => Ok(Some(list)),
            Some(other) => self.expected(key, &other, "a list of texts"),
        }
    }

    pub fn flag(&mut self, key: &str) -> Result<Option<bool>> {
        match self.take(key) {
            None => Ok(None),
            Some(Value::Bool(answer)) => Ok(Some(answer)),
            Some(other) => self.expected(key, &other, "a boolean"),
        }
    }

    /// A non-negative integer; a list of equal numbers (one per layer) counts as one.
    pub fn size(&mut self, key: &str) -> Result<Option<u64>> {
        let Some(value) = self.take(key) else { return Ok(None) };
        let number = match &value {
            Value::Unsigned(number) => Some(*number),
            Value::Signed(number) => u64::try_from(*number).ok(),
            Value::Integers(list) => list.first().filter(|first| list.iter().all(|other| other == *first)).and_then(|first| u64::try_from(*first).ok()),
            _ => None,
        };
        match number.filter(|number| *number < LIMIT) {
            Some(number) => Ok(Some(number)),
            None => self.expected(key, &value, "one size from 0 to 4294967295"),
        }
    }

    pub fn number(&mut self, key: &str) -> Result<Option<f64>> {
        match self.take(key) {
            None => Ok(None),
            Some(Value::Float(number)) if number.is_finite() => Ok(Some(number)),
            Some(Value::Unsigned(number)) => Ok(Some(number as f64)),
            Some(other) => self.expected(key, &other, "a number"),
        }
    }

    pub fn integers(&mut self, key: &str) -> Result<Option<Vec<i64>>> {
        match self.take(key) {
            None => Ok(None),
            Some(Value::Integers(list)) => Ok(Some(list)),
            Some(other) => self.expected(key, &other, "a list of integers"),
        }
    }

    /// A list with zero or the same number for each layer: this number, and which layers have it.
    pub fn of_layers(&mut self, key: &str, layers: u64) -> Result<(u64, Vec<bool>)> {
        let key = self.own(key);
        let list = self.integers(&key)?.unwrap_or_default();
        let number = list.iter().copied().max().unwrap_or(0);
        if list.len() as u64 != layers || list.iter().any(|other| ![0, number].contains(other)) {
            return Err(self.wrong(format!("`{key}` must have zero or the same number for each of {layers} layers")));
        }
        Ok((number.unsigned_abs(), list.iter().map(|other| *other != 0).collect()))
    }

    pub fn floats(&mut self, key: &str) -> Result<Option<Vec<f64>>> {
        match self.take(key) {
            None => Ok(None),
            Some(Value::Floats(list)) => Ok(Some(list)),
            Some(other) => self.expected(key, &other, "a list of numbers"),
        }
    }

    /// The key with the prefix of the architecture.
    pub fn own(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture)
    }

    /// A required positive size.
    pub fn required(&mut self, key: &str) -> Result<u64> {
        let key = self.own(key);
        let size = self.size(&key)?.filter(|size| *size > 0);
        size.ok_or_else(|| self.wrong(format!("`{key}` is missing or zero")))
    }

    /// The value of a setting for `config.json`.
    pub fn setting(&mut self, setting: &Setting) -> Result<Json> {
        let key = self.own(setting.gguf);
        if ZERO_IS_MISSING.contains(&setting.gguf) && self.values.get(&key).is_some_and(is_zero) {
            self.take(&key);
        }
        let value = match setting.default_value() {
            Json::Bool(_) => self.flag(&key)?.map(|value| json!(value)),
            Json::Number(number) if number.is_u64() => self.size(&key)?.map(|value| json!(value)),
            _ => self.number(&key)?.map(|value| json!(value)),
        };
        value.or(setting.missing_value()).ok_or_else(|| self.wrong(format!("`{key}` is missing")))
    }

    /// Returns the unread metadata that describes the model, and the names of other unread keys. Fails
    /// for unread keys that change the computation.
    pub fn into_metadata(mut self) -> Result<(BTreeMap<String, String>, Vec<String>)> {
        let own = self.own("");
        for key in ["general.quantization_version", "general.file_type", "general.alignment", "split.no", "split.count", "split.tensors.count"] {
            self.take(key);
        }
        let (mut metadata, mut unused) = (BTreeMap::new(), Vec::new());
        for (key, value) in &self.values {
            if let Some(key) = key.strip_prefix(&own) {
                let neutral = NEUTRAL.iter().find(|(name, _)| *name == key);
                if neutral.is_some_and(|(_, neutral)| neutral != value) || (neutral.is_none() && !HARMLESS.contains(&key)) {
                    return Err(Error::Unsupported {
                        what: format!("{}: `{own}{key}`, which is {value}", self.path.display()),
                        hint: "it changes the computation, but is not supported for this architecture".into(),
                    });
                }
            } else if key.starts_with("general.") {
                let text = match value {
                    Value::Text(text) => text.clone(),
                    Value::Texts(texts) => texts.join(", "),
                    other => other.to_string(),
                };
                metadata.insert(key.clone(), text);
            } else {
                unused.push(key.clone());
            }
        }
        Ok((metadata, unused))
    }
}

fn is_zero(value: &Value) -> bool {
    matches!(value, Value::Unsigned(0) | Value::Signed(0)) || *value == Value::Float(0.0)
}

/// Maximum number of frequency divisors, one for each pair of elements of a head.
const MAX_FACTORS: usize = 4096;

/// The divisors of a tensor, one for each pair of `width` elements. They are the shortest numbers with the
/// same 32-bit floats.
pub(super) fn factor_list(values: &Values, name: &str, weight: &Weight, width: u64) -> Result<Vec<f64>> {
    if weight.shape != [usize::try_from(width / 2).unwrap_or(0)] {
        return Err(values.wrong(format!("tensor `{name}` has the shape {:?}, but heads of {width} have {} frequencies", weight.shape, width / 2)));
    }
    if weight.elements() > MAX_FACTORS || weight.elements() == 0 {
        return Err(values.wrong(format!("tensor `{name}` has {} elements", weight.elements())));
    }
    Ok(weight.floats(name)?.into_iter().map(|factor| factor.to_string().parse().unwrap_or(f64::from(factor))).collect())
}
