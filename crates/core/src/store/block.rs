//! Blocks of weights in the streaming pipeline from input to output.

use super::{Codes, DType, QuantizationSpec};
use crate::error::Result;
use crate::kernel::{bitmask, convert, quantize, scan, with_float};

/// Default number of elements per block. Small enough that a block stays in the L2 cache while all
/// stages process it.
pub const BLOCK: usize = 128 * 1024;

/// The largest multiple of `unit` that fits into a block, or `unit` if it is larger.
pub fn block_elements(unit: usize) -> usize {
    let unit = unit.max(1);
    (BLOCK / unit * unit).max(unit)
}

/// The least common multiple, where 0 counts as 1. Saturates on overflow.
pub fn least_common_multiple(a: usize, b: usize) -> usize {
    common_multiple(a, b).unwrap_or(usize::MAX)
}

/// As [`least_common_multiple`], or `None` on overflow.
pub(super) fn common_multiple(a: usize, b: usize) -> Option<usize> {
    let (a, b) = (a.max(1), b.max(1));
    (a / greatest_common_divisor(a, b)).checked_mul(b)
}

/// The greatest common divisor.
pub(super) fn greatest_common_divisor(mut a: usize, mut b: usize) -> usize {
    while b > 0 {
        (a, b) = (b, a % b);
    }
    a
}

/// Callback that receives blocks.
pub type BlockSink<'a> = &'a mut dyn FnMut(Block<'_>) -> Result<()>;

/// Encoded elements.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    /// Dtype of the elements; for quantized elements, of the dequantized values.
    pub dtype: DType,
    /// The elements: dense values, or codes of one byte each.
    pub values: &'a [u8],
    /// The quantization, with the number of elements per row.
    pub affine: Option<(&'a QuantizationSpec, usize)>,
    /// Scales of these elements in `affine.scale_dtype`: one per tensor, otherwise one per row or group.
    /// For palettes, one palette per row.
    pub scales: &'a [u8],
    /// Zero points (int8), as many as scales. Empty if symmetric.
    pub zero_points: &'a [u8],
    /// Divisor of the scales (NVFP4); otherwise 1.
    pub global_scale: f32,
    /// The same elements as blocks of a GGUF file, if they are written to one, or as the codes and scales of
    /// all experts in their original format. Otherwise empty.
    pub blocks: &'a [u8],
}

impl<'a> View<'a> {
    /// Dense elements.
    pub fn dense(dtype: DType, values: &'a [u8]) -> Self {
        Self { dtype, values, affine: None, scales: &[], zero_points: &[], global_scale: 1.0, blocks: &[] }
    }

    /// Number of elements; for types narrower than a byte, number of bytes.
    pub fn elements(&self) -> usize {
        match self.affine {
            Some(_) => self.values.len(),
            None => self.values.len() / (self.dtype.bitsize() / 8).max(1),
        }
    }

    /// Dequantizes a range of elements. Returns `false` if they are not floats.
    #[must_use]
    pub fn decode(&self, start: usize, output: &mut [f32]) -> bool {
        let Some((affine, row)) = self.affine else {
            let size = (self.dtype.bitsize() / 8).max(1);
            return convert::decode(self.dtype, &self.values[start * size..(start + output.len()) * size], output);
        };
        let run = affine.granularity.run(row, self.values.len());
        let entries = affine.codes.entries();
        let mut palette = vec![0f32; if affine.codes.is_palette() { entries } else { 0 }];
        let end = start + output.len();
        let mut at = start;
        while at < end {
            let index = at / run;
            let stop = end.min((index + 1) * run);
            let (codes, output) = (&self.values[at..stop], &mut output[at - start..stop - start]);
            if affine.codes.is_palette() {
                let size = entries * affine.scale_dtype.bitsize() / 8;
                if !convert::decode(affine.scale_dtype, &self.scales[index * size..(index + 1) * size], &mut palette) {
                    return false;
                }
                output.iter_mut().zip(codes).for_each(|(out, index)| *out = palette.get(usize::from(*index)).copied().unwrap_or(f32::NAN));
                at = stop;
                continue;
            }
            let (scale, zero) = self.parameters(affine, index);
            match affine.codes {
                Codes::Integer(_) => quantize::dequantize(codes, output, scale, zero),
                Codes::Float(format) => format.dequantize(codes, output, scale),
                Codes::Palette(_) => {}
            }
            at = stop;
        }
        true
    }

    /// Number of zero elements of either sign. Always 0 for types narrower than a byte and complex
    /// types.
    pub fn zeros(&self) -> u64 {
        if let Some((affine, row)) = self.affine {
            match affine.codes {
                Codes::Integer(_) => {}
                Codes::Float(format) => return format.row().zeros.iter().map(|zero| scan::count_bytes(self.values, *zero)).sum(),
                Codes::Palette(_) => return self.zeros_of_values(),
            }
            let run = affine.granularity.run(row, self.values.len());
            let zero_point = |index: usize| self.zero_points.get(index).copied().unwrap_or(0);
            return self.values.chunks(run).enumerate().map(|(index, values)| scan::count_bytes(values, zero_point(index))).sum();
        }
        with_float!(self.dtype, F => scan::zeros::<F>(self.values), else match self.dtype {
            DType::BOOL | DType::U8 | DType::I8 | DType::F8_E5M2FNUZ | DType::F8_E4M3FNUZ => scan::count_bytes(self.values, 0),
            DType::F8_E5M2 | DType::F8_E4M3 => scan::count_bytes(self.values, 0) + scan::count_bytes(self.values, 0x80),
            DType::I16 | DType::U16 | DType::I32 | DType::U32 | DType::I64 | DType::U64 => {
                self.elements() as u64 - bitmask::count(self.values, self.dtype.bitsize() / 8)
            }
            _ => 0,
        })
    }

    /// Counts zeros after dequantization, if they cannot be recognized from the codes.
    fn zeros_of_values(&self) -> u64 {
        let mut values = [1f32; 1024];
        let count = |start: usize| {
            let run = &mut values[..1024.min(self.values.len() - start)];
            let decoded = self.decode(start, run);
            if decoded { run.iter().filter(|value| **value == 0.0).count() as u64 } else { 0 }
        };
        (0..self.values.len()).step_by(1024).map(count).sum()
    }

    /// Scale and zero point at an index. The scale includes the global scale.
    pub fn parameters(&self, affine: &QuantizationSpec, index: usize) -> (f32, f32) {
        let size = affine.scale_dtype.bitsize() / 8;
        let mut scale = [0.0];
        let decoded = convert::decode_scales(affine.scale_dtype, &self.scales[index * size..(index + 1) * size], &mut scale);
        debug_assert!(decoded, "scales are floats");
        (scale[0] / self.global_scale, self.zero_points.get(index).map_or(0.0, |&z| f32::from(z as i8)))
    }

    /// Whether both views share the same memory, which means that nothing has changed.
    pub fn is(&self, other: &View) -> bool {
        std::ptr::eq(self.values, other.values)
    }
}

/// A run of elements before and after processing.
#[derive(Debug, Clone, Copy)]
pub struct Block<'a> {
    /// Current elements, after all stages so far.
    pub now: View<'a>,
    /// Elements of the input.
    pub before: View<'a>,
}

impl<'a> Block<'a> {
    /// A block read from the input.
    pub fn untouched(view: View<'a>) -> Self {
        Self { now: view, before: view }
    }

    /// The block after another stage.
    pub fn becomes<'b>(&self, now: View<'b>) -> Block<'b>
    where
        'a: 'b,
    {
        Block { now, before: self.before }
    }
}
