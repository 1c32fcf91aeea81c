//! Prefetching of batches, in order.

use std::ops::ControlFlow;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};

use super::{Batch, Pending, PendingBatches};
use crate::error::{Error, Result};
use crate::work::lock;

/// Threads that prepare batches.
pub(super) const WORKERS: usize = 2;

/// Maximum number of prefetched batches.
const MAX_PREFETCHED: usize = 4;

type Promise = Receiver<Result<Batch>>;
/// A pending batch, and the channel for the result.
type Job<'s> = (Pending<'s>, SyncSender<Result<Batch>>);

/// Reads in one thread, prepares batches in `workers` others, and passes them to `consume` in the order
/// of reading.
pub(super) fn prefetch(batches: PendingBatches, workers: usize, mut consume: impl FnMut(Batch) -> Result<ControlFlow<()>>) -> Result<()> {
    std::thread::scope(|scope| {
        let (promise, promises) = sync_channel::<Result<Promise>>(MAX_PREFETCHED);
        let (job, jobs) = sync_channel::<Job>(MAX_PREFETCHED);
        // Owned only by the workers, so that the reader's channel closes when all of them have ended.
        let jobs = Arc::new(Mutex::new(jobs));
        for _ in 0..workers {
            let jobs = jobs.clone();
            std::thread::Builder::new().spawn_scoped(scope, move || while work_once(&jobs) {}).map_err(no_thread)?;
        }
        std::thread::Builder::new().spawn_scoped(scope, move || read(batches, &promise, &job)).map_err(no_thread)?;
        drop(jobs);
        for promise in promises {
            match promise?.recv() {
                Ok(batch) => {
                    if consume(batch?)?.is_break() {
                        break;
                    }
                }
                // The worker panicked.
                Err(_) => return Err(Error::option("data", "a worker thread failed while preparing samples")),
            }
        }
        Ok(())
    })
}

fn no_thread(e: std::io::Error) -> Error {
    Error::option("data", format!("cannot start a thread to read it: {e}"))
}

fn read<'s>(batches: PendingBatches<'s>, promise: &SyncSender<Result<Promise>>, job: &SyncSender<Job<'s>>) {
    for pending in batches {
        let sent = match pending {
            Ok(pending) => {
                let (sender, receiver) = sync_channel(1);
                promise.send(Ok(receiver)).is_ok() && job.send((pending, sender)).is_ok()
            }
            Err(e) => promise.send(Err(e)).is_ok(),
        };
        if !sent {
            return;
        }
    }
}

fn work_once(jobs: &Mutex<Receiver<Job>>) -> bool {
    let next = lock(jobs).recv();
    match next {
        Ok((pending, sender)) => {
            // The receiver is closed if the run has failed elsewhere.
            let _ = sender.send(pending());
            true
        }
        Err(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::super::References;
    use super::*;

    fn pending(count: usize, failing: Option<usize>) -> PendingBatches<'static> {
        Box::new((0..count).map(move |index| {
            let batch: Pending = Box::new(move || {
                std::thread::sleep(std::time::Duration::from_micros((index * 7919 % 13) as u64 * 100));
                if failing == Some(index) {
                    Err(Error::option("sample", index))
                } else {
                    Ok(Batch { inputs: Default::default(), references: References::None, samples: index })
                }
            });
            Ok(batch)
        }))
    }

    #[test]
    fn batches_are_in_order() {
        let mut found = Vec::new();
        prefetch(pending(50, None), 3, |batch| {
            found.push(batch.samples);
            Ok(ControlFlow::Continue(()))
        })
        .unwrap();
        assert_eq!(found, (0..50).collect::<Vec<_>>());
    }

    #[test]
    fn the_first_error_stops_prefetching() {
        let mut seen = 0;
        let error = prefetch(pending(50, Some(20)), 3, |_| {
            seen += 1;
            Ok(ControlFlow::Continue(()))
        });
        assert!(error.unwrap_err().to_string().contains("sample: 20"));
        assert_eq!(seen, 20);
        let error = prefetch(pending(50, None), 2, |batch| if batch.samples == 3 { Err(Error::Cancelled) } else { Ok(ControlFlow::Continue(())) });
        assert!(matches!(error, Err(Error::Cancelled)));
        let mut seen = 0;
        let enough = prefetch(pending(50, None), 2, |_| {
            seen += 1;
            Ok(if seen == 7 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
        });
        assert!(enough.is_ok() && seen == 7);
    }
}
