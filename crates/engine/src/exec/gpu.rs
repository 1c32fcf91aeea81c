//! NVIDIA GPUs: peak memory and device names.

use std::fmt;
use std::time::Duration;

use candle_core::Device;
use candle_core::cuda_backend::cudarc::driver::result::mem_get_info;

use crate::work::HighWater;

/// Sampling interval. The driver releases memory when a stream is synchronized, so that peaks last longer
/// than this.
const INTERVAL: Duration = Duration::from_millis(2);

type MemoryProbe = Box<dyn Fn() -> Option<u64> + Send + Sync>;

/// Measures the peak of allocated device memory, relative to the start of the measurement; `None` on the
/// CPU.
pub struct DeviceMemory {
    watch: Option<HighWater<MemoryProbe>>,
}

impl fmt::Debug for DeviceMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceMemory").finish_non_exhaustive()
    }
}

impl DeviceMemory {
    /// Starts the measurement.
    pub fn watch(device: &Device) -> DeviceMemory {
        DeviceMemory { watch: used_memory(device).map(|probe| HighWater::start(INTERVAL, probe)) }
    }

    /// The peak in bytes since the last call; `None` without a GPU.
    pub fn peak(&self) -> Option<u64> {
        self.watch.as_ref().map(HighWater::take)
    }
}

/// A function that returns the device memory allocated since now.
fn used_memory(device: &Device) -> Option<MemoryProbe> {
    let Device::Cuda(cuda) = device else { return None };
    let context = cuda.cuda_stream().context().clone();
    // Does not query the context itself, which would return its pending errors to this caller.
    let free = move || {
        context.bind_to_thread().ok()?;
        mem_get_info().ok().map(|(free, _)| free as u64)
    };
    let before = free()?;
    Some(Box::new(move || free().map(|now| before.saturating_sub(now))))
}

/// Index and model of a GPU; `None` for the CPU.
pub(super) fn name(device: &Device) -> Option<(usize, Option<String>)> {
    let Device::Cuda(cuda) = device else { return None };
    let context = cuda.cuda_stream().context().clone();
    Some((context.ordinal(), context.name().ok()))
}
