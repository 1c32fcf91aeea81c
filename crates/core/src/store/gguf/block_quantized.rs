//! Weights quantized to blocks for a GGUF file.

use std::sync::Arc;

use super::Kind;
use crate::error::{Error, Result};
use crate::kernel::convert;
use crate::kernel::ggml::BlockType;
use crate::store::{BlockSink, DType, Decoded, Encoding, StorageFormat, View, Weight, WeightSource, least_common_multiple};

/// Quantizes a dense weight to blocks. Yields the blocks and their dequantized values.
pub struct BlockQuantized {
    upstream: Weight,
    kind: BlockType,
    name: String,
    /// Importance of the columns, for each matrix.
    importance: Option<Arc<Vec<f32>>>,
}

impl Weight {
    /// The weight as it will be stored in a GGUF file, with its storage format. `importance` weights the
    /// errors of each column, matrix by matrix if the weight contains several.
    #[must_use]
    pub fn in_gguf(self, kind: Kind, name: &str, importance: Option<Arc<Vec<f32>>>) -> (Weight, StorageFormat) {
        match kind {
            Kind::Plain(dtype) if self.is_float() => {
                let source = Decoded { upstream: self.source(), dtype, name: name.to_owned() };
                (self.then(dtype, Encoding::Dense, Arc::new(source)), StorageFormat::Plain)
            }
            Kind::Plain(_) => (self, StorageFormat::Plain),
            Kind::Blocks(kind) => {
                let (weight, name) = (self.clone(), name.to_owned());
                (weight.then(DType::F32, Encoding::Dense, Arc::new(BlockQuantized { upstream: self, kind, name, importance })), StorageFormat::Gguf(kind))
            }
        }
    }
}

impl BlockQuantized {
    /// Quantizes rows starting at row `at`, and advances `at`.
    fn encode(&self, values: &[f32], row: usize, at: &mut usize, blocks: &mut [u8]) -> Result<()> {
        let Some(importance) = &self.importance else {
            self.kind.encode(values, blocks);
            return Ok(());
        };
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
}

impl WeightSource for BlockQuantized {
    fn visit(&self, unit: usize, sink: BlockSink) -> Result<()> {
        let (mut values, mut blocks, mut bytes) = (Vec::new(), Vec::new(), Vec::new());
        let (row, mut at) = (self.upstream.shape.last().copied().unwrap_or(1).max(1), 0);
        let alignment = if self.importance.is_some() { row } else { 1 };
        self.upstream.visit(least_common_multiple(least_common_multiple(unit, self.kind.elements()), alignment), &mut |block| {
            let count = block.now.elements();
            values.resize(count, 0f32);
            blocks.resize(count.checked_div(self.kind.elements()).unwrap_or(0).saturating_mul(self.kind.bytes()), 0);
            bytes.resize(count.saturating_mul(4), 0);
            let wrong = |reason: String| Error::tensor(&self.name, reason, "write it as F16, BF16 or F32");
            if !block.now.decode(0, &mut values) || !count.is_multiple_of(self.kind.elements()) {
                return Err(wrong(format!("cannot be converted to {} blocks", self.kind.name())));
            }
            if values.iter().any(|value| !value.is_finite()) {
                return Err(wrong("contains NaN or infinite values, which blocks cannot represent".into()));
            }
            self.encode(&values, row, &mut at, &mut blocks)?;
            self.kind.decode(&blocks, &mut values);
            if values.iter().any(|value| !value.is_finite()) {
                return Err(wrong(format!("contains values beyond the range of {} scales", self.kind.name())));
            }
            convert::f32_bytes(&values, &mut bytes);
            sink(block.becomes(View { blocks: &blocks, ..View::dense(DType::F32, &bytes) }))
        })
    }
}
