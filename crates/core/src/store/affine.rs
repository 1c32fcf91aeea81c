//! Quantization specification of weights, and reading of quantized weights.

use serde::{Deserialize, Serialize};

use super::{Block, BlockSink, Codes, DType, FloatFormat, RawTensor, ScaleFormat, View, WeightSource, block_elements, least_common_multiple};
use crate::error::Result;
use crate::kernel::packing;

/// Which elements share a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Granularity {
    /// One scale for the tensor.
    Tensor,
    /// One scale for each output row.
    Channel,
    /// One scale for this many consecutive inputs of a row.
    Group(usize),
    /// One scale for a block of rows and consecutive inputs; the last block may have fewer rows. In a
    /// [`View`], each row has separate scales.
    Block([usize; 2]),
}

impl Granularity {
    /// Number of elements per scale, for rows of `row` elements.
    pub fn run(self, row: usize, elements: usize) -> usize {
        match self {
            Granularity::Tensor => elements,
            Granularity::Channel => row,
            Granularity::Group(size) | Granularity::Block([_, size]) => size,
        }
        .max(1)
    }

    /// Number of scales per row; 1 if all elements of a row share a scale.
    pub fn groups(self, row: usize) -> usize {
        if matches!(self, Granularity::Group(_) | Granularity::Block(_)) { row / self.run(row, row) } else { 1 }
    }
}

/// Quantization of the activations that are multiplied with the weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ActivationScheme {
    /// Int8 with a dynamic scale per token.
    DynamicToken,
    /// 8-bit integers with a static scale and zero point.
    Static(Static),
    /// Floats.
    Float(FloatFormat, FloatScale),
    /// Not quantized.
    None,
}

/// Scales of activations that are quantized to floats.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FloatScale {
    /// A dynamic scale per token.
    Token,
    /// A dynamic scale per group of this many values of a token.
    Group(usize),
    /// A static scale.
    Static(Static),
    /// A dynamic power of two per group (MX formats).
    PowerOfTwo,
    /// A dynamic E4M3 scale per group, relative to a static global scale (NVFP4).
    Relative(Static),
}

impl FloatScale {
    /// Format of the scales.
    pub fn format(self) -> ScaleFormat {
        match self {
            FloatScale::Token | FloatScale::Group(_) | FloatScale::Static(_) => ScaleFormat::Float,
            FloatScale::PowerOfTwo => ScaleFormat::PowerOfTwo,
            FloatScale::Relative(_) => ScaleFormat::Relative,
        }
    }
}

impl ActivationScheme {
    /// The static parameters, if there are any.
    pub fn parameters(self) -> Option<Static> {
        match self {
            ActivationScheme::Static(by) | ActivationScheme::Float(_, FloatScale::Static(by) | FloatScale::Relative(by)) => Some(by),
            ActivationScheme::Float(_, FloatScale::Token | FloatScale::Group(_) | FloatScale::PowerOfTwo)
            | ActivationScheme::DynamicToken
            | ActivationScheme::None => None,
        }
    }

    /// The same scheme with these static parameters, if it has any.
    #[must_use]
    pub fn with_parameters(self, by: Static) -> ActivationScheme {
        match self {
            ActivationScheme::Static(_) => ActivationScheme::Static(by),
            ActivationScheme::Float(format, FloatScale::Static(_)) => ActivationScheme::Float(format, FloatScale::Static(by)),
            ActivationScheme::Float(format, FloatScale::Relative(_)) => ActivationScheme::Float(format, FloatScale::Relative(by)),
            ActivationScheme::Float(_, FloatScale::Token | FloatScale::Group(_) | FloatScale::PowerOfTwo)
            | ActivationScheme::DynamicToken
            | ActivationScheme::None => self,
        }
    }

    /// Name of the tensor with the static scale.
    pub fn scale_name(self) -> &'static str {
        if matches!(self, ActivationScheme::Float(_, FloatScale::Relative(_))) { "input_global_scale" } else { "input_scale" }
    }
}

/// Static quantization parameters of activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Static {
    /// Bits of the scale, so that equality is bitwise.
    scale: u32,
    /// Int8 zero point. `None` if it is implicitly 0 and not stored.
    pub zero_point: Option<i8>,
}

impl Static {
    /// A scale with a zero point.
    pub const fn new(scale: f32, zero_point: Option<i8>) -> Static {
        Static { scale: scale.to_bits(), zero_point }
    }

    /// The scale.
    pub fn scale(&self) -> f32 {
        f32::from_bits(self.scale)
    }
}

/// Quantization of a weight: `value = (code - zero_point) * scale` for a matrix `[out, in]`, or `value =
/// palette[code]` for a tensor of any rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct QuantizationSpec {
    /// Type of the codes.
    pub codes: Codes,
    /// Which elements share a scale or a palette.
    pub granularity: Granularity,
    /// Whether all zero points are zero and not stored.
    pub symmetric: bool,
    /// Dtype of the scales or palette values.
    pub scale_dtype: DType,
    /// Quantization of the activations.
    pub activations: ActivationScheme,
}

