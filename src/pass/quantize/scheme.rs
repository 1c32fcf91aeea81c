//! Quantization schemes, named as in compressed-tensors and vLLM.

use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, de::Error as _};

use crate::store::{ActivationScheme, Codes, DType, Granularity, QuantizationSpec, Static, Weight};

/// Quantization scheme of weights and activations. Names are case-insensitive, and `_` is equivalent to
/// `-`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum, schemars::JsonSchema))]
pub enum Scheme {
    /// Weights: int4 in groups of 128, symmetric. Activations: floats
    #[default]
    #[serde(rename = "W4A16")]
    #[cfg_attr(feature = "cli", value(name = "W4A16"))]
    W4A16,
    /// Weights: int4 in groups of 128 with zero points. Activations: floats
    #[serde(rename = "W4A16-ASYM")]
    #[cfg_attr(feature = "cli", value(name = "W4A16-ASYM", alias = "W4A16_ASYM"))]
    W4A16Asym,
    /// Weights: int8 in groups of 128, symmetric. Activations: floats
    #[serde(rename = "W8A16")]
    #[cfg_attr(feature = "cli", value(name = "W8A16"))]
    W8A16,
    /// Weights: int8 with a scale per output channel. Activations: int8 with a dynamic scale per token
    #[serde(rename = "W8A8")]
    #[cfg_attr(feature = "cli", value(name = "W8A8", alias = "INT8"))]
    W8A8,
    /// Weights: FP8 with a scale per tensor. Activations: FP8 with a static scale found on calibration
    /// samples
    #[serde(rename = "FP8")]
    #[cfg_attr(feature = "cli", value(name = "FP8"))]
    Fp8,
    /// Weights: FP8 with a scale per output channel. Activations: FP8 with a dynamic scale per token
    #[serde(rename = "FP8-DYNAMIC")]
    #[cfg_attr(feature = "cli", value(name = "FP8-DYNAMIC", alias = "FP8_DYNAMIC"))]
    Fp8Dynamic,
    /// Weights: FP8 with a scale per block of 128 x 128. Activations: FP8 in groups of 128 with dynamic
    /// scales
    #[serde(rename = "FP8-BLOCK")]
    #[cfg_attr(feature = "cli", value(name = "FP8-BLOCK", alias = "FP8_BLOCK"))]
    Fp8Block,
    /// Weights: FP4 in groups of 16 with FP8 scales. Activations: floats
    #[serde(rename = "NVFP4A16")]
    #[cfg_attr(feature = "cli", value(name = "NVFP4A16"))]
    Nvfp4A16,
    /// Weights and activations: FP4 in groups of 16 with FP8 scales and a global scale, which for
    /// activations is found on calibration samples
    #[serde(rename = "NVFP4")]
    #[cfg_attr(feature = "cli", value(name = "NVFP4"))]
    Nvfp4,
    /// Weights: FP4 in groups of 32 with power-of-two scales. Activations: floats
    #[serde(rename = "MXFP4A16")]
    #[cfg_attr(feature = "cli", value(name = "MXFP4A16"))]
    Mxfp4A16,
    /// Weights and activations: FP4 in groups of 32 with power-of-two scales, which for activations are
    /// dynamic
    #[serde(rename = "MXFP4")]
    #[cfg_attr(feature = "cli", value(name = "MXFP4"))]
    Mxfp4,
}

/// All schemes, by name.
const ALL: [(&str, Scheme); 12] = [
    ("W4A16", Scheme::W4A16),
    ("W4A16-ASYM", Scheme::W4A16Asym),
    ("W8A16", Scheme::W8A16),
    ("W8A8", Scheme::W8A8),
    ("INT8", Scheme::W8A8),
    ("FP8", Scheme::Fp8),
    ("FP8-DYNAMIC", Scheme::Fp8Dynamic),
    ("FP8-BLOCK", Scheme::Fp8Block),
    ("NVFP4A16", Scheme::Nvfp4A16),
    ("NVFP4", Scheme::Nvfp4),
    ("MXFP4A16", Scheme::Mxfp4A16),
    ("MXFP4", Scheme::Mxfp4),
];

impl FromStr for Scheme {
    type Err = String;

