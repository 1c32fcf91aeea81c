//! The context that a run provides to a training.

use std::path::PathBuf;

use super::Weights;
use super::checkpoint::Tensors;
use crate::error::Result;
use crate::evaluation::Score;
use crate::work::Work;

/// Evaluates weights; `None` without evaluation data.
pub type Evaluate<'a> = &'a dyn Fn(&Weights, &Tensors) -> Result<Option<Score>>;

/// Run-wide settings of a training, and its access to evaluation.
pub struct TrainingContext<'a> {
    /// Name of the pass, for log files.
    pub name: &'a str,
    /// Progress and cancellation.
    pub work: Work<'a>,
    /// Random seed.
    pub seed: u64,
    /// Folder for checkpoints, if there is one.
    pub folder: Option<PathBuf>,
    /// Whether to resume from a checkpoint.
    pub resume: bool,
    /// Hash of the model, the data and the options.
    pub identity: String,
    /// Hash of the evaluation data, which only rank 0 has.
    pub evaluation: Option<String>,
    /// Evaluates weights on the evaluation data, if there is any.
    pub evaluate: Option<Evaluate<'a>>,
}
