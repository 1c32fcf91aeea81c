//! Weights quantized to blocks for a GGUF file.

use std::sync::Arc;

use super::Kind;
use crate::error::{Error, Result};
use crate::kernel::convert;
use crate::kernel::ggml::BlockType;
use crate::kernel::grid::QuantizationParams;
use crate::store::{
    BlockSink, Bytes, DType, Decoded, Encoding, ExactBlocks, Granularity, Origin, StorageFormat, View, Weight, WeightSource, least_common_multiple,
};

/// Quantizes a dense weight to blocks. Yields the blocks and their dequantized values.
pub struct BlockQuantized {
    upstream: Weight,
    kind: BlockType,
    /// Id of the file type that determined the type, if one did.
    file_type: Option<u64>,
    name: String,
    scales: BlockScales,
}

/// How the scales of blocks are found.
#[derive(Debug, Clone, Default)]
pub enum BlockScales {
    /// By the type, with errors of equal weight.
    #[default]
    Plain,
    /// By the type, with errors weighted by the importance of the columns, matrix by matrix if the weight
    /// contains several.
    Weighted(Arc<Vec<f32>>),
    /// They are the [scales and zero points](Weight::block_params) of the quantized weight, whose codes are
    /// kept.
    Existing(Box<Weight>),
    /// They are those of these blocks, bytes of shape `[rows, bytes per row]`, which are kept.
    Blocks(Box<Weight>),
}

/// The blocks of a weight that has [exact ones](Weight::exact_blocks), as bytes.
struct BlockBytes(Weight);

impl WeightSource for BlockBytes {
    fn visit(&self, unit: usize, sink: BlockSink) -> Result<()> {
        Bytes { dtype: DType::U8, bytes: self.0.blocks()? }.visit(unit, sink)
    }
}

/// All bytes of a part of a weight.
fn bytes_of(weight: &Weight, part: for<'v> fn(&View<'v>) -> &'v [u8]) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    weight.visit(1, &mut |block| {
        bytes.extend_from_slice(part(&block.now));
        Ok(())
    })?;
    Ok(bytes)
}

/// Scales and zero points of the blocks of a quantized weight.
struct BlockParams {
    upstream: Weight,
    name: String,
    kind: BlockType,
}

impl WeightSource for BlockParams {
    fn visit(&self, unit: usize, sink: BlockSink) -> Result<()> {
        let scales = self.upstream.scales()?.ok_or_else(|| Error::tensor(&self.name, "is not quantized", ""))?;
        let blocks = scales.run.checked_div(self.kind.elements()).unwrap_or(0);
        let is_symmetric = self.kind.integers().is_some_and(|integers| integers.symmetric);
        let zeros = scales.zero_points.iter().map(|zero| if is_symmetric { 0.0 } else { *zero });
        let params = scales.scales.iter().zip(zeros).flat_map(|(scale, zero)| std::iter::repeat_n([*scale, zero], blocks)).flatten();
        Bytes { dtype: DType::F32, bytes: params.flat_map(f32::to_le_bytes).collect() }.visit(unit, sink)
    }
}

impl Weight {
    /// The scale and the zero point of each block of this type, as a dense weight with the same rows, if the
    /// blocks can contain the codes of this quantized matrix.
    pub fn block_params(&self, kind: BlockType, name: &str) -> Option<Weight> {
        let (Encoding::Quantized(spec), Some(integers), [rows, row]) = (&self.encoding, kind.integers(), &self.shape[..]) else { return None };
        let size = kind.elements();
        let is_whole = matches!(spec.granularity, Granularity::Channel | Granularity::Group(_)) && spec.granularity.run(*row, *row).is_multiple_of(size);
        // Differences of codes and zero points have one more bit.
        let bits = u32::from(spec.codes.bits()).saturating_add(u32::from(integers.symmetric && !spec.symmetric));
        if !spec.codes.is_integer() || bits > integers.bits || !is_whole || !row.is_multiple_of(size) {
            return None;
        }
        let shape = vec![*rows, row.checked_div(size)?.checked_mul(2)?];
        let source = BlockParams { upstream: self.clone(), name: name.to_owned(), kind };
        Some(Weight::new(DType::F32, shape, Encoding::Dense, Arc::new(source)))
    }

