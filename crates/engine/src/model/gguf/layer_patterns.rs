//! Layers that differ from the others by their position, which llama.cpp knows for each architecture.

use serde_json::{Map, Value as Json};

use super::reader::Reader;
use crate::error::Result;

/// Keys of `config.json` with a flag for each layer with rotary embedding, and with the number of layers of
/// which the last one has none.
const ROTARY: (&str, &str) = ("no_rope_layers", "no_rope_layer_interval");

/// Rejects layers without rotary embedding at other positions than every `period`-th.
pub(super) fn check_rotary(reader: &Reader, period: u64, layers: u64) -> Result<()> {
    let (key, interval) = ROTARY;
    let architecture = reader.family.architecture;
    let hint = format!("llama.cpp omits the rotary embedding of every {period}th layer of `{architecture}`");
    let expected = |layer: u64| !layer.saturating_add(1).is_multiple_of(period);
    let list = reader.get(key).and_then(Json::as_array).filter(|list| !list.is_empty());
    if let Some(list) = list {
        let is_same = (0..layers).zip(list).all(|(layer, flag)| flag.as_u64() == Some(u64::from(expected(layer))));
        if !is_same || (list.len() as u64) < layers {
            return Err(reader.refused(&format!("`{key}` of {}", Json::from(list.clone())), hint));
        }
        return Ok(());
    }
    let found = reader.size(interval)?.unwrap_or(period);
    if (1..=layers).any(|number| number.is_multiple_of(found) != number.is_multiple_of(period)) {
        return Err(reader.refused(&format!("`{interval}` of {found}"), hint));
    }
    Ok(())
}

/// Key of normalized queries and keys, which llama.cpp computes unless there are 128 experts, as in Llama 4
/// Maverick.
const UNIT_NORM: &str = "use_qk_norm";
const EXPERTS: &str = "num_local_experts";
const EXPERTS_WITHOUT_NORM: u64 = 128;

/// Rejects Llama 4 whose chunks, scaled queries, norms or experts are in other layers than in llama.cpp.
pub(super) fn check_chunks(reader: &Reader, period: u64, layers: u64) -> Result<()> {
    let architecture = reader.family.architecture;
    let named = |layer: u64| if layer.saturating_add(1).is_multiple_of(period) { "full_attention" } else { "chunked_attention" };
    let types = reader.get("layer_types").and_then(Json::as_array);
    if types.is_some_and(|types| types.len() as u64 != layers || (0..layers).zip(types).any(|(layer, kind)| kind.as_str() != Some(named(layer)))) {
        return Err(reader.refused("`layer_types`", format!("llama.cpp attends within chunks in all but every {period}th layer of `{architecture}`")));
    }
    // Published files have a number.
    let scaled = reader.model.config.get("attn_temperature_tuning");
    if scaled.is_some_and(|scaled| scaled.as_u64().map_or(scaled.as_bool() != Some(true), |number| number == 0)) {
        let hint = format!("llama.cpp scales the queries of layers without rotary embedding of `{architecture}`");
        return Err(reader.refused("`attn_temperature_tuning` of false", hint));
    }
    let has_norm = reader.get(UNIT_NORM).and_then(Json::as_bool).unwrap_or(true);
    let experts = reader.required(EXPERTS)?;
    if has_norm == (experts == EXPERTS_WITHOUT_NORM) {
        let hint = format!("llama.cpp normalizes queries and keys of `{architecture}`, unless there are {EXPERTS_WITHOUT_NORM} experts");
        return Err(reader.refused(&format!("`{UNIT_NORM}` of {has_norm} with {experts} experts"), hint));
    }
    let step = reader.size("interleave_moe_layer_step")?.unwrap_or(1);
    let expected: Vec<u64> = (0..layers).filter(|layer| layer.saturating_add(1).is_multiple_of(step)).collect();
    if let Some(found) = reader.get("moe_layers").filter(|found| **found != Json::from(expected)) {
        let hint = format!("llama.cpp requires experts in every {step}th layer, by `interleave_moe_layer_step`");
        return Err(reader.refused(&format!("`moe_layers` of {found}"), hint));
    }
    Ok(())
}

/// The key of `config.json` that Llama 4's files do not have, for the number of experts in `config`.
pub(super) fn unit_norm(config: &Map<String, Json>) -> (&'static str, Json) {
    let experts = config.get(EXPERTS).and_then(Json::as_u64);
    (UNIT_NORM, Json::Bool(experts != Some(EXPERTS_WITHOUT_NORM)))
}
