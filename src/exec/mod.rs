//! Answers that need tensors: candle runs the graph.

mod device;
mod inputs;
mod load;
mod memory_tracker;
mod plan;
mod rounding;
mod run;
mod sizes;
mod tape;

pub use device::Choice;
pub use load::{Parameters, Residence};
pub use memory_tracker::{MemoryCategory, MemoryTracker};
pub use rounding::Rounding;
pub use run::{Executor, Inputs};
pub use tape::{Forward, GradientSink, Tape, Watch};
