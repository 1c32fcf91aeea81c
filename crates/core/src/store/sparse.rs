//! The sparse layout: a bitmask and the nonzero elements.
//!
//! A tensor `NAME` is stored as three: `NAME.bitmask`, U8 `[ceil(n / 8)]`, with bit `i % 8` of byte `i /
//! 8` set if element `i` (row-major) is stored; `NAME.values`, the stored elements in order, in the
//! tensor's dtype; `NAME.shape`, I64 `[rank]`. Only elements whose bits are all zero are omitted, so
//! decoding is exact. Files with such tensors have the metadata entry `"compress.sparse": "1"`.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::sync::Arc;

use super::quantization_spec::row;
use super::quantized_reader::Parameters;
use super::{Block, BlockSink, Checkpoint, DType, QuantizationSpec, QuantizedReader, RawTensor, View, WeightSource, block_elements, least_common_multiple};
use crate::error::{Error, Result};
use crate::kernel::bitmask;

/// Metadata key that marks files with sparse tensors.
pub const MARK: &str = "compress.sparse";
/// Value of the entry: the version of the layout.
pub const VERSION: &str = "1";

/// Size of a tensor in this layout in bytes.
pub fn stored_bytes(elements: u64, nonzeros: u64, size: u64, rank: u64) -> u64 {
    [nonzeros.saturating_mul(size), rank.saturating_mul(8)].into_iter().fold(elements.div_ceil(8), u64::saturating_add)
}

/// A sparse tensor in a file, exposed as a dense one.
#[derive(Debug, Clone)]
pub struct SparseFile {
    mask: RawTensor,
    values: RawTensor,
    /// Shape of the dense tensor.
    pub shape: Vec<usize>,
}

impl SparseFile {
    /// Removes the three tensors of `name` from a checkpoint.
    pub fn take(checkpoint: &mut Checkpoint, name: &str) -> Result<SparseFile> {
        let part = |suffix| format!("{name}.{suffix}");
        let broken = |reason: String| {
            Error::tensor(name, format!("sparse parts do not match: {reason}"), "write the file again; `compress verify` shows whether it was damaged")
        };
        let find = |suffix| checkpoint.tensors.get(&part(suffix)).ok_or_else(|| broken(format!("`{}` is missing", part(suffix))));
        let (mask, values, shape) = (find("bitmask")?, find("values")?, find("shape")?);
        if shape.dtype != DType::I64 || !matches!(shape.shape[..], [0..=64]) {
            return Err(broken("the shape is not a short I64 vector".into()));
        }
        let sizes: Option<Vec<usize>> = shape.read_all()?.as_chunks::<8>().0.iter().map(|d| usize::try_from(i64::from_le_bytes(*d)).ok()).collect();
        let sizes = sizes.ok_or_else(|| broken("negative size".into()))?;
        let elements = sizes.iter().try_fold(1usize, |n, &d| n.checked_mul(d)).ok_or_else(|| broken("the shape overflows".into()))?;
        if mask.dtype != DType::U8 || mask.elements() != elements.div_ceil(8) || values.dtype.bitsize() < 8 || values.elements() > elements {
            return Err(broken(format!("{elements} elements, a mask of {} bytes, {} values", mask.elements(), values.elements())));
        }
        let sparse = SparseFile { mask: mask.clone(), values: values.clone(), shape: sizes };
        for suffix in ["bitmask", "values", "shape"] {
            checkpoint.tensors.remove(&part(suffix));
        }
        Ok(sparse)
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.values.dtype
    }

    /// Total size of the parts in bytes.
    pub fn bytes(&self) -> u64 {
        [self.mask.bytes(), self.values.bytes()].into_iter().fold((self.shape.len() as u64).saturating_mul(8), u64::saturating_add)
    }

