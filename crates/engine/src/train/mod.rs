//! Distillation and fine-tuning: a student trains on a teacher's outputs, on labels, or on both, in one
//! or several processes.

mod adapter;
mod augment;
pub mod average;
mod batches;
pub mod cache;
mod cached_teacher;
mod checkpoint;
pub mod clip;
pub mod communicator;
mod context;
mod cuts;
mod draw;
mod dropout;
mod extension;
mod floats;
mod forecast;
mod frozen;
mod further_teacher;
mod groups;
mod kept_checkpoints;
mod layer_pairs;
pub mod log;
pub mod losses;
mod masking;
mod memory;
mod memory_reservation;
mod objective;
mod on_policy;
pub mod optimizer;
// Before `options`, which uses its macro.
#[macro_use]
mod shared_options;

mod options;
mod output_norm;
mod records;
mod run;
mod scales;
pub mod schedule;
mod selection;
mod state;
mod step;
mod teacher;
mod teacher_cache;
mod teacher_files;
mod team;
mod trainer;
mod weight_rounding;
mod weights;

pub use crate::data::one_or_several::one_or_several;
pub use crate::evaluation::Precision;
pub use adapter::{Adapter, AdapterKind, norm_names};
pub use augment::Augment;
pub use batches::largest_inputs;
pub use context::TrainingContext;
pub use dropout::dropout;
pub use forecast::{MemoryForecast, forecast};
pub use further_teacher::FurtherTeacher;
pub use groups::{Betas, ParameterGroup};
pub use log::LogFormat;
pub use masking::{MaskToken, Masker, Masking};
pub use objective::Objective;
pub use on_policy::{OnPolicy, OnPolicySampler};
#[cfg(feature = "cli")]
pub use options::batch_size_schema;
pub use options::{BatchNorm, BatchSize, Checkpointing, Every, Offload, QuantizerScales, Shard, Training, losses_or_none};
pub use output_norm::OutputNorm;
pub use records::{Evaluation, StepRecord};
pub use run::Trained;
pub use scales::Quantizers;
pub use selection::require_trainable;
pub use teacher::Teacher;
pub use teacher_files::TeacherFiles;
pub use team::Team;
pub use trainer::Trainer;
pub use weights::{ClassifyZeros, Weights, ZeroKind};
