//! Options of the search for a structure.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::ParseError;
use crate::ratio::parse_fraction;
use crate::store::ByteSize;

/// Limit of the size of the result.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "cli", schemars(rename = "StructureLimit"))]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Limit {
    /// Fraction of the parameters of the layers that remain
    Layers(
        #[serde(deserialize_with = "crate::ratio::ratio")]
        #[cfg_attr(feature = "cli", schemars(schema_with = "crate::ratio::schema::ratio"))]
        f64,
    ),
    /// Number of parameters of the model
    Params(u64),
    /// Size of all weights of the model
    Bytes(ByteSize),
}

impl Limit {
    /// Unit of the limit.
    pub(super) fn unit(self) -> &'static str {
        if matches!(self, Limit::Bytes(_)) { "bytes" } else { "parameters" }
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Limit::Layers(fraction) => write!(f, "layers={fraction}"),
            Limit::Params(count) => write!(f, "params={count}"),
            Limit::Bytes(size) => write!(f, "bytes={size}"),
        }
    }
}

impl FromStr for Limit {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        let wrong = || ParseError::from(format!("limit `{text}` is not layers=0.5, params=12000000 or bytes=50MB"));
        let (name, value) = text.split_once('=').ok_or_else(wrong)?;
        match name.trim() {
            "layers" => parse_fraction(value).map(Limit::Layers).ok_or_else(wrong),
            "params" => value.trim().parse().map(Limit::Params).map_err(|_| wrong()),
            "bytes" => value.parse().map(Limit::Bytes),
            _ => Err(wrong()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_written_as_they_are_parsed() {
        for (text, limit) in
            [("layers=0.5", Limit::Layers(0.5)), ("params=12000000", Limit::Params(12_000_000)), ("bytes=50MB", Limit::Bytes(ByteSize(50_000_000)))]
        {
            assert_eq!((text.parse(), limit.to_string().as_str()), (Ok(limit), text));
            let json = serde_json::to_value(limit).unwrap();
            assert_eq!(serde_json::from_value::<Limit>(json).unwrap(), limit);
        }
        assert_eq!("layers=50%".parse(), Ok(Limit::Layers(0.5)));
        for text in ["layers", "layers=half", "params=1.5", "params=-1", "bytes=50", "width=2"] {
            assert!(text.parse::<Limit>().is_err(), "{text}");
        }
    }
}
