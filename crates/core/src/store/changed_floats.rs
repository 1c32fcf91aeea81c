//! Visits of weights whose elements are changed one by one.

use super::{BlockSink, DType, View, Weight};
use crate::error::{Error, Result};
use crate::kernel::convert;

/// Visits a weight of floats, with its elements changed and converted to `dtype`. `change` receives the index
/// of the first of consecutive elements, and these elements.
///
/// # Errors
/// The weight has no floats. The error has the name of the weight.
pub fn visit(name: &str, weight: &Weight, dtype: DType, unit: usize, sink: BlockSink, mut change: impl FnMut(usize, &mut [f32])) -> Result<()> {
    let (mut values, mut bytes) = (Vec::new(), Vec::new());
    let mut first = 0;
    weight.visit(unit, &mut |block| {
        let count = block.now.elements();
        values.resize(count, 0f32);
        bytes.resize(count * dtype.bitsize() / 8, 0);
        let is_float = block.now.decode(0, &mut values);
        if is_float {
            change(first, &mut values);
        }
        first += count;
        if !is_float || !convert::from_f32(dtype, &values, &mut bytes) {
            return Err(Error::tensor(name, format!("is {}, expected F16, BF16 or F32", weight.dtype), "convert it to F32 first"));
        }
        sink(block.becomes(View::dense(dtype, &bytes)))
    })
}
