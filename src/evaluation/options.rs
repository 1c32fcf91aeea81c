//! What a recipe says about evaluation.

use serde::{Deserialize, Serialize};

use super::Runtime;

/// What a model computes with.
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

/// How a model is measured before and after.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Evaluate {
    /// Who runs the models [default: the built-in executor, and ONNX Runtime when ONNX is written]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub runtime: Vec<Runtime>,
    /// Measure how long one batch takes before and after
    pub latency: bool,
    /// What the built-in executor computes with; of weights of 16 bits, 32-bit floats say what they stand for, and 16-bit ones
    /// are faster on a GPU
    pub precision: Precision,
}

impl Default for Evaluate {
    fn default() -> Self {
        Self { runtime: Vec::new(), latency: true, precision: Precision::F32 }
    }
}
