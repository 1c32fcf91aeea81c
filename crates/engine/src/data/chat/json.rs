//! The filter `tojson` of transformers, which is `json.dumps` of Python.

use minijinja::value::{Kwargs, Rest, ValueKind, ValueOrKwargs, from_args};
use minijinja::{Error, ErrorKind, Value};

use super::memory::{Memory, Text, require_depth};
use super::python::number;

/// Arguments of the filter.
const ARGUMENTS: [&str; 4] = ["ensure_ascii", "indent", "separators", "sort_keys"];
/// Maximum number of blanks per level.
const WIDTH: i64 = 1 << 12;

/// Options of `json.dumps`.
struct Style {
    is_ascii: bool,
    indent: Option<String>,
    separators: [String; 2],
    has_sorted_keys: bool,
}

/// Serializes a value.
pub(super) fn to_json(memory: &Memory, value: &Value, args: Rest<ValueOrKwargs>) -> Result<String, Error> {
    let args = args.into_values();
    let (positional, named): (&[Value], Kwargs) = from_args(&args)?;
    if positional.len() > ARGUMENTS.len() {
        return Err(ErrorKind::TooManyArguments.into());
    }
    let mut positional = positional.iter();
    let mut next = |name: &str| positional.next().map_or_else(|| named.get::<Option<Value>>(name).map(Option::unwrap_or_default), |value| Ok(value.clone()));
    let [ascii, indent, separators, sorted] = ARGUMENTS.map(&mut next);
    named.assert_all_used()?;
    let (indent, separators) = (indent_of(&indent?)?, separators?);
    let separators = if separators.is_none() || separators.is_undefined() {
        [if indent.is_some() { "," } else { ", " }, ": "].map(str::to_owned)
    } else {
        let texts = separators.try_iter()?.map(|text| text.as_str().map(str::to_owned)).collect::<Option<Vec<_>>>();
        texts.and_then(|texts| texts.try_into().ok()).ok_or_else(|| wrong("`separators` must be two strings"))?
    };
    let style = Style { is_ascii: ascii?.is_true(), indent, separators, has_sorted_keys: sorted?.is_true() };
    let mut out = Text::new(memory);
    style.write(&mut out, value, 0)?;
    Ok(out.text)
}

fn wrong(what: &str) -> Error {
    Error::new(ErrorKind::BadSerialization, what.to_owned())
}

fn indent_of(indent: &Value) -> Result<Option<String>, Error> {
    if indent.is_none() || indent.is_undefined() {
        return Ok(None);
    }
    let width = i64::try_from(indent.clone()).ok().filter(|width| *width <= WIDTH);
    let blanks = width.map(|width| " ".repeat(usize::try_from(width).unwrap_or(0)));
    let text = indent.as_str().map(str::to_owned).or(blanks);
    text.map(Some).ok_or_else(|| wrong("`indent` must be a string or at most 4096"))
}

impl Style {
    fn write(&self, out: &mut Text, value: &Value, depth: usize) -> Result<(), Error> {
        let inner = require_depth(depth)?;
        let (open, close) = match value.kind() {
            ValueKind::Map => ("{", "}"),
            ValueKind::Seq | ValueKind::Iterable => ("[", "]"),
            ValueKind::String => return self.write_string(out, value.as_str().unwrap_or_default()),
            _ => return out.push(&scalar(value)?),
        };
        let mut items: Vec<Value> = value.try_iter()?.collect();
        if self.has_sorted_keys && open == "{" {
            if items.windows(2).any(|pair| matches!(pair, [a, b] if a.kind() != b.kind())) {
                return Err(wrong("keys of different types cannot be sorted"));
            }
            items.sort();
        }
        let [between, after_key] = &self.separators;
        out.push(open)?;
        for (index, item) in items.iter().enumerate() {
            out.push(if index > 0 { between } else { "" })?;
            self.break_line(out, inner)?;
            if open == "[" {
                self.write(out, item, inner)?;
                continue;
            }
            self.write_string(out, &item.as_str().map_or_else(|| scalar(item), |key| Ok(key.to_owned()))?)?;
            out.push(after_key)?;
            self.write(out, &value.get_item(item)?, inner)?;
        }
        if !items.is_empty() {
            self.break_line(out, depth)?;
        }
        out.push(close)
    }

