//! Settings of folders of bitsandbytes, whose tensors describe themselves.

use serde_json::Value;

use super::quantization::{FORMATS, Refused};

/// Keys of how weights were quantized, and how products with them are computed.
const KEYS: [&str; 14] = [
    "quant_method",
    "load_in_4bit",
    "load_in_8bit",
    "_load_in_4bit",
    "_load_in_8bit",
    "bnb_4bit_compute_dtype",
    "bnb_4bit_quant_storage",
    "bnb_4bit_quant_type",
    "bnb_4bit_use_double_quant",
    "llm_int8_enable_fp32_cpu_offload",
    "llm_int8_has_fp16_weight",
    "llm_int8_skip_modules",
    "llm_int8_threshold",
    "modules_to_not_convert",
];

/// Fails if a key is not known.
pub(super) fn check(described: &Value) -> Result<(), Refused> {
    match described.as_object().into_iter().flatten().find(|(key, value)| !KEYS.contains(&key.as_str()) && !value.is_null()) {
        Some((key, value)) => Err((format!("`{key}` of {value} with `quant_method` of \"bitsandbytes\""), FORMATS)),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn unknown_keys_are_named() {
        let described = json!({ "quant_method": "bitsandbytes", "_load_in_4bit": true, "llm_int8_skip_modules": null, "llm_int8_threshold": 6.0 });
        assert_eq!(check(&described), Ok(()));
        let (reason, _) = check(&json!({ "quant_method": "bitsandbytes", "rotation": true })).unwrap_err();
        assert_eq!(reason, "`rotation` of true with `quant_method` of \"bitsandbytes\"");
    }
}
