//! Model families: one file, and one line in `FAMILIES`, for each.
//!
//! A family describes the tensors of its checkpoints, and builds its graph from `config.json`. Parameters
//! have the tensor names of the checkpoint, nodes those of the modules. Builds without the feature `run`
//! contain only the descriptions.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

#[cfg(feature = "run")]
#[macro_use]
mod running;
#[cfg(not(feature = "run"))]
#[macro_use]
#[path = "weights_only.rs"]
mod running;

mod bert;
mod clip;
mod cohere;
mod conventions;
mod convnext;
mod deberta;
mod deepseek;
mod dinov2;
mod distilbert;
mod eagle3;
mod efficientnet;
mod ernie4_5;
mod family;
mod gemma;
mod gguf;
mod glm;
mod glm4_moe;
mod glm4_moe_lite;
mod gpt2;
mod gpt_neox;
mod gpt_oss;
mod granite;
mod granite_moe;
mod hunyuan;
mod layer_list;
mod lfm2;
mod llama;
mod llama4;
mod long_rope;
mod mamba2;
mod minimax_m2;
mod ministral3;
mod mixtral;
mod modernbert;
mod module_names;
mod mpnet;
mod multimodal;
mod nemotron_h;
mod olmo2;
mod olmo3;
mod opt;
mod phi;
mod phi3;
mod qwen2_vl;
mod qwen3_next;
mod qwen_moe;
mod resnet;
mod roberta;
mod roles;
mod rope_keys;
mod rt_detr;
mod smollm3;
mod stablelm;
mod starcoder2;
mod swin;
mod t5;
mod torchvision;
mod vit;
mod whisper;
mod without_graph;

use serde_json::{Map, Value};

use family::{CONVOLUTIONAL, DECODER, DECODER_SIZES, EMPTY, ENCODER, SELECTION_BIAS, VISION_TRANSFORMER, classifier};
pub use family::{
    ClassificationHead, DenseLayers, ExpertLayout, Family, Groups, IndirectSizes, Keys, LanguageModel, ModelKind, PositionOffset, Positions, Sizes, Tie, Tower,
};
pub use gguf::{
    ATTENTION_MULTIPLIER, Divisors, EXPERT_SCORES, GgufExperts, GgufFamily, GgufHead, GgufTraits, LOGIT_DIVISOR, Recurrent, Setting, StoredShape, Tiling,
    Windows,
};
pub use layer_list::{BLOCK_TYPES, LAYER_PATTERN, LAYER_TYPES, listed_layers};
pub use long_rope::long_rope_attention;
pub use module_names::{UNSTORED_HEADS, module_spellings};
pub use roles::{fused_layer, is_embedding_table, mark_roles, role, shared_tables, stays_float32, tied};
pub use rope_keys::check_rope_keys;
pub use running::*;

/// Output of detectors with the boxes of detected objects, whose `logits` are scores of each object.
pub const BOXES: &str = "pred_boxes";

