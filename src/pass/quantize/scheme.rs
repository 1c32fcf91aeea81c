//! Schemes by the names that compressed-tensors and vLLM know them by.

use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, de::Error as _};

use crate::store::{ActivationScheme, Affine, Codes, DType, Granularity, Weight};

/// What weights and activations become. Names may be written in small letters, and with `_` for `-`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum, schemars::JsonSchema))]
pub enum Scheme {
    /// Weights int4 in groups of 128, symmetric; activations stay floats
    #[default]
    #[serde(rename = "W4A16")]
    #[cfg_attr(feature = "cli", value(name = "W4A16"))]
    W4A16,
    /// Weights int4 in groups of 128 with zero points; activations stay floats
    #[serde(rename = "W4A16-ASYM")]
    #[cfg_attr(feature = "cli", value(name = "W4A16-ASYM", alias = "W4A16_ASYM"))]
    W4A16Asym,
    /// Weights int8 in groups of 128, symmetric; activations stay floats
    #[serde(rename = "W8A16")]
    #[cfg_attr(feature = "cli", value(name = "W8A16"))]
    W8A16,
    /// Weights int8 with a scale for each output; activations int8 with a scale for each token, found while running
    #[serde(rename = "W8A8")]
    #[cfg_attr(feature = "cli", value(name = "W8A8", alias = "INT8"))]
    W8A8,
}

/// All schemes, by name.
const ALL: [(&str, Scheme); 5] =
    [("W4A16", Scheme::W4A16), ("W4A16-ASYM", Scheme::W4A16Asym), ("W8A16", Scheme::W8A16), ("W8A8", Scheme::W8A8), ("INT8", Scheme::W8A8)];

impl FromStr for Scheme {
    type Err = String;

    fn from_str(text: &str) -> Result<Scheme, String> {
        let name = text.to_uppercase().replace('_', "-");
        let found = ALL.into_iter().find(|(known, _)| *known == name).map(|(_, scheme)| scheme);
        found.ok_or_else(|| format!("`{text}` is none of the schemes {}", ALL.map(|(name, _)| name).join(", ")))
    }
}

impl<'de> Deserialize<'de> for Scheme {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Scheme, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

impl Scheme {
    /// What the codes of weights are.
    pub fn codes(self) -> Codes {
        match self {
            Scheme::W4A16 | Scheme::W4A16Asym => Codes::Integer(4),
            Scheme::W8A16 | Scheme::W8A8 => Codes::INT8,
        }
    }

    /// Inputs that share a scale unless `group_size` says otherwise; nothing where consumers know scales for whole outputs only.
    pub(super) fn group(self) -> Option<usize> {
        match self {
            Scheme::W4A16 | Scheme::W4A16Asym | Scheme::W8A16 => Some(128),
            Scheme::W8A8 => None,
        }
    }

    /// How a weight is encoded whose scales are shared like this.
    pub(super) fn affine(self, weight: &Weight, granularity: Granularity) -> Affine {
        Affine {
            codes: self.codes(),
            granularity,
            symmetric: self != Scheme::W4A16Asym,
            scale_dtype: if weight.dtype == DType::F64 { DType::F32 } else { weight.dtype },
            activations: if self == Scheme::W8A8 { ActivationScheme::DynamicToken } else { ActivationScheme::None },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_may_be_written_as_presets_are() {
        for (text, scheme) in [("w4a16", Scheme::W4A16), ("W4A16_ASYM", Scheme::W4A16Asym), ("w4a16-asym", Scheme::W4A16Asym), ("int8", Scheme::W8A8)] {
            assert_eq!(text.parse(), Ok(scheme));
        }
        assert!("W3A3".parse::<Scheme>().unwrap_err().contains("W4A16-ASYM"));
        for (_, scheme) in ALL {
            assert_eq!(serde_json::from_value::<Scheme>(serde_json::to_value(scheme).unwrap()).unwrap(), scheme);
        }
    }
}
