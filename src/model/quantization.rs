//! What a `quantization_config` says beside how weights are encoded: carried along, or refused by name.

use serde_json::{Map, Value};

use super::config::OWN_METHOD;

/// Keys that are made anew for the weights that are written.
const WRITTEN: [&str; 10] =
    ["quant_method", "format", "quantization_status", "config_groups", "ignore", "global_compression_ratio", "version", "producer", "layout", OWN_METHOD];
/// What a group of modules says.
const GROUP: [&str; 5] = ["targets", "weights", "input_activations", "output_activations", "format"];
/// What is said of weights and of activations.
const ARGUMENTS: [&str; 12] = [
    "num_bits",
    "type",
    "symmetric",
    "strategy",
    "group_size",
    "block_structure",
    "dynamic",
    "actorder",
    "scale_dtype",
    "zp_dtype",
    "observer",
    "observer_kwargs",
];

/// What is not supported, and what to do about it.
pub(super) type Refused = (String, &'static str);

fn refused<T>(what: String, hint: &'static str) -> Result<T, Refused> {
    Err((what, hint))
}

fn says_something(value: &Value) -> bool {
    !value.is_null() && value.as_object().is_none_or(|object| !object.is_empty())
}

/// What has to be told again beside the weights that are written: how keys and values are cached, and keys that nobody knows.
pub(super) fn carried(described: &Value) -> Result<Map<String, Value>, Refused> {
    let mut carried = Map::new();
    for (key, value) in described.as_object().into_iter().flatten().filter(|(_, value)| says_something(value)) {
        let format = |value: &Value| value.as_str().is_some_and(|name| name.starts_with("sparse-") || name.starts_with("marlin-"));
        match key.as_str() {
            "format" if format(value) => return sparse(value),
            "sparsity_config" if value.get("format").is_some_and(|f| f.as_str() != Some("dense")) => return sparse(&value["format"]),
            "quantization_status" if value.as_str() != Some("compressed") => {
                return refused(format!("`quantization_status` of {value}"), "save the model compressed, or start from the original checkpoint");
            }
            "transform_config" | "moe_sparsity_config" => {
                return refused(
                    format!("`{key}`"),
                    "what it says is done while the model runs, which no output of compress could tell; start from the original checkpoint",
                );
            }
            "kv_cache_scheme" if value.get("strategy").is_some_and(|strategy| strategy.as_str() != Some("tensor")) => {
                return refused(
                    format!("`kv_cache_scheme` by {}", value["strategy"]),
                    "one scale for a layer is carried along; start from the original checkpoint",
                );
            }
            key if WRITTEN.contains(&key) => {}
            key => {
                carried.insert(key.to_owned(), value.clone());
            }
        }
    }
    Ok(carried)
}

fn sparse<T>(format: &Value) -> Result<T, Refused> {
    refused(
        format!("sparse weights in the format {format}"),
        "start from the original checkpoint, or have a compressed-tensors before 0.15 decompress it (ModelCompressor.decompress_model) and save that",
    )
}

/// Refuses what is said of a group of modules and not done here.
pub(super) fn require_known(group: &Value) -> Result<(), Refused> {
    const HINT: &str =
        "compress reads integers of 2 to 8 bits, with activations as they are, for each token, or by one stored scale; start from the original checkpoint";
    let Some(keys) = group.as_object() else {
        return refused(format!("the preset of a config group for {group}"), "write out what it stands for, or start from the original checkpoint");
    };
    if let Some(key) = keys.keys().find(|key| !GROUP.contains(&key.as_str())) {
        return refused(format!("`{key}` of a config group"), HINT);
    }
    if keys.get("output_activations").is_some_and(says_something) {
        return refused("quantized `output_activations`".into(), HINT);
    }
    for what in ["weights", "input_activations"] {
        let Some(arguments) = keys.get(what).and_then(Value::as_object) else { continue };
        let says = |key: &str, usual: &Value| arguments.get(key).is_some_and(|value| !value.is_null() && value != usual);
        if let Some(key) = arguments.keys().find(|key| !ARGUMENTS.contains(&key.as_str())) {
            return refused(format!("`{key}` of {what}"), HINT);
        }
        let wrong = match what {
            "weights" => [("dynamic", Value::from(false)), ("actorder", "weight".into())]
                .into_iter()
                .find(|(key, usual)| says(key, usual) && arguments[*key] != "static"),
            _ if arguments.get("dynamic") == Some(&Value::Bool(true)) => {
                let token = [("num_bits", 8.into()), ("type", "int".into()), ("symmetric", true.into())].into_iter().find(|(key, usual)| says(key, usual));
                token.or_else(|| (arguments.get("strategy").and_then(Value::as_str) != Some("token")).then(|| ("strategy", Value::Null)))
            }
            _ => [("num_bits", 8.into()), ("type", "int".into()), ("dynamic", false.into())].into_iter().find(|(key, usual)| says(key, usual)),
        };
        if let Some((key, _)) = wrong {
            return refused(format!("`{key}` of {} for {what}", arguments.get(key).unwrap_or(&Value::Null)), HINT);
        }
    }
    Ok(())
}
