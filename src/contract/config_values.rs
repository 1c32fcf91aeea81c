//! Values of `config.json` that runtimes do not accept, whatever the weights are.
//!
//! Every row was tried with transformers 5.23 on a small model of each family that has the key
//! (`scripts/goldens config-values`): no family outside of `exempt` loads with a refused value.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::{Finding, Runtime};
use crate::arch;

/// The next step after a violation.
const HINT: &str = "use the value from the config.json of the original model";
const HINT_IN_RUN: &str = "copy the value from the config.json of the original model into that of the model's folder";

/// A requirement on the values of keys.
struct Row {
    keys: &'static [&'static str],
    /// The accepted values, as a noun phrase.
    expected: &'static str,
    is_accepted: fn(&Value) -> bool,
    /// Whether only transformers refuses other values.
    only_transformers: bool,
    /// Families in which other values have no effect.
    exempt: &'static [&'static str],
}

/// Families whose token ids and tied weights transformers does not validate.
const UNVALIDATED_TOKENS: [&str; 14] = [
    "clip_text_model",
    "clip_vision_model",
    "convnext",
    "dinov2",
    "efficientnet",
    "qwen2_5_vl_vision",
    "qwen2_vl_vision",
    "qwen3_vl_vision",
    "resnet",
    "siglip_text_model",
    "siglip_vision_model",
    "swin",
    "t5",
    "vit",
];

/// Families of images, whose sizes are lists or are not used.
const STAGES: [&str; 4] = ["convnext", "resnet", "efficientnet", "swin"];

