//! The compression pipeline: plans a run, applies passes, writes the output, verifies it, and reports.

mod builder;
mod cached;
mod card;
mod carry;
mod finish_passes;
mod measured;
mod part_manifest;
mod parts;
mod plan;
mod provenance;
mod quality_gate;
mod run;
mod run_report;
#[cfg(feature = "run")]
mod running;
#[cfg(not(feature = "run"))]
#[path = "pipeline/weights_only.rs"]
mod running;
mod runtimes;
mod time;
mod timing;
mod verify;
#[cfg(feature = "zstd")]
mod zstd_size;
#[cfg(not(feature = "zstd"))]
#[path = "pipeline/no_zstd.rs"]
mod zstd_size;

pub use builder::{Builder, Pipeline};
pub use cached::Cached;
pub use parts::PartOutcome;
#[doc(hidden)]
pub use parts::{parts_folder, recipe_from_parts};
pub use plan::{ModelMemory, PassPlan, Plan};
#[cfg(feature = "run")]
pub use running::ResultCache;
#[cfg(feature = "run")]
#[doc(hidden)]
pub use running::{CachedResult, draft, has_placeholder, memory_limit, search, starter, trial};
pub use time::StageWork;
#[doc(hidden)]
pub use time::{RateFile, Rates, sum_of};
pub use verify::{Check, verify};

pub use crate::run_state::PartIndex;
