//! The machine that a report was made on.

use std::fs;
use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::work::{HighWater, resident};
use crate::{kernel, program};

/// What the machine offers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Environment {
    /// Name of the processor.
    pub cpu: Option<String>,
    /// Cores that this process may use.
    pub cores: usize,
    /// Main memory.
    pub memory_bytes: Option<u64>,
    /// Name of the GPU that was used, or else of the first one that there is.
    pub gpu: Option<String>,
    /// Where models ran: `cpu` or `cuda:N`. Passes over weights run on the CPU.
    #[serde(default)]
    pub device: Option<String>,
    /// Version of ONNX Runtime that was used.
    pub onnxruntime: Option<String>,
    /// Its library.
    #[serde(default)]
    pub onnxruntime_path: Option<String>,
    /// Instruction set of the kernels.
    pub simd: String,
    /// What multiplies int8 on this processor: `avx512-vnni`, `avx-vnni`, `dotprod`, or `none` where products of two bytes are
    /// added in 16 bits and saturate.
    #[serde(default)]
    pub int8: String,
}

impl Environment {
    /// The same with models run on a device, by its name and the GPU's where it is one, and by ONNX Runtime, by its version and file.
    #[must_use]
    pub fn on(self, (device, gpu): (String, Option<String>), onnxruntime: Option<(String, String)>) -> Environment {
        let (onnxruntime, onnxruntime_path) = onnxruntime.unzip();
        Environment { device: Some(device), gpu: gpu.or(self.gpu), onnxruntime, onnxruntime_path, ..self }
    }

    /// Looks around; models have not run.
    pub fn detect() -> Environment {
        Environment {
            cpu: field("/proc/cpuinfo", "model name"),
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

/// The name of the first GPU, as its driver tells it in a folder for each; or as a program tells it, where only that can see them.
fn gpu(folder: &Path, smi: &str) -> Option<String> {
    let mut folders: Vec<_> = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    folders.sort();
    let told = || {
        let text = program::ask(smi, ["--query-gpu=name", "--format=csv,noheader"]).ok()?;
        text.lines().next().map(|name| name.trim().to_owned())
    };
    folders.iter().find_map(|folder| field(folder.join("information"), "Model")).or_else(told).filter(|name| !name.is_empty())
}

/// The instructions that runtimes multiply bytes with, as the system names them.
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

/// The most memory of a lap.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Lap {
    /// Resident in main memory, where the system tells.
    pub rss_bytes: Option<u64>,
    /// Taken of a GPU, where one is used.
    pub vram_bytes: Option<u64>,
}

/// Between two looks at what is resident.
const PAUSE: Duration = Duration::from_millis(5);

/// The most memory that this process takes, lap by lap. The system's own count of the most is left alone, since others read it too: it
/// holds for a lap that has raised it, and other laps have what was seen again and again.
pub(crate) struct Peak {
    highest: Lap,
    system: Option<u64>,
    resident: HighWater<fn() -> Option<u64>>,
    vram: Box<dyn Fn() -> Option<u64>>,
}

impl Peak {
    /// Begins the first lap of a run without a GPU.
    pub fn start() -> Peak {
        Peak::of(|| None)
    }

    /// Begins the first lap; `vram` tells the most memory of a GPU since it was asked last.
    pub fn of(vram: impl Fn() -> Option<u64> + 'static) -> Peak {
        Peak { highest: Lap::default(), system: system_peak(), resident: HighWater::start(PAUSE, resident), vram: Box::new(vram) }
    }

    /// The most of the lap that ends here; the next one begins.
    pub fn lap(&mut self) -> Lap {
        let (before, seen) = (self.system, Some(self.resident.take()).filter(|seen| *seen > 0));
        self.system = system_peak();
        let lap = Lap { rss_bytes: if self.system > before { self.system } else { seen }, vram_bytes: (self.vram)() };
        self.highest = Lap { rss_bytes: self.highest.rss_bytes.max(lap.rss_bytes), vram_bytes: self.highest.vram_bytes.max(lap.vram_bytes) };
        lap
    }

    /// The most of all laps, with the one that ends here.
    pub fn highest(&mut self) -> Lap {
        self.lap();
        self.highest
    }
}

/// The most that this process has had in memory since it began, where the system says it.
fn system_peak() -> Option<u64> {
    kilobytes("/proc/self/status", "VmHWM")
}

fn field(path: impl AsRef<Path>, key: &str) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let line = text.lines().find(|line| line.starts_with(key))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

/// A figure of a file of the system, in bytes.
pub(crate) fn kilobytes(path: &str, key: &str) -> Option<u64> {
    field(path, key)?.split_whitespace().next()?.parse::<u64>().ok().map(|kb| kb * 1024)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_gpu_is_named_by_what_there_is() {
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

    #[test]
    fn laps_know_their_own_memory() {
        let taken = std::cell::Cell::new(0);
        let mut peak = Peak::of(move || {
            taken.set(taken.get() + 1);
            Some([5, 9, 2, 0][taken.get() - 1])
        });
        assert_eq!((0..3).map(|_| peak.lap().vram_bytes.unwrap()).collect::<Vec<_>>(), [5, 9, 2]);
        assert_eq!(peak.highest().vram_bytes, Some(9));
        assert_eq!(Peak::start().lap().vram_bytes, None);
    }

    #[test]
    fn a_lap_is_measured_and_the_count_of_the_system_stays() {
        let mut peak = Peak::start();
        let taken = std::hint::black_box(vec![1u8; 96 << 20]);
        let seen = peak.resident.take();
        drop(taken);
        let lap = peak.lap().rss_bytes.unwrap();
        assert!(seen >= 96 << 20 && lap >= 96 << 20, "{seen} and {lap}");
        assert!(peak.lap().rss_bytes.is_some() && system_peak().unwrap() >= lap);
        assert_eq!(peak.highest().rss_bytes.max(Some(lap)), peak.highest().rss_bytes);
    }
}
