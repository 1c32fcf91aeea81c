//! Tensors that are not contiguous in row-major order: transposed tensors and slices.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::sync::Arc;

use crate::error::Result;
use crate::store::DataFile;
use crate::store::{Block, BlockSink, DType, Encoding, View, Weight, WeightSource, block_elements, least_common_multiple};

/// Maximum number of bytes read per requested byte, when reading ranges with gaps.
const MAX_OVERREAD: usize = 8;

/// A nonempty tensor of at least one dimension, whose extent lies within the file.
pub(super) struct Strided {
    pub file: Arc<DataFile>,
    /// Offset of the first element.
    pub begin: u64,
    pub dtype: DType,
    pub shape: Vec<usize>,
    /// Strides in elements.
    pub strides: Vec<u64>,
}

impl Strided {
    pub fn weight(self) -> Weight {
        Weight::new(self.dtype, self.shape.clone(), Encoding::Dense, Arc::new(self))
    }

    /// Reads the elements `from..to` of the first dimension in row-major order into `block`.
    ///
    /// The inner loop runs along the dimension with the smallest stride.
    fn rows(&self, from: usize, to: usize, block: &mut Vec<u8>, read: &mut Vec<u8>) -> Result<()> {
        let width = self.dtype.bitsize() / 8;
        let mut shape = self.shape.clone();
        shape.iter_mut().take(1).for_each(|size| *size = to.saturating_sub(from));
        // Strides of the elements in `block`.
        let mut steps = vec![1usize; shape.len()];
        for axis in (1..shape.len()).rev() {
            if let (Some(step), Some(size)) = (steps.get(axis).copied(), shape.get(axis))
                && let Some(before) = steps.get_mut(axis.saturating_sub(1))
            {
                *before = step.saturating_mul(*size);
            }
        }
        let mut axes: Vec<(usize, u64, usize)> = shape.iter().zip(&self.strides).zip(&steps).map(|((size, stride), step)| (*size, *stride, *step)).collect();
        axes.sort_by_key(|(size, stride, _)| if *size == 1 { u64::MAX } else { *stride });
        let (count, stride, step) = axes.first().copied().unwrap_or((1, 1, 1));
        let outer = axes.get(1..).unwrap_or_default();
        let elements: usize = shape.iter().product();
        block.clear();
        block.resize(elements.saturating_mul(width), 0);
        let first = self.strides.first().copied().unwrap_or(0).saturating_mul(from as u64);
        let span = |axes: &[(usize, u64, usize)]| {
            let last = axes.iter().fold(0u64, |last, (size, stride, _)| last.saturating_add((size.saturating_sub(1) as u64).saturating_mul(*stride)));
            (last.saturating_add(1) as usize).saturating_mul(width)
        };
        let (all, one) = (span(&axes), span(axes.get(..1).unwrap_or_default()));
        // If the gaps are small, the complete extent is read at once.
        let at_once = all <= block.len().saturating_mul(MAX_OVERREAD);
        let byte = |element: u64| self.begin.saturating_add(element.saturating_mul(width as u64));
        // If the gaps within a run are large, each element is read separately.
        let (count, one, step, outer) = match at_once || one <= count.saturating_mul(width).saturating_mul(MAX_OVERREAD) {
            true => (count, one, step, outer),
            false => (1, width, 1, axes.as_slice()),
        };
        read.resize(if at_once { all } else { one }, 0);
        if at_once {
            self.file.read(byte(first), read)?;
        }
        let hop = (stride as usize).saturating_mul(width).max(1);
        for number in 0..elements.checked_div(count).unwrap_or(0) {
            let (mut rest, mut source, mut target) = (number, 0u64, 0usize);
            for (size, stride, step) in outer {
                let (at, over) = (rest.checked_rem(*size).unwrap_or(0), rest.checked_div(*size).unwrap_or(0));
                source = source.saturating_add((at as u64).saturating_mul(*stride));
                target = target.saturating_add(at.saturating_mul(*step));
                rest = over;
            }
            let begin = if at_once { (source as usize).saturating_mul(width) } else { 0 };
            if !at_once {
                self.file.read(byte(first.saturating_add(source)), read)?;
            }
            let run = read.get(begin..begin.saturating_add(one)).unwrap_or_default();
            for (index, element) in run.chunks(hop).enumerate() {
                let to = target.saturating_add(index.saturating_mul(step)).saturating_mul(width);
                if let (Some(to), Some(from)) = (block.get_mut(to..to.saturating_add(width)), element.get(..width)) {
                    to.copy_from_slice(from);
                }
            }
        }
        Ok(())
    }
}

impl WeightSource for Strided {
    fn visit(&self, unit: usize, sink: BlockSink) -> Result<()> {
        let high = self.shape.first().copied().unwrap_or(1);
        let row: usize = self.shape.iter().skip(1).product();
        // Complete units, and complete elements of the first dimension.
        let rows = block_elements(least_common_multiple(unit, row)).checked_div(row).unwrap_or(1).max(1);
        let (mut block, mut read) = (Vec::new(), Vec::new());
        for from in (0..high).step_by(rows) {
            self.rows(from, from.saturating_add(rows).min(high), &mut block, &mut read)?;
            sink(Block::untouched(View::dense(self.dtype, &block)))?;
        }
        Ok(())
    }
}