    /// The weight with the values of blocks. `scales` can also be complete blocks, of this shape.
    #[must_use]
    pub fn in_blocks(&self, ExactBlocks { kind, file_type }: ExactBlocks, name: &str, scales: BlockScales) -> Weight {
        let source = BlockQuantized { upstream: self.clone(), kind, file_type, name: name.to_owned(), scales };
        self.then(DType::F32, Encoding::Dense, Arc::new(source))
    }

    /// As [`in_blocks`](Weight::in_blocks), with blocks in memory.
    #[must_use]
    pub fn with_blocks(&self, exact: ExactBlocks, name: &str, blocks: Vec<u8>) -> Weight {
        let shape = vec![self.filled_rows(), blocks.len().checked_div(self.filled_rows()).unwrap_or(0)];
        let blocks = Weight::new(DType::U8, shape, Encoding::Dense, Arc::new(Bytes { dtype: DType::U8, bytes: blocks }));
        self.in_blocks(exact, name, BlockScales::Blocks(Box::new(blocks)))
    }

    /// A weight that has [exact blocks](Weight::exact_blocks), with others that have the same codes and
    /// learned scales; `None` if it has no blocks.
    #[must_use]
    pub fn with_learned_blocks(&self, name: &str, blocks: Vec<u8>) -> Option<Weight> {
        let (exact, source) = (self.exact_blocks()?, self.source());
        // Starts from the values before rounding, so that the previous blocks are not computed again.
        let learned = source.unrounded().unwrap_or(self).with_blocks(exact, name, blocks);
        Some(self.then(learned.dtype, learned.encoding.clone(), learned.source()).with_origin(Origin::Learned))
    }

    /// The bytes of the [exact blocks](Weight::exact_blocks); empty without them.
    pub fn blocks(&self) -> Result<Vec<u8>> {
        bytes_of(self, |view| view.blocks)
    }

    /// The blocks of a matrix that has [exact ones](Weight::exact_blocks), as bytes of shape `[rows, bytes
    /// per row]`.
    pub fn block_bytes(&self) -> Option<Weight> {
        let kind = self.exact_blocks()?.kind;
        let [rows, row] = &self.shape[..] else { return None };
        let shape = vec![*rows, row.checked_div(kind.elements())?.checked_mul(kind.bytes())?];
        Some(Weight::new(DType::U8, shape, Encoding::Dense, Arc::new(BlockBytes(self.clone()))))
    }

    /// The weight as it will be stored in a GGUF file, with its storage format.
    #[must_use]
    pub fn in_gguf(self, kind: Kind, name: &str, scales: BlockScales) -> (Weight, StorageFormat) {
        match kind {
            Kind::Plain(dtype) if self.is_float() => {
                let source = Decoded { upstream: self.source(), dtype, name: name.to_owned() };
                (self.then(dtype, Encoding::Dense, Arc::new(source)), StorageFormat::Plain)
            }
            Kind::Plain(_) => (self, StorageFormat::Plain),
            // It yields these blocks.
            Kind::Blocks(kind) if matches!(scales, BlockScales::Blocks(_)) && self.exact_blocks().is_some_and(|exact| exact.kind == kind) => {
                (self, StorageFormat::Gguf(kind))
            }
            Kind::Blocks(kind) => (self.in_blocks(ExactBlocks { kind, file_type: None }, name, scales), StorageFormat::Gguf(kind)),
        }
    }
}

impl BlockQuantized {
    /// Quantizes rows starting at row `at`, and advances `at`.
    fn encode_rows(&self, importance: &[f32], values: &[f32], row: usize, at: &mut usize, blocks: &mut [u8]) -> Result<()> {
        let matrices = importance.len().checked_div(row).unwrap_or(0);
        let rows = self.upstream.elements().checked_div(row).and_then(|rows| rows.checked_div(matrices)).unwrap_or(0);
        let bytes = row.checked_div(self.kind.elements()).unwrap_or(0).saturating_mul(self.kind.bytes());
        for (values, blocks) in values.chunks(row).zip(blocks.chunks_mut(bytes.max(1))) {
            let matrix = at.checked_div(rows).unwrap_or(0);
            let columns = importance.get(matrix.saturating_mul(row)..matrix.saturating_add(1).saturating_mul(row));
            let Some(columns) = columns.filter(|_| values.len() == row) else {
                return Err(Error::tensor(&self.name, format!("has rows of {row} elements, but importance for {} columns", importance.len()), ""));
            };
            self.kind.encode_row(values, columns, blocks);
            *at = at.saturating_add(1);
        }
        Ok(())
    }

