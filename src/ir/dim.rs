//! Sizes that may not be known before a model runs.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A size: a number, a name, or what a window makes of another size.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Dim {
    /// Known.
    Fixed(usize),
    /// Known when the model runs: `batch`, `sequence`, `height`.
    Named(String),
    /// `floor((of + offset) / stride) + 1`: positions of a sliding window.
    Window {
        /// The size that is slid over.
        of: Box<Dim>,
        /// Padding on both sides less the extent of the window.
        offset: i64,
        /// Step.
        stride: usize,
    },
}

/// `floor((size + offset) / stride) + 1`, where that is a size.
fn positions(size: usize, offset: i64, stride: usize) -> Option<usize> {
    let room = usize::try_from(i64::try_from(size).ok()?.checked_add(offset)?).ok()?;
    (room / stride.max(1)).checked_add(1)
}

/// Values of named sizes.
pub type Bindings = BTreeMap<String, usize>;

impl Dim {
    /// A name.
    pub fn named(name: &str) -> Dim {
        Dim::Named(name.to_owned())
    }

    /// The number, when it is known.
    pub fn fixed(&self) -> Option<usize> {
        if let Dim::Fixed(size) = self { Some(*size) } else { None }
    }

    /// Two axes in one.
    ///
    /// # Errors
    /// No memory holds as much.
    pub fn product(outer: usize, inner: usize) -> Result<Dim, String> {
        outer.checked_mul(inner).map(Dim::Fixed).ok_or_else(|| format!("{outer} times {inner} is more than any memory holds"))
    }

    /// Positions of a window of `extent` that moves by `stride` over this size with `padding` on both sides;
    /// `None` when the window does not fit.
    pub fn window(&self, extent: usize, padding: usize, stride: usize) -> Option<Dim> {
        let offset = i64::try_from(padding).ok()?.checked_mul(2)?.checked_sub(i64::try_from(extent).ok()?)?;
        match self {
            Dim::Fixed(size) => positions(*size, offset, stride).map(Dim::Fixed),
            other if offset == -1 && stride == 1 => Some(other.clone()),
            other => Some(Dim::Window { of: Box::new(other.clone()), offset, stride }),
        }
    }

    /// The number, given the named sizes.
    pub fn evaluate(&self, bindings: &Bindings) -> Option<usize> {
        match self {
            Dim::Fixed(size) => Some(*size),
            Dim::Named(name) => bindings.get(name).copied(),
            Dim::Window { of, offset, stride } => positions(of.evaluate(bindings)?, *offset, *stride),
        }
    }
}

impl From<usize> for Dim {
    fn from(size: usize) -> Dim {
        Dim::Fixed(size)
    }
}

impl fmt::Display for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Dim::Fixed(size) => write!(f, "{size}"),
            Dim::Named(name) => f.write_str(name),
            Dim::Window { of, offset, stride } => write!(f, "window({of};{offset};{stride})"),
        }
    }
}

impl FromStr for Dim {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("`{text}` is no size");
        if let Ok(size) = text.parse() {
            return Ok(Dim::Fixed(size));
        }
        if let Some(inner) = text.strip_prefix("window(").and_then(|t| t.strip_suffix(')')) {
            let mut parts = inner.rsplitn(3, ';');
            let stride = parts.next().and_then(|s| s.parse().ok()).filter(|s| *s > 0).ok_or_else(wrong)?;
            let offset = parts.next().and_then(|s| s.parse().ok()).ok_or_else(wrong)?;
            return Ok(Dim::Window { of: Box::new(parts.next().ok_or_else(wrong)?.parse()?), offset, stride });
        }
        let name = !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') && !text.starts_with(|c: char| c.is_ascii_digit());
        if name { Ok(Dim::named(text)) } else { Err(wrong()) }
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
            serde_json::Value::Number(n) => n.as_u64().map(|n| Dim::Fixed(n as usize)).ok_or_else(|| serde::de::Error::custom(format!("{n} is no size"))),
            serde_json::Value::String(text) => text.parse().map_err(serde::de::Error::custom),
            other => Err(serde::de::Error::custom(format!("{other} is no size"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_slide_and_text_comes_back() {
        let height = Dim::named("height");
        assert_eq!(height.window(3, 1, 1), Some(height.clone()));
        let half = height.window(7, 3, 2).unwrap();
        assert_eq!(half, height.window(1, 0, 2).unwrap());
        assert_eq!(half.evaluate(&Bindings::from([("height".into(), 224)])), Some(112));
        let nested = half.window(3, 1, 2).unwrap();
        assert_eq!(nested.to_string().parse::<Dim>().unwrap(), nested);
        assert_eq!(Dim::Fixed(32).window(3, 0, 1), Some(Dim::Fixed(30)));
        assert_eq!(Dim::Fixed(2).window(3, 0, 1), None);
    }
}
