//! Row ranges of each matrix of a fused expert weight, such as the gate projections of all experts in a
//! fused gate-up weight.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::sync::Arc;

use super::row_permutation::plain;
use crate::error::{Error, Result};
use crate::store::{Block, BlockSink, DType, Encoding, View, Weight, WeightSource, least_common_multiple};

struct ExpertRows {
    upstream: Weight,
    /// First row and number of rows selected from each matrix.
    from: usize,
    count: usize,
    name: String,
}

/// The rows `from..from + count` of each matrix of a dense float weight `[matrices, rows, width]`.
/// Weights of another rank are returned unchanged.
pub fn expert_rows(upstream: &Weight, from: usize, count: usize, name: &str) -> Weight {
    let [matrices, rows, width] = upstream.shape[..] else { return upstream.clone() };
    let source = ExpertRows { upstream: upstream.clone(), from, count, name: name.to_owned() };
    let mut weight = Weight::new(upstream.dtype, vec![matrices, count, width], Encoding::Dense, Arc::new(source));
    weight.origin = upstream.origin;
    weight.stored_bytes = upstream.stored_bytes.saturating_mul(count as u64).checked_div(rows as u64).unwrap_or(0);
    weight
}

impl ExpertRows {
    /// The selected rows of a block, as bytes. `first` is the row at which the block starts.
    fn select(&self, view: &View, first: usize, bytes: &mut Vec<u8>) -> Result<DType> {
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

impl WeightSource for ExpertRows {
    fn visit(&self, unit: usize, sink: BlockSink) -> Result<()> {
        let width = self.upstream.shape.last().copied().unwrap_or(1).max(1);
        if !width.is_multiple_of(unit) {
            return Err(Error::tensor(&self.name, format!("has rows of {width}, which is not a multiple of {unit}"), ""));
        }
        let (mut now, mut before, mut first) = (Vec::new(), Vec::new(), 0usize);
        self.upstream.visit(least_common_multiple(unit, width), &mut |block| {
            let at = first;
            first = first.saturating_add(block.now.elements().checked_div(width).unwrap_or(0));
            let dtype = self.select(&block.now, at, &mut now)?;
            if now.is_empty() {
                return Ok(());
            }
            if block.now.is(&block.before) {
                return sink(Block::untouched(View::dense(dtype, &now)));
            }
            let before_dtype = self.select(&block.before, at, &mut before)?;
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
        let some = expert_rows(&all, 2, 2, "experts");
        assert_eq!((some.shape.as_slice(), some.stored_bytes), ([3, 2, 2].as_slice(), 48));
        assert_eq!(some.floats("experts").unwrap(), [4.0, 5.0, 6.0, 7.0, 12.0, 13.0, 14.0, 15.0, 20.0, 21.0, 22.0, 23.0]);
        assert!(some.visit(4, &mut |_| Ok(())).is_err());
    }
}