    fn blocks(&self, unit: usize, sink: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
        let size = self.values.dtype.bitsize() / 8;
        let elements: usize = self.shape.iter().product();
        let step = block_elements(unit);
        let (mut mask, mut values, mut dense) = (Vec::new(), Vec::new(), Vec::new());
        let mut position = 0usize;
        for start in (0..elements).step_by(step) {
            let count = step.min(elements.saturating_sub(start));
            // A block may start within a byte of the mask.
            let shift = start % 8;
            mask.resize(count.saturating_add(shift).div_ceil(8), 0);
            self.mask.read_at((start / 8) as u64, &mut mask)?;
            if shift > 0 {
                realign(&mut mask, shift as u32);
            }
            let nonzeros = bitmask::ones(&mask, count);
            values.resize(nonzeros.saturating_mul(size), 0);
            let next = position.saturating_add(nonzeros);
            if next > self.values.elements() {
                return Err(Error::malformed(self.values.path(), "a sparse mask has more bits set than there are values"));
            }
            self.values.read_at(position.saturating_mul(size) as u64, &mut values)?;
            position = next;
            dense.clear();
            dense.resize(count.saturating_mul(size), 0);
            bitmask::unpack(&mask, &values, size, &mut dense);
            sink(&dense)?;
        }
        if position != self.values.elements() {
            return Err(Error::malformed(self.values.path(), "a sparse mask has fewer bits set than there are values"));
        }
        Ok(())
    }
}

fn realign(mask: &mut [u8], shift: u32) {
    let mut next = 0;
    for byte in mask.iter_mut().rev() {
        let own = std::mem::replace(byte, u16::from_le_bytes([*byte, next]).wrapping_shr(shift) as u8);
        next = own;
    }
}

impl WeightSource for SparseFile {
    fn visit(&self, unit: usize, sink: BlockSink) -> Result<()> {
        self.blocks(unit, &mut |dense| sink(Block::untouched(View::dense(self.dtype(), dense))))
    }
}

/// Sparse codes with their scales.
pub struct SparseInteger {
    /// The codes.
    pub values: SparseFile,
    /// The scales.
    pub scales: RawTensor,
    /// Zero points.
    pub zero_points: Option<RawTensor>,
    /// The quantization.
    pub affine: QuantizationSpec,
    /// Divisor of the scales; otherwise 1.
    pub global_scale: f32,
    /// Columns per scale in the file.
    pub columns: usize,
    /// Dtype of the dequantized values.
    pub dtype: DType,
}

impl WeightSource for SparseInteger {
    fn visit(&self, unit: usize, sink: BlockSink) -> Result<()> {
        let row = row(&self.values.shape);
        let mut parameters = Parameters::new(&self.affine, row, self.columns, &self.scales, self.zero_points.as_ref());
        self.values.blocks(least_common_multiple(unit, row), &mut |values| {
            let (scales, zero_points) = parameters.next(values.len())?;
            let global_scale = self.global_scale;
            sink(Block::untouched(View { dtype: self.dtype, values, affine: Some((&self.affine, row)), scales, zero_points, global_scale, blocks: &[] }))
        })
    }
}

/// The source of a quantized weight with sparse, plain or packed codes. `columns` is the number of columns
/// per scale in the file.
pub fn integer_source(
    values: IntegerValues,
    (scales, zero_points, columns): (RawTensor, Option<RawTensor>, usize),
    global_scale: f32,
    affine: QuantizationSpec,
    dtype: DType,
) -> Arc<dyn WeightSource> {
    match values {
        IntegerValues::Sparse(values) => Arc::new(SparseInteger { values, scales, zero_points, global_scale, affine, columns, dtype }),
        IntegerValues::Plain { values, packed, shape } => {
            Arc::new(QuantizedReader { values, scales, zero_points, global_scale, packed, shape, affine, columns, dtype })
        }
    }
}

/// Location of the codes of a quantized weight.
pub enum IntegerValues {
    /// A bitmask with the nonzero codes.
    Sparse(SparseFile),
    /// A plain or packed tensor.
    Plain {
        /// The tensor.
        values: RawTensor,
        /// Whether the codes are packed into words or bytes.
        packed: bool,
        /// Shape `[out, in]`.
        shape: Vec<usize>,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_are_realigned_to_bytes() {
        let bits = |mask: &[u8]| mask.iter().flat_map(|byte| (0..8).map(move |bit| byte >> bit & 1)).collect::<Vec<_>>();
        let mask = [0b1010_0110, 0b0111_1001, 0b1100_0101];
        for shift in 1..8 {
            let mut moved = mask;
            realign(&mut moved, shift);
            let shift = shift as usize;
            assert_eq!(bits(&moved)[..24 - shift], bits(&mask)[shift..]);
            assert_eq!(bits(&moved)[24 - shift..], vec![0; shift]);
        }
    }
}
