//! Validated access to the values of `config.json`.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::sync::LazyLock;

use serde_json::{Map, Value};

use crate::error::{Error, Result};
use crate::ir::Builder;

/// The keys of a file that have been read; keys in a group have the path `group.key`.
#[derive(Debug, Default)]
pub struct ReadKeys(RefCell<BTreeSet<String>>);

/// The configuration of a model.
#[derive(Debug, Clone, Copy)]
pub struct Settings<'c> {
    values: &'c Map<String, Value>,
    /// Name of the file, for errors.
    file: &'c str,
    /// The groups that contain these values, outermost first.
    groups: [&'c str; 3],
    /// The values of the model that contains the one with this configuration.
    outer: Option<&'c Map<String, Value>>,
    read: Option<&'c ReadKeys>,
    /// Default sizes for missing keys.
    sizes: &'static [(&'static str, usize)],
}

/// Adds inputs, nodes and outputs to a graph.
pub type GraphBuilder = fn(&Settings, &mut Builder) -> Result<()>;

/// Values of a missing group.
static EMPTY: LazyLock<Map<String, Value>> = LazyLock::new(Map::new);

/// Exclusive maximum of sizes; larger numbers are mistakes.
const LIMIT: u64 = 1 << 32;

impl<'c> Settings<'c> {
    /// Wraps the values of `config.json`.
    pub fn new(values: &'c Map<String, Value>) -> Self {
        Self::for_file(values, "config.json")
    }

    /// Wraps the values of this file.
    pub fn for_file(values: &'c Map<String, Value>, file: &'c str) -> Self {
        Self { values, file, groups: [""; 3], outer: None, read: None, sizes: &[] }
    }

    /// Also records the keys that are read.
    #[must_use]
    pub fn recording(self, read: &'c ReadKeys) -> Self {
        Self { read: Some(read), ..self }
    }

