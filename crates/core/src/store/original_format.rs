//! Formats of other tools in which weights are written as the bytes of the input, if no pass has changed
//! them.
//!
//! | format | tensors of `x` |
//! | --- | --- |
//! | MXFP4 experts (gpt-oss), `x` `[experts, in, out]` | `x_blocks` U8 `[experts, out, in / 32, 16]`, two E2M1 codes per byte, the first in the low half; `x_scales` U8 (E8M0) `[experts, out, in / 32]` |
//! | FP8 (`quant_method: fp8`) | `x` F8_E4M3 `[out, in]` or `[experts, out, in]`; `x_scale_inv` or `x_scale`, one per block, row or matrix; for static activations `activation_scale` or `input_scale` of the module |
//! | NVFP4 of ModelOpt (`quant_method: modelopt`) | `x` U8 `[out, in / 2]`, two E2M1 codes per byte, the first in the low half; `x_scale` F8_E4M3 `[out, in / 16]`, with the common factor `x_scale_2`; for static activations `input_scale` of the module |
//! | 4 and 8 bits of bitsandbytes | see [`StoredBits`] |

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use super::stored_bits::StoredBits;
use super::stored_tensor::{PartSink, StoredTensor};
use super::{Codes, DType, FloatFormat, Granularity, View};
use crate::error::Result;
use crate::kernel::convert;

/// Number of inputs that share a scale in MXFP4.
pub(super) const GROUP: usize = 32;
/// Size of their codes in bytes.
pub(super) const BYTES: usize = GROUP / 2;
/// Number of inputs that share a scale in NVFP4.
pub(super) const NVFP4_GROUP: usize = 16;
/// Suffixes of the tensors with codes and scales in MXFP4.
pub(super) const PARTS: [&str; 2] = ["_blocks", "_scales"];

/// Format in which a weight is stored in the input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OriginalFormat {
    /// Experts in MXFP4, as published for gpt-oss.
    PackedExperts,
    /// FP8 as described by `quant_method: fp8`.
    Fp8(StoredFp8),
    /// NVFP4 of ModelOpt.
    Nvfp4(StoredNvfp4),
    /// Integers or indices of bitsandbytes.
    Bits(StoredBits),
}

/// How an FP8 weight is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoredFp8 {
    /// Suffix of the tensor with the scales.
    pub(super) suffix: &'static str,
    pub(super) scale_dtype: DType,
    /// Granularity of the stored scales. Blocks may be wider than those of the weight's encoding.
    pub(super) granularity: Granularity,
    /// Number of axes of the scales.
    pub(super) rank: usize,
    /// The scale of the activations, if it is static.
    pub(super) input: Option<StoredScalar>,
}

/// How an NVFP4 weight of ModelOpt is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoredNvfp4 {
    /// The factor of all scales.
    pub(super) factor: StoredScalar,
    /// The scale of the activations, if they are quantized.
    pub(super) input: Option<StoredScalar>,
}

/// A tensor with one positive element.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct StoredScalar {
    /// Name of the tensor in the module.
    pub name: &'static str,
    pub dtype: DType,
    pub rank: usize,
    /// Bits of the value in float32.
    pub bits: u32,
}

impl OriginalFormat {
    /// `quant_method` of folders with experts in MXFP4.
    pub const MXFP4: &'static str = "mxfp4";
    /// `quant_method` of folders with weights in FP8.
    pub const FP8: &'static str = "fp8";
    /// `quant_method` of folders of ModelOpt.
    pub const MODELOPT: &'static str = "modelopt";
    /// `quant_method` of folders of bitsandbytes.
    pub const BITSANDBYTES: &'static str = "bitsandbytes";

    /// Names, dtypes and shapes of the tensors of a weight.
    pub fn parts(self, name: &str, shape: &[usize]) -> Vec<StoredTensor> {
        match self {
            OriginalFormat::PackedExperts => {
                let [experts, row, rows] = <[usize; 3]>::try_from(shape).unwrap_or_default();
                let groups = row.checked_div(GROUP).unwrap_or(0);
                let shapes = [vec![experts, rows, groups, BYTES], vec![experts, rows, groups]];
                let part = |(suffix, shape)| StoredTensor { name: format!("{name}{suffix}"), dtype: DType::U8, shape };
                PARTS.into_iter().zip(shapes).map(part).collect()
            }
            OriginalFormat::Fp8(stored) => stored.parts(name, shape),
            OriginalFormat::Nvfp4(stored) => stored.parts(name, shape),
            OriginalFormat::Bits(stored) => stored.parts(name, shape),
        }
    }

    /// Writes a block, which starts at the row `rows`, and adds its rows to `rows`. Views of experts contain
    /// their stored bytes.
    pub(super) fn emit(self, view: &View, rows: &mut usize, sink: PartSink) -> Result<()> {
        match (self, view.affine) {
            (OriginalFormat::Fp8(stored), Some(_)) => stored.emit(view, rows, sink),
            (OriginalFormat::Nvfp4(stored), _) => stored.emit(view, rows, sink),
            (OriginalFormat::Bits(stored), _) => stored.emit(view, rows, sink),
            (OriginalFormat::Fp8(_), None) => emit_halves(view.blocks, view.elements(), sink),
            (OriginalFormat::PackedExperts, _) => emit_halves(view.blocks, view.elements() / 2, sink),
        }
    }
}

