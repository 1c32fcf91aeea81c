//! Runs jobs on a pool of threads, with progress events, cancellation and timing by stage.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};

/// Memory available to models.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemoryLimit {
    /// Bytes; `None` when unknown.
    pub bytes: Option<u64>,
    /// Whether the user set the limit. A model that exceeds an explicit limit is rejected; an estimated
    /// limit rejects nothing.
    pub explicit: bool,
}

/// Peak of a figure since the last reading, sampled by a background thread.
#[derive(Debug)]
pub struct HighWater<F> {
    shared: Arc<(F, AtomicU64, AtomicBool)>,
    thread: Option<JoinHandle<()>>,
}

impl<F: Fn() -> Option<u64> + Send + Sync + 'static> HighWater<F> {
    /// Starts sampling, with a pause between samples. If no thread can be spawned, the figure is only
    /// sampled by `take`.
    pub fn start(pause: Duration, figure: F) -> HighWater<F> {
        let shared = Arc::new((figure, AtomicU64::new(0), AtomicBool::new(false)));
        let watched = shared.clone();
        let watch = move || {
            while !watched.2.load(Ordering::Relaxed) {
                watched.1.fetch_max((watched.0)().unwrap_or(0), Ordering::Relaxed);
                std::thread::park_timeout(pause);
            }
        };
        HighWater { shared, thread: std::thread::Builder::new().spawn(watch).ok() }
    }

    /// Returns the peak since the previous call, including the current value, and resets it.
    pub fn take(&self) -> u64 {
        let now = (self.shared.0)().unwrap_or(0);
        self.shared.1.swap(0, Ordering::Relaxed).max(now)
    }
}

impl<F> Drop for HighWater<F> {
    fn drop(&mut self) {
        self.shared.2.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}

/// Resident memory of this process in bytes, if the system reports it.
pub fn resident() -> Option<u64> {
    let pages: u64 = std::fs::read_to_string("/proc/self/statm").ok()?.split(' ').nth(1)?.parse().ok()?;
    Some(pages * rustix::param::page_size() as u64)
}

/// A handle that stops work, from another thread or a signal handler.
#[derive(Debug, Clone, Default)]
pub struct Cancel(Arc<AtomicBool>);

impl Cancel {
    /// The process-wide handle, used by signal handlers. It stops all work that was started without a
    /// handle of its own.
    #[doc(hidden)]
    pub fn process() -> Cancel {
        static PROCESS: OnceLock<Cancel> = OnceLock::new();
        PROCESS.get_or_init(Cancel::default).clone()
    }

    /// Stops the work at the next block.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Returns [`Error::Cancelled`] after [`cancel`](Cancel::cancel) was called.
    ///
    /// # Errors
    /// [`Error::Cancelled`].
    pub fn check(&self) -> Result<()> {
        if self.0.load(Ordering::Relaxed) { Err(Error::Cancelled) } else { Ok(()) }
    }
}

/// Unit of progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ProgressUnit {
    /// Bytes of input.
    Bytes,
    /// Samples of a data set.
    Samples,
    /// Training steps.
    Steps,
}

/// A progress event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event<'a> {
    /// A stage begins.
    Begin {
        /// Short description of the stage.
        stage: &'a str,
        /// Total amount of work; 0 when unknown.
        total: u64,
        /// Amount that an earlier run completed, which this one resumes.
        done: u64,
        /// Unit of `total`, `done` and of [`Advance`](Event::Advance).
        unit: ProgressUnit,
    },
    /// This amount of work was completed since the last event.
    Advance(u64),
    /// A short status message.
    Message(&'a str),
    /// The stage has finished.
    End,
}

/// Receives progress events from several threads.
pub trait Progress: Send + Sync {
    /// Called for every event. Must return quickly, because workers wait for it.
    fn on(&self, event: Event);
}

impl<F: Fn(Event) + Send + Sync> Progress for F {
    fn on(&self, event: Event) {
        self(event);
    }
}

/// Discards progress events.
#[derive(Debug, Clone, Copy)]
pub struct Silent;

impl Progress for Silent {
    fn on(&self, _event: Event) {}
}

/// Total time that all threads spent in one stage.
#[derive(Debug, Default)]
pub struct Meter(AtomicU64);

impl Meter {
    /// Runs `work` and adds its duration.
    pub fn time<T>(&self, work: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let result = work();
        self.0.fetch_add(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
        result
    }

    /// Adds time that was measured elsewhere.
    pub fn add(&self, time: Duration) {
        self.0.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
    }

    /// The accumulated time.
    pub fn total(&self) -> Duration {
        Duration::from_nanos(self.0.load(Ordering::Relaxed))
    }
}

/// Execution context of a stage: threads, progress and cancellation.
#[derive(Clone, Copy)]
pub struct Work<'a> {
    /// Number of worker threads.
    pub threads: usize,
    /// Receiver of progress events.
    pub progress: &'a dyn Progress,
    /// Cancellation handle.
    pub cancel: &'a Cancel,
}

