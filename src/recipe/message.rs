//! Error messages for invalid YAML.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::borrow::Cow;

use serde_saphyr::{Error, MessageFormatter, UserMessageFormatter, render_options};

use crate::store::select::nearest;

/// The message with line, column and a snippet of `source`.
pub(crate) fn explain(error: &Error, source: &str) -> String {
    let text = error.render_with_options(render_options! { formatter: &Plain, source_name: Some(source) });
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    let first = text.lines().next().unwrap_or_default();
    match (SCALARS.iter().find(|expected| first.ends_with(**expected)), marked_key(text)) {
        (Some(expected), Some(key)) => text.replace(expected, &format!("{expected} for `{key}`")),
        _ => text.to_owned(),
    }
}

/// The key whose value is marked in the snippet of a message.
fn marked_key(text: &str) -> Option<&str> {
    let is_marker = |line: &str| line.trim_start_matches([' ', '|']).starts_with('^');
    let (source, marker) = text.lines().zip(text.lines().skip(1)).find(|(_, line)| is_marker(line))?;
    let column = marker.chars().position(|c| c == '^')?;
    let (end, _) = source.char_indices().nth(column)?;
    let before = source.get(..end)?.trim_end_matches([' ', '"', '\'']).strip_suffix(':')?;
    before.rsplit(|c: char| !c.is_alphanumeric() && c != '_' && c != '-').next().filter(|key| !key.is_empty())
}

const INTEGER: &str = "expected a whole number";
const NUMBER: &str = "expected a number";
const BOOLEAN: &str = "expected true or false";
/// Messages that name the key of the value.
const SCALARS: [&str; 3] = [INTEGER, NUMBER, BOOLEAN];

/// The message of an error in JSON values, with a suggestion for an unknown key.
pub(crate) fn explain_json(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let names: Vec<&str> = text.split('`').skip(1).step_by(2).collect();
    match names.as_slice() {
        [field, expected @ ..] if text.starts_with("unknown field") => unknown("key", field, expected),
        _ => text,
    }
}

struct Plain;

impl MessageFormatter for Plain {
    fn format_message<'a>(&self, error: &'a Error) -> Cow<'a, str> {
        match error {
            Error::Unexpected { expected: "sequence start", .. } => "expected a list, like [a, b]".into(),
            Error::Unexpected { expected: "mapping start", .. } => "expected keys with values, like { key: value }".into(),
            Error::Unexpected { expected: "string scalar" | "scalar", .. } => "expected a plain value".into(),
            Error::InvalidScalar { ty: "u8" | "u16" | "u32" | "u64" | "usize" | "i8" | "i16" | "i32" | "i64" | "isize", .. } => INTEGER.into(),
            Error::InvalidScalar { ty: "f32" | "f64" | "floating point" | "float", .. } => NUMBER.into(),
            Error::InvalidScalar { ty: "bool" | "boolean", .. } => BOOLEAN.into(),
            Error::SerdeUnknownField { field, expected, .. } => unknown("key", field, expected).into(),
            Error::SerdeUnknownVariant { variant, expected, .. } => unknown("name", variant, expected).into(),
            Error::SerdeMissingField { field, .. } => format!("the key `{field}` is missing").into(),
            Error::DuplicateMappingKey { key: Some(key), .. } => format!("the key `{key}` occurs twice").into(),
            Error::Eof { .. } => "expected a value, but the text ends".into(),
            Error::MultipleDocuments { .. } => "a second YAML document begins here; a recipe has only one".into(),
            Error::AliasReplayLimitExceeded { .. } | Error::AliasExpansionLimitExceeded { .. } | Error::AliasReplayStackDepthExceeded { .. } => {
                "the aliases in this text expand to too many values".into()
            }
            _ => UserMessageFormatter.format_message(error),
        }
    }
}

fn unknown(what: &str, name: &str, expected: &[&str]) -> String {
    match nearest(name, expected.iter().copied()) {
        Some(near) => format!("unknown {what} `{name}`, did you mean `{near}`? Expected one of {}", quoted(expected)),
        None => format!("unknown {what} `{name}`, expected one of {}", quoted(expected)),
    }
}

fn quoted(names: &[&str]) -> String {
    names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}
