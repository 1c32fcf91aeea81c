//! Answers that need tensors: candle runs the graph.

mod load;
mod run;

pub use load::{Parameters, Residence};
pub use run::{Executor, Inputs};
