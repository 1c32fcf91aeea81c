//! Accounts of tensors that are in memory for a while, and live elsewhere between uses.

use std::collections::BTreeMap;

use crate::error::Result;
use crate::exec::{Kept, MemoryCategory, MemoryTracker};

/// Gradients that are in memory for a while, in the accounts.
pub(super) struct Loaded<'t> {
    tracker: &'t MemoryTracker,
    bytes: Vec<(MemoryCategory, String, u64)>,
}

impl<'t> Loaded<'t> {
    /// Of these names.
    ///
    /// # Errors
    /// They are too large.
    pub fn gradients(tracker: &'t MemoryTracker, gradients: &BTreeMap<String, Kept>, names: &[String]) -> Result<Loaded<'t>> {
        let mut loaded = Loaded { tracker, bytes: Vec::new() };
        for (name, kept) in names.iter().filter_map(|name| gradients.get_key_value(name)) {
            loaded.add(MemoryCategory::Gradients, name, kept)?;
        }
        Ok(loaded)
    }

    /// Something that is loaded beside them, unless it is in memory anyhow.
    ///
    /// # Errors
    /// It is too large.
    pub fn add(&mut self, category: MemoryCategory, name: &str, kept: &Kept) -> Result<()> {
        self.take(category, name, kept.size() - kept.bytes())
    }

    /// So many bytes of something beside them.
    ///
    /// # Errors
    /// They are too many.
    pub fn take(&mut self, category: MemoryCategory, name: &str, bytes: u64) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        self.bytes.push((category, name.to_owned(), bytes));
        self.tracker.take_for(category, name, bytes)
    }
}

impl Drop for Loaded<'_> {
    fn drop(&mut self) {
        self.bytes.drain(..).for_each(|(category, name, bytes)| self.tracker.give_for(category, &name, bytes));
    }
}
