//! Accounts of memory: what tensors of a training step take, by category, and a budget that they may not exceed.

use std::sync::Mutex;

use super::memory_trace::MemoryTrace;
use crate::error::{Error, Result};
use crate::work::lock;

/// What memory is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryCategory {
    /// Parameters, in the precision in which they are kept and in that of the computation.
    Weights,
    /// Gradients of parameters.
    Gradients,
    /// State of the optimizer.
    Optimizer,
    /// Values between nodes, and their gradients.
    Activations,
    /// The teacher's parameters and values.
    Teacher,
    /// Samples on the device.
    Data,
}

impl MemoryCategory {
    /// All of them.
    pub const ALL: [MemoryCategory; 6] = [
        MemoryCategory::Weights,
        MemoryCategory::Gradients,
        MemoryCategory::Optimizer,
        MemoryCategory::Activations,
        MemoryCategory::Teacher,
        MemoryCategory::Data,
    ];

    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            MemoryCategory::Weights => "weights",
            MemoryCategory::Gradients => "gradients",
            MemoryCategory::Optimizer => "optimizer",
            MemoryCategory::Activations => "activations",
            MemoryCategory::Teacher => "teacher",
            MemoryCategory::Data => "data",
        }
    }
}

#[derive(Debug, Default)]
struct Book {
    now: [u64; 6],
    peak: [u64; 6],
    most: u64,
    trace: Option<Box<MemoryTrace>>,
}

impl Book {
    fn add(&mut self, category: MemoryCategory, name: &str, bytes: u64) -> u64 {
        let at = category as usize;
        self.now[at] += bytes;
        self.peak[at] = self.peak[at].max(self.now[at]);
        let all = self.now.iter().sum();
        self.most = self.most.max(all);
        if let Some(trace) = &mut self.trace {
            trace.take(category, name, bytes, all);
        }
        all
    }

    fn remove(&mut self, category: MemoryCategory, name: &str, bytes: u64) {
        let now = &mut self.now[category as usize];
        let bytes = bytes.min(*now);
        *now -= bytes;
        if let Some(trace) = &mut self.trace {
            trace.give(category, name, bytes);
        }
    }
}

/// The accounts.
#[derive(Debug, Default)]
pub struct MemoryTracker {
    budget: Option<u64>,
    book: Mutex<Book>,
}

impl MemoryTracker {
    /// Accounts that refuse what would go beyond a number of bytes.
    pub fn with_budget(budget: Option<u64>) -> MemoryTracker {
        MemoryTracker { budget, book: Mutex::default() }
    }

    /// The same, keeping a record over time.
    #[must_use]
    pub fn recorded(self) -> MemoryTracker {
        lock(&self.book).trace = Some(Box::default());
        self
    }

    /// Enters bytes.
    ///
    /// # Errors
    /// The budget is exceeded; the bytes are entered all the same, for `give` follows when the tensor goes.
    pub fn take(&self, category: MemoryCategory, bytes: u64) -> Result<()> {
        self.take_for(category, category.name(), bytes)
    }

    /// The same, under a name for the record.
    ///
    /// # Errors
    /// As [`take`](MemoryTracker::take).
    pub fn take_for(&self, category: MemoryCategory, name: &str, bytes: u64) -> Result<()> {
        let all = lock(&self.book).add(category, name, bytes);
        self.require_room(all, category, bytes)
    }

    fn require_room(&self, all: u64, category: MemoryCategory, bytes: u64) -> Result<()> {
        match self.budget {
            Some(budget) if all > budget => Err(Error::OutOfMemory {
                what: format!("{} of {bytes} bytes", category.name()),
                reason: format!("{all} bytes are more than the budget of {budget}"),
            }),
            _ => Ok(()),
        }
    }

    /// Takes bytes off.
    pub fn give(&self, category: MemoryCategory, bytes: u64) {
        self.give_for(category, category.name(), bytes);
    }

    /// Takes bytes off that were entered under a name.
    pub fn give_for(&self, category: MemoryCategory, name: &str, bytes: u64) {
        lock(&self.book).remove(category, name, bytes);
    }

    /// Begins a step: of this number, or of the next one.
    pub fn begin_step(&self, number: Option<u64>) {
        if let Some(trace) = &mut lock(&self.book).trace {
            trace.begin(number);
        }
    }

    /// What is done from now on, and at which node.
    pub fn work_on(&self, phase: &'static str, node: &str) {
        if let Some(trace) = &mut lock(&self.book).trace {
            trace.place(phase, node);
        }
    }

    /// The record so far, if one is kept.
    pub fn trace(&self) -> Option<MemoryTrace> {
        lock(&self.book).trace.as_ref().map(|trace| trace.finished())
    }

    /// Takes over the record of other accounts, where one is kept here.
    pub fn adopt(&self, other: &MemoryTracker) {
        if let (Some(trace), Some(found)) = (&mut lock(&self.book).trace, other.trace()) {
            **trace = found;
        }
    }

    /// Makes an account say a number of bytes.
    ///
    /// # Errors
    /// As [`take`](MemoryTracker::take).
    pub fn set(&self, category: MemoryCategory, bytes: u64) -> Result<()> {
        let mut book = lock(&self.book);
        let now = book.now[category as usize];
        book.remove(category, category.name(), now.saturating_sub(bytes));
        let all = book.add(category, category.name(), bytes.saturating_sub(now));
        drop(book);
        self.require_room(all, category, bytes)
    }

    /// What a category takes now.
    pub fn now(&self, category: MemoryCategory) -> u64 {
        lock(&self.book).now[category as usize]
    }

    /// What everything takes now.
    pub fn all(&self) -> u64 {
        lock(&self.book).now.iter().sum()
    }

    /// What each category has taken at most, and all together.
    pub fn peaks(&self) -> (Vec<(MemoryCategory, u64)>, u64) {
        let book = lock(&self.book);
        (MemoryCategory::ALL.into_iter().map(|category| (category, book.peak[category as usize])).collect(), book.most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_is_held_over_all_purposes() {
        let memory_tracker = MemoryTracker::with_budget(Some(100));
        memory_tracker.take(MemoryCategory::Weights, 60).unwrap();
        memory_tracker.take(MemoryCategory::Activations, 40).unwrap();
        let error = memory_tracker.take(MemoryCategory::Activations, 1).unwrap_err();
        assert!(error.is_out_of_memory() && error.to_string().contains("budget"), "{error}");
        memory_tracker.give(MemoryCategory::Activations, 41);
        memory_tracker.set(MemoryCategory::Weights, 10).unwrap();
        memory_tracker.take(MemoryCategory::Activations, 90).unwrap();
        assert_eq!(memory_tracker.now(MemoryCategory::Weights), 10);
        assert_eq!(memory_tracker.peaks().1, 101);
    }
}
