//! Settings of checkpoints with FP8 weights (`quant_method: fp8`).

use super::{DType, Granularity};

/// Settings of FP8 weights in a configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fp8Config {
    /// Rows and inputs that share a scale (`weight_block_size`).
    pub block: Option<[usize; 2]>,
    /// Whether weights may have one scale, or one per row.
    pub has_single_scales: bool,
    /// Whether activations are quantized with a stored scale (`activation_scheme: static`).
    pub has_static_inputs: bool,
    /// Dtype of the dequantized values, by default the most common one of the checkpoint.
    pub dtype: Option<DType>,
}

impl Fp8Config {
    /// Granularities that scales may have.
    pub(super) fn granularities(self) -> impl Iterator<Item = Granularity> {
        let single = [Granularity::Tensor, Granularity::Channel].into_iter().filter(move |_| self.has_single_scales);
        self.block.map(Granularity::Block).into_iter().chain(single)
    }
}
