//! `config.json` from what a GGUF file says, and back.

// What is read here, anybody may have written.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::BTreeMap;

use serde_json::{Map, Value as Json, json};

use super::family::{Family, Windows};
use super::values::Values;
use crate::error::{Error, Result};
use crate::store::gguf::Value;
use crate::store::{DType, Weight};

/// The tensor of factors on rotary frequencies.
pub(super) const FACTORS: &str = "rope_freqs.weight";

/// What llama3 scaling is when it is what Llama 3.1 and 3.2 were trained with: frequencies, and positions before.
const LLAMA3: [f64; 3] = [1.0, 4.0, 8192.0];

/// The configuration of a family's model; `tensors` are the file's.
pub(super) fn config(family: &Family, values: &mut Values, tensors: &BTreeMap<String, Weight>) -> Result<Map<String, Json>> {
    let mut config = Map::new();
    let mut set = |key: &str, value: Json| drop(config.insert(key.to_owned(), value));
    let (hidden, layers, heads) = (values.required("embedding_length")?, values.required("block_count")?, values.required("attention.head_count")?);
    let inner = values.required("feed_forward_length")?;
    let groups = values.size(&values.own("attention.head_count_kv"))?.unwrap_or(heads);
    let [key_length, value_length, turned] = ["attention.key_length", "attention.value_length", "rope.dimension_count"].map(|key| values.own(key));
    let (said, of_values, turned_said) = (values.size(&key_length)?, values.size(&value_length)?, values.size(&turned)?);
    let head_dim = said.or(hidden.checked_div(heads)).filter(|width| *width > 0).ok_or_else(|| values.wrong(format!("`{key_length}` is zero")))?;
    for (key, width) in [(&value_length, of_values), (&turned, turned_said)] {
        if width.is_some_and(|width| width != head_dim) {
            return Err(Error::Unsupported {
                what: format!("{}: `{key}` of {} with heads of {head_dim}", values.path.display(), width.unwrap_or(0)),
                hint: "heads whose keys and values are equally wide, and turned as a whole, are read".into(),
            });
        }
    }
    let rows = tensors.get("token_embd.weight").and_then(|weight| weight.shape.first().copied());
    let vocabulary = rows.ok_or_else(|| values.wrong("has no tensor `token_embd.weight`".into()))?;
    set("architectures", json!([family.class]));
    set("model_type", json!(family.model_type));
    set("hidden_size", json!(hidden));
    set("intermediate_size", json!(inner));
    set("num_hidden_layers", json!(layers));
    set("num_attention_heads", json!(heads));
    set("num_key_value_heads", json!(groups));
    if family.own_head_dim || said.is_some_and(|width| Some(width) != hidden.checked_div(heads)) {
        set("head_dim", json!(head_dim));
    }
    if let Some(experts) = &family.experts {
        set(experts.count, json!(values.required("expert_count")?));
        set("num_experts_per_tok", json!(values.required("expert_used_count")?));
        if experts.own_inner {
            let held = tensors.get("blk.0.ffn_down_exps.weight").and_then(|weight| weight.shape.last().copied());
            let said = values.size(&values.own("expert_feed_forward_length"))?.or(held.map(|width| width as u64));
            set("moe_intermediate_size", json!(said.ok_or_else(|| values.wrong("does not say how many neurons an expert has".into()))?));
            set("norm_topk_prob", json!(experts.normalised));
            set("decoder_sparse_step", json!(1));
        }
        if experts.shared {
            let held = tensors.get("blk.0.ffn_down_shexp.weight").and_then(|weight| weight.shape.last().copied());
            let said = values.size(&values.own("expert_shared_feed_forward_length"))?.or(held.map(|width| width as u64));
            set("shared_expert_intermediate_size", json!(said.ok_or_else(|| values.wrong("does not say how many neurons the shared expert has".into()))?));
        }
    }
    set("vocab_size", json!(vocabulary));
    if let Some(length) = values.size(&values.own("context_length"))? {
        set("max_position_embeddings", json!(length));
    }
    set(family.activation.0, json!(family.activation.1));
    if family.activation.0 != "hidden_act" {
        set("hidden_act", json!(family.activation.1));
    }
    let epsilon = values.own("attention.layer_norm_rms_epsilon");
    set("rms_norm_eps", json!(values.number(&epsilon)?.ok_or_else(|| values.wrong(format!("`{epsilon}` is missing")))?));
    let theta = values.number(&values.own("rope.freq_base"))?.unwrap_or(10_000.0);
    set("rope_theta", json!(theta));
    if tensors.contains_key(FACTORS) && !family.neighbours {
        return Err(values.wrong(format!("has `{FACTORS}`, which only models of the architecture `llama` have")));
    }
    if let Some(scaling) = scaling(values, tensors, theta, head_dim)? {
        set("rope_scaling", scaling);
    }
    if let Windows::AllBut(every) = family.windows {
        let window = values.size(&values.own("attention.sliding_window"))?.or((every == 2).then_some(4096)).filter(|window| *window > 0);
        set("sliding_window", json!(window.ok_or_else(|| values.wrong(format!("`{}` is missing", values.own("attention.sliding_window"))))?));
        let pattern = values.own("attention.sliding_window_pattern");
        if let Some(said) = values.take(&pattern) {
            set(
                "layer_types",
                layer_types(&said, layers).ok_or_else(|| values.wrong(format!("`{pattern}` is {said}, which is no pattern of {layers} layers")))?,
            );
        }
        let by_stream = family.scale_by_stream == Some(layers);
        set("query_pre_attn_scalar", json!(if by_stream { hidden.checked_div(heads).unwrap_or(0) } else { head_dim }));
        let [on_products, on_logits] = ["attn_logit_softcapping", "final_logit_softcapping"].map(|key| values.own(key));
        let (products, logits) = (values.number(&on_products)?, values.number(&on_logits)?);
        let usual = every == 2;
        set("attn_logit_softcapping", json!(products.or(usual.then_some(50.0))));
        set("final_logit_softcapping", json!(logits.or(usual.then_some(30.0))));
        if !usual {
            let local = values.number(&values.own("rope.freq_base_swa"))?;
            set("rope_local_base_freq", json!(local.unwrap_or(10_000.0)));
        }
    }
    // What the other families have always, or never, these say.
    let has = |name: &str| tensors.contains_key(name);
    if ["llama", "qwen3", "qwen3_moe"].contains(&family.model_type) || family.norms_from_zero {
        set("attention_bias", json!(has("blk.0.attn_q.bias")));
    }
    if family.model_type == "llama" {
        set("mlp_bias", json!(has("blk.0.ffn_gate.bias")));
    }
    set("tie_word_embeddings", json!(!has("output.weight")));
    // What these vocabularies have where nothing is said.
    let pieces = values.says("tokenizer.ggml.model", "llama");
    for (key, here, usual) in [("bos_token_id", "bos", Some(1)), ("eos_token_id", "eos", Some(2)), ("pad_token_id", "padding", None)] {
        if let Some(id) = values.size(&format!("tokenizer.ggml.{here}_token_id"))?.or(usual.filter(|_| pieces)) {
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
    Ok(config)
}

/// Most layers of a model.
const MOST_LAYERS: u64 = 1 << 16;

/// Which layers have a window: all but every so many, or as a list says.
fn layer_types(said: &Value, layers: u64) -> Option<Json> {
    let named = |slides: bool| if slides { "sliding_attention" } else { "full_attention" };
    let slides: Vec<bool> = match said {
        Value::Unsigned(every) if *every > 0 && layers < MOST_LAYERS => (1..=layers).map(|number| !number.is_multiple_of(*every)).collect(),
        Value::Bools(list) => list.clone(),
        _ => return None,
    };
    (slides.len() as u64 == layers).then(|| slides.into_iter().map(named).collect())
}

/// How positions are scaled.
fn scaling(values: &mut Values, tensors: &BTreeMap<String, Weight>, theta: f64, head_dim: u64) -> Result<Option<Json>> {
    let key = |values: &Values, end: &str| values.own(&format!("rope.scaling.{end}"));
    let kind = values.text(&key(values, "type"))?;
    let factor = values.number(&key(values, "factor"))?.or(values.number(&values.own("rope.scale_linear"))?);
    let original = values.size(&key(values, "original_context_length"))?;
    let required = |values: &Values, value: Option<f64>| value.ok_or_else(|| values.wrong(format!("`{}` is missing", key(values, "factor"))));
    let scaling = match (kind.as_deref(), factor) {
        (Some("none"), _) | (None, None | Some(1.0)) => None,
        (Some("linear") | None, factor) => Some(json!({ "rope_type": "linear", "factor": required(values, factor)? })),
        (Some("yarn"), factor) => {
            let mut scaling = Map::from_iter([("rope_type".to_owned(), json!("yarn")), ("factor".to_owned(), json!(required(values, factor)?))]);
            scaling.extend(original.map(|original| ("original_max_position_embeddings".to_owned(), json!(original))));
            for (name, end) in [("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")] {
                scaling.extend(values.number(&key(values, end))?.map(|number| (name.to_owned(), json!(number))));
            }
            Some(Json::Object(scaling))
        }
        (Some(other), _) => {
            return Err(Error::Unsupported {
                what: format!("{}: rope scaling `{other}`", values.path.display()),
                hint: "known: none, linear, yarn, and factors in `rope_freqs.weight`".into(),
            });
        }
    };
    match (tensors.get(FACTORS), scaling) {
        (None, scaling) => Ok(scaling),
        (Some(_), Some(_)) => Err(values.wrong(format!("has `{FACTORS}` and `{}`, where one says how positions are scaled", key(values, "type")))),
        (Some(factors), None) if factors.shape != [usize::try_from(head_dim / 2).unwrap_or(0)] => {
            Err(values.wrong(format!("tensor `{FACTORS}` has the shape {:?}, where heads of {head_dim} have {} frequencies", factors.shape, head_dim / 2)))
        }
        (Some(factors), None) => factors_as_scaling(values, factors, theta).map(Some),
    }
}

/// Most factors on frequencies, one for two elements of a head.
const MOST_FACTORS: usize = 4096;

/// The scaling that these factors are: that of Llama 3, or factors by themselves.
fn factors_as_scaling(values: &Values, weight: &Weight, theta: f64) -> Result<Json> {
    if weight.elements() > MOST_FACTORS || weight.elements() == 0 {
        return Err(values.wrong(format!("tensor `{FACTORS}` has {} elements", weight.elements())));
    }
    let factors = weight.floats(FACTORS)?;
    let factor = factors.iter().fold(1f32, |most, factor| most.max(*factor));
    let [low, high, original] = LLAMA3;
    let expected = llama3_factors([f64::from(factor), low, high, original], theta, factors.len());
    if factor > 1.0 && factors.iter().zip(&expected).all(|(found, expected)| (found - expected).abs() <= 1e-4 * expected.abs()) {
        return Ok(
            json!({ "rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high, "original_max_position_embeddings": original as u64 }),
        );
    }
    let list: Vec<f64> = factors.iter().map(|factor| f64::from(*factor)).collect();
    Ok(json!({ "rope_type": "longrope", "short_factor": list, "long_factor": list, "attention_factor": 1.0, "factor": 1.0 }))
}

/// What frequencies are divided by in the scaling of Llama 3, as llama.cpp's converter writes it; `of` is factor, low and high frequency
/// and positions before.
pub(crate) fn llama3_factors(of: [f64; 4], theta: f64, count: usize) -> Vec<f32> {
    let [factor, low, high, original] = of;
    let of_pair = |pair: usize| {
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
    (0..count).map(|pair| of_pair(pair) as f32).collect()
}
