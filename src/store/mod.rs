//! Bytes on disk and on their way: checkpoints are opened without being read, weights are recipes for bytes,
//! and bytes are made block by block when a writer asks for them.
//!
//! Knows no op, no architecture and no pass.

mod affine;
mod bias;
mod block;
pub mod checkpoint;
#[cfg(feature = "zstd")]
pub mod compressed;
mod convert;
pub mod hash;
pub mod header;
mod held;
mod kept;
mod measure;
mod part_writer;
mod pick;
mod scaled;
pub mod select;
mod sizes;
pub mod sparse;
mod spelling;
mod weight;
pub mod writer;

pub use affine::{Activations, Affine, Granularity, IntegerFile, Static};
pub use bias::Bias;
pub use block::{BLOCK, Block, Bytes, Sink, Source, View, block_elements, least_common_multiple};
pub use checkpoint::{Checkpoint, RawTensor};
pub use convert::{Decoded, Rescaled};
pub use held::Scales;
pub use measure::Histogram;
pub use scaled::{Computed, Scaled, Turned};
pub use select::{Pattern, Selection};
pub use sizes::ByteSize;
pub use spelling::{Part, Spelling};
pub use weight::{Encoding, Origin, Weight, Weights};

pub use safetensors::Dtype as DType;
