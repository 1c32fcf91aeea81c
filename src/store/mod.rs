//! Bytes on disk and on their way: checkpoints are opened without being read, weights are recipes for bytes,
//! and bytes are made block by block when a writer asks for them.
//!
//! Knows no op, no architecture and no pass.

mod affine;
mod assemble;
mod bias;
mod block;
pub mod checkpoint;
#[cfg(feature = "zstd")]
pub mod compressed;
pub(crate) mod content_key;
mod convert;
pub mod gguf;
mod gptq;
pub mod hash;
pub mod header;
mod in_blocks;
mod in_memory;
mod index_select;
mod made;
mod measure;
mod modules;
mod part_writer;
pub mod pytorch;
mod reread;
mod rows;
pub(crate) mod scaled;
pub mod select;
mod sizes;
pub mod sparse;
mod storage_format;
mod verified_file;
mod weight;
pub mod writer;

pub use affine::{ActivationScheme, Affine, Codes, Granularity, IntegerFile, Static};
pub use assemble::StatedEncoding;
pub use bias::{Bias, BiasForm};
pub use block::{BLOCK, Block, BlockSink, Bytes, Rows, View, WeightSource, block_elements, least_common_multiple};
pub use checkpoint::{Checkpoint, RawTensor};
pub use content_key::ContentKey;
pub use convert::{Decoded, Rescaled};
pub use gptq::WordsLabel;
pub use in_blocks::Blocks;
pub use in_memory::Scales;
pub use measure::ValueHistogram;
pub use modules::Module;
pub use rows::RowsOf;
pub use scaled::{Computed, Scaled, Transposed};
pub use select::{Pattern, Selection};
pub use sizes::{ByteSize, OpenSize, OpenSizes};
pub use storage_format::{StorageFormat, StoredTensor};
pub use weight::{Encoding, Origin, Role, Weight, Weights, ZeroOrigin};

pub use safetensors::Dtype as DType;
