//! Groups of experts of DeepSeek-V2, whose routers select the experts of the groups with the largest scores.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use serde_json::{Value as Json, json};

use super::reader::Reader;
use super::values::Values;
use crate::error::{Error, Result};
use crate::store::gguf::Value;

/// Keys of the number of groups, and of the groups that a router selects: in GGUF files, and in
/// `config.json`.
const KEYS: [(&str, &str); 2] = [("expert_group_count", "n_group"), ("expert_group_used_count", "topk_group")];
/// Key of `config.json` that specifies whether the router selects groups, and its values.
const METHOD: &str = "topk_method";
const IGNORED: &str = "greedy";
const LIMITED: &str = "group_limited_greedy";

/// The error of routers that select all groups, which llama.cpp does not support.
pub(super) fn refused(reader: &Reader, [count, used]: [u64; 2], change: &str) -> Error {
    let hint = format!("llama.cpp requires fewer than `n_group`; if all groups are used, {change}, which computes the same");
    reader.refused(&format!("`topk_group` of {used} with `n_group` of {count}"), hint)
}

/// Keys of a file, and a note if llama.cpp selects other groups.
pub(super) fn describe(reader: &Reader) -> Result<(Vec<(&'static str, Value)>, Option<String>)> {
    let keys = |numbers: [u64; 2]| KEYS.iter().zip(numbers).map(|((key, _), number)| (*key, Value::Unsigned(number))).collect();
    match reader.get(METHOD).map_or(Some(IGNORED), Json::as_str) {
        Some(IGNORED) => Ok((keys([1, 1]), None)),
        Some(LIMITED) => {
            let [(_, count), (_, used)] = KEYS;
            let [count, used] = [reader.required(count)?, reader.required(used)?];
            if used >= count {
                return Err(refused(reader, [count, used], &format!("set `{METHOD}` to {IGNORED}")));
            }
            let note = format!(
                "llama.cpp selects {used} of {count} groups of experts by the sum of the two largest scores of each group, the model by the largest one: results differ for tokens for which these are other groups"
            );
            Ok((keys([count, used]), Some(note)))
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