    fn from_str(text: &str) -> Result<Scheme, String> {
        let name = text.to_uppercase().replace('_', "-");
        let scheme = ALL.into_iter().find(|(known, _)| *known == name).map(|(_, scheme)| scheme);
        scheme.ok_or_else(|| format!("unknown scheme `{text}`; the schemes are {}", ALL.map(|(name, _)| name).join(", ")))
    }
}

impl<'de> Deserialize<'de> for Scheme {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Scheme, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

impl Scheme {
    /// Code format of weights.
    pub fn codes(self) -> Codes {
        match self {
            Scheme::W4A16 | Scheme::W4A16Asym => Codes::Integer(4),
            Scheme::W8A16 | Scheme::W8A8 => Codes::INT8,
            Scheme::Fp8 | Scheme::Fp8Dynamic | Scheme::Fp8Block => Codes::E4m3,
            Scheme::Nvfp4A16 | Scheme::Nvfp4 | Scheme::Mxfp4A16 | Scheme::Mxfp4 => Codes::E2m1,
        }
    }

    /// Whether activations are int8.
    pub(super) fn rounds_activations(self) -> bool {
        self == Scheme::W8A8
    }

    /// Whether activations have static scales, which need calibration samples.
    pub(super) fn stores_scales(self) -> bool {
        matches!(self, Scheme::Fp8 | Scheme::Nvfp4)
    }

    /// Default group size; `None` if the granularity of the scheme is fixed.
    pub(super) fn group(self) -> Option<usize> {
        matches!(self, Scheme::W4A16 | Scheme::W4A16Asym | Scheme::W8A16).then_some(128)
    }

    /// Granularity of a scheme without configurable group size, for matrices with rows of these lengths.
    /// Returns `None` if the scheme cannot encode them.
    pub(super) fn granularity(self, rows: &[usize]) -> Option<Granularity> {
        let divides = |size: usize| rows.iter().all(|row| row.is_multiple_of(size));
        match self {
            Scheme::Fp8Block if divides(128) => Some(Granularity::Block([128, 128])),
            Scheme::Fp8 => Some(Granularity::Tensor),
            Scheme::Nvfp4A16 | Scheme::Nvfp4 => divides(16).then_some(Granularity::Group(16)),
            Scheme::Mxfp4A16 | Scheme::Mxfp4 => divides(32).then_some(Granularity::Group(32)),
            _ => Some(Granularity::Channel),
        }
    }

    /// Encoding of a weight with this granularity of scales.
    pub(super) fn affine(self, weight: &Weight, granularity: Granularity) -> QuantizationSpec {
        QuantizationSpec {
            codes: self.codes(),
            granularity,
            symmetric: self != Scheme::W4A16Asym,
            scale_dtype: match self {
                Scheme::Nvfp4A16 | Scheme::Nvfp4 => DType::F8_E4M3,
                Scheme::Mxfp4A16 | Scheme::Mxfp4 => DType::F8_E8M0,
                _ if weight.dtype == DType::F64 => DType::F32,
                _ => weight.dtype,
            },
            activations: match (self, granularity) {
                (Scheme::W8A8, _) => ActivationScheme::DynamicToken,
                (Scheme::Fp8Block, Granularity::Block([_, size])) => ActivationScheme::Float8Group(size),
                (Scheme::Fp8Dynamic | Scheme::Fp8Block, _) => ActivationScheme::Float8Token,
                (Scheme::Mxfp4, _) => ActivationScheme::Mxfp4,
                // Placeholder until calibration.
                (Scheme::Fp8, _) => ActivationScheme::Float8Static(Static::new(1.0, None)),
                (Scheme::Nvfp4, _) => ActivationScheme::Nvfp4(Static::new(1.0, None)),
                _ => ActivationScheme::None,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_parsed_in_any_case_and_with_underscores() {
        for (text, scheme) in [("w4a16", Scheme::W4A16), ("W4A16_ASYM", Scheme::W4A16Asym), ("w4a16-asym", Scheme::W4A16Asym), ("int8", Scheme::W8A8)] {
            assert_eq!(text.parse(), Ok(scheme));
        }
        assert!("W3A3".parse::<Scheme>().unwrap_err().contains("W4A16-ASYM"));
        for (_, scheme) in ALL {
            assert_eq!(serde_json::from_value::<Scheme>(serde_json::to_value(scheme).unwrap()).unwrap(), scheme);
        }
    }
}
