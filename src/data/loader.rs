//! Preparing batches ahead of the model, in order.

use std::ops::ControlFlow;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};

use super::{Batch, Pending, PendingBatches};
use crate::error::{Error, Result};
use crate::work::lock;

/// Threads that prepare batches.
pub(super) const WORKERS: usize = 2;

/// Batches that wait for the model at most.
const AHEAD: usize = 4;

type Promise = Receiver<Result<Batch>>;
/// A batch to be made, and where it goes.
type Job<'s> = (Pending<'s>, SyncSender<Result<Batch>>);

/// Reads in one thread, prepares in others, and hands batches over in the order in which they were read.
pub(super) fn prefetch(works: PendingBatches, workers: usize, mut consume: impl FnMut(Batch) -> Result<ControlFlow<()>>) -> Result<()> {
    std::thread::scope(|scope| {
        let (promise, promises) = sync_channel::<Result<Promise>>(AHEAD);
        let (job, jobs) = sync_channel::<Job>(AHEAD);
        // Owned by the threads, so that the reader sees when nobody works any more.
        let jobs = Arc::new(Mutex::new(jobs));
        for _ in 0..workers {
            let jobs = jobs.clone();
            std::thread::Builder::new().spawn_scoped(scope, move || while work_once(&jobs) {}).map_err(no_thread)?;
        }
        std::thread::Builder::new().spawn_scoped(scope, move || read(works, &promise, &job)).map_err(no_thread)?;
        drop(jobs);
        for promise in promises {
            match promise?.recv() {
                Ok(batch) => {
                    if consume(batch?)?.is_break() {
                        break;
                    }
                }
                // A worker that is gone left no word.
                Err(_) => return Err(Error::option("data", "a thread that prepares samples has failed")),
            }
        }
        Ok(())
    })
}

fn no_thread(e: std::io::Error) -> Error {
    Error::option("data", format!("no thread can be started to read it: {e}"))
}

fn read<'s>(works: PendingBatches<'s>, promise: &SyncSender<Result<Promise>>, job: &SyncSender<Job<'s>>) {
    for work in works {
        let sent = match work {
            Ok(work) => {
                let (answer, later) = sync_channel(1);
                promise.send(Ok(later)).is_ok() && job.send((work, answer)).is_ok()
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
        Ok((work, answer)) => {
            // Nobody waits for it any more when the run has failed elsewhere.
            let _ = answer.send(work());
            true
        }
        Err(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::super::References;
    use super::*;

    fn works(count: usize, failing: Option<usize>) -> PendingBatches<'static> {
        Box::new((0..count).map(move |index| {
            let work: Pending = Box::new(move || {
                std::thread::sleep(std::time::Duration::from_micros((index * 7919 % 13) as u64 * 100));
                if failing == Some(index) {
                    Err(Error::option("sample", index))
                } else {
                    Ok(Batch { inputs: Default::default(), references: References::None, samples: index })
                }
            });
            Ok(work)
        }))
    }

    #[test]
    fn batches_come_in_order() {
        let mut seen = Vec::new();
        prefetch(works(50, None), 3, |batch| {
            seen.push(batch.samples);
            Ok(ControlFlow::Continue(()))
        })
        .unwrap();
        assert_eq!(seen, (0..50).collect::<Vec<_>>());
    }

    #[test]
    fn the_first_error_ends_it() {
        let mut seen = 0;
        let error = prefetch(works(50, Some(20)), 3, |_| {
            seen += 1;
            Ok(ControlFlow::Continue(()))
        });
        assert!(error.unwrap_err().to_string().contains("sample: 20"));
        assert_eq!(seen, 20);
        let error = prefetch(works(50, None), 2, |batch| if batch.samples == 3 { Err(Error::Cancelled) } else { Ok(ControlFlow::Continue(())) });
        assert!(matches!(error, Err(Error::Cancelled)));
        let mut seen = 0;
        let enough = prefetch(works(50, None), 2, |_| {
            seen += 1;
            Ok(if seen == 7 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
        });
        assert!(enough.is_ok() && seen == 7);
    }
}
