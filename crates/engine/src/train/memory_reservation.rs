//! Temporary entries in the memory tracker, for offloaded tensors while they are loaded.

use std::collections::BTreeMap;

use crate::error::Result;
use crate::exec::{ManagedTensor, MemoryCategory, MemoryTracker};

/// Bytes taken from the memory tracker, and returned on drop.
pub(super) struct MemoryReservation<'t> {
    tracker: &'t MemoryTracker,
    bytes: Vec<(MemoryCategory, String, u64)>,
}

impl<'t> MemoryReservation<'t> {
    /// Reserves nothing yet.
    pub fn new(tracker: &'t MemoryTracker) -> MemoryReservation<'t> {
        MemoryReservation { tracker, bytes: Vec::new() }
    }

    /// Reserves memory for the gradients with these names. Fails if the memory limit is exceeded.
    pub fn for_gradients(tracker: &'t MemoryTracker, gradients: &BTreeMap<String, ManagedTensor>, names: &[String]) -> Result<MemoryReservation<'t>> {
        let mut reservation = Self::new(tracker);
        for (name, kept) in names.iter().filter_map(|name| gradients.get_key_value(name)) {
            reservation.add(MemoryCategory::Gradients, name, kept)?;
        }
        Ok(reservation)
    }

    /// Adds the elements of a tensor that this process stores, unless they are in memory permanently. Fails
    /// if the memory limit is exceeded.
    pub fn add(&mut self, category: MemoryCategory, name: &str, kept: &ManagedTensor) -> Result<()> {
        let elements = kept.local_dims().iter().product::<usize>();
        self.add_bytes(category, name, (elements * kept.dtype().size_in_bytes()) as u64 - kept.bytes())
    }

    /// Adds bytes. Fails if the memory limit is exceeded.
    pub fn add_bytes(&mut self, category: MemoryCategory, name: &str, bytes: u64) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        self.bytes.push((category, name.to_owned(), bytes));
        self.tracker.allocate_named(category, name, bytes)
    }
}

impl Drop for MemoryReservation<'_> {
    fn drop(&mut self) {
        self.bytes.drain(..).for_each(|(category, name, bytes)| self.tracker.release_named(category, &name, bytes));
    }
}
