//! Values as in Python.

use minijinja::value::{Kwargs, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, Value};
use minijinja_contrib::pycompat::unknown_method_callback;

use super::memory::{Text, require_depth};

/// Writes a value like `str` of Python.
pub(super) fn write_text(out: &mut Text, value: &Value) -> Result<(), Error> {
    match value.kind() {
        ValueKind::String => out.push(value.as_str().unwrap_or_default()),
        ValueKind::Undefined => Ok(()),
        _ => write_repr(out, value, 0),
    }
}

/// Writes a value like `repr` of Python.
fn write_repr(out: &mut Text, value: &Value, depth: usize) -> Result<(), Error> {
    let inner = require_depth(depth)?;
    let (open, close) = match value.kind() {
        ValueKind::Map => ("{", "}"),
        ValueKind::Seq | ValueKind::Iterable if value.is_tuple() => ("(", if value.len() == Some(1) { ",)" } else { ")" }),
        ValueKind::Seq | ValueKind::Iterable => ("[", "]"),
        ValueKind::String => return out.push(&format!("{value:?}")),
        ValueKind::Undefined => return out.push("Undefined"),
        ValueKind::Number => return out.push(&number(value)),
        ValueKind::Invalid => return Err(Error::new(ErrorKind::InvalidOperation, value.to_string())),
        _ => return out.push(&value.to_string()),
    };
    out.push(open)?;
    for (index, item) in value.try_iter()?.enumerate() {
        out.push(if index > 0 { ", " } else { "" })?;
        write_repr(out, &item, inner)?;
        if open == "{" {
            out.push(": ")?;
            write_repr(out, &value.get_item(&item)?, inner)?;
        }
    }
    out.push(close)
}

/// The text of a number.
pub(super) fn number(value: &Value) -> String {
    let Some(float) = f64::try_from(value.clone()).ok().filter(|_| !value.is_integer()) else { return value.to_string() };
    // Python and Rust write exponents for the same numbers.
    let text = format!("{float:?}").to_lowercase();
    let Some((mantissa, exponent)) = text.split_once('e') else { return text };
    let (sign, digits) = exponent.strip_prefix('-').map_or(('+', exponent), |digits| ('-', digits));
    format!("{mantissa}e{sign}{digits:0>2}")
}

/// The test `sequence` of Jinja2.
pub(super) fn is_sequence(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::String | ValueKind::Map | ValueKind::Undefined)
}

/// A text with HTML entities, as in MarkupSafe.
pub(super) fn escape(text: &str) -> Value {
    let entities = [('&', "&amp;"), ('<', "&lt;"), ('>', "&gt;"), ('"', "&#34;"), ('\'', "&#39;")];
    Value::from_safe_string(entities.into_iter().fold(text.to_owned(), |text, (letter, entity)| text.replace(letter, entity)))
}

/// Calls a method of a value that the engine does not have.
pub(super) fn call_method(state: &mut State, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    let Some(text) = value.as_str() else { return unknown_method_callback(state, value, method, args) };
    let index = |found: Option<usize>| {
        let before = found.and_then(|at| text.get(..at)).ok_or_else(|| Error::new(ErrorKind::InvalidOperation, "substring not found"))?;
        Ok(Value::from(before.chars().count()))
    };
    match method {
        "index" => index(text.find(from_args::<(&str,)>(args)?.0)),
        "rindex" => index(text.rfind(from_args::<(&str,)>(args)?.0)),
        "removeprefix" => Ok(text.strip_prefix(from_args::<(&str,)>(args)?.0).unwrap_or(text).into()),
        "removesuffix" => Ok(text.strip_suffix(from_args::<(&str,)>(args)?.0).unwrap_or(text).into()),
        "rsplit" => {
            let (positional, named): (&[Value], Kwargs) = from_args(args)?;
            let (separator, limit): (Option<&str>, Option<i64>) = from_args(positional)?;
            let separator = separator.map_or_else(|| named.get("sep"), |separator| Ok(Some(separator)))?;
            let limit = limit.map_or_else(|| named.get("maxsplit"), |limit| Ok(Some(limit)))?;
            named.assert_all_used()?;
            if separator == Some("") {
                return Err(Error::new(ErrorKind::InvalidOperation, "empty separator"));
            }
            Ok(split_from_end(text, separator, limit.and_then(|limit| usize::try_from(limit).ok())).into())
        }
        _ => unknown_method_callback(state, value, method, args),
    }
}

