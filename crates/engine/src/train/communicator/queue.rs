//! Runs collectives in the background, in the order in which they are started.

use std::fmt;
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use candle_core::Tensor;

use super::Communicator;
use crate::error::{Error, Result};
use crate::exec::{Collective, Pending, Segment};
use crate::work::lock;

type Job = Box<dyn FnOnce(&mut dyn Communicator) + Send>;

enum Worker {
    /// A single process: jobs run in the caller.
    Caller(Mutex<Box<dyn Communicator>>),
    /// A thread that ends when the queue is dropped.
    Thread(Sender<Job>),
}

/// The collectives of one rank. All ranks start the same ones in the same order, and a queue runs them in
/// that order: results do not depend on timing.
pub struct Queue {
    rank: usize,
    size: usize,
    worker: Worker,
}

impl fmt::Debug for Queue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Queue").field("rank", &self.rank).field("size", &self.size).finish_non_exhaustive()
    }
}

impl Queue {
    /// A queue for an open communicator.
    pub fn new(communicator: Box<dyn Communicator>) -> Result<Queue> {
        let (rank, size) = (communicator.rank(), communicator.size());
        if size == 1 {
            return Ok(Queue { rank, size, worker: Worker::Caller(Mutex::new(communicator)) });
        }
        let (jobs, queue): (Sender<Job>, Receiver<Job>) = channel();
        let mut communicator = communicator;
        let work = move || queue.into_iter().for_each(|job| job(&mut *communicator));
        let started = thread::Builder::new().name("collectives".into()).spawn(work);
        started.map_err(|e| Error::run("the thread that exchanges data between processes", e, ""))?;
        Ok(Queue { rank, size, worker: Worker::Thread(jobs) })
    }

    /// Starts a collective, which runs after the previous ones.
    pub fn start<T: Send + 'static>(&self, collective: impl FnOnce(&mut dyn Communicator) -> Result<T> + Send + 'static) -> Pending<T> {
        let (sender, result) = channel();
        match &self.worker {
            Worker::Caller(communicator) => drop(sender.send(collective(&mut **lock(communicator)))),
            Worker::Thread(jobs) => {
                let job: Job = Box::new(move |communicator: &mut dyn Communicator| drop(sender.send(collective(communicator))));
                // A pending result without a sender is an error.
                drop(jobs.send(job));
            }
        }
        Pending::new(result)
    }

    /// Runs a collective, and waits for its result.
    pub fn run<T: Send + 'static>(&self, collective: impl FnOnce(&mut dyn Communicator) -> Result<T> + Send + 'static) -> Result<T> {
        self.start(collective).wait()
    }
}

impl Collective for Queue {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn sum(&self, tensor: &Tensor) -> Result<Tensor> {
        let tensor = tensor.clone();
        self.run(move |communicator| communicator.sum(&tensor))
    }

    fn start_reduce_scatter(&self, tensor: &Tensor, segments: Vec<Segment>) -> Pending<Tensor> {
        let tensor = tensor.clone();
        self.start(move |communicator| communicator.reduce_scatter(&tensor, &segments))
    }

    fn start_all_gather(&self, tensor: &Tensor, segments: Vec<Segment>) -> Pending<Tensor> {
        let tensor = tensor.clone();
        self.start(move |communicator| communicator.all_gather(&tensor, &segments))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::RecvTimeoutError;

    use candle_core::Device;

    use super::super::tests::{SECOND, run_ranks};
    use super::super::{Sockets, agree};
    use super::*;

    fn numbers(values: &[f32]) -> Tensor {
        Tensor::new(values, &Device::Cpu).unwrap()
    }

    /// Rank 1 continues while rank 0 has not started its part, and results are in the order of the starts.
    #[test]
    fn collectives_run_in_the_background_in_order() {
        let (started, waiting) = channel();
        let (started, waiting) = (Mutex::new(started), Mutex::new(waiting));
        let all = run_ranks(2, |sockets: Sockets| {
            let queue = Queue::new(Box::new(sockets))?;
            let rank = queue.rank();
            if rank == 0 {
                lock(&waiting).recv_timeout(60 * SECOND).map_err(|e: RecvTimeoutError| Error::run("rank 1", e, ""))?;
            }
            let pending: Vec<Pending<Tensor>> = (0..5)
                .map(|i| match i {
                    3 => queue.start_all_gather(&numbers(&[rank as f32, 10.0 + rank as f32, 20.0 + rank as f32]), vec![(1, 0..2), (0, 2..3)]),
                    _ => queue.start_reduce_scatter(&numbers(&[i as f32, 1.0, rank as f32]), vec![(0, 0..1), (1, 1..2), (0, 2..3)]),
                })
                .collect();
            if rank == 1 {
                lock(&started).send(()).unwrap();
            }
            queue.run(|communicator| agree(communicator, "order", b"same"))?;
            pending.into_iter().map(|result| result.wait().map(|tensor| tensor.to_vec1::<f32>().unwrap())).collect::<Result<Vec<_>>>()
        });
        let gathered = vec![1.0, 11.0, 20.0];
        let expected =
            [[vec![0.0, 1.0], vec![2.0, 1.0], vec![4.0, 1.0], gathered.clone(), vec![8.0, 1.0]], [vec![2.0], vec![2.0], vec![2.0], gathered, vec![2.0]]];
        for (found, expected) in all.into_iter().zip(expected) {
            assert_eq!(found.unwrap(), expected);
        }
    }

    /// The other rank gets the reason, although it waits for a collective that was started earlier.
    #[test]
    fn a_rank_that_stops_ends_pending_collectives() {
        let all = run_ranks(2, |sockets: Sockets| {
            let queue = Queue::new(Box::new(sockets))?;
            if queue.rank() == 1 {
                queue.run(|communicator| {
                    communicator.stop("memory is full");
                    Ok(())
                })?;
                return Ok(String::new());
            }
            let pending: Vec<_> = (0..3).map(|_| queue.start_reduce_scatter(&numbers(&[1.0, 2.0]), vec![(0, 0..1), (1, 1..2)])).collect();
            Ok(pending.into_iter().map(|result| result.wait().unwrap_err().to_string()).collect::<Vec<_>>().join("; "))
        });
        let said = all[0].as_ref().unwrap();
        assert!(said.contains("stopped: memory is full"), "{said}");
    }
}
