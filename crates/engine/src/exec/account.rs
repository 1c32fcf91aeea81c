//! Memory accounting of the values of a run.

use std::sync::Arc;

use candle_core::Tensor;

use super::{MemoryCategory, MemoryTracker, bytes_of};
use crate::ir::{Graph, Kind};

/// Account names of a graph's values.
#[derive(Debug, Clone)]
pub(super) struct Accounts {
    tracker: Arc<MemoryTracker>,
    /// Category and name of each value.
    values: Arc<[(MemoryCategory, String)]>,
}

impl Accounts {
    pub fn new(tracker: Arc<MemoryTracker>, graph: &Graph) -> Accounts {
        let category = |kind| if kind == Kind::Input { MemoryCategory::Data } else { MemoryCategory::Activations };
        Accounts { tracker, values: graph.values().iter().map(|value| (category(value.kind), value.name.clone())).collect() }
    }

    /// Records the bytes of loaded weights.
    pub fn load(&self, bytes: u64) {
        // This tracker has no budget to exceed.
        let _ = self.tracker.set(MemoryCategory::Weights, bytes);
    }

    /// Starts a run.
    pub fn begin(&self) -> Account {
        self.tracker.begin_step(None);
        Account { accounts: self.clone(), bytes: vec![0; self.values.len()] }
    }
}

/// Recorded bytes of the values of one run.
#[derive(Debug)]
pub(super) struct Account {
    accounts: Accounts,
    bytes: Vec<u64>,
}

impl Account {
    pub fn record(&mut self, position: usize, tensor: &Tensor) {
        let (category, name) = &self.accounts.values[position];
        let bytes = bytes_of(tensor);
        self.accounts.tracker.work_on("forward", name);
        let _ = self.accounts.tracker.allocate_named(*category, name, bytes);
        self.bytes[position] += bytes;
    }

    pub fn release(&mut self, position: usize) {
        let (category, name) = &self.accounts.values[position];
        self.accounts.tracker.release_named(*category, name, std::mem::take(&mut self.bytes[position]));
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        (0..self.bytes.len()).for_each(|position| self.release(position));
    }
}
