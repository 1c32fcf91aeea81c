//! Some rows of each matrix of a weight that holds several, like the gates of experts that lie before what they gate.

// What is read here, anybody may have written.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::sync::Arc;

use super::arranged::plain;
use crate::error::{Error, Result};
use crate::store::{Block, BlockSink, DType, Encoding, View, Weight, WeightSource, least_common_multiple};

struct RowsOfEach {
    upstream: Weight,
    /// The first row of each matrix, and how many.
    from: usize,
    count: usize,
    name: String,
}

/// `count` rows, from one on, of each matrix of a dense weight of floats `[matrices, rows, width]`; of another shape, all of it.
pub(crate) fn rows_of_each(upstream: &Weight, from: usize, count: usize, name: &str) -> Weight {
    let [matrices, rows, width] = upstream.shape[..] else { return upstream.clone() };
    let source = RowsOfEach { upstream: upstream.clone(), from, count, name: name.to_owned() };
    let mut weight = Weight::new(upstream.dtype, vec![matrices, count, width], Encoding::Dense, Arc::new(source));
    weight.origin = upstream.origin;
    weight.stored_bytes = upstream.stored_bytes.saturating_mul(count as u64).checked_div(rows as u64).unwrap_or(0);
    weight
}

impl RowsOfEach {
    /// The rows of a block that begins at a row of the weight, as bytes.
    fn taken(&self, view: &View, first: usize, bytes: &mut Vec<u8>) -> Result<DType> {
        let mut floats = Vec::new();
        let (dtype, values) = plain(view, 0.0, &self.name, &mut floats)?;
        let (rows, width) = match self.upstream.shape[..] {
            [_, rows, width] => (rows, width),
            _ => (1, 1),
        };
        let row = width.saturating_mul(dtype.bitsize() / 8).max(1);
        bytes.clear();
        for (at, row) in (first..).zip(values.chunks(row)) {
            let within = at.checked_rem(rows).unwrap_or(0);
            if within.checked_sub(self.from).is_some_and(|within| within < self.count) {
                bytes.extend_from_slice(row);
            }
        }
        Ok(dtype)
    }
}

impl WeightSource for RowsOfEach {
    fn visit(&self, unit: usize, sink: BlockSink) -> Result<()> {
        let width = self.upstream.shape.last().copied().unwrap_or(1).max(1);
        if !width.is_multiple_of(unit) {
            return Err(Error::tensor(&self.name, format!("has rows of {width}, which are no whole groups of {unit}"), ""));
        }
        let (mut now, mut before, mut first) = (Vec::new(), Vec::new(), 0usize);
        self.upstream.visit(least_common_multiple(unit, width), &mut |block| {
            let at = first;
            first = first.saturating_add(block.now.elements().checked_div(width).unwrap_or(0));
            let dtype = self.taken(&block.now, at, &mut now)?;
            if now.is_empty() {
                return Ok(());
            }
            if block.now.is(&block.before) {
                return sink(Block::untouched(View::dense(dtype, &now)));
            }
            let before_dtype = self.taken(&block.before, at, &mut before)?;
            sink(Block { now: View::dense(dtype, &now), before: View::dense(before_dtype, &before) })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Bytes;

    #[test]
    fn rows_come_from_each_matrix() {
        let bytes = (0..3 * 4 * 2).flat_map(|value| (value as f32).to_le_bytes()).collect();
        let mut all = Weight::new(DType::F32, vec![3, 4, 2], Encoding::Dense, Arc::new(Bytes { dtype: DType::F32, bytes }));
        all.stored_bytes = 96;
        let some = rows_of_each(&all, 2, 2, "experts");
        assert_eq!((some.shape.as_slice(), some.stored_bytes), ([3, 2, 2].as_slice(), 48));
        assert_eq!(some.floats("experts").unwrap(), [4.0, 5.0, 6.0, 7.0, 12.0, 13.0, 14.0, 15.0, 20.0, 21.0, 22.0, 23.0]);
        assert!(some.visit(4, &mut |_| Ok(())).is_err());
    }
}
