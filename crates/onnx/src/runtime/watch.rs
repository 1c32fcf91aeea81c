//! Stops calls into ONNX Runtime that are cancelled or exceed their limits.
//!
//! A file may contain loops of any length and values of any size, and a call blocks the thread that
//! makes it. One thread looks at all running calls a few times per second, and terminates them through
//! the handles that ONNX Runtime provides.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crate::work::{self, Cancel};

/// Time between two looks at the running calls.
const PAUSE: Duration = Duration::from_millis(20);

/// Limits of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Wall-clock time.
    pub time: Duration,
    /// Bytes by which the memory of the process may grow.
    pub memory: u64,
}

impl Limits {
    /// Limits for a file, which may contain loops of any length and values of any size: this time, and memory
    /// for activations and a few copies of `bytes` of weights and inputs.
    pub fn for_size(time: Duration, bytes: u64) -> Limits {
        Limits { time, memory: (1u64 << 30).saturating_add(bytes.saturating_mul(4)) }
    }
}

/// Why a call was stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stopped {
    Cancelled,
    Time(Duration),
    Memory(u64),
}

impl fmt::Display for Stopped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Stopped::Cancelled => write!(f, "it was cancelled"),
            Stopped::Time(limit) => write!(f, "it takes longer than {} s", limit.as_secs()),
            Stopped::Memory(limit) => write!(f, "it takes more than {} MB of memory", limit >> 20),
        }
    }
}

/// A running call.
struct Call {
    stop: Box<dyn Fn() + Send>,
    cancel: Cancel,
    limits: Option<Limits>,
    begun: Instant,
    /// Memory of the process when the call began.
    before: u64,
    stopped: Arc<OnceLock<Stopped>>,
}

impl Call {
    fn check(&self) {
        if let Some(reason) = self.exceeded(self.begun.elapsed(), &work::resident) {
            let _ = self.stopped.set(reason);
            (self.stop)();
        }
    }

    /// Why the call must be stopped after this time, with this memory of the process.
    fn exceeded(&self, elapsed: Duration, resident: &dyn Fn() -> Option<u64>) -> Option<Stopped> {
        match self.limits {
            _ if self.cancel.check().is_err() => Some(Stopped::Cancelled),
            Some(limits) if elapsed > limits.time => Some(Stopped::Time(limits.time)),
            Some(limits) if resident().unwrap_or(0).saturating_sub(self.before) > limits.memory => Some(Stopped::Memory(limits.memory)),
            _ => None,
        }
    }
}

#[derive(Default)]
struct Calls {
    next: u64,
    running: BTreeMap<u64, Call>,
    /// Whether the watching thread was started.
    watched: bool,
}

static CALLS: Mutex<Calls> = Mutex::new(Calls { next: 0, running: BTreeMap::new(), watched: false });
static ADDED: Condvar = Condvar::new();

/// Makes a call that `stop` terminates from another thread. The second result is the reason, if the call
/// was stopped.
pub(super) fn watched<T>(stop: impl Fn() + Send + 'static, cancel: &Cancel, limits: Option<Limits>, call: impl FnOnce() -> T) -> (T, Option<Stopped>) {
    let stopped = Arc::new(OnceLock::new());
    let entry = Call {
        stop: Box::new(stop),
        cancel: cancel.clone(),
        limits,
        begun: Instant::now(),
        before: limits.and_then(|_| work::resident()).unwrap_or(0),
        stopped: stopped.clone(),
    };
    let number = add(entry);
    let result = call();
    drop(locked().running.remove(&number));
    (result, stopped.get().copied())
}

fn locked() -> std::sync::MutexGuard<'static, Calls> {
    CALLS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn add(call: Call) -> u64 {
    let mut calls = locked();
    let number = calls.next;
    calls.next = calls.next.wrapping_add(1);
    calls.running.insert(number, call);
    if !calls.watched {
        // Without the thread, calls cannot be stopped.
        calls.watched = std::thread::Builder::new().name("onnxruntime-watch".into()).spawn(watch).is_ok();
    }
    ADDED.notify_one();
    number
}

fn watch() {
    loop {
        let mut calls = locked();
        while calls.running.is_empty() {
            calls = ADDED.wait(calls).unwrap_or_else(PoisonError::into_inner);
        }
        calls.running.values().for_each(Call::check);
        drop(calls);
        std::thread::sleep(PAUSE);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    /// A call that lasts until it is stopped.
    fn endless(cancel: &Cancel, limits: Option<Limits>) -> Option<Stopped> {
        let flag = Arc::new(AtomicBool::new(false));
        let seen = flag.clone();
        let wait = || {
            while !flag.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        watched(move || seen.store(true, Ordering::Relaxed), cancel, limits, wait).1
    }

    #[test]
    fn calls_stop_on_cancellation_and_limits() {
        let cancel = Cancel::default();
        let time = Duration::from_millis(1);
        assert_eq!(endless(&cancel, Some(Limits { time, memory: u64::MAX })), Some(Stopped::Time(time)));
        assert_eq!(watched(|| (), &cancel, None, || 7), (7, None));
        let other = cancel.clone();
        let stopping = std::thread::spawn(move || other.cancel());
        assert_eq!(endless(&cancel, None), Some(Stopped::Cancelled));
        stopping.join().unwrap();
    }

    /// With given figures, because other tests of the process allocate and free memory at the same time.
    #[test]
    fn limits_are_relative_to_the_start_of_a_call() {
        let limits = Limits { time: Duration::from_secs(5), memory: 30 };
        let call = |limits| Call { stop: Box::new(|| ()), cancel: Cancel::default(), limits, begun: Instant::now(), before: 100, stopped: Arc::default() };
        let exceeded = |limits, seconds, bytes| call(limits).exceeded(Duration::from_secs(seconds), &move || bytes);
        assert_eq!(exceeded(Some(limits), 5, Some(130)), None);
        assert_eq!(exceeded(Some(limits), 6, Some(0)), Some(Stopped::Time(limits.time)));
        assert_eq!(exceeded(Some(limits), 0, Some(131)), Some(Stopped::Memory(30)));
        assert_eq!((exceeded(Some(limits), 0, None), exceeded(None, 6, Some(131))), (None, None));
        let cancelled = call(None);
        cancelled.cancel.cancel();
        assert_eq!(cancelled.exceeded(Duration::ZERO, &|| None), Some(Stopped::Cancelled));
    }
}
