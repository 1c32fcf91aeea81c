//! Reads quantized weights in the format of compressed-tensors.

use super::quantization_spec::row;
use super::{Block, BlockSink, DType, Granularity, QuantizationSpec, RawTensor, View, WeightSource, block_elements, least_common_multiple};
use crate::error::{Error, Result};
use crate::kernel::{convert, packing};

/// A quantized weight in the format of compressed-tensors, with one byte per code or packed codes.
#[derive(Debug, Clone)]
pub struct QuantizedReader {
    /// The codes `[out, in]` with one byte each, or packed.
    pub values: RawTensor,
    /// The scales.
    pub scales: RawTensor,
    /// The zero points: I8 in the shape of the scales, or I32 `[ceil(out · bits / 32), groups]`, packed
    /// along the outputs.
    pub zero_points: Option<RawTensor>,
    /// Divisor of the scales; otherwise 1.
    pub global_scale: f32,
    /// Whether codes are packed, see [`Codes::packing`](super::Codes::packing).
    pub packed: bool,
    /// Shape `[out, in]`.
    pub shape: Vec<usize>,
    /// The quantization.
    pub affine: QuantizationSpec,
    /// Columns per scale in the file, of which blocks of the quantization may be parts.
    pub columns: usize,
    /// Dtype of the dequantized values.
    pub dtype: DType,
}

impl WeightSource for QuantizedReader {
    fn visit(&self, unit: usize, sink: BlockSink) -> Result<()> {
        let row = row(&self.shape);
        let rows = if row == 0 { 0 } else { self.shape.first().copied().unwrap_or(1) };
        let bits = self.affine.codes.bits();
        let packing = self.affine.codes.packing();
        let (dtype, size) = packing.row(row, bits);
        let stored = if self.packed { size * dtype.bitsize() / 8 } else { row };
        // Complete units and complete rows.
        let step = block_elements(least_common_multiple(unit, row)) / row.max(1);
        let mut parameters = Parameters::new(&self.affine, row, self.columns, &self.scales, self.zero_points.as_ref());
        let (mut words, mut unpacked) = (Vec::new(), Vec::new());
        for start in (0..rows).step_by(step) {
            let count = step.min(rows - start);
            words.resize(count * stored, 0);
            self.values.read_at((start * stored) as u64, &mut words)?;
            let values = if self.packed {
                unpacked.resize(count * row, 0);
                for (words, values) in words.chunks_exact(stored).zip(unpacked.chunks_exact_mut(row)) {
                    packing.unpack(words, bits, values);
                }
                &unpacked
            } else {
                &words
            };
            let (scales, zero_points) = parameters.next(values.len())?;
            let global_scale = self.global_scale;
            sink(Block::untouched(View { dtype: self.dtype, values, affine: Some((&self.affine, row)), scales, zero_points, global_scale, blocks: &[] }))?;
        }
        Ok(())
    }
}

/// Reads the scales and zero points of consecutive ranges of complete rows. If the last block of a file has
/// fewer columns, the blocks of the quantization are narrower, and several of them share a scale of the file.
pub(super) struct Parameters<'a> {
    affine: &'a QuantizationSpec,
    row: usize,
    /// Columns of a block in the file.
    columns: usize,
    files: (&'a RawTensor, Option<&'a RawTensor>),
    position: usize,
    scales: Vec<u8>,
    zero_points: Vec<u8>,
    words: Vec<u8>,
}

impl<'a> Parameters<'a> {
    pub(super) fn new(affine: &'a QuantizationSpec, row: usize, columns: usize, scales: &'a RawTensor, zero_points: Option<&'a RawTensor>) -> Self {
        Self { affine, row, columns, files: (scales, zero_points), position: 0, scales: Vec::new(), zero_points: Vec::new(), words: Vec::new() }
    }

    pub(super) fn next(&mut self, elements: usize) -> Result<(&[u8], &[u8])> {
        let count = if self.affine.granularity == Granularity::Tensor { 1 } else { elements / self.affine.granularity.run(self.row, elements) };
        let size = self.affine.codes.entries() * self.affine.scale_dtype.bitsize() / 8;
        let is_block = matches!(self.affine.granularity, Granularity::Block(_));
        if is_block {
            self.scales = self.read_blocks(self.files.0, size, count)?;
        } else {
            self.scales.resize(count * size, 0);
            self.files.0.read_at((self.position * size) as u64, &mut self.scales)?;
        }
        if let Some(file) = self.files.1 {
            self.zero_points.resize(count, 0);
            if file.dtype == DType::I32 {
                let bits = self.affine.codes.bits();
                let columns = (self.row / self.affine.granularity.run(self.row, elements)).max(1);
                let (first, rows) = (self.position / columns, count / columns);
                let (from, to) = (first * usize::from(bits) / 32, packing::words(first + rows, bits));
                self.words.resize(4 * columns * (to - from), 0);
                file.read_at((4 * columns * from) as u64, &mut self.words)?;
                packing::unpack_columns(&self.words, columns, bits, first, &mut self.zero_points);
            } else if is_block {
                self.zero_points = self.read_blocks(file, 1, count)?;
            } else {
                file.read_at(self.position as u64, &mut self.zero_points)?;
            }
        }
        if self.affine.granularity != Granularity::Tensor {
            self.position += count;
        }
        Ok((&self.scales, &self.zero_points))
    }

    /// Parameters of `size` bytes for the next `count` blocks. The rows of a block share one row of
    /// parameters in the file, which is read once.
    fn read_blocks(&self, file: &RawTensor, size: usize, count: usize) -> Result<Vec<u8>> {
        let mut parameters = vec![0; count * size];
        let Granularity::Block([high, wide]) = self.affine.granularity else { return Ok(parameters) };
        let (groups, columns) = (self.affine.granularity.groups(self.row).max(1), self.columns.max(1));
        let (mut line, mut last) = (vec![0; self.row.div_ceil(columns) * size], None);
        for (row, output) in (self.position / groups..).zip(parameters.chunks_exact_mut((groups * size).max(1))) {
            let block = row / high.max(1);
            if last.replace(block) != Some(block) {
                file.read_at((block * line.len()) as u64, &mut line)?;
            }
            for (group, output) in output.chunks_exact_mut(size.max(1)).enumerate() {
                let start = group * wide / columns * size;
                output.copy_from_slice(&line[start..start + size]);
            }
        }
        Ok(parameters)
    }
}

/// The value of a tensor with one positive element.
pub(super) fn positive(name: &str, tensor: &RawTensor) -> Result<f32> {
    let mut value = [0f32];
    let read = tensor.elements() == 1 && convert::decode(tensor.dtype, &tensor.read_all()?, &mut value);
    let [value] = value;
    if read && value.is_normal() && value > 0.0 {
        return Ok(value);
    }
    Err(Error::tensor(name, "is not a positive number", "write the file again with a tool that follows compressed-tensors"))
}
