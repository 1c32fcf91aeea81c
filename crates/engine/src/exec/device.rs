//! Selection of the compute device.

use std::fmt;
use std::str::FromStr;

use candle_core::Device;

use crate::error::{Error, Result};

/// A device option: `auto`, `cpu`, `cuda` or `cuda:N`; for tests also `cpu:strict`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The first GPU if there is one, else the CPU.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// The CPU treated like an accelerator: without host kernels, and with all copies counted.
    Strict,
    /// The GPU with this index.
    Cuda(usize),
}

impl FromStr for DeviceChoice {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match (text, text.strip_prefix("cuda:").map(str::parse)) {
            ("auto", _) => Ok(DeviceChoice::Auto),
            ("cpu", _) => Ok(DeviceChoice::Cpu),
            ("cpu:strict", _) => Ok(DeviceChoice::Strict),
            ("cuda", _) => Ok(DeviceChoice::Cuda(0)),
            (_, Some(Ok(number))) => Ok(DeviceChoice::Cuda(number)),
            _ => Err(Error::option("device", format!("`{text}` is not one of auto, cpu, cuda, cuda:N"))),
        }
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceChoice::Auto => f.write_str("auto"),
            DeviceChoice::Cpu => f.write_str("cpu"),
            DeviceChoice::Strict => f.write_str("cpu:strict"),
            DeviceChoice::Cuda(number) => write!(f, "cuda:{number}"),
        }
    }
}

impl DeviceChoice {
    /// Opens the device.
    pub fn open(self) -> Result<Device> {
        self.open_for(0)
    }

    /// Opens the device for one of several processes on this machine: the processes take consecutive
    /// GPUs, wrapping around after the last.
    pub fn open_for(self, local_rank: usize) -> Result<Device> {
        let gpu = |first| gpu(gpu_index(first, local_rank, crate::gpu::count().ok().flatten().unwrap_or(0)));
        match self {
            DeviceChoice::Cpu => Ok(Device::Cpu),
            DeviceChoice::Strict => {
                crate::ir::ops::disable();
                super::transfer::enable_strict();
                Ok(Device::Cpu)
            }
            // `reason` reports why the CPU was chosen.
            DeviceChoice::Auto => Ok(gpu(0).unwrap_or(Device::Cpu)),
            DeviceChoice::Cuda(first) => gpu(first),
        }
    }

    /// The device that is opened: for `auto` the first GPU if there is one, else the CPU.
    pub fn resolved(self) -> DeviceChoice {
        match self {
            DeviceChoice::Auto if crate::gpu::count().ok().flatten().is_some_and(|count| count > 0) => DeviceChoice::Cuda(0),
            DeviceChoice::Auto => DeviceChoice::Cpu,
            other => other,
        }
    }

    /// The chosen device and the reason, for `auto` in a build that supports GPUs.
    pub fn reason(self) -> Option<String> {
        if self != DeviceChoice::Auto || !candle_core::utils::cuda_is_available() {
            return None;
        }
        Some(match gpu(0) {
            Ok(_) => "device `auto`: computing on the GPU `cuda:0`".into(),
            Err(e) => format!("device `auto`: computing on the CPU, because {e}; pass `cuda:0` to make this an error"),
        })
    }
}

/// The name of a device as [`DeviceChoice`] parses it, and the model of a GPU.
pub fn device_name(device: &Device) -> (String, Option<String>) {
    match super::gpu::name(device) {
        Some((number, model)) => (DeviceChoice::Cuda(number).to_string(), model),
        None if super::transfer::is_strict() => (DeviceChoice::Strict.to_string(), None),
        None => (DeviceChoice::Cpu.to_string(), None),
    }
}

/// The GPU model or the name of the device, and the instruction set: floating-point results of two runs with
/// the same hardware are equal.
pub fn hardware(device: &Device) -> String {
    let (name, gpu) = device_name(device);
    format!("{} {}", gpu.unwrap_or(name), crate::kernel::instruction_set())
}

/// The index of the GPU for a process, out of `count` visible ones; the launcher may show each process
/// only its own.
fn gpu_index(first: usize, local_rank: usize, count: usize) -> usize {
    let number = first.saturating_add(local_rank);
    if local_rank == 0 { number } else { number.checked_rem(count).unwrap_or(number) }
}

fn gpu(number: usize) -> Result<Device> {
    let what = DeviceChoice::Cuda(number);
    let without_cuda = || {
        let hint = "use the device `cpu`, or build the program from its sources with CUDA: `cargo build --release --features cuda`";
        Error::run(format!("device `{what}`"), "this program was built without CUDA", hint)
    };
    // One explicit stream for all threads: the per-thread default stream would not order operations
    // between a thread that loads parameters or reduces gradients and the thread that computes.
    let opened = crate::gpu::open(number);
    opened
        .map_err(|e| Error::run(format!("device `{what}`"), e, "`nvidia-smi` lists the available GPUs; the device `cpu` always works"))?
        .ok_or_else(without_cuda)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_parsed_and_displayed() {
        for text in ["auto", "cpu", "cpu:strict", "cuda:0", "cuda:3"] {
            assert_eq!(text.parse::<DeviceChoice>().unwrap().to_string(), text);
        }
        assert_eq!("cuda".parse::<DeviceChoice>().unwrap(), DeviceChoice::Cuda(0));
        for text in ["", "gpu", "cuda:", "cuda:x", "cuda:-1"] {
            assert!(text.parse::<DeviceChoice>().unwrap_err().is_misuse(), "{text}");
        }
    }

    #[test]
    fn processes_on_a_machine_take_one_gpu_each() {
        let numbers = |first, count| (0..4).map(|rank| gpu_index(first, rank, count)).collect::<Vec<_>>();
        assert_eq!(numbers(0, 4), [0, 1, 2, 3]);
        assert_eq!(numbers(1, 4), [1, 2, 3, 0]);
        // A launcher that shows each process only its own GPU.
        assert_eq!(numbers(0, 1), [0; 4]);
        // A single process gets exactly the requested GPU.
        assert_eq!(gpu_index(7, 0, 2), 7);
    }

    #[test]
    fn a_build_without_cuda_reports_it() {
        assert!(DeviceChoice::Auto.open().is_ok());
        assert_eq!(device_name(&DeviceChoice::Cpu.open().unwrap()), ("cpu".to_owned(), None));
        if !candle_core::utils::cuda_is_available() {
            let error = DeviceChoice::Cuda(0).open().unwrap_err();
            assert!(error.hint().unwrap().contains("--features cuda"), "{error}");
            assert!(!error.is_misuse());
        }
    }
}
