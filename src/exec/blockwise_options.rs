//! How a graph is run block by block.

use std::path::PathBuf;
use std::sync::Arc;

use candle_core::{DType, Device};

use super::{MemoryTracker, Residence, Rounding};

/// How a graph is run block by block.
#[derive(Debug, Clone)]
pub struct BlockwiseOptions {
    /// Where it runs.
    pub device: Device,
    /// Precision of the computation.
    pub compute: DType,
    /// What is kept of parameters.
    pub residence: Residence,
    /// How inputs of layers with int8 weights are rounded.
    pub rounding: Rounding,
    /// Most bytes of stopped runs and of states between blocks. Runs beyond it start at the beginning of their block for each value
    /// that is looked at.
    pub limit: u64,
    /// A folder for states between blocks that are beyond the limit; without one, they stay in memory.
    pub spill: Option<PathBuf>,
    /// Who is told what is held.
    pub tracker: Option<Arc<MemoryTracker>>,
}

impl BlockwiseOptions {
    /// 32-bit computation with 16-bit weights as they are stored, and at most 1 GiB of states, on a device.
    pub fn on(device: &Device) -> BlockwiseOptions {
        BlockwiseOptions {
            device: device.clone(),
            compute: DType::F32,
            residence: Residence::Stored,
            rounding: Rounding::Token,
            limit: 1 << 30,
            spill: None,
            tracker: None,
        }
    }
}