/// Writes codes and scales that are stored one after the other.
fn emit_halves(stored: &[u8], codes: usize, sink: PartSink) -> Result<()> {
    let (codes, scales) = stored.split_at_checked(codes).unwrap_or_default();
    sink(0, codes)?;
    sink(1, scales)
}

/// Shape of the scales of a matrix or of the matrices of all experts, with `rank` axes: except for blocks,
/// axes of size 1 at the end may be absent. `None` if no shape has this number of axes.
pub(super) fn scale_shape(shape: &[usize], granularity: Granularity, rank: usize) -> Option<Vec<usize>> {
    let [experts @ .., rows, row] = shape else { return None };
    let matrix = match granularity {
        Granularity::Block([high, wide]) => [rows.div_ceil(high.max(1)), row.div_ceil(wide.max(1))],
        Granularity::Channel => [*rows, 1],
        Granularity::Tensor => [1, 1],
        Granularity::Group(_) => return None,
    };
    let mut sizes = [experts, &matrix].concat();
    while sizes.len() > rank && sizes.last() == Some(&1) && !matches!(granularity, Granularity::Block(_)) {
        sizes.pop();
    }
    (sizes.len() == rank).then_some(sizes)
}

impl StoredFp8 {
    fn parts(self, name: &str, shape: &[usize]) -> Vec<StoredTensor> {
        let part = |name, dtype, shape| StoredTensor { name, dtype, shape };
        let scales = scale_shape(shape, self.granularity, self.rank).unwrap_or_default();
        let mut parts = vec![part(name.to_owned(), DType::F8_E4M3, shape.to_vec()), part(format!("{name}{}", self.suffix), self.scale_dtype, scales)];
        parts.extend(self.input.map(|input| input.part(name)));
        parts
    }

    /// Each row of a view has separate scales, and blocks may be narrower than in the file.
    fn emit(self, view: &View, rows: &mut usize, sink: PartSink) -> Result<()> {
        let Some((spec, row)) = view.affine else { return Ok(()) };
        sink(0, view.values)?;
        let size = (self.scale_dtype.bitsize() / 8).max(1);
        match (self.granularity, spec.granularity) {
            (Granularity::Block([high, wide]), Granularity::Block([_, narrow])) => {
                let step = wide.min(row).checked_div(narrow).unwrap_or(1).max(1);
                let line = spec.granularity.groups(row).saturating_mul(size).max(1);
                for (_, scales) in (*rows..).zip(view.scales.chunks_exact(line)).filter(|(row, _)| row.is_multiple_of(high.max(1))) {
                    scales.chunks_exact(size).step_by(step).try_for_each(|scale| sink(1, scale))?;
                }
            }
            (Granularity::Tensor, _) if *rows > 0 => {}
            _ => sink(1, view.scales)?,
        }
        if let Some(input) = self.input.filter(|_| *rows == 0) {
            sink(2, &input.bytes())?;
        }
        *rows = rows.saturating_add(view.values.len().checked_div(row).unwrap_or(0));
        Ok(())
    }
}

impl StoredNvfp4 {
    fn parts(self, name: &str, shape: &[usize]) -> Vec<StoredTensor> {
        let [rows, row] = <[usize; 2]>::try_from(shape).unwrap_or_default();
        let part = |suffix: &str, dtype, columns| StoredTensor { name: format!("{name}{suffix}"), dtype, shape: vec![rows, columns] };
        let mut parts = vec![part("", DType::U8, row / 2), part("_scale", DType::F8_E4M3, row / NVFP4_GROUP), self.factor.part(name)];
        parts.extend(self.input.map(|input| input.part(name)));
        parts
    }

    fn emit(self, view: &View, rows: &mut usize, sink: PartSink) -> Result<()> {
        let Some((_, row)) = view.affine else { return Ok(()) };
        let codes = Codes::Float(FloatFormat::E2m1);
        let mut packed = Vec::with_capacity(view.values.len() / 2);
        view.values.chunks(row.max(1)).for_each(|line| codes.packing().pack(line, codes.bits(), &mut packed));
        sink(0, &packed)?;
        sink(1, view.scales)?;
        if *rows == 0 {
            sink(2, &self.factor.bytes())?;
            self.input.map_or(Ok(()), |input| sink(3, &input.bytes()))?;
        }
        *rows = rows.saturating_add(view.values.len().checked_div(row).unwrap_or(0));
        Ok(())
    }
}

impl StoredScalar {
    /// The tensor of the module with the weight `name`.
    fn part(self, name: &str) -> StoredTensor {
        let module = name.strip_suffix("weight").unwrap_or(name);
        StoredTensor { name: format!("{module}{}", self.name), dtype: self.dtype, shape: vec![1; self.rank] }
    }

    fn bytes(self) -> Vec<u8> {
        let mut bytes = vec![0; self.dtype.bitsize() / 8];
        let written = convert::from_f32(self.dtype, &[f32::from_bits(self.bits)], &mut bytes);
        debug_assert!(written, "scales are floats");
        bytes
    }
}
