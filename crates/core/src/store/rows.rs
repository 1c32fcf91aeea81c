//! Ranges of rows of weights as separate weights, and the alignment at which weights can be split
//! without loss.

// Parses files of other processes.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::ops::Range;

use super::block::common_multiple;
use super::hash::CHUNK;
use super::storage_format::WORD_ROWS;
use super::{Encoding, Granularity, Rows, RowsOf, StorageFormat, Weight};

impl Weight {
    /// The range of all rows.
    pub fn all_rows(&self) -> Range<usize> {
        0..self.shape.first().copied().unwrap_or(1)
    }

    /// A range of rows as a weight, with the number of elements per block when the complete weight is
    /// visited by `unit`. `None` if the rows depend on each other.
    pub fn rows(&self, rows: &Range<usize>, unit: usize) -> Option<(Weight, usize)> {
        let Rows { source, block } = self.source().rows(rows, unit)?;
        let mut weight = self.then(self.dtype, self.encoding.clone(), source);
        let of = std::mem::replace(weight.shape.first_mut()?, rows.len());
        let bytes = u128::from(self.stored_bytes).saturating_mul(rows.len() as u128).checked_div(of as u128)?;
        weight.stored_bytes = u64::try_from(bytes).ok()?;
        weight.rows_of = Some(RowsOf { first: rows.start, of, block });
        Some((weight, block))
    }

    /// Number of rows to which splits must be aligned, so that blocks and subtrees of the hash are
    /// complete. `None` if the weight cannot be split.
    fn row_alignment(&self) -> Option<usize> {
        let (_, block) = self.rows(&self.all_rows(), 1)?;
        let row = Some(self.row()).filter(|row| *row > 0)?;
        common_multiple(common_multiple(block, row)?, CHUNK)?.checked_div(row)
    }
}

impl StorageFormat {
    /// Number of rows to which splits of a weight must be aligned, so that its parts can be computed and
    /// written separately and merged afterwards. `None` if the weight cannot be split.
    pub fn row_alignment(self, weight: &Weight) -> Option<usize> {
        let stored = match (self, &weight.encoding) {
            (StorageFormat::Plain | StorageFormat::Packed, Encoding::Dense) => 1,
            (StorageFormat::Plain | StorageFormat::Packed, Encoding::Quantized(affine)) => {
                let words = if self == StorageFormat::Packed && !affine.symmetric { WORD_ROWS } else { 1 };
                match affine.granularity {
                    Granularity::Tensor => return None,
                    Granularity::Channel | Granularity::Group(_) => words,
                    Granularity::Block([high, _]) => common_multiple(words, high)?,
                }
            }
            _ => return None,
        };
        common_multiple(weight.row_alignment()?, stored)
    }
}
