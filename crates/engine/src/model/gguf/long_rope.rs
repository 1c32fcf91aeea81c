//! Divisors of rotary frequencies for short and for long texts (LongRoPE), as in Phi-3.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::BTreeMap;

use serde_json::{Map, Value as Json, json};

use super::reader::Reader;
use super::values::{Values, factor_list};
use crate::arch::long_rope_attention;
use crate::error::{Error, Result};
use crate::store::Weight;
use crate::store::gguf::Value;

/// Tensors with divisors for texts that are longer than the original context, and for other texts.
pub(super) const TENSORS: [(&str, &str); 2] = [("rope_factors_long.weight", "long_factor"), ("rope_factors_short.weight", "short_factor")];
/// Key of the factor on queries and keys.
const ATTENTION: &str = "rope.scaling.attn_factor";
/// Key with the length of the texts of the original training.
const ORIGINAL: (&str, &str) = ("rope.scaling.original_context_length", "original_max_position_embeddings");
/// The original length of configurations that do not specify it.
const DEFAULT_ORIGINAL: f64 = 4096.0;

/// Names of this rope scaling.
pub(super) fn is_name(kind: &str) -> bool {
    ["longrope", "su"].contains(&kind)
}

/// Divisors by the names of their tensors, and keys of a file.
pub(super) struct LongRope {
    pub factors: Vec<(&'static str, Vec<f32>)>,
    pub keys: Vec<(&'static str, Value)>,
}

/// The keys of a family with this scaling, and the divisors if `scaling` in `config.json` has some. `rotary`
/// is the number of rotated elements of a head.
pub(super) fn describe(reader: &Reader, scaling: Option<&Map<String, Json>>, rotary: u64) -> Result<LongRope> {
    let number = |key: &str| scaling.and_then(|scaling| scaling.get(key)).and_then(Json::as_f64);
    let (gguf_key, key) = ORIGINAL;
    let original = reader.number(key)?.or(number(key)).unwrap_or(DEFAULT_ORIGINAL);
    let mut found = LongRope { factors: Vec::new(), keys: vec![(gguf_key, Value::Unsigned(original as u64))] };
    let kind = scaling.and_then(|scaling| scaling.get("rope_type").or(scaling.get("type"))).and_then(Json::as_str);
    let Some(scaling) = scaling.filter(|_| kind.is_some_and(is_name)) else { return Ok(found) };
    for (tensor, key) in TENSORS {
        let list = scaling.get(key).and_then(Json::as_array).map(|list| list.iter().filter_map(Json::as_f64).map(|factor| factor as f32).collect());
        let list: Vec<f32> = list.unwrap_or_default();
        if list.len() as u64 != rotary / 2 {
            let hint = format!("it must have {} numbers, one for each rotated pair of a head", rotary / 2);
            return Err(reader.refused(&format!("`{key}` with {} numbers in rope scaling `longrope`", list.len()), hint));
        }
        found.factors.push((tensor, list));
    }
    let factor = number("factor").unwrap_or(reader.required("max_position_embeddings")? as f64 / original);
    let attention = number("attention_factor").unwrap_or(long_rope_attention(factor, original));
    found.keys.push((ATTENTION, Value::Float(attention)));
    Ok(found)
}

/// The keys of `config.json` for a file with this context length.
pub(super) fn config(values: &mut Values, tensors: &BTreeMap<String, Weight>, rotary: u64, context: u64) -> Result<Vec<(&'static str, Json)>> {
    let (gguf_key, key) = ORIGINAL;
    let original = values.required(gguf_key)?;
    let mut keys = vec![(key, json!(original))];
    let kind = values.own("rope.scaling.type");
    if let Some(other) = values.text(&kind)?.filter(|other| other != "none" && !is_name(other)) {
        let what = format!("{}: `{kind}` of {other}", values.path.display());
        return Err(Error::Unsupported { what, hint: format!("supported for the architecture `{}`: longrope, none", values.architecture) });
    }
    let mut scaling = Map::from_iter([("rope_type".to_owned(), json!("longrope"))]);
    for (tensor, key) in TENSORS {
        let Some(weight) = tensors.get(tensor) else { continue };
        scaling.insert(key.to_owned(), json!(factor_list(values, tensor, weight, rotary)?));
    }
    match scaling.len() {
        1 => return Ok(keys),
        2 => return Err(values.wrong(format!("has only one of the tensors `{}` and `{}`", TENSORS[0].0, TENSORS[1].0))),
        _ => {}
    }
    let attention_key = values.own(ATTENTION);
    let attention = values.number(&attention_key)?.unwrap_or(1.0);
    // Files have numbers of 32 bits.
    if attention as f32 != long_rope_attention(context as f64 / original as f64, original as f64) as f32 {
        scaling.insert("attention_factor".to_owned(), json!(attention));
    }
    keys.push(("rope_scaling", Json::Object(scaling)));
    Ok(keys)
}
