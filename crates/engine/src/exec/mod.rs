//! Execution of graphs with candle.

mod block_state;
mod blockwise;
mod blockwise_options;
mod coded;
mod device;
mod dropout;
mod gpu;
mod host;
mod inputs;
mod load;
mod memory;
mod plan;
mod pool;
mod prefetch;
mod residence;
mod rounding;
mod run;
mod sequence;
mod sizes;
mod tape;
pub mod transfer;

pub use blockwise::Blockwise;
pub use blockwise_options::BlockwiseOptions;
pub use device::hardware;
pub use device::{DeviceChoice, device_name};
pub use dropout::Dropout;
pub(crate) use dropout::DropoutSeed;
pub use gpu::DeviceMemory;
pub use host::{bytes_of, change, floats_on_host, read};
pub use inputs::Inputs;
pub(crate) use load::tensor as load_tensor;
pub use load::{Parameters, rounding_scheme};
pub use memory::{
    Collective, Fetch, ManagedTensor, MemoryCategory, MemoryNeed, MemoryTrace, MemoryTracker, Peak, Pending, Placement, Schedule, Segment, Sharding,
    axis_sizes, segments_of, sizes_of, split_evenly, state_bytes,
};
pub(crate) use pool::on_pool_thread;
pub use residence::Residence;
pub use rounding::Rounding;
pub use run::{Executor, Observation, Observe, PartialRun};
pub use sequence::{OutputTokens, SequenceCache};
pub use tape::{Forward, GradientSink, Pages, Tape, TapeForecast, Watch};
