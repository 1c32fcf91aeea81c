//! Parsing of `quantization_config`: unsupported settings are rejected, unrelated keys are carried over.

use std::num::NonZeroUsize;
use std::path::Path;

use serde_json::{Map, Value, json};

use crate::error::Error;
use crate::kernel::cache::{CacheFormat, CacheScales, CacheScheme};
use crate::store::{ActivationScheme, Codes, FloatScale, GptqConfig, Granularity, GroupSize, ScaleFormat};

/// Quantization method of folders that only this tool can read.
pub const OWN_METHOD: &str = "compress";

/// Files that describe quantized weights, in addition to `config.json`.
pub(super) const DESCRIPTIONS: [&str; 2] = ["quantize_config.json", "quant_config.json"];
/// File in which ModelOpt describes quantized weights, in addition to `config.json` or instead of it.
pub(super) const MODELOPT: &str = "hf_quant_config.json";

/// Activation arguments of a config group.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum ActivationArgs {
    /// A scheme without stored parameters.
    Scheme(ActivationScheme),
    /// Static quantization with the parameters stored with the weight, to 8-bit integers or to codes
    /// like the weight's.
    Static {
        /// Whether the zero point is 0 and not stored.
        symmetric: bool,
    },
}

/// Keys that are regenerated for the written weights.
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
/// Supported keys of a config group.
const GROUP: [&str; 5] = ["targets", "weights", "input_activations", "output_activations", "format"];
/// Supported keys of weight and activation arguments.
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

/// Key of the KV-cache scheme.
pub(super) const CACHE: &str = "kv_cache_scheme";
/// Its strategies: one scale for the keys or values of a layer, or for those of a head.
const TENSOR: &str = "tensor";
const HEAD: &str = "attn_head";

/// Parses a KV-cache scheme.
pub(super) fn cache(scheme: &Value) -> Result<CacheScheme, Refused> {
    const HINT: &str = "KV caches in FP8 or symmetric int8 with a stored scale per layer or head are supported; weight passes carry other schemes over; remove the key from config.json to run the model without it";
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
    let format = if is_integer(scheme) { CacheFormat::Int8 } else { CacheFormat::Fp8 };
    let scales = if of("strategy").as_str() == Some(HEAD) { CacheScales::Head } else { CacheScales::Tensor };
    Ok(CacheScheme { format, scales })
}

/// A KV-cache scheme as JSON.
pub(super) fn cache_scheme(scheme: CacheScheme) -> Value {
    let kind = if scheme.format == CacheFormat::Int8 { "int" } else { "float" };
    let strategy = if scheme.scales == CacheScales::Head { HEAD } else { TENSOR };
    json!({ "num_bits": 8, "type": kind, "symmetric": true, "strategy": strategy, "dynamic": false })
}

