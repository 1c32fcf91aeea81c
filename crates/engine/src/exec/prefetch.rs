//! Prefetching of the next block's parameters while the current block runs.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::thread::JoinHandle;

use super::load::SpareTensors;
use super::{BlockwiseOptions, Parameters, residence};
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
    pub fn read(
        block: usize,
        weights: Weights,
        coded: Arc<BTreeSet<String>>,
        spare: SpareTensors,
        options: &BlockwiseOptions,
        work: &Work,
    ) -> Option<Prefetch> {
        let BlockwiseOptions { device, compute, residence: how, .. } = options.clone();
        let bytes = weights.by_name.iter().map(|(name, weight)| residence::bytes(name, weight, &coded, how, compute)).sum();
        let (threads, cancel) = (work.threads, work.cancel.clone());
        let read = move || {
            let work = Work { threads, progress: &Silent, cancel: &cancel };
            Parameters::load_reusing(&spare, weights.by_name.keys().collect(), &coded, &weights, (&device, compute, how), &work)
        };
        std::thread::Builder::new().spawn(read).ok().map(|thread| Prefetch { block, bytes, thread })
    }

    /// Waits for the parameters.
    pub fn join(self) -> Result<Parameters> {
        self.thread.join().map_err(|_| Error::run("reading parameters", "the reading thread panicked", ""))?
    }
}
