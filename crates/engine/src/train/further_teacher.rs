//! Teachers in addition to the first one.

use std::cell::{Ref, RefCell};

use super::Teacher;
use super::cache::{Cache, Entries};
use super::cached_teacher::CachedTeacher;
use super::losses::{Logits, LogitsSource, TeacherOutputs, WeightedTeacher};
use super::teacher::Values;
use crate::data::Batch;
use crate::error::Result;

/// A teacher whose probabilities are averaged with those of the first one, which has the weight 1.
pub struct FurtherTeacher {
    /// Weight of its probabilities.
    pub weight: f64,
    /// Source of its logits.
    pub source: LogitsSource,
    /// Names of the parameters of its output head.
    pub head: Vec<String>,
    /// Its model.
    pub teacher: Teacher,
    /// Cached logits.
    pub cache: Option<RefCell<Cache>>,
}

/// Outputs of a further teacher for a batch.
pub(super) enum FurtherOutputs<'t> {
    Values(Values),
    Cached(Entries, Ref<'t, Cache>),
}

impl FurtherTeacher {
    /// Computes the outputs for a batch, or reads its logits from the cache.
    pub(super) fn run(&self, losses: &Logits, batch: &Batch) -> Result<FurtherOutputs<'_>> {
        let Some(cache) = &self.cache else { return Ok(FurtherOutputs::Values(self.teacher.values(&batch.inputs)?)) };
        let cached = CachedTeacher { teacher: Some(&self.teacher), losses, source: &self.source };
        let entries = cached.entries(&mut cache.borrow_mut(), batch)?;
        Ok(FurtherOutputs::Cached(entries, cache.borrow()))
    }

    /// The outputs with the weight of the teacher.
    pub(super) fn weighted<'t>(&'t self, outputs: &'t FurtherOutputs) -> WeightedTeacher<'t> {
        let outputs = match outputs {
            FurtherOutputs::Values(values) => TeacherOutputs::Values(values, self.teacher.parameters()),
            FurtherOutputs::Cached(entries, cache) => TeacherOutputs::Cached(entries, cache),
        };
        WeightedTeacher { weight: self.weight, source: &self.source, outputs }
    }
}
