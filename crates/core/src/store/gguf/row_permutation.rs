//! Weights with permuted rows or shifted values in GGUF files.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::kernel::convert;
use crate::store::{Block, BlockSink, DType, Encoding, View, Weight, WeightSource, least_common_multiple};

/// A dense float weight with permuted rows and a constant added, or blocks with permuted rows.
pub struct RowPermutation {
    /// The input.
    pub upstream: Weight,
    /// Permutation of each group of `order.len()` rows: the source row of each target row. `None` for no
    /// permutation.
    pub order: Option<Arc<Vec<usize>>>,
    /// Constant added to every value. If it is not zero, the result is F32.
    pub added: f32,
    /// Name for errors.
    pub name: String,
}

impl RowPermutation {
    /// The permutation that interleaves the two halves of each head: rows 0, n/2, 1, n/2 + 1 … of a head
    /// with `n` rows.
    pub fn interleave(head: usize) -> Arc<Vec<usize>> {
        let half = head.checked_div(2).unwrap_or(0);
        Arc::new((0..half).flat_map(|row| [row, row.saturating_add(half)]).collect())
    }

    /// The inverse of [`interleave`](RowPermutation::interleave): rows 0, 2, 4 … of a head, then 1, 3, 5
    /// ….
    pub fn deinterleave(head: usize) -> Arc<Vec<usize>> {
        Arc::new((0..head).step_by(2).chain((1..head).step_by(2)).collect())
    }

    /// The permuted weight. Fails if the number of rows is not a multiple of the permutation's length, or the
    /// weight is not dense floats.
    pub fn weight(self) -> Result<Weight> {
        let rows = self.upstream.shape.first().copied().unwrap_or(1);
        if let Some(order) = &self.order
            && (order.is_empty() || !rows.is_multiple_of(order.len()))
        {
            return Err(Error::tensor(&self.name, format!("has {rows} rows, which is not a multiple of the head size {}", order.len()), ""));
        }
        let is_movable = self.upstream.is_float() || (self.upstream.dtype == DType::U8 && self.added == 0.0);
        if !is_movable || self.upstream.encoding != Encoding::Dense {
            return Err(Error::tensor(&self.name, format!("is {}, expected floats", self.upstream.describe()), ""));
        }
        let dtype = if self.added == 0.0 { self.upstream.dtype } else { DType::F32 };
        let (upstream, kind) = (self.upstream.clone(), self.upstream.stored_type);
        let mut weight = upstream.then(dtype, Encoding::Dense, Arc::new(self));
        weight.stored_type = kind;
        Ok(weight)
    }

    /// Number of elements per row.
    fn row(&self) -> usize {
        self.upstream.elements().checked_div(self.upstream.shape.first().copied().unwrap_or(1)).unwrap_or(1).max(1)
    }

    fn permute(&self, view: &View, bytes: &mut Vec<u8>) -> Result<DType> {
        let mut floats = Vec::new();
        let (dtype, values) = plain(view, self.added, &self.name, &mut floats)?;
        bytes.clear();
        let row = self.row().saturating_mul(dtype.bitsize() / 8);
        match &self.order {
            None => bytes.extend_from_slice(values),
            Some(order) => {
                let size = row.saturating_mul(order.len()).max(1);
                if !values.len().is_multiple_of(size) {
                    let reason = format!("is read in blocks that are not multiples of {} rows, which are permuted together", order.len());
                    return Err(Error::tensor(&self.name, reason, "this is a bug in compress, please report it"));
                }
                for window in values.chunks_exact(size) {
                    let from = |index: &usize| window.get(index.saturating_mul(row)..index.saturating_add(1).saturating_mul(row)).unwrap_or_default();
                    order.iter().for_each(|index| bytes.extend_from_slice(from(index)));
                }
            }
        }
        Ok(dtype)
    }
}

/// The elements of a view if it is dense and `added` is zero. Otherwise the dequantized values plus
/// `added`, written to `floats` as F32.
pub(super) fn plain<'v>(view: &View<'v>, added: f32, name: &str, floats: &'v mut Vec<u8>) -> Result<(DType, &'v [u8])> {
    if added == 0.0 && view.affine.is_none() {
        return Ok((view.dtype, view.values));
    }
    let mut values = vec![0f32; view.elements()];
    if !view.decode(0, &mut values) {
        return Err(Error::tensor(name, format!("is {}, expected floats", view.dtype), ""));
    }
    values.iter_mut().for_each(|value| *value += added);
    floats.resize(values.len().saturating_mul(4), 0);
    convert::f32_bytes(&values, floats);
    Ok((DType::F32, floats))
}

impl WeightSource for RowPermutation {
    fn visit(&self, unit: usize, sink: BlockSink) -> Result<()> {
        let window = self.order.as_ref().map_or(1, |order| order.len().saturating_mul(self.row()));
        let (mut now, mut before) = (Vec::new(), Vec::new());
        self.upstream.visit(least_common_multiple(unit, window), &mut |block| {
            let same = block.now.is(&block.before);
            let dtype = self.permute(&block.now, &mut now)?;
            if same {
                return sink(Block::untouched(View::dense(dtype, &now)));
            }
            let before_dtype = self.permute(&block.before, &mut before)?;
            sink(Block { now: View::dense(dtype, &now), before: View::dense(before_dtype, &before) })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Six rows of one element, in blocks of a number of rows that does not depend on the unit.
    struct RowBlocks(usize);

    impl WeightSource for RowBlocks {
        fn visit(&self, _unit: usize, sink: BlockSink) -> Result<()> {
            let bytes: Vec<u8> = (0..6u8).flat_map(|row| f32::from(row).to_le_bytes()).collect();
            bytes.chunks(4 * self.0).try_for_each(|part| sink(Block::untouched(View::dense(DType::F32, part))))
        }
    }

    #[test]
    fn blocks_of_incomplete_heads_are_an_error() {
        let permuted = |rows: usize| {
            let upstream = Weight::new(DType::F32, vec![6, 1], Encoding::Dense, Arc::new(RowBlocks(rows)));
            let order = Some(Arc::new(vec![2, 0, 1]));
            RowPermutation { upstream, order, added: 0.0, name: "a".into() }.weight().unwrap().floats("a")
        };
        assert_eq!(permuted(3).unwrap(), [2.0, 0.0, 1.0, 5.0, 3.0, 4.0]);
        let error = permuted(4).unwrap_err().to_string();
        assert!(error.contains("`a`") && error.contains("multiples of 3 rows"), "{error}");
    }
}
