//! Running passes over a model and writing what comes of it: plan, apply, prepare, write, verify, report.

mod builder;
mod cached;
mod carry;
#[cfg(feature = "run")]
mod evaluate;
#[cfg(feature = "run")]
mod kept;
mod key;
mod plan;
mod run;
#[cfg(feature = "run")]
mod starter;
mod verify;

pub use builder::{Builder, Pipeline};
pub use cached::Cached;
#[cfg(feature = "run")]
pub use kept::{Entry, Shelf};
pub use plan::{PassPlan, Plan};
#[cfg(feature = "run")]
pub use starter::starter;
pub use verify::{Check, verify};
