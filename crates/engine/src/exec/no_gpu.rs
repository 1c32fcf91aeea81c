//! Substitute for `gpu.rs` in builds without CUDA.
#![allow(clippy::unused_self, clippy::unnecessary_wraps)]

use candle_core::Device;

/// Measures the peak of allocated device memory; without CUDA there is nothing to measure.
#[derive(Debug)]
pub struct DeviceMemory {}

impl DeviceMemory {
    /// Starts the measurement.
    pub fn watch(_device: &Device) -> DeviceMemory {
        DeviceMemory {}
    }

    /// Returns `None`, because no GPU is used.
    pub fn peak(&self) -> Option<u64> {
        None
    }
}

pub(super) fn name(_device: &Device) -> Option<(usize, Option<String>)> {
    None
}
