//! Numbers that Python writes to JSON files, but that JSON does not have.

use serde_json::{Map, Value};

/// The numbers. The negative one contains another one, and precedes it.
const NUMBERS: [&str; 3] = ["-Infinity", "Infinity", "NaN"];

/// Parses the text of `config.json` or a similar file. A number that JSON does not have becomes the object
/// that transformers 5 writes for it, such as `{"__float__": "Infinity"}`.
pub fn parse_config(text: &str) -> serde_json::Result<Map<String, Value>> {
    serde_json::from_str(text).or_else(|e| replaced(text).map_or(Err(e), |text| serde_json::from_str(&text)))
}

/// The text with the objects that transformers 5 writes for these numbers; `None` if it has none of them.
fn replaced(text: &str) -> Option<String> {
    let (mut standard, mut rest) = (String::with_capacity(text.len()), text);
    let (mut is_string, mut is_escaped, mut found) = (false, false, false);
    while let Some(next) = rest.chars().next() {
        if let Some(number) = NUMBERS.into_iter().find(|number| !is_string && rest.starts_with(number)) {
            standard.push_str(&format!("{{\"__float__\": \"{number}\"}}"));
            rest = rest.strip_prefix(number).unwrap_or_default();
            found = true;
            continue;
        }
        (is_string, is_escaped) = match next {
            '"' if !is_escaped => (!is_string, false),
            '\\' if is_string => (true, !is_escaped),
            _ => (is_string, false),
        };
        standard.push(next);
        rest = rest.strip_prefix(next).unwrap_or_default();
    }
    found.then_some(standard)
}
