//! Trainings that continue with more steps than they were started with.

use super::batches::Batches;
use super::run::State;
use super::state;
use super::trainer::Trainer;
use crate::error::{Error, Result};

impl Trainer<'_> {
    /// Restores the checkpoint of an interrupted run, or else that of `final_checkpoint`, if the run resumes.
    /// Returns a note if the number of steps is different. Fails if it is smaller than that of the completed
    /// steps, or if a new training would replace a final checkpoint.
    pub(super) fn restore(&self, state: &mut State, batches: &Batches) -> Result<Option<String>> {
        let last = self.options.final_checkpoint.as_deref();
        let Some(folder) = self.context.folder.as_deref().filter(|_| self.context.resume) else {
            return match last.filter(|folder| state::has_checkpoint(folder)) {
                Some(folder) => Err(Error::Output {
                    path: state::path(folder),
                    reason: "is the checkpoint of an earlier training".into(),
                    hint: "set `resume` to continue it, or remove it".into(),
                }),
                None => Ok(None),
            };
        };
        let Some(folder) = [Some(folder), last].into_iter().flatten().find(|folder| state::has_checkpoint(folder)) else { return Ok(None) };
        state.train.restore(folder, self.graph, self.team)?;
        state.earlier = state.train.position.step;
        let earlier = std::mem::replace(&mut state.train.position.total, state.total);
        if earlier == state.total { Ok(None) } else { self.extended(state, batches, earlier).map(Some) }
    }

    /// A note on a training that was started with `earlier` steps.
    fn extended(&self, state: &State, batches: &Batches, earlier: u64) -> Result<String> {
        let (position, total) = (&state.train.position, state.total);
        if total < position.step {
            let what = if self.options.max_steps.is_some() { "max_steps" } else { "epochs" };
            let reason = format!(
                "is {total} steps, but the checkpoint has completed {} of {earlier}: resume with at least as many, or start over with `force` and without `resume`",
                position.step
            );
            return Err(Error::option(format!("{}: {what}", self.context.name), reason));
        }
        let rate = |step: u64, total: u64| self.options.schedule.rate(step, total, self.options.learning_rate);
        let mut note = format!("the training continued after {} of {earlier} steps, and now has {total}", position.step);
        if let Some(step) = (0..position.step - position.idle()).find(|step| rate(*step, earlier).to_bits() != rate(*step, total).to_bits()) {
            note += &format!(
                "; from step {} on, learning rates had been those of {earlier} steps, so that the result differs from that of a single run: \
                 only a constant rate, and that before the decay of `decay_steps`, are independent of the number of steps",
                step + 1
            );
        }
        if batches.ends_within_a_step(position.data, position.step)? {
            note += &format!("; the last of the {} completed steps had fewer batches than `gradient_accumulation`, because its epoch ended", position.step);
        }
        Ok(note)
    }

    /// Writes the checkpoint from which a longer training can continue, if it is due: after the last step, or
    /// before the decay of `decay_steps`.
    pub(super) fn save_for_extension(&self, state: &State) -> Result<()> {
        let Some(folder) = &self.options.final_checkpoint else { return Ok(()) };
        let position = &state.train.position;
        let is_due = match self.options.schedule.stable_steps(state.total) {
            Some(stable) => position.step - position.idle() == stable,
            None => position.step == state.total,
        };
        if is_due { state.train.save(folder, self.graph, self.team, 1) } else { Ok(()) }
    }
}
