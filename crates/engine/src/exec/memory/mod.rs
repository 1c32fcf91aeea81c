//! Memory of a run: estimates, limits, placement of tensors and accounting.
//!
//! A limit (`--memory`, otherwise the available memory) is enforced in three places:
//!
//! 1. **Before a model runs**, [`MemoryNeed::estimate`] computes its parameters, activations and cached
//!    states from the graph and the sizes of the inputs. [`Schedule::choose`] compares them with the limit:
//!    the model runs as a whole, runs block by block, or is rejected with the required number of bytes. Only
//!    a limit that the user specified leads to a rejection.
//! 2. **Block by block**, `Blockwise` keeps the parameters of one block and prefetches the next. Activations
//!    cached between blocks have the budget [`Schedule::Blockwise`]; beyond it they are written to a
//!    [`SpillFile`].
//! 3. **In training**, the [`Placement`] of each [`ManagedTensor`] decides where master weights, gradients
//!    and optimizer state are between uses. A [`MemoryTracker`] counts all tensors by [`MemoryCategory`] and
//!    returns an out-of-memory error beyond its budget, as a device does. The trainer then splits the batch
//!    and repeats the step.
//!
//! A [`MemoryTrace`] records the counted allocations, and explains the peak.

mod category;
mod collective;
mod need;
mod paging;
mod placement;
mod sharding;
mod spill;
mod trace;
mod tracker;

pub use category::MemoryCategory;
pub use collective::{Collective, Pending, Segment, segments_of, split_evenly};
pub use need::{MemoryNeed, Schedule, axis_sizes, sizes_of, state_bytes};
pub use paging::Fetch;
pub(super) use paging::PagedParameters;
pub use placement::{ManagedTensor, Placement};
pub use sharding::Sharding;
pub use spill::SpillFile;
pub(super) use spill::SpilledTensor;
pub(super) use trace::GRADIENT;
pub use trace::{MemoryTrace, Peak};
pub use tracker::MemoryTracker;
pub(super) use tracker::{Account, Accounts};
