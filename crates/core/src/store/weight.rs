//! Logical tensors: dtype, shape and encoding, with bytes produced on demand.

use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::quantization_spec::row;
use super::{BlockSink, DType, ExactBlocks, OriginalFormat, QuantizationSpec};
use crate::error::{Error, Result};

/// Representation of the elements.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Encoding {
    /// Plain elements.
    Dense,
    /// Codes with scales or palettes.
    Quantized(QuantizationSpec),
}

/// Relation of a weight's values to those of the file from which it was opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Origin {
    /// The same values, up to the precision of the storage format.
    #[default]
    File,
    /// Learned from the file's values: the difference shows how much was learned.
    Learned,
    /// Transformed (scaled, folded, transposed): the difference has no meaning.
    Rescaled,
}

/// Why elements of a weight are zero, if recorded by a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ZeroOrigin {
    /// Pruned by a pass.
    Pruning,
    /// Rounded to zero by quantization.
    Rounding,
}

/// Role of a weight, if it is known from the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// Matrix of a matrix product.
    Matrix,
    /// Kernel of a convolution, outputs first.
    Kernel,
    /// Embedding table.
    Table,
    /// Matrix of an output head, which computes logits or scores from hidden states.
    Head,
    /// Router matrix of a mixture of experts.
    Router,
    /// A projection of all experts of a mixture.
    Experts,
    /// Gate of linear attention.
    LinearAttentionGate,
    /// A layer of the image encoder of a multimodal model.
    Vision,
    /// Part of a multi-token prediction module.
    TokenPrediction,
    /// A layer of a detector that computes positions within an image, or scores that select them.
    Localization,
    /// A matrix that products read in different axis orders, or that other nodes read too.
    Mixed,
    /// An operand of a product in an ONNX file that is neither a matrix on the right of a matrix product nor
    /// the kernel of a convolution.
    Operand,
    /// A number of a computation rather than a weight: a single element, or one that determines shapes.
    Constant,
    /// Any other role, like norms and position biases.
    Other,
}

/// A source of a tensor's elements. It can be visited repeatedly and always yields the same elements in
/// order.
pub trait WeightSource: Send + Sync {
    /// Calls `sink` with consecutive blocks. Each block except the last is a multiple of `unit`
    /// elements. Fails if a value cannot be represented.
    fn visit(&self, unit: usize, sink: BlockSink) -> Result<()>;

    /// Writes the elements of a dense weight into `bytes`, which has exactly their length. Tensors of files
    /// are read directly into it.
    fn read_into(&self, bytes: &mut [u8]) -> Result<()> {
        let mut at = 0;
        self.visit(1, &mut |block| {
            let end = at + block.now.values.len();
            bytes[at..end].copy_from_slice(block.now.values);
            at = end;
            Ok(())
        })
    }

    /// For rounding stages: the weight before rounding.
    fn unrounded(&self) -> Option<&Weight> {
        None
    }

    /// The blocks of a GGUF file that each view of a dense weight has in addition to its values, if it has
    /// them.
    fn exact_blocks(&self) -> Option<ExactBlocks> {
        None
    }

    /// A source for a range of rows, if they do not depend on other rows. Visited by `unit`, it yields
    /// the same blocks as a visit of the complete weight, provided that the preceding rows consist of
    /// complete blocks. `None` if rows are not independent, or the source does not support it.
    fn rows(&self, _rows: &Range<usize>, _unit: usize) -> Option<Rows> {
        None
    }
}

/// A range of rows of a source.
pub struct Rows {
    /// Source of these rows.
    pub source: Arc<dyn WeightSource>,
    /// Number of elements per block of the complete weight.
    pub block: usize,
}

/// Position of a range of rows in its weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowsOf {
    /// The first row.
    pub first: usize,
    /// Total number of rows of the weight.
    pub of: usize,
    /// Number of elements per block of the complete weight.
    pub(super) block: usize,
}

/// A logical tensor. Clones share the data.
#[derive(Clone)]
pub struct Weight {
    /// Dtype of the values; for quantized weights, of the dequantized values.
    pub dtype: DType,
    /// Shape, outermost dimension first.
    pub shape: Vec<usize>,
    /// Representation of the elements.
    pub encoding: Encoding,
    /// Size in the original files in bytes.
    pub stored_bytes: u64,
    /// Names of the tensors in the original files.
    pub stored_as: Vec<String>,
    /// Type in the original file, if the weight is dense but stored as quantized blocks or as integers
    /// with scales.
    pub stored_type: Option<&'static str>,
    /// Format of another tool in which the weight is stored in the original file, if no pass has changed it.
    pub original_format: Option<OriginalFormat>,
    /// Relation of the values to those of the original file.
    pub origin: Origin,
    /// Why elements are zero, if recorded by a pass of this run.
    pub zero_origin: Option<ZeroOrigin>,
    /// Role of the weight. If `None`, it is derived from the name.
    pub role: Option<Role>,
    /// Names of the nodes that use the weight, if known from the file. Patterns match them too.
    pub readers: Vec<String>,
    /// For a range of rows, its position in the complete weight.
    pub rows_of: Option<RowsOf>,
    /// File number and offset in a remote checkpoint. Reading weights in this order downloads each file
    /// once.
    pub remote_position: Option<(usize, u64)>,
    source: Arc<dyn WeightSource>,
}

impl std::fmt::Debug for Weight {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Weight({} {:?} {:?})", self.dtype, self.shape, self.encoding)
    }
}

