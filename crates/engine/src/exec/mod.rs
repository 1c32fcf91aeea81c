//! Execution of graphs with candle.

mod account;
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
mod load;
mod managed_tensor;
mod memory_need;
mod memory_trace;
mod memory_tracker;
mod parameter_paging;
mod plan;
mod prefetch;
mod rounding;
mod run;
mod sequence;
mod sharding;
mod sizes;
mod spill;
mod tape;
pub mod transfer;

pub use blockwise::Blockwise;
pub use blockwise_options::BlockwiseOptions;
pub use device::hardware;
pub use device::{DeviceChoice, device_name};
pub use gpu::DeviceMemory;
pub use host::{bytes_of, change, floats_on_host, read};
pub use load::{Parameters, Residence};
pub use managed_tensor::{ManagedTensor, Placement};
pub use memory_need::{MemoryNeed, Schedule, sizes_of, state_bytes};
pub use memory_trace::{MemoryTrace, Peak};
pub use memory_tracker::{MemoryCategory, MemoryTracker};
pub use parameter_paging::Fetch;
pub use rounding::Rounding;
pub use run::{Executor, Inputs, Observation, PartialRun};
pub use sequence::{OutputTokens, SequenceCache};
pub use sharding::{Collective, Sharding};
pub use tape::{Forward, GradientSink, Pages, Tape, TapeForecast, Watch};
