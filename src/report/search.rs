//! The section about a search over formats.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::format::{bytes, milliseconds};
use crate::error::counted;

/// The loss that a search over formats minimizes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum SearchLoss {
    /// KL divergence of the predictions, in nats per token
    #[default]
    KlDivergence,
    /// One minus the mean cosine similarity of the outputs to those of the original model
    CosineDistance,
    /// Sum of the squared errors of the weights relative to their squares, without samples
    WeightError,
}

impl SearchLoss {
    /// One word for the loss.
    pub fn noun(self) -> &'static str {
        match self {
            SearchLoss::KlDivergence => "divergence",
            SearchLoss::CosineDistance => "distance",
            SearchLoss::WeightError => "weight error",
        }
    }
}

impl fmt::Display for SearchLoss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SearchLoss::KlDivergence => "KL divergence",
            SearchLoss::CosineDistance => "cosine distance",
            SearchLoss::WeightError => "weight error",
        })
    }
}

/// The metric of the task, which a search has measured.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
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
pub struct FormatSearch {
    /// The runtime that loads the output.
    pub(crate) runtime: String,
    /// The samples on which points were measured.
    pub(crate) measured_on: Option<String>,
    /// The limit of the KL divergence, in nats per token, if the search had one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) max_kl: Option<f64>,
    /// The limit of the relative loss of the score in percent, if the search had one; without labels, of the
    /// cosine distance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) max_loss: Option<f64>,
    /// The limit of the latency in milliseconds, if the search had one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) max_latency_ms: Option<f64>,
    /// The loss that was minimized.
    #[serde(default)]
    pub(crate) loss: SearchLoss,
    /// The metric of the task, if the limit is one of its score.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) metric: Option<SearchMetric>,
    /// The measured times, if the limit is one of the latency.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) times: Option<LatencyTable>,
    /// Methods that were tried for the mixture that was written, if a time was specified for them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) methods: Vec<SearchMethod>,
    /// The mixture that was written.
    pub(crate) chosen: SearchPoint,
    /// The mixture for 5 % more bytes, or for 5 % more time if the limit is one of the latency. Absent if it
    /// has no less expected loss.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) larger: Option<SearchPoint>,
    /// Mixtures that were measured, by ascending size.
    pub(crate) points: Vec<SearchPoint>,
    /// The predicted front by ascending size, thinned to at most 200 points.
    pub(crate) front: Vec<SearchPoint>,
    /// The format of each unit.
    pub(crate) units: Vec<SearchUnit>,
}

impl FormatSearch {
    /// The size of a mixture, or its latency if the limit is one of the latency.
    pub(crate) fn cost_of(&self, point: &SearchPoint) -> String {
        let time = self.times.as_ref().and_then(|_| point.milliseconds());
        time.map_or_else(|| bytes(point.bytes), milliseconds)
    }
}

/// A mixture of formats.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
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
    /// Expected latency in milliseconds, if the limit is one of the latency.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub predicted_ms: Option<f64>,
    /// Measured latency in milliseconds, if the limit is one of the latency.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured_ms: Option<f64>,
}

impl SearchPoint {
    /// The latency in milliseconds, measured or else expected.
    pub(crate) fn milliseconds(&self) -> Option<f64> {
        self.measured_ms.or(self.predicted_ms)
    }
}

/// A method of quantization that was tried for a mixture.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
pub struct SearchMethod {
    /// Its options.
    pub method: String,
    /// Loss on held-out samples; absent if the time was too short.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured: Option<f64>,
    /// The error that ended it; the output is written with another method.
    #[doc(hidden)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed: Option<String>,
    /// Time that it took.
    pub seconds: f64,
    /// Whether the output was written with it.
    pub chosen: bool,
}

impl SearchMethod {
    /// The reason for the lack of a measured loss.
    pub(crate) fn without_loss(&self) -> String {
        self.failed.as_ref().map_or_else(|| "not finished in time".to_owned(), |error| format!("failed: {error}"))
    }
}

/// Latencies of a model and of mixtures of its formats, on one machine. `compress auto --times` reads and
/// writes them.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct LatencyTable {
    /// The runtime and its version.
    pub runtime: String,
    /// Number of parameters of the model.
    pub parameters: u64,
    /// Threads per operator.
    pub threads: usize,
    /// Shape of each input.
    pub inputs: BTreeMap<String, Vec<usize>>,
    /// Names of the formats.
    pub formats: Vec<String>,
    /// Names of the units; empty as long as only the original model has been measured.
    pub units: Vec<String>,
    /// Median latency of the original model in milliseconds.
    pub original_ms: f64,
    /// Measured mixtures.
    pub mixtures: Vec<MixtureLatency>,
}

impl LatencyTable {
    /// A sentence about the measurement.
    pub(crate) fn description(&self) -> String {
        let shape = |(name, shape): (&String, &Vec<usize>)| format!("`{name}` {}", shape.iter().map(usize::to_string).collect::<Vec<_>>().join(" x "));
        let (threads, inputs) = (counted(self.threads, "thread"), self.inputs.iter().map(shape).collect::<Vec<_>>().join(", "));
        format!("The original model takes {} in {} with {threads} and the inputs {inputs}.", milliseconds(self.original_ms), self.runtime)
    }
}

/// The latency of a mixture of formats, measured in alternation with the original model.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct MixtureLatency {
    /// Index of the format of each unit.
    pub options: Vec<usize>,
    /// Latency relative to that of the original model in the same measurement.
    pub ratio: f64,
    /// Uncertainty of the ratio: half the width of its 95 % confidence interval.
    pub uncertainty: f64,
}

/// Weights that have the same format.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
pub struct SearchUnit {
    /// Name of the fused layer or tensor.
    pub name: String,
    /// Its format.
    pub format: String,
    /// Its size in this format.
    pub bytes: u64,
    /// Its expected loss in this format.
    pub loss: f64,
    /// Its format in the mixture for 5 % more bytes or time, if it differs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub larger: Option<String>,
    /// Expected difference from the latency of the layer in the original model in milliseconds, if the limit
    /// is one of the latency.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub milliseconds: Option<f64>,
}
