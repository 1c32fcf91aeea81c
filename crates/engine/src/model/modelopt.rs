//! Settings of folders of ModelOpt (`quant_method: modelopt`, or only `hf_quant_config.json`).

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::quantization::{FORMATS, Refused};
use crate::error::{Error, Result};
use crate::store::{DType, Fp8Config, Nvfp4Config};

/// Number of inputs that share a scale in NVFP4.
const GROUP: u64 = 16;
/// Key of the settings in the older form of the description.
const QUANTIZATION: &str = "quantization";
/// Key of the algorithm of a folder or of a layer.
const ALGORITHM: &str = "quant_algo";
/// The algorithm of folders whose layers have different ones, which `quantized_layers` contains.
const MIXED: &str = "MIXED_PRECISION";
const LAYERS: &str = "quantized_layers";

/// Quantization of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Algorithm {
    /// FP8 with one scale per matrix, for weights and inputs.
    Fp8,
    /// FP8 with one scale per row, and dynamic scales of inputs.
    Fp8PerRow,
    /// NVFP4 weights and inputs.
    Nvfp4,
    /// NVFP4 weights.
    Nvfp4Weights,
}

/// Tensors that change the inputs or outputs of quantized layers.
const UNSUPPORTED: [&str; 3] = [".pre_quant_scale", ".svdquant_lora_a", ".svdquant_lora_b"];

/// Suffixes of the scales of experts in one tensor `[experts, in, out]`, after the name of this tensor.
/// Scales of other layers belong to a tensor `weight` of their own module.
const EXPERT_SCALES: [&str; 2] = ["_weight_scale", "_weight_scale_2"];

/// Rejects layers that ModelOpt quantizes with other steps than rounding: their outputs would be wrong. Also
/// rejects quantized experts in one tensor, whose packed codes are transposed.
pub(super) fn require_plain_layers<T>(tensors: &BTreeMap<String, T>) -> Result<()> {
    if let Some(name) = tensors.keys().find(|name| UNSUPPORTED.iter().any(|part| name.ends_with(part))) {
        let reason = "changes the input or output of a layer quantized by ModelOpt, which is not supported";
        return Err(Error::tensor(name, reason, "start from the original checkpoint"));
    }
    let experts = |name: &'_ String| EXPERT_SCALES.iter().find_map(|suffix| tensors.get_key_value(name.strip_suffix(suffix)?));
    if let Some((name, _)) = tensors.keys().find_map(experts) {
        let reason = "contains quantized experts in one tensor by ModelOpt, which is not supported";
        let hint = "start from the original checkpoint; `split-experts` separates the experts of Llama 4, so that `quantize` can store them as NVFP4 or FP8";
        return Err(Error::tensor(name, reason, hint));
    }
    Ok(())
}

/// The settings; fails if a key or a value is not supported.
pub(super) fn parse(described: &Value, dtype: Option<DType>) -> Result<(Option<Fp8Config>, Option<Nvfp4Config>), Refused> {
    let mut settings = Map::new();
    for (key, value) in described.as_object().into_iter().flatten() {
        match (key.as_str(), value) {
            ("quant_method" | "producer", _) => {}
            (QUANTIZATION, Value::Object(inner)) => settings.extend(inner.clone()),
            _ => drop(settings.insert(key.clone(), value.clone())),
        }
    }
    settings.iter().try_for_each(|(key, value)| check(key, value))?;
    let stated = settings.get(ALGORITHM).unwrap_or(&Value::Null);
    let layers = settings.get(LAYERS).and_then(Value::as_object);
    let algorithms = match layers.filter(|_| stated == MIXED) {
        Some(layers) => layers.values().map(layer).collect::<Result<Vec<Algorithm>, Refused>>()?,
        None => vec![algorithm(stated)?],
    };
    let has = |kind: Algorithm| algorithms.contains(&kind);
    if has(Algorithm::Fp8) && has(Algorithm::Fp8PerRow) {
        return Err(refused(LAYERS, &Value::from("FP8 with static and with dynamic inputs")));
    }
    let fp8 = (has(Algorithm::Fp8) || has(Algorithm::Fp8PerRow)).then(|| Fp8Config {
        block: None,
        has_single_scales: true,
        has_static_inputs: has(Algorithm::Fp8),
        dtype,
    });
    let nvfp4 = (has(Algorithm::Nvfp4) || has(Algorithm::Nvfp4Weights)).then(|| Nvfp4Config { requires_inputs: !has(Algorithm::Nvfp4Weights), dtype });
    Ok((fp8, nvfp4))
}

fn refused(key: &str, value: &Value) -> Refused {
    (format!("`{key}` of {value} in a description by ModelOpt"), FORMATS)
}

fn algorithm(stated: &Value) -> Result<Algorithm, Refused> {
    match stated.as_str() {
        Some("FP8") => Ok(Algorithm::Fp8),
        Some("FP8_PER_CHANNEL_PER_TOKEN") => Ok(Algorithm::Fp8PerRow),
        Some("NVFP4") => Ok(Algorithm::Nvfp4),
        Some("W4A16_NVFP4") => Ok(Algorithm::Nvfp4Weights),
        _ => Err(refused(ALGORITHM, stated)),
    }
}

