//! Answers that need tensors: candle runs the graph.

mod device;
mod inputs;
mod load;
mod plan;
mod rounding;
mod run;

pub use device::Choice;
pub use load::{Parameters, Residence};
pub use rounding::Rounding;
pub use run::{Executor, Inputs};
