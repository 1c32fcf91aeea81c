//! Weights that are cut along their first axis: rows of a weight as a weight of their own, and where cuts lose nothing.

// What is read here, other processes may have written.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::ops::Range;

use super::block::common_multiple;
use super::hash::CHUNK;
use super::storage_format::WORD_ROWS;
use super::{Encoding, Granularity, Rows, StorageFormat, Weight};

/// Where rows lie in the weight that they are of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowsOf {
    /// The first of them.
    pub first: usize,
    /// Rows of the whole weight.
    pub of: usize,
    /// Elements of a block of the whole weight.
    pub(super) block: usize,
}

impl Weight {
    /// All rows.
    pub fn all_rows(&self) -> Range<usize> {
        0..self.shape.first().copied().unwrap_or(1)
    }

    /// Some rows alone, and how many elements a block of the whole has when it is visited by `unit`; nothing where what rows become depends
    /// on others.
    pub fn rows(&self, rows: &Range<usize>, unit: usize) -> Option<(Weight, usize)> {
        let Rows { source, block } = self.source().rows(rows, unit)?;
        let mut weight = self.then(self.dtype, self.encoding.clone(), source);
        let of = std::mem::replace(weight.shape.first_mut()?, rows.len());
        let bytes = u128::from(self.stored_bytes).saturating_mul(rows.len() as u128).checked_div(of as u128)?;
        weight.stored_bytes = u64::try_from(bytes).ok()?;
        weight.rows_of = Some(RowsOf { first: rows.start, of, block });
        Some((weight, block))
    }

    /// How many rows stay together where the weight is cut: whole blocks, and whole pieces of the tree that hashes it. Nothing where it is
    /// not cut.
    fn rows_together(&self) -> Option<usize> {
        let (_, block) = self.rows(&self.all_rows(), 1)?;
        let row = Some(self.row()).filter(|row| *row > 0)?;
        common_multiple(common_multiple(block, row)?, CHUNK)?.checked_div(row)
    }
}

impl StorageFormat {
    /// How many rows of a weight stay together where it is cut: a multiple of these can be made and written apart from all others, and be
    /// put together again. Nothing where that cannot be.
    pub fn rows_together(self, weight: &Weight) -> Option<usize> {
        let stored = match (self, &weight.encoding) {
            (StorageFormat::Plain | StorageFormat::Packed, Encoding::Dense) => 1,
            (StorageFormat::Plain | StorageFormat::Packed, Encoding::Affine(affine)) => {
                let words = if self == StorageFormat::Packed && !affine.symmetric { WORD_ROWS } else { 1 };
                match affine.granularity {
                    Granularity::Tensor => return None,
                    Granularity::Channel | Granularity::Group(_) => words,
                    Granularity::Block([high, _]) => common_multiple(words, high)?,
                }
            }
            _ => return None,
        };
        common_multiple(weight.rows_together()?, stored)
    }
}
