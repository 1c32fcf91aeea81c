//! What a build for NVIDIA GPUs knows of them: the memory that a run takes, and their names.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use candle_core::Device;
use candle_core::cuda_backend::cudarc::driver::result::mem_get_info;

/// Between two looks. The driver gives memory back when a stream is waited for, so that peaks last longer than this.
const PAUSE: Duration = Duration::from_millis(2);

#[derive(Debug)]
struct Seen {
    /// Bytes that were free at first.
    free: u64,
    peak: AtomicU64,
    over: AtomicBool,
}

impl Seen {
    /// On a thread that is bound to the device. The context itself is not asked: it would hand its pending errors to this caller.
    fn look(&self) {
        if let Ok((free, _)) = mem_get_info() {
            self.peak.fetch_max(self.free.saturating_sub(free as u64), Ordering::Relaxed);
        }
    }
}

/// Watches how much memory of a device is taken beyond what was taken when the watch began; on the CPU it sees nothing.
#[derive(Debug)]
pub struct DeviceMemory {
    watch: Option<Watch>,
}

impl DeviceMemory {
    /// Begins to watch.
    pub fn watch(device: &Device) -> DeviceMemory {
        DeviceMemory { watch: Watch::start(device) }
    }

    /// The most bytes that were taken since this was asked last; none where no GPU is used.
    pub fn peak(&self) -> Option<u64> {
        self.watch.as_ref().map(Watch::peak)
    }
}

/// The number and the model of a GPU, if the device is one.
pub(super) fn name(device: &Device) -> Option<(usize, Option<String>)> {
    let Device::Cuda(cuda) = device else { return None };
    let context = cuda.cuda_stream().context().clone();
    Some((context.ordinal(), context.name().ok()))
}

/// A thread that asks the driver again and again.
#[derive(Debug)]
struct Watch {
    seen: Arc<Seen>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    fn start(device: &Device) -> Option<Watch> {
        let Device::Cuda(cuda) = device else { return None };
        let context = cuda.cuda_stream().context().clone();
        context.bind_to_thread().ok()?;
        let (free, _) = mem_get_info().ok()?;
        let seen = Arc::new(Seen { free: free as u64, peak: AtomicU64::new(0), over: AtomicBool::new(false) });
        let watched = seen.clone();
        let thread = std::thread::Builder::new().spawn(move || {
            let bound = context.bind_to_thread().is_ok();
            while bound && !watched.over.load(Ordering::Relaxed) {
                watched.look();
                std::thread::sleep(PAUSE);
            }
        });
        Some(Watch { seen, thread: thread.ok() })
    }

    fn peak(&self) -> u64 {
        self.seen.look();
        self.seen.peak.swap(0, Ordering::Relaxed)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.seen.over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
