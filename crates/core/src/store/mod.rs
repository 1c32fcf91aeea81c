//! Checkpoints and weights. Opening a checkpoint does not read its weights: a weight describes how its
//! bytes are computed, and a writer requests them block by block.
//!
//! Does not depend on ops, architectures or passes.

mod affine;
pub mod artifacts;
mod assemble;
mod bias;
mod block;
mod block_packing;
pub mod checkpoint;
mod code_packing;
#[cfg(feature = "zstd")]
pub mod compressed;
pub mod content_key;
mod convert;
pub mod gguf;
mod gptq;
pub mod hash;
pub mod header;
mod in_memory;
mod index_select;
mod item;
mod measure;
mod modules;
mod number_format;
mod part_writer;
mod prebuilt;
pub mod pytorch;
mod restored;
mod rows;
pub mod scaled;
pub mod select;
mod shard_name;
mod sizes;
pub mod sparse;
mod storage_format;
mod verified_file;
mod weight;
pub mod writer;

pub use affine::{ActivationScheme, FloatScale, Granularity, QuantizationSpec, QuantizedReader, Static};
pub use artifacts::{Artifact, ArtifactStore};
pub use assemble::StatedEncoding;
pub use bias::{Bias, BiasForm};
pub use block::{BLOCK, Block, BlockSink, Bytes, Rows, View, WeightSource, block_elements, least_common_multiple};
pub use block_packing::Blocks;
pub use checkpoint::{Checkpoint, RawTensor};
pub use code_packing::Packing;
pub use content_key::ContentKey;
pub use convert::{Decoded, Rescaled};
pub use gptq::{GptqConfig, GroupSize};
pub use in_memory::Scales;
pub use measure::ValueHistogram;
pub use modules::Module;
pub use number_format::{Codes, FileFormat, FloatFormat, ScaleFormat};
pub use rows::RowsOf;
pub use scaled::{Computed, Scaled, Transposed};
pub use select::{Pattern, Selection};
pub use sizes::{ByteSize, OpenSize, OpenSizes};
pub use storage_format::{StorageFormat, StoredTensor};
pub use weight::{Encoding, Origin, Role, Weight, Weights, ZeroOrigin};

pub use safetensors::Dtype as DType;
