//! Sets of tokens that remain.

use std::collections::BTreeSet;

use super::tokenizer::TokenizerFile;

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

    /// Adds a token and its parts, unless there would be more than `limit` tokens.
    pub fn add(&mut self, id: usize, limit: usize) {
        if self.ids.contains(&id) || self.ids.len() >= limit {
            return;
        }
        let mut new: BTreeSet<usize> = self.tokenizer.parts(id).into_iter().filter(|part| !self.ids.contains(part)).collect();
        new.insert(id);
        if self.ids.len().saturating_add(new.len()) <= limit {
            self.ids.append(&mut new);
        }
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
