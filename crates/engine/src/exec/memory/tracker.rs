//! Memory accounting by category, with an optional budget.

use std::sync::{Arc, Mutex};

use candle_core::Tensor;

use super::category::MemoryCategory;
use super::trace::MemoryTrace;
use crate::error::{Error, Result};
use crate::exec::host::bytes_of;
use crate::ir::{Graph, Kind};
use crate::work::lock;

#[derive(Debug, Default)]
struct Ledger {
    now: [u64; 6],
    peak: [u64; 6],
    most: u64,
    trace: Option<Box<MemoryTrace>>,
}

impl Ledger {
    fn add(&mut self, category: MemoryCategory, name: &str, bytes: u64) -> u64 {
        let at = category as usize;
        self.now[at] += bytes;
        self.peak[at] = self.peak[at].max(self.now[at]);
        let all = self.now.iter().sum();
        self.most = self.most.max(all);
        if let Some(trace) = &mut self.trace {
            trace.allocate(category, name, bytes, all);
        }
        all
    }

    fn remove(&mut self, category: MemoryCategory, name: &str, bytes: u64) {
        let now = &mut self.now[category as usize];
        let bytes = bytes.min(*now);
        *now -= bytes;
        if let Some(trace) = &mut self.trace {
            trace.release(category, name, bytes);
        }
    }
}

/// Memory accounting.
#[derive(Debug, Default)]
pub struct MemoryTracker {
    budget: Option<u64>,
    ledger: Mutex<Ledger>,
}

impl MemoryTracker {
    /// A tracker that refuses allocations beyond a budget in bytes.
    pub fn with_budget(budget: Option<u64>) -> MemoryTracker {
        MemoryTracker { budget, ledger: Mutex::default() }
    }

    /// Also records a trace over time.
    #[must_use]
    pub fn recorded(self) -> MemoryTracker {
        lock(&self.ledger).trace = Some(Box::default());
        self
    }

    /// Records an allocation. Fails if the budget is exceeded. The bytes are recorded nevertheless, because a
    /// release follows when the tensor is dropped.
    pub fn allocate(&self, category: MemoryCategory, bytes: u64) -> Result<()> {
        self.allocate_named(category, category.name(), bytes)
    }

    /// Records an allocation under a name for the trace.
    pub fn allocate_named(&self, category: MemoryCategory, name: &str, bytes: u64) -> Result<()> {
        let all = lock(&self.ledger).add(category, name, bytes);
        self.require_room(all, category, bytes)
    }

    fn require_room(&self, all: u64, category: MemoryCategory, bytes: u64) -> Result<()> {
        match self.budget {
            Some(budget) if all > budget => {
                let reason = format!("{all} bytes exceed the budget of {budget} bytes, which the options `memory_limit` and `memory` set");
                Err(Error::OutOfMemory { what: format!("{} of {bytes} bytes", category.name()), reason })
            }
            _ => Ok(()),
        }
    }

    /// Records the release of bytes.
    pub fn release(&self, category: MemoryCategory, bytes: u64) {
        self.release_named(category, category.name(), bytes);
    }

    /// Records the release of bytes that were allocated under a name.
    pub fn release_named(&self, category: MemoryCategory, name: &str, bytes: u64) {
        lock(&self.ledger).remove(category, name, bytes);
    }

    /// Starts a step with this number, or with the next one.
    pub fn begin_step(&self, number: Option<u64>) {
        if let Some(trace) = &mut lock(&self.ledger).trace {
            trace.begin(number);
        }
    }

    /// Sets the current phase and node.
    pub fn work_on(&self, phase: &'static str, node: &str) {
        if let Some(trace) = &mut lock(&self.ledger).trace {
            trace.enter_phase(phase, node);
        }
    }

    /// The trace so far, if it is recorded.
    pub fn trace(&self) -> Option<MemoryTrace> {
        lock(&self.ledger).trace.as_ref().map(|trace| trace.finished())
    }

    /// Copies the trace of another tracker, if this one records a trace.
    pub fn adopt(&self, other: &MemoryTracker) {
        if let (Some(trace), Some(found)) = (&mut lock(&self.ledger).trace, other.trace()) {
            **trace = found;
        }
    }

    /// Sets the bytes of a category.
    pub fn set(&self, category: MemoryCategory, bytes: u64) -> Result<()> {
        let mut ledger = lock(&self.ledger);
        let now = ledger.now[category as usize];
        ledger.remove(category, category.name(), now.saturating_sub(bytes));
        let all = ledger.add(category, category.name(), bytes.saturating_sub(now));
        drop(ledger);
        self.require_room(all, category, bytes)
    }

    /// Current bytes of a category.
    pub fn now(&self, category: MemoryCategory) -> u64 {
        lock(&self.ledger).now[category as usize]
    }

    /// Current bytes of all categories.
    pub fn all(&self) -> u64 {
        lock(&self.ledger).now.iter().sum()
    }

    /// Peak bytes of each category, and of all together.
    pub fn peaks(&self) -> (Vec<(MemoryCategory, u64)>, u64) {
        let ledger = lock(&self.ledger);
        (MemoryCategory::ALL.into_iter().map(|category| (category, ledger.peak[category as usize])).collect(), ledger.most)
    }
}

/// Account names of a graph's values.
#[derive(Debug, Clone)]
pub(crate) struct Accounts {
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
pub(crate) struct Account {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_budget_covers_all_categories() {
        let memory_tracker = MemoryTracker::with_budget(Some(100));
        memory_tracker.allocate(MemoryCategory::Weights, 60).unwrap();
        memory_tracker.allocate(MemoryCategory::Activations, 40).unwrap();
        let error = memory_tracker.allocate(MemoryCategory::Activations, 1).unwrap_err();
        assert!(error.is_out_of_memory() && error.to_string().contains("budget"), "{error}");
        memory_tracker.release(MemoryCategory::Activations, 41);
        memory_tracker.set(MemoryCategory::Weights, 10).unwrap();
        memory_tracker.allocate(MemoryCategory::Activations, 90).unwrap();
        assert_eq!(memory_tracker.now(MemoryCategory::Weights), 10);
        assert_eq!(memory_tracker.peaks().1, 101);
    }
}