    /// Also uses these default sizes for missing keys.
    #[must_use]
    pub fn with_sizes(self, sizes: &'static [(&'static str, usize)]) -> Self {
        Self { sizes, ..self }
    }

    /// The value of a key, unless it is missing or null.
    pub fn get(&self, key: &str) -> Option<&'c Value> {
        if let Some(read) = self.read {
            read.0.borrow_mut().insert(self.path(key));
        }
        self.values.get(key).filter(|v| !v.is_null())
    }

    fn path(&self, key: &str) -> String {
        self.groups.iter().filter(|group| !group.is_empty()).chain([&key]).copied().collect::<Vec<_>>().join(".")
    }

    /// Keys and values that have not been read, with groups expanded if one of their keys was read; nulls
    /// are omitted.
    pub fn unread(&self) -> Vec<(String, &'c Value)> {
        let Some(read) = self.read else { return Vec::new() };
        let mut found = Vec::new();
        for (key, value) in self.values.iter().filter(|(_, value)| !value.is_null()) {
            let path = self.path(key);
            let inside = format!("{path}.");
            let (is_read, is_expanded) = {
                let read = read.0.borrow();
                (read.contains(&path), read.range(inside.clone()..).next().is_some_and(|other| other.starts_with(&inside)))
            };
            match value.as_object() {
                Some(values) if is_expanded && self.inner(key).is_some() => found.extend(self.within(key, values).unread()),
                _ if is_read => {}
                _ => found.push((path, value)),
            }
        }
        found
    }

    /// Records a key as read.
    pub fn mark(&self, key: &str) {
        let _ = self.get(key);
    }

    /// Records keys as read that an outer configuration repeats with the same values.
    pub fn mark_repeated(&self, outer: &Settings) {
        let same = self.values.iter().filter(|(key, value)| outer.values.get(*key) == Some(*value));
        same.for_each(|(key, _)| outer.mark(key));
    }

    /// Whether a key is explicitly null.
    pub fn is_null(&self, key: &str) -> bool {
        self.values.get(key).is_some_and(Value::is_null)
    }

    fn missing(&self, key: &str) -> Error {
        Error::graph(self.file, format!("`{key}` is missing"))
    }

    fn wrong(&self, key: &str, value: &Value, expected: &str) -> Error {
        Error::graph(self.file, format!("`{key}` is {value}, expected {expected}"))
    }

    /// An integer from 1.
    pub fn size(&self, key: &str) -> Result<usize> {
        let Some(value) = self.get(key) else {
            return self.sizes.iter().find(|(name, _)| *name == key).map(|(_, size)| *size).ok_or_else(|| self.missing(key));
        };
        let number = value.as_u64().filter(|n| (1..LIMIT).contains(n));
        number.map(|n| n as usize).ok_or_else(|| self.wrong(key, value, "a size from 1 to 4294967295"))
    }

    /// An integer from 1, or a default.
    pub fn size_or(&self, key: &str, default: usize) -> Result<usize> {
        if self.get(key).is_some() { self.size(key) } else { Ok(default) }
    }

    /// A number, or a default.
    pub fn number_or(&self, key: &str, default: f64) -> Result<f64> {
        match self.get(key) {
            None => Ok(default),
            Some(value) => value.as_f64().ok_or_else(|| self.wrong(key, value, "a number")),
        }
    }

    /// A number.
    pub fn number(&self, key: &str) -> Result<f64> {
        self.get(key).ok_or_else(|| self.missing(key)).and_then(|_| self.number_or(key, 0.0))
    }

    /// A token id, or a default.
    pub fn token_or(&self, key: &str, default: i64) -> Result<i64> {
        match self.get(key) {
            None => Ok(default),
            Some(value) => value.as_i64().filter(|n| n.unsigned_abs() < LIMIT).ok_or_else(|| self.wrong(key, value, "a token id")),
        }
    }

    /// A boolean, or a default.
    pub fn flag_or(&self, key: &str, default: bool) -> Result<bool> {
        match self.get(key) {
            None => Ok(default),
            Some(value) => value.as_bool().ok_or_else(|| self.wrong(key, value, "true or false")),
        }
    }

    /// A string.
    pub fn text(&self, key: &str) -> Result<&'c str> {
        let value = self.get(key).ok_or_else(|| self.missing(key))?;
        value.as_str().ok_or_else(|| self.wrong(key, value, "a string"))
    }

    /// A string, or a default.
    pub fn text_or(&self, key: &str, default: &'c str) -> Result<&'c str> {
        if self.get(key).is_some() { self.text(key) } else { Ok(default) }
    }

    /// A list of sizes.
    pub fn sizes(&self, key: &str) -> Result<Vec<usize>> {
        let value = self.get(key).ok_or_else(|| self.missing(key))?;
        let list: Option<Vec<usize>> =
            value.as_array().and_then(|list| list.iter().map(|v| v.as_u64().filter(|n| (1..LIMIT).contains(n)).map(|n| n as usize)).collect());
        list.filter(|l| !l.is_empty()).ok_or_else(|| self.wrong(key, value, "a list of sizes"))
    }

    /// A list of sizes, or a default.
    pub fn sizes_or(&self, key: &str, default: &[usize]) -> Result<Vec<usize>> {
        if self.get(key).is_some() { self.sizes(key) } else { Ok(default.to_vec()) }
    }

    /// A list of numbers.
    pub fn numbers(&self, key: &str) -> Result<Vec<f64>> {
        let value = self.get(key).ok_or_else(|| self.missing(key))?;
        let list: Option<Vec<f64>> = value.as_array().and_then(|list| list.iter().map(Value::as_f64).collect());
        list.ok_or_else(|| self.wrong(key, value, "a list of numbers"))
    }

    /// A group of values.
    pub fn group(&self, key: &'c str) -> Option<Settings<'c>> {
        let values = self.get(key).and_then(Value::as_object)?;
        Some(self.within(key, values))
    }

    /// A group of values, empty if it is missing.
    pub fn group_or_empty(&self, key: &'c str) -> Result<Settings<'c>> {
        match self.get(key) {
            None => Ok(self.within(key, &EMPTY)),
            Some(value) => self.group(key).ok_or_else(|| self.wrong(key, value, "an object")),
        }
    }

    fn within(&self, key: &'c str, values: &'c Map<String, Value>) -> Settings<'c> {
        // Groups are at most three levels deep.
        Settings { values, groups: self.inner(key).unwrap_or(self.groups), sizes: &[], ..*self }
    }

    fn inner(&self, key: &'c str) -> Option<[&'c str; 3]> {
        match self.groups {
            ["", ..] => Some([key, "", ""]),
            [outer, "", _] => Some([outer, key, ""]),
            [outer, middle, ""] => Some([outer, middle, key]),
            _ => None,
        }
    }

    /// Also uses the class of the model that contains the one with this configuration, and whether its output
    /// head is tied.
    #[must_use]
    pub fn inside(self, outer: &Settings<'c>) -> Self {
        Self { outer: Some(outer.values), ..self }
    }

    /// Whether another model contains the one with this configuration.
    pub fn is_inside(&self) -> bool {
        self.outer.is_some()
    }

    /// Whether the output head is the embedding table, if the checkpoint does not have one.
    pub fn ties_head(&self) -> Result<bool> {
        const KEY: &str = "tie_word_embeddings";
        // transformers also accepts the value of the outer configuration.
        let outer = self.outer.and_then(|values| values.get(KEY)).and_then(Value::as_bool);
        Ok(self.flag_or(KEY, outer.unwrap_or(true))? || outer == Some(true))
    }

    /// The class that the weights were saved from, or an empty string.
    pub fn class(&self) -> &'c str {
        let stated = self.outer.map_or_else(|| self.get("architectures"), |values| values.get("architectures"));
        stated.and_then(|list| list.get(0)).and_then(Value::as_str).unwrap_or("")
    }

    /// Number of classes of a classifier.
    pub fn labels(&self) -> Result<usize> {
        match self.get("id2label").and_then(Value::as_object) {
            Some(labels) if !labels.is_empty() => Ok(labels.len()),
            _ => self.size_or("num_labels", 2),
        }
    }

    /// Number of classes of a classifier of torchvision: `num_classes`, or that of the labels.
    pub fn classes(&self) -> Result<usize> {
        let has_labels = self.get("num_labels").is_some() || self.get("id2label").and_then(Value::as_object).is_some_and(|labels| !labels.is_empty());
        self.size_or("num_classes", if has_labels { self.labels()? } else { 1000 })
    }

    /// Width of an attention head; the total width must be divisible by the number of heads.
    pub fn head_dim(&self, width: &str, heads: &str) -> Result<usize> {
        let (total, count) = (self.size(width)?, self.size(heads)?);
        let evenly = total.checked_div(count).filter(|_| total.is_multiple_of(count));
        evenly.ok_or_else(|| indivisible((width, total), (heads, count)))
    }
}

