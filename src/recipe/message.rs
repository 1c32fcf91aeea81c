//! Error messages for invalid YAML.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::borrow::Cow;

use serde::de::IgnoredAny;
use serde_saphyr::{Error, MessageFormatter, UserMessageFormatter, render_options};

use super::brackets::unclosed;
use crate::aliases::suggestion;
use crate::pass::PASSES;

/// The message with line, column and a snippet of `text`, which is that of the source `name`. A long list of
/// accepted names follows the snippet.
pub(crate) fn explain(error: &Error, name: &str, text: &str) -> String {
    if let Some(open) = unclosed(text) {
        return open.message(name, text);
    }
    let message = located(error, name);
    let first = message.lines().next().unwrap_or_default();
    // An unclosed list begins with a list where a value is expected.
    let is_nested = NESTED.iter().any(|part| first.contains(part));
    let syntax = is_nested.then(|| serde_saphyr::from_str::<IgnoredAny>(text).err()).flatten();
    syntax.map_or(message, |error| located(&error, name))
}

fn located(error: &Error, name: &str) -> String {
    let text = error.render_with_options(render_options! { formatter: &Plain, source_name: Some(name) });
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    let first = text.lines().next().unwrap_or_default();
    let (start, list) = match first.split_once(LIST) {
        Some((start, names)) if names.matches('`').count() > MAX_QUOTES => {
            (start.trim_end_matches(['E', 'e']).trim_end_matches([' ', ',']), format!("\nE{LIST}{names}"))
        }
        _ => (first, String::new()),
    };
    let pass = marked_pass(text).filter(|_| start.ends_with(LISTED));
    let listed = pass.map(|pass| start.replace(LISTED, &format!("expected a list: write `- {pass}: …`, with a dash before each pass")));
    let start = listed.as_deref().unwrap_or(start);
    let start = match (NAMED.iter().find(|expected| start.ends_with(**expected)), marked(text)) {
        (Some(&INTEGER), Some((key, value))) if value.starts_with('-') => start.replace(INTEGER, &format!("{INTEGER} from 0 for `{key}`")),
        (Some(expected), Some((key, _))) => start.replace(expected, &format!("{expected} for `{key}`")),
        _ => start.to_owned(),
    };
    let snippet: String = text.lines().skip(1).map(|line| format!("\n{}", without_label(line))).collect();
    start + &snippet + &list
}

/// Precedes the accepted names, after `E` or `e`.
const LIST: &str = "xpected one of ";
/// Largest number of quotation marks in a list of accepted names on the first line of a message: eight names.
const MAX_QUOTES: usize = 16;
/// Parts of messages about a list or keys where a value is expected.
const NESTED: [&str; 3] = [", not a list", ", not keys with values", PLAIN];

/// A line of a snippet without the message at its marker, which is that of the first line.
fn without_label(line: &str) -> &str {
    let marker = line.trim_start_matches([' ', '|']);
    match marker.trim_start_matches('^') {
        label if label.len() < marker.len() => line.strip_suffix(label).unwrap_or(line),
        _ => line,
    }
}

/// The pass that is marked in the snippet of a message because it is a key, not an entry of a list.
fn marked_pass(text: &str) -> Option<&str> {
    let (_, value) = at_marker(text)?;
    let (name, _) = value.trim_start_matches(['{', ' ']).split_once(':')?;
    PASSES.contains(&name).then_some(name)
}

/// The key whose value is marked in the snippet of a message, and the text from the value on.
fn marked(text: &str) -> Option<(&str, &str)> {
    let (before, value) = at_marker(text)?;
    let before = before.trim_end_matches([' ', '"', '\'']).strip_suffix(':')?;
    let key = before.trim_end_matches(['"', '\'']).rsplit(|c: char| !c.is_alphanumeric() && c != '_' && c != '-').next().filter(|key| !key.is_empty())?;
    Some((key, value))
}

/// The marked line in the snippet of a message, before and from the marker on.
fn at_marker(text: &str) -> Option<(&str, &str)> {
    let is_marker = |line: &str| line.trim_start_matches([' ', '|']).starts_with('^');
    let (source, marker) = text.lines().zip(text.lines().skip(1)).find(|(_, line)| is_marker(line))?;
    let column = marker.chars().position(|c| c == '^')?;
    let (end, _) = source.char_indices().nth(column)?;
    source.split_at_checked(end)
}

