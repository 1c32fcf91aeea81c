//! Running passes over a model and writing what comes of it: plan, apply, prepare, write, verify, report.

mod builder;
mod plan;
mod run;

pub use builder::{Builder, Pipeline};
pub use plan::{PassPlan, Plan};
