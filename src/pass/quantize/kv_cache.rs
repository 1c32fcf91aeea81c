//! The option for the quantization of the KV cache.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::ParseError;
use crate::kernel::cache::{CacheFormat, CacheScales, CacheScheme};

/// Quantization of the KV cache: a format, or a format with its scales. It is parsed from `fp8`, `int8`,
/// `fp8:head` or `int8:head`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(transparent)]
pub struct KvCache(Notation);

/// Quantization of the KV cache: a format, or a format with its scales.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "cli", schemars(inline))]
#[serde(untagged, expecting = "a format, fp8 or int8, or an object like { type: fp8, scales: head }")]
enum Notation {
    /// A format, with one scale per layer
    Format(CacheFormat),
    /// A format with its scales
    Scheme(CacheOptions),
}

/// Format and scales of a quantized KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
struct CacheOptions {
    /// Format of keys and values
    #[serde(rename = "type")]
    format: CacheFormat,
    /// Values that share a scale
    #[serde(default)]
    scales: CacheScales,
}

impl KvCache {
    pub(super) fn scheme(self) -> CacheScheme {
        match self.0 {
            Notation::Format(format) => CacheScheme { format, ..CacheScheme::default() },
            Notation::Scheme(CacheOptions { format, scales }) => CacheScheme { format, scales },
        }
    }
}

impl FromStr for KvCache {
    type Err = ParseError;

    /// Parses `fp8`, `fp8:head`, or an object like that of a recipe.
    fn from_str(text: &str) -> Result<Self, ParseError> {
        let text = match text.split_once(':') {
            Some((format, scales)) if !text.starts_with('{') => format!("{{ type: {format}, scales: {scales} }}"),
            _ => text.to_owned(),
        };
        serde_saphyr::from_str(&text).map_err(|_| format!("`{text}` is not a cache: use fp8 or int8, or fp8:head for a scale per head").into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cache_is_a_format_with_optional_scales() {
        let parse = |text: &str| text.parse::<KvCache>();
        let head = CacheScheme { format: CacheFormat::Fp8, scales: CacheScales::Head };
        assert_eq!(parse("int8").unwrap().scheme(), CacheScheme { format: CacheFormat::Int8, scales: CacheScales::Tensor });
        for text in ["fp8:head", "{type: fp8, scales: head}", "{ type: fp8, scales: head }"] {
            assert_eq!(parse(text).unwrap().scheme(), head, "{text}");
        }
        for text in ["fp4", "fp8:row", "{type: fp8, scale: head}"] {
            assert!(parse(text).unwrap_err().to_string().contains("fp8:head"), "{text}");
        }
    }
}
