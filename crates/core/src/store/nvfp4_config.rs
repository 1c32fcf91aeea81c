//! Settings of checkpoints with NVFP4 weights of ModelOpt.

use super::DType;

/// Settings of NVFP4 weights in a configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Nvfp4Config {
    /// Whether the inputs of all layers with such weights are quantized.
    pub requires_inputs: bool,
    /// Dtype of the dequantized values, by default the most common one of the checkpoint.
    pub dtype: Option<DType>,
}
