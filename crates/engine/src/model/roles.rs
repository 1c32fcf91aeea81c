//! Kinds of weights: what is quantized and pruned by default, and summaries.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use crate::arch::role;
use crate::store::{Encoding, Role, Weight};

/// The kind of an exempt layer in reports, and why it is exempt if that does not follow from the kind;
/// `None` for matrices that are not layers.
fn description(role: Role) -> Option<[&'static str; 2]> {
    let kind = match role {
        Role::Matrix | Role::Kernel | Role::Table | Role::Experts | Role::Constant | Role::Other => return None,
        Role::Head => "output head",
        Role::Router => "router",
        Role::LinearAttentionGate => "linear attention gate",
        Role::Vision => "vision layer",
        Role::TokenPrediction => "multi-token prediction layer",
        Role::Localization => "localization layer",
        Role::Mixed => return Some(["weight", ", which layers read in different axis orders, or which other nodes read too"]),
        Role::Operand => return Some(["operand", ", which is neither a matrix on the right of a MatMul or Gemm nor the kernel of a Conv"]),
    };
    Some([kind, ""])
}

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
    let (block, _) = name.strip_suffix(".weight").unwrap_or(name).rsplit_once('.')?;
    (weight.role == Some(Role::Experts)).then(|| format!("{block}.experts"))
}

/// Whether a weight is the kernel of a convolution. Without a recorded role, tensors of rank 3 to 5 are,
/// except for stacked experts.
pub fn is_convolution(name: &str, weight: &Weight) -> bool {
    let named = || (3..=5).contains(&weight.shape.len()) && name.ends_with(".weight") && stacked_experts(name, weight).is_none();
    weight.is_float() && weight.role.map_or_else(named, |role| role == Role::Kernel)
}

/// Description of routers, output heads and similar layers among weights, which stay in full precision
/// unless `targets` select them.
pub fn exempt_layers<'w>(weights: impl Iterator<Item = (&'w str, &'w Weight)>) -> Option<String> {
    let mut found: BTreeMap<Role, Vec<&str>> = BTreeMap::new();
    for (name, weight) in weights.filter(|(_, weight)| weight.shape.len() >= 2 && weight.is_float()) {
        if let Some(role) = role(name, weight).filter(|role| description(*role).is_some()) {
            found.entry(role).or_default().push(name);
        }
    }
    let describe = |(role, names): (&Role, &Vec<&str>)| {
        let [what, why] = description(*role).unwrap_or_default();
        match names[..] {
            [one] => format!("the {what} `{one}`{why}"),
            _ => format!("{} {what}s (the first: `{}`){}", names.len(), names.first().unwrap_or(&""), why.replace("which is", "which are")),
        }
    };
    (!found.is_empty()).then(|| found.iter().map(describe).collect::<Vec<_>>().join(", "))
}

/// Description of the rule of [`is_linear`], for plans and reports.
pub const LINEAR_RULE: &str = "matrices named *.weight, but no embedding, output head, router, norm, position bias, gate of linear attention, localization layer, vision tower or multi-token prediction module; of an .onnx model, matrices of MatMul and Gemm";
/// Description of the rule of [`is_prunable`]: linear weights and convolutions.
pub const PRUNABLE_RULE: &str = "tensors of two or more dimensions named *.weight, but no embedding, output head, router, norm, position bias, gate of linear attention, localization layer, vision tower or multi-token prediction module; of an .onnx model, weights of MatMul, Gemm and Conv";

/// Whether a weight belongs to a linear layer, by its name and shape.
pub fn is_linear(name: &str, weight: &Weight) -> bool {
    weight.shape.len() == 2 && weight.role.is_none_or(|role| role == Role::Matrix) && is_prunable(name, weight)
}

/// Why a model with logits of this number of classes is not a single-label classifier; `None` if it is one.
pub fn no_single_label(config: &Map<String, Value>, classes: Option<usize>) -> Option<String> {
    let kind = config.get("problem_type").and_then(Value::as_str).filter(|kind| *kind != "single_label_classification");
    match kind {
        Some(kind) => Some(format!("config.json has `problem_type` {kind:?}")),
        None => (classes == Some(1)).then(|| "the model has one output".to_owned()),
    }
}

/// Kind of the output `logits` of a model, if each sample has one row.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum LogitKind {
    /// Logits of a distribution over classes.
    #[default]
    Classes,
    /// One logit per label, whose sigmoid is the probability of the label.
    Labels,
    /// Other values.
    Values,
}

impl LogitKind {
    /// By the `problem_type` of a configuration.
    pub fn from_config(config: &Map<String, Value>) -> LogitKind {
        match config.get("problem_type").and_then(Value::as_str) {
            None | Some("single_label_classification") => LogitKind::Classes,
            Some("multi_label_classification") => LogitKind::Labels,
            Some(_) => LogitKind::Values,
        }
    }
}

