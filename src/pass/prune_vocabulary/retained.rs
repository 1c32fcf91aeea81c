//! The remaining tokens and their new ids.

use serde_json::{Value, json};

/// Ids of the remaining tokens, ascending. Their positions are the new ids.
#[derive(Clone, Copy)]
pub(super) struct Retained<'k>(pub &'k [usize]);

impl Retained<'_> {
    /// The new id of a token; `None` if it is removed.
    pub fn new_id(&self, id: usize) -> Option<usize> {
        self.0.binary_search(&id).ok()
    }

    /// Whether a token remains.
    pub fn contains(&self, id: usize) -> bool {
        self.new_id(id).is_some()
    }

    /// Replaces an id by the new one. Returns a reason if it is not the id of a remaining token.
    pub fn renumber(&self, id: &mut Value) -> Result<(), String> {
        let new = number(id).and_then(|id| self.new_id(id)).ok_or_else(|| format!("{id} is not the id of a remaining token"))?;
        *id = json!(new);
        Ok(())
    }
}

/// A token id.
pub(super) fn number(value: &Value) -> Option<usize> {
    value.as_u64().and_then(|id| usize::try_from(id).ok())
}
