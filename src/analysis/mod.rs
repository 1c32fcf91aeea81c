//! What can be said of a graph without running it.

mod cost;
mod live;

pub use cost::{cost, usual_sizes};
pub use live::{dead_after, node_by_node};
