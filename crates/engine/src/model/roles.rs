//! Roles of weights, inferred from names and shapes.

use std::collections::{BTreeMap, BTreeSet};

use super::Config;
use crate::store::{Encoding, Role, Weight};

/// Reason why a matrix is not treated as the weight of a linear layer: it is something else, or requires
/// full precision.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Exemption {
    /// Embedding table.
    Embedding,
    /// Output head: computes logits or scores from hidden states.
    Head,
    /// Router of a mixture of experts.
    Router,
    /// Scale of a normalization.
    Norm,
    /// Attention bias by position.
    PositionBias,
    /// Gate of linear attention.
    LinearAttentionGate,
    /// Part of the image encoder of a multimodal model.
    Vision,
    /// Part of a multi-token prediction module.
    TokenPrediction,
}

impl Exemption {
    /// The kind of layer in reports; `None` for matrices that are not layers.
    fn description(self) -> Option<&'static str> {
        match self {
            Exemption::Embedding | Exemption::Norm | Exemption::PositionBias => None,
            Exemption::Head => Some("output head"),
            Exemption::Router => Some("router"),
            Exemption::LinearAttentionGate => Some("linear attention gate"),
            Exemption::Vision => Some("vision layer"),
            Exemption::TokenPrediction => Some("multi-token prediction layer"),
        }
    }
}

/// Substrings of the names of exempt weights.
const EXEMPT: [(&str, Exemption); 22] = [
    ("embed", Exemption::Embedding),
    ("wte.", Exemption::Embedding),
    ("wpe.", Exemption::Embedding),
    ("shared.weight", Exemption::Embedding),
    ("lm_head", Exemption::Head),
    ("cls.predictions", Exemption::Head),
    ("output_projection", Exemption::Head),
    ("router", Exemption::Router),
    ("mlp.gate.weight", Exemption::Router),
    ("block_sparse_moe.gate.weight", Exemption::Router),
    ("shared_expert_gate", Exemption::Router),
    ("norm", Exemption::Norm),
    ("position", Exemption::PositionBias),
    ("relative_attention_bias", Exemption::PositionBias),
    (".in_proj_a.", Exemption::LinearAttentionGate),
    (".in_proj_b.", Exemption::LinearAttentionGate),
    (".in_proj_ba.", Exemption::LinearAttentionGate),
    ("visual.", Exemption::Vision),
    ("vision_tower.", Exemption::Vision),
    ("multi_modal_projector.", Exemption::Vision),
    ("mtp.", Exemption::TokenPrediction),
    ("eh_proj.", Exemption::TokenPrediction),
];
/// Modules that are output heads, wherever they are in the model.
const HEADS: [&str; 3] = ["output_layer", "shared_head.head", "score"];
/// Module that is the output head if only [`WRAPPERS`] contain it; elsewhere the name is that of an
/// attention output projection.
const TOP_HEAD: &str = "output";
/// Modules that contain a whole language model.
const WRAPPERS: [&str; 6] = ["model", "transformer", "language_model", "text_model", "llm", "module"];

/// Why a matrix is not treated as the weight of a linear layer, judged by its name and its role.
fn exemption(name: &str, weight: &Weight) -> Option<Exemption> {
    match weight.role {
        Some(Role::Router) => return Some(Exemption::Router),
        Some(Role::Vision) => return Some(Exemption::Vision),
        _ => {}
    }
    let module = name.strip_suffix(".weight")?;
    let is_head = |head: &&str| module.strip_suffix(*head).is_some_and(|parent| parent.is_empty() || parent.ends_with('.'));
    let is_at_the_top = |parent: &str| parent.split_terminator('.').all(|part| WRAPPERS.contains(&part));
    if HEADS.iter().any(is_head) || is_head(&TOP_HEAD) && module.strip_suffix(TOP_HEAD).is_some_and(is_at_the_top) {
        return Some(Exemption::Head);
    }
    EXEMPT.iter().find(|(part, _)| name.contains(part)).map(|(_, exemption)| *exemption)
}

/// Modules of Granite's mixtures of experts whose tensors contain all experts.
const STACKED: [&str; 2] = ["input_linear", "output_linear"];

