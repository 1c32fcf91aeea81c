//! What a `quantization_config` says beside how weights are encoded: carried along, or refused by name.

use serde_json::{Map, Value, json};

use super::config::{OWN_METHOD, Said};
use crate::kernel::cache::CacheFormat;
use crate::store::{ActivationScheme, Granularity, WordsLabel};

/// Keys that are made anew for the weights that are written.
const WRITTEN: [&str; 11] = [
    "quant_method",
    "format",
    "quantization_status",
    "config_groups",
    "ignore",
    "global_compression_ratio",
    "version",
    "producer",
    "layout",
    "palettes",
    OWN_METHOD,
];
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

/// The key that says how keys and values are cached.
pub(super) const CACHE: &str = "kv_cache_scheme";

/// What keys and values are rounded to when they are cached.
///
/// # Errors
/// Something that is not done here.
pub(super) fn cache(scheme: &Value) -> Result<CacheFormat, Refused> {
    const HINT: &str = "keys and values are rounded to FP8 or symmetric int8 by one stored scale; passes over weights carry it along; take it out of config.json to run the model without";
    let of = |key: &str| scheme.get(key).unwrap_or(&Value::Null);
    let wrong = |key: &str| refused(format!("`{CACHE}` with `{key}` of {}", of(key)), HINT);
    if of("num_bits").as_u64().unwrap_or(8) != 8 {
        return wrong("num_bits");
    }
    if of("symmetric") == false {
        return wrong("symmetric");
    }
    if !matches!(of("dynamic"), Value::Null | Value::Bool(false)) {
        return wrong("dynamic");
    }
    Ok(if is_integer(scheme) { CacheFormat::Int8 } else { CacheFormat::Fp8 })
}

