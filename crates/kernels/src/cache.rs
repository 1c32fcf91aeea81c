//! 8-bit KV cache formats.

use serde::{Deserialize, Serialize};

use super::minifloat::E4M3_MAX;

/// Quantization format of cached keys and values.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum, schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum CacheFormat {
    /// FP8 (E4M3), supported by vLLM
    #[default]
    Fp8,
    /// Int8, symmetric; supported by transformers, but not by vLLM
    Int8,
}

/// Values that share a scale.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum, schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum CacheScales {
    /// All keys of a layer, and all values of a layer
    #[default]
    Tensor,
    /// The keys of a head, and the values of a head
    Head,
}

/// Quantization of cached keys and values.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CacheScheme {
    /// Format of the values.
    pub format: CacheFormat,
    /// Values that share a scale.
    pub scales: CacheScales,
}

impl CacheFormat {
    /// The name in options.
    pub fn name(self) -> &'static str {
        match self {
            CacheFormat::Fp8 => "fp8",
            CacheFormat::Int8 => "int8",
        }
    }

    /// Number of steps from zero to the largest magnitude, as defined by compressed-tensors.
    pub fn steps(self) -> f32 {
        match self {
            CacheFormat::Fp8 => E4M3_MAX,
            CacheFormat::Int8 => 127.5,
        }
    }
}
