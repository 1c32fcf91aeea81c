//! Which device computes.

use std::fmt;
use std::str::FromStr;

use candle_core::Device;

use crate::error::{Error, Result};

/// A device as it is asked for: `auto`, `cpu`, `cuda` or `cuda:N`; for tests also `cpu:strict`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Choice {
    /// The first GPU where there is one, else the CPU.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// The CPU, treated as if it were a device of its own: no kernels of the host, and copies are counted and held to what is needed.
    Strict,
    /// The GPU of this number.
    Cuda(usize),
}

impl FromStr for Choice {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match (text, text.strip_prefix("cuda:").map(str::parse)) {
            ("auto", _) => Ok(Choice::Auto),
            ("cpu", _) => Ok(Choice::Cpu),
            ("cpu:strict", _) => Ok(Choice::Strict),
            ("cuda", _) => Ok(Choice::Cuda(0)),
            (_, Some(Ok(number))) => Ok(Choice::Cuda(number)),
            _ => Err(Error::option("device", format!("`{text}` is none of auto, cpu, cuda, cuda:N"))),
        }
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Choice::Auto => f.write_str("auto"),
            Choice::Cpu => f.write_str("cpu"),
            Choice::Strict => f.write_str("cpu:strict"),
            Choice::Cuda(number) => write!(f, "cuda:{number}"),
        }
    }
}

impl Choice {
    /// Opens the device.
    ///
    /// # Errors
    /// A GPU is asked for, and there is none, or this build cannot use it.
    pub fn open(self) -> Result<Device> {
        self.open_for(0)
    }

    /// Opens the device of one of several processes on this machine: each takes the next GPU by its number there, and begins again
    /// behind the last.
    ///
    /// # Errors
    /// As [`open`](Choice::open).
    pub fn open_for(self, local_rank: usize) -> Result<Device> {
        let gpu = |first| gpu(beside(first, local_rank, count()));
        match self {
            Choice::Cpu => Ok(Device::Cpu),
            Choice::Strict => {
                crate::ir::ops::disable();
                super::transfer::be_strict();
                Ok(Device::Cpu)
            }
            // Why there is none is told by `reason`.
            Choice::Auto => Ok(gpu(0).unwrap_or(Device::Cpu)),
            Choice::Cuda(first) => gpu(first),
        }
    }

    /// What was chosen and why, where the choice was left open and this program can use GPUs.
    pub fn reason(self) -> Option<String> {
        if self != Choice::Auto || !candle_core::utils::cuda_is_available() {
            return None;
        }
        Some(match gpu(0) {
            Ok(_) => "device `auto`: computing on the GPU `cuda:0`".into(),
            Err(e) => format!("device `auto`: computing on the CPU, for {e}; name `cuda:0` to be refused instead"),
        })
    }
}

/// What a device is called, in the words that [`Choice`] takes; and of a GPU, its model.
pub fn name(device: &Device) -> (String, Option<String>) {
    match super::gpu::name(device) {
        Some((number, model)) => (Choice::Cuda(number).to_string(), model),
        None => (Choice::Cpu.to_string(), None),
    }
}

/// The number of a process's GPU, of so many that it sees: perhaps its own alone.
fn beside(first: usize, local_rank: usize, count: usize) -> usize {
    let number = first.saturating_add(local_rank);
    if local_rank == 0 { number } else { number.checked_rem(count).unwrap_or(number) }
}

/// How many GPUs there are.
fn count() -> usize {
    #[cfg(feature = "cuda")]
    let count = candle_core::cuda_backend::cudarc::driver::CudaContext::device_count().map_or(0, |count| usize::try_from(count).unwrap_or(0));
    #[cfg(not(feature = "cuda"))]
    let count = 0;
    count
}

fn gpu(number: usize) -> Result<Device> {
    let what = Choice::Cuda(number);
    if !candle_core::utils::cuda_is_available() {
        let hint = "build with `--features cuda` (scripts/cuda-toolchain brings the compiler), or use the device `cpu`";
        return Err(Error::run(format!("device `{what}`"), "this program was built without CUDA", hint));
    }
    // One explicit stream for all threads: the per-thread default stream would order nothing between a thread that loads parameters, or
    // reduces gradients, and the thread that computes.
    Device::new_cuda_with_stream(number)
        .map_err(|e| Error::run(format!("device `{what}`"), e, "`nvidia-smi` lists the GPUs there are; the device `cpu` is always there"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_read_and_written() {
        for text in ["auto", "cpu", "cpu:strict", "cuda:0", "cuda:3"] {
            assert_eq!(text.parse::<Choice>().unwrap().to_string(), text);
        }
        assert_eq!("cuda".parse::<Choice>().unwrap(), Choice::Cuda(0));
        for text in ["", "gpu", "cuda:", "cuda:x", "cuda:-1"] {
            assert!(text.parse::<Choice>().unwrap_err().is_misuse(), "{text}");
        }
    }

    #[test]
    fn processes_on_a_machine_take_one_gpu_each() {
        let numbers = |first, count| (0..4).map(|rank| beside(first, rank, count)).collect::<Vec<_>>();
        assert_eq!(numbers(0, 4), [0, 1, 2, 3]);
        assert_eq!(numbers(1, 4), [1, 2, 3, 0]);
        // A launcher that shows every process its own alone.
        assert_eq!(numbers(0, 1), [0; 4]);
        // What is asked for of one process is what it gets, or is refused.
        assert_eq!(beside(7, 0, 2), 7);
    }

    #[test]
    fn a_build_without_cuda_says_so() {
        assert!(Choice::Auto.open().is_ok());
        assert_eq!(name(&Choice::Cpu.open().unwrap()), ("cpu".to_owned(), None));
        if !candle_core::utils::cuda_is_available() {
            let error = Choice::Cuda(0).open().unwrap_err();
            assert!(error.hint().unwrap().contains("--features cuda"), "{error}");
            assert!(!error.is_misuse());
        }
    }
}
