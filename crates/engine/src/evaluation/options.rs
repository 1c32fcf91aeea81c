//! Evaluation options of a recipe.

use serde::{Deserialize, Deserializer, Serialize, de};

use super::Runtime;
use crate::files;

/// Floating-point type in which a model is computed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum, schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// 32-bit floats
    #[default]
    F32,
    /// bfloat16
    Bf16,
    /// 16-bit floats
    F16,
}

/// Evaluation of the input model and the output model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Evaluate {
    /// Runtimes that run the models [default: the built-in executor, and ONNX Runtime when ONNX is written]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub runtime: Vec<Runtime>,
    /// Measure the latency of one batch before and after
    pub latency: bool,
    /// Floating-point type of the built-in executor: 32-bit floats are the most precise, 16-bit floats
    /// are faster on a GPU
    pub precision: Precision,
    /// The benchmark on the Hugging Face Hub that the evaluation data is: the score is written to
    /// `.eval_results`, in the form that the Hub reads
    #[serde(skip_serializing_if = "Option::is_none")]
    pub benchmark: Option<Benchmark>,
}

impl Default for Evaluate {
    fn default() -> Self {
        Self { runtime: Vec::new(), latency: true, precision: Precision::F32, benchmark: None }
    }
}

/// A benchmark on the Hugging Face Hub.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Benchmark {
    /// Repository of the data set: `org/name`
    #[serde(deserialize_with = "repository_id")]
    pub dataset: String,
    /// Task in the `eval.yaml` of the data set
    pub task: String,
}

fn repository_id<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    let text = String::deserialize(deserializer)?;
    if files::is_repository_id(&text) { Ok(text) } else { Err(de::Error::custom(format!("`{text}` is not of the form org/name"))) }
}
