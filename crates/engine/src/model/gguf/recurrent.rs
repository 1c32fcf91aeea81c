//! Metadata of layers without attention.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use serde_json::{Map, Value as Json, json};

use super::reader::Reader;
use super::single_parts;
use super::values::{INNER, Values};
use crate::arch::{GgufFamily, Recurrent};
use crate::error::{Error, Result};
use crate::store::gguf::Value;

/// Key of `config.json` with the kind of position embeddings of Granite 4.
const POSITIONS: &str = "position_embedding_type";
/// The only width of state space layers that llama.cpp supports, relative to that of the residual stream.
const EXPANSION: u64 = 2;
/// Key with a flag for each layer.
const LAYERS: &str = "attention.recurrent_layers";
/// Key with the number of rotated pairs for each axis of images and videos, and a fourth axis.
const SECTIONS: &str = "rope.dimension_sections";
/// The sections of configurations that do not specify them.
const DEFAULT_SECTIONS: [i64; 4] = [11, 11, 10, 0];

/// Keys of recurrent layers, in addition to the settings of the family. `rotary` is the number of rotated
/// elements of a head.
pub(super) fn describe(reader: &Reader, rotary: u64) -> Result<Vec<(&'static str, Value)>> {
    let family = reader.family;
    if family.recurrent.has_state_space_sizes() {
        return describe_state_space(reader);
    }
    if !family.recurrent.is_delta() {
        return Ok(Vec::new());
    }
    let size = |key: &str, default: u64| Ok::<_, Error>(reader.size(key)?.unwrap_or(default));
    let [key, value] = [size("linear_key_head_dim", 128)?, size("linear_value_head_dim", 128)?];
    if key != value {
        let hint = format!("llama.cpp requires `linear_key_head_dim`, {key}, for `{}`", family.architecture);
        return Err(reader.refused(&format!("`linear_value_head_dim` of {value}"), hint));
    }
    let inner = value.saturating_mul(size("linear_num_value_heads", 32)?);
    let layers = 0..reader.layers()?;
    let mut keys = vec![(INNER, Value::Unsigned(inner)), (LAYERS, Value::Bools(layers.map(|layer| reader.is_recurrent(layer)).collect()))];
    if family.recurrent == Recurrent::TiledDelta {
        let sections = match reader.rope().and_then(|rope| rope.get("mrope_section")).filter(|value| !value.is_null()) {
            None => DEFAULT_SECTIONS.to_vec(),
            Some(value) => sections(value).ok_or_else(|| reader.refused(&format!("`mrope_section` of {value}"), "must be a list of up to four integers"))?,
        };
        if !covers(&sections, rotary) {
            let hint = format!("llama.cpp needs sections of the {} rotated pairs of a head", rotary / 2);
            return Err(reader.refused(&format!("`mrope_section` of {sections:?}"), hint));
        }
        let width = size("head_dim", family.head_dim.unwrap_or(0))?;
        let sum = sections.iter().fold(0u64, |sum, section| sum.saturating_add(u64::try_from(*section).unwrap_or(u64::MAX)));
        if sum > width {
            let hint = format!("llama.cpp aborts if their sum is more than {width}, the width of a head: set `mrope_section` in `rope_parameters`");
            return Err(reader.refused(&format!("`mrope_section` of {sections:?}"), hint));
        }
        keys.push((SECTIONS, Value::Integers(sections)));
    }
    Ok(keys)
}

/// Sections of up to four axes. Missing axes have none.
fn sections(value: &Json) -> Option<Vec<i64>> {
    let mut sections: Vec<i64> = value.as_array()?.iter().map(Json::as_i64).collect::<Option<_>>()?;
    let is_complete = sections.len() <= DEFAULT_SECTIONS.len();
    sections.resize(DEFAULT_SECTIONS.len(), 0);
    is_complete.then_some(sections)
}

/// Keys of state space layers. llama.cpp does not limit step sizes, and needs a list of layers with
/// attention.
fn describe_state_space(reader: &Reader) -> Result<Vec<(&'static str, Value)>> {
    let (architecture, layers) = (reader.family.architecture, 0..reader.layers()?);
    let is_unused = reader.family.recurrent == Recurrent::UnusedStateSpace;
    if !is_unused && !layers.clone().any(|layer| reader.is_recurrent(layer)) {
        let hint = format!("llama.cpp has another architecture for such models than `{architecture}`, which is not supported");
        return Err(reader.refused("a model without state space layers", hint));
    }
    if let Some(limits) = reader.get("time_step_limit").filter(|_| !is_unused) {
        let is_infinite = |value: &Json| value.get("__float__").and_then(Json::as_str) == Some("Infinity");
        let has_none = limits.get(0).and_then(Json::as_f64).is_some_and(|min| min <= 0.0) && limits.get(1).is_some_and(is_infinite);
        if !has_none {
            return Err(reader.refused(&format!("`time_step_limit` of {limits}"), format!("llama.cpp has no limits for `{architecture}`")));
        }
    }
    let has_positions = match reader.get(POSITIONS).map(|kind| kind.as_str()) {
        None | Some(Some("nope")) => false,
        Some(Some("rope")) => true,
        Some(other) => return Err(reader.refused(&format!("`{POSITIONS}` of {other:?}"), "supported: rope, nope")),
    };
    let inner = reader.required("hidden_size")?.saturating_mul(EXPANSION);
    Ok(vec![(INNER, Value::Unsigned(inner)), ("rope.scaling.finetuned", Value::Bool(has_positions))])
}