/// Families with files of their own.
const FAMILIES: &[&Family] = &[
    &bert::BERT,
    &roberta::ROBERTA,
    &roberta::XLM_ROBERTA,
    &roberta::CAMEMBERT,
    &distilbert::DISTILBERT,
    &mpnet::MPNET,
    &modernbert::MODERNBERT,
    &deberta::DEBERTA,
    &t5::T5,
    &t5::MT5,
    &whisper::WHISPER,
    &gpt2::GPT2,
    &gpt_neox::GPT_NEOX,
    &opt::OPT,
    &llama::LLAMA,
    &llama::MISTRAL,
    &llama::QWEN2,
    &llama::QWEN3,
    &llama4::LLAMA4_TEXT,
    &ministral3::MINISTRAL3,
    &phi3::PHI3,
    &olmo2::OLMO2,
    &olmo3::OLMO3,
    &glm::GLM,
    &glm::GLM4,
    &ernie4_5::ERNIE4_5,
    &hunyuan::HUNYUAN_V1_DENSE,
    &starcoder2::STARCODER2,
    &stablelm::STABLELM,
    &phi::PHI,
    &cohere::COHERE,
    &cohere::COHERE2,
    &smollm3::SMOLLM3,
    &eagle3::EAGLE3,
    &granite::GRANITE,
    &granite_moe::GRANITE_MOE,
    &granite_moe::GRANITE_MOE_SHARED,
    &granite_moe::GRANITE_MOE_HYBRID,
    &mamba2::MAMBA2,
    &nemotron_h::NEMOTRON_H,
    &lfm2::LFM2,
    &gemma::GEMMA,
    &gemma::GEMMA2,
    &gemma::GEMMA3,
    &mixtral::MIXTRAL,
    &qwen_moe::QWEN2_MOE,
    &qwen_moe::QWEN3_MOE,
    &qwen3_next::QWEN3_NEXT,
    &qwen3_next::QWEN3_5,
    &qwen3_next::QWEN3_5_MOE,
    &deepseek::DEEPSEEK_V2,
    &deepseek::DEEPSEEK_V3,
    &deepseek::KIMI_K2,
    &glm4_moe::GLM4_MOE,
    &glm4_moe_lite::GLM4_MOE_LITE,
    &gpt_oss::GPT_OSS,
    &minimax_m2::MINIMAX_M2,
    &vit::VIT,
    &dinov2::DINOV2,
    &swin::SWIN,
    &clip::CLIP,
    &clip::CLIP_TEXT,
    &clip::CLIP_VISION,
    &clip::SIGLIP,
    &clip::SIGLIP_TEXT,
    &clip::SIGLIP_VISION,
    &qwen2_vl::QWEN2_VL_VISION,
    &qwen2_vl::QWEN2_5_VL_VISION,
    &qwen2_vl::QWEN3_VL_VISION,
    &convnext::CONVNEXT,
    &efficientnet::EFFICIENTNET,
    &resnet::RESNET,
    &torchvision::TORCHVISION,
    &rt_detr::RT_DETR,
    &rt_detr::RT_DETR_V2,
];

pub use multimodal::{TextModel, extracted, image_tokens, is_of_tower, name_in_text_model, tower, towers};

/// All families.
pub fn families() -> impl Iterator<Item = &'static Family> {
    FAMILIES.iter().copied().chain(multimodal::FAMILIES).chain(without_graph::FAMILIES)
}

/// The `model_type` of a configuration, or that of a head for speculative decoding; empty without one.
pub fn model_type(config: &Map<String, Value>) -> &str {
    let text = |key: &str| config.get(key).and_then(Value::as_str);
    text("speculators_model_type").or_else(|| text("model_type")).unwrap_or("")
}

/// The values that describe the language model: those of `text_config`, if there are any.
pub fn text_values(config: &Map<String, Value>) -> &Map<String, Value> {
    config.get("text_config").and_then(Value::as_object).unwrap_or(config)
}

/// The id of a special token, or a list of ids: of the model, or of its language model.
pub fn token<'c>(config: &'c Map<String, Value>, key: &str) -> Option<&'c Value> {
    let stated = |values: &'c Map<String, Value>| values.get(key).filter(|value| !value.is_null());
    stated(config).or_else(|| stated(text_values(config)))
}

/// Whether models of this `model_type` have a vision tower, which is part of their graph only with images.
pub fn has_tower(model_type: &str) -> bool {
    family(model_type).is_some_and(|family| family.language_model.is_some())
}

/// Whether transformers replaces the experts of models with this `model_type` with linear layers in quantized
/// folders.
pub fn splits_experts(model_type: &str) -> bool {
    family(model_type).is_some_and(|family| family.splits_experts)
}

/// Whether models of this `model_type` are heads for speculative decoding, which read hidden states of
/// another model.
pub fn is_draft_head(model_type: &str) -> bool {
    family(model_type).is_some_and(|family| family.kind == ModelKind::DraftHead)
}

/// The family with this `model_type`.
pub fn family(model_type: &str) -> Option<&'static Family> {
    families().find(|family| family.model_type == model_type)
}

/// The number of heads and the width of the residual stream, each with its key, if transformers refuses the
/// configuration because the number does not divide the width.
pub fn indivisible_heads(model_type: &str, config: &Map<String, Value>) -> Option<[(&'static str, u64); 2]> {
    let sizes = family(model_type)?.sizes.filter(|sizes| sizes.heads_must_divide)?;
    let size = |key: &'static str| Some((key, config.get(key)?.as_u64().filter(|size| *size > 0)?));
    let [heads, width] = [size(sizes.heads.0)?, size(sizes.hidden.0)?];
    (!width.1.is_multiple_of(heads.1)).then_some([heads, width])
}
