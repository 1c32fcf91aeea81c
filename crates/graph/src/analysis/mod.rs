//! Static analysis of graphs.

mod atoms;
mod attention_values;
mod axes;
mod blocks;
mod cost;
mod encoder_decoder;
mod group_text;
mod groups;
mod head;
mod layers;
mod live;
mod mixtures;
mod residual_stream;
mod segments;
mod sequence;

pub use atoms::UnitLayout;
pub use attention_values::{AttentionValues, HeadValues, attention_values};
pub use blocks::{Block, block_ends, blocks, linear_weights, single_block_reason};
pub use cost::{cost, cost_of_values, macs_of_node, uncounted, usual_sizes};
pub use encoder_decoder::EncoderDecoder;
pub use groups::{FrozenAxis, Group, GroupUnit, Groups, Member, Role, groups};
pub use head::{head, shared_head};
pub use layers::{Layer, Layers, layer_index, layers, stacks};
pub use live::{dead_after, node_by_node};
pub use mixtures::{Expert, Mixture, mixtures};
pub use residual_stream::{LinearLayer, ResidualStream, norm_of_head, residual_stream};
pub use segments::with_segments;
pub use sequence::SequenceAxes;
