//! Training: a student learns from a teacher, from labels, or from both, in one process or several.

mod answers;
pub mod average;
mod batches;
pub mod cache;
mod checkpoint;
pub mod clip;
pub mod communicator;
mod cuts;
mod floats;
mod forecast;
mod layers;
mod loaded;
pub mod log;
pub mod losses;
mod memory;
mod objective;
pub mod optimizer;
mod options;
mod pass_options;
mod run;
mod scales;
pub mod schedule;
mod state;
mod step;
mod surroundings;
mod teacher;
mod team;
mod weights;

pub(crate) use crate::data::one_or_several::one_or_several;
pub use crate::evaluation::Precision;
pub use forecast::{MemoryForecast, forecast};
pub use log::LogFormat;
pub use objective::Objective;
pub use options::{BatchNorm, BatchSize, Checkpointing, Every, Offload, QuantizerScales, Shard, Training};
#[cfg(feature = "cli")]
pub(crate) use options::{batch_size_schema, losses_or_none};
pub(crate) use pass_options::{training_fields, training_pass};
pub use run::{Evaluation, Row, Trained, Trainer};
pub use scales::Quantizers;
pub use surroundings::Surroundings;
pub use teacher::Teacher;
pub use team::Team;
pub use weights::{MeaningOfZeros, Weights, Zeros};
