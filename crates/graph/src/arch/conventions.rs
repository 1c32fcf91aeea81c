//! Names of weights by convention, for models whose `model_type` is not in the table of families.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};

use super::Tie;
use crate::store::{Role, Weight};

/// Weights that are tied unless `config.json` unties them.
pub(super) const TIED: &[Tie] = &[
    ("embed_out.weight", "gpt_neox.embed_in.weight"),
    ("lm_head.weight", "model.embed_tokens.weight"),
    ("lm_head.weight", "transformer.wte.weight"),
    ("lm_head.weight", "model.decoder.embed_tokens.weight"),
    ("proj_out.weight", "model.decoder.embed_tokens.weight"),
    ("lm_head.weight", "shared.weight"),
    ("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
    ("cls.predictions.decoder.weight", "deberta.embeddings.word_embeddings.weight"),
    ("lm_head.decoder.weight", "roberta.embeddings.word_embeddings.weight"),
    ("lm_head.decoder.weight", "mpnet.embeddings.word_embeddings.weight"),
    ("vocab_projector.weight", "distilbert.embeddings.word_embeddings.weight"),
    ("decoder.weight", "model.embeddings.tok_embeddings.weight"),
];

/// Last name components of layers of a module that runtimes fuse.
pub(super) const FUSED: &[&[&str]] = &[
    &["q_proj", "k_proj", "v_proj"],
    &["wq", "wk", "wv"],
    &["query", "key", "value"],
    &["q_lin", "k_lin", "v_lin"],
    &["q_a_proj", "kv_a_proj_with_mqa"],
    &["in_proj_qkv", "in_proj_z"],
    &["in_proj_b", "in_proj_a"],
    &["gate_proj", "up_proj"],
    &["w1", "w3"],
];

/// Substrings of the names of matrices that are not linear layers, or require full precision.
const EXEMPT: [(&str, Role); 32] = [
    ("embed_out", Role::Head),
    ("denoising_class_embed", Role::Table),
    ("class_embed.", Role::Head),
    ("bbox_embed.", Role::Head),
    ("bbox_head.", Role::Head),
    ("score_head.", Role::Head),
    ("embed", Role::Table),
    ("wte.", Role::Table),
    ("wpe.", Role::Table),
    ("shared.weight", Role::Table),
    ("lm_head", Role::Head),
    ("cls.predictions", Role::Head),
    ("output_projection", Role::Head),
    ("router", Role::Router),
    ("mlp.gate.weight", Role::Router),
    ("block_sparse_moe.gate.weight", Role::Router),
    ("shared_expert_gate", Role::Router),
    ("norm", Role::Other),
    ("position", Role::Other),
    ("relative_attention_bias", Role::Other),
    (".in_proj_a.", Role::LinearAttentionGate),
    (".in_proj_b.", Role::LinearAttentionGate),
    (".in_proj_ba.", Role::LinearAttentionGate),
    ("visual.", Role::Vision),
    ("vision_tower.", Role::Vision),
    ("multi_modal_projector.", Role::Vision),
    ("mtp.", Role::TokenPrediction),
    ("eh_proj.", Role::TokenPrediction),
    ("indexer.weights_proj.", Role::Other),
    ("enc_output.", Role::Localization),
    ("sampling_offsets.", Role::Localization),
    ("query_pos_head.", Role::Localization),
];
/// Modules that are output heads, wherever they are in the model.
const HEADS: [&str; 3] = ["output_layer", "shared_head.head", "score"];
/// Module that is the output head if only [`WRAPPERS`] contain it; elsewhere the name is that of an
/// attention output projection.
const TOP_HEAD: &str = "output";
/// Modules that contain a whole language model.
const WRAPPERS: [&str; 6] = ["model", "transformer", "language_model", "text_model", "llm", "module"];

/// The role of a matrix, judged by its name; `None` for the weight of a linear layer.
pub(super) fn role(name: &str) -> Option<Role> {
    let module = name.strip_suffix(".weight")?;
    let is_head = |head: &&str| module.strip_suffix(*head).is_some_and(|parent| parent.is_empty() || parent.ends_with('.'));
    let is_at_the_top = |parent: &str| parent.split_terminator('.').all(|part| WRAPPERS.contains(&part));
    if HEADS.iter().any(is_head) || is_head(&TOP_HEAD) && module.strip_suffix(TOP_HEAD).is_some_and(is_at_the_top) {
        return Some(Role::Head);
    }
    EXEMPT.iter().find(|(part, _)| name.contains(part)).map(|(_, role)| *role)
}

/// Sets the role of routers: gates that have experts as siblings, as in
/// `mixer.gate.weight` next to `mixer.experts.0.up.weight`, or next to `moe.up_proj.weight` of rank 3,
/// which gets a role as well.
fn mark_routers(weights: &mut BTreeMap<String, Weight>) {
    let mut mixtures: BTreeSet<String> = weights.keys().filter_map(|name| mixture(name)).map(str::to_owned).collect();
    let shapes: Vec<(&str, &[usize])> = weights.iter().map(|(name, weight)| (name.as_str(), weight.shape.as_slice())).collect();
    let mut experts = BTreeSet::new();
    for (name, shape) in shapes.iter().filter(|(name, shape)| shape.len() == 3 && name.ends_with(".weight")) {
        let parent = name.strip_suffix(".weight").and_then(|module| module.rsplit_once('.')).map(|(block, _)| format!("{block}."));
        let Some(parent) = parent.filter(|parent| !mixtures.contains(parent)) else { continue };
        // A router has one row per expert, and one column per input or output of an expert. A square gate
        // next to a convolution has one row per channel.
        let [count, sides @ ..] = shape else { continue };
        let scores = |(other, shape): &(&str, &[usize])| {
            matches!(shape, [rows, columns] if rows == count && rows != columns && sides.contains(columns)) && is_gate(other, &parent)
        };
        if shapes.iter().any(scores) {
            experts.insert((*name).to_owned());
        }
    }
    mixtures.extend(experts.iter().filter_map(|name| Some(format!("{}.", name.strip_suffix(".weight")?.rsplit_once('.')?.0))));
    for (name, weight) in weights.iter_mut().filter(|(name, weight)| weight.role.is_none() && name.ends_with(".weight")) {
        let is_router = weight.shape.len() == 2 && !name.contains("norm") && mixtures.iter().any(|mixture| is_gate(name, mixture));
        weight.role = if experts.contains(name) { Some(Role::Experts) } else { is_router.then_some(Role::Router) };
    }
}

/// The prefix of the mixture that an expert weight belongs to: `mixer.` of `mixer.experts.0.up.weight`
/// and `mixer.local_experts.0.up.weight`.
fn mixture(name: &str) -> Option<&str> {
    let end = name.find("experts.")?;
    let start = name.get(..end)?.rfind('.').map_or(0, |dot| dot.saturating_add(1));
    name.get(..start)
}

/// Whether a weight belongs to a gate of the mixture with this prefix.
fn is_gate(name: &str, mixture: &str) -> bool {
    let module = name.strip_prefix(mixture).and_then(|rest| rest.split('.').next());
    module.is_some_and(|module| module == "gate" || module.ends_with("_gate") || module.contains("router"))
}

/// Sets the role of layers in `vision_model` of multimodal models. Models like CLIP are excluded: their image
/// encoder is half of the model.
fn mark_vision(weights: &mut BTreeMap<String, Weight>, config: &Map<String, Value>) {
    let is_multimodal = config.contains_key("vision_config") && config.contains_key("text_config");
    let model_type = config.get("model_type").and_then(Value::as_str).unwrap_or("");
    if !is_multimodal || ["clip", "siglip"].iter().any(|family| model_type.contains(family)) {
        return;
    }
    let is_vision = |name: &str| name.split('.').any(|part| part == "vision_model") && name.ends_with(".weight") && role(name).is_none();
    let layers = weights.iter_mut().filter(|(name, weight)| weight.role.is_none() && weight.shape.len() >= 2 && is_vision(name));
    layers.for_each(|(_, weight)| weight.role = Some(Role::Vision));
}

/// Sets the roles that depend on other weights or on the configuration.
pub(super) fn mark(weights: &mut BTreeMap<String, Weight>, config: &Map<String, Value>) {
    mark_routers(weights);
    mark_vision(weights, config);
}
