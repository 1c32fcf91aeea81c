//! What a training gets from the run that it is part of.

use std::path::PathBuf;

use super::Weights;
use super::checkpoint::Tensors;
use crate::error::Result;
use crate::evaluation::Score;
use crate::work::Work;

/// Scores weights.
pub type Evaluate<'a> = &'a dyn Fn(&Weights, &Tensors) -> Result<Option<Score>>;

/// What training needs from outside.
pub struct Surroundings<'a> {
    /// What trains, in the files that tell of its steps.
    pub name: &'a str,
    /// Progress and the wish to stop.
    pub work: Work<'a>,
    /// Start of every random choice.
    pub seed: u64,
    /// Where checkpoints lie, if anywhere.
    pub folder: Option<PathBuf>,
    /// Whether to go on from a checkpoint.
    pub resume: bool,
    /// What is trained, on what, and how: a hash.
    pub identity: String,
    /// A hash of the evaluation data. Of several processes, only the first one has such data.
    pub evaluation: Option<String>,
    /// Scores weights on the evaluation data, if there is any.
    pub evaluate: Option<Evaluate<'a>>,
}
