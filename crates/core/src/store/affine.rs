//! Quantization specification of weights, and reading of quantized weights.

use serde::{Deserialize, Serialize};

use super::{Block, BlockSink, DType, RawTensor, View, WeightSource, block_elements};
use crate::error::Result;
use crate::kernel::packing;

/// Type of the codes of a quantized weight, which occupy one byte each in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Codes {
    /// Signed integers of 2 to 8 bits, each stored as an int8.
    Integer(u8),
    /// 8-bit floats (E4M3), see [`minifloat`](crate::kernel::minifloat).
    E4m3,
    /// 4-bit floats (E2M1) in the low half of a byte.
    E2m1,
    /// Indices into a palette of 2^bits values, 2 to 8 bits, starting at 0.
    Palette(u8),
}

impl Codes {
    /// Integers of eight bits.
    pub const INT8: Codes = Codes::Integer(8);

    /// Bit width of a packed code.
    pub fn bits(self) -> u8 {
        match self {
            Codes::Integer(bits) | Codes::Palette(bits) => bits,
            Codes::E4m3 => 8,
            Codes::E2m1 => 4,
        }
    }

    /// Whether the codes are integers, which may have zero points.
    pub fn is_integer(self) -> bool {
        matches!(self, Codes::Integer(_))
    }

    /// Whether the codes are indices into palettes, which take the place of scales.
    pub fn is_palette(self) -> bool {
        matches!(self, Codes::Palette(_))
    }

    /// Numbers per scale group: the values of a palette, otherwise one scale.
    pub fn entries(self) -> usize {
        if let Codes::Palette(bits) = self { 1 << bits.min(8) } else { 1 }
    }
}

impl std::fmt::Display for Codes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Codes::Integer(bits) => write!(f, "int{bits}"),
            Codes::E4m3 => f.write_str("fp8"),
            Codes::E2m1 => f.write_str("fp4"),
            Codes::Palette(bits) => write!(f, "palette{bits}"),
        }
    }
}

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
    /// E4M3 with a dynamic scale per token.
    Float8Token,
    /// E4M3 with a dynamic scale per group of this many values of a token.
    Float8Group(usize),
    /// E4M3 with a static scale.
    Float8Static(Static),
    /// E2M1 in groups of 32 with dynamic power-of-two scales (MXFP4).
    Mxfp4,
    /// E2M1 in groups of 16 with dynamic E4M3 scales and a static global scale (NVFP4).
    Nvfp4(Static),
    /// Not quantized.
    None,
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
    pub fn new(scale: f32, zero_point: Option<i8>) -> Static {
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
        let activations = match self.activations {
            ActivationScheme::Static(by) => ActivationScheme::Static(Static::new(1.0, by.zero_point.map(|_| 0))),
            ActivationScheme::Float8Static(_) => ActivationScheme::Float8Static(Static::new(1.0, None)),
            ActivationScheme::Nvfp4(_) => ActivationScheme::Nvfp4(Static::new(1.0, None)),
            other => other,
        };
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
        self.codes == Codes::E2m1 && self.scale_dtype == DType::F8_E4M3
    }

    /// Dtype of the dequantized values: that of the scales if they are at least 16 bits wide, otherwise
    /// based on `dtype`.
    pub fn value_dtype(&self, dtype: DType) -> DType {
        match self.scale_dtype {
            DType::F8_E4M3 | DType::F8_E8M0 if dtype == DType::F64 => DType::F32,
            DType::F8_E4M3 | DType::F8_E8M0 => dtype,
            scale => scale,
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
    /// The codes: I8 or F8_E4M3 `[out, in]`. If packed, integers and palette indices are I32 `[out,
    /// ceil(in · bits / 32)]`, and E2M1 is U8 `[out, in / 2]`.
    pub values: RawTensor,
    /// The scales.
    pub scales: RawTensor,
    /// The zero points: I8 in the shape of the scales, or I32 `[ceil(out · bits / 32), groups]`, packed
    /// along the outputs.
    pub zero_points: Option<RawTensor>,
    /// Divisor of the scales; otherwise 1.
    pub global_scale: f32,
    /// Whether codes are packed, see [`packing`].
    pub packed: bool,
    /// Shape `[out, in]`.
    pub shape: Vec<usize>,
    /// The quantization.
    pub affine: QuantizationSpec,
    /// Dtype of the dequantized values.
    pub dtype: DType,
}

impl WeightSource for QuantizedReader {
    fn visit(&self, _unit: usize, sink: BlockSink) -> Result<()> {
        let row = row(&self.shape);
        let rows = if row == 0 { 0 } else { self.shape.first().copied().unwrap_or(1) };
        let bits = self.affine.codes.bits();
        let stored = match self.affine.codes {
            Codes::E2m1 => row.div_ceil(2),
            _ if self.packed => 4 * packing::words(row, bits),
            _ => row,
        };
        let step = block_elements(row) / row.max(1);
        let mut parameters = Parameters::new(&self.affine, row, &self.scales, self.zero_points.as_ref());
        let (mut words, mut unpacked) = (Vec::new(), Vec::new());
        for start in (0..rows).step_by(step) {
            let count = step.min(rows - start);
            words.resize(count * stored, 0);
            self.values.read_at((start * stored) as u64, &mut words)?;
            let values = if self.packed {
                unpacked.resize(count * row, 0);
                for (words, values) in words.chunks_exact(stored).zip(unpacked.chunks_exact_mut(row)) {
                    match self.affine.codes {
                        Codes::E2m1 => packing::from_halves(words, values),
                        Codes::Palette(_) => packing::unpack_indices(words, bits, values),
                        _ => packing::unpack(words, bits, values),
                    }
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

/// Reads the scales and zero points of consecutive ranges of complete rows.
pub(super) struct Parameters<'a> {
    affine: &'a QuantizationSpec,
    row: usize,
    files: (&'a RawTensor, Option<&'a RawTensor>),
    position: usize,
    scales: Vec<u8>,
    zero_points: Vec<u8>,
    words: Vec<u8>,
}

impl<'a> Parameters<'a> {
    pub(super) fn new(affine: &'a QuantizationSpec, row: usize, scales: &'a RawTensor, zero_points: Option<&'a RawTensor>) -> Self {
        Self { affine, row, files: (scales, zero_points), position: 0, scales: Vec::new(), zero_points: Vec::new(), words: Vec::new() }
    }

    pub(super) fn next(&mut self, elements: usize) -> Result<(&[u8], &[u8])> {
        let count = if self.affine.granularity == Granularity::Tensor { 1 } else { elements / self.affine.granularity.run(self.row, elements) };
        let size = self.affine.codes.entries() * self.affine.scale_dtype.bitsize() / 8;
        self.scales.resize(count * size, 0);
        if let Granularity::Block([high, _]) = self.affine.granularity {
            // The rows of a block share one row of scales in the file.
            let line = self.affine.granularity.groups(self.row) * size;
            let (first, rows) = (self.position * size / line.max(1), (count * size).checked_div(line).unwrap_or(0));
            for (row, scales) in (first..first + rows).zip(self.scales.chunks_exact_mut(line.max(1))) {
                self.files.0.read_at((row / high.max(1) * line) as u64, scales)?;
            }
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
            } else {
                file.read_at(self.position as u64, &mut self.zero_points)?;
            }
        }
        if self.affine.granularity != Granularity::Tensor {
            self.position += count;
        }
        Ok((&self.scales, &self.zero_points))
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
