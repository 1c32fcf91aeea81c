//! Values as in Python.

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, Value};

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
