//! The cache of a training's teacher.

use super::Teacher;
use super::batches::Batches;
use super::cached_teacher::CachedTeacher;
use super::state::Position;
use super::trainer::Trainer;
use crate::error::Result;
use crate::exec::{BlockwiseOptions, Residence};

impl Trainer<'_> {
    /// The teacher, if there is one, and the loss over its logits; `None` without such a loss.
    pub(super) fn cached_teacher(&self) -> Option<CachedTeacher<'_>> {
        let losses = self.objective.over_logits()?;
        Some(CachedTeacher { teacher: self.teacher, losses, source: losses.teacher.as_ref()? })
    }

    /// Fills the cache for a whole epoch if the teacher is streamed from disk, so that its weights are
    /// read once per epoch. Returns the number of samples added.
    pub(super) fn fill_teacher_cache(&self, batches: &Batches, position: &Position) -> Result<usize> {
        let (Some(cached), Some(cache)) = (self.cached_teacher().filter(|cached| cached.teacher.is_some_and(Teacher::is_streamed)), self.cache) else {
            return Ok(0);
        };
        // As in memory, see `Teacher`.
        let options = BlockwiseOptions { spill: self.context.folder.clone(), residence: Residence::Stored, ..BlockwiseOptions::on(self.device) };
        cached.fill(&mut cache.borrow_mut(), batches, (position.data, position.step), &options, &self.context.work)
    }
}
