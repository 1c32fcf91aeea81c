//! Options of block-wise execution.

use std::path::PathBuf;
use std::sync::Arc;

use candle_core::{DType, Device};

use super::{MemoryTracker, Residence, Rounding};

/// Options of block-wise execution.
#[derive(Debug, Clone)]
pub struct BlockwiseOptions {
    /// Device of the computation.
    pub device: Device,
    /// Precision of the computation.
    pub compute: DType,
    /// Storage precision of the parameters.
    pub residence: Residence,
    /// Rounding of the inputs of layers with int8 weights.
    pub rounding: Rounding,
    /// Maximum bytes of suspended runs and of activations cached between blocks. Beyond it, a run
    /// restarts at the start of its block for each observed value.
    pub limit: u64,
    /// Folder for activations beyond the limit; without one, they stay in memory.
    pub spill: Option<PathBuf>,
    /// Memory accounting.
    pub tracker: Option<Arc<MemoryTracker>>,
}

impl BlockwiseOptions {
    /// Computes on `device` in 32 bits, with 16-bit weights and integers in their stored precision and
    /// at most 1 GiB of cached activations.
    pub fn on(device: &Device) -> BlockwiseOptions {
        BlockwiseOptions {
            device: device.clone(),
            compute: DType::F32,
            residence: Residence::most_compact(device, DType::F32),
            rounding: Rounding::Token,
            limit: 1 << 30,
            spill: None,
            tracker: None,
        }
    }
}
