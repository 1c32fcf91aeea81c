//! Loops over all values of large weights, on all threads.

use std::ops::Range;

use rayon::prelude::*;

use crate::error::Result;
use crate::store::{StorageFormat, Weight};

/// Number of values that a thread processes at once.
const VALUES: usize = 1 << 16;

/// All values of a weight, dequantized: as [`Weight::floats`], in parallel if its rows are independent.
/// Remote files are read in order, because ranges in another order are downloaded twice.
pub(super) fn floats(weight: &Weight, name: &str) -> Result<Vec<f32>> {
    let (rows, row) = (weight.filled_rows(), weight.row());
    let aligned = StorageFormat::Plain.row_alignment(weight).filter(|aligned| weight.remote_position.is_none() && (1..rows).contains(aligned));
    let Some(aligned) = aligned else { return weight.floats(name) };
    let part = |range: Range<usize>| weight.rows(&range, 1).map(|(part, _)| part);
    let Some(parts) = (0..rows).step_by(aligned).map(|first| part(first..rows.min(first + aligned))).collect::<Option<Vec<Weight>>>() else {
        return weight.floats(name);
    };
    let mut values = vec![0f32; rows * row];
    values.par_chunks_mut(aligned * row).zip(&parts).try_for_each(|(values, part)| part.floats_into(name, values))?;
    Ok(values)
}

/// Whether no value is infinite or NaN.
pub(super) fn are_finite(values: &[f32]) -> bool {
    values.par_chunks(VALUES).all(|values| values.iter().all(|value| value.is_finite()))
}

/// Number of values that are zero.
pub(super) fn count_zeros(values: &[f32]) -> usize {
    values.par_chunks(VALUES).map(|values| values.iter().filter(|value| **value == 0.0).count()).sum()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::store::{Block, BlockSink, Bytes, DType, Encoding, Rows, View, WeightSource, block_elements};

    /// Values whose rows can be read separately.
    struct Numbers {
        values: Vec<f32>,
        row: usize,
    }

    impl WeightSource for Numbers {
        fn visit(&self, _unit: usize, sink: BlockSink) -> Result<()> {
            let bytes: Vec<u8> = self.values.iter().flat_map(|value| value.to_le_bytes()).collect();
            sink(Block::untouched(View::dense(DType::F32, &bytes)))
        }

        fn rows(&self, rows: &Range<usize>, unit: usize) -> Option<Rows> {
            let values = self.values[rows.start * self.row..rows.end * self.row].to_vec();
            Some(Rows { source: Arc::new(Numbers { values, row: self.row }), block: block_elements(unit) })
        }
    }

    #[test]
    fn values_of_parts_equal_those_of_the_weight() {
        for [rows, row] in [[700, 1024], [300, 1000], [5, 3], [0, 4], [4, 0], [3, 1 << 18], [1, 1 << 18]] {
            let values: Vec<f32> = (0..rows * row).map(|at| at as f32 - 7.0).collect();
            let weight = Weight::new(DType::F32, vec![rows, row], Encoding::Dense, Arc::new(Numbers { values: values.clone(), row }));
            assert!(floats(&weight, "w").unwrap() == values, "{rows} {row}");
        }
        let integers = Weight::new(DType::I64, vec![4, 2], Encoding::Dense, Arc::new(Bytes { dtype: DType::I64, bytes: vec![0; 64] }));
        assert_eq!(floats(&integers, "w").unwrap_err().to_string(), integers.floats("w").unwrap_err().to_string());
    }

    #[test]
    fn every_value_counts() {
        let mut values = vec![1.0; 3 * VALUES + 5];
        assert!(are_finite(&values) && are_finite(&[]));
        (values[VALUES], values[3 * VALUES + 4]) = (0.0, -0.0);
        assert_eq!(count_zeros(&values), 2);
        values[3 * VALUES + 4] = f32::NAN;
        assert!(!are_finite(&values));
    }
}