fn split_from_end(text: &str, separator: Option<&str>, limit: Option<usize>) -> Vec<Value> {
    let (mut parts, mut rest) = (Vec::new(), text);
    while limit.is_none_or(|limit| parts.len() < limit) {
        rest = if separator.is_none() { rest.trim_end() } else { rest };
        let Some((before, part)) = separator.map_or_else(|| rest.rsplit_once(char::is_whitespace), |separator| rest.rsplit_once(separator)) else { break };
        parts.push(Value::from(part));
        rest = before;
    }
    rest = if separator.is_none() { rest.trim_end() } else { rest };
    parts.extend(Some(rest).filter(|rest| separator.is_some() || !rest.is_empty()).map(Value::from));
    parts.reverse();
    parts
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
    fn texts_are_those_of_jinja2() {
        for (template, expected) in [
            ("{{ 1e20 }} {{ 1e-7 }} {{ 1.5e-5 }} {{ 1e16 }} {{ 1e15 }} {{ -0.0 }}", "1e+20 1e-07 1.5e-05 1e+16 1000000000000000.0 -0.0"),
            ("{{ [1e20, {'a': 1e-7}, (1e16,), (1, 'b'), none, true] }}", "[1e+20, {'a': 1e-07}, (1e+16,), (1, 'b'), None, True]"),
            ("{{ 1.0 ~ 1e20 ~ [1e-7] }} {{ 1e20|string }} {{ [1e20, 1e-7]|join(',') }}", "1.01e+20[1e-07] 1e+20 1e+20,1e-07"),
            ("{{ 'nan'|float }} {{ 1e300 * 1e300 }} {{ 2 ** 0.5 }} {{ 123456789012345678.0 }}", "nan inf 1.4142135623730951 1.2345678901234568e+17"),
            ("{{ [1e20, 1.5e-5, 'inf'|float, 'nan'|float, 100000.0]|tojson }}", "[1e+20, 1.5e-05, Infinity, NaN, 100000.0]"),
            ("{{ 'a' is sequence }} {{ {} is sequence }} {{ [] is sequence }} {{ (1,) is sequence }}", "True True True True"),
            ("{{ x is sequence }} {{ 1 is sequence }} {{ none is sequence }} {{ true is sequence }}", "True False False False"),
            ("{{ ([1] + [2]) is sequence }} {{ {}.keys() is sequence }} {{ ([1] + [2])[1] }}", "True False 2"),
            ("{{ 'a-b-c'.rsplit('-', 1) }} {{ ' a b '.rsplit() }} {{ 'a b c'.rsplit(maxsplit=1) }}", "['a-b', 'c'] ['a', 'b'] ['a b', 'c']"),
            ("{{ ' a b '.rsplit(none, 1) }} {{ ''.rsplit() }} {{ ''.rsplit('-') }} {{ 'a-b'.rsplit('-', 0) }}", "[' a', 'b'] [] [''] ['a-b']"),
            ("{{ 'aéc'.index('c') }} {{ 'cac'.rindex('c') }} {{ 'abc'.removeprefix('a') }} {{ 'abc'.removesuffix('c') }}", "2 2 bc ab"),
            ("{{ '%s|%s' % ('a', none) }} {{ '%s' % 'a' }} {{ '%d-%s' % (3, [1]) }} {{ 7 % 3 }} {{ '%5.2f' % 1.5 }}", "a|None a 3-[1] 1  1.50"),
            ("{{ 'a<b>\"\\'/&'|e }} {{ ('<'|e)|e }} {{ 'a'|e ~ '<' }}", "a&lt;b&gt;&#34;&#39;/&amp; &lt; a<"),
        ] {
            assert_eq!(rendered(template).unwrap(), expected, "{template}");
        }
    }

    #[test]
    fn other_semantics_are_refused() {
        for template in [
            "{{ 'a'.index('b') }}",
            "{{ 'a'.rsplit('') }}",
            // The engine formats these differently, or does not escape the other operand.
            "{{ '%s' % 1e20 }}",
            "{{ '%s' | format([1e-7]) }}",
            "{{ '{}'.format(1e20) }}",
            "{{ 'a' % 3 }}",
            "{{ '%(a)s' % {'a': 1} }}",
            "{{ ('a'|e) + '<' }}",
            "{{ '<' + ('a'|safe) }}",
        ] {
            assert!(rendered(template).is_err(), "{template}");
        }
    }
}
