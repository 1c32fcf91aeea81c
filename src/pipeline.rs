//! Running passes over a model and writing what comes of it: plan, apply, prepare, write, verify, report.

mod builder;
mod cached;
mod carry;
#[cfg(feature = "zstd")]
mod further;
#[cfg(not(feature = "zstd"))]
#[path = "pipeline/no_further.rs"]
mod further;
mod parts;
mod plan;
mod run;
#[cfg(feature = "run")]
mod running;
#[cfg(not(feature = "run"))]
#[path = "pipeline/weights_only.rs"]
mod running;
mod told;
mod verdict;
mod verify;

pub use builder::{Builder, Pipeline};
pub use cached::Cached;
pub use parts::{PartOutcome, parts_folder, recipe_of_parts};
pub use plan::{ModelMemory, PassPlan, Plan};
#[cfg(feature = "run")]
pub use running::{CachedResult, ResultCache, memory_limit, starter};
pub use verify::{Check, verify};
