//! Memory that this process may still take, and what of it models may.

use std::fs;

use candle_core::Device;
use rustix::process::{Resource, getrlimit};

use crate::model::Model;
use crate::report::environment::kilobytes;
use crate::report::format::bytes;
use crate::store::ByteSize;
use crate::work::MemoryLimit;

/// The memory that models may take: what was asked for, else most of what is free where they run on the processor.
pub fn memory_limit(asked: Option<ByteSize>, device: &Device) -> MemoryLimit {
    let free = || if device.is_cpu() { free_memory() } else { None };
    let bytes = asked.map(|size| size.0).or_else(|| free().map(|free| free / 4 * 3));
    MemoryLimit { bytes, asked: asked.is_some() }
}

/// The reason if running models takes more memory than the run may take, or more than half of the free memory.
pub(super) fn lack_of_memory(running: &str, needed: u64, limit: Option<ByteSize>, free: Option<u64>) -> Option<String> {
    let takes = bytes(needed);
    if let Some(ByteSize(limit)) = limit.filter(|limit| limit.0 < needed) {
        return Some(format!("{running} takes about {takes} of memory, and the limit is {}", bytes(limit)));
    }
    let free = free.filter(|free| *free / 2 < needed)?;
    Some(format!("{running} takes about {takes} of memory, and {} are free: more free memory, or a machine with more", bytes(free)))
}

/// The reason if there is too little memory to run these models in ONNX Runtime, which copies weights when it packs them.
pub(super) fn lack_for_onnx_runtime(models: &[&Model], limit: Option<ByteSize>) -> Option<String> {
    let needed = models.iter().map(|model| model.stored_bytes().saturating_mul(2)).fold(0, u64::saturating_add);
    lack_of_memory("ONNX Runtime", needed, limit, free_memory())
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_of_the_free_memory_may_be_taken() {
        let (small, large) = (100 << 20, 28 << 30);
        assert_eq!((lack_of_memory("it", small, None, Some(1 << 30)), lack_of_memory("it", small, None, None)), (None, None));
        assert!(lack_of_memory("it", small, None, Some(150 << 20)).unwrap().contains("are free"));
        assert!(lack_of_memory("it", large, None, Some(8 << 30)).unwrap().contains("30.1 GB"));
        assert!(lack_of_memory("it", small, Some(ByteSize(50 << 20)), None).unwrap().contains("the limit is 52.4 MB"));
    }
}
