//! Prefetching of the next block's parameters while the current block runs.

use std::thread::JoinHandle;

use super::load::SpareTensors;
use super::{BlockwiseOptions, Parameters};
use crate::error::{Error, Result};
use crate::store::Weights;
use crate::work::{Silent, Work};

/// Parameters that a thread is reading.
pub(super) struct Prefetch {
    /// The block that they belong to.
    pub block: usize,
    /// Bytes that they take when they are read.
    pub bytes: u64,
    thread: JoinHandle<Result<Parameters>>,
}

impl Prefetch {
    /// Starts reading parameters. Returns `None` if no thread can be started; they are then read on
    /// demand.
    pub fn read(block: usize, names: Vec<String>, weights: Weights, spare: SpareTensors, options: &BlockwiseOptions, work: &Work) -> Option<Prefetch> {
        let BlockwiseOptions { device, compute, residence, .. } = options.clone();
        let bytes = weights.by_name.values().map(|weight| residence.bytes(weight, compute)).sum();
        let (threads, cancel) = (work.threads, work.cancel.clone());
        let read = move || {
            let work = Work { threads, progress: &Silent, cancel: &cancel };
            Parameters::load_reusing(&spare, names.iter().collect(), &weights, (&device, compute, residence), &work)
        };
        std::thread::Builder::new().spawn(read).ok().map(|thread| Prefetch { block, bytes, thread })
    }

    /// Waits for the parameters.
    pub fn join(self) -> Result<Parameters> {
        self.thread.join().map_err(|_| Error::run("reading parameters", "the reading thread panicked", ""))?
    }
}
