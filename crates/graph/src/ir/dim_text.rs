//! Text form of sizes, which parses back: `batch`, `2*batch*height+1`, `window(height;-3;2)`.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::Dim;
use super::dim::{Terms, product};
use crate::error::ParseError;

/// Maximum number of parentheses in the text of a size.
const MAX_PARENTHESES: usize = 256;

impl fmt::Display for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Dim::Fixed(size) => write!(f, "{size}"),
            Dim::Named(name) => f.write_str(name),
            Dim::Window { of, offset, stride } => write!(f, "window({of};{offset};{stride})"),
            Dim::Quotient(of, by) => write!(f, "quotient({of};{by})"),
            Dim::Broadcast(a, b) => write!(f, "broadcast({a};{b})"),
            Dim::Sum(terms) => terms.iter().enumerate().try_for_each(|(index, (count, product))| {
                let sign = if *count < 0 { "-" } else { "+" };
                f.write_str(if index == 0 && *count > 0 { "" } else { sign })?;
                let count = Some(count.unsigned_abs()).filter(|count| *count != 1 || product.is_empty());
                let factors = count.iter().map(ToString::to_string).chain(product.iter().map(ToString::to_string));
                f.write_str(&factors.collect::<Vec<_>>().join("*"))
            }),
        }
    }
}

impl FromStr for Dim {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        let invalid = || format!("`{text}` is not a size");
        if let Ok(size) = text.parse() {
            return Ok(Dim::Fixed(size));
        }
        if text.matches('(').count() > MAX_PARENTHESES {
            return Err(format!("a size has more than {MAX_PARENTHESES} parentheses").into());
        }
        let mut terms = split(text, &['+', '-']);
        if terms.first().is_some_and(|(_, first)| first.is_empty()) && terms.len() > 1 {
            terms.remove(0);
        }
        let mut sum = Terms::new();
        for (sign, term) in &terms {
            let mut all = Terms::from([(Vec::new(), if *sign == '-' { -1 } else { 1 })]);
            for (_, factor) in split(term, &['*']) {
                let factor = if terms.len() == 1 && factor.len() == text.len() { atom(factor)? } else { factor.parse()? };
                all = product(&all, &factor.terms_or_atom().ok_or_else(invalid)?).ok_or_else(invalid)?;
            }
            for (product, count) in all {
                let entry = sum.entry(product).or_default();
                *entry = entry.checked_add(count).ok_or_else(invalid)?;
            }
        }
        Ok(Dim::of_terms(sum).ok_or_else(invalid)?)
    }
}

/// Splits at signs outside of parentheses; each part has the sign that precedes it.
fn split<'t>(text: &'t str, signs: &[char]) -> Vec<(char, &'t str)> {
    let (mut parts, mut depth, mut sign, mut start) = (Vec::new(), 0usize, '+', 0);
    for (at, c) in text.char_indices() {
        match c {
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            c if depth == 0 && signs.contains(&c) => {
                parts.push((sign, &text[start..at]));
                (sign, start) = (c, at + 1);
            }
            _ => {}
        }
    }
    parts.push((sign, &text[start..]));
    parts
}

/// Parses a name or a function call.
fn atom(text: &str) -> Result<Dim, ParseError> {
    let invalid = || format!("`{text}` is not a size");
    let Some((name, inner)) = text.strip_suffix(')').and_then(|text| text.split_once('(')) else {
        let name = !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') && !text.starts_with(|c: char| c.is_ascii_digit());
        return if name { Ok(Dim::named(text)) } else { Err(invalid().into()) };
    };
    let parts: Vec<&str> = split(inner, &[';']).into_iter().map(|(_, part)| part).collect();
    match (name, parts.as_slice()) {
        ("window", [of, offset, stride]) => {
            let stride = stride.parse().ok().filter(|s| *s > 0).ok_or_else(invalid)?;
            Ok(Dim::Window { of: Box::new(of.parse()?), offset: offset.parse().map_err(|_| invalid())?, stride })
        }
        ("quotient", [of, by]) => Ok(Dim::Quotient(Box::new(of.parse()?), Box::new(by.parse()?))),
        ("broadcast", [a, b]) => Ok(Dim::Broadcast(Box::new(a.parse()?), Box::new(b.parse()?))),
        _ => Err(invalid().into()),
    }
}

impl Serialize for Dim {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Dim::Fixed(size) => serializer.serialize_u64(*size as u64),
            other => serializer.collect_str(other),
        }
    }
}

impl<'de> Deserialize<'de> for Dim {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match serde_json::Value::deserialize(deserializer)? {
            serde_json::Value::Number(n) => n.as_u64().map(|n| Dim::Fixed(n as usize)).ok_or_else(|| serde::de::Error::custom(format!("{n} is not a size"))),
            serde_json::Value::String(text) => text.parse().map_err(serde::de::Error::custom),
            other => Err(serde::de::Error::custom(format!("{other} is not a size"))),
        }
    }
}
