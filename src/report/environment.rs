//! The machine that a report was made on.

use std::fs;

use serde::{Deserialize, Serialize};

use crate::kernel;

/// What the machine offers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Environment {
    /// Name of the processor.
    pub cpu: Option<String>,
    /// Cores that this process may use.
    pub cores: usize,
    /// Main memory.
    pub memory_bytes: Option<u64>,
    /// Name of the GPU that was used.
    pub gpu: Option<String>,
    /// Version of ONNX Runtime that was used.
    pub onnxruntime: Option<String>,
    /// Instruction set of the kernels.
    pub simd: String,
    /// What multiplies int8 on this processor: `avx512-vnni`, `avx-vnni`, `dotprod`, or `none` where products of two bytes are
    /// added in 16 bits and saturate.
    #[serde(default)]
    pub int8: String,
}

impl Environment {
    /// Looks around.
    pub fn detect() -> Environment {
        Environment {
            cpu: field("/proc/cpuinfo", "model name"),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            memory_bytes: kilobytes("/proc/meminfo", "MemTotal"),
            gpu: None,
            onnxruntime: None,
            simd: kernel::instruction_set().into(),
            int8: int8().into(),
        }
    }
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

/// The most memory that this process has resident, lap by lap, where the system tells.
#[derive(Debug)]
pub(crate) struct Peak {
    highest: Option<u64>,
}

impl Peak {
    /// Begins the first lap.
    pub fn start() -> Peak {
        forget_peak_rss();
        Peak { highest: None }
    }

    /// The most of the lap that ends here; the next one begins.
    pub fn lap(&mut self) -> Option<u64> {
        let lap = kilobytes("/proc/self/status", "VmHWM");
        forget_peak_rss();
        self.highest = self.highest.max(lap);
        lap
    }

    /// The most of all laps, with the one that ends here.
    pub fn highest(&mut self) -> Option<u64> {
        self.lap();
        self.highest
    }
}

/// Begins to count anew, where the system allows it.
fn forget_peak_rss() {
    // Without it the figure is too high, never too low.
    let _ = fs::write("/proc/self/clear_refs", "5");
}

fn field(path: &str, key: &str) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let line = text.lines().find(|line| line.starts_with(key))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

/// A figure of a file of the system, in bytes.
pub(crate) fn kilobytes(path: &str, key: &str) -> Option<u64> {
    field(path, key)?.split_whitespace().next()?.parse::<u64>().ok().map(|kb| kb * 1024)
}
