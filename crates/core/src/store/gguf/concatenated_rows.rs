//! Weights whose rows are those of several weights, one after the other.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::sync::Arc;

use super::row_permutation::plain;
use crate::error::{Error, Result};
use crate::store::{Block, BlockSink, DType, Encoding, View, Weight, WeightSource};

struct ConcatenatedRows {
    parts: Vec<Weight>,
    dtype: DType,
    name: String,
}

/// The elements of all parts in this order, with the given shape.
///
/// # Errors
/// The parts do not have the number of elements of the shape, or do not have the same floating-point type.
pub fn concatenated_rows(parts: Vec<Weight>, shape: Vec<usize>, name: &str) -> Result<Weight> {
    let elements = parts.iter().fold(0usize, |sum, part| sum.saturating_add(part.elements()));
    let first = parts.first().filter(|first| first.is_float() && parts.iter().all(|part| part.dtype == first.dtype));
    let is_complete = Some(elements) == shape.iter().try_fold(1usize, |product, size| product.checked_mul(*size));
    let Some(first) = first.filter(|_| is_complete) else {
        return Err(Error::tensor(name, format!("has parts that do not form a float tensor of the shape {shape:?}"), "the tensors do not match each other"));
    };
    let stored_as: std::collections::BTreeSet<String> = parts.iter().flat_map(|part| part.stored_as.clone()).collect();
    let stored_bytes = parts.iter().fold(0u64, |sum, part| sum.saturating_add(part.stored_bytes));
    let (dtype, attributes) = (first.dtype, first.clone());
    let mut weight = attributes.then(dtype, Encoding::Dense, Arc::new(ConcatenatedRows { parts, dtype, name: name.to_owned() }));
    (weight.shape, weight.stored_bytes, weight.stored_as, weight.stored_type) = (shape, stored_bytes, stored_as.into_iter().collect(), attributes.stored_type);
    Ok(weight)
}

impl WeightSource for ConcatenatedRows {
    fn visit(&self, unit: usize, sink: BlockSink) -> Result<()> {
        let size = unit.saturating_mul(self.dtype.bitsize() / 8).max(1);
        // An incomplete unit, which the next block continues.
        let mut carried: Vec<u8> = Vec::new();
        for part in &self.parts {
            part.visit(unit, &mut |block| {
                if carried.is_empty() && block.now.elements().is_multiple_of(unit.max(1)) {
                    return sink(block);
                }
                let mut floats = Vec::new();
                let (dtype, bytes) = plain(&block.now, 0.0, &self.name, &mut floats)?;
                if dtype != self.dtype || !block.now.is(&block.before) {
                    let reason = format!("is processed in blocks that are not multiples of {unit} elements");
                    return Err(Error::tensor(&self.name, reason, "this is a bug in compress, please report it"));
                }
                carried.extend_from_slice(bytes);
                let complete = carried.len().checked_div(size).unwrap_or(0).saturating_mul(size);
                let bytes: Vec<u8> = carried.drain(..complete).collect();
                if bytes.is_empty() { Ok(()) } else { sink(Block::untouched(View::dense(self.dtype, &bytes))) }
            })?;
        }
        if carried.is_empty() { Ok(()) } else { sink(Block::untouched(View::dense(self.dtype, &carried))) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Computed;

    #[test]
    fn rows_of_parts_follow_each_other_in_complete_units() {
        let part = |values: &'static [f32]| Computed { values: move || Ok(values.to_vec()) }.weight(vec![1, values.len()]);
        let parts = vec![part(&[1.0, 2.0, 3.0]), part(&[4.0]), part(&[5.0, 6.0])];
        let whole = concatenated_rows(parts.clone(), vec![3, 2], "rows").unwrap();
        assert_eq!((whole.shape.as_slice(), whole.floats("rows").unwrap()), ([3, 2].as_slice(), vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0]));
        for (unit, expected) in [(1, vec![3, 1, 2]), (2, vec![2, 2, 2]), (4, vec![4, 2]), (8, vec![6])] {
            let mut sizes = Vec::new();
            let mut sink = |block: Block<'_>| {
                sizes.push(block.now.elements());
                Ok(())
            };
            whole.visit(unit, &mut sink).unwrap();
            assert_eq!(sizes, expected, "{unit}");
        }
        assert!(concatenated_rows(parts, vec![7], "rows").is_err_and(|error| error.to_string().contains("`rows`")));
        assert!(concatenated_rows(Vec::new(), vec![0], "rows").is_err());
    }
}
