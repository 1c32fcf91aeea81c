//! The models of a layerwise run, which go through their blocks together.

use std::collections::BTreeSet;
use std::rc::Rc;

use super::guide::Guide;
use super::ranks::Ranks;
use crate::data::SequenceRoles;
use crate::error::Result;
use crate::exec::Blockwise;
use crate::pass::Context;

/// The models of a layerwise run.
pub(super) struct Runs<'a> {
    pub blocks: Blockwise<'a>,
    /// The unmodified model.
    pub reference: Option<Blockwise<'a>>,
    pub roles: SequenceRoles<'a>,
    /// Gradients of the loss.
    pub guide: Option<Rc<Guide>>,
    pub ranks: Ranks<'a>,
}

/// A block whose layers were modified.
pub(super) struct ModifiedBlock<'b, 'a> {
    pub index: usize,
    pub runs: &'b mut Runs<'a>,
    pub context: &'b Context<'b>,
}

impl Runs<'_> {
    /// Enters a block. Both models share the parameters of this block and of the next one, which is
    /// prefetched, except for `changed` ones.
    pub fn enter(&mut self, block: usize, changed: &BTreeSet<String>) -> Result<()> {
        self.blocks.enter(block)?;
        let Some(reference) = &mut self.reference else { return Ok(()) };
        let loaded = self.blocks.blocks().iter().skip(block).take(2).flat_map(|block| &block.parameters);
        let same = loaded.map(String::as_str).filter(|name| !changed.contains(*name)).collect();
        reference.enter_sharing(block, Some(&self.blocks), &same)
    }

    pub fn leave(&mut self) -> Result<()> {
        self.blocks.leave()?;
        self.reference.iter_mut().try_for_each(Blockwise::leave)
    }

    pub fn end_at(&mut self, last: usize) {
        self.blocks.end_at(last);
        self.reference.iter_mut().for_each(|reference| reference.end_at(last));
    }
}
