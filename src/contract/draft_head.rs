//! EAGLE-3 heads for speculative decoding, in the format of `speculators`.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::folder::{Folder, Tensor};
use super::{Finding, Target, layer_number};
use crate::error::Result;
use crate::store::DType;

/// Number of layers of the verifier whose hidden states a head reads, unless `num_aux_hidden_states`
/// specifies another one.
const STATES: u64 = 3;
/// Types of layers, and the parts that only layers of this type have.
const TYPES: [(&str, &[&str]); 2] = [("llama", &[]), ("qwen3", &["self_attn.q_norm", "self_attn.k_norm"])];
/// Parts of layers of all types.
const PARTS: [&str; 10] = [
    "hidden_norm",
    "input_layernorm",
    "post_attention_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
];
const HINT: &str = "correct it, or train the head with `compress draft --method eagle3`, or with `speculators`";

fn finding(subject: &str, reason: impl Into<String>) -> Finding {
    Finding::new(subject, reason, HINT)
}

/// Folders of other models have no findings.
pub(super) fn draft_head(folder: &Folder, target: Target) -> Result<Vec<Finding>> {
    if folder.get("speculators_model_type").and_then(Value::as_str) != Some("eagle3") {
        return Ok(Vec::new());
    }
    let mut found = description(folder);
    let Some(layer) = folder.get("transformer_layer_config").and_then(Value::as_object) else {
        found.push(finding("transformer_layer_config", "is missing in config.json: it describes the layer of the head"));
        return Ok(found);
    };
    found.extend(layer_type(folder, layer, target));
    let number = |key: &str| layer.get(key).and_then(Value::as_u64);
    let (Some(width), Some(tokens)) = (number("hidden_size"), number("vocab_size")) else {
        found.push(finding("transformer_layer_config", "has no `hidden_size` or no `vocab_size`"));
        return Ok(found);
    };
    let own_tokens = folder.get("draft_vocab_size").and_then(Value::as_u64).unwrap_or(tokens);
    let states = number("num_aux_hidden_states").unwrap_or(STATES);
    let layers = folder.get("eagle_aux_hidden_state_layer_ids").and_then(Value::as_array).map(Vec::len);
    if let Some(count) = layers.filter(|count| *count > 0 && *count as u64 != states) {
        found.push(finding("eagle_aux_hidden_state_layer_ids", format!("has {count} layers, but {target} reads the hidden states of {states}")));
    }
    let of_verifier = folder.get("target_hidden_size").and_then(Value::as_u64).unwrap_or(width);
    let expected: [(&str, &[u64]); 5] = [
        ("embed_tokens.weight", &[tokens, width]),
        ("lm_head.weight", &[own_tokens, width]),
        ("fc.weight", &[width, states.saturating_mul(of_verifier)]),
        ("d2t", &[own_tokens]),
        ("t2d", &[tokens]),
    ];
    for (name, shape) in expected {
        let stored = folder.tensors.get(name).map(|tensor| tensor.shape.iter().map(|size| *size as u64).collect::<Vec<_>>());
        if let Some(stored) = stored.filter(|stored| stored != shape) {
            found.push(finding(name, format!("has the shape {stored:?}, but config.json requires {shape:?}")));
        }
    }
    found.extend(vocabulary(&folder.tensors, own_tokens, tokens)?);
    Ok(found)
}

/// The keys that select the verifier and the number of draft tokens.
fn description(folder: &Folder) -> Vec<Finding> {
    let described = folder.get("speculators_config");
    let of = |path: &str| described.and_then(|config| config.pointer(path));
    let name = of("/verifier/name_or_path").and_then(Value::as_str).filter(|name| !name.is_empty());
    let draft_tokens = of("/proposal_methods/0/speculative_tokens").and_then(Value::as_u64).filter(|count| *count > 0);
    let unnamed = name.is_none().then(|| finding("speculators_config", "has no `verifier` with a `name_or_path`, the model that the head belongs to"));
    let uncounted = draft_tokens.is_none().then(|| finding("speculators_config", "has no `proposal_methods` with a number of `speculative_tokens`"));
    unnamed.into_iter().chain(uncounted).collect()
}

/// Layers of types that vLLM does not create, and tensors that layers of their type do not have.
fn layer_type(folder: &Folder, layer: &Map<String, Value>, target: Target) -> Vec<Finding> {
    // vLLM 0.11 creates layers of Llama for all types.
    let known = if target.version() == "0.11" { &TYPES[..1] } else { &TYPES[..] };
    let name = layer.get("model_type").and_then(Value::as_str).unwrap_or("llama");
    let Some((_, own)) = known.iter().find(|(known, _)| *known == name) else {
        let names: Vec<&str> = known.iter().map(|(name, _)| *name).collect();
        let reason = format!("has the `model_type` `{name}`, but {target} loads heads with layers of {}", names.join(" and "));
        return vec![finding("transformer_layer_config", reason)];
    };
    let part = |tensor: &String| {
        layer_number(tensor, "layers.")?;
        let (_, part) = tensor.strip_prefix("layers.")?.split_once('.')?;
        let is_known = PARTS.iter().chain(*own).any(|known| part.strip_prefix(*known).is_some_and(|rest| rest.starts_with('.')));
        (!is_known).then(|| finding(tensor, format!("does not belong to a layer of `{name}`, so that {target} fails to load it")))
    };
    folder.tensors.keys().filter_map(part).collect()
}

/// The map of a smaller vocabulary: an offset for each token of the head, from its number to the id in the
/// vocabulary of the verifier.
fn vocabulary(tensors: &BTreeMap<String, Tensor>, own_tokens: u64, tokens: u64) -> Result<Vec<Finding>> {
    let Some(map) = tensors.get("d2t") else {
        let is_smaller = own_tokens != tokens && !tensors.is_empty();
        let reason = format!("is missing, but the head has {own_tokens} of {tokens} tokens");
        return Ok(if is_smaller { vec![finding("d2t", reason)] } else { Vec::new() });
    };
    if map.dtype != DType::I64 {
        return Ok(vec![finding("d2t", format!("has the dtype {}, expected I64", map.dtype))]);
    }
    let Some(bytes) = map.read(own_tokens.saturating_mul(8))? else { return Ok(Vec::new()) };
    let mut ids = bytes.as_chunks::<8>().0.iter().zip(0i64..).map(|(offset, own)| (own, own.saturating_add(i64::from_le_bytes(*offset))));
    let outside = ids.find(|(_, id)| !u64::try_from(*id).is_ok_and(|id| id < tokens));
    Ok(outside
        .map(|(own, id)| finding("d2t", format!("maps token {own} of the head to the id {id}, but the verifier has {tokens} tokens")))
        .into_iter()
        .collect())
}
