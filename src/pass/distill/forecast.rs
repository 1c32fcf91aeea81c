//! The work of a training, counted before it.

use super::training::Job;
use crate::error::Result;
use crate::ir::Graph;
use crate::model::Model;
use crate::pass::calibrate;
use crate::run_state::ModelRun;
use crate::train::{Checkpointing, Objective};

impl Job<'_> {
    /// The teachers that run, with their graphs, of which `first` is that of the first one.
    pub(super) fn teachers(&self, first: Option<&Graph>) -> Result<Vec<(Graph, &Model)>> {
        let first = first.cloned().zip(self.running_teacher());
        let further = self.more_teachers.iter().map(|(model, _)| Ok((model.graph()?, model)));
        first.map(Ok).into_iter().chain(further).collect()
    }

    /// The runs of the student, forward and backward, and of the teachers, which run once for each sample if
    /// their logits are cached; `None` if the student writes samples itself, or a draft head is trained.
    pub(super) fn model_runs(&self, (student, teachers): (&Graph, &[(Graph, &Model)]), objective: &Objective, batch: usize) -> Option<Vec<ModelRun>> {
        let training = &self.training;
        if self.on_policy.is_some() || self.head.is_some() {
            return None;
        }
        let length = |run: ModelRun| match (training.max_steps, run.is_cached) {
            (Some(steps), _) => ModelRun { batches: Some((steps.saturating_mul(training.gradient_accumulation as u64), batch)), ..run },
            (None, true) => run,
            (None, false) => run.times(training.epochs.unwrap_or(1)),
        };
        let recomputed = u64::from(training.gradient_checkpointing != Checkpointing::default());
        let first = self.running_teacher().map(|_| self.cache.is_some());
        let is_cached = first.into_iter().chain(self.more_teachers.iter().map(|(_, options)| options.cache.is_some()));
        let of_teacher = |((graph, _), is_cached): (&(Graph, &Model), bool)| ModelRun { is_cached, at_most: is_cached, ..calibrate::whole_run(graph) };
        let teachers = teachers.iter().zip(is_cached).map(of_teacher).filter(|_| !objective.teacher_values().is_empty());
        Some([calibrate::whole_run(student).times(3 + recomputed)].into_iter().chain(teachers).map(length).collect())
    }
}
