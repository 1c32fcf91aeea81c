//! Computations on the threads of the pool.

use std::cell::Cell;
use std::hint::spin_loop;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rayon::Yield;

/// Number of times in a row that a waiting thread looks for jobs: about two milliseconds.
const ATTEMPTS: usize = 4096;
/// Pauses between two attempts.
const PAUSES: usize = 8;
/// Of this many attempts, one is followed by a call that lets other programs run.
const YIELDING: usize = 32;

thread_local! {
    /// Whether the thread is in a call of [`awake`], or waits for its jobs.
    static IS_OCCUPIED: Cell<bool> = const { Cell::new(false) };
}

/// Computes on a thread of the pool. Parallel loops start there without waking a thread from outside, and
/// those of a single job run immediately. `work` must not wait for other threads that use the pool.
pub fn on_pool_thread<R: Send>(work: impl FnOnce() -> R + Send) -> R {
    if rayon::current_thread_index().is_some() { work() } else { rayon::scope(|_| work()) }
}

/// Computes on the thread that calls it, while the other threads of the pool wait for jobs without sleeping,
/// unless they find none for a while. For many short loops, such as those of a single token, whose threads
/// would take as long to wake up as to compute. A call within another one only computes.
pub fn awake<R>(work: impl FnOnce() -> R) -> R {
    let Some(_occupied) = Occupied::new().filter(|_| rayon::current_num_threads() > 1) else { return work() };
    let end = End(Arc::new(AtomicBool::new(false)));
    let is_over = end.0.clone();
    // The calling thread and those of other calls are occupied, and do not wait.
    rayon::spawn_broadcast(move |_| {
        if let Some(_occupied) = Occupied::new() {
            wait_for_jobs(|| is_over.load(Ordering::Relaxed));
        }
    });
    work()
}

/// Marks the current thread until it is dropped.
struct Occupied;

impl Occupied {
    /// `None` if the thread is already occupied.
    fn new() -> Option<Occupied> {
        (!IS_OCCUPIED.replace(true)).then(|| Occupied)
    }
}

impl Drop for Occupied {
    fn drop(&mut self) {
        IS_OCCUPIED.set(false);
    }
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
        if attempts % YIELDING == YIELDING - 1 {
            std::thread::yield_now();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use rayon::prelude::*;

    use super::*;

    fn sum(count: u64) -> u64 {
        (0..count).into_par_iter().map(|value| value * value).sum()
    }

    /// Whether a condition is true at some time.
    fn at_some_time(mut condition: impl FnMut() -> bool) -> bool {
        (0..100_000).any(|_| condition())
    }

    #[test]
    fn other_threads_wait_until_the_work_ends() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
        let occupied = || rayon::broadcast(|_| IS_OCCUPIED.get());
        assert!(pool.install(|| awake(|| at_some_time(|| occupied() == [true; 3]))));
        assert!(at_some_time(|| pool.install(occupied) == [false; 3]));
        let panicked = catch_unwind(AssertUnwindSafe(|| pool.install(|| awake(|| assert_eq!(sum(3), 6, "as intended")))));
        assert!(panicked.is_err());
        assert!(at_some_time(|| pool.install(occupied) == [false; 3]));
    }

    /// Several callers share the threads, also within other calls.
    #[test]
    fn callers_share_threads() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
        let expected = |count: u64| (0..count).map(|value| value * value).sum::<u64>();
        let of_token = |count: u64| awake(|| awake(|| (0..20).map(|_| sum(count)).sum::<u64>()));
        let found: Vec<u64> = pool.install(|| (0..400).into_par_iter().map(of_token).collect());
        assert!(found.iter().zip(0..).all(|(found, count)| *found == 20 * expected(count)), "{found:?}");
        let callers = |_| std::thread::spawn(|| (0..400).map(|count| awake(|| sum(count))).sum::<u64>());
        let callers: Vec<_> = (0..4).map(callers).collect();
        assert!(callers.into_iter().all(|caller| caller.join().unwrap() == (0..400).map(expected).sum::<u64>()));
    }
}