    fn break_line(&self, out: &mut Text, depth: usize) -> Result<(), Error> {
        let Some(indent) = &self.indent else { return Ok(()) };
        out.push("\n")?;
        (0..depth).try_for_each(|_| out.push(indent))
    }

    fn write_string(&self, out: &mut Text, text: &str) -> Result<(), Error> {
        out.push("\"")?;
        let mut units = [0; 2];
        for letter in text.chars() {
            match letter {
                '"' => out.push("\\\"")?,
                '\\' => out.push("\\\\")?,
                '\n' => out.push("\\n")?,
                '\r' => out.push("\\r")?,
                '\t' => out.push("\\t")?,
                '\u{8}' => out.push("\\b")?,
                '\u{c}' => out.push("\\f")?,
                letter if letter < ' ' || (self.is_ascii && letter > '~') => {
                    letter.encode_utf16(&mut units).iter().try_for_each(|unit| out.push(&format!("\\u{unit:04x}")))?;
                }
                letter => out.push(letter.encode_utf8(&mut [0; 4]))?,
            }
        }
        out.push("\"")
    }
}

/// The text of a value other than strings, lists and mappings.
fn scalar(value: &Value) -> Result<String, Error> {
    match value.kind() {
        ValueKind::None => Ok("null".to_owned()),
        ValueKind::Bool => Ok(value.is_true().to_string()),
        ValueKind::Number => Ok(number(value).replace("inf", "Infinity").replace("nan", "NaN")),
        kind => Err(wrong(&format!("a value of the type `{kind}` is not JSON serializable"))),
    }
}

#[cfg(test)]
mod tests {
    use minijinja::{Error, Value};

    use super::super::environment::{environment, render};
    use super::super::memory::Memory;

    fn rendered(text: &str) -> Result<String, Error> {
        render(&environment(&Memory::default()), text, Value::UNDEFINED)
    }

    /// The texts of transformers 5.17.
    #[test]
    fn texts_are_those_of_transformers() {
        for (template, expected) in [
            ("{{ {'b': [1, 2], 'a': 'é<🙂\x7f\x0b'}|tojson(ensure_ascii=true) }}", r#"{"b": [1, 2], "a": "\u00e9<\ud83d\ude42\u007f\u000b"}"#),
            ("{{ 'é\x7f\\'\\\"\\\\\\t'|tojson(ensure_ascii=False) }}", "\"é\x7f'\\\"\\\\\\t\""),
            ("{{ [1, {'a': 2}]|tojson(separators=(',', ':')) }}", r#"[1,{"a":2}]"#),
            ("{{ [1, {'a': []}]|tojson(separators=(',',':'), indent=1) }}", "[\n 1,\n {\n  \"a\":[]\n }\n]"),
            ("{{ [1, {'b': {}}]|tojson(indent=20) }}", &format!("[\n{0}1,\n{0}{{\n{0}{0}\"b\": {{}}\n{0}}}\n]", " ".repeat(20))),
            ("{{ [1, [2]]|tojson(indent='--') }}", "[\n--1,\n--[\n----2\n--]\n]"),
            ("{{ [1, [2]]|tojson(indent=-1) }}", "[\n1,\n[\n2\n]\n]"),
            ("{{ [1]|tojson(False, 2) }}", "[\n  1\n]"),
            ("{{ ['é', 2]|tojson(true, none, [';', '=']) }}", "[\"\\u00e9\";2]"),
            ("{{ {'b': 1, 'a': {'d': 1, 'c': 2}}|tojson(sort_keys=true) }}", r#"{"a": {"c": 2, "d": 1}, "b": 1}"#),
            // Not in one dictionary: 1 and `true` are the same key in Python, and in minijinja by chance.
            ("{{ {1: 2, none: 3}|tojson }}", r#"{"1": 2, "null": 3}"#),
            ("{{ {none: 3, true: [false, none]}|tojson }}", r#"{"null": 3, "true": [false, null]}"#),
        ] {
            assert_eq!(rendered(template).unwrap(), expected, "{template}");
        }
        for template in [
            "{{ x|tojson }}",
            "{{ range|tojson }}",
            "{{ 1|tojson(cls=none) }}",
            "{{ 1|tojson(separators=',') }}",
            "{{ {1: 2, 'a': 3}|tojson(sort_keys=true) }}",
        ] {
            assert!(rendered(template).is_err(), "{template}");
        }
    }
}
