//! Packing of four- and eight-bit integers in the formats of ONNX.
//!
//! | format | tensors of `x.weight` `[out, in]`, with `blocks = ceil(in / size)` |
//! | --- | --- |
//! | halves (ONNX INT4) | `x.weight` two codes per byte in two's complement, the first in the low half; `x.weight_zero_point` likewise |
//! | blocks (`MatMulNBits` of ONNX Runtime) | `x.weight` U8 `[out, blocks, size · bits / 8]`, codes with the offset 2^(bits − 1), lowest bits first, rows padded with zeros; `x.weight_scale` `[out, blocks]`; `x.weight_zero_point` U8 `[out, ceil(blocks · bits / 8)]`, with the offset 2^(bits − 1) |

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use super::stored_tensor::{PartSink, StoredTensor};
use super::{DType, Encoding, Granularity, View, Weight};
use crate::error::Result;
use crate::kernel::packing;

/// Rows in blocks with one scale each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Blocks {
    /// Bit width of a code: 4 or 8.
    pub bits: u8,
    /// Number of inputs per block.
    pub size: usize,
}

impl Blocks {
    /// Block sizes that ONNX Runtime supports, in descending order.
    const SIZES: [usize; 5] = [256, 128, 64, 32, 16];

    /// The largest blocks for codes of this bit width: their size must divide the group size. A row with
    /// a single scale may be padded.
    pub fn new(bits: u8, granularity: Granularity, row: usize) -> Option<Blocks> {
        let dividing = |count: usize| Self::SIZES.into_iter().find(|size| count.is_multiple_of(*size));
        let size = match granularity {
            Granularity::Group(size) => dividing(size)?,
            Granularity::Channel => dividing(row).unwrap_or(16),
            Granularity::Tensor | Granularity::Block(_) => return None,
        };
        Some(Blocks { bits: if bits <= 4 { 4 } else { 8 }, size })
    }

    /// Number of blocks per row.
    pub fn count(self, row: usize) -> usize {
        row.div_ceil(self.size.max(1))
    }

    /// Size of the codes of a block in bytes.
    pub fn bytes(self) -> usize {
        if self.bits == 4 { self.size / 2 } else { self.size }
    }

    /// Size of the zero points of a row in bytes.
    pub fn zero_point_bytes(self, row: usize) -> usize {
        if self.bits == 4 { self.count(row).div_ceil(2) } else { self.count(row) }
    }

    pub(super) fn parts(self, name: &str, weight: &Weight) -> Vec<StoredTensor> {
        let (rows, row) = (weight.shape.first().copied().unwrap_or(1), weight.row());
        let part = |suffix: &str, dtype, shape| StoredTensor { name: format!("{name}{suffix}"), dtype, shape };
        let mut parts = vec![part("", DType::U8, vec![rows, self.count(row), self.bytes()])];
        if let Encoding::Quantized(affine) = &weight.encoding {
            parts.push(part("_scale", affine.scale_dtype, vec![rows, self.count(row)]));
            if !affine.symmetric {
                parts.push(part("_zero_point", DType::U8, vec![rows, self.zero_point_bytes(row)]));
            }
        }
        parts
    }

    pub(super) fn emit(self, view: &View, row: usize, sink: PartSink) -> Result<()> {
        let Some((affine, _)) = view.affine else { return Ok(()) };
        let (row, blocks) = (row.max(1), self.count(row));
        let size = affine.scale_dtype.bitsize() / 8;
        let groups = affine.granularity.groups(row).max(1);
        let (mut codes, mut scales, mut zero_points, mut filled) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for values in view.values.chunks_exact(row) {
            filled.clear();
            filled.extend_from_slice(values);
            filled.resize(blocks.saturating_mul(self.size), 0);
            packing::pack(&filled, self.bits, &mut codes);
        }
        for row in view.scales.chunks_exact(groups.saturating_mul(size).max(1)) {
            scales.extend((0..blocks).filter_map(|block| row.chunks_exact(size).nth(group(block, blocks, groups))).flatten());
        }
        let unsigned = 1u8 << self.bits.saturating_sub(1);
        for row in view.zero_points.chunks_exact(groups) {
            let unsigned_zero = |block| row.get(group(block, blocks, groups)).map(|zero| zero ^ unsigned);
            let points: Vec<u8> = (0..blocks).filter_map(unsigned_zero).collect();
            if self.bits == 4 { packing::to_halves(&points, &mut zero_points) } else { zero_points.extend(points) }
        }
        sink(0, &codes)?;
        sink(1, &scales)?;
        if affine.symmetric { Ok(()) } else { sink(2, &zero_points) }
    }
}

