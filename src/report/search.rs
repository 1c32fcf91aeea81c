//! The section about a search over formats.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The loss that a search over formats minimizes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum SearchLoss {
    /// KL divergence of the predictions, in nats per token
    #[default]
    KlDivergence,
    /// One minus the mean cosine similarity of the outputs to those of the original model
    CosineDistance,
}

impl SearchLoss {
    /// One word for the loss.
    pub fn noun(self) -> &'static str {
        match self {
            SearchLoss::KlDivergence => "divergence",
            SearchLoss::CosineDistance => "distance",
        }
    }
}

impl fmt::Display for SearchLoss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SearchLoss::KlDivergence => "KL divergence",
            SearchLoss::CosineDistance => "cosine distance",
        })
    }
}

/// The metric of the task, which a search has measured.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct SearchMetric {
    /// `accuracy`, `perplexity`, `spearman`.
    pub name: String,
    /// Score of the original model.
    pub original: f64,
    /// Description of the samples.
    pub measured_on: String,
}

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
    /// The limit of the relative loss of the score in percent, if the search had one; without labels, of the
    /// cosine distance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_loss: Option<f64>,
    /// The loss that was minimized.
    #[serde(default)]
    pub loss: SearchLoss,
    /// The metric of the task, if the limit is one of its score.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metric: Option<SearchMetric>,
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
    /// Expected loss.
    pub predicted: f64,
    /// Loss on held-out samples with weights rounded to nearest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured: Option<f64>,
    /// Score on data with labels, if the limit is one of the score.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub score: Option<f64>,
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
    /// Its expected loss in this format.
    pub loss: f64,
    /// Its format in the mixture for 5 % more bytes, if it differs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub larger: Option<String>,
}
