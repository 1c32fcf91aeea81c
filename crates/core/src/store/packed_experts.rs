//! Experts in MXFP4, as in the published files of gpt-oss.
//!
//! A projection `x` of all experts, `[experts, in, out]`, is stored with one row per output: `x_blocks` U8
//! `[experts, out, in / 32, 16]`, two E2M1 codes per byte, the first in the low half, and `x_scales` U8
//! (E8M0) `[experts, out, in / 32]`. Its values are exact in bfloat16. One expert is in memory at a time.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::sync::Arc;

use super::{Block, BlockSink, Checkpoint, DType, Encoding, RawTensor, View, Weight, WeightSource, least_common_multiple};
use crate::error::{Error, Result};
use crate::kernel::minifloat::{from_e2m1, from_e8m0};

/// Number of inputs that share a scale.
const GROUP: usize = 32;
/// Size of their codes in bytes.
const BYTES: usize = GROUP / 2;
/// Suffixes of the tensors with codes and scales.
const PARTS: [&str; 2] = ["_blocks", "_scales"];

/// The codes and scales of a projection of all experts.
struct PackedExperts {
    blocks: RawTensor,
    scales: RawTensor,
    experts: usize,
    /// Number of outputs.
    rows: usize,
    /// Number of groups of inputs.
    groups: usize,
}

impl Weight {
    /// [`stored_type`](Weight::stored_type) of experts in MXFP4.
    pub const PACKED_EXPERTS: &'static str = "mxfp4";

    /// Whether the weight contains experts that are stored in MXFP4, and no pass has changed it.
    pub fn is_packed_experts(&self) -> bool {
        self.stored_type == Some(Self::PACKED_EXPERTS)
    }
}

/// Names and shapes of the tensors of a weight `[experts, in, out]`.
pub(super) fn parts(name: &str, shape: &[usize]) -> [(String, Vec<usize>); 2] {
    let [experts, row, rows] = <[usize; 3]>::try_from(shape).unwrap_or_default();
    let [blocks, scales] = PARTS.map(|part| format!("{name}{part}"));
    let groups = row.checked_div(GROUP).unwrap_or(0);
    [(blocks, vec![experts, rows, groups, BYTES]), (scales, vec![experts, rows, groups])]
}

/// Removes all experts in MXFP4 from a checkpoint. Fails if the parts of a weight do not match.
pub(super) fn take(checkpoint: &mut Checkpoint) -> Result<Vec<(String, Weight)>> {
    let [blocks, scales] = PARTS;
    let is_packed = |name: &str, tensor: &RawTensor| {
        let has_scales = || checkpoint.tensors.get(&format!("{name}{scales}")).is_some_and(|scales| scales.dtype == DType::U8);
        tensor.dtype == DType::U8 && (matches!(tensor.shape[..], [_, _, _, BYTES]) || has_scales())
    };
    let names = checkpoint.tensors.iter().filter_map(|(name, tensor)| name.strip_suffix(blocks).filter(|name| is_packed(name, tensor)));
    let names: Vec<String> = names.map(str::to_owned).collect();
    names.into_iter().map(|name| weight(checkpoint, &name).map(|weight| (name, weight))).collect()
}

