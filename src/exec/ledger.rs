//! Accounts of memory: what tensors of a training step take, by purpose, and a budget that they may not exceed.

use std::sync::Mutex;

use crate::error::{Error, Result};
use crate::work::lock;

/// What memory is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
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

impl Purpose {
    /// All of them.
    pub const ALL: [Purpose; 6] = [Purpose::Weights, Purpose::Gradients, Purpose::Optimizer, Purpose::Activations, Purpose::Teacher, Purpose::Data];

    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Purpose::Weights => "weights",
            Purpose::Gradients => "gradients",
            Purpose::Optimizer => "optimizer",
            Purpose::Activations => "activations",
            Purpose::Teacher => "teacher",
            Purpose::Data => "data",
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
pub struct Ledger {
    budget: Option<u64>,
    book: Mutex<Book>,
}

impl Ledger {
    /// Accounts that refuse what would go beyond a number of bytes.
    pub fn with_budget(budget: Option<u64>) -> Ledger {
        Ledger { budget, book: Mutex::default() }
    }

    /// Enters bytes.
    ///
    /// # Errors
    /// The budget is exceeded; the bytes are entered all the same, for `give` follows when the tensor goes.
    pub fn take(&self, purpose: Purpose, bytes: u64) -> Result<()> {
        let mut book = lock(&self.book);
        let at = purpose as usize;
        book.now[at] += bytes;
        book.peak[at] = book.peak[at].max(book.now[at]);
        let all = book.now.iter().sum();
        book.most = book.most.max(all);
        match self.budget {
            Some(budget) if all > budget => Err(Error::OutOfMemory {
                what: format!("{} of {bytes} bytes", purpose.name()),
                reason: format!("{all} bytes are more than the budget of {budget}"),
            }),
            _ => Ok(()),
        }
    }

    /// Takes bytes off.
    pub fn give(&self, purpose: Purpose, bytes: u64) {
        let mut book = lock(&self.book);
        let now = &mut book.now[purpose as usize];
        *now = now.saturating_sub(bytes);
    }

    /// Makes an account say a number of bytes.
    ///
    /// # Errors
    /// As [`take`](Ledger::take).
    pub fn set(&self, purpose: Purpose, bytes: u64) -> Result<()> {
        self.give(purpose, u64::MAX);
        self.take(purpose, bytes)
    }

    /// What a purpose takes now.
    pub fn now(&self, purpose: Purpose) -> u64 {
        lock(&self.book).now[purpose as usize]
    }

    /// What everything takes now.
    pub fn all(&self) -> u64 {
        lock(&self.book).now.iter().sum()
    }

    /// What each purpose has taken at most, and all together.
    pub fn peaks(&self) -> (Vec<(Purpose, u64)>, u64) {
        let book = *lock(&self.book);
        (Purpose::ALL.into_iter().map(|purpose| (purpose, book.peak[purpose as usize])).collect(), book.most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_is_held_over_all_purposes() {
        let ledger = Ledger::with_budget(Some(100));
        ledger.take(Purpose::Weights, 60).unwrap();
        ledger.take(Purpose::Activations, 40).unwrap();
        let error = ledger.take(Purpose::Activations, 1).unwrap_err();
        assert!(error.is_out_of_memory() && error.to_string().contains("budget"), "{error}");
        ledger.give(Purpose::Activations, 41);
        ledger.set(Purpose::Weights, 10).unwrap();
        ledger.take(Purpose::Activations, 90).unwrap();
        assert_eq!(ledger.now(Purpose::Weights), 10);
        assert_eq!(ledger.peaks().1, 101);
    }
}