impl QuantizationSpec {
    /// The specification without layer-specific values: parameters of static activation quantization are
    /// reset.
    #[must_use]
    pub fn scheme(&self) -> QuantizationSpec {
        let reset = |by: Static| self.activations.with_parameters(Static::new(1.0, by.zero_point.map(|_| 0)));
        let activations = self.activations.parameters().map_or(self.activations, reset);
        QuantizationSpec { activations, ..self.clone() }
    }

    /// Palettes of `bits` for at most `group` rows each. All groups have the same size, except for the
    /// last.
    pub fn palettes(bits: u8, group: usize, shape: &[usize], dtype: DType) -> QuantizationSpec {
        let rows = shape.first().copied().unwrap_or(1).max(1);
        let groups = rows.div_ceil(group.max(1));
        let granularity = Granularity::Block([rows.div_ceil(groups), row(shape)]);
        QuantizationSpec { codes: Codes::Palette(bits), granularity, symmetric: true, scale_dtype: dtype, activations: ActivationScheme::None }
    }

    /// Shape of the scales of a weight; for palettes `[palettes, values]`.
    pub fn scale_shape(&self, shape: &[usize]) -> Vec<usize> {
        let (rows, row) = (shape.first().copied().unwrap_or(1), row(shape));
        if let (true, Granularity::Block([high, _])) = (self.codes.is_palette(), self.granularity) {
            return vec![rows.div_ceil(high.max(1)), self.codes.entries()];
        }
        match self.granularity {
            Granularity::Tensor => vec![1],
            Granularity::Channel => vec![rows, 1],
            Granularity::Group(size) => vec![rows, row / size.max(1)],
            Granularity::Block([high, wide]) => vec![rows.div_ceil(high.max(1)), row / wide.max(1)],
        }
    }

    /// Whether the scales are relative to a global scale (NVFP4).
    pub fn has_global_scale(&self) -> bool {
        self.scale_format() == ScaleFormat::Relative
    }

    /// Format of the scales.
    pub fn scale_format(&self) -> ScaleFormat {
        ScaleFormat::from_dtype(self.scale_dtype).unwrap_or(ScaleFormat::Float)
    }

    /// Dtype of the dequantized values: that of the scales if they are at least 16 bits wide, otherwise
    /// based on `dtype`.
    pub fn value_dtype(&self, dtype: DType) -> DType {
        match self.scale_format() {
            ScaleFormat::Float => self.scale_dtype,
            ScaleFormat::PowerOfTwo | ScaleFormat::Relative if dtype == DType::F64 => DType::F32,
            ScaleFormat::PowerOfTwo | ScaleFormat::Relative => dtype,
        }
    }
}

/// Number of elements of an output row. Saturates if the tensor is empty and the other dimensions
/// overflow.
pub fn row(shape: &[usize]) -> usize {
    shape.get(1..).unwrap_or(&[]).iter().fold(1, |n, &size| n.saturating_mul(size))
}

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
    /// Whether codes are packed, see [`Codes::packing`].
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
        self.scales.resize(count * size, 0);
        let is_block = matches!(self.affine.granularity, Granularity::Block(_));
        if is_block {
            let mut scales = std::mem::take(&mut self.scales);
            self.read_blocks(self.files.0, size, &mut scales)?;
            self.scales = scales;
        } else {
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
                let mut zero_points = std::mem::take(&mut self.zero_points);
                self.read_blocks(file, 1, &mut zero_points)?;
                self.zero_points = zero_points;
            } else {
                file.read_at(self.position as u64, &mut self.zero_points)?;
            }
        }
        if self.affine.granularity != Granularity::Tensor {
            self.position += count;
        }
        Ok((&self.scales, &self.zero_points))
    }

    /// Reads parameters of `size` bytes for the blocks of the next rows. The rows of a block share one row of
    /// parameters in the file.
    fn read_blocks(&self, file: &RawTensor, size: usize, output: &mut [u8]) -> Result<()> {
        let Granularity::Block([high, wide]) = self.affine.granularity else { return Ok(()) };
        let (groups, columns) = (self.affine.granularity.groups(self.row).max(1), self.columns.max(1));
        let mut line = vec![0; self.row.div_ceil(columns) * size];
        for (row, output) in (self.position / groups..).zip(output.chunks_exact_mut((groups * size).max(1))) {
            file.read_at((row / high.max(1) * line.len()) as u64, &mut line)?;
            for (group, output) in output.chunks_exact_mut(size.max(1)).enumerate() {
                let start = group * wide / columns * size;
                output.copy_from_slice(&line[start..start + size]);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn empty_rows_do_not_overflow() {
        assert_eq!(row(&[0, 1 << 40, 1 << 40]), usize::MAX);
        assert_eq!(row(&[2, 3, 5]), 15);
        assert_eq!(row(&[7]), 1);
    }
}
