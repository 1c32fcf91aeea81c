//! Tensors of bitsandbytes.
//!
//! | format | tensors of `x.weight` `[out, in]` |
//! | --- | --- |
//! | 4 bits | `x.weight` with two indices per byte, the first in the high half; `x.weight.quant_map` F32, the 16 values of the indices; `x.weight.absmax`, one scale per block of consecutive elements; `x.weight.quant_state.bitsandbytes__nf4` or `__fp4` U8, a JSON object. If the scales are quantized, `absmax` U8 contains indices into `x.weight.nested_quant_map` F32, `x.weight.nested_absmax` F32 the factors of their blocks, and the JSON object a number that is added to them |
//! | 8 bits | `x.weight` I8; `x.SCB` F32, 127 times the scale of each row; `x.weight_format` U8, 0 for row-major order, absent in some files |

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use super::stored_tensor::{PartSink, StoredTensor};
use super::{DType, View};
use crate::error::Result;

/// How a weight of bitsandbytes is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoredBits {
    /// Indices of 4 bits.
    Four(StoredFour),
    /// Integers of 8 bits.
    Eight {
        /// Number of axes of `weight_format`, if it is stored.
        format: Option<usize>,
    },
}

/// How a weight of 4 bits is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoredFour {
    /// Suffix of the tensor with the JSON object.
    pub(super) suffix: &'static str,
    /// Dtype and shape of the tensor with the indices, whose bytes are those of other numbers in some files.
    pub(super) indices: (DType, [usize; 2]),
    /// Number of elements per scale.
    pub(super) block: usize,
    /// Number of factors of the scales, if these are quantized.
    pub(super) nested: Option<usize>,
    /// Length of the JSON object.
    pub(super) state: usize,
}

/// Number of values of an index of 4 bits.
pub(super) const VALUES: usize = 16;
/// Number of values of a quantized scale.
pub(super) const NESTED_VALUES: usize = 256;
/// Suffixes of the tensors of 4 bits, in addition to the indices and the JSON object.
pub(super) const FOUR: [&str; 4] = [".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map"];
/// Names of the tensors of 8 bits in a module, in addition to the integers.
pub(super) const EIGHT: [&str; 2] = ["SCB", "weight_format"];

impl StoredBits {
    pub(super) fn parts(self, name: &str, shape: &[usize]) -> Vec<StoredTensor> {
        let part = |name: String, dtype, shape| StoredTensor { name, dtype, shape };
        let elements = shape.iter().fold(1, |count: usize, size| count.saturating_mul(*size));
        match self {
            StoredBits::Four(stored) => {
                let [absmax, map, nested_absmax, nested_map] = FOUR.map(|suffix| format!("{name}{suffix}"));
                let scale = if stored.nested.is_some() { DType::U8 } else { DType::F32 };
                let (dtype, indices) = stored.indices;
                let mut parts = vec![
                    part(name.to_owned(), dtype, indices.to_vec()),
                    part(absmax, scale, vec![elements.div_ceil(stored.block.max(1))]),
                    part(map, DType::F32, vec![VALUES]),
                    part(format!("{name}{}", stored.suffix), DType::U8, vec![stored.state]),
                ];
                if let Some(factors) = stored.nested {
                    parts.extend([part(nested_absmax, DType::F32, vec![factors]), part(nested_map, DType::F32, vec![NESTED_VALUES])]);
                }
                parts
            }
            StoredBits::Eight { format } => {
                let module = name.strip_suffix("weight").unwrap_or(name);
                let [scales, format_name] = EIGHT.map(|part| format!("{module}{part}"));
                let rows = shape.first().copied().unwrap_or(1);
                let mut parts = vec![part(name.to_owned(), DType::I8, shape.to_vec()), part(scales, DType::F32, vec![rows])];
                parts.extend(format.map(|rank| part(format_name, DType::U8, vec![1; rank])));
                parts
            }
        }
    }

    /// Writes a block, whose view contains the stored bytes of all parts, and adds its elements to `written`.
    pub(super) fn emit(self, view: &View, written: &mut usize, sink: PartSink) -> Result<()> {
        let elements = view.elements();
        let mut rest = view.blocks;
        let mut next = |count: usize| {
            let (part, after) = rest.split_at_checked(count).unwrap_or((rest, &[]));
            rest = after;
            part
        };
        let is_first = *written == 0;
        *written = written.saturating_add(elements);
        match self {
            StoredBits::Four(stored) => {
                let scales = elements.div_ceil(stored.block.max(1));
                sink(0, next(elements.div_ceil(2)))?;
                sink(1, next(if stored.nested.is_some() { scales } else { scales.saturating_mul(4) }))?;
                if is_first {
                    sink(2, next(VALUES.saturating_mul(4)))?;
                    sink(3, next(stored.state))?;
                    if let Some(factors) = stored.nested {
                        sink(4, next(factors.saturating_mul(4)))?;
                        sink(5, next(NESTED_VALUES.saturating_mul(4)))?;
                    }
                }
                Ok(())
            }
            StoredBits::Eight { format } => {
                sink(0, next(elements))?;
                if is_first && format.is_some() {
                    sink(2, next(1))?;
                }
                sink(1, next(usize::MAX))
            }
        }
    }
}