/// An unsupported setting, and a hint.
pub(super) type Refused = (String, &'static str);

/// Hint for unknown formats.
pub(super) const FORMATS: &str = "compress supports dense weights, the integers (2 to 8 bits) and floating-point formats of up to 8 bits in compressed-tensors 0.20, GPTQ, AWQ, FP8 (`fp8`) with scales of blocks, rows or matrices, MXFP4 experts (`mxfp4`), FP8 and NVFP4 of ModelOpt (`modelopt`), and bitsandbytes; start from the original checkpoint";

/// The error for an unsupported setting in a file.
pub(super) fn unsupported(file: &Path) -> impl Fn(Refused) -> Error {
    move |(what, hint)| Error::Unsupported { what: format!("{}: {what}", file.display()), hint: hint.into() }
}

fn refused<T>(what: String, hint: &'static str) -> Result<T, Refused> {
    Err((what, hint))
}

fn is_set(value: &Value) -> bool {
    !value.is_null() && value.as_object().is_none_or(|object| !object.is_empty())
}

/// Keys that are written again regardless of the weights: the KV-cache scheme, and unrecognized keys.
pub(super) fn carried(described: &Value) -> Result<Map<String, Value>, Refused> {
    let mut carried = Map::new();
    for (key, value) in described.as_object().into_iter().flatten().filter(|(_, value)| is_set(value)) {
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
                    "it describes operations at run time that the outputs of compress cannot represent; start from the original checkpoint",
                );
            }
            CACHE if value.get("strategy").is_some_and(|strategy| strategy.as_str().is_none_or(|name| ![TENSOR, HEAD].contains(&name))) => {
                return refused(
                    format!("`kv_cache_scheme` by {}", value["strategy"]),
                    "only one scale per layer or head is supported; start from the original checkpoint",
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
        "start from the original checkpoint, or decompress it with a version of compressed-tensors before 0.15 (ModelCompressor.decompress_model)",
    )
}

/// Hint for unsupported settings of a format.
pub(super) const HINT: &str = "compress supports the integers (2 to 8 bits) and floating-point formats of up to 8 bits in compressed-tensors 0.20, with float activations, per-token or static int8 or FP8 activations, and low-bit floats in groups; start from the original checkpoint";

/// Whether codes are integers, not floats.
pub(super) fn is_integer(arguments: &Value) -> bool {
    arguments.get("type").and_then(Value::as_str).is_none_or(|name| name.eq_ignore_ascii_case("int"))
}

/// The granularity of a weight's scales, if it is specified.
pub(super) fn granularity(arguments: &Value) -> Result<Option<Granularity>, Refused> {
    let of = |key: &str| arguments.get(key).unwrap_or(&Value::Null);
    let unsupported = |key: &str| refused(format!("`{key}` of {} for weights", of(key)), HINT);
    // A list, or a text such as `128x128`.
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
    // Without a strategy, compressed-tensors infers it from the group size.
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

/// Parses activation arguments.
pub(super) fn activations(arguments: &Value) -> Result<ActivationArgs, Refused> {
    let of = |key: &str| arguments.get(key).unwrap_or(&Value::Null);
    let (bits, integer) = (of("num_bits").as_u64().unwrap_or(8), is_integer(arguments));
    let (strategy, size) = (of("strategy").as_str(), of("group_size").as_u64().unwrap_or(0) as usize);
    let unsupported = |key: &str| refused(format!("`{key}` of {} for input_activations", of(key)), HINT);
    let symmetric = of("symmetric").as_bool().unwrap_or(true);
    let (dynamic, local) = (of("dynamic") == &Value::Bool(true), of("dynamic") == "local");
    if dynamic && !symmetric {
        return unsupported("symmetric");
    }
    let Some(codes) = Codes::from_type(integer, bits).filter(|codes| codes.float().is_some() || *codes == Codes::INT8) else {
        return unsupported("num_bits");
    };
    let stated = of("scale_dtype").as_str().map(|dtype| dtype.trim_start_matches("torch."));
    let is_stated = |scales: &ScaleFormat| stated.is_none_or(|dtype| scales.dtype_names().contains(&dtype));
    let Some(scales) = codes.scale_formats().filter(|scales| (*scales == ScaleFormat::Relative) == local).find(is_stated) else {
        return unsupported(if stated.is_some() { "scale_dtype" } else { "dynamic" });
    };
    let scale = match (scales, dynamic, strategy) {
        (ScaleFormat::Float, true, Some("token")) => FloatScale::Token,
        (ScaleFormat::Float, true, Some("group")) if size > 0 => FloatScale::Group(size),
        (ScaleFormat::PowerOfTwo, true, Some("group")) if Some(size) == scales.group() => FloatScale::PowerOfTwo,
        (ScaleFormat::Relative, false, _) if Some(size) == scales.group() => return Ok(ActivationArgs::Static { symmetric }),
        (ScaleFormat::Float, false, None | Some("tensor")) => return Ok(ActivationArgs::Static { symmetric }),
        (ScaleFormat::Float, false, _) => return refused(format!("static scales for activations by {}", of("strategy")), HINT),
        _ => return unsupported("strategy"),
    };
    Ok(ActivationArgs::Scheme(match (codes, scale) {
        (Codes::Float(format), scale) => ActivationScheme::Float(format, scale),
        (Codes::Integer(_), FloatScale::Token) => ActivationScheme::DynamicToken,
        (Codes::Integer(_) | Codes::Palette(_), _) => return unsupported("strategy"),
    }))
}

/// Parses the settings of GPTQ and AWQ; `None` for other methods.
pub(super) fn gptq_config(described: &Value) -> Result<Option<GptqConfig>, Refused> {
    const HINT: &str = "compress supports GPTQ in the formats gptq and gptq_v2, and AWQ in the version gemm; start from the original checkpoint, or save it again in one of these";
    let of = |keys: &[&str]| keys.iter().find_map(|key| described.get(key).filter(|value| !value.is_null()).map(|value| ((*key).to_owned(), value)));
    let text = |keys: &[&str]| of(keys).and_then(|(key, value)| Some((key, value.as_str()?.to_lowercase())));
    let one_of = |keys: &[&str], supported: &[&str]| match text(keys) {
        Some((key, name)) if !supported.contains(&name.as_str()) => refused(format!("`{key}` of {:?}", name), HINT),
        found => Ok(found.map(|(_, name)| name)),
    };
    let method = text(&["quant_method", "method"]).map(|(_, name)| name);
    if !matches!(method.as_deref(), Some("gptq" | "awq")) {
        return Ok(None);
    }
    let group_size = match of(&["group_size", "q_group_size"]) {
        None => None,
        Some((key, value)) => match value.as_i64().map(|size| (size, usize::try_from(size).ok().and_then(NonZeroUsize::new))) {
            Some((-1, _)) => Some(GroupSize::Row),
            Some((_, Some(size))) => Some(GroupSize::Inputs(size)),
            _ => return refused(format!("`{key}` of {value}"), "set it to the number of inputs per group, or to -1 for one group per row"),
        },
    };
    match method.as_deref() {
        Some("gptq") => {
            let format = one_of(&["checkpoint_format", "format"], &["gptq", "gptq_v2"])?;
            let symmetric = of(&["sym"]).and_then(|(_, value)| value.as_bool());
            // GPTQModel may quantize some layers differently.
            let overrides = described.get("dynamic").and_then(Value::as_object);
            let is_uniform = overrides.is_none_or(|rules| rules.values().all(|rule| rule.get("group_size").is_none()));
            let group_size = group_size.filter(|_| is_uniform);
            let is_ordered = described.get("desc_act") == Some(&Value::Bool(true));
            Ok(Some(GptqConfig { second_version: format.as_deref() == Some("gptq_v2"), symmetric, group_size, is_ordered }))
        }
        Some("awq") => {
            one_of(&["version"], &["gemm"])?;
            let symmetric = of(&["zero_point"]).and_then(|(_, value)| value.as_bool()).map(|zero_point| !zero_point);
            Ok(Some(GptqConfig { symmetric, group_size, ..GptqConfig::default() }))
        }
        _ => Ok(None),
    }
}

/// Rejects unsupported settings of a config group.
pub(super) fn require_supported(group: &Value) -> Result<(), Refused> {
    let Some(keys) = group.as_object() else {
        return refused(format!("the preset of a config group for {group}"), "replace the preset by its settings, or start from the original checkpoint");
    };
    if let Some(key) = keys.keys().find(|key| !GROUP.contains(&key.as_str())) {
        return refused(format!("`{key}` of a config group"), HINT);
    }
    if keys.get("output_activations").is_some_and(is_set) {
        return refused("quantized `output_activations`".into(), HINT);
    }
    for what in ["weights", "input_activations"] {
        let Some(arguments) = keys.get(what).and_then(Value::as_object) else { continue };
        let differs = |key: &str, default: &Value| arguments.get(key).is_some_and(|value| !value.is_null() && value != default);
        if let Some(key) = arguments.keys().find(|key| !ARGUMENTS.contains(&key.as_str())) {
            return refused(format!("`{key}` of {what}"), HINT);
        }
        let wrong = [("dynamic", Value::from(false)), ("actorder", "weight".into())]
            .into_iter()
            .find(|(key, default)| what == "weights" && differs(key, default) && arguments[*key] != "static");
        if let Some((key, _)) = wrong {
            return refused(format!("`{key}` of {} for {what}", arguments.get(key).unwrap_or(&Value::Null)), HINT);
        }
    }
    Ok(())
}