/// The algorithm of an entry of `quantized_layers`.
fn layer(described: &Value) -> Result<Algorithm, Refused> {
    let described = described.as_object().ok_or_else(|| refused(LAYERS, described))?;
    described.iter().try_for_each(|(key, value)| check(key, value))?;
    algorithm(described.get(ALGORITHM).unwrap_or(&Value::Null))
}

/// Fails if a key changes the values of weights in a way that is not supported. The stored tensors determine
/// which modules are quantized. `config_groups` repeats the algorithm in the form of compressed-tensors.
fn check(key: &str, value: &Value) -> Result<(), Refused> {
    let is_list = || value.as_array().is_some_and(|names| names.iter().all(Value::is_string));
    let is_supported = match key {
        ALGORITHM => value.is_string(),
        LAYERS | "config_groups" => value.is_object(),
        "ignore" | "exclude_modules" => is_list(),
        "group_size" => value.as_u64() == Some(GROUP),
        "has_zero_point" | "pre_quant_scale" => value == false,
        // The cache of the runtime. Its scales are tensors of the projections.
        "kv_cache_quant_algo" => value == "FP8",
        "kv_cache_scheme" => is_fp8_cache(value),
        _ => false,
    };
    if is_supported || value.is_null() { Ok(()) } else { Err(refused(key, value)) }
}

fn is_fp8_cache(scheme: &Value) -> bool {
    scheme == "FP8" || (scheme.get("num_bits") == Some(&Value::from(8)) && scheme.get("type").and_then(Value::as_str) == Some("float"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn both_forms_of_the_description_are_read() {
        let read =
            |described: Value| parse(&described, None).map(|(fp8, nvfp4)| (fp8.map(|fp8| fp8.has_static_inputs), nvfp4.map(|nvfp4| nvfp4.requires_inputs)));
        let cache = json!({ "dynamic": false, "num_bits": 8, "type": "float" });
        let flat = json!({ "quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"], "kv_cache_scheme": cache, "config_groups": {} });
        assert_eq!(read(flat), Ok((None, Some(true))));
        let settings = json!({ "quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"], "group_size": null });
        assert_eq!(read(json!({ "producer": { "name": "modelopt" }, "quantization": settings })), Ok((Some(true), None)));
        assert_eq!(read(json!({ "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN" })), Ok((Some(false), None)));
        let layers = json!({ "a": { "quant_algo": "FP8" }, "b": { "quant_algo": "W4A16_NVFP4", "group_size": 16 } });
        assert_eq!(read(json!({ "quant_algo": "MIXED_PRECISION", "quantized_layers": layers })), Ok((Some(true), Some(false))));
    }

    #[test]
    fn layers_with_other_steps_and_fused_experts_are_rejected() {
        let error = |names: &[&str]| {
            let tensors: BTreeMap<String, ()> = names.iter().map(|name| ((*name).to_owned(), ())).collect();
            require_plain_layers(&tensors).map_err(|error| error.to_string())
        };
        assert_eq!(error(&["a.weight", "a.weight_scale", "a.weight_scale_2", "a.input_scale", "experts.up_proj"]), Ok(()));
        let found = error(&["a.weight", "a.pre_quant_scale"]).unwrap_err();
        assert!(found.contains("`a.pre_quant_scale`: changes the input or output"), "{found}");
        for suffix in EXPERT_SCALES {
            let found = error(&["experts.up_proj", &format!("experts.up_proj{suffix}")]).unwrap_err();
            assert!(found.contains("`experts.up_proj`: contains quantized experts"), "{found}");
        }
    }

    #[test]
    fn unknown_keys_and_values_are_named() {
        for (key, value) in [
            ("quant_algo", json!("W4A8_AWQ")),
            ("group_size", json!(32)),
            ("pre_quant_scale", json!(true)),
            ("kv_cache_quant_algo", json!("NVFP4")),
            ("kv_cache_scheme", json!({ "num_bits": 4, "type": "float" })),
            ("exclude_modules", json!("lm_head")),
            ("rotation", json!(true)),
        ] {
            let (reason, _) = parse(&json!({ "quant_algo": "NVFP4", "quantization": { key: value } }), None).unwrap_err();
            assert_eq!(reason, format!("`{key}` of {value} in a description by ModelOpt"));
        }
        let layers = json!({ "a": { "quant_algo": "MXFP8" } });
        let (reason, _) = parse(&json!({ "quant_algo": "MIXED_PRECISION", "quantized_layers": layers }), None).unwrap_err();
        assert_eq!(reason, "`quant_algo` of \"MXFP8\" in a description by ModelOpt");
        assert!(parse(&json!({ "quant_method": "modelopt" }), None).is_err());
    }
}
