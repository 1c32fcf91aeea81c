//! Conversion of GGUF metadata to `config.json`.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value as Json, json};

use super::values::{HEADS, QUERY_RANK, Values, factor_list};
use super::{expert_groups, layer_patterns, long_rope, recurrent, single_parts};
use crate::arch::{ATTENTION_MULTIPLIER, Divisors, GgufFamily, LAYER_PATTERN, LOGIT_DIVISOR, Recurrent, Windows};
use crate::error::{Error, Result};
use crate::store::gguf::Value;
use crate::store::{DType, Weight};

/// Tensor with divisors of the rotary frequencies.
pub(super) const FACTORS: &str = "rope_freqs.weight";

/// Parameters of the RoPE scaling of Llama 3.1 and 3.2, and of Llama 4: low and high frequency factor, and
/// original context length.
const LLAMA3: [[f64; 3]; 2] = [[1.0, 4.0, 8192.0], [1.0, 1.0, 8192.0]];

/// Builds the configuration of a family's model from the metadata and tensors of a file.
pub(super) fn config((model_type, family): (&str, &GgufFamily), values: &mut Values, tensors: &BTreeMap<String, Weight>) -> Result<Map<String, Json>> {
    let mut config = Map::new();
    let mut set = |key: &str, value: Json| drop(config.insert(key.to_owned(), value));
    let (hidden, layers, heads) = (values.required("embedding_length")?, values.required("block_count")?, values.required("attention.head_count")?);
    let key = values.own("feed_forward_length");
    let single = if family.recurrent == Recurrent::SingleParts { Some(single_parts::read(family, values, layers)?) } else { None };
    let inner = match &single {
        Some(single) => single.neurons,
        None if family.has_optional_neurons() => values.size(&key)?,
        None => Some(values.required("feed_forward_length")?),
    };
    let without_heads = if family.recurrent.lists_heads() { Some(layers_without_heads(values, layers, family.recurrent)?) } else { None };
    let groups = match (&without_heads, &single) {
        (Some((groups, _)), _) => *groups,
        (None, Some(single)) => single.groups,
        (None, None) => values.size(&values.own(HEADS))?.unwrap_or(heads),
    };
    let [key_length, value_length, rotary] = ["attention.key_length", "attention.value_length", "rope.dimension_count"].map(|key| values.own(key));
    let (mut key_width, mut value_width, rotary_width) = (values.size(&key_length)?, values.size(&value_length)?, values.size(&rotary)?);
    if family.is_latent {
        let widths = latent_widths(values, groups, [key_width, value_width, rotary_width])?;
        widths.iter().for_each(|(key, width)| set(key, json!(width)));
        // Queries without low rank, as in DeepSeek-V2-Lite.
        let rank = values.size(&values.own(QUERY_RANK.0))?;
        set(QUERY_RANK.1, json!(rank));
        // Positions depend only on the rotated part of heads.
        (key_width, value_width) = (rotary_width, None);
    }
    let groups = if family.is_latent { heads } else { groups };
    let head_dim = key_width.or(hidden.checked_div(heads)).filter(|width| *width > 0).ok_or_else(|| values.wrong(format!("`{key_length}` is zero")))?;
    let whole_rotary = rotary_width.filter(|_| family.partial_rotary.is_none());
    for (key, width) in [(&value_length, value_width), (&rotary, whole_rotary)] {
        if width.is_some_and(|width| width != head_dim) {
            return Err(Error::Unsupported {
                what: format!("{}: `{key}` of {} with heads of {head_dim}", values.path.display(), width.unwrap_or(0)),
                hint: "only heads with equal key and value widths and full rotary embeddings are supported".into(),
            });
        }
    }
    let rows = tensors.get("token_embd.weight").and_then(|weight| weight.shape.first().copied());
    let vocabulary = rows.ok_or_else(|| values.wrong("has no tensor `token_embd.weight`".into()))?;
    set("architectures", json!([family.class]));
    set("model_type", json!(model_type));
    set("hidden_size", json!(hidden));
    if let Some(inner) = inner {
        set(family.neurons, json!(inner));
    }
    set("num_hidden_layers", json!(layers));
    set("num_attention_heads", json!(heads));
    set("num_key_value_heads", json!(groups));
    // Without a width in the file, llama.cpp rounds the quotient down.
    if !family.is_latent && (family.head_dim.is_some() || heads.checked_mul(head_dim) != Some(hidden)) {
        set("head_dim", json!(head_dim));
    }
    if let Some((_, types)) = without_heads {
        set("layer_types", types);
    }
    if let Some(single) = single {
        set(LAYER_PATTERN, json!(single.pattern));
    }
    if family.has_group_methods {
        expert_groups::config(values)?.into_iter().for_each(|(key, value)| set(key, value));
    }
    if family.recurrent == Recurrent::ShortConvolution {
        set("block_auto_adjust_ff_dim", json!(false));
    }
    if let Some(experts) = &family.experts {
        set(experts.count, json!(values.required("expert_count")?));
        set("num_experts_per_tok", json!(values.required("expert_used_count")?));
        if let Some(key) = experts.inner {
            let mut down = tensors.iter().filter(|(name, _)| name.ends_with(".ffn_down_exps.weight"));
            let stored = down.next().and_then(|(_, weight)| weight.shape.last().copied());
            let width = values.size(&values.own("expert_feed_forward_length"))?.or(stored.map(|width| width as u64));
            set(key, json!(width.ok_or_else(|| values.wrong("does not specify the hidden size of experts".into()))?));
        }
        if let Some(normalized) = experts.normalized {
            set("norm_topk_prob", json!(normalized));
            set("decoder_sparse_step", json!(1));
        }
        if experts.shared {
            let stored = tensors.get("blk.0.ffn_down_shexp.weight").and_then(|weight| weight.shape.last().copied());
            let width = values.size(&values.own("expert_shared_feed_forward_length"))?.or(stored.map(|width| width as u64));
            set("shared_expert_intermediate_size", json!(width.ok_or_else(|| values.wrong("does not specify the hidden size of the shared expert".into()))?));
        }
    }
    set("vocab_size", json!(vocabulary));
    let context = values.size(&values.own("context_length"))?;
    if let Some(length) = context {
        set("max_position_embeddings", json!(length));
    }
    set(family.activation.0, json!(family.activation.1));
    if family.activation.0 != "hidden_act" {
        set("hidden_act", json!(family.activation.1));
    }
    for setting in [&family.epsilon].into_iter().chain(family.settings) {
        let value = values.setting(setting)?;
        if let Some(expected) = family.required_instead(setting.key, &value) {
            return Err(Error::Unsupported {
                what: format!("{}: `{}` of {value}", values.path.display(), values.own(setting.gguf)),
                hint: format!("only {expected} is supported for `{model_type}`"),
            });
        }
        set(setting.key, value);
    }
    for (key, expected) in family.constants {
        let key = values.own(key);
        let found = values.size(&key)?;
        // The meaning of a missing key is one group, or a softmax.
        if found.is_none() && family.is_latent && *expected != 1 {
            return Err(values.wrong(format!("`{key}` is missing: only DeepSeek-V2, V3 and similar models are supported, whose value is 1 or {expected}")));
        }
        if let Some(other) = found.filter(|value| value != expected) {
            return Err(Error::Unsupported {
                what: format!("{}: `{key}`, which is {other}", values.path.display()),
                hint: format!("it must be {expected} for the architecture `{}`", family.architecture),
            });
        }
    }
    // llama.cpp rotates whole heads if the key is missing.
    if let Some((key, _)) = family.partial_rotary {
        set(key, json!(rotary_width.map_or(1.0, |width| width as f64 / head_dim as f64)));
    }
    let theta = values.number(&values.own("rope.freq_base"))?.unwrap_or(10_000.0);
    // llama.cpp omits the rotary embedding of families with multipliers if this key is false.
    let finetuned = values.own("rope.scaling.finetuned");
    let has_positions = values.flag(&finetuned)? != Some(false);
    if family.recurrent.has_state_space_sizes() {
        set("position_embedding_type", json!(if has_positions { "rope" } else { "nope" }));
    } else if !has_positions && !family.multipliers.is_empty() {
        return Err(Error::Unsupported {
            what: format!("{}: `{finetuned}` of false", values.path.display()),
            hint: format!("the model has no position embeddings, which is not supported for the architecture `{}`", family.architecture),
        });
    }
    let is_unused = |name: &str| family.divisors() != if name == FACTORS { Divisors::Single } else { Divisors::ShortAndLong };
    let mut divisors = [FACTORS].into_iter().chain(long_rope::TENSORS.map(|(name, _)| name));
    if let Some(name) = divisors.find(|name| tensors.contains_key(*name) && is_unused(name)) {
        return Err(values.wrong(format!("has `{name}`, which is not supported for the architecture `{}`", family.architecture)));
    }
    let multiplier_key = values.own("rope.scaling.yarn_log_multiplier");
    let scale = if family.is_latent { values.number(&multiplier_key)?.filter(|scale| *scale != 0.0) } else { None };
    if family.divisors() == Divisors::ShortAndLong {
        let context = context.ok_or_else(|| values.wrong("does not specify the length of the context".into()))?;
        long_rope::config(values, tensors, rotary_width.unwrap_or(head_dim), context)?.into_iter().for_each(|(key, value)| set(key, value));
    }
    let mut scaling = scaling(values, tensors, theta, head_dim)?;
    // llama.cpp scales attention scores even without this key.
    if family.is_latent && scaling.as_ref().is_some_and(|scaling| scale.is_none() || scaling.get("rope_type").is_none_or(|kind| kind != "yarn")) {
        return Err(Error::Unsupported {
            what: format!("{}: a rope scaling other than `yarn`, or without `{multiplier_key}`,", values.path.display()),
            hint: format!("it changes attention scores in the architecture `{}`; convert the original checkpoint again", family.architecture),
        });
    }
    if let Some(object) = scaling.as_mut().and_then(Json::as_object_mut) {
        if let Some(scale) = scale {
            // Ten times the stored value, without its rounding to 32 bits.
            let scale = json!((scale * 1e7).round() / 1e6);
            object.extend(["mscale", "mscale_all_dim"].map(|key| (key.to_owned(), scale.clone())));
        }
        if let Some(truncate) = family.yarn_truncate {
            object.insert("truncate".to_owned(), json!(truncate));
        }
    }
    let local_theta = if family.has_rope_groups { values.number(&values.own("rope.freq_base_swa"))?.unwrap_or(theta) } else { theta };
    if family.has_rope_groups && (theta != family.theta || local_theta != theta) {
        set("rope_parameters", rope_groups(scaling, theta, local_theta));
    } else {
        set("rope_theta", json!(theta));
        if let Some(scaling) = scaling {
            set("rope_scaling", scaling);
        }
    }
    for (gguf_key, key) in family.multipliers {
        set(key, json!(multiplier(values, gguf_key, head_dim)?));
    }
    if family.windows == Windows::Ignored {
        let window = values.size(&values.own("attention.sliding_window"))?.filter(|window| *window > 0);
        set("sliding_window", json!(window));
    } else if !matches!(family.windows, Windows::None | Windows::Chunks) {
        let window = values.size(&values.own("attention.sliding_window"))?.or(family.default_window).filter(|window| *window > 0);
        set("sliding_window", json!(window.ok_or_else(|| values.wrong(format!("`{}` is missing", values.own("attention.sliding_window"))))?));
        let pattern = values.own("attention.sliding_window_pattern");
        if let Some(value) = values.take(&pattern) {
            set(
                "layer_types",
                layer_types(&value, layers).ok_or_else(|| values.wrong(format!("`{pattern}` is {value}, which is not a pattern for {layers} layers")))?,
            );
        }
    }
    if family.has_query_scalar {
        let by_hidden_size = family.hidden_size_scaled_layers == Some(layers);
        set("query_pre_attn_scalar", json!(if by_hidden_size { hidden.checked_div(heads).unwrap_or(0) } else { head_dim }));
        let [attention_cap, logit_cap] = ["attn_logit_softcapping", "final_logit_softcapping"].map(|key| values.own(key));
        let (attention_cap, logit_cap) = (values.number(&attention_cap)?, values.number(&logit_cap)?);
        set("attn_logit_softcapping", json!(attention_cap.or(family.default_soft_caps.map(|[cap, _]| cap))));
        set("final_logit_softcapping", json!(logit_cap.or(family.default_soft_caps.map(|[_, cap]| cap))));
        if family.has_local_rope {
            let local = values.number(&values.own("rope.freq_base_swa"))?;
            set("rope_local_base_freq", json!(local.unwrap_or(10_000.0)));
        }
    }
    let has = |name: &str| tensors.contains_key(name);
    // The first layers of hybrid models may be of another kind.
    let parts: BTreeSet<&str> = tensors.keys().filter_map(|name| Some(name.strip_prefix("blk.")?.split_once('.')?.1)).collect();
    for (key, tensor) in family.flags {
        set(key, json!(parts.contains(tensor)));
    }
    for (key, tensor) in family.absences {
        set(key, json!(!has(&format!("blk.0.{tensor}"))));
    }
    set("tie_word_embeddings", json!(!has("output.weight")));
    // Defaults of SentencePiece vocabularies.
    let is_sentencepiece = values.has_text("tokenizer.ggml.model", "llama");
    for (key, name, default) in [("bos_token_id", "bos", Some(1)), ("eos_token_id", "eos", Some(2)), ("pad_token_id", "padding", None)] {
        if let Some(id) = values.size(&format!("tokenizer.ggml.{name}_token_id"))?.or(default.filter(|_| is_sentencepiece)) {
            set(key, json!(id));
        }
    }
    let matrix = tensors.values().find(|weight| weight.shape.len() == 2).map_or(DType::F32, |weight| weight.dtype);
    set(
        "torch_dtype",
        json!(match matrix {
            DType::F16 => "float16",
            DType::BF16 => "bfloat16",
            _ => "float32",
        }),
    );
    if family.windows == Windows::Chunks {
        let (key, value) = layer_patterns::unit_norm(&config);
        config.insert(key.to_owned(), value);
    }
    config.extend(recurrent::config(family, values, &config, rotary_width.unwrap_or(head_dim))?.into_iter().map(|(key, value)| (key.to_owned(), value)));
    Ok(config)
}

