//! Messages about invalid YAML, and examples of structured options.

use std::borrow::Cow;

use serde::de::DeserializeOwned;
use serde_saphyr::{Error, MessageFormatter, UserMessageFormatter};

use crate::aliases::suggestion;
use crate::error::ParseError;

/// Options of trainings with a structured value: the key, and an example of a value in a recipe. The value is
/// valid on the command line too.
const EXAMPLES: [(&str, &str); 11] = [
    ("losses", "{ soft: 1.0, hidden: 0.5 }"),
    ("optimizer", "adamw"),
    ("betas", "[0.9, 0.95]"),
    ("groups", "[{ targets: ['*.bias'], learning_rate: 0.001 }]"),
    ("schedule", "{ kind: cosine, warmup_steps: 100 }"),
    ("gradient_checkpointing", "{ every: 2 }"),
    ("checkpoint_every", "{ minutes: 10 }"),
    ("augment", "{ flip: true, shift: 4 }"),
    ("masking", "{ fraction: 0.15 }"),
    ("adapter", "{ rank: 16, alpha: 32 }"),
    ("on_policy", "{ fraction: 0.5, tokens: 64 }"),
];

/// An example of an option in a recipe; `None` if it has no structured value.
pub fn example_of(key: &str) -> Option<String> {
    EXAMPLES.iter().find(|(name, _)| *name == key).map(|(name, value)| format!("{name}: {value}"))
}

/// An example of an option on the command line, where a list is an option that occurs several times.
pub fn argument_of(key: &str) -> Option<String> {
    let (name, value) = EXAMPLES.iter().find(|(name, _)| *name == key)?;
    let value = value.strip_prefix("[{").and_then(|value| value.strip_suffix("}]")).map_or_else(|| (*value).to_owned(), |value| format!("{{{value}}}"));
    let quoted = if value.contains(' ') { format!("\"{value}\"") } else { value };
    Some(format!("--{} {quoted}", name.replace('_', "-")))
}

/// Parses the value of an option on the command line.
///
/// # Errors
/// The value is invalid. The message has an example of a valid one.
pub fn parse_option<T: DeserializeOwned>(key: &str, yaml: &str) -> Result<T, ParseError> {
    serde_saphyr::from_str(yaml).map_err(|e| with_example(key, Plain.format_message(e.without_snippet())))
}

/// The message about an invalid value of an option, with an example of a valid one.
pub fn with_example(key: &str, message: impl std::fmt::Display) -> ParseError {
    let example = argument_of(key).map_or_else(String::new, |example| format!("; example: {example}"));
    ParseError::from(format!("{message}{example}"))
}

/// Precedes the accepted names, after `E` or `e`.
pub const LIST: &str = "xpected one of ";
/// The value is not a whole number.
pub const INTEGER: &str = "expected a whole number";
/// The value is not a number.
pub const NUMBER: &str = "expected a number";
/// The value is not a boolean.
pub const BOOLEAN: &str = "expected true or false";
/// The value is a list or a map, but should be a scalar.
pub const PLAIN: &str = "expected a plain value";
/// The value is not a single character.
const CHARACTER: &str = "expected one character; a tab is \"\\t\", with double quotes";
/// The value is not a list.
pub const LISTED: &str = "expected a list, like [a, b]";
/// The value is not a map.
pub const KEYS: &str = "expected keys with values, like { key: value }";

/// Formats an error of the YAML parser in the terms of a user.
pub struct Plain;

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
pub fn mismatch(unexpected: &str, expected: &str) -> String {
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

/// The message about an unknown name, with the accepted ones.
pub fn unknown(what: &str, name: &str, expected: &[&str]) -> String {
    // A text continues on the next line, so a missing colon joins a name and a key.
    if let Some((first, _)) = name.split_once(' ').filter(|(first, _)| expected.contains(first)) {
        return format!("unknown {what} `{name}`: write `{first}:`, with a colon before its options");
    }
    if expected.is_empty() {
        return format!("unknown {what} `{name}`: no options are accepted here");
    }
    match suggestion(name, expected.iter().copied()) {
        Some(near) => format!("unknown {what} `{name}`, did you mean `{near}`? E{LIST}{}", quoted(expected)),
        None => format!("unknown {what} `{name}`, e{LIST}{}", quoted(expected)),
    }
}

fn quoted(names: &[&str]) -> String {
    names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn examples_are_those_of_a_recipe_or_of_a_command() {
        assert_eq!(example_of("masking").unwrap(), "masking: { fraction: 0.15 }");
        assert_eq!(argument_of("checkpoint_every").unwrap(), "--checkpoint-every \"{ minutes: 10 }\"");
        assert_eq!(argument_of("groups").unwrap(), "--groups \"{ targets: ['*.bias'], learning_rate: 0.001 }\"");
        assert_eq!(argument_of("optimizer").unwrap(), "--optimizer adamw");
        assert!(example_of("epochs").is_none() && argument_of("epochs").is_none());
    }

    #[test]
    fn unknown_keys_are_compared_with_those_that_exist() {
        assert_eq!(unknown("key", "foo", &["bar"]), "unknown key `foo`, expected one of `bar`");
        assert_eq!(unknown("key", "foo", &[]), "unknown key `foo`: no options are accepted here");
    }
}