impl<'a> Work<'a> {
    /// The same context without progress events.
    pub fn quiet(&self) -> Work<'a> {
        Work { progress: &Silent, ..*self }
    }

    /// Runs `work` once for each job, largest first, and returns the results in the order of the jobs.
    /// Returns the error of the first job in order that failed; the others stop at their next job.
    pub fn run<J: Sync, T: Send>(&self, stage: &str, jobs: &[J], size: impl Fn(&J) -> u64, work: impl Fn(&J) -> Result<T> + Sync) -> Result<Vec<T>> {
        self.run_by(stage, jobs, |job| std::cmp::Reverse(size(job)), &size, work)
    }

    /// As [`run`](Work::run), in ascending order of `key`.
    pub fn run_by<J: Sync, K: Ord, T: Send>(
        &self,
        stage: &str,
        jobs: &[J],
        key: impl Fn(&J) -> K,
        size: impl Fn(&J) -> u64,
        work: impl Fn(&J) -> Result<T> + Sync,
    ) -> Result<Vec<T>> {
        let mut order: Vec<usize> = (0..jobs.len()).collect();
        order.sort_by_key(|&i| key(&jobs[i]));
        self.run_ordered(stage, jobs, &order, size, work)
    }

    /// As [`run`](Work::run), in the order of `jobs`, so that adjacent jobs are processed at about the
    /// same time.
    pub fn run_in_order<J: Sync, T: Send>(&self, stage: &str, jobs: &[J], size: impl Fn(&J) -> u64, work: impl Fn(&J) -> Result<T> + Sync) -> Result<Vec<T>> {
        let order: Vec<usize> = (0..jobs.len()).collect();
        self.run_ordered(stage, jobs, &order, size, work)
    }

    fn run_ordered<J: Sync, T: Send>(
        &self,
        stage: &str,
        jobs: &[J],
        order: &[usize],
        size: impl Fn(&J) -> u64,
        work: impl Fn(&J) -> Result<T> + Sync,
    ) -> Result<Vec<T>> {
        self.progress.on(Event::Begin { stage, total: jobs.iter().map(size).sum(), done: 0, unit: ProgressUnit::Bytes });
        let (next, failed) = (AtomicUsize::new(0), AtomicBool::new(false));
        let results: Mutex<Vec<(usize, Result<T>)>> = Mutex::new(Vec::with_capacity(jobs.len()));
        let worker = || {
            while !failed.load(Ordering::Relaxed) {
                let Some(&index) = order.get(next.fetch_add(1, Ordering::Relaxed)) else { break };
                let result = self.cancel.check().and_then(|()| work(&jobs[index]));
                failed.fetch_or(result.is_err(), Ordering::Relaxed);
                lock(&results).push((index, result));
            }
        };
        let threads = self.threads.clamp(1, jobs.len().max(1));
        std::thread::scope(|scope| {
            for _ in 1..threads {
                // If no more threads can be spawned, the running ones do all the work.
                if std::thread::Builder::new().spawn_scoped(scope, worker).is_err() {
                    break;
                }
            }
            worker();
        });
        self.progress.on(Event::End);
        let mut results = results.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
        results.sort_by_key(|(index, _)| *index);
        results.into_iter().map(|(_, result)| result).collect()
    }

    /// Reports progress and checks for cancellation.
    pub fn advance(&self, amount: u64) -> Result<()> {
        self.progress.on(Event::Advance(amount));
        self.cancel.check()
    }
}

/// Locks a mutex, ignoring poisoning.
pub fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_keep_the_order_of_jobs_and_the_first_error_wins() {
        let (cancel, jobs) = (Cancel::default(), [3u64, 1, 2]);
        let work = Work { threads: 3, progress: &Silent, cancel: &cancel };
        assert_eq!(work.run("test", &jobs, |j| *j, |j| Ok(j * 10)).unwrap(), [30, 10, 20]);
        let error = work.run("test", &jobs, |j| *j, |j| if *j < 3 { Err(Error::option("job", j)) } else { Ok(()) }).unwrap_err();
        assert!(matches!(error, Error::Option { .. }));
        cancel.cancel();
        assert!(matches!(work.run("test", &jobs, |j| *j, |_| Ok(())), Err(Error::Cancelled)));
    }
}
