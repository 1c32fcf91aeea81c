//! Weights in the formats of other tools, which are stored unchanged if no pass needs their values: experts
//! in MXFP4, as published for gpt-oss, FP8 with `quant_method: fp8`, and the weights of ModelOpt and
//! bitsandbytes.

use serde_json::Value;

use super::Layout;
use crate::error::counted;
use crate::model::{Config, Model, stacked_experts};
use crate::store::writer::Item;
use crate::store::{Encoding, OriginalFormat, StorageFormat, Weight};

/// Whether all weights keep their original format, which the description of the input then describes:
/// readers expect it in all layers, and support no other quantized weights in the same folder.
pub(super) fn are_kept(model: &Model, layout: Layout) -> bool {
    let description = model.config.original_quantization();
    let formats: Vec<OriginalFormat> = model.weights.by_name.values().filter_map(|weight| weight.original_format).collect();
    // Only the tensors of bitsandbytes describe themselves.
    if description.is_none() && (formats.is_empty() || !formats.iter().all(|format| matches!(format, OriginalFormat::Bits(_)))) {
        return false;
    }
    let has_packed_experts = formats.contains(&OriginalFormat::PackedExperts);
    let has_layer_names = description.is_some_and(names_layers);
    let is_kept = |(name, weight): (&String, &Weight)| match weight.original_format {
        Some(format) => !has_layer_names || format.parts(name, &weight.shape).iter().all(|part| weight.stored_as.contains(&part.name)),
        // Floats of several tensors were dequantized.
        None => weight.encoding == Encoding::Dense && weight.stored_as.len() <= 1 && !(has_packed_experts && stacked_experts(name, weight).is_some()),
    };
    layout == Layout::Auto && model.config.carried_quantization().is_empty() && model.weights.by_name.iter().all(is_kept)
}

/// Whether a description names modules of numbered layers, which passes may renumber.
fn names_layers(description: &Value) -> bool {
    let is_separator = |c: char| !c.is_ascii_alphanumeric() && c != '_';
    let is_number = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    let is_of_layer = |name: &str| name.split(is_separator).any(is_number);
    match description {
        // Other texts, such as versions, are values of keys.
        Value::Array(names) => names.iter().any(|name| name.as_str().is_some_and(is_of_layer) || names_layers(name)),
        Value::Object(values) => values.iter().any(|(key, value)| is_of_layer(key) || names_layers(value)),
        _ => false,
    }
}

/// Whether an item keeps its original format.
pub(super) fn is_kept(item: &Item) -> bool {
    matches!(item.storage_format, StorageFormat::Original(_))
}

/// The configuration, with the description of the weights that keep their original format.
pub(super) fn config(model: &Model, items: &[Item]) -> Config {
    let mut config = model.config.clone();
    if let Some(described) = model.config.original_quantization().filter(|_| items.iter().any(is_kept)) {
        config.set("quantization_config", described.clone());
    }
    config
}

/// Notes about weights that are stored in another format.
pub(super) fn notes(model: &Model, items: &[Item]) -> Vec<String> {
    let counts = |is_counted: fn(&Item, OriginalFormat) -> bool| {
        let is_counted = |item: &&Item| !is_kept(item) && item.weight.original_format.is_some_and(|format| is_counted(item, format));
        items.iter().filter(is_counted).count()
    };
    let experts = counts(|_, format| format == OriginalFormat::PackedExperts);
    let experts = (experts > 0).then(|| {
        format!(
            "{} of experts in MXFP4 stored as bfloat16: other experts or layers are changed, or the layout has no MXFP4; the values are the same",
            counted(experts, "tensor")
        )
    });
    let quantized = counts(|item, format| matches!(format, OriginalFormat::Fp8(_) | OriginalFormat::Nvfp4(_)) && item.weight.encoding != Encoding::Dense);
    let quantized = (quantized > 0).then(|| {
        format!(
            "{} in FP8 or NVFP4 stored in the format of compressed-tensors (`weight_scale`): other layers are changed, or the layout requires it; codes and scales are the same",
            counted(quantized, "weight")
        )
    });
    let stacked = counts(|item, format| matches!(format, OriginalFormat::Fp8(_)) && item.weight.encoding == Encoding::Dense);
    let stacked = (stacked > 0).then(|| {
        format!(
            "{} of experts in FP8 stored as floats: other experts or layers are changed, or the layout has no FP8 for all experts in one tensor",
            counted(stacked, "tensor")
        )
    });
    let bits = counts(|_, format| matches!(format, OriginalFormat::Bits(_)));
    let bits = (bits > 0).then(|| {
        format!("{} of bitsandbytes stored as floats: other layers are changed, or the layout requires it; the values are the same", counted(bits, "weight"))
    });
    let cache = model
        .config
        .original_quantization()
        .filter(|described| !items.iter().any(is_kept) && has_cache(described))
        .map(|_| "the description of the KV cache by ModelOpt is not written; scales of keys and values in the checkpoint are copied".to_owned());
    experts.into_iter().chain(quantized).chain(stacked).chain(bits).chain(cache).collect()
}

/// Whether a description by ModelOpt quantizes the KV cache.
fn has_cache(described: &Value) -> bool {
    let settings = described.get("quantization").unwrap_or(described);
    ["kv_cache_scheme", "kv_cache_quant_algo"].into_iter().any(|key| settings.get(key).is_some_and(|value| !value.is_null()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn names_of_layers_are_found_at_every_depth() {
        for described in [
            json!({ "quantization": { "quantized_layers": { "model.layers.2.mlp.up_proj": {} } } }),
            json!({ "quantization": { "exclude_modules": ["model.layers.61*"] } }),
            json!({ "config_groups": { "group_0": { "targets": [r"re:.*layers\.3\..*"] } } }),
        ] {
            assert!(names_layers(&described), "{described}");
        }
        let groups = json!({ "group_0": { "targets": ["Linear"] } });
        assert!(!names_layers(&json!({ "ignore": ["lm_head", "*mlp.gate*"], "config_groups": groups, "producer": { "version": "0.47.0" } })));
    }
}
