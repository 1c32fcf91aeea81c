//! Numbers that Python writes to JSON files, but that JSON does not have.

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

/// The numbers. The negative one contains another one, and precedes it.
const NUMBERS: [&str; 3] = ["-Infinity", "Infinity", "NaN"];
/// Key of the objects that transformers 5 writes for them.
const FLOAT: &str = "__float__";

/// Parses the text of `config.json` or a similar file like [`parse_json`].
pub fn parse_config(text: &str) -> serde_json::Result<Map<String, Value>> {
    parse_json(text)
}

/// Parses the text of a file that Python writes and reads. A number that JSON does not have becomes the
/// object that transformers 5 writes for it, such as `{"__float__": "Infinity"}`.
pub fn parse_json<T: DeserializeOwned>(text: &str) -> serde_json::Result<T> {
    serde_json::from_str(text).or_else(|e| replaced(text).map_or(Err(e), |text| serde_json::from_str(&text)))
}

/// The text of a file that Python reads without the objects that transformers 5 defines: its numbers are
/// written as Python writes them.
pub fn render_python(value: &Value) -> String {
    let text = format!("{:#}\n", marked(value));
    NUMBERS.into_iter().fold(text, |text, number| text.replace(&Value::from(mark(number)).to_string(), number))
}

/// A text in place of a number, without the names of the other numbers at its ends.
fn mark(number: &str) -> String {
    format!("{FLOAT}:{number}:")
}

/// The value with marks for the objects that transformers 5 writes for numbers.
fn marked(value: &Value) -> Value {
    let number = |object: &Map<String, Value>| object.get(FLOAT).filter(|_| object.len() == 1)?.as_str().filter(|number| NUMBERS.contains(number)).map(mark);
    match value {
        Value::Object(object) => number(object).map_or_else(|| object.iter().map(|(key, value)| (key.clone(), marked(value))).collect(), Value::from),
        Value::Array(list) => list.iter().map(marked).collect(),
        other => other.clone(),
    }
}

/// The text with the objects that transformers 5 writes for these numbers; `None` if it has none of them.
fn replaced(text: &str) -> Option<String> {
    let (mut standard, mut rest) = (String::with_capacity(text.len()), text);
    let (mut is_string, mut is_escaped, mut found) = (false, false, false);
    while let Some(next) = rest.chars().next() {
        if let Some(number) = NUMBERS.into_iter().find(|number| !is_string && rest.starts_with(number)) {
            standard.push_str(&format!("{{\"{FLOAT}\": \"{number}\"}}"));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_written_as_python_writes_them() {
        let text = r#"{"a": Infinity, "b": [-Infinity, NaN, 1.5], "c": {"d": "Infinity"}}"#;
        let value: Value = parse_json(text).unwrap();
        assert_eq!(value["b"][1][FLOAT], "NaN");
        let written = render_python(&value);
        assert_eq!(written.split_whitespace().collect::<String>(), r#"{"a":Infinity,"b":[-Infinity,NaN,1.5],"c":{"d":"Infinity"}}"#);
        assert_eq!(parse_json::<Value>(&written).unwrap(), value);
    }
}
