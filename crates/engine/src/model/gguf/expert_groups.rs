//! Groups of experts, of which routers select those with the largest scores.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use serde_json::{Value as Json, json};

use super::reader::Reader;
use super::values::Values;
use crate::error::Result;
use crate::store::gguf::Value;

/// Keys of the number of groups, and of the groups that a router selects: in GGUF files, and in
/// `config.json`.
const KEYS: [(&str, &str); 2] = [("expert_group_count", "n_group"), ("expert_group_used_count", "topk_group")];
/// Key of `config.json` that specifies whether the router selects groups, and its values.
const METHOD: &str = "topk_method";
const IGNORED: &str = "greedy";
const LIMITED: &str = "group_limited_greedy";

/// The numbers of groups and of selected groups in a file: one group if routers select all of them.
fn numbers(reader: &Reader, [count, used]: [u64; 2]) -> Result<[u64; 2]> {
    let [(_, count_key), (_, used_key)] = KEYS;
    if used > count {
        return Err(reader.refused(&format!("`{used_key}` of {used} with `{count_key}` of {count}"), format!("must be at most `{count_key}`")));
    }
    if used == count {
        return Ok([1, 1]);
    }
    let experts = reader.required(reader.family.experts.map_or("n_routed_experts", |experts| experts.count))?;
    if !experts.is_multiple_of(count) || experts.checked_div(count).is_none_or(|each| each < 2) {
        let what = format!("`{count_key}` of {count} with {experts} experts");
        return Err(reader.refused(&what, "llama.cpp requires groups of the same number of experts, at least two"));
    }
    Ok([count, used])
}

/// Adds the keys of a file to those in `own`, and returns a note if llama.cpp selects other groups.
pub(super) fn describe(reader: &Reader, own: &mut Vec<(&'static str, Value)>) -> Result<Option<String>> {
    let mut replace = |numbers: [u64; 2]| {
        own.retain(|(key, _)| KEYS.iter().all(|(other, _)| key != other));
        own.extend(KEYS.iter().zip(numbers).map(|((key, _), number)| (*key, Value::Unsigned(number))));
    };
    if !reader.family.has_group_methods {
        let [count, used] = KEYS.map(|(key, _)| reader.family.settings.iter().find(|setting| setting.gguf == key));
        if let (Some(count), Some(used)) = (count, used)
            && let (Value::Unsigned(count), Value::Unsigned(used)) = (reader.setting(count)?, reader.setting(used)?)
        {
            replace(numbers(reader, [count, used])?);
        }
        return Ok(None);
    }
    match reader.get(METHOD).map_or(Some(IGNORED), Json::as_str) {
        Some(IGNORED) => {
            replace([1, 1]);
            Ok(None)
        }
        Some(LIMITED) => {
            let [(_, count), (_, used)] = KEYS;
            let [count, used] = numbers(reader, [reader.required(count)?, reader.required(used)?])?;
            replace([count, used]);
            Ok((used < count).then(|| {
                format!(
                    "llama.cpp selects {used} of {count} groups of experts by the sum of the two largest scores of each group, the model by the largest one: results differ for tokens for which these are other groups"
                )
            }))
        }
        _ => Err(reader.refused(&format!("`{METHOD}` of {}", reader.get(METHOD).unwrap_or(&Json::Null)), format!("supported: {IGNORED}, {LIMITED}"))),
    }
}

/// Keys of `config.json`.
pub(super) fn config(values: &mut Values) -> Result<Vec<(&'static str, Json)>> {
    let [(count_key, count_name), (used_key, used_name)] = KEYS;
    let count = values.size(&values.own(count_key))?.unwrap_or(1);
    if count <= 1 {
        values.take(&values.own(used_key));
        return Ok(vec![(METHOD, json!(IGNORED))]);
    }
    let used = values.required(used_key)?;
    Ok(vec![(METHOD, json!(LIMITED)), (count_name, json!(count)), (used_name, json!(used))])
}
