//! Checkpoints and weights. Opening a checkpoint does not read its weights: a weight describes how its
//! bytes are computed, and a writer requests them block by block.
//!
//! Does not depend on ops, architectures or passes.

pub mod artifacts;
mod assemble;
mod bias;
mod block;
mod block_packing;
mod changed_floats;
pub mod checkpoint;
mod code_packing;
#[cfg(feature = "zstd")]
pub mod compressed;
pub mod content_key;
mod convert;
mod corrected;
mod fp8;
mod fp8_config;
pub mod gguf;
mod gptq;
mod gptq_config;
pub mod hash;
pub mod header;
mod in_memory;
mod index_select;
mod item;
mod measure;
mod modules;
mod normalized;
mod number_format;
mod original_format;
mod packed_experts;
mod part_writer;
mod prebuilt;
pub mod pytorch;
mod quantization_spec;
mod quantized_reader;
mod raw_tensor;
mod restored;
mod rows;
pub mod scaled;
pub mod select;
mod shard_name;
mod sizes;
pub mod sparse;
mod storage_format;
mod stored_experts;
mod stored_tensor;
mod verified_file;
mod weight;
mod weights;
pub mod writer;

pub use artifacts::{Artifact, ArtifactStore};
pub use assemble::StatedEncoding;
pub use bias::{Bias, BiasForm};
pub use block::{BLOCK, Block, BlockSink, View, block_elements, least_common_multiple};
pub use block_packing::Blocks;
pub use checkpoint::Checkpoint;
pub use code_packing::Packing;
pub use content_key::ContentKey;
pub use convert::{Decoded, Rescaled};
pub use corrected::Corrected;
pub use fp8_config::Fp8Config;
pub use gptq_config::{GptqConfig, GroupSize};
pub use in_memory::{Bytes, Scales};
pub use measure::ValueHistogram;
pub use modules::Module;
pub use normalized::{Normalized, output_norms};
pub use number_format::{Codes, FileFormat, FloatFormat, ScaleFormat};
pub use original_format::{OriginalFormat, StoredFp8};
pub use quantization_spec::{ActivationScheme, FloatScale, Granularity, QuantizationSpec, Static};
pub use quantized_reader::QuantizedReader;
pub use raw_tensor::{DataFile, RawTensor};
pub use scaled::{Computed, Scaled, Transposed};
pub use select::{Pattern, Selection, nearest};
pub use sizes::{ByteSize, OpenSize, OpenSizes};
pub use storage_format::StorageFormat;
pub use stored_tensor::StoredTensor;
pub use weight::{Encoding, Origin, Role, Rows, RowsOf, Weight, WeightSource, ZeroOrigin};
pub use weights::Weights;

pub use safetensors::Dtype as DType;