impl Weight {
    /// [`stored_type`](Weight::stored_type) of a weight that is stored as 32-bit integers with scales.
    pub const INTEGERS: &'static str = "int32";

    /// A weight with a source. Used by readers of file formats and in tests.
    pub fn new(dtype: DType, shape: Vec<usize>, encoding: Encoding, source: Arc<dyn WeightSource>) -> Weight {
        Weight {
            dtype,
            shape,
            encoding,
            stored_bytes: 0,
            stored_as: Vec::new(),
            stored_type: None,
            original_format: None,
            origin: Origin::File,
            zero_origin: None,
            role: None,
            readers: Vec::new(),
            rows_of: None,
            remote_position: None,
            source,
        }
    }

    /// Returns the weight after another processing stage. Other attributes are preserved.
    pub fn then(&self, dtype: DType, encoding: Encoding, source: Arc<dyn WeightSource>) -> Weight {
        Weight { dtype, encoding, source, stored_type: None, original_format: None, ..self.clone() }
    }

    /// Sets the origin.
    #[must_use]
    pub fn with_origin(self, origin: Origin) -> Weight {
        Weight { origin, ..self }
    }

    /// Source of the bytes.
    pub fn source(&self) -> Arc<dyn WeightSource> {
        self.source.clone()
    }

    /// The blocks of a GGUF file that represent the values, if a pass has quantized them to such blocks.
    pub fn exact_blocks(&self) -> Option<ExactBlocks> {
        self.source.exact_blocks()
    }

    /// Produces the bytes; see [`WeightSource::visit`].
    pub fn visit(&self, unit: usize, sink: BlockSink) -> Result<()> {
        self.source.visit(unit, sink)
    }

    /// All values, dequantized. Fails if the values are not floats.
    pub fn floats(&self, name: &str) -> Result<Vec<f32>> {
        let mut values = vec![0f32; self.elements()];
        self.floats_into(name, &mut values).map(|()| values)
    }

    /// As [`floats`](Weight::floats), into a slice of `elements()` values.
    pub fn floats_into(&self, name: &str, values: &mut [f32]) -> Result<()> {
        let (mut at, mut floats) = (0, true);
        self.visit(1, &mut |block| {
            let count = block.now.elements();
            floats &= block.now.decode(0, &mut values[at..at + count]);
            at += count;
            Ok(())
        })?;
        let hint = if self.dtype == DType::F64 { "convert it to F32 first" } else { "" };
        if floats { Ok(()) } else { Err(Error::tensor(name, format!("is {}, expected F16, BF16 or F32", self.dtype), hint)) }
    }

    /// Number of zero elements.
    pub fn zeros(&self) -> Result<u64> {
        let mut zeros = 0;
        self.visit(1, &mut |block| {
            zeros += block.now.zeros();
            Ok(())
        })?;
        Ok(zeros)
    }

    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Number of rows, or 0 if the weight has no elements. Rows without columns take no bytes, so their
    /// number must not be trusted.
    pub fn filled_rows(&self) -> usize {
        self.shape.first().copied().filter(|_| self.elements() > 0).unwrap_or(0)
    }

    /// Number of elements per output row.
    pub fn row(&self) -> usize {
        row(&self.shape)
    }

    /// Whether the dtype is a float type of at least 16 bits.
    pub fn is_float(&self) -> bool {
        matches!(self.dtype, DType::F16 | DType::BF16 | DType::F32 | DType::F64)
    }

    /// Whether the dtype is a float type of less than 16 bits, without scales. No pass processes such
    /// weights.
    pub fn is_narrow_float(&self) -> bool {
        use DType::{F4, F6_E2M3, F6_E3M2, F8_E4M3, F8_E4M3FNUZ, F8_E5M2, F8_E5M2FNUZ};
        self.encoding == Encoding::Dense && matches!(self.dtype, F4 | F6_E2M3 | F6_E3M2 | F8_E4M3 | F8_E4M3FNUZ | F8_E5M2 | F8_E5M2FNUZ)
    }

    /// Size of the elements in bytes, without scales.
    pub fn value_bytes(&self) -> u64 {
        let bits = if self.encoding == Encoding::Dense { self.dtype.bitsize() as u64 } else { self.code_bits().into() };
        (self.elements() as u64 * bits).div_ceil(8)
    }

    /// Bit width of the codes of a quantized weight; 8 for dense weights.
    pub(super) fn code_bits(&self) -> u8 {
        match &self.encoding {
            Encoding::Dense => 8,
            Encoding::Quantized(affine) => affine.codes.bits(),
        }
    }

    /// Short description of the encoding in the original file, if it is unchanged.
    pub fn describe_stored(&self) -> String {
        self.stored_type.map_or_else(|| self.describe(), str::to_owned)
    }

    /// Short description of the encoding: `bf16`, `int8 channel`, `int4 group 128 asymmetric`.
    pub fn describe(&self) -> String {
        let Encoding::Quantized(affine) = &self.encoding else { return self.dtype.to_string().to_lowercase() };
        let by = match affine.granularity {
            super::Granularity::Block([rows, _]) if affine.codes.is_palette() => format!("of {rows} rows"),
            super::Granularity::Tensor => "tensor".to_owned(),
            super::Granularity::Channel => "channel".to_owned(),
            super::Granularity::Group(size) => format!("group {size}"),
            super::Granularity::Block([high, wide]) => format!("block {high}x{wide}"),
        };
        format!("{} {by}{}", affine.codes, if affine.symmetric { "" } else { " asymmetric" })
    }
}
