//! Passes on the threads of the pool.

use candle_core::Device;

use super::transfer;
use crate::kernel::pool;

/// Computes on a thread of the pool if the device is the CPU. Parallel loops start there without waking a
/// thread from outside, and those of a single job run immediately. `work` must not wait for other threads
/// that use the pool.
pub fn on_pool_thread<R: Send>(device: &Device, work: impl FnOnce() -> R + Send) -> R {
    if !device.is_cpu() || rayon::current_thread_index().is_some() {
        return work();
    }
    let (result, copies) = pool::on_pool_thread(|| transfer::counting(work));
    transfer::add_copies(copies);
    result
}

/// Computes while the other threads of the pool do not sleep, if the device is the CPU.
pub(super) fn while_awake<R>(device: &Device, work: impl FnOnce() -> R) -> R {
    if device.is_cpu() { pool::awake(work) } else { work() }
}

#[cfg(test)]
mod tests {
    use super::super::transfer::{Cause, Copies, Direction};
    use super::*;

    #[test]
    fn copies_of_a_pass_are_those_of_its_caller() {
        let made = |count| Copies::from([((Direction::In, Cause::Batch), count)]);
        let before = transfer::copies();
        let outside = std::thread::current().id();
        let inside = on_pool_thread(&Device::Cpu, || {
            transfer::add_copies(made(2));
            let first = std::thread::current().id();
            on_pool_thread(&Device::Cpu, || transfer::add_copies(made(1)));
            assert_eq!((transfer::copies(), std::thread::current().id()), (made(3), first));
            first
        });
        assert_ne!(inside, outside);
        assert!(before.is_empty());
        assert_eq!(transfer::copies(), made(3));
        // The thread of the pool has counted nothing for itself.
        rayon::broadcast(|_| assert_eq!(transfer::copies(), Copies::new()));
    }
}
