//! Memory that this process may still take.

use std::fs;

use rustix::process::{Resource, getrlimit};

use crate::report::environment::kilobytes;

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
