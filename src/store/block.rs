//! A weight on its way from disk to disk: a run of elements at a time.

use std::ops::Range;
use std::sync::Arc;

use super::Codes;
use super::{Affine, DType};
use crate::error::Result;
use crate::kernel::{bitmask, convert, narrow, quantize, scan, with_float};

/// Elements of a block, unless a larger unit is asked for. Small enough that a block stays in the
/// second-level cache while every stage of a chain works on it.
pub const BLOCK: usize = 128 * 1024;

/// The largest multiple of `unit` that fits a block; `unit` itself when it is larger.
pub fn block_elements(unit: usize) -> usize {
    let unit = unit.max(1);
    (BLOCK / unit * unit).max(unit)
}

/// The smallest number that both divide; zero counts as one.
pub fn least_common_multiple(a: usize, b: usize) -> usize {
    common_multiple(a, b).unwrap_or(usize::MAX)
}

/// The same, where there is one.
pub(super) fn common_multiple(a: usize, b: usize) -> Option<usize> {
    let (a, b) = (a.max(1), b.max(1));
    (a / greatest_common_divisor(a, b)).checked_mul(b)
}

/// The largest number that divides both.
fn greatest_common_divisor(mut a: usize, mut b: usize) -> usize {
    while b > 0 {
        (a, b) = (b, a % b);
    }
    a
}

/// What a visitor is called with.
pub type BlockSink<'a> = &'a mut dyn FnMut(Block<'_>) -> Result<()>;

/// Something that can produce a tensor, in order, any number of times, always the same.
pub trait WeightSource: Send + Sync {
    /// Calls `sink` with consecutive blocks, each (but the last) a multiple of `unit` elements.
    ///
    /// # Errors
    /// Reading fails, a value cannot be represented, or the sink says so.
    fn visit(&self, unit: usize, sink: BlockSink) -> Result<()>;

    /// Of a stage that rounds: the weight before.
    fn unrounded(&self) -> Option<&super::Weight> {
        None
    }

    /// Some rows alone, where nothing else tells what they become: visited by `unit`, they come as they do in a visit of the whole, if what
    /// lies before them is whole blocks. Nothing where a row needs others, or a source does not say.
    fn rows(&self, _rows: &Range<usize>, _unit: usize) -> Option<Rows> {
        None
    }
}

/// Some rows of a source.
pub struct Rows {
    /// They alone.
    pub source: Arc<dyn WeightSource>,
    /// Elements of a block of the whole.
    pub block: usize,
}

/// A small tensor that is in memory.
pub struct Bytes {
    /// Format of the elements.
    pub dtype: DType,
    /// The elements.
    pub bytes: Vec<u8>,
}

impl WeightSource for Bytes {
    fn visit(&self, _unit: usize, sink: BlockSink) -> Result<()> {
        sink(Block::untouched(View::dense(self.dtype, &self.bytes)))
    }
}

/// Elements in some encoding.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    /// Of the elements when dense, of the values that they stand for when quantized.
    pub dtype: DType,
    /// The elements: floats, or codes of a byte each when quantized.
    pub values: &'a [u8],
    /// How they are quantized, with the length of a row.
    pub affine: Option<(&'a Affine, usize)>,
    /// Scales of these elements, in `affine.scale_dtype`: one for a tensor, else one a row or group; of palettes, one palette a row.
    pub scales: &'a [u8],
    /// Zero points (int8), as many as scales; empty when symmetric.
    pub zero_points: &'a [u8],
    /// What scales are in steps of one over (NVFP4); else 1.
    pub global_scale: f32,
    /// The same elements as blocks of a GGUF file, where they are to be written; else nothing.
    pub blocks: &'a [u8],
}

impl<'a> View<'a> {
    /// Plain elements.
    pub fn dense(dtype: DType, values: &'a [u8]) -> Self {
        Self { dtype, values, affine: None, scales: &[], zero_points: &[], global_scale: 1.0, blocks: &[] }
    }

    /// Number of elements (of bytes, for types narrower than a byte).
    pub fn elements(&self) -> usize {
        match self.affine {
            Some(_) => self.values.len(),
            None => self.values.len() / (self.dtype.bitsize() / 8).max(1),
        }
    }

    /// The values of a range of elements; `false` when they are not floats.
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
                output.iter_mut().zip(codes).for_each(|(out, place)| *out = palette.get(usize::from(*place)).copied().unwrap_or(f32::NAN));
                at = stop;
                continue;
            }
            let (scale, zero) = self.parameters(affine, index);
            match affine.codes {
                Codes::Integer(_) => quantize::dequantize(codes, output, scale, zero),
                Codes::E4m3 => narrow::dequantize_e4m3(codes, output, scale),
                Codes::E2m1 => narrow::dequantize_e2m1(codes, output, scale),
                Codes::Palette(_) => {}
            }
            at = stop;
        }
        true
    }

    /// How many elements are zero, of either sign; types narrower than a byte and pairs of floats are not looked into.
    pub fn zeros(&self) -> u64 {
        if let Some((affine, row)) = self.affine {
            match affine.codes {
                Codes::Integer(_) => {}
                Codes::E4m3 => return scan::count_bytes(self.values, 0) + scan::count_bytes(self.values, 0x80),
                Codes::E2m1 => return scan::count_bytes(self.values, 0) + scan::count_bytes(self.values, 8),
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

    /// Of elements whose codes do not say by themselves which values are zero.
    fn zeros_of_values(&self) -> u64 {
        let mut values = [1f32; 1024];
        let count = |start: usize| {
            let run = &mut values[..1024.min(self.values.len() - start)];
            let decoded = self.decode(start, run);
            if decoded { run.iter().filter(|value| **value == 0.0).count() as u64 } else { 0 }
        };
        (0..self.values.len()).step_by(1024).map(count).sum()
    }

    /// Scale and zero point number `index`, the scale as codes are multiplied with it.
    pub fn parameters(&self, affine: &Affine, index: usize) -> (f32, f32) {
        let size = affine.scale_dtype.bitsize() / 8;
        let mut scale = [0.0];
        let decoded = convert::decode_scales(affine.scale_dtype, &self.scales[index * size..(index + 1) * size], &mut scale);
        debug_assert!(decoded, "scales are floats");
        (scale[0] / self.global_scale, self.zero_points.get(index).map_or(0.0, |&z| f32::from(z as i8)))
    }

    /// Whether both are the same memory, so that nothing has changed.
    pub fn is(&self, other: &View) -> bool {
        std::ptr::eq(self.values, other.values)
    }
}

/// A run of elements as it is now and as it was in the input.
#[derive(Debug, Clone, Copy)]
pub struct Block<'a> {
    /// As the stages so far have made it.
    pub now: View<'a>,
    /// As it was read.
    pub before: View<'a>,
}

impl<'a> Block<'a> {
    /// Straight from the file.
    pub fn untouched(view: View<'a>) -> Self {
        Self { now: view, before: view }
    }

    /// The same run after one more stage.
    pub fn becomes<'b>(&self, now: View<'b>) -> Block<'b>
    where
        'a: 'b,
    {
        Block { now, before: self.before }
    }
}
