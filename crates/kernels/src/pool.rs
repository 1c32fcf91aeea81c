//! Computations on the threads of the pool.

/// Computes on a thread of the pool. Parallel loops start there without waking a thread from outside, and
/// those of a single job run immediately. `work` must not wait for other threads that use the pool.
pub fn on_pool_thread<R: Send>(work: impl FnOnce() -> R + Send) -> R {
    if rayon::current_thread_index().is_some() { work() } else { rayon::scope(|_| work()) }
}