/// The same, to be written.
pub(super) fn cache_scheme(format: CacheFormat) -> Value {
    let kind = if format == CacheFormat::Int8 { "int" } else { "float" };
    json!({ "num_bits": 8, "type": kind, "symmetric": true, "strategy": "tensor", "dynamic": false })
}

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
            CACHE if value.get("strategy").is_some_and(|strategy| strategy.as_str() != Some("tensor")) => {
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

const HINT: &str = "compress reads integers of 2 to 8 bits, FP8 and FP4, with activations as they are, as int8 or FP8 for each token or by one stored scale, or in the groups of FP8, NVFP4 and MXFP4; start from the original checkpoint";

/// Whether codes are integers, and not floats.
pub(super) fn is_integer(arguments: &Value) -> bool {
    arguments.get("type").and_then(Value::as_str).is_none_or(|name| name.eq_ignore_ascii_case("int"))
}

/// The granularity of a weight's scales, if it is stated.
///
/// # Errors
/// Something that is not done here, or contradicts itself.
pub(super) fn granularity(arguments: &Value) -> Result<Option<Granularity>, Refused> {
    let of = |key: &str| arguments.get(key).unwrap_or(&Value::Null);
    let unsupported = |key: &str| refused(format!("`{key}` of {} for weights", of(key)), HINT);
    // As a list, or as text: `128x128`.
    let sides = match of("block_structure") {
        Value::Array(sides) => sides.iter().map(Value::as_u64).collect::<Option<Vec<u64>>>(),
        Value::String(sides) => sides.split('x').map(|side| side.trim().parse().ok()).collect(),
        _ => None,
    };
    let size = of("group_size").as_i64().filter(|size| *size != -1);
    let group = || match size.and_then(|size| usize::try_from(size).ok()).filter(|size| *size > 0) {
        Some(size) => Ok(Some(Granularity::Group(size))),
        None => unsupported("group_size"),
    };
    // Without a strategy, compressed-tensors takes that of the size.
    match of("strategy").as_str() {
        Some("group" | "tensor_group") => group(),
        None if size.is_some() => group(),
        None if of("group_size") == -1 => Ok(Some(Granularity::Channel)),
        None => Ok(None),
        Some("tensor") => Ok(Some(Granularity::Tensor)),
        Some("channel") => Ok(Some(Granularity::Channel)),
        Some("block") => match sides.as_deref() {
            Some([high, wide]) if *high > 0 && *wide > 0 => Ok(Some(Granularity::Block([*high as usize, *wide as usize]))),
            _ => unsupported("block_structure"),
        },
        Some(_) => unsupported("strategy"),
    }
}

/// What is said of activations.
///
/// # Errors
/// Something that is not done here.
pub(super) fn activations(arguments: &Value) -> Result<Said, Refused> {
    let of = |key: &str| arguments.get(key).unwrap_or(&Value::Null);
    let (bits, integer) = (of("num_bits").as_u64().unwrap_or(8), is_integer(arguments));
    let (strategy, size) = (of("strategy").as_str(), of("group_size").as_u64().unwrap_or(0) as usize);
    let unsupported = |key: &str| refused(format!("`{key}` of {} for input_activations", of(key)), HINT);
    let symmetric = of("symmetric").as_bool().unwrap_or(true);
    let dynamic = of("dynamic") == &Value::Bool(true);
    if dynamic && !symmetric {
        return unsupported("symmetric");
    }
    // Scales of MX formats are powers of two, those of NVFP4 FP8 numbers, and others floats.
    let scales = match (integer, bits, of("dynamic") == "local") {
        (false, 4, false) => &["uint8"][..],
        (false, 4, true) => &["float8_e4m3fn"],
        _ => &["float32", "bfloat16", "float16"],
    };
    if of("scale_dtype").as_str().is_some_and(|dtype| !scales.contains(&dtype.trim_start_matches("torch."))) {
        return unsupported("scale_dtype");
    }
    Ok(Said::Is(match (integer, bits, dynamic) {
        (true, 8, true) if strategy == Some("token") => ActivationScheme::DynamicToken,
        (false, 8, true) if strategy == Some("token") => ActivationScheme::Float8Token,
        (false, 8, true) if strategy == Some("group") && size > 0 => ActivationScheme::Float8Group(size),
        (false, 4, true) if strategy == Some("group") && size == 32 => ActivationScheme::Mxfp4,
        (false, 4, false) if of("dynamic") == "local" && size == 16 => return Ok(Said::Static),
        (_, 8, false) if strategy.is_none_or(|by| by == "tensor") => return Ok(Said::Static),
        (_, 8, false) => return refused(format!("static scales for activations by {}", of("strategy")), HINT),
        (_, 8, true) | (false, 4, _) => return unsupported("strategy"),
        _ => return unsupported("num_bits"),
    }))
}

/// What is said of the words of GPTQ and AWQ; nothing where it is another method's description.
///
/// # Errors
/// Another form of words than the ones that are read.
pub(super) fn words(described: &Value) -> Result<Option<WordsLabel>, Refused> {
    const HINT: &str = "compress reads GPTQ in the formats gptq and gptq_v2, and AWQ in the version gemm; start from the original checkpoint, or save it again in one of these";
    let of = |keys: &[&str]| keys.iter().find_map(|key| described.get(key).filter(|value| !value.is_null()).map(|value| ((*key).to_owned(), value)));
    let text = |keys: &[&str]| of(keys).and_then(|(key, value)| Some((key, value.as_str()?.to_lowercase())));
    let one_of = |keys: &[&str], known: &[&str]| match text(keys) {
        Some((key, name)) if !known.contains(&name.as_str()) => refused(format!("`{key}` of {:?}", name), HINT),
        found => Ok(found.map(|(_, name)| name)),
    };
    match text(&["quant_method", "method"]).map(|(_, name)| name).as_deref() {
        Some("gptq") => {
            let format = one_of(&["checkpoint_format", "format"], &["gptq", "gptq_v2"])?;
            let symmetric = of(&["sym"]).and_then(|(_, value)| value.as_bool());
            Ok(Some(WordsLabel { second_version: format.as_deref() == Some("gptq_v2"), symmetric }))
        }
        Some("awq") => {
            one_of(&["version"], &["gemm"])?;
            Ok(Some(WordsLabel::default()))
        }
        _ => Ok(None),
    }
}

/// Refuses what is said of a group of modules and not done here.
pub(super) fn require_known(group: &Value) -> Result<(), Refused> {
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
        let wrong = [("dynamic", Value::from(false)), ("actorder", "weight".into())]
            .into_iter()
            .find(|(key, usual)| what == "weights" && says(key, usual) && arguments[*key] != "static");
        if let Some((key, _)) = wrong {
            return refused(format!("`{key}` of {} for {what}", arguments.get(key).unwrap_or(&Value::Null)), HINT);
        }
    }
    Ok(())
}
