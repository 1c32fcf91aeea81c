//! Quantization schemes, named as in compressed-tensors and vLLM: combinations of number formats.

use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, de::Error as _};

use crate::aliases;
use crate::error::ParseError;
use crate::store::{ActivationScheme, Codes, DType, FloatFormat, FloatScale, Granularity, QuantizationSpec, ScaleFormat, Static, Weight};

/// Properties of a scheme.
struct Row {
    codes: Codes,
    symmetric: bool,
    scales: ScaleFormat,
    granularity: SchemeGranularity,
    activations: ActivationScheme,
}

/// Which elements share a scale.
#[derive(Clone, Copy, PartialEq, Eq)]
enum SchemeGranularity {
    /// Groups of a configurable size, with this default.
    Groups(usize),
    /// A fixed granularity. Blocks that do not divide a row are replaced by one scale per row.
    Fixed(Granularity),
    /// Blocks of GGUF files, whose type depends on the weight.
    Blocks,
}

macro_rules! schemes {
    ($($(#[$attribute:meta])* $scheme:ident = $name:literal $(| $alias:literal)* => $row:expr;)*) => {
        /// Quantization scheme of weights and activations. Names are case-insensitive, and `_` is equivalent
        /// to `-`.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
        #[cfg_attr(feature = "cli", derive(clap::ValueEnum, schemars::JsonSchema))]
        #[non_exhaustive]
        pub enum Scheme {
            $(
                $(#[$attribute])*
                #[serde(rename = $name)]
                #[cfg_attr(feature = "cli", value(name = $name $(, alias = $alias)*))]
                $scheme,
            )*
        }

        /// All schemes, by name.
        const ALL: &[(&str, Scheme)] = &[$(($name, Scheme::$scheme), $(($alias, Scheme::$scheme),)*)*];

        impl Scheme {
            fn row(self) -> Row {
                match self {
                    $(Scheme::$scheme => $row,)*
                }
            }
        }
    };
}

schemes! {
    /// Weights: int4 in groups of 128, symmetric. Activations: floats
    #[default]
    W4A16 = "W4A16" => Row::grouped_integers(4, true);

    /// Weights: int4 in groups of 128 with zero points. Activations: floats
    W4A16Asym = "W4A16-ASYM" | "W4A16_ASYM" => Row::grouped_integers(4, false);

    /// Weights: int2 in groups of 128, symmetric. Activations: floats
    W2A16 = "W2A16" => Row::grouped_integers(2, true);

    /// Weights: int2 in groups of 128 with zero points. Activations: floats
    W2A16Asym = "W2A16-ASYM" | "W2A16_ASYM" => Row::grouped_integers(2, false);

    /// Weights: int3 in groups of 128, symmetric. Activations: floats
    W3A16 = "W3A16" => Row::grouped_integers(3, true);

    /// Weights: int3 in groups of 128 with zero points. Activations: floats
    W3A16Asym = "W3A16-ASYM" | "W3A16_ASYM" => Row::grouped_integers(3, false);

    /// Weights: int5 in groups of 128, symmetric. Activations: floats
    W5A16 = "W5A16" => Row::grouped_integers(5, true);

    /// Weights: int6 in groups of 128, symmetric. Activations: floats
    W6A16 = "W6A16" => Row::grouped_integers(6, true);

    /// Weights: int7 in groups of 128, symmetric. Activations: floats
    W7A16 = "W7A16" => Row::grouped_integers(7, true);

    /// Weights: int8 in groups of 128, symmetric. Activations: floats
    W8A16 = "W8A16" => Row::grouped_integers(8, true);

    /// Weights: int8 with a scale per output channel. Activations: int8 with a dynamic scale per token
    W8A8 = "W8A8" | "INT8" => Row {
        granularity: SchemeGranularity::Fixed(Granularity::Channel),
        activations: ActivationScheme::DynamicToken,
        ..Row::grouped_integers(8, true)
    };

    /// Weights: int8 with a scale per output channel. Activations: int8 with a static scale found on
    /// calibration samples
    W8A8Static = "W8A8-STATIC" | "W8A8_STATIC" => Row {
        granularity: SchemeGranularity::Fixed(Granularity::Channel),
        activations: ActivationScheme::Static(CALIBRATED),
        ..Row::grouped_integers(8, true)
    };

    /// Weights: int4 in groups of 128, symmetric. Activations: int8 with a dynamic scale per token
    W4A8 = "W4A8" => Row { activations: ActivationScheme::DynamicToken, ..Row::grouped_integers(4, true) };

    /// Weights: int4 in groups of 128, symmetric. Activations: FP8 with a dynamic scale per token
    W4Afp8 = "W4AFP8" => Row {
        activations: ActivationScheme::Float(FloatFormat::E4m3, FloatScale::Token),
        ..Row::grouped_integers(4, true)
    };

    /// Weights: FP8 with a scale per tensor. Activations: FP8 with a static scale found on calibration
    /// samples
    Fp8 = "FP8" => Row::scaled_floats(FloatFormat::E4m3, Granularity::Tensor, FloatScale::Static(CALIBRATED));

    /// Weights: FP8 with a scale per output channel. Activations: FP8 with a dynamic scale per token
    Fp8Dynamic = "FP8-DYNAMIC" | "FP8_DYNAMIC" => Row::scaled_floats(FloatFormat::E4m3, Granularity::Channel, FloatScale::Token);

    /// Weights: FP8 with a scale per block of 128 x 128. Activations: FP8 in groups of 128 with dynamic
    /// scales
    Fp8Block = "FP8-BLOCK" | "FP8_BLOCK" => Row::scaled_floats(FloatFormat::E4m3, Granularity::Block([128, 128]), FloatScale::Group(128));

    /// Weights: FP4 in groups of 16 with FP8 scales. Activations: floats
    Nvfp4A16 = "NVFP4A16" => Row::scaled_groups(FloatFormat::E2m1, ScaleFormat::Relative, None);

    /// Weights and activations: FP4 in groups of 16 with FP8 scales and a global scale, which for
    /// activations is found on calibration samples
    Nvfp4 = "NVFP4" => Row::scaled_groups(FloatFormat::E2m1, ScaleFormat::Relative, Some(FloatScale::Relative(CALIBRATED)));

    /// Weights: FP4 in groups of 32 with power-of-two scales. Activations: floats
    Mxfp4A16 = "MXFP4A16" => Row::scaled_groups(FloatFormat::E2m1, ScaleFormat::PowerOfTwo, None);

    /// Weights and activations: FP4 in groups of 32 with power-of-two scales, which for activations are
    /// dynamic
    Mxfp4 = "MXFP4" => Row::scaled_groups(FloatFormat::E2m1, ScaleFormat::PowerOfTwo, Some(FloatScale::PowerOfTwo));

    /// Weights: FP6 in groups of 32 with power-of-two scales. Activations: floats
    Mxfp6A16 = "MXFP6A16" => Row::scaled_groups(FloatFormat::E2m3, ScaleFormat::PowerOfTwo, None);

    /// Weights: FP8 in groups of 32 with power-of-two scales. Activations: floats
    Mxfp8A16 = "MXFP8A16" => Row::scaled_groups(FloatFormat::E4m3, ScaleFormat::PowerOfTwo, None);

    /// Weights and activations: FP8 in groups of 32 with power-of-two scales, which for activations are
    /// dynamic
    Mxfp8 = "MXFP8" => Row::scaled_groups(FloatFormat::E4m3, ScaleFormat::PowerOfTwo, Some(FloatScale::PowerOfTwo));

    /// Blocks of a GGUF file: 8 bits with a scale per 32 weights
    #[doc(hidden)]
    Q80 = "Q8_0" => Row::blocks(8);

    /// Blocks of a GGUF file: 6 bits in blocks of 256 with quantized scales
    #[doc(hidden)]
    Q6K = "Q6_K" => Row::blocks(6);

    /// Blocks of a GGUF file: Q5_K, and Q6_K for the most sensitive matrices
    #[doc(hidden)]
    Q5KM = "Q5_K_M" => Row::blocks(5);

    /// Blocks of a GGUF file: Q5_K
    #[doc(hidden)]
    Q5KS = "Q5_K_S" => Row::blocks(5);

    /// Blocks of a GGUF file: 5 bits in blocks of 256 with quantized scales and minima
    #[doc(hidden)]
    Q5K = "Q5_K" => Row::blocks(5);

    /// Blocks of a GGUF file: 5 bits with a scale and a minimum per 32 weights
    #[doc(hidden)]
    Q51 = "Q5_1" => Row::blocks(5);

    /// Blocks of a GGUF file: 5 bits with a scale per 32 weights
    #[doc(hidden)]
    Q50 = "Q5_0" => Row::blocks(5);

    /// Blocks of a GGUF file: Q4_K, and Q6_K for the most sensitive matrices
    #[doc(hidden)]
    Q4KM = "Q4_K_M" => Row::blocks(4);

    /// Blocks of a GGUF file: Q4_K, and Q5_K for the most sensitive matrices
    #[doc(hidden)]
    Q4KS = "Q4_K_S" => Row::blocks(4);

    /// Blocks of a GGUF file: 4 bits in blocks of 256 with quantized scales and minima
    #[doc(hidden)]
    Q4K = "Q4_K" => Row::blocks(4);

    /// Blocks of a GGUF file: 4 bits with a scale and a minimum per 32 weights
    #[doc(hidden)]
    Q41 = "Q4_1" => Row::blocks(4);

    /// Blocks of a GGUF file: 4 bits with a scale per 32 weights
    #[doc(hidden)]
    Q40 = "Q4_0" => Row::blocks(4);

    /// Blocks of a GGUF file: indices into a codebook of 16 values, with a scale per 32 weights
    #[doc(hidden)]
    Iq4Nl = "IQ4_NL" => Row::blocks(4);

    /// Blocks of a GGUF file: the codebook of IQ4_NL in blocks of 256 with quantized scales
    #[doc(hidden)]
    Iq4Xs = "IQ4_XS" => Row::blocks(4);

    /// Blocks of a GGUF file: Q3_K, and Q5_K for the most sensitive matrices
    #[doc(hidden)]
    Q3KL = "Q3_K_L" => Row::blocks(3);

    /// Blocks of a GGUF file: Q3_K, and Q4_K or Q5_K for the most sensitive matrices
    #[doc(hidden)]
    Q3KM = "Q3_K_M" => Row::blocks(3);

    /// Blocks of a GGUF file: Q3_K
    #[doc(hidden)]
    Q3KS = "Q3_K_S" => Row::blocks(3);

    /// Blocks of a GGUF file: 3 bits in blocks of 256 with quantized scales
    #[doc(hidden)]
    Q3K = "Q3_K" => Row::blocks(3);

    /// Blocks of a GGUF file: 2 bits in blocks of 256 with quantized scales and minima, and Q3_K or Q4_K for
    /// the most sensitive matrices
    #[doc(hidden)]
    Q2K = "Q2_K" => Row::blocks(2);
}

/// Placeholder until calibration.
const CALIBRATED: Static = Static::new(1.0, None);

impl Row {
    fn grouped_integers(bits: u8, symmetric: bool) -> Row {
        Row {
            codes: Codes::Integer(bits),
            symmetric,
            scales: ScaleFormat::Float,
            granularity: SchemeGranularity::Groups(128),
            activations: ActivationScheme::None,
        }
    }

    /// Blocks of GGUF files, most of which have this number of bits.
    fn blocks(bits: u8) -> Row {
        Row { granularity: SchemeGranularity::Blocks, ..Row::grouped_integers(bits, false) }
    }

    /// Floats with float scales, of weights and activations.
    fn scaled_floats(format: FloatFormat, granularity: Granularity, activations: FloatScale) -> Row {
        Row {
            codes: Codes::Float(format),
            symmetric: true,
            scales: ScaleFormat::Float,
            granularity: SchemeGranularity::Fixed(granularity),
            activations: ActivationScheme::Float(format, activations),
        }
    }

    /// Floats in groups whose size the format of the scales determines.
    fn scaled_groups(format: FloatFormat, scales: ScaleFormat, activations: Option<FloatScale>) -> Row {
        Row {
            codes: Codes::Float(format),
            symmetric: true,
            scales,
            granularity: SchemeGranularity::Fixed(scales.group().map_or(Granularity::Channel, Granularity::Group)),
            activations: activations.map_or(ActivationScheme::None, |scale| ActivationScheme::Float(format, scale)),
        }
    }
}

/// Parses a name, such as `W4A16`, or a type of GGUF files, such as `Q4_K_M`.
impl FromStr for Scheme {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Scheme, ParseError> {
        let name = text.to_uppercase().replace('_', "-");
        let scheme = ALL.iter().find(|(known, _)| known.replace('_', "-") == name).map(|(_, scheme)| *scheme);
        let known = ALL.iter().filter(|(known, scheme)| !known.contains('_') || *known == scheme.name());
        scheme.ok_or_else(|| unknown(text, known.map(|(name, _)| *name)).into())
    }
}

/// The message about an unknown scheme.
fn unknown<'n>(name: &str, schemes: impl Iterator<Item = &'n str> + Clone) -> String {
    let start = format!("unknown scheme `{name}`");
    if aliases::is_gguf_type(name) {
        let name = name.to_ascii_uppercase();
        return format!("{start}: it is a type of GGUF files; remove this pass, and add `export: [{{ gguf: {{ type: {name} }} }}]`");
    }
    let near = aliases::suggestion(name, schemes.clone()).map_or(String::new(), |near| format!(", did you mean `{near}`?"));
    format!("{start}{near}; the schemes are {}", schemes.collect::<Vec<_>>().join(", "))
}

impl<'de> Deserialize<'de> for Scheme {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Scheme, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

impl Scheme {
    /// Code format of weights.
    pub(crate) fn codes(self) -> Codes {
        self.row().codes
    }

    /// Whether no scale is shared by several rows.
    pub(super) fn has_scales_within_rows(self) -> bool {
        !matches!(self.row().granularity, SchemeGranularity::Fixed(Granularity::Tensor | Granularity::Block(_)))
    }

    /// Whether weights become blocks of GGUF files.
    pub(super) fn is_blocks(self) -> bool {
        self.row().granularity == SchemeGranularity::Blocks
    }

    /// Name, as in recipes.
    pub(crate) fn name(self) -> &'static str {
        ALL.iter().find(|(_, scheme)| *scheme == self).map_or("", |(name, _)| *name)
    }

    /// Whether the activations are quantized as in another scheme.
    pub(super) fn rounds_activations_like(self, other: Scheme) -> bool {
        self.row().activations == other.row().activations
    }

    /// Whether activations are int8.
    pub(super) fn rounds_activations(self) -> bool {
        matches!(self.row().activations, ActivationScheme::DynamicToken | ActivationScheme::Static(_))
    }

    /// Whether activations have static scales, which need calibration samples.
    pub(super) fn stores_scales(self) -> bool {
        self.row().activations.parameters().is_some()
    }

    /// Default group size; `None` if the granularity of the scheme is fixed.
    pub(super) fn group(self) -> Option<usize> {
        match self.row().granularity {
            SchemeGranularity::Groups(size) => Some(size),
            SchemeGranularity::Fixed(_) | SchemeGranularity::Blocks => None,
        }
    }

    /// Granularity of a scheme without configurable group size, for matrices with rows of these lengths.
    /// Returns `None` if the scheme cannot encode them.
    pub(super) fn granularity(self, rows: &[usize]) -> Option<Granularity> {
        let divides = |size: usize| rows.iter().all(|row| row.is_multiple_of(size));
        match self.row().granularity {
            SchemeGranularity::Groups(_) => Some(Granularity::Channel),
            SchemeGranularity::Blocks => None,
            SchemeGranularity::Fixed(Granularity::Block([_, size])) if !divides(size) => Some(Granularity::Channel),
            SchemeGranularity::Fixed(Granularity::Group(size)) if !divides(size) => None,
            SchemeGranularity::Fixed(granularity) => Some(granularity),
        }
    }

    /// Whether a granularity replaces that of the scheme, whose blocks do not divide the rows.
    pub(super) fn is_fallback(self, granularity: Granularity) -> bool {
        matches!(self.row().granularity, SchemeGranularity::Fixed(Granularity::Block(_))) && granularity == Granularity::Channel
    }

    /// Encoding of a weight with this granularity of scales.
    pub(super) fn affine(self, weight: &Weight, granularity: Granularity) -> QuantizationSpec {
        let row = self.row();
        let floats = if weight.dtype == DType::F64 { DType::F32 } else { weight.dtype };
        let activations = match row.activations {
            ActivationScheme::Float(format, _) if self.is_fallback(granularity) => ActivationScheme::Float(format, FloatScale::Token),
            activations => activations,
        };
        QuantizationSpec { codes: row.codes, granularity, symmetric: row.symmetric, scale_dtype: row.scales.dtype(floats), activations }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_parsed_in_any_case_and_with_underscores() {
        for (text, scheme) in
            [("w4a16", Scheme::W4A16), ("W4A16_ASYM", Scheme::W4A16Asym), ("w4a16-asym", Scheme::W4A16Asym), ("int8", Scheme::W8A8), ("q4_k_m", Scheme::Q4KM)]
        {
            assert_eq!(text.parse(), Ok(scheme));
        }
        let error = |text: &str| text.parse::<Scheme>().unwrap_err().to_string();
        assert!(error("int4").starts_with("unknown scheme `int4`, did you mean `W4A16`?"), "{}", error("int4"));
        assert!(error("iq3_s").contains("it is a type of GGUF files") && error("iq3_s").contains("{ type: IQ3_S }"), "{}", error("iq3_s"));
        assert!("W3A3".parse::<Scheme>().unwrap_err().to_string().contains("W4A16-ASYM"));
        for (_, scheme) in ALL.iter().copied() {
            assert_eq!(serde_json::from_value::<Scheme>(serde_json::to_value(scheme).unwrap()).unwrap(), scheme);
        }
    }
}
