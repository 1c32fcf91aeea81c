//! Values of runs in the accounts of memory.

use std::sync::Arc;

use candle_core::Tensor;

use super::{MemoryCategory, MemoryTracker, bytes_of};
use crate::ir::{Graph, Kind};

/// Whose values are entered, and where.
#[derive(Debug, Clone)]
pub(super) struct Accounts {
    tracker: Arc<MemoryTracker>,
    /// By the value's position.
    values: Arc<[(MemoryCategory, String)]>,
}

impl Accounts {
    pub fn new(tracker: Arc<MemoryTracker>, graph: &Graph) -> Accounts {
        let category = |kind| if kind == Kind::Input { MemoryCategory::Data } else { MemoryCategory::Activations };
        Accounts { tracker, values: graph.values().iter().map(|value| (category(value.kind), value.name.clone())).collect() }
    }

    /// Enters weights that are loaded.
    pub fn load(&self, bytes: u64) {
        // There is no budget that could be exceeded.
        let _ = self.tracker.set(MemoryCategory::Weights, bytes);
    }

    /// Begins a run.
    pub fn begin(&self) -> Account {
        self.tracker.begin_step(None);
        Account { accounts: self.clone(), bytes: vec![0; self.values.len()] }
    }
}

/// Values of one run.
#[derive(Debug)]
pub(super) struct Account {
    accounts: Accounts,
    bytes: Vec<u64>,
}

impl Account {
    pub fn take(&mut self, position: usize, tensor: &Tensor) {
        let (category, name) = &self.accounts.values[position];
        let bytes = bytes_of(tensor);
        self.accounts.tracker.work_on("forward", name);
        let _ = self.accounts.tracker.take_for(*category, name, bytes);
        self.bytes[position] += bytes;
    }

    pub fn give(&mut self, position: usize) {
        let (category, name) = &self.accounts.values[position];
        self.accounts.tracker.give_for(*category, name, std::mem::take(&mut self.bytes[position]));
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        (0..self.bytes.len()).for_each(|position| self.give(position));
    }
}
