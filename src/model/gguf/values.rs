//! What a GGUF file says, taken key by key: what nobody has taken at the end is refused, or known to mean nothing.

// What is read here, anybody may have written.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::store::gguf::Value;

/// Sizes above this are mistakes.
const LIMIT: u64 = 1 << 32;

/// Keys of an architecture that change nothing, whatever their values.
const HARMLESS: [&str; 6] = ["attention.value_length", "rope.scaling.finetuned", "tensor_data_layout", "rope.dimension_count", "vocab_size", "context_length"];

/// Keys that change what is computed, with the value that does not.
const NEUTRAL: [(&str, Value); 13] = [
    ("attention.causal", Value::Bool(true)),
    ("attention.clamp_kqv", Value::Float(0.0)),
    ("attention.max_alibi_bias", Value::Float(0.0)),
    ("expert_count", Value::Unsigned(0)),
    ("expert_used_count", Value::Unsigned(0)),
    // Weights of experts are a softmax.
    ("expert_gating_func", Value::Unsigned(1)),
    ("expert_weights_scale", Value::Float(1.0)),
    ("leading_dense_block_count", Value::Unsigned(0)),
    ("logit_scale", Value::Float(1.0)),
    ("pooling_type", Value::Unsigned(0)),
    ("rope.scaling.attn_factor", Value::Float(1.0)),
    ("rope.scaling.yarn_attn_factor", Value::Float(1.0)),
    ("use_parallel_residual", Value::Bool(false)),
];

/// What a file says.
pub(super) struct Values {
    pub path: PathBuf,
    pub architecture: String,
    values: BTreeMap<String, Value>,
}

impl Values {
    pub fn new(path: &Path, values: BTreeMap<String, Value>) -> Result<Values> {
        let mut values = Values { path: path.to_owned(), architecture: String::new(), values };
        if let Some(kind) = values.text("general.type")?.filter(|kind| kind != "model") {
            return Err(values.wrong(format!("is no model but of the type `{kind}`")));
        }
        let said = values.text("general.architecture")?;
        values.architecture = said.ok_or_else(|| values.wrong("does not say which architecture it is (`general.architecture`)".into()))?;
        Ok(values)
    }

    pub fn wrong(&self, reason: String) -> Error {
        Error::malformed(&self.path, reason)
    }

    fn expected<T>(&self, key: &str, value: &Value, what: &str) -> Result<T> {
        Err(self.wrong(format!("`{key}` is {value}, expected {what}")))
    }

    /// Whether networks are experts.
    pub fn has_experts(&self) -> bool {
        !matches!(self.values.get(&self.own("expert_count")), None | Some(Value::Unsigned(0) | Value::Signed(0)))
    }

    pub fn take(&mut self, key: &str) -> Option<Value> {
        self.values.remove(key)
    }

    /// Whether a key has this text; it stays.
    pub fn says(&self, key: &str, text: &str) -> bool {
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
            Some(other) => self.expected(key, &other, "yes or no"),
        }
    }

    /// A whole number; a list of equal ones, which stands for all layers, is one of them.
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
            Some(other) => self.expected(key, &other, "a list of whole numbers"),
        }
    }

    pub fn floats(&mut self, key: &str) -> Result<Option<Vec<f64>>> {
        match self.take(key) {
            None => Ok(None),
            Some(Value::Floats(list)) => Ok(Some(list)),
            Some(other) => self.expected(key, &other, "a list of numbers"),
        }
    }

    /// The key of the architecture with this end.
    pub fn own(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture)
    }

    /// A size that must be there.
    pub fn required(&mut self, key: &str) -> Result<u64> {
        let key = self.own(key);
        let size = self.size(&key)?.filter(|size| *size > 0);
        size.ok_or_else(|| self.wrong(format!("`{key}` is missing, or zero")))
    }

    /// What nothing has taken: what describes the model goes over, by key; other keys are named. Those that change what is computed are
    /// refused.
    ///
    /// # Errors
    /// There is such a key.
    pub fn rest(mut self) -> Result<(BTreeMap<String, String>, Vec<String>)> {
        let own = self.own("");
        for key in ["general.quantization_version", "general.file_type", "general.alignment", "split.no", "split.count", "split.tensors.count"] {
            self.take(key);
        }
        let (mut described, mut named) = (BTreeMap::new(), Vec::new());
        for (key, value) in &self.values {
            if let Some(key) = key.strip_prefix(&own) {
                let neutral = NEUTRAL.iter().find(|(name, _)| *name == key);
                if neutral.is_some_and(|(_, neutral)| neutral != value) || (neutral.is_none() && !HARMLESS.contains(&key)) {
                    return Err(Error::Unsupported {
                        what: format!("{}: `{own}{key}`, which is {value}", self.path.display()),
                        hint: "it changes what the model computes, and is not known for this architecture".into(),
                    });
                }
            } else if key.starts_with("general.") {
                let text = match value {
                    Value::Text(text) => text.clone(),
                    Value::Texts(texts) => texts.join(", "),
                    other => other.to_string(),
                };
                described.insert(key.clone(), text);
            } else {
                named.push(key.clone());
            }
        }
        Ok((described, named))
    }
}
