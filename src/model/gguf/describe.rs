//! What a GGUF file says of a model, from its `config.json`.

use serde_json::Value as Json;

use super::config::{FACTORS, llama3_factors};
use super::family::{FAMILIES, Family, Windows};
use crate::error::{Error, Result};
use crate::model::Model;
use crate::store::gguf::Value;

/// Keys and values of a file, in order.
pub(crate) type Keys = Vec<(String, Value)>;

/// What a file says of a model, but for its vocabulary.
pub(crate) struct Described {
    pub family: &'static Family,
    pub values: Keys,
    /// Factors on rotary frequencies, as `rope_freqs.weight`.
    pub factors: Option<(&'static str, Vec<f32>)>,
    pub notes: Vec<String>,
}

/// Keys that say in numbers what they say here, without the architecture.
const SIZES: [(&str, &str); 6] = [
    ("vocab_size", "vocab_size"),
    ("context_length", "max_position_embeddings"),
    ("embedding_length", "hidden_size"),
    ("block_count", "num_hidden_layers"),
    ("feed_forward_length", "intermediate_size"),
    ("attention.head_count", "num_attention_heads"),
];

/// Values that change what is computed, and that no file of GGUF says; a null never does.
const NEUTRAL: [(&str, &str); 6] = [
    ("is_causal", "true"),
    ("partial_rotary_factor", "1.0"),
    ("use_bidirectional_attention", "false"),
    ("auto_map", "{}"),
    ("use_sliding_window", "false"),
    ("pruned_heads", "{}"),
];

/// Reads `config.json`.
struct Reader<'m> {
    model: &'m Model,
    family: &'static Family,
}

impl Reader<'_> {
    fn get(&self, key: &str) -> Option<&Json> {
        self.model.config.get(key).filter(|value| !value.is_null())
    }

    fn refused(&self, what: &str, hint: impl Into<String>) -> Error {
        Error::Unsupported { what: format!("gguf: config.json: {what}"), hint: hint.into() }
    }

    fn number(&self, key: &str) -> Result<Option<f64>> {
        let wrong = |value| self.refused(&format!("`{key}` of {value}"), "a number is expected");
        self.get(key).map(|value| value.as_f64().ok_or_else(|| wrong(value))).transpose()
    }

    fn size(&self, key: &str) -> Result<Option<u64>> {
        let wrong = |value| self.refused(&format!("`{key}` of {value}"), "a size is expected");
        self.get(key).map(|value| value.as_u64().filter(|size| *size > 0).ok_or_else(|| wrong(value))).transpose()
    }

    fn required(&self, key: &str) -> Result<u64> {
        self.size(key)?.ok_or_else(|| self.refused(&format!("no `{key}`"), "the file must say it"))
    }
}

