//! What a build for NVIDIA GPUs knows of them: the memory that a run takes, and their names.

use std::fmt;
use std::time::Duration;

use candle_core::Device;
use candle_core::cuda_backend::cudarc::driver::result::mem_get_info;

use crate::work::HighWater;

/// Between two looks. The driver gives memory back when a stream is waited for, so that peaks last longer than this.
const PAUSE: Duration = Duration::from_millis(2);

type Taken = Box<dyn Fn() -> Option<u64> + Send + Sync>;

/// Watches how much memory of a device is taken beyond what was taken when the watch began; on the CPU it sees nothing.
pub struct DeviceMemory {
    watch: Option<HighWater<Taken>>,
}

impl fmt::Debug for DeviceMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceMemory").finish_non_exhaustive()
    }
}

impl DeviceMemory {
    /// Begins to watch.
    pub fn watch(device: &Device) -> DeviceMemory {
        DeviceMemory { watch: taken(device).map(|taken| HighWater::start(PAUSE, taken)) }
    }

    /// The most bytes that were taken since this was asked last; none where no GPU is used.
    pub fn peak(&self) -> Option<u64> {
        self.watch.as_ref().map(HighWater::take)
    }
}

/// What is taken of a device beyond what is taken now.
fn taken(device: &Device) -> Option<Taken> {
    let Device::Cuda(cuda) = device else { return None };
    let context = cuda.cuda_stream().context().clone();
    // The context itself is not asked: it would hand its pending errors to this caller.
    let free = move || {
        context.bind_to_thread().ok()?;
        mem_get_info().ok().map(|(free, _)| free as u64)
    };
    let before = free()?;
    Some(Box::new(move || free().map(|now| before.saturating_sub(now))))
}

/// The number and the model of a GPU, if the device is one.
pub(super) fn name(device: &Device) -> Option<(usize, Option<String>)> {
    let Device::Cuda(cuda) = device else { return None };
    let context = cuda.cuda_stream().context().clone();
    Some((context.ordinal(), context.name().ok()))
}
