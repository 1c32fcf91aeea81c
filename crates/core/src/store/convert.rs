//! Dequantized weights, and weights with scales of another dtype.

use std::ops::Range;
use std::sync::Arc;

use super::{BlockSink, DType, Encoding, QuantizationSpec, Rows, View, Weight, WeightSource};
use crate::error::{Error, Result};
use crate::kernel::convert;

/// Dequantizes a source to a given float dtype.
pub struct Decoded {
    /// The input.
    pub upstream: Arc<dyn WeightSource>,
    /// Dtype of the output.
    pub dtype: DType,
    /// Name for errors.
    pub name: String,
}

impl Weight {
    /// The dequantized weight, or the weight itself if it is dense.
    pub fn dense(&self, name: &str) -> Weight {
        if self.encoding == Encoding::Dense {
            return self.clone();
        }
        let source = Decoded { upstream: self.source(), dtype: self.dtype, name: name.to_owned() };
        self.then(self.dtype, Encoding::Dense, Arc::new(source))
    }
}

/// Number of elements decoded at a time, so that they fit into the L1 cache.
pub const RUN: usize = 4096;

/// Converts f32 values to the bytes of a float format. Returns `false` for other formats.
fn encode(dtype: DType, values: &[f32], output: &mut [u8]) -> bool {
    if dtype != DType::F64 {
        return convert::from_f32(dtype, values, output);
    }
    values.iter().zip(output.chunks_exact_mut(8)).for_each(|(value, bytes)| bytes.copy_from_slice(&f64::from(*value).to_le_bytes()));
    true
}

impl WeightSource for Decoded {
    fn visit(&self, unit: usize, sink: BlockSink) -> Result<()> {
        let size = self.dtype.bitsize() / 8;
        let largest = convert::largest(self.dtype);
        let mut bytes = Vec::new();
        let mut run = vec![0f32; RUN];
        self.upstream.visit(unit, &mut |block| {
            if block.now.affine.is_none() && block.now.dtype == self.dtype {
                return sink(block);
            }
            let elements = block.now.elements();
            bytes.resize(elements * size, 0);
            for start in (0..elements).step_by(RUN) {
                let run = &mut run[..RUN.min(elements - start)];
                let out = &mut bytes[start * size..(start + run.len()) * size];
                let decoded = block.now.decode(start, run);
                if block.now.affine.is_some() {
                    // Dequantization of the lowest integer can exceed the range of the dtype by half a
                    // step.
                    run.iter_mut().for_each(|v| *v = v.clamp(-largest, largest));
                }
                if let Some(value) = run.iter().find(|v| v.is_finite() && v.abs() > largest && convert::rounded(self.dtype, **v).is_infinite()) {
                    return Err(out_of_range(&self.name, *value, self.dtype));
                }
                if !(decoded && encode(self.dtype, run, out)) {
                    return Err(Error::tensor(&self.name, format!("{} cannot be converted to {}", block.now.dtype, self.dtype), ""));
                }
            }
            sink(block.becomes(View::dense(self.dtype, &bytes)))
        })
    }

    fn rows(&self, rows: &Range<usize>, unit: usize) -> Option<Rows> {
        let Rows { source: upstream, block } = self.upstream.rows(rows, unit)?;
        Some(Rows { source: Arc::new(Decoded { upstream, dtype: self.dtype, name: self.name.clone() }), block })
    }
}

fn out_of_range(name: &str, value: f32, dtype: DType) -> Error {
    let what = format!("contains {value:e}, but the largest value of {dtype} is {:e}", convert::largest(dtype));
    Error::tensor(name, what, "use a wider dtype, or clip its values first")
}

/// The codes of a source with scales or palettes converted to another dtype of sufficient range.
pub struct Rescaled {
    /// The input.
    pub upstream: Arc<dyn WeightSource>,
    /// The encoding of the output: that of the input, except for `scale_dtype`.
    pub affine: QuantizationSpec,
    /// Name for errors.
    pub name: String,
}

impl WeightSource for Rescaled {
    fn visit(&self, unit: usize, sink: BlockSink) -> Result<()> {
        let dtype = self.affine.scale_dtype;
        let (mut scales, mut bytes) = (Vec::new(), Vec::new());
        self.upstream.visit(unit, &mut |block| {
            let Some((from, row)) = block.now.affine else {
                return Err(Error::tensor(&self.name, "is not quantized", ""));
            };
            let count = block.now.scales.len() / (from.scale_dtype.bitsize() / 8);
            scales.resize(count, 0f32);
            bytes.resize(count * dtype.bitsize() / 8, 0);
            let decoded = block.now.global_scale == 1.0 && convert::decode(from.scale_dtype, block.now.scales, &mut scales);
            if let Some(value) = scales.iter().find(|v| v.is_finite() && convert::rounded(dtype, **v).is_infinite()) {
                return Err(out_of_range(&self.name, *value, dtype));
            }
            if !(decoded && convert::from_f32(dtype, &scales, &mut bytes)) {
                return Err(Error::tensor(&self.name, format!("has scales that cannot be converted to {dtype}"), ""));
            }
            sink(block.becomes(View { dtype, affine: Some((&self.affine, row)), scales: &bytes, ..block.now }))
        })
    }

    fn rows(&self, rows: &Range<usize>, unit: usize) -> Option<Rows> {
        let Rows { source: upstream, block } = self.upstream.rows(rows, unit)?;
        Some(Rows { source: Arc::new(Rescaled { upstream, affine: self.affine.clone(), name: self.name.clone() }), block })
    }
}