/// What the file of a model says.
///
/// # Errors
/// The family has no form in GGUF files that is known here, or the configuration asks for something that they cannot say.
pub(crate) fn describe(model: &Model) -> Result<Described> {
    let kind = model.config.model_type();
    let family = FAMILIES.iter().find(|family| family.model_type == kind || family.also.contains(&kind)).ok_or_else(|| {
        let known = FAMILIES.iter().flat_map(|family| std::iter::once(family.model_type).chain(family.also.iter().copied())).collect::<Vec<_>>().join(", ");
        Error::Unsupported { what: format!("gguf: model_type `{kind}`"), hint: format!("known: {known}") }
    })?;
    let reader = Reader { model, family };
    let mut notes = Vec::new();
    check(&reader, &mut notes)?;
    let mut own = Vec::new();
    for (here, key) in SIZES {
        own.push((here, Value::Unsigned(reader.required(key)?)));
    }
    let (hidden, heads) = (reader.required("hidden_size")?, reader.required("num_attention_heads")?);
    let groups = reader.size("num_key_value_heads")?.unwrap_or(heads);
    own.push(("attention.head_count_kv", Value::Unsigned(groups)));
    own.push(("attention.layer_norm_rms_epsilon", Value::Float(reader.number("rms_norm_eps")?.unwrap_or(1e-6))));
    if let Some(experts) = &family.experts {
        own.push(("expert_count", Value::Unsigned(reader.required(experts.count)?)));
        own.push(("expert_used_count", Value::Unsigned(reader.required("num_experts_per_tok")?)));
        if experts.own_inner {
            own.push(("expert_feed_forward_length", Value::Unsigned(reader.required("moe_intermediate_size")?)));
        }
        if experts.shared {
            own.push(("expert_shared_feed_forward_length", Value::Unsigned(reader.required("shared_expert_intermediate_size")?)));
        }
    }
    let by_stream = hidden.checked_div(heads).unwrap_or(hidden);
    let usual = match family.architecture {
        "qwen3" | "qwen3moe" => 128,
        _ if family.own_head_dim => 256,
        _ => by_stream,
    };
    let head_dim = reader.size("head_dim")?.unwrap_or(usual);
    heads_are_whole(model, [heads, groups], head_dim)?;
    if family.own_head_dim || head_dim != by_stream {
        own.extend(["attention.key_length", "attention.value_length"].map(|key| (key, Value::Unsigned(head_dim))));
    }
    if family.neighbours {
        own.push(("rope.dimension_count", Value::Unsigned(head_dim)));
    }
    let (theta, scaling) = positions(&reader)?;
    own.push(("rope.freq_base", Value::Float(theta)));
    let factors = match scaling {
        None => None,
        Some(Scaling::By { kind, factor, more }) => {
            own.extend([("rope.scaling.type", Value::Text(kind.to_owned())), ("rope.scaling.factor", Value::Float(factor))]);
            own.extend(more);
            None
        }
        Some(Scaling::Llama3(_)) if !family.neighbours => {
            return Err(reader.refused("rope scaling `llama3`", format!("llama.cpp reads its factors for `llama`, and not for `{}`", family.architecture)));
        }
        Some(Scaling::Llama3(of)) => Some((FACTORS, llama3_factors(of, theta, (head_dim / 2) as usize))),
    };
    if family.windows != Windows::None {
        own.push(("attention.sliding_window", Value::Unsigned(reader.size("sliding_window")?.unwrap_or(4096))));
        for (here, default) in [("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0)] {
            let default = (family.architecture == "gemma2" && !model.config.get(here).is_some_and(Json::is_null)).then_some(default);
            match reader.number(here)?.or(default) {
                Some(cap) if family.architecture == "gemma2" || here == "final_logit_softcapping" => own.push((here, Value::Float(cap))),
                None if family.architecture != "gemma2" => {}
                other => {
                    let said = other.map_or("null".into(), |cap| cap.to_string());
                    return Err(reader.refused(&format!("`{here}` of {said}"), format!("llama.cpp computes `{}` in another way", family.architecture)));
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
    let told = metadata.iter().filter(|(key, _)| key.starts_with("general."));
    values.extend(told.map(|(key, text)| {
        let list = ["general.tags", "general.languages"].contains(&key.as_str());
        let value = match text.parse() {
            _ if list => Value::Texts(text.split(", ").map(str::to_owned).collect()),
            Ok(number) if key.ends_with(".count") => Value::Unsigned(number),
            _ => Value::Text(text.clone()),
        };
        (key.clone(), value)
    }));
    values.extend(own.into_iter().map(|(key, value)| (format!("{}.{key}", family.architecture), value)));
    Ok(Described { family, values, factors, notes })
}

/// Widest heads.
const WIDEST_HEAD: u64 = 1 << 14;

/// Holds the number and the width of heads to the weights.
fn heads_are_whole(model: &Model, counts: [u64; 2], width: u64) -> Result<()> {
    let [heads, groups] = counts;
    for (name, weight) in &model.weights.by_name {
        let count = match name.rsplit('.').nth(1) {
            Some("q_proj") => heads,
            Some("k_proj" | "v_proj") => groups,
            _ => continue,
        };
        let rows = weight.shape.first().copied().unwrap_or(0);
        if count.checked_mul(width) != Some(rows as u64) {
            return Err(Error::tensor(name, format!("has {rows} rows, and config.json says {count} heads of {width}"), "the checkpoint is not what it says"));
        }
    }
    if width > WIDEST_HEAD {
        let what = format!("gguf: config.json: heads of {width}");
        return Err(Error::Unsupported { what, hint: format!("at most {WIDEST_HEAD} are written") });
    }
    Ok(())
}

/// Refuses what changes what is computed and has no key.
fn check(reader: &Reader, notes: &mut Vec<String>) -> Result<()> {
    let family = reader.family;
    let said = |text: &str| serde_json::from_str::<Json>(text).unwrap_or(Json::Null);
    for (key, neutral) in NEUTRAL {
        if let Some(value) = reader.get(key).filter(|value| **value != said(neutral) && (value.as_f64().is_none() || value.as_f64() != said(neutral).as_f64()))
        {
            return Err(reader.refused(&format!("`{key}` of {value}"), "it changes what the model computes, and GGUF files cannot say it"));
        }
    }
    let (key, usual) = family.activation;
    // Gemma 1 has had both keys; `gelu` in the older one means the approximation, as transformers reads it.
    let gemma = family.architecture == "gemma";
    let said = if gemma { reader.get("hidden_activation").or(reader.get(key)) } else { reader.get(key) };
    let means = |value: &Json| value.as_str() == Some(usual) || (gemma && reader.get("hidden_activation").is_none() && value.as_str() == Some("gelu"));
    if let Some(other) = said.filter(|value| !means(value)) {
        return Err(reader.refused(&format!("`{key}` of {other}"), format!("llama.cpp computes `{}` with {usual}", family.architecture)));
    }
    if let Some(experts) = family.experts.as_ref().filter(|experts| experts.own_inner) {
        let normalised = reader.get("norm_topk_prob").and_then(Json::as_bool).unwrap_or(false);
        if normalised != experts.normalised {
            return Err(reader.refused(&format!("`norm_topk_prob` of {normalised}"), format!("llama.cpp computes `{}` in the other way", family.architecture)));
        }
        for (key, neutral) in [("decoder_sparse_step", Json::from(1)), ("mlp_only_layers", Json::Array(Vec::new()))] {
            if let Some(value) = reader.get(key).filter(|value| **value != neutral) {
                return Err(reader.refused(&format!("`{key}` of {value}"), format!("llama.cpp has experts in every layer of `{}`", family.architecture)));
            }
        }
    }
    let layers = reader.required("num_hidden_layers")?;
    let slides = |layer: u64| match family.windows {
        Windows::None => false,
        Windows::AllBut(every) => !layer.saturating_add(1).is_multiple_of(every as u64),
    };
    if let Some(types) = reader.get("layer_types").and_then(Json::as_array) {
        let other = |(layer, kind): (u64, &Json)| kind.as_str() != Some(if slides(layer) { "sliding_attention" } else { "full_attention" });
        if (0..layers).zip(types).any(other) {
            return Err(reader.refused("`layer_types`", format!("llama.cpp has another pattern of windows for `{}`", family.architecture)));
        }
    } else if let (Some(pattern), Windows::AllBut(every)) = (reader.size("sliding_window_pattern")?, family.windows)
        && pattern != every as u64
    {
        return Err(reader.refused(&format!("`sliding_window_pattern` of {pattern}"), format!("llama.cpp has windows in all but every {every}th layer")));
    }
    if let (Windows::None, Some(window)) = (family.windows, reader.size("sliding_window")?)
        && matches!(reader.model.config.model_type(), "mistral" | "mixtral")
    {
        notes.push(format!(
            "config.json says that attention sees {window} tokens; GGUF files of `{}` have no windows, and longer texts are computed otherwise",
            family.architecture
        ));
    }
    if let Windows::AllBut(_) = family.windows {
        let (hidden, heads) = (reader.required("hidden_size")?, reader.required("num_attention_heads")?);
        let implied = if family.scale_by_stream == Some(layers) { hidden.checked_div(heads).unwrap_or(0) } else { reader.size("head_dim")?.unwrap_or(256) };
        let scalar = reader.number("query_pre_attn_scalar")?.unwrap_or(256.0);
        if scalar != implied as f64 {
            return Err(reader.refused(&format!("`query_pre_attn_scalar` of {scalar}"), format!("llama.cpp takes {implied} for this model")));
        }
    }
    if reader.get("attention_bias").and_then(Json::as_bool) == Some(true) && family.model_type != "llama" {
        return Err(reader.refused("`attention_bias` of true", format!("llama.cpp has no such biases for `{}`", family.architecture)));
    }
    Ok(())
}

/// How positions are scaled.
enum Scaling {
    By {
        kind: &'static str,
        factor: f64,
        more: Vec<(&'static str, Value)>,
    },
    /// Factor, low and high frequency, positions before.
    Llama3([f64; 4]),
}

/// The base of frequencies, and their scaling.
fn positions(reader: &Reader) -> Result<(f64, Option<Scaling>)> {
    let gemma3 = reader.family.architecture == "gemma3";
    let all = reader.get("rope_parameters").or(reader.get("rope_scaling"));
    // The newer spelling has a group for each kind of layer.
    let global = all.and_then(|all| all.get("full_attention")).or(all);
    let local = all.and_then(|all| all.get("sliding_attention")).and_then(|local| local.get("rope_theta")).and_then(Json::as_f64);
    let theta = global.and_then(|all| all.get("rope_theta")).and_then(Json::as_f64);
    let theta = theta.or(reader.number("rope_theta")?).unwrap_or(if gemma3 { 1e6 } else { 1e4 });
    if gemma3 && local.or(reader.number("rope_local_base_freq")?).unwrap_or(1e4) != 1e4 {
        return Err(reader.refused("`rope_local_base_freq`", "llama.cpp takes 10000 for layers with a window"));
    }
    let Some(global) = global.and_then(Json::as_object) else { return Ok((theta, None)) };
    let kind = global.get("rope_type").or(global.get("type")).and_then(Json::as_str).unwrap_or("default");
    let known: &[&str] = match kind {
        "default" => return Ok((theta, None)),
        "linear" => &["factor"],
        "llama3" => &["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"],
        "yarn" => &["factor", "original_max_position_embeddings", "beta_fast", "beta_slow"],
        other => return Err(reader.refused(&format!("rope scaling `{other}`"), "known: default, linear, llama3, yarn")),
    };
    let common = ["rope_type", "type", "rope_theta"];
    if let Some((key, value)) = global.iter().find(|(key, value)| !value.is_null() && !common.contains(&key.as_str()) && !known.contains(&key.as_str())) {
        return Err(reader.refused(&format!("`{key}` of {value} in rope scaling `{kind}`"), "GGUF files cannot say it"));
    }
    let number = |key: &str| {
        let value = global.get(key).and_then(Json::as_f64).or(if key == "original_max_position_embeddings" { reader.number(key)? } else { None });
        value.ok_or_else(|| reader.refused(&format!("rope scaling `{kind}` without `{key}`"), "the file must say it"))
    };
    let original = |key: &'static str| Ok::<_, Error>(("rope.scaling.original_context_length", Value::Unsigned(number(key)? as u64)));
    let scaling = match kind {
        "linear" => Scaling::By { kind: "linear", factor: number("factor")?, more: Vec::new() },
        "llama3" => Scaling::Llama3([number("factor")?, number("low_freq_factor")?, number("high_freq_factor")?, number("original_max_position_embeddings")?]),
        _ => {
            for (key, usual) in [("beta_fast", 32.0), ("beta_slow", 1.0)] {
                if let Some(other) = global.get(key).filter(|value| !value.is_null() && value.as_f64() != Some(usual)) {
                    return Err(reader.refused(&format!("`{key}` of {other} in rope scaling `yarn`"), format!("llama.cpp takes {usual}")));
                }
            }
            Scaling::By { kind: "yarn", factor: number("factor")?, more: vec![original("original_max_position_embeddings")?] }
        }
    };
    Ok((theta, Some(scaling)))
}
