//! Weights whose rows and columns are multiplied, and weights that are computed when they are asked for.

use std::sync::Arc;

use super::{Block, BlockSink, DType, Encoding, Origin, View, Weight, WeightSource, block_elements};
use crate::error::{Error, Result};
use crate::kernel::convert;

/// Another weight with factors on its axes.
pub struct Scaled {
    /// Name, for errors.
    pub name: String,
    /// Where the values come from; floats.
    pub upstream: Weight,
    /// One factor for each index of the first axis.
    pub rows: Option<Arc<Vec<f32>>>,
    /// One factor for each index of the second axis.
    pub columns: Option<Arc<Vec<f32>>>,
    /// Added to the values before the factors and subtracted after them: norms of some families store their scale less one.
    pub offset: f32,
}

impl Scaled {
    /// The product as a weight of this format.
    pub fn weight(self, dtype: DType) -> Weight {
        let upstream = self.upstream.clone();
        upstream.then(dtype, Encoding::Dense, Arc::new(Typed { scaled: self, dtype })).of_origin(Origin::Rescaled)
    }
}

struct Typed {
    scaled: Scaled,
    dtype: DType,
}

impl WeightSource for Typed {
    fn visit(&self, unit: usize, sink: BlockSink) -> Result<()> {
        let Scaled { name, upstream, rows, columns, offset } = &self.scaled;
        let row = upstream.row().max(1);
        // Elements under one index of the second axis.
        let inner = upstream.shape.get(2..).unwrap_or(&[]).iter().product::<usize>().max(1);
        let size = self.dtype.bitsize() / 8;
        let (mut values, mut bytes) = (Vec::new(), Vec::new());
        let mut at = 0;
        upstream.visit(unit, &mut |block| {
            let count = block.now.elements();
            values.resize(count, 0f32);
            bytes.resize(count * size, 0);
            let floats = block.now.decode(0, &mut values);
            for (index, value) in values.iter_mut().enumerate().map(|(index, value)| (at + index, value)) {
                let factor = |factors: &Option<Arc<Vec<f32>>>, index: usize| factors.as_ref().and_then(|f| f.get(index)).copied().unwrap_or(1.0);
                let factor = factor(rows, index / row) * factor(columns, index % row / inner);
                *value =
                    if *offset == 0.0 { *value * factor } else { ((f64::from(*value) + f64::from(*offset)) * f64::from(factor) - f64::from(*offset)) as f32 };
            }
            at += count;
            if !floats || !convert::from_f32(self.dtype, &values, &mut bytes) {
                return Err(Error::tensor(name, format!("is {}, where floats are needed", upstream.dtype), ""));
            }
            sink(block.becomes(View::dense(self.dtype, &bytes)))
        })
    }
}

/// A small weight that is made when it is asked for.
pub struct Computed<F> {
    /// Makes the elements.
    pub values: F,
}

impl<F: Fn() -> Result<Vec<f32>> + Send + Sync + 'static> Computed<F> {
    /// The weight, of this shape and of 32-bit floats.
    pub fn weight(self, shape: Vec<usize>) -> Weight {
        Weight::new(DType::F32, shape, Encoding::Dense, Arc::new(self)).of_origin(Origin::Rescaled)
    }
}

impl<F: Fn() -> Result<Vec<f32>> + Send + Sync> WeightSource for Computed<F> {
    fn visit(&self, _unit: usize, sink: BlockSink) -> Result<()> {
        let bytes: Vec<u8> = (self.values)()?.iter().flat_map(|value| value.to_le_bytes()).collect();
        sink(Block::untouched(View::dense(DType::F32, &bytes)))
    }
}

/// A matrix with its axes exchanged; the other one is read whole.
pub struct Transposed {
    /// Where the elements come from, of any type that takes whole bytes.
    pub upstream: Weight,
}

impl Transposed {
    /// The matrix `[b, a]` for one of `[a, b]`.
    pub fn weight(self) -> Weight {
        let mut weight = self.upstream.clone();
        weight.shape.reverse();
        let dtype = weight.dtype;
        weight.then(dtype, Encoding::Dense, Arc::new(self))
    }
}

impl WeightSource for Transposed {
    fn visit(&self, unit: usize, sink: BlockSink) -> Result<()> {
        let ([high, wide], dtype) = (<[usize; 2]>::try_from(self.upstream.shape.as_slice()).unwrap_or_default(), self.upstream.dtype);
        let width = (dtype.bitsize() / 8).max(1);
        let mut whole = Vec::with_capacity(self.upstream.elements() * width);
        self.upstream.visit(1, &mut |block| {
            whole.extend_from_slice(block.now.values);
            Ok(())
        })?;
        let columns = (block_elements(unit.max(1).saturating_mul(high.max(1))) / high.max(1)).max(1);
        let mut block = Vec::new();
        for first in (0..wide).step_by(columns) {
            let count = columns.min(wide - first);
            block.clear();
            block.resize(count * high * width, 0);
            for (row, elements) in whole.chunks_exact(wide * width).enumerate() {
                for column in 0..count {
                    let (from, to) = ((first + column) * width, (column * high + row) * width);
                    block[to..to + width].copy_from_slice(&elements[from..from + width]);
                }
            }
            sink(Block::untouched(View::dense(dtype, &block)))?;
        }
        Ok(())
    }
}
