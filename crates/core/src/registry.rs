//! Values that a program registers by name for the lifetime of the process.

use std::collections::BTreeMap;
use std::sync::{PoisonError, RwLock};

/// Registered values by name.
pub struct Registry<T>(RwLock<BTreeMap<String, T>>);

impl<T: Clone> Registry<T> {
    /// An empty registry.
    #[allow(clippy::new_without_default, reason = "only for statics")]
    pub const fn new() -> Registry<T> {
        Registry(RwLock::new(BTreeMap::new()))
    }

    /// Adds a value. Returns whether the name was free: neither registered nor reserved.
    #[must_use]
    pub fn add(&self, name: &str, is_reserved: bool, value: T) -> bool {
        let mut values = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let is_free = !is_reserved && !values.contains_key(name);
        if is_free {
            values.insert(name.to_owned(), value);
        }
        is_free
    }

    /// The value of a name.
    pub fn get(&self, name: &str) -> Option<T> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).get(name).cloned()
    }

    /// All names, in alphabetical order.
    pub fn names(&self) -> Vec<String> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).keys().cloned().collect()
    }
}
