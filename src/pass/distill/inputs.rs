//! Graphs, samples and losses of a training, and checks of its teachers.

use std::sync::Arc;

use candle_core::{DType, Device};

use crate::data::{Data, DataSet};
use crate::error::{Error, Result};
use crate::evaluation::Subject;
use crate::ir::Graph;
use crate::model::Model;
use crate::store::ContentKey;
use crate::train::{Objective, Training};
use crate::work::Work;

/// Graphs, samples and losses of a training.
pub(super) struct Inputs<'a> {
    pub graph: Graph,
    pub teacher_graph: Option<Graph>,
    /// Options of the training data.
    pub data: &'a Data,
    pub subject: Subject,
    pub samples: Arc<DataSet>,
    pub objective: Objective,
}

/// Returns an error if the training images of student and teacher are preprocessed differently: both run
/// on the same samples.
pub(super) fn require_same_preprocessing(student: &DataSet, teacher: &DataSet) -> Result<()> {
    let (Some(ours), Some(theirs)) = (student.preprocessing(), teacher.preprocessing()) else { return Ok(()) };
    if ours == theirs {
        return Ok(());
    }
    let reason = format!(
        "preprocesses images differently from the student (teacher: {theirs}; student: {ours}): set the same `resize`, `crop`, `mean` and `std` for both in `data: {{ train: ... }}`"
    );
    Err(Error::option("distill: teacher", reason))
}

/// Cache key of a teacher's logits: its weights, its graph, the precision, the device, and whether the
/// logits of hard labels are cached.
pub(super) fn teacher_cache_key(teacher: &Model, graph: &Graph, training: &Training, compute: DType, device: &Device, work: &Work) -> Result<String> {
    let mut key = ContentKey::new(work);
    // Ranks on equal GPUs share the cache.
    key.line(&format!("{} {} {compute:?} {} {graph}", env!("CARGO_PKG_VERSION"), training.losses.hard.is_some(), crate::exec::hardware(device)));
    key.files(&teacher.weight_files, &teacher.path)?;
    Ok(key.name())
}
