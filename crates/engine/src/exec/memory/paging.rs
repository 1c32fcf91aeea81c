//! Parameters that are fetched for use and dropped afterwards.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Mutex;

use candle_core::Tensor;

use super::category::MemoryCategory;
use super::tracker::MemoryTracker;
use crate::error::Result;
use crate::exec::host::bytes_of;
use crate::work::lock;

/// Returns the parameter with a name, on the device that uses it.
pub type Fetch = dyn Fn(&str) -> Result<Tensor> + Send + Sync;

/// Parameters of which only those of the current block are in memory.
pub(crate) struct PagedParameters {
    fetch: Box<Fetch>,
    /// Whether the parameters of the current block stay in memory between uses.
    keeps_block: bool,
    resident: Mutex<BTreeMap<String, Tensor>>,
}

impl fmt::Debug for PagedParameters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PagedParameters").field("resident", &lock(&self.resident).keys()).finish_non_exhaustive()
    }
}

impl PagedParameters {
    pub fn new(fetch: Box<Fetch>) -> PagedParameters {
        PagedParameters { fetch, keeps_block: true, resident: Mutex::default() }
    }

    /// Parameters that are fetched for each use.
    pub fn transient(fetch: Box<Fetch>) -> PagedParameters {
        PagedParameters { keeps_block: false, ..PagedParameters::new(fetch) }
    }

    /// A resident parameter, or one that is fetched only for this use.
    pub fn get(&self, name: &str) -> Result<Tensor> {
        let resident = lock(&self.resident).get(name).cloned();
        resident.map_or_else(|| (self.fetch)(name), Ok)
    }

    /// Makes exactly the parameters with these names resident, unless they are fetched for each use.
    pub fn enter(&self, names: &BTreeSet<String>, tracker: Option<&MemoryTracker>) -> Result<()> {
        if !self.keeps_block {
            return Ok(());
        }
        let mut resident = lock(&self.resident);
        resident.retain(|name, tensor| {
            let stays = names.contains(name);
            if let Some(tracker) = tracker.filter(|_| !stays) {
                tracker.release_named(MemoryCategory::Weights, name, bytes_of(tensor));
            }
            stays
        });
        for name in names {
            if resident.contains_key(name) {
                continue;
            }
            let tensor = (self.fetch)(name)?;
            let bytes = bytes_of(&tensor);
            resident.insert(name.clone(), tensor);
            tracker.map_or(Ok(()), |tracker| tracker.allocate_named(MemoryCategory::Weights, name, bytes))?;
        }
        Ok(())
    }
}
