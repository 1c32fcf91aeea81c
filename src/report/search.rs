//! The section about a search over formats.

use serde::{Deserialize, Serialize};

/// A search over the formats of weights, as by `compress auto`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct FormatSearch {
    /// The runtime that loads the output.
    pub runtime: String,
    /// The samples on which points were measured.
    pub measured_on: Option<String>,
    /// The limit of the KL divergence, in nats per token, if the search had one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_kl: Option<f64>,
    /// The mixture that was written.
    pub chosen: SearchPoint,
    /// The mixture for 5 % more bytes, if it has less expected loss.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub larger: Option<SearchPoint>,
    /// Mixtures that were measured, by ascending size.
    pub points: Vec<SearchPoint>,
    /// The predicted front by ascending size, thinned to at most 200 points.
    pub front: Vec<SearchPoint>,
    /// The format of each unit.
    pub units: Vec<SearchUnit>,
}

/// A mixture of formats.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct SearchPoint {
    /// Name of a common mixture, such as Q4_K_M; absent for points of the front.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Mean bits of the searched weights, with scales.
    pub bits: f64,
    /// Size of all weights, or of the file if the output is a single file.
    pub bytes: u64,
    /// Expected KL divergence of the predictions, in nats per token.
    pub predicted: f64,
    /// KL divergence on held-out samples with weights rounded to nearest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured: Option<f64>,
}

/// Weights that have the same format.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct SearchUnit {
    /// Name of the fused layer or tensor.
    pub name: String,
    /// Its format.
    pub format: String,
    /// Its size in this format.
    pub bytes: u64,
    /// Its expected loss in this format, in nats per token.
    pub loss: f64,
    /// Its format in the mixture for 5 % more bytes, if it differs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub larger: Option<String>,
}
