//! Hardware and runtimes of the machine, and peak memory of the process.

use std::fs;
use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::work::{HighWater, resident};
use crate::{kernel, program};

/// Hardware and runtimes of a machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(schemars::JsonSchema))]
pub struct Environment {
    /// Name of the CPU.
    pub(crate) cpu: Option<String>,
    /// Number of cores that this process may use.
    pub(crate) cores: usize,
    /// Size of the main memory in bytes.
    pub(crate) memory_bytes: Option<u64>,
    /// Name of the GPU that was used, otherwise of the first GPU, if there is one.
    pub(crate) gpu: Option<String>,
    /// Device on which models ran: `cpu` or `cuda:N`. Passes over weights run on the CPU.
    #[serde(default)]
    pub(crate) device: Option<String>,
    /// Version of ONNX Runtime, if it was used.
    pub(crate) onnxruntime: Option<String>,
    /// File name of its library. The full path could contain private information.
    #[serde(default)]
    pub(crate) onnxruntime_path: Option<String>,
    /// Instruction set of the kernels.
    pub(crate) simd: String,
    /// Instructions for int8 products: `avx512-vnni`, `avx-vnni`, `dotprod`, or `none` if products are
    /// accumulated in 16 bits and can saturate.
    #[serde(default)]
    pub(crate) int8: String,
}

impl Environment {
    /// The environment with the device that models ran on (its name, and that of the GPU) and ONNX
    /// Runtime (its version and path).
    #[doc(hidden)]
    #[must_use]
    pub fn on(self, (device, gpu): (String, Option<String>), onnxruntime: Option<(String, String)>) -> Environment {
        let (onnxruntime, path) = onnxruntime.unzip();
        let onnxruntime_path = path.and_then(|path: String| Some(Path::new(&path).file_name()?.to_string_lossy().into_owned()));
        Environment { device: Some(device), gpu: gpu.or(self.gpu), onnxruntime, onnxruntime_path, ..self }
    }

    /// Detects the hardware. The device is the CPU, and ONNX Runtime is not included.
    #[doc(hidden)]
    pub fn detect() -> Environment {
        Environment {
            cpu: processor(),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            memory_bytes: kilobytes("/proc/meminfo", "MemTotal"),
            gpu: gpu(Path::new("/proc/driver/nvidia/gpus"), "nvidia-smi"),
            device: Some("cpu".into()),
            onnxruntime: None,
            onnxruntime_path: None,
            simd: kernel::instruction_set().into(),
            int8: int8().into(),
        }
    }
}

/// Name of the first GPU, from the folders of its driver; otherwise from `nvidia-smi`, for systems that
/// hide these folders.
fn gpu(folder: &Path, smi: &str) -> Option<String> {
    let mut folders: Vec<_> = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    folders.sort();
    let from_smi = || {
        let text = program::run(smi, ["--query-gpu=name", "--format=csv,noheader"]).ok()?;
        text.lines().next().map(|name| name.trim().to_owned())
    };
    folders.iter().find_map(|folder| field(folder.join("information"), "Model")).or_else(from_smi).filter(|name| !name.is_empty())
}

/// The instructions for int8 products, from the flags of the CPU.
fn int8() -> &'static str {
    let flags = field("/proc/cpuinfo", "flags").or_else(|| field("/proc/cpuinfo", "Features")).unwrap_or_default();
    let has = |name: &str| flags.split_whitespace().any(|flag| flag == name);
    match () {
        () if has("avx512_vnni") => "avx512-vnni",
        () if has("avx_vnni") => "avx-vnni",
        () if has("asimddp") => "dotprod",
        () => "none",
    }
}

/// Peak memory of a lap.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Lap {
    /// Peak resident memory, if the system reports it.
    pub rss_bytes: Option<u64>,
    /// Peak GPU memory, if a GPU is used.
    pub vram_bytes: Option<u64>,
}

/// Interval at which the resident memory is sampled.
const SAMPLING_INTERVAL: Duration = Duration::from_millis(5);

/// Tracks the peak memory of this process in laps. The peak counter of the system is not reset, since
/// other tools read it too. It is used for laps that have raised it; for other laps, the maximum of
/// periodic samples is used.
pub(crate) struct Peak {
    highest: Lap,
    system: Option<u64>,
    resident: HighWater<fn() -> Option<u64>>,
    vram: Box<dyn Fn() -> Option<u64>>,
}

impl Peak {
    /// Starts the first lap of a run without a GPU.
    pub fn start() -> Peak {
        Peak::with_vram(|| None)
    }

    /// Starts the first lap. `vram` returns the peak GPU memory since its last call.
    pub fn with_vram(vram: impl Fn() -> Option<u64> + 'static) -> Peak {
        Peak { highest: Lap::default(), system: system_peak(), resident: HighWater::start(SAMPLING_INTERVAL, resident), vram: Box::new(vram) }
    }