/// The error about the type of a layer, if there is one, in a list in `config.json`.
pub fn unknown_layer_type(key: &str, layer: usize, found: Option<&str>, expected: &str) -> Error {
    let found = found.map_or_else(|| "not a string".to_owned(), |found| format!("`{found}`"));
    Error::graph("config.json", format!("`{key}` of layer {layer} is {found}, expected {expected}"))
}

/// Separates the sizes in the message of [`indivisible`].
const NOT_A_MULTIPLE: &str = " is not a multiple of ";

/// The error about a size in `config.json` that is not a multiple of another one; keys and values.
pub fn indivisible((key, size): (&str, usize), (other_key, divisor): (&str, usize)) -> Error {
    Error::graph("config.json", format!("`{key}` {size}{NOT_A_MULTIPLE}`{other_key}` {divisor}"))
}

/// Whether an error is that of [`indivisible`] sizes, which no program accepts.
pub fn is_indivisible(error: &Error) -> bool {
    matches!(error, Error::Graph { what, reason } if what == "config.json" && reason.contains(NOT_A_MULTIPLE))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn classes_are_those_of_the_labels() {
        let classes =
            [json!({ "id2label": {} }), json!({ "num_labels": 7 }), json!({ "id2label": { "0": "a" } }), json!({ "num_labels": 7, "num_classes": 5 })]
                .map(|values| values.as_object().map(|values| Settings::new(values).classes().unwrap()));
        assert_eq!(classes, [1000, 7, 1, 5].map(Some));
    }
}
