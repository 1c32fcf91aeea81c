//! `genai_config.json`, which describes a decoder with a KV cache to onnxruntime-genai.

use serde_json::{Map, Value, json};

use crate::arch;
use crate::error::{Error, Result};
use crate::generation::{LanguageModel, stated_positions};
use crate::ir::decoder::{LOGITS, MASK, POSITIONS, TOKENS, past, present};
use crate::ir::ops::{Rotary, RotaryScaling};
use crate::ir::{Graph, Op};
use crate::model::{Model, open_auxiliary_config};
use crate::onnx::{CachedAttention, Draft};

/// Name of the file.
pub(super) const FILE: &str = "genai_config.json";
/// Sampling parameters that are copied from `generation_config.json`.
const SEARCH_KEYS: [&str; 8] =
    ["diversity_penalty", "do_sample", "length_penalty", "no_repeat_ngram_size", "repetition_penalty", "temperature", "top_k", "top_p"];

/// Maximum length of a text for which cached keys stay valid: LongRoPE uses other frequencies in longer
/// texts.
pub(super) fn rope_limit(graph: &Graph) -> Option<usize> {
    let limit = |op: &Op| if let Op::Rotary(Rotary { scaling: RotaryScaling::LongRope { original, .. }, .. }) = op { Some(*original) } else { None };
    graph.nodes().iter().filter_map(|node| limit(&node.op)).min()
}

/// Contents of the file, or the reason why the decoder cannot be described.
///
/// # Errors
/// `generation_config.json` cannot be read.
pub(super) fn config(model: &Model, decoder: &LanguageModel, graph: &Graph, draft: &Draft, file: &str) -> Result<std::result::Result<String, String>> {
    let Some(&attention) = draft.cached_attentions.first() else { return Ok(Err("the graph has no KV cache".into())) };
    if let Some(number) = draft.cached_attentions.iter().position(|other| *other != attention) {
        return Ok(Err(format!("layer {number} has another number of heads or head size than layer 0, but the format has one value for all layers")));
    }
    let CachedAttention { heads, groups, widths: [key_width, value_width] } = attention;
    if key_width != value_width {
        return Ok(Err(format!("the head size of keys is {key_width} and that of values {value_width}, but the format has one value for both")));
    }
    let Some(context) = decoder.positions().or_else(|| stated_positions(model)).into_iter().chain(rope_limit(graph)).min() else {
        return Ok(Err("neither config.json nor the graph specifies the maximum length of texts (`max_position_embeddings`)".into()));
    };
    let settings = open_auxiliary_config(&model.path, &model.auxiliary.synthesized, "generation_config.json")?;
    let setting = |key: &str| [settings.get(key), arch::token(model.config.values(), key)].into_iter().flatten().find(|value| !value.is_null()).cloned();
    // Negative numbers mean that the token is not defined.
    let tokens = |key: &str| -> Vec<u64> {
        match setting(key) {
            Some(Value::Array(list)) => list.iter().filter_map(Value::as_u64).collect(),
            single => single.iter().filter_map(Value::as_u64).collect(),
        }
    };
    let ends = tokens("eos_token_id");
    let Some(first) = ends.first() else {
        return Ok(Err("neither generation_config.json nor config.json specifies an `eos_token_id`".into()));
    };
    let last = |name: &str| graph.outputs().iter().find(|(output, _)| output == name).and_then(|(_, id)| graph.value(*id).ty.shape.last()?.fixed());
    let values = arch::text_values(model.config.values());
    let hidden = values.get("hidden_size").or_else(|| values.get("n_embd")).and_then(Value::as_u64).unwrap_or((heads * key_width) as u64);
    let has_input = |name: &str| draft.model.graph.iter().flat_map(|graph| &graph.input).any(|port| port.name() == name);
    let names = |key: &str, name: &str| (key.to_owned(), Value::from(name));
    let mut inputs: Map<String, Value> = [TOKENS, MASK, POSITIONS].into_iter().filter(|name| has_input(name)).map(|name| names(name, name)).collect();
    let ([past_key, past_value], [present_key, present_value]) = (past("%d"), present("%d"));
    inputs.extend([names("past_key_names", &past_key), names("past_value_names", &past_value)]);
    let outputs = Map::from_iter([names(LOGITS, LOGITS), names("present_key_names", &present_key), names("present_value_names", &present_value)]);
    let mut described = json!({
        "type": arch::family(model.config.model_type()).map_or("decoder", |family| family.genai),
        "vocab_size": last(LOGITS),
        "context_length": context,
        "eos_token_id": if let [end] = ends[..] { json!(end) } else { json!(ends) },
        "pad_token_id": tokens("pad_token_id").first().unwrap_or(first),
        "decoder": {
            "filename": file,
            "session_options": { "log_id": "onnxruntime-genai", "provider_options": [] },
            "head_size": key_width,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": groups,
            "num_hidden_layers": draft.cached_attentions.len(),
            "inputs": inputs,
            "outputs": outputs,
        },
    });
    if let Some(begin) = tokens("bos_token_id").first() {
        described["bos_token_id"] = json!(begin);
    }
    let mut search =
        json!({ "do_sample": false, "max_length": context, "num_beams": 1, "past_present_share_buffer": false, "temperature": 1.0, "top_k": 50, "top_p": 1.0 });
    for key in SEARCH_KEYS {
        if let Some(value) = settings.get(key).filter(|value| value.is_number() || value.is_boolean()) {
            search[key] = value.clone();
        }
    }
    let text = serde_json::to_string_pretty(&json!({ "model": described, "search": search })).map_err(|e| Error::option(FILE, e.to_string()))?;
    Ok(Ok(text + "\n"))
}
