//! The environment that a run provides to a training.

use std::path::PathBuf;

use super::Weights;
use super::checkpoint::Tensors;
use crate::error::Result;
use crate::evaluation::Score;
use crate::work::Work;

/// Scores weights.
pub type Evaluate<'a> = &'a dyn Fn(&Weights, &Tensors) -> Result<Option<Score>>;

/// The environment of a training.
pub struct Surroundings<'a> {
    /// The name of the pass, for the files that log its steps.
    pub name: &'a str,
    /// Progress and the wish to stop.
    pub work: Work<'a>,
    /// Start of every random choice.
    pub seed: u64,
    /// The folder of checkpoints, if there is one.
    pub folder: Option<PathBuf>,
    /// Whether to resume from a checkpoint.
    pub resume: bool,
    /// A hash of the model, the data and the options.
    pub identity: String,
    /// A hash of the evaluation data. Of several processes, only the first one has such data.
    pub evaluation: Option<String>,
    /// Scores weights on the evaluation data, if there is any.
    pub evaluate: Option<Evaluate<'a>>,
}
