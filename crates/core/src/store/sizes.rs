//! Byte sizes with units, and values of dynamic dimensions.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::error::ParseError;

/// A number of bytes, written `5GB`, `500 MB`, `2GiB` or as a plain number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ByteSize(pub u64);

const UNITS: [(&str, u64); 9] = [
    ("TB", 1_000_000_000_000),
    ("GB", 1_000_000_000),
    ("MB", 1_000_000),
    ("KB", 1_000),
    ("TiB", 1 << 40),
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
    ("B", 1),
];

/// Smaller numbers without a unit are rejected: they are more likely meant as gigabytes than as bytes.
const SMALLEST: f64 = 1000.0;

impl FromStr for ByteSize {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        let wrong = || ParseError::from(format!("`{text}` is not a size like 5GB, 500MB or 2GiB"));
        let text_trimmed = text.trim();
        let digits = text_trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text_trimmed.len());
        let (number, unit) = text_trimmed.split_at(digits);
        let factor = match unit.trim() {
            "" if number.parse::<f64>().is_ok_and(|bytes| (1.0..SMALLEST).contains(&bytes)) => {
                return Err(format!("`{text}` needs a unit: write {number}GB, {number}MB, or {number}B for bytes").into());
            }
            "" => 1,
            unit => UNITS.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit)).ok_or_else(wrong)?.1,
        };
        // Integers are parsed exactly, so that the output of `Display` is parsed to the same size.
        if let Ok(number) = number.parse::<u64>() {
            return number.checked_mul(factor).filter(|bytes| *bytes > 0).map(ByteSize).ok_or_else(wrong);
        }
        let bytes = number.parse::<f64>().map_err(|_| wrong())? * factor as f64;
        if (1.0..=1e18).contains(&bytes) { Ok(ByteSize(bytes as u64)) } else { Err(wrong()) }
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match UNITS.iter().find(|(_, factor)| self.0.is_multiple_of(*factor)) {
            Some((unit, factor)) => write!(f, "{}{unit}", self.0 / factor),
            None => write!(f, "{}", self.0),
        }
    }
}

impl Serialize for ByteSize {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for ByteSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Size;
        impl Visitor<'_> for Size {
            type Value = ByteSize;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a size like 5GB, 500MB or 2GiB")
            }

            fn visit_u64<E: de::Error>(self, value: u64) -> Result<ByteSize, E> {
                self.visit_str(&value.to_string())
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<ByteSize, E> {
                text.parse().map_err(E::custom)
            }
        }
        deserializer.deserialize_any(Size)
    }
}

#[cfg(feature = "cli")]
impl schemars::JsonSchema for ByteSize {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "ByteSize".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({ "type": ["string", "integer"], "description": "bytes, or a size like 5GB, 500MB, 2GiB" })
    }
}

/// Values of dynamic dimensions by name: one size, the shape of an input, or the value with which a
/// scalar input is run.
pub type OpenSizes = BTreeMap<String, OpenSize>;

/// Value of a dynamic dimension, written `128`, or the shape of an input, written `1x512`, or `[1, 512]`
/// in a recipe.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(untagged, expecting = "a size like 128, or a shape like [1, 512]")]
pub enum OpenSize {
    /// A single size.
    One(usize),
    /// A complete shape.
    All(Vec<usize>),
}

impl fmt::Display for OpenSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sizes = match self {
            OpenSize::One(size) => std::slice::from_ref(size),
            OpenSize::All(sizes) => sizes,
        };
        f.write_str(&sizes.iter().map(usize::to_string).collect::<Vec<_>>().join("x"))
    }
}

impl FromStr for OpenSize {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        let size = |part: &str| part.trim().parse::<usize>().map_err(|_| format!("`{text}` is neither a size like 128 nor a shape like 1x512"));
        let sizes = text.split('x').map(size).collect::<Result<Vec<_>, _>>()?;
        Ok(match sizes.as_slice() {
            [one] => OpenSize::One(*one),
            _ => OpenSize::All(sizes),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_round_trips() {
        for (text, bytes) in [("5GB", 5_000_000_000), ("500 mb", 500_000_000), ("2GiB", 2 << 30), ("1.5KiB", 1536), ("77B", 77), ("7700", 7700)] {
            assert_eq!(text.parse::<ByteSize>().unwrap().0, bytes);
        }
        assert_eq!(ByteSize(5_000_000_000).to_string(), "5GB");
        assert_eq!(ByteSize(1536).to_string(), "1536B");
        for bytes in [1, (1 << 53) + 1, u64::MAX - 1, u64::MAX] {
            assert_eq!(ByteSize(bytes).to_string().parse(), Ok(ByteSize(bytes)));
        }
        assert!("18446744073709551616".parse::<ByteSize>().is_err() && "18446744073709551615KB".parse::<ByteSize>().is_err());
        for text in ["", "GB", "-1", "0", "77", "5XB", "1e99GB", "nan"] {
            assert!(text.parse::<ByteSize>().is_err(), "{text}");
        }
    }
}
