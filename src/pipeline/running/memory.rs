//! Memory available to this process, and the memory limit of running models.

use std::fs;

use candle_core::Device;
use rustix::process::{Resource, getrlimit};

use crate::model::Model;
use crate::report::environment::kilobytes;
use crate::report::format::bytes;
use crate::store::ByteSize;
use crate::work::MemoryLimit;

/// The memory limit of running models: the requested one; otherwise three quarters of the free memory on
/// the CPU, and none on other devices.
pub fn memory_limit(requested: Option<ByteSize>, device: &Device) -> MemoryLimit {
    let free = || if device.is_cpu() { free_memory() } else { None };
    let bytes = requested.map(|size| size.0).or_else(|| free().map(|free| free / 4 * 3));
    MemoryLimit { bytes, explicit: requested.is_some() }
}

/// The reason not to run models if that needs more memory than the limit, or more than half of the free
/// memory.
pub(super) fn lack_of_memory(running: &str, needed: u64, limit: Option<ByteSize>, free: Option<u64>) -> Option<String> {
    let required = bytes(needed);
    if let Some(ByteSize(limit)) = limit.filter(|limit| limit.0 < needed) {
        return Some(format!("{running} needs about {required} of memory, but the limit is {}", bytes(limit)));
    }
    let free = free.filter(|free| *free / 2 < needed)?;
    Some(format!(
        "{running} needs about {required} of memory, but only {} are free and at most half of that is used: free memory, or use a larger machine",
        bytes(free)
    ))
}

/// The reason not to run these models in ONNX Runtime if memory is short. ONNX Runtime copies weights
/// when it packs them, so they count twice.
pub(super) fn lack_for_onnx_runtime(models: &[&Model], limit: Option<ByteSize>) -> Option<String> {
    let needed = models.iter().map(|model| model.stored_bytes().saturating_mul(2)).fold(0, u64::saturating_add);
    lack_of_memory("ONNX Runtime", needed, limit, free_memory())
}

/// Bytes that can be allocated without swapping or failing: the minimum over the machine, the control
/// group and the address space. `None` if the system reports none of them.
pub(super) fn free_memory() -> Option<u64> {
    let machine = kilobytes("/proc/meminfo", "MemAvailable");
    let addresses = getrlimit(Resource::As).current.map(|limit| limit.saturating_sub(kilobytes("/proc/self/status", "VmSize").unwrap_or(0)));
    [machine, addresses, control_group()].into_iter().flatten().min()
}

/// Bytes left in the control group of this process. Its page cache counts as free.
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
    fn half_of_the_free_memory_may_be_used() {
        let (small, large) = (100 << 20, 28 << 30);
        assert_eq!((lack_of_memory("it", small, None, Some(1 << 30)), lack_of_memory("it", small, None, None)), (None, None));
        assert!(lack_of_memory("it", small, None, Some(150 << 20)).unwrap().contains("are free"));
        assert!(lack_of_memory("it", large, None, Some(8 << 30)).unwrap().contains("30.1 GB"));
        assert!(lack_of_memory("it", small, Some(ByteSize(50 << 20)), None).unwrap().contains("the limit is 52.4 MB"));
    }
}