    /// The bytes of all blocks, if they are given.
    fn blocks(&self) -> Result<Vec<u8>> {
        let BlockScales::Blocks(stored) = &self.scales else { return Ok(Vec::new()) };
        let bytes = bytes_of(stored, |view| view.values)?;
        let expected = self.upstream.elements().checked_div(self.kind.elements()).and_then(|blocks| blocks.checked_mul(self.kind.bytes()));
        if expected == Some(bytes.len()) {
            return Ok(bytes);
        }
        Err(Error::tensor(&self.name, format!("has {} bytes of {} blocks instead of {expected:?}", bytes.len(), self.kind.name()), ""))
    }

    /// Scales and zero points of all blocks, if they are given.
    fn params(&self) -> Result<Vec<QuantizationParams>> {
        let BlockScales::Existing(params) = &self.scales else { return Ok(Vec::new()) };
        let params: Vec<QuantizationParams> =
            params.floats(&self.name)?.as_chunks().0.iter().map(|[scale, zero]| QuantizationParams { scale: *scale, zero: *zero }).collect();
        let blocks = self.upstream.elements().checked_div(self.kind.elements());
        if blocks == Some(params.len()) { Ok(params) } else { Err(Error::tensor(&self.name, format!("has {} scales for {blocks:?} blocks", params.len()), "")) }
    }
}

impl WeightSource for BlockQuantized {
    fn exact_blocks(&self) -> Option<ExactBlocks> {
        Some(ExactBlocks { kind: self.kind, file_type: self.file_type })
    }

    fn unrounded(&self) -> Option<&Weight> {
        Some(&self.upstream)
    }

    fn visit(&self, unit: usize, sink: BlockSink) -> Result<()> {
        let (mut values, mut blocks, mut bytes) = (Vec::new(), Vec::new(), Vec::new());
        let (row, mut at) = (self.upstream.shape.last().copied().unwrap_or(1).max(1), 0);
        let (params, stored, mut first) = (self.params()?, self.blocks()?, 0usize);
        let alignment = if matches!(self.scales, BlockScales::Weighted(_)) { row } else { 1 };
        self.upstream.visit(least_common_multiple(least_common_multiple(unit, self.kind.elements()), alignment), &mut |block| {
            let count = block.now.elements();
            values.resize(count, 0f32);
            let number = count.checked_div(self.kind.elements()).unwrap_or(0);
            blocks.resize(number.saturating_mul(self.kind.bytes()), 0);
            bytes.resize(count.saturating_mul(4), 0);
            let wrong = |reason: String| Error::tensor(&self.name, reason, "write it as F16, BF16 or F32");
            if !block.now.decode(0, &mut values) || !count.is_multiple_of(self.kind.elements()) {
                return Err(wrong(format!("cannot be converted to {} blocks", self.kind.name())));
            }
            if values.iter().any(|value| !value.is_finite()) {
                return Err(wrong("contains NaN or infinite values, which blocks cannot represent".into()));
            }
            match &self.scales {
                BlockScales::Plain => self.kind.encode(&values, &mut blocks),
                BlockScales::Weighted(importance) => self.encode_rows(importance, &values, row, &mut at, &mut blocks)?,
                BlockScales::Existing(_) => self.kind.encode_on_grid(&values, params.get(first..).unwrap_or_default(), &mut blocks),
                BlockScales::Blocks(_) => {
                    let from = stored.get(first.saturating_mul(self.kind.bytes())..).unwrap_or_default();
                    blocks.iter_mut().zip(from).for_each(|(block, stored)| *block = *stored);
                }
            }
            first = first.saturating_add(number);
            self.kind.decode(&blocks, &mut values);
            if values.iter().any(|value| !value.is_finite()) {
                return Err(wrong(format!("contains values beyond the range of {} scales", self.kind.name())));
            }
            convert::f32_bytes(&values, &mut bytes);
            sink(block.becomes(View { blocks: &blocks, ..View::dense(DType::F32, &bytes) }))
        })
    }
}
