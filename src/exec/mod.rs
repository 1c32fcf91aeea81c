//! Answers that need tensors: candle runs the graph.

mod account;
mod ahead;
mod blockwise;
mod blockwise_options;
mod device;
#[cfg(feature = "cuda")]
mod gpu;
#[cfg(not(feature = "cuda"))]
#[path = "no_gpu.rs"]
mod gpu;
mod host;
mod inputs;
mod kept;
mod load;
mod memory_need;
mod memory_trace;
mod memory_tracker;
mod paged;
mod plan;
mod rounding;
mod run;
mod sequence;
mod shares;
mod sizes;
mod spill;
mod tape;
pub mod transfer;

pub use blockwise::Blockwise;
pub use blockwise_options::BlockwiseOptions;
pub use device::{Choice, name};
pub use gpu::DeviceMemory;
pub(crate) use host::{bytes_of, change, floats_on_host, read};
pub use kept::{Home, Kept};
pub use load::{Parameters, Residence};
pub use memory_need::{MemoryNeed, Schedule, sizes_of, state_bytes};
pub use memory_trace::{MemoryTrace, Peak};
pub use memory_tracker::{MemoryCategory, MemoryTracker};
pub use paged::Fetch;
pub use rounding::Rounding;
pub use run::{Executor, Inputs, Observation, PartialRun};
pub use sequence::{Answers, SequenceCache};
pub use shares::{Pool, Shares};
pub use tape::{Forward, GradientSink, Pages, Tape, TapeForecast, Watch};
