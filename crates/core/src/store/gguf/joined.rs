//! Weights that consist of parts, such as the experts of a layer, which are computed as floats.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use crate::error::{Error, Result};
use crate::kernel::convert;
use crate::store::{Block, BlockSink, DType, View, least_common_multiple};

/// Visits a weight that consists of parts with `each` elements, which `append` computes as floats.
pub(super) fn visit_floats<P>(
    parts: &[P],
    each: usize,
    (dtype, name): (DType, &str),
    unit: usize,
    sink: BlockSink,
    mut append: impl FnMut(&P, &mut Vec<f32>) -> Result<()>,
) -> Result<()> {
    let step = least_common_multiple(unit, each.max(1)).checked_div(each).unwrap_or(1).clamp(1, parts.len().max(1));
    let mut bytes = Vec::new();
    for parts in parts.chunks(step) {
        let mut values = Vec::with_capacity(each.saturating_mul(parts.len()));
        parts.iter().try_for_each(|part| append(part, &mut values))?;
        bytes.resize(values.len().saturating_mul(dtype.bitsize() / 8), 0);
        if !convert::from_f32(dtype, &values, &mut bytes) {
            return Err(Error::tensor(name, format!("is {dtype}, expected F16, BF16 or F32"), "convert it to F32 first"));
        }
        sink(Block::untouched(View::dense(dtype, &bytes)))?;
    }
    Ok(())
}
