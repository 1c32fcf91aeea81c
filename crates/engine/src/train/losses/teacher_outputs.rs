//! Outputs of one or several teachers.

use std::collections::BTreeMap;

use candle_core::Tensor;

use super::head::LogitsSource;
use crate::exec::Parameters;
use crate::train::cache::{Cache, Entries};

/// Outputs of the teacher for a batch.
pub enum TeacherOutputs<'a> {
    /// No teacher.
    None,
    /// Values of its graph, and its parameters.
    Values(&'a BTreeMap<String, Tensor>, &'a Parameters),
    /// Top logits of all rows, and the cache that they were read from.
    Cached(&'a Entries, &'a Cache),
    /// Outputs of several teachers, whose probabilities are averaged.
    Several(Vec<WeightedTeacher<'a>>),
}

/// Outputs of one of several teachers.
pub struct WeightedTeacher<'a> {
    /// Weight of its probabilities, relative to those of the others.
    pub weight: f64,
    /// Source of its logits.
    pub source: &'a LogitsSource,
    /// Its outputs.
    pub outputs: TeacherOutputs<'a>,
}
