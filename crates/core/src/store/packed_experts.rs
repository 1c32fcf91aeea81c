//! Experts in MXFP4, as in the published files of gpt-oss.
//!
//! A projection `x` of all experts, `[experts, in, out]`, is stored with one row per output: `x_blocks` U8
//! `[experts, out, in / 32, 16]`, two E2M1 codes per byte, the first in the low half, and `x_scales` U8
//! (E8M0) `[experts, out, in / 32]`. Its values are exact in bfloat16. One expert is in memory at a time.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::sync::Arc;

use super::original_format::{BYTES, GROUP, PARTS};
use super::stored_experts::StoredExperts;
use super::{BlockSink, Checkpoint, DType, Encoding, OriginalFormat, RawTensor, Weight, WeightSource};
use crate::error::{Error, Result};
use crate::kernel::minifloat::{from_e2m1, from_e8m0};

/// The projection of all experts.
struct PackedExperts {
    stored: StoredExperts,
    /// Number of outputs.
    rows: usize,
    /// Number of groups of inputs.
    groups: usize,
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
    let [experts, row, rows] = shape;
    let stored = StoredExperts { codes: blocks, scales, experts, each: row.saturating_mul(rows), dtype: DType::BF16 };
    let mut weight = Weight::new(DType::BF16, shape.to_vec(), Encoding::Dense, Arc::new(PackedExperts { stored, rows, groups }));
    weight.stored_bytes = bytes;
    weight.stored_as = stored_as.to_vec();
    weight.stored_type = Some(OriginalFormat::MXFP4);
    weight.original_format = Some(OriginalFormat::PackedExperts);
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
    fn visit(&self, unit: usize, sink: BlockSink) -> Result<()> {
        self.stored.visit(unit, sink, |codes, scales, values| self.decode(codes, scales, values))
    }
}
