//! Accounts of memory: what tensors of a training step take, by category, and a budget that they may not exceed.

use std::sync::Mutex;

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

#[derive(Debug, Clone, Copy, Default)]
struct Book {
    now: [u64; 6],
    peak: [u64; 6],
    most: u64,
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

    /// Enters bytes.
    ///
    /// # Errors
    /// The budget is exceeded; the bytes are entered all the same, for `give` follows when the tensor goes.
    pub fn take(&self, category: MemoryCategory, bytes: u64) -> Result<()> {
        let mut book = lock(&self.book);
        let at = category as usize;
        book.now[at] += bytes;
        book.peak[at] = book.peak[at].max(book.now[at]);
        let all = book.now.iter().sum();
        book.most = book.most.max(all);
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
        let mut book = lock(&self.book);
        let now = &mut book.now[category as usize];
        *now = now.saturating_sub(bytes);
    }

    /// Makes an account say a number of bytes.
    ///
    /// # Errors
    /// As [`take`](MemoryTracker::take).
    pub fn set(&self, category: MemoryCategory, bytes: u64) -> Result<()> {
        self.give(category, u64::MAX);
        self.take(category, bytes)
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
        let book = *lock(&self.book);
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