const ROWS: &[Row] = &[
    Row {
        keys: &["hidden_size", "vocab_size", "n_embd", "n_head", "d_model", "num_heads", "d_kv", "d_ff", "dim", "n_heads"],
        expected: "an integer from 1",
        is_accepted: is_size,
        only_transformers: false,
        exempt: &STAGES,
    },
    Row { keys: &["num_attention_heads"], expected: "an integer other than 0", is_accepted: is_nonzero, only_transformers: false, exempt: &STAGES },
    Row {
        keys: &["num_key_value_heads"],
        expected: "an integer other than 0, or null",
        is_accepted: |value| value.is_null() || is_nonzero(value),
        only_transformers: false,
        exempt: &[],
    },
    Row {
        keys: &["head_dim"],
        expected: "an integer or null",
        is_accepted: |value| value.is_null() || is_integer(value),
        only_transformers: false,
        exempt: &["kimi_k2"],
    },
    Row { keys: &["n_layer", "num_experts_per_tok"], expected: "an integer from 0", is_accepted: Value::is_u64, only_transformers: false, exempt: &[] },
    Row {
        keys: &["num_hidden_layers", "num_layers", "n_layers", "num_local_experts", "num_experts"],
        expected: "an integer",
        is_accepted: is_integer,
        only_transformers: false,
        exempt: &STAGES,
    },
    Row { keys: &["intermediate_size"], expected: "an integer", is_accepted: is_integer, only_transformers: false, exempt: &["qwen3_5_moe_text"] },
    Row { keys: &["max_position_embeddings"], expected: "an integer", is_accepted: is_integer, only_transformers: true, exempt: &[] },
    Row { keys: &["moe_intermediate_size"], expected: "an integer from 1", is_accepted: is_size, only_transformers: true, exempt: &[] },
    Row {
        keys: &["bos_token_id"],
        expected: "a token id or null",
        is_accepted: |value| value.is_null() || is_integer(value),
        only_transformers: true,
        exempt: &UNVALIDATED_TOKENS,
    },
    Row {
        keys: &["pad_token_id"],
        expected: "a token id or null",
        is_accepted: |value| value.is_null() || is_integer(value),
        only_transformers: true,
        exempt: &UNVALIDATED_TOKENS,
    },
    Row {
        keys: &["eos_token_id"],
        expected: "a token id, a list of token ids, or null",
        is_accepted: |value| value.is_null() || is_integer(value) || value.as_array().is_some_and(|list| list.iter().all(is_integer)),
        only_transformers: true,
        exempt: &UNVALIDATED_TOKENS,
    },
    Row {
        keys: &["attention_bias", "mlp_bias", "is_decoder"],
        expected: "true or false",
        is_accepted: Value::is_boolean,
        only_transformers: true,
        exempt: &[],
    },
    Row {
        keys: &["use_cache", "use_bias"],
        expected: "true, false or null",
        is_accepted: |value| value.is_null() || value.is_boolean(),
        only_transformers: true,
        exempt: &[],
    },
    Row {
        keys: &["tie_word_embeddings"],
        expected: "true, false or null",
        is_accepted: |value| value.is_null() || value.is_boolean(),
        only_transformers: true,
        exempt: &UNVALIDATED_TOKENS,
    },
    Row {
        keys: &["rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "initializer_range"],
        expected: "a number with a decimal point or an exponent",
        is_accepted: Value::is_f64,
        only_transformers: true,
        exempt: &[],
    },
    Row {
        keys: &["attention_dropout"],
        expected: "a number or null",
        is_accepted: |value| value.is_null() || value.is_number(),
        only_transformers: true,
        exempt: &[],
    },
    Row {
        keys: &["hidden_act", "hidden_activation", "activation_function", "activation", "dense_act_fn", "mlp_hidden_act"],
        expected: "the name of an activation function",
        is_accepted: |value| value.as_str().is_some_and(|name| ACTIVATIONS.contains(&name)),
        only_transformers: true,
        exempt: &["gpt_oss"],
    },
    Row {
        keys: &["hidden_act", "hidden_activation", "activation_function"],
        expected: "the name of an activation function",
        is_accepted: |value| value.as_str().is_none_or(|name| ACTIVATIONS.contains(&name) || OTHER_ACTIVATIONS.contains(&name)),
        only_transformers: false,
        exempt: &["gpt_oss"],
    },
    Row {
        keys: &["dtype", "torch_dtype"],
        expected: "the name of a type of floats in PyTorch",
        is_accepted: |value| value.is_null() || value.is_object() || value.as_str().is_some_and(|name| FLOATS.contains(&name)),
        only_transformers: true,
        exempt: &[],
    },
    Row {
        keys: &["dtype", "torch_dtype"],
        expected: "the name of a type in PyTorch",
        is_accepted: |value| value.as_str().is_none_or(|name| FLOATS.contains(&name) || ["float8_", "int", "uint"].iter().any(|start| name.starts_with(start))),
        only_transformers: false,
        exempt: &[],
    },
];

/// Keys of `ACT2FN` (`transformers/activations.py`).
const ACTIVATIONS: [&str; 24] = [
    "gelu",
    "gelu_10",
    "gelu_accurate",
    "gelu_fast",
    "gelu_new",
    "gelu_python",
    "gelu_python_tanh",
    "gelu_pytorch_tanh",
    "hardswish",
    "laplace",
    "leaky_relu",
    "linear",
    "mish",
    "prelu",
    "quick_gelu",
    "relu",
    "relu2",
    "relu6",
    "sigmoid",
    "silu",
    "sqrtsoftplus",
    "swish",
    "tanh",
    "xielu",
];
/// Names that other runtimes know (`vllm/model_executor/layers/activation.py`).
const OTHER_ACTIVATIONS: [&str; 4] = ["geglu", "swiglu", "swigluoai", "swiglustep"];
/// Names of types of floats that models have.
const FLOATS: [&str; 7] = ["float", "float16", "float32", "float64", "half", "double", "bfloat16"];

/// Keys of the rotary position embedding, which is one object or an object for each type of layers.
const ROPE: [&str; 2] = ["rope_parameters", "rope_scaling"];
/// Types of the rotary position embedding (`ROPE_INIT_FUNCTIONS` in `transformers/modeling_rope_utils.py`)
/// with their required keys; `su` is an older name of `longrope`.
const ROPE_TYPES: [(&str, &[&str]); 8] = [
    ("default", &[]),
    ("linear", &["factor"]),
    ("dynamic", &["factor"]),
    ("yarn", &["factor"]),
    ("longrope", &["short_factor", "long_factor"]),
    ("llama3", &["factor", "low_freq_factor", "high_freq_factor"]),
    ("proportional", &[]),
    ("su", &[]),
];
/// Types that other runtimes know (`vllm/model_executor/layers/rotary_embedding/__init__.py`).
const OTHER_ROPE_TYPES: [&str; 6] = ["mrope", "ntk", "deepseek_yarn", "deepseek_llama_scaling", "xdrope", "openpangu"];
/// Families that do not read the values, or convert them.
const OWN_ROPE: [&str; 5] = ["granitemoehybrid", "phi3", "qwen2_5_vl_vision", "qwen2_vl_vision", "qwen3_vl_vision"];

/// Types of layers (`ALLOWED_ATTN_LAYER_TYPES` in `transformers/configuration_utils.py`), with the older
/// names that transformers replaces, and `mlp` of Nemotron-H.
const LAYER_TYPES: [&str; 19] = [
    "attention",
    "chunked_attention",
    "compressed_sparse_attention",
    "conv",
    "deepseek_sparse_attention",
    "full_attention",
    "heavily_compressed_attention",
    "hybrid",
    "hybrid_sliding",
    "indexed_attention",
    "linear_attention",
    "mamba",
    "minimax_m3_sparse",
    "mlp",
    "moe",
    "qwen_sparse_attention",
    "reference_sliding_attention",
    "sliding_attention",
    "window_attention",
];

/// Families whose embeddings have no row for padding.
const WITHOUT_PADDING: [&str; 7] = ["gpt2", "gpt_neox", "mamba2", "mpnet", "mt5", "nemotron_h", "t5"];

fn is_integer(value: &Value) -> bool {
    value.is_i64() || value.is_u64()
}

fn is_size(value: &Value) -> bool {
    value.as_u64().is_some_and(|size| size > 0)
}

fn is_nonzero(value: &Value) -> bool {
    is_integer(value) && value.as_i64() != Some(0)
}

/// Whether the rows apply to a family. In families that this program does not run, values of the same keys
/// can have other types.
fn is_checked(model_type: &str) -> bool {
    arch::family(model_type).is_some_and(|family| family.graph.is_some())
}

/// The values of `config.json` that a runtime refuses. Only families that this program runs are checked, and
/// no configurations with their own code (`auto_map`), whose values can have other types.
pub(super) fn refused(config: &Map<String, Value>, model_type: &str, runtime: Runtime) -> Vec<Finding> {
    let has_own_code = config.get("auto_map").is_some_and(|classes| classes.get("AutoConfig").is_some());
    if has_own_code || !is_checked(model_type) {
        return Vec::new();
    }
    let is_strict = runtime == Runtime::Transformers;
    let mut found: BTreeMap<String, String> = BTreeMap::new();
    for row in ROWS.iter().filter(|row| (is_strict || !row.only_transformers) && !row.exempt.contains(&model_type)) {
        for key in row.keys {
            if let Some(value) = config.get(*key).filter(|value| !(row.is_accepted)(value)) {
                found.entry((*key).to_owned()).or_insert_with(|| format!("is {}, expected {}", shown(value), row.expected));
            }
        }
    }
    for key in ROPE.iter().filter(|_| !OWN_ROPE.contains(&model_type)) {
        let Some(value) = config.get(*key) else { continue };
        let nested = value.as_object().into_iter().flatten().filter(|(_, value)| value.is_object());
        let parts: Vec<(String, &Value)> = nested.map(|(part, value)| (format!("{key}.{part}"), value)).collect();
        let parts = if parts.is_empty() { vec![((*key).to_owned(), value)] } else { parts };
        found.extend(parts.into_iter().filter_map(|(key, value)| Some((key, rope(value, is_strict)?))));
    }
    if is_strict {
        found.extend(layer_types(config).map(|reason| ("layer_types".to_owned(), reason)));
        found.extend(padding(config, model_type).map(|reason| ("pad_token_id".to_owned(), reason)));
    }
    let finding =
        |(key, reason): (String, String)| Finding::new(key, format!("{reason}: {} refuses the configuration", runtime.name()), HINT).for_run(HINT_IN_RUN);
    let strict = if is_strict { [without_attention(config), heads(config, model_type)] } else { [None, None] };
    found.into_iter().map(finding).chain(strict.into_iter().flatten()).collect()
}

/// A number of heads that does not divide the width of the residual stream.
fn heads(config: &Map<String, Value>, model_type: &str) -> Option<Finding> {
    let [(heads_key, heads), (width_key, width)] = arch::indivisible_heads(model_type, config)?;
    let reason = format!("is {heads}, which does not divide `{width_key}` {width}: transformers refuses the configuration");
    Some(Finding::new(heads_key, reason, "use a number of heads that divides the width; when pruning, choose an amount that leaves a divisor"))
}

fn shown(value: &Value) -> String {
    let text = value.to_string();
    if text.chars().count() > 40 { text.chars().take(40).chain("…".chars()).collect() } else { text }
}

/// Why a configuration of the rotary position embedding is refused.
fn rope(value: &Value, is_strict: bool) -> Option<String> {
    if value.is_null() {
        return None;
    }
    let Some(values) = value.as_object() else { return Some(format!("is {}, expected an object or null", shown(value))) };
    let kind = values.get("rope_type").or_else(|| values.get("type"))?;
    let name = kind.as_str().unwrap_or_default();
    // Sections for the axes of images, which transformers converts.
    let is_known = |name: &str| values.contains_key("mrope_section") || (!is_strict && OTHER_ROPE_TYPES.contains(&name));
    let Some((_, required)) = ROPE_TYPES.iter().find(|(known, _)| *known == name) else {
        let known = || ROPE_TYPES.iter().map(|(known, _)| *known).filter(|known| *known != "su").collect::<Vec<_>>().join(", ");
        return (!is_known(name)).then(|| format!("has the `rope_type` {}, expected one of {}", shown(kind), known()));
    };
    let is_missing = |key: &&&str| match values.get(**key) {
        None => true,
        // transformers computes the factor of YaRN from the lengths.
        Some(Value::Null) => name != "yarn",
        Some(value) => value.is_string() || value.is_object(),
    };
    // Hunyuan has `alpha` instead of a factor.
    let missing = required.iter().find(is_missing).filter(|_| !values.contains_key("alpha"))?;
    Some(format!("has the `rope_type` `{name}`, but no number `{missing}`"))
}

/// Why the list of types of layers is refused.
fn layer_types(config: &Map<String, Value>) -> Option<String> {
    let types = config.get("layer_types").filter(|types| !types.is_null())?;
    let Some(list) = types.as_array() else { return Some(format!("is {}, expected a list or null", shown(types))) };
    if let Some(other) = list.iter().find(|kind| kind.as_str().is_none_or(|name| !LAYER_TYPES.contains(&name))) {
        return Some(format!("contains {}, expected types of layers, such as `full_attention`", shown(other)));
    }
    let count = config.get("num_hidden_layers").and_then(Value::as_u64).filter(|count| *count != list.len() as u64)?;
    Some(format!("has {} elements, but `num_hidden_layers` is {count}", list.len()))
}

/// A list of types of layers that store a state, none of which is attention: the cache of transformers counts
/// the tokens in the first attention layer.
fn without_attention(config: &Map<String, Value>) -> Option<Finding> {
    let stores_state = |kind: &&str| ["conv", "linear_attention", "mamba"].contains(kind);
    let attends = |kind: &&str| kind.starts_with("hybrid") || (kind.ends_with("attention") && !stores_state(kind));
    ["layer_types", "layers_block_type"].into_iter().find_map(|key| {
        let kinds: Vec<&str> = config.get(key)?.as_array()?.iter().filter_map(Value::as_str).collect();
        let fails = kinds.iter().any(stores_state) && !kinds.iter().any(attends);
        let reason = "contains no attention layer, and the cache of transformers fails without one";
        fails.then(|| Finding::new(key, reason, "retain an attention layer"))
    })
}

/// Why the token for padding is refused.
fn padding(config: &Map<String, Value>, model_type: &str) -> Option<String> {
    if UNVALIDATED_TOKENS.contains(&model_type) || WITHOUT_PADDING.contains(&model_type) {
        return None;
    }
    let (token, rows) = (config.get("pad_token_id")?.as_u64()?, config.get("vocab_size")?.as_u64()?);
    (token >= rows).then(|| format!("is {token}, but `vocab_size` is {rows}"))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::json;

    use super::*;

    fn keys(values: &Value, model_type: &str, runtime: Runtime) -> Vec<String> {
        refused(values.as_object().unwrap(), model_type, runtime).into_iter().map(|finding| finding.subject).collect()
    }

    /// Values with which transformers loads a model are accepted, and those with which it loads none are
    /// refused (`scripts/goldens config-values`).
    #[test]
    fn transformers_refuses_the_same_values() {
        // Builds without the feature `run` have no graphs, and refuse nothing.
        let is_checked = is_checked("llama");
        let goldens = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
        let read = |path: &str| serde_json::from_slice::<Value>(&std::fs::read(goldens.join(path)).unwrap()).unwrap();
        let table = read("config-values.json");
        let model = |row: &Value| {
            let [kind, name] = [&row[0], &row[1]].map(|text| text.as_str().unwrap().to_owned());
            (kind, read(&format!("models/{name}/config.json")).as_object().unwrap().clone())
        };
        let models: Vec<(String, Map<String, Value>)> = table["models"].as_array().unwrap().iter().map(model).collect();
        for (kind, config) in &models {
            assert_eq!(keys(&Value::Object(config.clone()), kind, Runtime::Transformers), Vec::<String>::new(), "{kind}");
        }
        let mut counts = [0; 2];
        for (key, rows) in table["values"].as_object().unwrap() {
            let marked = |row: &Value| row[0].as_array().unwrap().iter().map(|value| (value.clone(), row[1].as_str().unwrap().to_owned())).collect::<Vec<_>>();
            for (value, marks) in rows.as_array().unwrap().iter().flat_map(marked) {
                let mut is_refused_by_us = false;
                for ((kind, config), mark) in models.iter().zip(marks.chars()).filter(|(_, mark)| *mark != '-') {
                    let mut config = config.clone();
                    config.insert(key.clone(), value.clone());
                    let is_refused = keys(&Value::Object(config), kind, Runtime::Transformers).contains(key);
                    assert!(mark == '0' || !is_refused, "{kind}: `{key}` of {value} is accepted by transformers");
                    is_refused_by_us |= is_refused;
                    counts[usize::from(is_refused)] += 1;
                }
                assert!(marks.contains('1') || is_refused_by_us == is_checked, "`{key}` of {value} is refused by transformers");
            }
        }
        assert!(counts.iter().all(|count| *count > 1000) || !is_checked, "{counts:?}");
    }

    #[test]
    fn values_are_refused_by_the_runtimes_that_do_not_load_them() {
        // Builds without the feature `run` have no graphs, and refuse nothing.
        let is_checked = is_checked("llama");
        for (values, everywhere, transformers) in [
            (json!({ "hidden_size": "16" }), true, true),
            (json!({ "hidden_size": 16.0 }), true, true),
            (json!({ "vocab_size": 0 }), true, true),
            (json!({ "num_attention_heads": 0 }), true, true),
            (json!({ "num_attention_heads": 6, "hidden_size": 32 }), false, true),
            (json!({ "num_attention_heads": 4, "hidden_size": 32 }), false, false),
            (json!({ "hidden_act": "own", "auto_map": { "AutoConfig": "configuration_own.Own" } }), false, false),
            (json!({ "num_hidden_layers": null }), true, true),
            (json!({ "num_key_value_heads": null }), false, false),
            (json!({ "hidden_act": "sily" }), true, true),
            (json!({ "hidden_act": "swigluoai" }), false, true),
            (json!({ "dtype": "float31" }), true, true),
            (json!({ "torch_dtype": "int8" }), false, true),
            (json!({ "dtype": null }), false, false),
            (json!({ "attention_bias": 0 }), false, true),
            (json!({ "tie_word_embeddings": "yes" }), false, true),
            (json!({ "rms_norm_eps": 1 }), false, true),
            (json!({ "rms_norm_eps": 1e-5 }), false, false),
            (json!({ "bos_token_id": [1] }), false, true),
            (json!({ "eos_token_id": [1] }), false, false),
            (json!({ "rope_scaling": { "type": "linear" } }), true, true),
            (json!({ "rope_scaling": { "type": "linear", "factor": 2.0 } }), false, false),
            (json!({ "rope_parameters": { "rope_type": "spiral", "factor": 2.0 } }), true, true),
            (json!({ "rope_parameters": { "rope_type": "ntk", "factor": 2.0 } }), false, true),
            (json!({ "rope_parameters": { "rope_theta": 1e4 } }), false, false),
            (json!({ "rope_scaling": { "type": "mrope", "mrope_section": [1, 1, 2] } }), false, false),
            (json!({ "rope_scaling": "linear" }), true, true),
            (json!({ "rope_scaling": null }), false, false),
            (json!({ "num_hidden_layers": 2, "layer_types": ["full_attention"] }), false, true),
            (json!({ "layer_types": ["full_attention", "foo"] }), false, true),
            (json!({ "layer_types": ["attention", "mamba"] }), false, false),
            (json!({ "layer_types": ["conv", "linear_attention"] }), false, true),
            (json!({ "layer_types": ["conv", "full_attention"] }), false, false),
            (json!({ "layers_block_type": ["linear_attention", "mlp"] }), false, true),
            (json!({ "pad_token_id": 48, "vocab_size": 48 }), false, true),
            (json!({ "pad_token_id": 47, "vocab_size": 48 }), false, false),
        ] {
            for (runtime, expected) in [(Runtime::Vllm, everywhere), (Runtime::Sglang, everywhere), (Runtime::Transformers, transformers)] {
                let found = keys(&values, "llama", runtime);
                assert_eq!(found.len(), usize::from(expected && is_checked), "{values}: {runtime:?}: {found:?}");
                assert_eq!(keys(&values, "no-family", runtime), Vec::<String>::new());
            }
        }
        let nested = json!({ "rope_parameters": { "full_attention": { "rope_type": "default" }, "sliding_attention": { "rope_type": "spiral" } } });
        let expected: &[&str] = if is_checked { &["rope_parameters.sliding_attention"] } else { &[] };
        assert_eq!(keys(&nested, "gemma3_text", Runtime::Vllm), expected);
        // The heads of Qwen3 have a width of their own.
        let heads = json!({ "num_attention_heads": 6, "hidden_size": 32 });
        assert_eq!(keys(&heads, "qwen3", Runtime::Transformers), Vec::<String>::new());
        assert_eq!(keys(&json!({ "pad_token_id": 48, "vocab_size": 48 }), "gpt2", Runtime::Transformers), Vec::<String>::new());
    }
}
