//! Experts in MXFP4, as published for gpt-oss, which are stored unchanged if no pass needs their values.

use super::Layout;
use crate::error::counted;
use crate::model::{Config, Model, stacked_experts};
use crate::store::writer::Item;
use crate::store::{Encoding, StorageFormat};

/// Whether the experts keep their codes and scales: transformers and vLLM then expect them in all layers, and
/// read no other quantized weights.
pub(super) fn are_kept(model: &Model, layout: Layout) -> bool {
    let mut weights = model.weights.by_name.iter();
    layout == Layout::Auto
        && model.config.packed_experts().is_some()
        && model.config.carried_quantization().is_empty()
        && weights.all(|(name, weight)| weight.encoding == Encoding::Dense && (weight.is_packed_experts() || stacked_experts(name, weight).is_none()))
}

/// The configuration, with the description of these experts if some are stored.
pub(super) fn config(model: &Model, items: &[Item]) -> Config {
    let mut config = model.config.clone();
    let is_stored = items.iter().any(|item| item.storage_format == StorageFormat::PackedExperts);
    if let Some(described) = model.config.packed_experts().filter(|_| is_stored) {
        config.set("quantization_config", described.clone());
    }
    config
}

/// A note about experts that are stored dequantized.
pub(super) fn note(items: &[Item]) -> Option<String> {
    let dequantized = |item: &&Item| item.weight.is_packed_experts() && item.storage_format != StorageFormat::PackedExperts;
    let count = items.iter().filter(dequantized).count();
    (count > 0).then(|| {
        format!(
            "{} of experts in MXFP4 stored as bfloat16: other experts or layers are changed, or the layout has no MXFP4; the values are the same",
            counted(count, "tensor")
        )
    })
}
