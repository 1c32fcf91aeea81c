//! A build without CUDA has no GPU to know anything of.
#![allow(clippy::unused_self, clippy::unnecessary_wraps)]

use candle_core::Device;

/// Watches how much memory of a device is taken; without CUDA it sees nothing.
#[derive(Debug)]
pub struct DeviceMemory {}

impl DeviceMemory {
    /// Begins to watch.
    pub fn watch(_device: &Device) -> DeviceMemory {
        DeviceMemory {}
    }

    /// None: no GPU is used.
    pub fn peak(&self) -> Option<u64> {
        None
    }
}

pub(super) fn name(_device: &Device) -> Option<(usize, Option<String>)> {
    None
}