/// Whether a weight belongs to a linear layer or a convolution, by its name and shape.
pub fn is_prunable(name: &str, weight: &Weight) -> bool {
    let named = match weight.role {
        Some(Role::Experts) => name.ends_with(".weight"),
        Some(role) => matches!(role, Role::Matrix | Role::Kernel),
        None => name.ends_with(".weight") && role(name, weight).is_none(),
    };
    named && weight.shape.len() >= 2 && weight.is_float() && weight.elements() > 0
}

/// Whether a weight is an embedding table, by its name and shape.
pub fn is_embedding(name: &str, weight: &Weight) -> bool {
    role(name, weight) == Some(Role::Table) && weight.shape.len() == 2 && weight.is_float() && weight.elements() > 0
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
    use serde_json::Map;

    use super::*;
    use crate::arch;
    use crate::store::Computed;

    #[test]
    fn experts_in_one_tensor_are_recognized() {
        let module = |name: &str, shape: &[usize]| {
            let count = shape.iter().product();
            stacked_experts(name, &Computed { values: move || Ok(vec![0.0; count]) }.weight(shape.to_vec()))
        };
        assert_eq!(module("model.layers.0.mlp.experts.gate_up_proj", &[2, 3, 4]).as_deref(), Some("model.layers.0.mlp.experts"));
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
        arch::mark_roles(&mut weights, &Map::new());
        let found = |name: &str| stacked_experts(name, &weights[name]);
        for name in ["model.layers.4.moe.up_proj.weight", "model.layers.4.moe.down_proj.weight"] {
            assert_eq!(found(name).as_deref(), Some("model.layers.4.moe.experts"));
            assert!(is_prunable(name, &weights[name]) && !is_linear(name, &weights[name]), "{name}");
        }
        for name in ["model.layers.4.mixer.conv1d.weight", "model.layers.4.block.conv.weight"] {
            assert!(found(name).is_none() && is_convolution(name, &weights[name]), "{name}");
        }
        let mut granite = BTreeMap::from([named("block_sparse_moe.input_linear", &[2, 3, 4]), named("shared_mlp.input_linear", &[3, 4])]);
        arch::mark_roles(&mut granite, &Map::from_iter([("model_type".to_owned(), "granitemoeshared".into())]));
        let modules: Vec<Option<String>> = granite.iter().map(|(name, weight)| stacked_experts(name, weight)).collect();
        assert_eq!(modules, [Some("model.layers.4.block_sparse_moe.experts".to_owned()), None]);
        let linear: Vec<&String> = weights.iter().filter(|(name, weight)| is_linear(name, weight)).map(|(name, _)| name).collect();
        assert_eq!(linear, ["model.layers.4.block.gate.weight", "model.layers.4.mixer.gate.weight", "model.layers.4.share_expert.up_proj.weight"]);
    }

    /// CLIP-like models are not exempt, since their image encoder is half of the model.
    #[test]
    fn vision_models_are_exempt_in_multimodal_models() {
        let name = "vision_model.model.layers.0.self_attn.q_proj.weight";
        let is_quantized = |values: serde_json::Value| {
            let mut weights = BTreeMap::from([(name.to_owned(), Computed { values: || Ok(vec![0.0; 4]) }.weight(vec![2, 2]))]);
            arch::mark_roles(&mut weights, values.as_object().unwrap());
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
            "model.decoder.layers.0.encoder_attn.sampling_offsets.weight",
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
        arch::mark_roles(&mut weights, &Map::new());
        for name in exempt {
            assert!(!is_linear(name, &weights[name]) && !is_prunable(name, &weights[name]), "{name}");
        }
        for name in linear {
            assert!(is_linear(name, &weights[name]), "{name}");
        }
        let described = exempt_layers(weights.iter().map(|(name, weight)| (name.as_str(), weight))).unwrap();
        assert_eq!(
            described,
            "7 output heads (the first: `language_model.model.output.weight`), 6 routers (the first: `layers.0.moe.gate.weight`), the linear attention gate `model.layers.0.linear_attn.in_proj_a.weight`, the vision layer `model.visual.blocks.0.attn.qkv.weight`, the multi-token prediction layer `mtp.fc.weight`, the localization layer `model.decoder.layers.0.encoder_attn.sampling_offsets.weight`"
        );
        let mut operand = matrix();
        operand.role = Some(Role::Operand);
        assert!(exempt_layers([("a", &operand)].into_iter()).unwrap().starts_with("the operand `a`, which is neither a matrix"));
        assert!(exempt_layers([("a", &operand), ("b", &operand)].into_iter()).unwrap().starts_with("2 operands (the first: `a`), which are neither a matrix"));
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
