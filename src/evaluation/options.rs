//! What a recipe says about evaluation.

use serde::{Deserialize, Serialize};

use super::Runtime;

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
}

impl Default for Evaluate {
    fn default() -> Self {
        Self { runtime: Vec::new(), latency: true }
    }
}
