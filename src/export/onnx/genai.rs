//! `genai_config.json`, which tells onnxruntime-genai what a decoder with a cache takes and gives.

use serde_json::{Map, Value, json};

use crate::error::{Error, Result};
use crate::generation::{LanguageModel, stated_positions};
use crate::ir::decoder::{LOGITS, MASK, POSITIONS, TOKENS, past, present};
use crate::ir::ops::{Rotary, RotaryScaling};
use crate::ir::{Graph, Op};
use crate::model::{Model, config_beside};
use crate::onnx::{Draft, Kept};

/// The file's name.
pub(super) const FILE: &str = "genai_config.json";
/// Families that onnxruntime-genai 0.18 knows by `model_type` and runs as decoders with keys and values apart; all others are a `decoder`.
const TYPES: [&str; 9] = ["gemma2", "gemma3_text", "llama", "mistral", "phi3", "qwen2", "qwen3", "smollm3", "decoder"];
/// How tokens are chosen, where `generation_config.json` says it.
const SEARCH: [&str; 8] = ["diversity_penalty", "do_sample", "length_penalty", "no_repeat_ngram_size", "repetition_penalty", "temperature", "top_k", "top_p"];

/// How many tokens a text has at most whose first part may be kept: rotary embeddings with two sets of angles change them for all tokens
/// behind so many.
pub(super) fn same_angles(graph: &Graph) -> Option<usize> {
    let limit = |op: &Op| if let Op::Rotary(Rotary { scaling: RotaryScaling::LongRope { original, .. }, .. }) = op { Some(*original) } else { None };
    graph.nodes().iter().filter_map(|node| limit(&node.op)).min()
}

/// The text of the file, or why there is none.
///
/// # Errors
/// `generation_config.json` cannot be read.
pub(super) fn config(model: &Model, decoder: &LanguageModel, graph: &Graph, draft: &Draft, file: &str) -> Result<std::result::Result<String, String>> {
    let Some(&kept) = draft.kept.first() else { return Ok(Err("nothing is kept of earlier tokens".into())) };
    if let Some(number) = draft.kept.iter().position(|other| *other != kept) {
        return Ok(Err(format!("layer {number} has another number of heads, or other widths, than layer 0, and it has one number for all")));
    }
    let Kept { heads, groups, widths: [width, width_of_values] } = kept;
    if width != width_of_values {
        return Ok(Err(format!("keys are {width} and values {width_of_values} wide, and it has one number for both")));
    }
    let Some(context) = decoder.positions().or_else(|| stated_positions(model)).into_iter().chain(same_angles(graph)).min() else {
        return Ok(Err("neither config.json nor the graph says how long texts are at most (`max_position_embeddings`)".into()));
    };
    let settings = config_beside(&model.path, &model.beside.made, "generation_config.json")?;
    let said = |key: &str| [settings.get(key), model.config.get(key)].into_iter().flatten().find(|value| !value.is_null()).cloned();
    // In the order in which they are written; a number below zero says that there is none.
    let tokens = |key: &str| -> Vec<u64> {
        match said(key) {
            Some(Value::Array(list)) => list.iter().filter_map(Value::as_u64).collect(),
            one => one.iter().filter_map(Value::as_u64).collect(),
        }
    };
    let ends = tokens("eos_token_id");
    let Some(first) = ends.first() else {
        return Ok(Err("neither generation_config.json nor config.json names an `eos_token_id`".into()));
    };
    let last = |name: &str| graph.outputs().iter().find(|(output, _)| output == name).and_then(|(_, id)| graph.value(*id).ty.shape.last()?.fixed());
    let hidden = model.config.get("hidden_size").or_else(|| model.config.get("n_embd")).and_then(Value::as_u64).unwrap_or((heads * width) as u64);
    let takes = |name: &str| draft.model.graph.iter().flat_map(|graph| &graph.input).any(|port| port.name() == name);
    let names = |key: &str, name: &str| (key.to_owned(), Value::from(name));
    let mut inputs: Map<String, Value> = [TOKENS, MASK, POSITIONS].into_iter().filter(|name| takes(name)).map(|name| names(name, name)).collect();
    let ([past_key, past_value], [present_key, present_value]) = (past("%d"), present("%d"));
    inputs.extend([names("past_key_names", &past_key), names("past_value_names", &past_value)]);
    let outputs = Map::from_iter([names(LOGITS, LOGITS), names("present_key_names", &present_key), names("present_value_names", &present_value)]);
    let family = model.config.model_type();
    let mut described = json!({
        "type": if TYPES.contains(&family) { family } else { "decoder" },
        "vocab_size": last(LOGITS),
        "context_length": context,
        "eos_token_id": if let [end] = ends[..] { json!(end) } else { json!(ends) },
        "pad_token_id": tokens("pad_token_id").first().unwrap_or(first),
        "decoder": {
            "filename": file,
            "session_options": { "log_id": "onnxruntime-genai", "provider_options": [] },
            "head_size": width,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": groups,
            "num_hidden_layers": draft.kept.len(),
            "inputs": inputs,
            "outputs": outputs,
        },
    });
    if let Some(begin) = tokens("bos_token_id").first() {
        described["bos_token_id"] = json!(begin);
    }
    let mut search =
        json!({ "do_sample": false, "max_length": context, "num_beams": 1, "past_present_share_buffer": false, "temperature": 1.0, "top_k": 50, "top_p": 1.0 });
    for key in SEARCH {
        if let Some(value) = settings.get(key).filter(|value| value.is_number() || value.is_boolean()) {
            search[key] = value.clone();
        }
    }
    let text = serde_json::to_string_pretty(&json!({ "model": described, "search": search })).map_err(|e| Error::option(FILE, e.to_string()))?;
    Ok(Ok(text + "\n"))
}