/// Whether the axes of interleaved sections contain all pairs, so that texts, whose positions are the same on
/// all of these axes, have usual rotary embeddings.
fn covers(sections: &[i64], rotary: u64) -> bool {
    let [time, height, width, _] = *sections else { return false };
    let pairs = i64::try_from(rotary / 2).unwrap_or(i64::MAX);
    let all = [time, height, width];
    let is_first = |axis: i64, size: i64| (axis..pairs.min(1 << 16)).step_by(3).last().is_none_or(|last| last < size.saturating_mul(3));
    all.iter().all(|size| (0..1 << 16).contains(size)) && all.iter().sum::<i64>() >= pairs && (0..).zip(all).all(|(axis, size)| is_first(axis, size))
}

/// Keys of `config.json` for recurrent layers, whose settings are in `config`.
pub(super) fn config(family: &GgufFamily, values: &mut Values, config: &Map<String, Json>, rotary: u64) -> Result<Vec<(&'static str, Json)>> {
    if family.recurrent == Recurrent::SingleParts {
        return single_parts::config(values, config);
    }
    let size = |key: &str| config.get(key).and_then(Json::as_u64).unwrap_or(0);
    if family.recurrent.has_state_space_sizes() {
        let inner = values.required(INNER)?;
        let width = inner.checked_div(size("mamba_n_heads")).filter(|_| size("hidden_size").checked_mul(EXPANSION) == Some(inner));
        let width = width.ok_or_else(|| values.wrong(format!("`{}` is {inner}, which llama.cpp does not support", values.own(INNER))))?;
        if family.experts.is_none() {
            // Files of llama.cpp's converter have it for models without experts.
            values.take(&values.own("expert_used_count"));
        }
        let mut keys = vec![("mamba_expand", json!(EXPANSION)), ("mamba_d_head", json!(width))];
        keys.extend(family.experts.is_none().then(|| ("num_local_experts", json!(0))));
        return Ok(keys);
    }
    if !family.recurrent.is_delta() {
        return Ok(Vec::new());
    }
    let (inner, width, heads) = (values.required(INNER)?, size("linear_key_head_dim"), size("linear_num_value_heads"));
    if heads.checked_mul(width) != Some(inner) {
        return Err(values.wrong(format!("`{}` is {inner}, but there are {heads} heads of {width}", values.own(INNER))));
    }
    let (layers, interval) = (size("num_hidden_layers"), size("full_attention_interval").max(1));
    let key = values.own(LAYERS);
    let recurrent: Vec<bool> = match values.take(&key) {
        None if layers < 1 << 16 => (1..=layers).map(|layer| !layer.is_multiple_of(interval)).collect(),
        Some(Value::Bools(list)) if list.len() as u64 == layers => list,
        _ => return Err(values.wrong(format!("`{key}` must have a flag for each of {layers} layers"))),
    };
    let named = |recurrent: &bool| if *recurrent { "linear_attention" } else { "full_attention" };
    let types: Json = recurrent.iter().map(named).collect();
    if family.recurrent == Recurrent::TiledDelta {
        let key = values.own(SECTIONS);
        let sections = values.integers(&key)?.ok_or_else(|| values.wrong(format!("`{key}` is missing")))?;
        if !covers(&sections, rotary) {
            return Err(Error::Unsupported {
                what: format!("{}: `{key}` of {sections:?}", values.path.display()),
                hint: format!("the sections must contain the {} rotated pairs of a head", rotary / 2),
            });
        }
    }
    Ok(vec![("linear_value_head_dim", json!(width)), ("layer_types", types)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_contain_all_rotated_pairs() {
        assert!(covers(&DEFAULT_SECTIONS, 64) && covers(&DEFAULT_SECTIONS, 4) && covers(&[1, 1, 0, 0], 4));
        for (sections, rotary) in
            [(vec![11, 11, 10, 0], 66), (vec![22, 10, 0, 0], 64), (vec![11, 11, 10], 64), (vec![11, -11, 10, 0], 4), (vec![0, 1, 1, 0], 2)]
        {
            assert!(!covers(&sections, rotary), "{sections:?} {rotary}");
        }
    }
}
