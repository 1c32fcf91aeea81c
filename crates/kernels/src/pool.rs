//! Computations on the threads of the pool.

use std::hint::spin_loop;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rayon::Yield;

/// Number of times in a row that a waiting thread looks for jobs, about two milliseconds.
const ATTEMPTS: usize = 4096;
/// Pauses between two attempts.
const PAUSES: usize = 8;
/// Of this many attempts, one is followed by an offer of the processor to other programs.
const OFFERS: usize = 32;

/// Computes on a thread of the pool. Parallel loops start there without waking a thread from outside, and
/// those of a single job run immediately. `work` must not wait for other threads that use the pool.
pub fn on_pool_thread<R: Send>(work: impl FnOnce() -> R + Send) -> R {
    if rayon::current_thread_index().is_some() { work() } else { rayon::scope(|_| work()) }
}

/// Computes on the thread that calls it, while the other threads of the pool wait for jobs without sleeping,
/// unless they find none for a while. For many short loops, such as those of a single token, whose threads
/// would take as long to wake up as to compute.
pub fn awake<R>(work: impl FnOnce() -> R) -> R {
    if rayon::current_num_threads() < 2 {
        return work();
    }
    let end = End(Arc::new(AtomicBool::new(false)));
    let (caller, is_over) = (rayon::current_thread_index(), end.0.clone());
    rayon::spawn_broadcast(move |thread| {
        if Some(thread.index()) != caller {
            wait_for_jobs(|| is_over.load(Ordering::Relaxed));
        }
    });
    work()
}

/// Sets the flag when the work ends, also by a panic.
struct End(Arc<AtomicBool>);

impl Drop for End {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn wait_for_jobs(is_over: impl Fn() -> bool) {
    let mut attempts = 0;
    while attempts < ATTEMPTS && !is_over() {
        attempts = if rayon::yield_now() == Some(Yield::Executed) { 0 } else { attempts + 1 };
        (0..PAUSES).for_each(|_| spin_loop());
        if attempts % OFFERS == OFFERS - 1 {
            std::thread::yield_now();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use rayon::prelude::*;

    use super::*;

    /// Loops inside have their results, several callers share the threads, and no thread waits afterwards.
    #[test]
    fn threads_that_wait_run_jobs() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
        let sum = |count: u64| (0..count).into_par_iter().map(|value| value * value).sum::<u64>();
        let expected = |count: u64| (0..count).map(|value| value * value).sum::<u64>();
        let found: Vec<u64> = pool.install(|| (0..40).into_par_iter().map(|count| awake(|| (0..20).map(|_| sum(count)).sum::<u64>())).collect());
        assert!(found.iter().zip(0..).all(|(found, count)| *found == 20 * expected(count)), "{found:?}");
        assert_eq!(awake(|| sum(9)), expected(9));
        let panicked = catch_unwind(AssertUnwindSafe(|| pool.install(|| awake(|| assert_eq!(sum(3), 6, "as intended")))));
        assert!(panicked.is_err());
        // Every thread takes part, because none waits any more.
        assert_eq!(pool.broadcast(|thread| thread.index()), [0, 1, 2]);
    }
}
