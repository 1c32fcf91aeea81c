//! Trainings that continue with more steps than they were started with.

use std::path::Path;

use super::batches::Batches;
use super::run::State;
use super::state;
use super::trainer::Trainer;
use crate::error::{Error, Result, counted};

impl Trainer<'_> {
    /// Restores the checkpoint of an interrupted run, or else that of `final_checkpoint`, if the run resumes.
    /// Returns a note if the number of steps is different. Fails if it is smaller than that of the completed
    /// steps, if `patience` prevents further steps, or if a new training would replace a final checkpoint or
    /// could not be resumed.
    pub(super) fn restore(&self, state: &mut State, batches: &Batches) -> Result<Option<String>> {
        let last = self.options.final_checkpoint.as_deref();
        if last.is_some() && self.context.folder.is_none() {
            let reason = "needs a run with an output folder, because only such a run can be resumed: remove it";
            return Err(Error::option(format!("{}: final_checkpoint", self.context.name), reason));
        }
        let Some(folder) = self.context.folder.as_deref().filter(|_| self.context.resume) else {
            return match last.filter(|folder| state::has_checkpoint(folder)) {
                Some(folder) => Err(Error::Output {
                    path: state::path(folder),
                    reason: "is the checkpoint of an earlier training".into(),
                    hint: format!("set `resume` to continue it, or {}", state::start_over(&state::path(folder), true)),
                }),
                None => Ok(None),
            };
        };
        let Some(folder) = [Some(folder), last].into_iter().flatten().find(|folder| state::has_checkpoint(folder)) else { return Ok(None) };
        let is_final = Some(folder) == last;
        state.train.restore((folder, is_final), self.graph, self.team)?;
        state.earlier = state.train.position.step;
        let earlier = std::mem::replace(&mut state.train.position.total, state.total);
        self.require_patience(state, earlier)?;
        if earlier == state.total { Ok(None) } else { self.extended(state, batches, (folder, is_final), earlier).map(Some) }
    }

    /// Checks that `patience` is at least that of the earlier run, which might have ended before otherwise,
    /// and that it permits additional steps.
    fn require_patience(&self, state: &mut State, total: u64) -> Result<()> {
        let patience = self.options.patience;
        let earlier = std::mem::replace(&mut state.train.position.patience, patience);
        let waited = counted(state.train.position.waited as usize, "evaluation");
        let reason = if patience.is_some_and(|patience| earlier.is_none_or(|earlier| patience < earlier)) {
            let earlier = earlier.map_or("no limit".to_owned(), |earlier| earlier.to_string());
            format!("is smaller than that of the checkpoint, {earlier}: resume with at least as much")
        } else if total != state.total && self.out_of_patience(state) {
            format!("ended the training after step {}, with {waited} without improvement: resume with a larger one", state.train.position.step)
        } else {
            return Ok(());
        };
        Err(Error::option(format!("{}: patience", self.context.name), reason))
    }

    /// A note on a training that was started with `earlier` steps.
    fn extended(&self, state: &State, batches: &Batches, (folder, is_final): (&Path, bool), earlier: u64) -> Result<String> {
        let (position, total) = (&state.train.position, state.total);
        if total < position.step {
            let what = if self.options.max_steps.is_some() { "max_steps" } else { "epochs" };
            let reason = format!(
                "is {total} steps, but the checkpoint has completed {} of {earlier}: resume with at least as many, or {}",
                position.step,
                state::start_over(&state::path(folder), is_final)
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

    /// Writes the checkpoint from which a longer training can continue, if it is due: after the last step,
    /// which `patience` can determine, or before the decay of `decay_steps`.
    pub(super) fn save_for_extension(&self, state: &State) -> Result<()> {
        let Some(folder) = &self.options.final_checkpoint else { return Ok(()) };
        let position = &state.train.position;
        let (updates, is_last) = (position.step - position.idle(), position.step == state.total || self.out_of_patience(state));
        let is_due = match self.options.schedule.stable_steps(state.total) {
            // With many idle steps, or without patience, the training ends before the decay.
            Some(stable) => updates == stable || is_last && updates < stable,
            None => is_last,
        };
        if is_due { state.train.save(folder, self.graph, self.team, 1) } else { Ok(()) }
    }
}
