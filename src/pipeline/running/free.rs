//! Memory that this process may still take, and what of it models may.

use std::fs;

use candle_core::Device;
use rustix::process::{Resource, getrlimit};

use crate::report::environment::kilobytes;
use crate::store::ByteSize;
use crate::work::MemoryLimit;

/// The memory that models may take: what was asked for, else most of what is free where they run on the processor.
pub fn memory_limit(asked: Option<ByteSize>, device: &Device) -> MemoryLimit {
    let free = || if device.is_cpu() { free_memory() } else { None };
    let bytes = asked.map(|size| size.0).or_else(|| free().map(|free| free / 4 * 3));
    MemoryLimit { bytes, asked: asked.is_some() }
}

/// Bytes that can be taken without swapping or being refused: of the machine, of the control group, of the address space; nothing where
/// the system does not tell.
pub(super) fn free_memory() -> Option<u64> {
    let machine = kilobytes("/proc/meminfo", "MemAvailable");
    let addresses = getrlimit(Resource::As).current.map(|limit| limit.saturating_sub(kilobytes("/proc/self/status", "VmSize").unwrap_or(0)));
    [machine, addresses, control_group()].into_iter().flatten().min()
}

/// What the control group of this process has left, its page cache counted as free.
fn control_group() -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = groups.lines().find_map(|line| line.strip_prefix("0::"))?;
    let read = |name: &str| [path, ""].iter().find_map(|path| fs::read_to_string(format!("/sys/fs/cgroup{path}/{name}")).ok());
    let limit: u64 = read("memory.max")?.trim().parse().ok()?;
    let statistics = read("memory.stat")?;
    let used: u64 = statistics.lines().find_map(|line| line.strip_prefix("anon "))?.parse().ok()?;
    Some(limit.saturating_sub(used))
}
