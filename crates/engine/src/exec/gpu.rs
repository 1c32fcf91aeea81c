//! NVIDIA GPUs: peak memory and device names.

use candle_core::Device;

use crate::gpu;

/// Measures the peak memory of tensors on a GPU, relative to the start of the measurement.
#[derive(Debug)]
pub struct DeviceMemory {
    device: Device,
    before: u64,
}

impl DeviceMemory {
    /// Starts the measurement.
    pub fn watch(device: &Device) -> DeviceMemory {
        // The second call returns the memory in use.
        let before = take_peak(device).and_then(|_| take_peak(device)).unwrap_or(0);
        DeviceMemory { device: device.clone(), before }
    }

    /// The peak in bytes since the last call; `None` without a GPU.
    pub fn peak(&self) -> Option<u64> {
        take_peak(&self.device).map(|peak| peak.saturating_sub(self.before))
    }
}

fn take_peak(device: &Device) -> Option<u64> {
    gpu::take_peak_memory(device).ok().flatten()
}

/// Index and model of a GPU; `None` for the CPU.
pub(super) fn name(device: &Device) -> Option<(usize, Option<String>)> {
    gpu::name(device).ok().flatten()
}
