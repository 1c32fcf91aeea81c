//! Answers that need tensors: candle runs the graph.

mod device;
mod host;
mod inputs;
mod ledger;
mod load;
mod plan;
mod rounding;
mod run;
mod sizes;
mod tape;

pub use device::Choice;
pub(crate) use host::{on_host, read};
pub use ledger::{Ledger, Purpose};
pub use load::{Parameters, Residence};
pub use rounding::Rounding;
pub use run::{Executor, Inputs, Observation, PartialRun};
pub use tape::{Forward, Sink, Tape, Watch};
