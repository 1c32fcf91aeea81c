//! Answers that need tensors: candle runs the graph.

mod device;
mod inputs;
mod load;
mod plan;
mod run;

pub use device::Choice;
pub use load::{Parameters, Residence};
pub use run::{Executor, Inputs};