    /// Ends the lap and returns its peak; the next lap starts.
    pub fn lap(&mut self) -> Lap {
        let (before, sampled) = (self.system, Some(self.resident.take()).filter(|bytes| *bytes > 0));
        self.system = system_peak();
        let lap = Lap { rss_bytes: peak_of_lap(before, self.system, sampled), vram_bytes: (self.vram)() };
        self.highest = Lap { rss_bytes: self.highest.rss_bytes.max(lap.rss_bytes), vram_bytes: self.highest.vram_bytes.max(lap.vram_bytes) };
        lap
    }

    /// Ends the lap and returns the peak over all laps.
    pub fn highest(&mut self) -> Lap {
        self.lap();
        self.highest
    }
}

/// Peak of a lap, from the counter of the system before and after it and the maximum of the samples.
fn peak_of_lap(before: Option<u64>, after: Option<u64>, sampled: Option<u64>) -> Option<u64> {
    if after > before { after } else { sampled }
}

/// The model of the processor, if the system reports it.
pub(crate) fn processor() -> Option<String> {
    field("/proc/cpuinfo", "model name")
}

/// Peak resident memory of this process since its start, if the system reports it.
fn system_peak() -> Option<u64> {
    kilobytes("/proc/self/status", "VmHWM")
}

/// The value of a field in a text file of the system.
fn field(path: impl AsRef<Path>, key: &str) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let line = text.lines().find(|line| line.starts_with(key))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

/// The value of a field in kilobytes, converted to bytes.
pub(crate) fn kilobytes(path: &str, key: &str) -> Option<u64> {
    field(path, key)?.split_whitespace().next()?.parse::<u64>().ok().map(|kb| kb * 1024)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn the_gpu_name_is_read_from_the_driver_or_nvidia_smi() {
        let folder = tempfile::tempdir().unwrap();
        let (gpus, program) = (folder.path().join("gpus"), folder.path().join("smi"));
        let found = || gpu(&gpus, program.to_str().unwrap());
        assert_eq!(found(), None);
        let script = |text: &str| {
            fs::write(&program, format!("#!/bin/sh\n{text}\n")).unwrap();
            fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        };
        script("echo no devices; exit 6");
        assert_eq!(found(), None);
        script("echo NVIDIA L4; echo NVIDIA T4");
        assert_eq!(found().as_deref(), Some("NVIDIA L4"));
        for (bus, model) in [("0000:41:00.0", "NVIDIA T4"), ("0000:01:00.0", "NVIDIA H200")] {
            fs::create_dir_all(gpus.join(bus)).unwrap();
            fs::write(gpus.join(bus).join("information"), format!("Model: \t\t {model}\nIRQ:   \t\t 16\n")).unwrap();
        }
        assert_eq!(found().as_deref(), Some("NVIDIA H200"));
    }

    /// Reports are published.
    #[test]
    fn the_path_of_a_library_is_not_part_of_the_environment() {
        let found = Environment::detect().on(("cpu".into(), None), Some(("1.23".into(), "/home/me/venv/libonnxruntime.so.1.23".into())));
        assert_eq!((found.onnxruntime.as_deref(), found.onnxruntime_path.as_deref()), (Some("1.23"), Some("libonnxruntime.so.1.23")));
        assert_eq!(Environment::detect().on(("cpu".into(), None), None).onnxruntime_path, None);
    }

    #[test]
    fn each_lap_has_its_own_peak() {
        let calls = std::cell::Cell::new(0);
        let mut peak = Peak::with_vram(move || {
            calls.set(calls.get() + 1);
            Some([5, 9, 2, 0][calls.get() - 1])
        });
        assert_eq!((0..3).map(|_| peak.lap().vram_bytes.unwrap()).collect::<Vec<_>>(), [5, 9, 2]);
        assert_eq!(peak.highest().vram_bytes, Some(9));
        assert_eq!(Peak::start().lap().vram_bytes, None);
    }

    #[test]
    fn laps_do_not_reset_the_counter_of_the_system() {
        let mut peak = Peak::start();
        let allocated = std::hint::black_box(vec![1u8; 96 << 20]);
        let lap = peak.lap().rss_bytes.unwrap();
        drop(allocated);
        assert!(lap >= 96 << 20, "{lap}");
        // A reset would reduce it by the freed memory. The counters of Linux are not exact.
        assert!(peak.lap().rss_bytes.is_some() && system_peak().unwrap() + (32 << 20) >= lap);
        assert!(peak.highest().rss_bytes.unwrap() >= lap);
    }

    /// Other tests of this process raise the counter too, so the values are given here.
    #[test]
    fn the_counter_of_the_system_is_the_peak_of_a_lap_that_has_raised_it() {
        assert_eq!(peak_of_lap(Some(5), Some(9), Some(7)), Some(9));
        assert_eq!(peak_of_lap(Some(9), Some(9), Some(7)), Some(7));
        assert_eq!(peak_of_lap(None, None, Some(7)), Some(7));
    }
}