/// The number of key-value heads of layers with attention, and the types of all layers.
fn layers_without_heads(values: &mut Values, layers: u64, recurrent: Recurrent) -> Result<(u64, Json)> {
    let (groups, has_heads) = values.of_layers(HEADS, layers)?;
    if groups == 0 {
        return Err(values.wrong(format!("`{}` is zero for all layers", values.own(HEADS))));
    }
    let [without, with] = if recurrent.has_state_space_sizes() { ["mamba", "attention"] } else { ["conv", "full_attention"] };
    Ok((groups, has_heads.iter().map(|has_heads| if *has_heads { with } else { without }).collect()))
}

/// Widths of heads whose keys and values are computed from latent vectors, by their keys in `config.json`.
/// llama.cpp multiplies queries with the latent vectors, as if all heads shared one key.
fn latent_widths(values: &mut Values, groups: u64, [key, value, rotary]: [Option<u64>; 3]) -> Result<[(&'static str, u64); 3]> {
    let (whole_key, rank) = (values.own("attention.key_length_mla"), value.unwrap_or(0));
    if groups != 1 {
        return Err(Error::Unsupported {
            what: format!("{}: latent attention with {groups} key heads", values.path.display()),
            hint: "the file is from an old version of llama.cpp; convert the original checkpoint again".into(),
        });
    }
    let (Some(rotary), Some(whole)) = (rotary, values.size(&whole_key)?) else {
        return Err(values.wrong(format!("`{whole_key}` or the rotary width is missing")));
    };
    let plain = whole.checked_sub(rotary).filter(|plain| *plain > 0 && rank.checked_add(rotary) == key);
    let plain = plain.ok_or_else(|| values.wrong(format!("`{whole_key}` of {whole}, a rotary width of {rotary} and keys of {key:?} do not match")))?;
    Ok([("qk_rope_head_dim", rotary), ("qk_nope_head_dim", plain), ("qk_head_dim", whole)])
}

/// A factor on part of a model. As in llama.cpp, zero has the meaning of a missing value: attention scores
/// are then divided by the square root of the head width, and embeddings and residuals are not scaled.
fn multiplier(values: &mut Values, gguf_key: &str, head_dim: u64) -> Result<f64> {
    let key = values.own(gguf_key);
    match values.number(&key)?.filter(|factor| *factor != 0.0) {
        Some(factor) => Ok(factor),
        None if gguf_key == ATTENTION_MULTIPLIER => Ok(1.0 / (head_dim as f64).sqrt()),
        None if gguf_key == LOGIT_DIVISOR => Err(values.wrong(format!("`{key}` is missing or zero"))),
        None => Ok(1.0),
    }
}

/// Maximum number of layers.
const MAX_LAYERS: u64 = 1 << 16;

/// Attention type of each layer: from the period of layers without a window, or from a list.
fn layer_types(pattern: &Value, layers: u64) -> Option<Json> {
    let named = |slides: bool| if slides { "sliding_attention" } else { "full_attention" };
    let slides: Vec<bool> = match pattern {
        Value::Unsigned(every) if *every > 0 && layers < MAX_LAYERS => (1..=layers).map(|number| !number.is_multiple_of(*every)).collect(),
        Value::Bools(list) => list.clone(),
        _ => return None,
    };
    (slides.len() as u64 == layers).then(|| slides.into_iter().map(named).collect())
}

/// RoPE scaling.
fn scaling(values: &mut Values, tensors: &BTreeMap<String, Weight>, theta: f64, head_dim: u64) -> Result<Option<Json>> {
    let key = |values: &Values, end: &str| values.own(&format!("rope.scaling.{end}"));
    let kind = values.text(&key(values, "type"))?;
    let factor = values.number(&key(values, "factor"))?.or(values.number(&values.own("rope.scale_linear"))?);
    let original = values.size(&key(values, "original_context_length"))?.filter(|length| *length > 0);
    let required = |values: &Values, value: Option<f64>| value.ok_or_else(|| values.wrong(format!("`{}` is missing", key(values, "factor"))));
    let scaling = match (kind.as_deref(), factor) {
        // llama.cpp does not scale by a factor of 0.
        (Some("none"), _) | (None, None | Some(1.0)) | (Some("linear") | None, Some(0.0)) => None,
        (Some("linear") | None, factor) => Some(json!({ "rope_type": "linear", "factor": required(values, factor)? })),
        (Some("yarn"), factor) => {
            let mut scaling = Map::from_iter([("rope_type".to_owned(), json!("yarn")), ("factor".to_owned(), json!(required(values, factor)?))]);
            scaling.extend(original.map(|original| ("original_max_position_embeddings".to_owned(), json!(original))));
            for (name, end) in [("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")] {
                scaling.extend(values.number(&key(values, end))?.map(|number| (name.to_owned(), json!(number))));
            }
            // llama.cpp replaces this factor by one that it computes from `factor`.
            let attention = key(values, "yarn_attn_factor");
            values.take(&attention);
            Some(Json::Object(scaling))
        }
        (Some(other), _) => {
            return Err(Error::Unsupported {
                what: format!("{}: rope scaling `{other}`", values.path.display()),
                hint: "supported: none, linear, yarn, and divisors in `rope_freqs.weight`".into(),
            });
        }
    };
    match (tensors.get(FACTORS), scaling) {
        (None, scaling) => Ok(scaling),
        (Some(_), Some(_)) => Err(values.wrong(format!("has both `{FACTORS}` and `{}`, but only one may define the RoPE scaling", key(values, "type")))),
        (Some(factors), None) => factors_as_scaling(&factor_list(values, FACTORS, factors, head_dim)?, theta).map(Some),
    }
}

/// Rotary embeddings of both types of layers. Scaling applies only to layers without a window.
fn rope_groups(scaling: Option<Json>, theta: f64, local_theta: f64) -> Json {
    let mut global = scaling.unwrap_or_else(|| json!({ "rope_type": "default" }));
    global.as_object_mut().into_iter().for_each(|global| drop(global.insert("rope_theta".to_owned(), json!(theta))));
    json!({ "full_attention": global, "sliding_attention": { "rope_type": "default", "rope_theta": local_theta } })
}

/// The RoPE scaling of these divisors: `llama3` if they match it, otherwise explicit factors as `longrope`.
fn factors_as_scaling(list: &[f64], theta: f64) -> Result<Json> {
    let factors: Vec<f32> = list.iter().map(|factor| *factor as f32).collect();
    let factor = factors.iter().fold(1f32, |max, factor| max.max(*factor));
    let is_same = |[low, high, original]: &[f64; 3]| {
        let expected = llama3_factors([f64::from(factor), *low, *high, *original], theta, factors.len());
        factors.iter().zip(&expected).all(|(found, expected)| (found - expected).abs() <= 1e-4 * expected.abs())
    };
    if let Some([low, high, original]) = LLAMA3.into_iter().find(is_same).filter(|_| factor > 1.0) {
        return Ok(
            json!({ "rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high, "original_max_position_embeddings": original as u64 }),
        );
    }
    Ok(json!({ "rope_type": "longrope", "short_factor": list, "long_factor": list, "attention_factor": 1.0, "factor": 1.0 }))
}

/// Frequency divisors of Llama 3's RoPE scaling, as written by llama.cpp's converter. The parameters are
/// factor, low and high frequency factor, and original context length.
pub fn llama3_factors(parameters: [f64; 4], theta: f64, count: usize) -> Vec<f32> {
    let [factor, low, high, original] = parameters;
    let divisor = |pair: usize| {
        let wavelength = 2.0 * std::f64::consts::PI * theta.powf(pair as f64 / count as f64);
        if wavelength < original / high {
            1.0
        } else if wavelength > original / low {
            factor
        } else {
            let smooth = (original / wavelength - low) / (high - low);
            1.0 / ((1.0 - smooth) / factor + smooth)
        }
    };
    (0..count).map(|pair| divisor(pair) as f32).collect()
}