/// The module name of experts that are stacked in a dense tensor of rank 3, as vLLM looks it up, such as
/// `mlp.experts`.
pub fn stacked_experts(name: &str, weight: &Weight) -> Option<String> {
    if weight.shape.len() != 3 || !weight.is_float() || weight.encoding != Encoding::Dense {
        return None;
    }
    let parts: Vec<&str> = name.split('.').collect();
    if let Some(before) = parts.iter().position(|part| *part == "experts").filter(|at| at.saturating_add(1) < parts.len()) {
        return parts.get(..=before).map(|parts| parts.join("."));
    }
    let (block, last) = name.strip_suffix(".weight").unwrap_or(name).rsplit_once('.')?;
    (weight.role == Some(Role::Experts) || STACKED.contains(&last)).then(|| format!("{block}.experts"))
}

/// Whether a weight is the kernel of a convolution. Without a recorded role, tensors of rank 3 to 5 are, except for stacked experts.
pub fn is_convolution(name: &str, weight: &Weight) -> bool {
    let named = || (3..=5).contains(&weight.shape.len()) && name.ends_with(".weight") && stacked_experts(name, weight).is_none();
    weight.is_float() && weight.role.map_or_else(named, |role| role == Role::Kernel)
}

/// Sets the role of routers of unknown families: gates that have experts as siblings, as in
/// `mixer.gate.weight` next to `mixer.experts.0.up.weight`, or next to `moe.up_proj.weight` of rank 3,
/// which gets a role as well.
pub(super) fn mark_routers(weights: &mut BTreeMap<String, Weight>) {
    let mut mixtures: BTreeSet<String> = weights.keys().filter_map(|name| mixture(name)).map(str::to_owned).collect();
    let shapes: Vec<(&str, &[usize])> = weights.iter().map(|(name, weight)| (name.as_str(), weight.shape.as_slice())).collect();
    let mut experts = BTreeSet::new();
    for (name, shape) in shapes.iter().filter(|(name, shape)| shape.len() == 3 && name.ends_with(".weight")) {
        let parent = name.strip_suffix(".weight").and_then(|module| module.rsplit_once('.')).map(|(block, _)| format!("{block}."));
        let Some(parent) = parent.filter(|parent| !mixtures.contains(parent)) else { continue };
        // A router has one row per expert, and one column per input or output of an expert. A square gate next
        // to a convolution has one row per channel.
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

/// Sets the role of layers in `vision_model` of multimodal models (Llama 4, Mllama). CLIP-like models
/// are excluded: their image encoder is half of the model.
pub(super) fn mark_vision(weights: &mut BTreeMap<String, Weight>, config: &Config) {
    let is_multimodal = config.get("vision_config").is_some() && config.get("text_config").is_some();
    if !is_multimodal || ["clip", "siglip"].iter().any(|family| config.model_type().contains(family)) {
        return;
    }
    let is_vision = |name: &str, weight: &Weight| name.split('.').any(|part| part == "vision_model") && is_prunable(name, weight);
    for (_, weight) in weights.iter_mut().filter(|(name, weight)| weight.role.is_none() && is_vision(name, weight)) {
        weight.role = Some(Role::Vision);
    }
}

/// Description of routers, output heads and similar layers among weights, which stay in full precision
/// unless `targets` select them.
pub fn exempt_layers<'w>(weights: impl Iterator<Item = (&'w str, &'w Weight)>) -> Option<String> {
    let mut found: BTreeMap<Exemption, Vec<&str>> = BTreeMap::new();
    for (name, weight) in weights.filter(|(_, weight)| weight.shape.len() == 2 && weight.is_float()) {
        if let Some(kind) = exemption(name, weight).filter(|kind| kind.description().is_some()) {
            found.entry(kind).or_default().push(name);
        }
    }
    let describe = |(kind, names): (&Exemption, &Vec<&str>)| {
        let what = kind.description().unwrap_or_default();
        match names[..] {
            [one] => format!("the {what} `{one}`"),
            _ => format!("{} {what}s (the first: `{}`)", names.len(), names.first().unwrap_or(&"")),
        }
    };
    (!found.is_empty()).then(|| found.iter().map(describe).collect::<Vec<_>>().join(", "))
}

/// Description of the rule of [`is_linear`], for plans and reports.
pub const LINEAR_RULE: &str = "matrices named *.weight, but no embedding, output head, router, norm, position bias, gate of linear attention, vision tower or multi-token prediction module; of an .onnx model, matrices of MatMul and Gemm";
/// Description of the rule of [`is_prunable`]: linear weights and convolutions.
pub const PRUNABLE_RULE: &str = "tensors of two or more dimensions named *.weight, but no embedding, output head, router, norm, position bias, gate of linear attention, vision tower or multi-token prediction module; of an .onnx model, weights of MatMul, Gemm and Conv";

/// Whether a weight belongs to a linear layer, by its name and shape.
pub fn is_linear(name: &str, weight: &Weight) -> bool {
    weight.shape.len() == 2 && weight.role.is_none_or(|role| role == Role::Matrix) && is_prunable(name, weight)
}

/// Whether a weight belongs to a linear layer or a convolution, by its name and shape.
pub fn is_prunable(name: &str, weight: &Weight) -> bool {
    let named = match weight.role {
        Some(Role::Experts) => name.ends_with(".weight"),
        Some(role) => matches!(role, Role::Matrix | Role::Kernel),
        None => name.ends_with(".weight") && exemption(name, weight).is_none(),
    };
    named && weight.shape.len() >= 2 && weight.is_float() && weight.elements() > 0
}

/// Whether a weight is an embedding table, by its name and shape.
pub fn is_embedding(name: &str, weight: &Weight) -> bool {
    let named = weight.role.map_or_else(|| class_of(name) == "Embedding", |role| role == Role::Table);
    named && weight.shape.len() == 2 && weight.is_float() && weight.elements() > 0
}

/// The module class of a matrix with this name; see [`class`].
pub(super) fn class_of(name: &str) -> &'static str {
    let named = !name.contains("embed_out") && ["embed", "wte.", "wpe.", "shared.weight"].iter().any(|part| name.contains(part));
    if named && name.ends_with(".weight") { "Embedding" } else { "Linear" }
}

