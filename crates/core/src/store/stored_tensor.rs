//! Descriptions of the tensors of a file to be written.

use super::DType;
use crate::error::Result;

/// One tensor of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredTensor {
    /// Name in the file.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Shape, outermost dimension first.
    pub shape: Vec<usize>,
}

/// Receives bytes of the part with an index.
pub(super) type PartSink<'a> = &'a mut dyn FnMut(usize, &[u8]) -> Result<()>;
