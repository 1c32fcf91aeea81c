//! Models, data and options of a training, and the accumulation of its gradients.

use std::cell::RefCell;
use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};

use super::cache::Cache;
use super::context::TrainingContext;
use super::{FurtherTeacher, Masker, Objective, OnPolicySampler, Teacher, Team, Training};
use crate::data::DataSet;
use crate::error::{Error, Result};
use crate::exec::{ManagedTensor, MemoryTracker, Placement};
use crate::ir::Graph;
use crate::ir::ops::sum;

/// A training, ready to run.
pub struct Trainer<'a> {
    /// Training options.
    pub options: &'a Training,
    /// The part of the student's graph that the losses depend on.
    pub graph: &'a Graph,
    /// The teacher, if a loss needs one.
    pub teacher: Option<&'a Teacher>,
    /// Cached logits of the teacher.
    pub cache: Option<&'a RefCell<Cache>>,
    /// Teachers whose probabilities are averaged with those of the first one.
    pub further_teachers: &'a [FurtherTeacher],
    /// The losses to minimize.
    pub objective: &'a Objective,
    /// The training data.
    pub data: &'a DataSet,
    /// Replaces ends of samples by continuations of the student, if there is one.
    pub sampler: Option<&'a OnPolicySampler>,
    /// Masks random tokens, if there is one.
    pub masker: Option<&'a Masker>,
    /// Samples per batch.
    pub batch: usize,
    /// Device of the student.
    pub device: &'a Device,
    /// Tracks device memory, and enforces the limit.
    pub memory_tracker: &'a MemoryTracker,
    /// The processes of this training.
    pub team: &'a Team,
    /// Seed, checkpoint folder, evaluation, and progress.
    pub context: TrainingContext<'a>,
}

impl Trainer<'_> {
    /// Fails if the training is interrupted within a step. Several processes are interrupted only between
    /// steps, all after the same one.
    pub(super) fn require_uninterrupted(&self) -> Result<()> {
        if self.team.size() > 1 { Ok(()) } else { self.context.work.cancel.check() }
    }
}

/// Name of the memory of batches that wait for others of their step.
pub(super) const WAITING: &str = "gradient_accumulation";

/// Dtype of the master weights.
pub(super) const MASTER: DType = DType::F32;

/// Accumulates a gradient in f32. Returns the bytes that the addition allocates, and how many of them
/// stay allocated. The gradient of a sharded parameter is the sum over all processes of its own part.
pub(super) fn accumulate(
    sums: &mut BTreeMap<String, ManagedTensor>,
    home: &Placement,
    parameter: Option<&ManagedTensor>,
    name: &str,
    gradient: Tensor,
) -> Result<(u64, u64)> {
    let failed = |e: candle_core::Error| Error::candle(format!("gradient of `{name}`"), e);
    let gradient = gradient.to_dtype(MASTER).map_err(failed)?;
    let (kept, bytes) = match sums.remove(name) {
        None => {
            let kept = parameter.map_or_else(|| home.store(&gradient), |parameter| home.store_with(&gradient, parameter))?;
            let stays = kept.bytes();
            (kept, (4 * gradient.elem_count() as u64, stays))
        }
        // This is the only reference to the tensor, so the sum is computed in place.
        Some(kept) if home.is_memory() => {
            let other = kept.open()?;
            drop(kept);
            (sum(other, gradient).map_err(failed)?.into(), (0, 0))
        }
        Some(mut kept) => {
            let bytes = kept.size();
            if let Some(other) = kept.load_own(gradient.device())? {
                kept.put(sum(other, gradient).map_err(failed)?)?;
            }
            (kept, (bytes, 0))
        }
    };
    sums.insert(name.to_owned(), kept);
    Ok(bytes)
}