/// The PyTorch module class of a weight, as in the targets of compressed-tensors.
pub fn class(name: &str, weight: &Weight) -> &'static str {
    match weight.shape.len() {
        _ if is_embedding(name, weight) => "Embedding",
        4 => "Conv2d",
        _ => "Linear",
    }
}

/// Part of a model, for summaries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ModelPart {
    /// Token and position embeddings, and the patch embedding of vision transformers.
    Embeddings,
    /// Attention projections.
    Attention,
    /// Feed-forward layers of transformers.
    Mlp,
    /// Convolutions.
    Convolutions,
    /// Scales, shifts and statistics of normalization layers.
    Norms,
    /// Output heads and poolers.
    Heads,
    /// Everything else.
    Other,
}

impl ModelPart {
    /// All parts, in display order.
    pub const ALL: [ModelPart; 7] =
        [ModelPart::Embeddings, ModelPart::Attention, ModelPart::Mlp, ModelPart::Convolutions, ModelPart::Norms, ModelPart::Heads, ModelPart::Other];

    /// Name for summaries.
    pub fn name(self) -> &'static str {
        match self {
            ModelPart::Embeddings => "embeddings",
            ModelPart::Attention => "attention",
            ModelPart::Mlp => "mlp",
            ModelPart::Convolutions => "convolutions",
            ModelPart::Norms => "norms",
            ModelPart::Heads => "heads",
            ModelPart::Other => "other",
        }
    }
}

/// Substrings of names by part; the first match determines the part.
const PARTS: [(ModelPart, &[&str]); 6] = [
    (ModelPart::Norms, &["norm", ".ln_", ".bn", "running_mean", "running_var"]),
    (ModelPart::Heads, &["lm_head", "embed_out", "cls.", "classifier", "pooler", "vocab_", "predictions", "score.", "qa_outputs", "sentence_head"]),
    (ModelPart::Embeddings, &["embeddings", "embed_", "wte.", "wpe.", "shared.weight", "cls_token", "pos_embed", "patch_embed"]),
    (ModelPart::Attention, &["attention", "attn", "q_proj", "k_proj", "v_proj", "o_proj"]),
    (
        ModelPart::Mlp,
        &["mlp", "ffn", "feed_forward", "intermediate", "output.dense", "experts", "gate_proj", "up_proj", "down_proj", "lin1", "lin2", "c_fc", "fc1", "fc2"],
    ),
    (ModelPart::Convolutions, &["conv"]),
];

