//! Parsing of the `quantization_config` of FP8 weights (`quant_method: fp8`).

use serde_json::Value;

use super::quantization::{FORMATS, Refused};
use crate::store::{DType, Fp8Config};

/// Rows and inputs of a block, if the configuration does not specify them, as in transformers.
const BLOCK: [usize; 2] = [128, 128];
/// Keys with the only supported values. `scale_fmt` describes how scales were rounded, which does not change
/// how they are read.
const VALUES: [(&str, &[&str]); 4] = [
    ("activation_scheme", &["dynamic", "static"]),
    ("fmt", &["e4m3", "e4m3fn", "float8_e4m3", "float8_e4m3fn"]),
    ("scale_fmt", &["float", "ue8m0"]),
    ("expert_dtype", &["fp8"]),
];
/// Keys with names of modules, which the stored tensors determine as well.
const MODULES: [&str; 3] = ["modules_to_not_convert", "ignored_layers", "modules_to_convert"];

/// The settings; fails if a key or a value is not supported.
pub(super) fn parse(described: &Value, dtype: Option<DType>) -> Result<Fp8Config, Refused> {
    let mut config = Fp8Config { block: Some(BLOCK), has_single_scales: true, has_static_inputs: false, dtype };
    for (key, value) in described.as_object().into_iter().flatten() {
        let wrong = || Err((format!("`{key}` of {value} with `quant_method` of \"fp8\""), FORMATS));
        match key.as_str() {
            "quant_method" => {}
            "weight_block_size" => {
                config.block = match value.as_array().map(Vec::as_slice) {
                    None if value.is_null() => None,
                    Some([high, wide]) => match [high, wide].map(|size| size.as_u64().and_then(|size| usize::try_from(size).ok()).filter(|size| *size > 0)) {
                        [Some(high), Some(wide)] => Some([high, wide]),
                        _ => return wrong(),
                    },
                    _ => return wrong(),
                };
                config.has_single_scales = value.is_null();
            }
            key if MODULES.contains(&key) => {
                let is_list = value.as_array().is_some_and(|names| names.iter().all(Value::is_string));
                if !value.is_null() && !is_list {
                    return wrong();
                }
            }
            // An option of loading.
            "dequantize" if value.is_boolean() => {}
            key => match VALUES.iter().find(|(name, _)| *name == key) {
                None if value.is_null() => {}
                Some((_, supported)) if value.is_null() || value.as_str().is_some_and(|text| supported.contains(&text.to_lowercase().as_str())) => {}
                _ => return wrong(),
            },
        }
    }
    config.has_static_inputs = described.get("activation_scheme").and_then(Value::as_str).is_some_and(|scheme| scheme.eq_ignore_ascii_case("static"));
    Ok(config)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn blocks_and_schemes_are_read() {
        let read = |described: Value| parse(&described, None).map(|config| (config.block, config.has_single_scales, config.has_static_inputs));
        let modules = json!(["lm_head"]);
        let deepseek = json!({ "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [128, 64] });
        assert_eq!(read(deepseek), Ok((Some([128, 64]), false, false)));
        let mistral = json!({ "activation_scheme": "static", "dequantize": false, "modules_to_not_convert": modules, "weight_block_size": null });
        assert_eq!(read(mistral), Ok((None, true, true)));
        assert_eq!(read(json!({ "quant_method": "fp8", "ignored_layers": null, "kv_cache_scheme": null })), Ok((Some(BLOCK), true, false)));
    }

    #[test]
    fn unknown_keys_and_values_are_named() {
        for (key, value) in [
            ("activation_scheme", json!("block")),
            ("fmt", json!("e5m2")),
            ("scale_fmt", json!("e8m0")),
            ("expert_dtype", json!("fp4")),
            ("weight_block_size", json!([128])),
            ("weight_block_size", json!([128, 0])),
            ("weight_block_size", json!("128x128")),
            ("modules_to_not_convert", json!("lm_head")),
            ("ignored_layers", json!([3])),
            ("dequantize", json!("yes")),
            ("kv_cache_scheme", json!("static")),
            ("rotation", json!(true)),
        ] {
            let (reason, _) = parse(&json!({ "quant_method": "fp8", key: value }), None).unwrap_err();
            assert_eq!(reason, format!("`{key}` of {value} with `quant_method` of \"fp8\""));
        }
    }
}
