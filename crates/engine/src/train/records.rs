//! Records of training steps and evaluations.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize};

/// Metrics of one step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct StepRecord {
    /// Step number, from 1.
    pub step: u64,
    /// Completed passes over the data.
    pub epoch: u64,
    /// The weighted sum of losses.
    pub loss: f64,
    /// Each loss that has items in this step, unweighted.
    pub losses: BTreeMap<String, f64>,
    /// Learning rate of this step.
    pub learning_rate: f64,
    /// Global gradient norm before clipping; `None` if the gradients overflowed 16-bit floats and the
    /// step was skipped.
    pub gradient_norm: Option<f64>,
    /// Throughput, including the time spent waiting for samples.
    pub samples_per_second: f64,
    /// Fraction of the training time spent waiting for samples.
    pub waited: f64,
}

/// Score of an evaluation during training.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Evaluation {
    /// Completed steps.
    pub step: u64,
    /// Name of the metric.
    pub metric: String,
    /// Its value.
    #[serde(deserialize_with = "score")]
    pub value: f64,
}

/// Deserializes a score; `null` is NaN.
fn score<'de, D: Deserializer<'de>>(from: D) -> std::result::Result<f64, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or(f64::NAN))
}
