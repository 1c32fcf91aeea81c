//! What can be said of a graph without running it.

mod atoms;
mod axes;
mod blocks;
mod cost;
mod group_text;
mod groups;
mod head;
mod layers;
mod live;
mod mixtures;
mod sequence;

pub use atoms::Place;
pub use blocks::{Block, block_ends, blocks, uncut, weights_of_layers};
pub use cost::{cost, uncounted, usual_sizes};
pub use groups::{FrozenAxis, Group, GroupUnit, Groups, Member, Role, groups};
pub use head::{head, shared_head};
pub use layers::{Layer, Layers, layers, number, stacks};
pub use live::{dead_after, node_by_node};
pub use mixtures::{Expert, Mixture, mixtures};
pub use sequence::SequenceAxes;
