//! The remaining tokens and their new ids.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::tokenizer::TokenizerFile;

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

/// A growing set of tokens that contains the parts of each of its tokens.
pub(super) struct Selection<'t> {
    tokenizer: &'t TokenizerFile,
    ids: BTreeSet<usize>,
}

impl<'t> Selection<'t> {
    /// The smallest set with these tokens.
    pub fn new(tokenizer: &'t TokenizerFile, required: impl IntoIterator<Item = usize>) -> Selection<'t> {
        let mut selection = Selection { tokenizer, ids: BTreeSet::new() };
        for id in required {
            selection.add(id, usize::MAX);
        }
        selection
    }

    /// Adds a token and its parts, unless there would be more than `limit` tokens. Returns whether it is in
    /// the set.
    pub fn add(&mut self, id: usize, limit: usize) -> bool {
        if self.ids.contains(&id) {
            return true;
        }
        if self.ids.len() >= limit {
            return false;
        }
        let mut new: BTreeSet<usize> = self.tokenizer.parts(id).into_iter().filter(|part| !self.ids.contains(part)).collect();
        new.insert(id);
        let fits = self.ids.len().saturating_add(new.len()) <= limit;
        if fits {
            self.ids.append(&mut new);
        }
        fits
    }

    /// Adds a row of the embedding that has no token.
    pub fn add_row(&mut self, id: usize) {
        self.ids.insert(id);
    }

    /// The ids.
    pub fn ids(&self) -> &BTreeSet<usize> {
        &self.ids
    }
}