fn weight(checkpoint: &mut Checkpoint, name: &str) -> Result<Weight> {
    let stored_as = PARTS.map(|part| format!("{name}{part}"));
    let broken = |reason: String| Error::tensor(name, reason, "the checkpoint is incomplete or damaged; download it again");
    let [blocks, scales] = stored_as.each_ref().map(|part| checkpoint.tensors.remove(part).ok_or_else(|| broken(format!("`{part}` is missing"))));
    let (blocks, scales) = (blocks?, scales?);
    let matching = match (&blocks.shape[..], &scales.shape[..]) {
        ([experts, rows, groups, BYTES], scaled) if *scaled == [*experts, *rows, *groups] => {
            groups.checked_mul(GROUP).filter(|_| blocks.elements() > 0).map(|row| ([*experts, row, *rows], *groups))
        }
        _ => None,
    };
    let Some((shape, groups)) = matching else {
        return Err(broken(format!("is not packed as MXFP4: `{}` {:?}, `{}` {:?}", PARTS[0], blocks.shape, PARTS[1], scales.shape)));
    };
    let bytes = blocks.bytes().saturating_add(scales.bytes());
    let [experts, _, rows] = shape;
    let source = PackedExperts { blocks, scales, experts, rows, groups };
    let mut weight = Weight::new(DType::BF16, shape.to_vec(), Encoding::Dense, Arc::new(source));
    weight.stored_bytes = bytes;
    weight.stored_as = stored_as.to_vec();
    weight.stored_type = Some(Weight::PACKED_EXPERTS);
    Ok(weight)
}

impl PackedExperts {
    /// Dequantizes one expert to bfloat16, `[in, out]`.
    fn decode(&self, blocks: &[u8], scales: &[u8], values: &mut [u8]) {
        let (rows, groups) = (self.rows, self.groups);
        let blocks = blocks.as_chunks::<BYTES>().0;
        // A band contains the columns of one group of inputs.
        for (group, band) in values.chunks_mut(rows.saturating_mul(GROUP).saturating_mul(2).max(1)).enumerate() {
            let band = band.as_chunks_mut::<2>().0;
            for row in 0..rows {
                let at = row.saturating_mul(groups).saturating_add(group);
                let (Some(codes), Some(scale)) = (blocks.get(at), scales.get(at)) else { continue };
                let scale = from_e8m0(*scale);
                for (input, code) in codes.iter().flat_map(|byte| [byte & 15, byte >> 4]).enumerate() {
                    if let Some(value) = band.get_mut(input.saturating_mul(rows).saturating_add(row)) {
                        // The other half of the bits is zero.
                        let [_, _, low, high] = (from_e2m1(code) * scale).to_le_bytes();
                        *value = [low, high];
                    }
                }
            }
        }
    }
}

impl WeightSource for PackedExperts {
    /// The view contains the codes and then the scales of its experts in `blocks`.
    fn visit(&self, unit: usize, sink: BlockSink) -> Result<()> {
        let scales = self.rows.saturating_mul(self.groups);
        let (codes, each) = (scales.saturating_mul(BYTES), scales.saturating_mul(GROUP));
        let step = least_common_multiple(unit, each).checked_div(each).unwrap_or(1).clamp(1, self.experts.max(1));
        let (mut packed, mut values) = (Vec::new(), Vec::new());
        for first in (0..self.experts).step_by(step) {
            let count = step.min(self.experts.saturating_sub(first));
            packed.resize(count.saturating_mul(codes.saturating_add(scales)), 0);
            values.resize(count.saturating_mul(each).saturating_mul(2), 0);
            let (all_codes, all_scales) = packed.split_at_mut(count.saturating_mul(codes));
            self.blocks.read_at(first.saturating_mul(codes) as u64, all_codes)?;
            self.scales.read_at(first.saturating_mul(scales) as u64, all_scales)?;
            let experts = all_codes.chunks(codes.max(1)).zip(all_scales.chunks(scales.max(1)));
            for ((codes, scales), values) in experts.zip(values.chunks_mut(each.saturating_mul(2).max(1))) {
                self.decode(codes, scales, values);
            }
            sink(Block::untouched(View { blocks: &packed, ..View::dense(DType::BF16, &values) }))?;
        }
        Ok(())
    }
}

/// The codes and the scales in a view of packed experts; `None` for other views.
pub(super) fn split<'v>(view: &View<'v>) -> Option<(&'v [u8], &'v [u8])> {
    let scales = view.elements().checked_div(GROUP)?;
    let codes = view.blocks.len().checked_sub(scales).filter(|codes| *codes == scales.saturating_mul(BYTES) && scales > 0)?;
    view.blocks.split_at_checked(codes)
}
