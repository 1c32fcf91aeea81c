//! Projections of all experts that are dequantized one expert at a time.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use super::{Block, BlockSink, DType, RawTensor, View, least_common_multiple};
use crate::error::Result;

/// The codes and scales of a projection of all experts, expert by expert.
pub(super) struct StoredExperts {
    pub codes: RawTensor,
    pub scales: RawTensor,
    pub experts: usize,
    /// Number of values of an expert.
    pub each: usize,
    /// Dtype of the values.
    pub dtype: DType,
}

impl StoredExperts {
    /// Dequantizes complete experts with `decode`, which gets the codes, scales and values of one. Views
    /// contain the codes and then the scales of their experts in `blocks`.
    pub(super) fn visit(&self, unit: usize, sink: BlockSink, decode: impl Fn(&[u8], &[u8], &mut [u8])) -> Result<()> {
        let of_each = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX).checked_div(self.experts).unwrap_or(0);
        let (codes, scales) = (of_each(self.codes.bytes()), of_each(self.scales.bytes()));
        let bytes = self.each.saturating_mul(self.dtype.bitsize() / 8);
        let step = least_common_multiple(unit, self.each).checked_div(self.each).unwrap_or(1).clamp(1, self.experts.max(1));
        let (mut stored, mut values) = (Vec::new(), Vec::new());
        for first in (0..self.experts).step_by(step) {
            let count = step.min(self.experts.saturating_sub(first));
            stored.resize(count.saturating_mul(codes.saturating_add(scales)), 0);
            values.resize(count.saturating_mul(bytes), 0);
            let (all_codes, all_scales) = stored.split_at_mut(count.saturating_mul(codes));
            self.codes.read_at(first.saturating_mul(codes) as u64, all_codes)?;
            self.scales.read_at(first.saturating_mul(scales) as u64, all_scales)?;
            let experts = all_codes.chunks(codes.max(1)).zip(all_scales.chunks(scales.max(1)));
            for ((codes, scales), values) in experts.zip(values.chunks_mut(bytes.max(1))) {
                decode(codes, scales, values);
            }
            sink(Block::untouched(View { blocks: &stored, ..View::dense(self.dtype, &values) }))?;
        }
        Ok(())
    }
}
