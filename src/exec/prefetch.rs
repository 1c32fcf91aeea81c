//! Parameters of the next block, read while the current block runs.

use std::thread::JoinHandle;

use super::load::Spare;
use super::{BlockwiseOptions, Parameters};
use crate::error::{Error, Result};
use crate::store::Weights;
use crate::work::{Silent, Work};

/// Parameters that are being read.
pub(super) struct Ahead {
    /// The block that they belong to.
    pub block: usize,
    /// Bytes that they will take.
    pub bytes: u64,
    thread: JoinHandle<Result<Parameters>>,
}

impl Ahead {
    /// Starts to read these parameters; nothing where the system starts no more threads: they are then read when they are needed.
    pub fn read(block: usize, names: Vec<String>, weights: Weights, spare: Spare, options: &BlockwiseOptions, work: &Work) -> Option<Ahead> {
        let BlockwiseOptions { device, compute, residence, .. } = options.clone();
        let bytes = weights.by_name.values().map(|weight| residence.bytes(weight, compute)).sum();
        let (threads, cancel) = (work.threads, work.cancel.clone());
        let read = move || {
            let work = Work { threads, progress: &Silent, cancel: &cancel };
            Parameters::load_reusing(&spare, names.iter().collect(), &weights, (&device, compute, residence), &work)
        };
        std::thread::Builder::new().spawn(read).ok().map(|thread| Ahead { block, bytes, thread })
    }

    /// Waits for the parameters.
    ///
    /// # Errors
    /// Reading fails.
    pub fn join(self) -> Result<Parameters> {
        self.thread.join().map_err(|_| Error::run("reading parameters", "a thread panicked", ""))?
    }
}
