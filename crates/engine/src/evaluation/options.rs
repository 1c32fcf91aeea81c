//! Evaluation options of a recipe.

use serde::{Deserialize, Serialize};

use super::Runtime;

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
}

impl Default for Evaluate {
    fn default() -> Self {
        Self { runtime: Vec::new(), latency: true, precision: Precision::F32 }
    }
}