const INTEGER: &str = "expected a whole number";
const NUMBER: &str = "expected a number";
const BOOLEAN: &str = "expected true or false";
const PLAIN: &str = "expected a plain value";
const CHARACTER: &str = "expected one character; a tab is \"\\t\", with double quotes";
const LISTED: &str = "expected a list, like [a, b]";
const KEYS: &str = "expected keys with values, like { key: value }";
/// Messages that name the key of the value.
const NAMED: [&str; 6] = [INTEGER, NUMBER, BOOLEAN, PLAIN, LISTED, KEYS];

/// The message of an error in JSON values, with a suggestion for an unknown key.
pub(crate) fn explain_json(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let names: Vec<&str> = text.split('`').skip(1).step_by(2).collect();
    match names.as_slice() {
        [field, expected @ ..] if text.starts_with("unknown field") => unknown("key", field, expected),
        _ => match text.strip_prefix("invalid type: ").and_then(|rest| rest.split_once(", expected ")) {
            Some((unexpected, expected)) => mismatch(unexpected, expected),
            None => text,
        },
    }
}

struct Plain;

impl MessageFormatter for Plain {
    fn format_message<'a>(&self, error: &'a Error) -> Cow<'a, str> {
        match error {
            Error::Unexpected { expected: "sequence start", .. } => LISTED.into(),
            Error::Unexpected { expected: "mapping start", .. } => KEYS.into(),
            Error::Unexpected { expected: "string scalar" | "scalar", .. } => PLAIN.into(),
            Error::InvalidScalar { ty: "u8" | "u16" | "u32" | "u64" | "usize" | "i8" | "i16" | "i32" | "i64" | "isize", .. } => INTEGER.into(),
            Error::InvalidScalar { ty: "f32" | "f64" | "floating point" | "float", .. } => NUMBER.into(),
            Error::InvalidScalar { ty: "bool" | "boolean", .. } => BOOLEAN.into(),
            Error::InvalidCharNull { .. } | Error::InvalidCharNotSingleScalar { .. } => CHARACTER.into(),
            Error::SerdeUnknownField { field, expected, .. } => unknown("key", field, expected).into(),
            Error::SerdeUnknownVariant { variant, expected, .. } => unknown("name", variant, expected).into(),
            Error::SerdeMissingField { field, .. } => format!("the key `{field}` is missing").into(),
            Error::DuplicateMappingKey { key: Some(key), .. } => format!("the key `{key}` occurs twice").into(),
            Error::Eof { .. } => "expected a value, but the text ends".into(),
            Error::MultipleDocuments { .. } => "a second YAML document begins here; a recipe has only one".into(),
            Error::AliasReplayLimitExceeded { .. } | Error::AliasExpansionLimitExceeded { .. } | Error::AliasReplayStackDepthExceeded { .. } => {
                "the aliases in this text expand to too many values".into()
            }
            Error::SerdeInvalidType { unexpected, expected, .. } => mismatch(unexpected, expected).into(),
            _ => UserMessageFormatter.format_message(error),
        }
    }
}

/// The message about a value of another type, without the terms of the parser.
fn mismatch(unexpected: &str, expected: &str) -> String {
    let found = match unexpected.split_once(' ') {
        _ if unexpected == "sequence" => "a list",
        _ if unexpected == "map" => "keys with values",
        _ if unexpected == "unit value" => "nothing",
        Some(("boolean" | "integer" | "string", value)) => value,
        _ => unexpected.strip_prefix("floating point ").unwrap_or(unexpected),
    };
    let expected = match expected {
        "u8" | "u16" | "u32" | "u64" | "usize" | "i64" => "a whole number",
        "f32" | "f64" => "a number",
        "a boolean" => "true or false",
        "a string" => "a text",
        "a sequence" => "a list, like [a, b]",
        other => other,
    };
    format!("expected {expected}, not {found}")
}

fn unknown(what: &str, name: &str, expected: &[&str]) -> String {
    match suggestion(name, expected.iter().copied()) {
        Some(near) => format!("unknown {what} `{name}`, did you mean `{near}`? E{LIST}{}", quoted(expected)),
        None => format!("unknown {what} `{name}`, e{LIST}{}", quoted(expected)),
    }
}

fn quoted(names: &[&str]) -> String {
    names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}
