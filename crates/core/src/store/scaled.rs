//! Weights with scaled rows and columns, computed weights and transposed weights.

use std::sync::Arc;

use super::{Block, BlockSink, DType, Encoding, Origin, View, Weight, WeightSource, block_elements, changed_floats};
use crate::error::{Error, Result};

/// A weight multiplied by factors along its first two dimensions.
pub struct Scaled {
    /// Name for errors.
    pub name: String,
    /// The input, which must be floats.
    pub upstream: Weight,
    /// One factor for each index of the first axis.
    pub rows: Option<Arc<Vec<f32>>>,
    /// One factor for each index of the second axis.
    pub columns: Option<Arc<Vec<f32>>>,
    /// Added before the multiplication and subtracted afterwards. Needed because the norms of some
    /// families store their scale minus one.
    pub offset: f32,
}

impl Scaled {
    /// The product as a weight of dtype `dtype`.
    pub fn weight(self, dtype: DType) -> Weight {
        let upstream = self.upstream.clone();
        upstream.then(dtype, Encoding::Dense, Arc::new(Typed { scaled: self, dtype })).with_origin(Origin::Rescaled)
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
        // Elements per index of the second dimension.
        let inner = upstream.shape.get(2..).unwrap_or(&[]).iter().product::<usize>().max(1);
        let sizes = [upstream.shape.first(), upstream.shape.get(1)].map(|size| size.copied().unwrap_or(1));
        let pairs = [rows, columns].into_iter().zip(sizes).filter_map(|(factors, size)| Some((factors.as_ref()?, size)));
        if let Some((factors, size)) = pairs.into_iter().find(|(factors, size)| factors.len() > *size) {
            return Err(Error::tensor(name, format!("has an axis of {size} elements, but there are {} factors", factors.len()), "report this error"));
        }
        changed_floats::visit(name, upstream, self.dtype, unit, sink, |first, values| {
            for (index, value) in values.iter_mut().enumerate().map(|(index, value)| (first + index, value)) {
                let factor = |factors: &Option<Arc<Vec<f32>>>, index: usize| factors.as_ref().and_then(|f| f.get(index)).copied().unwrap_or(1.0);
                let factor = factor(rows, index / row) * factor(columns, index % row / inner);
                *value =
                    if *offset == 0.0 { *value * factor } else { ((f64::from(*value) + f64::from(*offset)) * f64::from(factor) - f64::from(*offset)) as f32 };
            }
        })
    }
}

/// A small weight that is computed on demand.
pub struct Computed<F> {
    /// Computes the elements.
    pub values: F,
}

impl<F: Fn() -> Result<Vec<f32>> + Send + Sync + 'static> Computed<F> {
    /// The F32 weight with this shape.
    pub fn weight(self, shape: Vec<usize>) -> Weight {
        Weight::new(DType::F32, shape, Encoding::Dense, Arc::new(self)).with_origin(Origin::Rescaled)
    }
}

impl<F: Fn() -> Result<Vec<f32>> + Send + Sync> WeightSource for Computed<F> {
    fn visit(&self, _unit: usize, sink: BlockSink) -> Result<()> {
        let bytes: Vec<u8> = (self.values)()?.iter().flat_map(|value| value.to_le_bytes()).collect();
        sink(Block::untouched(View::dense(DType::F32, &bytes)))
    }
}

/// A transposed matrix. The input is read completely into memory.
pub struct Transposed {
    /// The input, of any dtype of whole bytes.
    pub upstream: Weight,
}

impl Transposed {
    /// The matrix `[b, a]` for an input `[a, b]`.
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
        let mut matrix = Vec::with_capacity(self.upstream.elements() * width);
        self.upstream.visit(1, &mut |block| {
            matrix.extend_from_slice(block.now.values);
            Ok(())
        })?;
        let columns = (block_elements(unit.max(1).saturating_mul(high.max(1))) / high.max(1)).max(1);
        let mut block = Vec::new();
        for first in (0..wide).step_by(columns) {
            let count = columns.min(wide - first);
            block.clear();
            block.resize(count * high * width, 0);
            for (row, elements) in matrix.chunks_exact(wide * width).enumerate() {
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
