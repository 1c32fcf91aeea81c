//! Parameters that are fetched when they are used, and dropped behind it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Mutex;

use candle_core::Tensor;

use super::{MemoryCategory, MemoryTracker, bytes_of};
use crate::error::Result;
use crate::work::lock;

/// Makes a parameter out of its name, on the device that uses it.
pub type Fetch = dyn Fn(&str) -> Result<Tensor> + Send + Sync;

/// Parameters out of memory, but for those of the block that is at work.
pub(super) struct Paged {
    fetch: Box<Fetch>,
    held: Mutex<BTreeMap<String, Tensor>>,
}

impl fmt::Debug for Paged {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Paged").field("held", &lock(&self.held).keys()).finish_non_exhaustive()
    }
}

impl Paged {
    pub fn new(fetch: Box<Fetch>) -> Paged {
        Paged { fetch, held: Mutex::default() }
    }

    /// A parameter: one that is held, or fetched for this use alone.
    pub fn get(&self, name: &str) -> Result<Tensor> {
        let held = lock(&self.held).get(name).cloned();
        held.map_or_else(|| (self.fetch)(name), Ok)
    }

    /// Holds the parameters of these names, and no others.
    pub fn enter(&self, names: &BTreeSet<String>, tracker: Option<&MemoryTracker>) -> Result<()> {
        let mut held = lock(&self.held);
        held.retain(|name, tensor| {
            let stays = names.contains(name);
            if let Some(tracker) = tracker.filter(|_| !stays) {
                tracker.give_for(MemoryCategory::Weights, name, bytes_of(tensor));
            }
            stays
        });
        for name in names {
            if held.contains_key(name) {
                continue;
            }
            let tensor = (self.fetch)(name)?;
            let bytes = bytes_of(&tensor);
            held.insert(name.clone(), tensor);
            tracker.map_or(Ok(()), |tracker| tracker.take_for(MemoryCategory::Weights, name, bytes))?;
        }
        Ok(())
    }
}
