//! Conversion of `config.json` to GGUF metadata.

use serde_json::Value as Json;

use super::config::{FACTORS, llama3_factors};
use super::expert_groups;
use super::layer_patterns;
use super::long_rope;
use super::reader::Reader;
use super::recurrent;
use super::single_parts;
use super::values::{HEADS, QUERY_RANK};
use crate::arch::{self, Divisors, GgufFamily, Recurrent, Windows};
use crate::error::{Error, Result};
use crate::model::Model;
use crate::store::gguf::Value;

/// Metadata of a file, in order.
pub type Keys = Vec<(String, Value)>;

/// Metadata of a model, without its vocabulary.
pub struct Metadata {
    /// The family, with its tensor names and metadata keys.
    pub family: &'static GgufFamily,
    /// Number of layers.
    pub layers: usize,
    /// Number of key-value heads.
    pub key_value_heads: usize,
    /// Number of experts of a layer; zero for families without experts.
    pub experts: usize,
    /// Values by key.
    pub values: Keys,
    /// Divisors of the rotary frequencies, by the names of their tensors.
    pub factors: Vec<(&'static str, Vec<f32>)>,
    /// What the format cannot express.
    pub notes: Vec<String>,
}

/// Required sizes: GGUF key without the architecture, and key of `config.json`.
const SIZES: [(&str, &str); 4] = [
    ("vocab_size", "vocab_size"),
    ("context_length", "max_position_embeddings"),
    ("embedding_length", "hidden_size"),
    ("attention.head_count", "num_attention_heads"),
];

/// Keys that GGUF cannot represent, with their neutral values; null is always neutral.
const NEUTRAL: [(&str, &str); 6] = [
    ("is_causal", "true"),
    ("partial_rotary_factor", "1.0"),
    ("use_bidirectional_attention", "false"),
    ("auto_map", "{}"),
    ("use_sliding_window", "false"),
    ("pruned_heads", "{}"),
];

/// Key of the number of shared experts.
const SHARED: &str = "n_shared_experts";

/// Builds the GGUF metadata of a model.
pub fn describe(model: &Model) -> Result<Metadata> {
    let kind = model.config.model_type();
    let (described, family) = arch::family(kind).and_then(|described| Some((described, described.gguf?))).ok_or_else(|| {
        let has_tower = arch::has_tower(kind);
        let hint = if has_tower {
            "files of llama.cpp have the language model without the vision tower: use `extract-language-model` first".to_owned()
        } else {
            format!("supported: {}", GgufFamily::model_types())
        };
        Error::Unsupported { what: format!("gguf: model_type `{kind}`"), hint }
    })?;
    let has = |family: &GgufFamily, is_part: fn(&str) -> bool| model.weights.by_name.keys().any(|name| family.to_gguf(name).is_some_and(|name| is_part(&name)));
    let family = family.without_experts.filter(|_| !has(family, GgufFamily::is_router)).unwrap_or(family);
    let family = family.without_recurrent.filter(|_| !has(family, GgufFamily::is_filter)).unwrap_or(family);
    let reader = Reader { model, family };
    let mut notes = Vec::new();
    check(&reader, &mut notes)?;
    let mut own = Vec::new();
    for (gguf_key, key) in SIZES {
        own.push((gguf_key, Value::Unsigned(reader.required(key)?)));
    }
    let layers = reader.layers()?;
    own.push(("block_count", Value::Unsigned(layers)));
    let is_single = family.recurrent == Recurrent::SingleParts;
    // Models without dense networks may not specify it.
    if !is_single && (!family.has_optional_neurons() || reader.size(family.neurons)?.is_some()) {
        own.push(("feed_forward_length", Value::Unsigned(reader.stored_neurons().map_or_else(|| reader.required(family.neurons), Ok)?)));
    }
    let (hidden, heads) = (reader.required("hidden_size")?, reader.required("num_attention_heads")?);
    let key_value_heads = reader.groups()?;
    let groups = if family.is_latent { 1 } else { key_value_heads };
    if is_single {
        own.extend(single_parts::describe(&reader, layers, groups)?);
        notes.push(single_parts::NOTE.to_owned());
    } else {
        own.push((HEADS, reader.groups_of_layers(groups)?.map_or(Value::Unsigned(groups), Value::Integers)));
    }
    for setting in [&family.epsilon].into_iter().chain(family.settings) {
        own.push((setting.gguf, reader.setting(setting)?));
    }
    own.extend(family.constants.iter().map(|(key, value)| (*key, Value::Unsigned(*value))));
    notes.extend(expert_groups::describe(&reader, &mut own)?);
    let mut expert_count = 0;
    if let Some(experts) = &family.experts {
        expert_count = reader.required(described.experts_key(model.config.values()).unwrap_or(experts.count))?;
        own.push(("expert_count", Value::Unsigned(expert_count)));
        own.push(("expert_used_count", Value::Unsigned(reader.required("num_experts_per_tok")?)));
        if let Some(key) = experts.inner {
            own.push(("expert_feed_forward_length", Value::Unsigned(reader.required(key)?)));
        }
        if experts.shared {
            own.push(("expert_shared_feed_forward_length", Value::Unsigned(reader.required("shared_expert_intermediate_size")?)));
        }
    }
    let implied = hidden.checked_div(heads).unwrap_or(hidden);
    let head_dim = match family.is_latent {
        true => reader.required("qk_rope_head_dim")?,
        false => reader.size("head_dim")?.unwrap_or(family.head_dim.unwrap_or(implied)),
    };
    if family.is_latent {
        own.extend(latent_widths(&reader, heads, head_dim)?.into_iter().map(|(key, width)| (key, Value::Unsigned(width))));
    } else {
        require_head_shapes(model, [if family.has_query_gate { heads.saturating_mul(2) } else { heads }, groups], head_dim)?;
    }
    if family.has_implied_heads && heads.checked_mul(head_dim) != Some(hidden) {
        let hint = format!("llama.cpp supports only `hidden_size / num_attention_heads` for `{}`", family.architecture);
        return Err(reader.refused(&format!("heads of {head_dim} elements"), hint));
    }
    if !family.is_latent && (family.head_dim.is_some() || head_dim != implied) {
        own.extend(["attention.key_length", "attention.value_length"].map(|key| (key, Value::Unsigned(head_dim))));
    }
    if family.divisors() == Divisors::Single || family.interleaved_rope || family.is_latent || family.partial_rotary.is_some() {
        own.push(("rope.dimension_count", Value::Unsigned(reader.rotary_width(head_dim)?)));
    }
    own.extend(recurrent::describe(&reader, reader.rotary_width(head_dim)?)?);
    let Positions { theta, local_theta, scaling } = positions(&reader, head_dim)?;
    own.push(("rope.freq_base", Value::Float(theta)));
    own.extend(local_theta.map(|theta| ("rope.freq_base_swa", Value::Float(theta))));
    let mut factors = Vec::new();
    match scaling {
        None => {}
        Some(Scaling::Named { kind, factor, more }) => {
            if family.yarn_truncate.is_some() && kind == "yarn" {
                notes.push(
                    "llama.cpp rounds the limits of the frequencies that `yarn` scales, unlike `truncate` of false in config.json: results differ slightly"
                        .to_owned(),
                );
            }
            own.extend([("rope.scaling.type", Value::Text(kind.to_owned())), ("rope.scaling.factor", Value::Float(factor))]);
            own.extend(more);
        }
        Some(Scaling::Llama3(_)) if family.divisors() != Divisors::Single => {
            return Err(reader.refused("rope scaling `llama3`", format!("llama.cpp does not support it for `{}`", family.architecture)));
        }
        Some(Scaling::Llama3(parameters)) => factors.push((FACTORS, llama3_factors(parameters, theta, (head_dim / 2) as usize))),
    }
    if family.divisors() == Divisors::ShortAndLong {
        let mut found = long_rope::describe(&reader, reader.rope_scaling(), reader.rotary_width(head_dim)?)?;
        own.append(&mut found.keys);
        factors.append(&mut found.factors);
    }
    for (gguf_key, key) in family.multipliers {
        let factor = reader.number(key)?.unwrap_or(1.0);
        if factor == 0.0 {
            return Err(reader.refused(&format!("`{key}` of 0"), "in GGUF files, zero means that the value is missing"));
        }
        own.push((gguf_key, Value::Float(factor)));
    }
    if family.windows == Windows::Ignored {
        let window = reader.size("sliding_window")?;
        own.push(("attention.sliding_window", Value::Unsigned(window.unwrap_or(0))));
        notes.extend(
            window
                .map(|window| format!("llama.cpp ignores the sliding window ({window} tokens) of `{}`: results differ for longer texts", family.architecture)),
        );
    } else if !matches!(family.windows, Windows::None | Windows::Chunks) {
        let window = reader.size("sliding_window")?.or(family.default_window).unwrap_or(4096);
        own.push(("attention.sliding_window", Value::Unsigned(window)));
        own.extend(window_pattern(&reader)?.map(|pattern| ("attention.sliding_window_pattern", Value::Bools(pattern))));
    }
    if family.has_query_scalar {
        let caps = family.default_soft_caps;
        for (key, default) in [("attn_logit_softcapping", caps.map(|[cap, _]| cap)), ("final_logit_softcapping", caps.map(|[_, cap]| cap))] {
            let default = default.filter(|_| !model.config.get(key).is_some_and(Json::is_null));
            match reader.number(key)?.or(default) {
                Some(cap) if caps.is_some() || key == "final_logit_softcapping" => own.push((key, Value::Float(cap))),
                None if caps.is_none() => {}
                other => {
                    let value = other.map_or("null".into(), |cap| cap.to_string());
                    return Err(reader.refused(&format!("`{key}` of {value}"), format!("llama.cpp does not support it for `{}`", family.architecture)));
                }
            }
        }
    }
    let metadata = &model.weights.metadata;
    let name = model.path.file_stem().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let mut values =
        vec![("general.architecture".to_owned(), Value::Text(family.architecture.into())), ("general.type".to_owned(), Value::Text("model".into()))];
    if !metadata.contains_key("general.name") {
        values.push(("general.name".to_owned(), Value::Text(name)));
    }
    let carried = metadata.iter().filter(|(key, _)| key.starts_with("general."));
    values.extend(carried.map(|(key, text)| {
        let list = ["general.tags", "general.languages"].contains(&key.as_str());
        let value = match text.parse() {
            _ if list => Value::Texts(text.split(", ").map(str::to_owned).collect()),
            Ok(number) if key.ends_with(".count") => Value::Unsigned(number),
            _ => Value::Text(text.clone()),
        };
        (key.clone(), value)
    }));
    values.extend(own.into_iter().map(|(key, value)| (format!("{}.{key}", family.architecture), value)));
    let layers = usize::try_from(layers).unwrap_or(usize::MAX);
    let key_value_heads = usize::try_from(key_value_heads).unwrap_or(usize::MAX);
    Ok(Metadata { family, layers, key_value_heads, experts: usize::try_from(expert_count).unwrap_or(usize::MAX), values, factors, notes })
}

/// Widths of heads whose keys and values are computed from latent vectors: llama.cpp multiplies queries with
/// the latent vectors, as if all heads shared one key.
fn latent_widths(reader: &Reader, heads: u64, rotary: u64) -> Result<Vec<(&'static str, u64)>> {
    let groups = reader.groups()?;
    if groups != heads {
        return Err(reader.refused(&format!("`num_key_value_heads` of {groups}"), format!("it must be {heads}, like `num_attention_heads`")));
    }
    let (rank, plain) = (reader.required("kv_lora_rank")?, reader.required("qk_nope_head_dim")?);
    let has_rank = reader.model.config.get(QUERY_RANK.1) != Some(&Json::Null);
    let query = if has_rank { Some((QUERY_RANK.0, reader.required(QUERY_RANK.1)?)) } else { None };
    reader.required("v_head_dim")?;
    if reader.model.config.get(SHARED) == Some(&Json::Null) {
        return Err(reader.refused(&format!("`{SHARED}` of null"), format!("llama.cpp requires shared experts for `{}`", reader.family.architecture)));
    }
    let (layers, vocabulary) = (reader.layers()?, reader.required("vocab_size")?);
    // llama.cpp recognizes DeepSeek-V2-Lite, GigaChat 3 and Kanana 2.
    let is_lite = matches!((layers, vocabulary), (26 | 27, _) | (48, 128_256));
    if is_lite == has_rank {
        let hint = if has_rank {
            "llama.cpp takes such files for DeepSeek-V2-Lite, whose queries have no low rank, and cannot load them: keep another number of layers"
        } else {
            "llama.cpp loads files whose queries have no low rank only with 26 or 27 layers, or with 48 and a vocabulary of 128256 tokens"
        };
        return Err(reader.refused(&format!("`num_hidden_layers` of {layers} for `{}`", reader.family.architecture), hint));
    }
    let too_wide = || reader.refused("heads that are too wide", "the checkpoint and its config.json do not match");
    let sum = |part: u64| part.checked_add(rotary).ok_or_else(too_wide);
    let widths = [("attention.key_length", sum(rank)?), ("attention.value_length", rank), ("attention.key_length_mla", sum(plain)?)];
    Ok(widths.into_iter().chain(query).collect())
}

/// Whether each layer has a sliding window, if `config.json` lists other layers than the default ones.
fn window_pattern(reader: &Reader) -> Result<Option<Vec<bool>>> {
    let (Windows::Listed(default), layers) = (reader.family.windows, reader.layers()?) else { return Ok(None) };
    let every = reader.size("sliding_window_pattern")?.and_then(|every| usize::try_from(every).ok()).unwrap_or(default);
    let pattern: Vec<bool> = match reader.get("layer_types").and_then(Json::as_array) {
        Some(types) => types.iter().map(|kind| kind.as_str() == Some("sliding_attention")).collect(),
        None => (0..layers).map(|layer| Windows::Listed(every).slides(layer)).collect(),
    };
    if pattern.len() as u64 != layers {
        return Err(reader.refused("`layer_types`", format!("must list {layers} layers")));
    }
    Ok((0..layers).zip(&pattern).any(|(layer, slides)| *slides != reader.family.windows.slides(layer)).then_some(pattern))
}

/// Maximum head width.
const MAX_HEAD_WIDTH: u64 = 1 << 14;

/// Checks the number and width of heads against the weights.
fn require_head_shapes(model: &Model, counts: [u64; 2], width: u64) -> Result<()> {
    let [heads, groups] = counts;
    for (name, weight) in &model.weights.by_name {
        let count = match name.rsplit('.').nth(1) {
            Some("q_proj") => heads,
            Some("k_proj" | "v_proj") => groups,
            _ => continue,
        };
        let rows = weight.shape.first().copied().unwrap_or(0);
        if count.checked_mul(width) != Some(rows as u64) {
            return Err(Error::tensor(
                name,
                format!("has {rows} rows, but config.json specifies {count} heads of {width}"),
                "the checkpoint and its config.json do not match",
            ));
        }
    }
    if width > MAX_HEAD_WIDTH {
        let what = format!("gguf: config.json: heads of {width}");
        return Err(Error::Unsupported { what, hint: format!("at most {MAX_HEAD_WIDTH} are supported") });
    }
    Ok(())
}

/// Rejects settings that change the computation and that GGUF cannot represent.
fn check(reader: &Reader, notes: &mut Vec<String>) -> Result<()> {
    let family = reader.family;
    arch::check_rope_keys(|key| reader.get(key))?;
    let json = |text: &str| serde_json::from_str::<Json>(text).unwrap_or(Json::Null);
    for (key, _) in family.required {
        if let Some(other) = reader.get(key)
            && let Some(value) = family.required_instead(key, other)
        {
            return Err(reader.refused(&format!("`{key}` of {other}"), format!("llama.cpp supports only {value} for `{}`", family.architecture)));
        }
    }
    let is_other = |key: &str| family.partial_rotary.is_none_or(|(partial, _)| partial != key) && !family.accepted.contains(&key);
    for (key, neutral) in NEUTRAL.into_iter().filter(|(key, _)| is_other(key)) {
        if let Some(value) = reader.get(key).filter(|value| **value != json(neutral) && (value.as_f64().is_none() || value.as_f64() != json(neutral).as_f64()))
        {
            return Err(reader.refused(&format!("`{key}` of {value}"), "it changes the computation, but GGUF files cannot represent it"));
        }
    }
    let (key, activation) = family.activation;
    let newer = family.newer_activation_key.and_then(|key| reader.get(key));
    let means_tanh = family.newer_activation_key.is_some() && newer.is_none();
    let matches = |value: &Json| value.as_str() == Some(activation) || (means_tanh && value.as_str() == Some("gelu"));
    if let Some(other) = newer.or(reader.get(key)).filter(|value| !matches(value)) {
        return Err(reader.refused(&format!("`{key}` of {other}"), format!("llama.cpp computes `{}` with {activation}", family.architecture)));
    }
    if let Some(expected) = family.experts.as_ref().and_then(|experts| experts.normalized) {
        let normalized = reader.get("norm_topk_prob").and_then(Json::as_bool).unwrap_or(false);
        if normalized != expected {
            return Err(reader.refused(&format!("`norm_topk_prob` of {normalized}"), format!("llama.cpp does not support it for `{}`", family.architecture)));
        }
        for (key, neutral) in [("decoder_sparse_step", Json::from(1)), ("mlp_only_layers", Json::Array(Vec::new()))] {
            if let Some(value) = reader.get(key).filter(|value| **value != neutral) {
                return Err(reader.refused(&format!("`{key}` of {value}"), format!("llama.cpp requires experts in every layer of `{}`", family.architecture)));
            }
        }
    }
    let layers = reader.layers()?;
    if let Some(period) = family.rope_period {
        layer_patterns::check_rotary(reader, period, layers)?;
        if family.windows == Windows::Chunks {
            layer_patterns::check_chunks(reader, period, layers)?;
        }
    }
    let types = reader.get("layer_types").filter(|_| family.recurrent == Recurrent::None).and_then(Json::as_array);
    if let (Some(types), Windows::None | Windows::AllBut(_)) = (types, family.windows) {
        let named = |slides: bool| if slides { "sliding_attention" } else { "full_attention" };
        let other = |(layer, kind): (u64, &Json)| kind.as_str() != Some(named(family.windows.slides(layer)));
        if (0..layers).zip(types).any(other) {
            return Err(reader.refused("`layer_types`", format!("llama.cpp uses a different pattern of sliding windows for `{}`", family.architecture)));
        }
    } else if let (Some(pattern), Windows::AllBut(every)) = (reader.size("sliding_window_pattern")?, family.windows)
        && pattern != every as u64
    {
        return Err(
            reader.refused(&format!("`sliding_window_pattern` of {pattern}"), format!("llama.cpp uses sliding windows in all but every {every}th layer"))
        );
    }
    // The other families have no windows, or reject `use_sliding_window`, without which the size has no
    // effect.
    if family.drops_window
        && let Some(window) = reader.size("sliding_window")?
    {
        notes.push(format!(
            "config.json specifies a sliding window of {window} tokens, but GGUF files of `{}` cannot represent it: results differ for longer texts",
            family.architecture
        ));
    }
    if family.has_query_scalar {
        let (hidden, heads) = (reader.required("hidden_size")?, reader.required("num_attention_heads")?);
        let implied =
            if family.hidden_size_scaled_layers == Some(layers) { hidden.checked_div(heads).unwrap_or(0) } else { reader.size("head_dim")?.unwrap_or(256) };
        let scalar = reader.number("query_pre_attn_scalar")?.unwrap_or(256.0);
        if scalar != implied as f64 {
            return Err(reader.refused(&format!("`query_pre_attn_scalar` of {scalar}"), format!("llama.cpp uses {implied} for this model")));
        }
    }
    Ok(())
}

/// RoPE scaling.
enum Scaling {
    Named {
        kind: &'static str,
        factor: f64,
        more: Vec<(&'static str, Value)>,
    },
    /// Factor, low and high frequency factor, and original context length.
    Llama3([f64; 4]),
}

/// Rotary embeddings.
struct Positions {
    theta: f64,
    /// The base of layers with a sliding window, if it differs.
    local_theta: Option<f64>,
    scaling: Option<Scaling>,
}

/// The base frequencies of rotary embeddings, and their scaling.
fn positions(reader: &Reader, head_dim: u64) -> Result<Positions> {
    let has_local = reader.family.has_local_rope;
    let global = reader.rope_scaling();
    let local = reader.rope().and_then(|all| all.get("sliding_attention")).and_then(|local| local.get("rope_theta")).and_then(Json::as_f64);
    let theta = global.and_then(|all| all.get("rope_theta")).and_then(Json::as_f64);
    let theta = theta.or(reader.number("rope_theta")?).unwrap_or(reader.family.theta);
    if has_local && local.or(reader.number("rope_local_base_freq")?).unwrap_or(1e4) != 1e4 {
        return Err(reader.refused("`rope_local_base_freq`", "llama.cpp uses 10000 for sliding-window layers"));
    }
    let local_theta = local.filter(|local| !has_local && *local != theta);
    if let Some(local) = local_theta.filter(|_| !reader.family.has_rope_groups) {
        let hint = format!("llama.cpp has a single base for `{}`", reader.family.architecture);
        return Err(reader.refused(&format!("`rope_theta` of {local} for layers with a sliding window"), hint));
    }
    let with = |theta: f64, scaling: Option<Scaling>| Positions { theta, local_theta, scaling };
    let Some(global) = global else { return Ok(with(theta, None)) };
    let kind = global.get("rope_type").or(global.get("type")).and_then(Json::as_str).unwrap_or("default");
    let is_long = |kind: &str| long_rope::is_name(kind) && reader.family.divisors() == Divisors::ShortAndLong;
    let supported: &[&str] = match kind {
        "default" => return Ok(with(theta, None)),
        // The other parameters have no effect.
        "dynamic" if reader.family.has_alpha_scaling => {
            let alpha = global.get("alpha").and_then(Json::as_f64).filter(|alpha| *alpha > 0.0 && head_dim > 2);
            let alpha = alpha.ok_or_else(|| reader.refused("rope scaling `dynamic` without `alpha`", "it depends on the length of the text"))?;
            let width = head_dim as f64;
            return Ok(with(theta * alpha.powf(width / (width - 2.0)), None));
        }
        kind if is_long(kind) => &["short_factor", "long_factor", "factor", "attention_factor", "original_max_position_embeddings"],
        "linear" if !reader.family.is_latent => &["factor"],
        "llama3" => &["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"],
        "yarn" if reader.family.is_latent => {
            &["factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "truncate", "mscale", "mscale_all_dim"]
        }
        "yarn" => &["factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "truncate"],
        other => {
            let supported = if reader.family.is_latent { "supported: default, yarn" } else { "supported: default, linear, llama3, yarn" };
            return Err(reader.refused(&format!("rope scaling `{other}`"), supported));
        }
    };
    let truncate = global.get("truncate").and_then(Json::as_bool).unwrap_or(true);
    if kind == "yarn" && truncate != reader.family.yarn_truncate.unwrap_or(true) {
        return Err(reader.refused(&format!("`truncate` of {truncate} in rope scaling `yarn`"), "GGUF files cannot represent it"));
    }
    let is_partial = |key: &str| reader.family.partial_rotary.is_some_and(|(partial, _)| partial == key);
    let is_known = |key: &str| ["rope_type", "type", "rope_theta"].contains(&key) || is_partial(key) || supported.contains(&key);
    if let Some((key, value)) = global.iter().find(|(key, value)| !value.is_null() && !is_known(key)) {
        return Err(reader.refused(&format!("`{key}` of {value} in rope scaling `{kind}`"), "GGUF files cannot represent it"));
    }
    // Written by `long_rope`.
    if is_long(kind) {
        return Ok(with(theta, None));
    }
    let number = |key: &str| {
        let value = global.get(key).and_then(Json::as_f64).or(if key == "original_max_position_embeddings" { reader.number(key)? } else { None });
        value.ok_or_else(|| reader.refused(&format!("rope scaling `{kind}` without `{key}`"), "GGUF files require it"))
    };
    let original = |key: &'static str| Ok::<_, Error>(("rope.scaling.original_context_length", Value::Unsigned(number(key)? as u64)));
    let scaling = match kind {
        "linear" => Scaling::Named { kind: "linear", factor: number("factor")?, more: Vec::new() },
        "llama3" => Scaling::Llama3([number("factor")?, number("low_freq_factor")?, number("high_freq_factor")?, number("original_max_position_embeddings")?]),
        _ => {
            for (key, default) in [("beta_fast", 32.0), ("beta_slow", 1.0)] {
                if let Some(other) = global.get(key).filter(|value| !value.is_null() && value.as_f64() != Some(default)) {
                    return Err(reader.refused(&format!("`{key}` of {other} in rope scaling `yarn`"), format!("llama.cpp uses {default}")));
                }
            }
            let factor = number("factor")?;
            let mut more = vec![original("original_max_position_embeddings")?];
            let attention = if reader.family.is_latent {
                let [scale, all] = ["mscale", "mscale_all_dim"].map(|key| global.get(key).and_then(Json::as_f64));
                let scale = scale.filter(|scale| Some(*scale) == all && *scale > 0.0);
                let scale = scale.ok_or_else(|| {
                    reader.refused("rope scaling `yarn` without equal, positive `mscale` and `mscale_all_dim`", "llama.cpp supports only equal ones")
                })?;
                more.push(("rope.scaling.yarn_log_multiplier", Value::Float(0.1 * scale)));
                1.0
            } else {
                0.1 * factor.ln() + 1.0
            };
            if let Some(other) = global.get("attention_factor").and_then(Json::as_f64).filter(|other| (other - attention).abs() > 1e-6) {
                return Err(reader.refused(&format!("`attention_factor` of {other} in rope scaling `yarn`"), format!("llama.cpp uses {attention}")));
            }
            Scaling::Named { kind: "yarn", factor, more }
        }
    };
    Ok(with(theta, Some(scaling)))
}
