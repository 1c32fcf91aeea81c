//! Blocks of GGUF files that represent a weight exactly.

use crate::kernel::ggml::BlockType;

/// Blocks of a GGUF file whose values a dense weight has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExactBlocks {
    /// Their type.
    pub kind: BlockType,
    /// Id of the file type whose mixture determined the type; `None` if it was selected for this weight.
    pub file_type: Option<u64>,
}
