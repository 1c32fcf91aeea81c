//! Keys and values of attention in eight bits, with one scale for a layer, as caches of decoders keep them.

use serde::{Deserialize, Serialize};

use super::narrow::E4M3_MAX;

/// What keys and values are rounded to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum, schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum CacheFormat {
    /// FP8 (E4M3), which vLLM takes
    #[default]
    Fp8,
    /// Int8, symmetric: transformers takes it, vLLM does not
    Int8,
}

impl CacheFormat {
    /// The name in options.
    pub fn name(self) -> &'static str {
        match self {
            CacheFormat::Fp8 => "fp8",
            CacheFormat::Int8 => "int8",
        }
    }

    /// Steps from zero to the largest magnitude, as compressed-tensors counts them.
    pub fn steps(self) -> f32 {
        match self {
            CacheFormat::Fp8 => E4M3_MAX,
            CacheFormat::Int8 => 127.5,
        }
    }
}