/// The group of a block.
fn group(block: usize, blocks: usize, groups: usize) -> usize {
    block.saturating_mul(groups).checked_div(blocks).unwrap_or(0)
}

/// Packs four-bit codes two per byte, in chunks of any length.
#[derive(Debug, Default)]
pub(super) struct Halves {
    pending: Option<u8>,
    codes: Vec<u8>,
    bytes: Vec<u8>,
}

impl Halves {
    /// The bytes completed by these codes.
    pub fn put(&mut self, codes: &[u8]) -> &[u8] {
        self.codes.clear();
        self.codes.extend(self.pending.take());
        self.codes.extend_from_slice(codes);
        if !self.codes.len().is_multiple_of(2) {
            self.pending = self.codes.pop();
        }
        self.bytes.clear();
        packing::to_halves(&self.codes, &mut self.bytes);
        &self.bytes
    }

    /// The last byte, if a code is pending.
    pub fn rest(&mut self) -> Option<u8> {
        self.pending.take().map(|code| code & 15)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{ActivationScheme, Codes, QuantizationSpec};

    #[test]
    fn blocks_have_sizes_that_onnx_runtime_supports() {
        let size = |granularity, row| Blocks::new(3, granularity, row).map(|blocks| blocks.size);
        assert_eq!([128, 96, 512, 24].map(|group| size(Granularity::Group(group), 1536)), [Some(128), Some(32), Some(256), None]);
        assert_eq!([288, 100].map(|row| size(Granularity::Channel, row)), [Some(32), Some(16)]);
        assert_eq!(size(Granularity::Tensor, 64), None);
    }

    /// The example in the documentation of `MatMulNBits` in ONNX Runtime: 0 to 15 with zero point 8.
    /// Also a padded row.
    #[test]
    fn codes_scales_and_zero_points_are_packed_in_blocks() {
        let mut affine = QuantizationSpec {
            codes: Codes::Integer(4),
            granularity: Granularity::Channel,
            symmetric: false,
            scale_dtype: DType::F32,
            activations: ActivationScheme::None,
        };
        let emit = |affine: &QuantizationSpec, row: usize, values: &[u8], scales: &[f32], zero_points: &[u8]| {
            let scales: Vec<u8> = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
            let mut parts = vec![Vec::new(); 3];
            let view = View { dtype: DType::F32, values, affine: Some((affine, row)), scales: &scales, zero_points, global_scale: 1.0, blocks: &[] };
            let blocks = Blocks::new(affine.codes.bits(), affine.granularity, row).unwrap();
            let mut put = |part: usize, bytes: &[u8]| {
                parts[part].extend_from_slice(bytes);
                Ok(())
            };
            blocks.emit(&view, row, &mut put).unwrap();
            parts
        };
        let values: Vec<u8> = (-8i8..8).map(|v| v as u8).collect();
        let parts = emit(&affine, 16, &values, &[0.5], &[0]);
        assert_eq!(parts, [vec![0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], 0.5f32.to_le_bytes().to_vec(), vec![8]]);
        let filled = [&values[..], &[7]].concat();
        let parts = emit(&affine, 17, &filled, &[0.5], &[0xFD]);
        assert_eq!((parts[0][8..].to_vec(), parts[1].len(), parts[2].clone()), ([&[0x8F][..], &[0x88; 7]].concat(), 8, vec![0x55]));
        affine = QuantizationSpec { codes: Codes::INT8, granularity: Granularity::Group(32), ..affine };
        let values: Vec<u8> = (0..96).collect();
        let parts = emit(&affine, 96, &values, &[1.0, 2.0, 3.0], &[0, 1, 0xFF]);
        assert_eq!(
            (parts[0][..2].to_vec(), parts[1][4..8].to_vec(), parts[2].clone()),
            (vec![0x80, 0x81], 2f32.to_le_bytes().to_vec(), vec![0x80, 0x81, 0x7F])
        );
    }

    #[test]
    fn halves_are_complete_at_the_end() {
        let mut halves = Halves::default();
        assert_eq!(halves.put(&[1, 0xFF, 2]), [0xF1]);
        assert_eq!(halves.put(&[3]), [0x32]);
        assert_eq!((halves.put(&[0xF8]).len(), halves.rest(), halves.rest()), (0, Some(8), None));
    }
}
