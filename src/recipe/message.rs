//! Error messages for invalid YAML.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::borrow::Cow;

use serde_saphyr::{Error, MessageFormatter, UserMessageFormatter, render_options};

use crate::store::select::nearest;

/// The message with line, column and a snippet of `source`.
pub(crate) fn explain(error: &Error, source: &str) -> String {
    let text = error.render_with_options(render_options! { formatter: &Plain, source_name: Some(source) });
    text.strip_prefix("error: ").unwrap_or(&text).to_owned()
}

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
            Error::InvalidScalar { ty: "u64" | "u32" | "usize", .. } => "expected a whole number".into(),
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