/// The part of a model that a weight belongs to, by its name and shape.
pub fn part(name: &str, shape: &[usize]) -> ModelPart {
    let name = name.to_ascii_lowercase();
    let named = PARTS.iter().find(|(_, parts)| parts.iter().any(|part| name.contains(part))).map(|(part, _)| *part);
    match named {
        Some(part) => part,
        None if shape.len() > 2 => ModelPart::Convolutions,
        None if name.starts_with("fc.") => ModelPart::Heads,
        None if name.starts_with("bn") => ModelPart::Norms,
        None => ModelPart::Other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Computed;

    #[test]
    fn experts_in_one_tensor_are_recognized() {
        let module = |name: &str, shape: &[usize]| {
            let count = shape.iter().product();
            stacked_experts(name, &Computed { values: move || Ok(vec![0.0; count]) }.weight(shape.to_vec()))
        };
        assert_eq!(module("model.layers.0.mlp.experts.gate_up_proj", &[2, 3, 4]).as_deref(), Some("model.layers.0.mlp.experts"));
        let granite = module("model.layers.0.block_sparse_moe.input_linear.weight", &[2, 3, 4]);
        assert_eq!(granite.as_deref(), Some("model.layers.0.block_sparse_moe.experts"));
        assert_eq!(module("model.layers.0.mlp.experts.0.up_proj.weight", &[3, 4]), None);
        assert_eq!(module("encoder.conv1.weight", &[2, 3, 4]), None);
        // Step-3 uses the names of a single feed-forward network; only the adjacent router identifies
        // the experts.
        let zeros = |shape: &[usize]| Computed { values: || Ok(Vec::new()) }.weight(shape.to_vec());
        let named = |name: &str, shape: &[usize]| (format!("model.layers.4.{name}.weight"), zeros(shape));
        let mut weights = BTreeMap::from([
            named("moe.gate", &[5, 4]),
            named("moe.up_proj", &[5, 3, 4]),
            named("moe.down_proj", &[5, 4, 3]),
            named("share_expert.up_proj", &[3, 4]),
            named("mixer.gate", &[6, 6]),
            named("mixer.conv1d", &[6, 1, 4]),
            named("block.gate", &[6, 6]),
            named("block.conv", &[6, 6, 3]),
        ]);
        mark_routers(&mut weights);
        let found = |name: &str| stacked_experts(name, &weights[name]);
        for name in ["model.layers.4.moe.up_proj.weight", "model.layers.4.moe.down_proj.weight"] {
            assert_eq!(found(name).as_deref(), Some("model.layers.4.moe.experts"));
            assert!(is_prunable(name, &weights[name]) && !is_linear(name, &weights[name]), "{name}");
        }
        for name in ["model.layers.4.mixer.conv1d.weight", "model.layers.4.block.conv.weight"] {
            assert!(found(name).is_none() && is_convolution(name, &weights[name]), "{name}");
        }
        let linear: Vec<&String> = weights.iter().filter(|(name, weight)| is_linear(name, weight)).map(|(name, _)| name).collect();
        assert_eq!(linear, ["model.layers.4.block.gate.weight", "model.layers.4.mixer.gate.weight", "model.layers.4.share_expert.up_proj.weight"]);
    }

    /// CLIP-like models are not exempt, since their image encoder is half of the model.
    #[test]
    fn vision_models_are_exempt_in_multimodal_models() {
        let name = "vision_model.model.layers.0.self_attn.q_proj.weight";
        let is_quantized = |values: serde_json::Value| {
            let mut weights = BTreeMap::from([(name.to_owned(), Computed { values: || Ok(vec![0.0; 4]) }.weight(vec![2, 2]))]);
            mark_vision(&mut weights, &Config::from_values(values.as_object().unwrap().clone()));
            is_linear(name, &weights[name])
        };
        let both = |family: &str| serde_json::json!({ "model_type": family, "vision_config": {}, "text_config": {} });
        assert_eq!(["llama4", "mllama", "clip", "siglip2", "chinese_clip"].map(|family| is_quantized(both(family))), [false, false, true, true, true]);
        assert!(is_quantized(serde_json::json!({ "model_type": "clip_vision_model" })));
    }

    #[test]
    fn routers_and_heads_of_unknown_families_are_exempt() {
        let matrix = || Computed { values: || Ok(vec![0.0; 4]) }.weight(vec![2, 2]);
        let exempt = [
            "model.layers.0.mixer.gate.weight",
            "model.layers.0.feed_forward.gate.weight",
            "layers.0.moe.gate.weight",
            "model.layers.0.mlp.gate.wg.weight",
            "model.layers.0.mlp.shared_expert_gate.weight",
            "output.weight",
            "transformer.output_layer.weight",
            "model.layers.1.shared_head.head.weight",
            "score.weight",
            "lm_head.weight",
            "language_model.output.weight",
            "language_model.model.output.weight",
            "model.layers.2.block.gate.weight",
            "model.visual.blocks.0.attn.qkv.weight",
            "mtp.fc.weight",
            "model.layers.0.linear_attn.in_proj_a.weight",
        ];
        let linear = [
            "model.layers.0.mixer.experts.0.up.weight",
            "model.layers.2.block.local_experts.0.up.weight",
            "language_model.model.layers.0.attention.output.weight",
            "vision.layers.0.output.weight",
            "model.layers.0.feed_forward.experts.w1.weight",
            "layers.0.moe.experts.3.w1.weight",
            "model.layers.0.mlp.experts.0.gate_proj.weight",
            "model.layers.0.mlp.gate_proj.weight",
            "model.layers.1.mixer.gate.weight",
            "visual_projection.weight",
            "model.layers.0.linear_attn.in_proj_qkv.weight",
            "model.layers.0.attention.output.weight",
            "encoder.layer.0.attention.output.dense.weight",
        ];
        let mut weights: BTreeMap<String, Weight> = exempt.iter().chain(&linear).map(|name| ((*name).to_owned(), matrix())).collect();
        mark_routers(&mut weights);
        for name in exempt {
            assert!(!is_linear(name, &weights[name]) && !is_prunable(name, &weights[name]), "{name}");
        }
        for name in linear {
            assert!(is_linear(name, &weights[name]), "{name}");
        }
        let described = exempt_layers(weights.iter().map(|(name, weight)| (name.as_str(), weight))).unwrap();
        assert_eq!(
            described,
            "7 output heads (the first: `language_model.model.output.weight`), 6 routers (the first: `layers.0.moe.gate.weight`), the linear attention gate `model.layers.0.linear_attn.in_proj_a.weight`, the vision layer `model.visual.blocks.0.attn.qkv.weight`, the multi-token prediction layer `mtp.fc.weight`"
        );
    }

    #[test]
    fn parts_are_inferred_from_names_of_all_families() {
        for (name, dimensions, expected) in [
            ("bert.embeddings.word_embeddings.weight", 2, ModelPart::Embeddings),
            ("embeddings.LayerNorm.weight", 1, ModelPart::Norms),
            ("encoder.layer.0.attention.output.dense.weight", 2, ModelPart::Attention),
            ("encoder.layer.0.output.dense.weight", 2, ModelPart::Mlp),
            ("cls.predictions.transform.dense.weight", 2, ModelPart::Heads),
            ("transformer.layer.0.attention.q_lin.weight", 2, ModelPart::Attention),
            ("transformer.layer.0.ffn.lin1.weight", 2, ModelPart::Mlp),
            ("transformer.h.3.attn.c_attn.weight", 2, ModelPart::Attention),
            ("transformer.h.3.mlp.c_proj.weight", 2, ModelPart::Mlp),
            ("transformer.h.3.ln_1.weight", 1, ModelPart::Norms),
            ("transformer.wte.weight", 2, ModelPart::Embeddings),
            ("model.embed_tokens.weight", 2, ModelPart::Embeddings),
            ("model.layers.0.self_attn.q_proj.weight", 2, ModelPart::Attention),
            ("model.layers.0.mlp.gate_proj.weight", 2, ModelPart::Mlp),
            ("model.layers.0.input_layernorm.weight", 1, ModelPart::Norms),
            ("lm_head.weight", 2, ModelPart::Heads),
            ("vit.embeddings.patch_embeddings.projection.weight", 4, ModelPart::Embeddings),
            ("resnet.embedder.embedder.convolution.weight", 4, ModelPart::Convolutions),
            ("resnet.encoder.stages.0.layers.0.layer.0.normalization.weight", 1, ModelPart::Norms),
            ("layer1.0.conv1.weight", 4, ModelPart::Convolutions),
            ("layer1.0.bn1.weight", 1, ModelPart::Norms),
            ("layer2.0.downsample.0.weight", 4, ModelPart::Convolutions),
            ("bn1.running_mean", 1, ModelPart::Norms),
            ("features.1.conv.0.0.weight", 4, ModelPart::Convolutions),
            ("fc.weight", 2, ModelPart::Heads),
            ("classifier.1.bias", 1, ModelPart::Heads),
            ("something.weight", 2, ModelPart::Other),
        ] {
            assert_eq!(part(name, &vec![2; dimensions]), expected, "{name}");
        }
    }
}
