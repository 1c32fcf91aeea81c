//! What a weight is for, judged by its name and shape, for any checkpoint.

use std::collections::{BTreeMap, BTreeSet};

use crate::store::{Encoding, Role, Weight};

/// Why a matrix is not treated as the weight of a linear layer: it is none, or is known to need full precision.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Exemption {
    /// A table whose rows are looked up.
    Embedding,
    /// Computes logits or scores from hidden states.
    Head,
    /// Scores the experts of a mixture.
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

/// Parts of names by which weights are exempt.
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
/// Modules that are output heads at the top of the model; elsewhere the name is that of an attention output projection.
const TOP_HEADS: [&str; 3] = ["output", "model.output", "transformer.output"];

/// Why a matrix is not treated as the weight of a linear layer, judged by its name and its role.
fn exemption(name: &str, weight: &Weight) -> Option<Exemption> {
    if weight.role == Some(Role::Router) {
        return Some(Exemption::Router);
    }
    let module = name.strip_suffix(".weight")?;
    let is_head = |head: &&str| module.strip_suffix(*head).is_some_and(|parent| parent.is_empty() || parent.ends_with('.'));
    if HEADS.iter().any(is_head) || TOP_HEADS.contains(&module) {
        return Some(Exemption::Head);
    }
    EXEMPT.iter().find(|(part, _)| name.contains(part)).map(|(_, exemption)| *exemption)
}

/// Modules of Granite's mixtures whose tensors hold all experts.
const STACKED: [&str; 2] = ["input_linear", "output_linear"];

/// The module of the experts that a dense tensor of rank 3 holds, under the name by which vLLM looks it up: `mlp.experts`.
pub fn stacked_experts(name: &str, weight: &Weight) -> Option<String> {
    if weight.shape.len() != 3 || !weight.is_float() || weight.encoding != Encoding::Dense {
        return None;
    }
    let parts: Vec<&str> = name.split('.').collect();
    if let Some(before) = parts.iter().position(|part| *part == "experts").filter(|at| at.saturating_add(1) < parts.len()) {
        return parts.get(..=before).map(|parts| parts.join("."));
    }
    let (block, last) = name.strip_suffix(".weight").unwrap_or(name).rsplit_once('.')?;
    STACKED.contains(&last).then(|| format!("{block}.experts"))
}

/// Gives routers of families that are not known their role: gates that have experts as siblings, as in `mixer.gate.weight` next to
/// `mixer.experts.0.up.weight`.
pub(super) fn mark_routers(weights: &mut BTreeMap<String, Weight>) {
    let parent =
        |name: &str| name.find("experts.").map(|at| name.get(..at).unwrap_or("").to_owned()).filter(|parent| parent.is_empty() || parent.ends_with('.'));
    let mixtures: BTreeSet<String> = weights.keys().filter_map(|name| parent(name)).collect();
    let is_router = |name: &str| {
        mixtures.iter().filter_map(|mixture| name.strip_prefix(mixture.as_str())).any(|rest| {
            let module = rest.split('.').next().unwrap_or("");
            module == "gate" || module.ends_with("_gate") || module.contains("router")
        })
    };
    for (name, weight) in weights.iter_mut().filter(|(name, weight)| weight.role.is_none() && name.ends_with(".weight") && is_router(name)) {
        weight.role = (weight.shape.len() == 2 && !name.contains("norm")).then_some(Role::Router);
    }
}

/// Routers and output heads among weights, as text: they are left in full precision where no `targets` select them.
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

/// The rule that [`is_linear`] follows, for plans and reports.
pub const LINEAR_RULE: &str = "matrices named *.weight, but no embedding, output head, router, norm, position bias, gate of linear attention, vision tower or multi-token prediction module; of an .onnx model, matrices of MatMul and Gemm";
/// The rule for pruning: linear weights and convolutions.
pub const PRUNABLE_RULE: &str = "tensors of two or more dimensions named *.weight, but no embedding, output head, router, norm, position bias, gate of linear attention, vision tower or multi-token prediction module; of an .onnx model, weights of MatMul, Gemm and Conv";

/// Whether a name and a weight look like a linear layer's.
pub fn is_linear(name: &str, weight: &Weight) -> bool {
    weight.shape.len() == 2 && weight.role.is_none_or(|role| role == Role::Matrix) && is_prunable(name, weight)
}

/// Whether a name and a weight look like those of a linear layer or a convolution.
pub fn is_prunable(name: &str, weight: &Weight) -> bool {
    let named = match weight.role {
        Some(role) => matches!(role, Role::Matrix | Role::Kernel),
        None => name.ends_with(".weight") && exemption(name, weight).is_none(),
    };
    named && weight.shape.len() >= 2 && weight.is_float() && weight.elements() > 0
}

/// Whether a name and a weight look like an embedding table's.
pub fn is_embedding(name: &str, weight: &Weight) -> bool {
    let named = weight.role.map_or_else(|| class_of(name) == "Embedding", |role| role == Role::Table);
    named && weight.shape.len() == 2 && weight.is_float() && weight.elements() > 0
}

/// The class of the module that holds a matrix of this name, as [`class`] of a weight.
pub(super) fn class_of(name: &str) -> &'static str {
    let named = !name.contains("embed_out") && ["embed", "wte.", "wpe.", "shared.weight"].iter().any(|part| name.contains(part));
    if named && name.ends_with(".weight") { "Embedding" } else { "Linear" }
}

/// The class of PyTorch's module that holds the weight, as compressed-tensors names its targets.
pub fn class(name: &str, weight: &Weight) -> &'static str {
    match weight.shape.len() {
        _ if is_embedding(name, weight) => "Embedding",
        4 => "Conv2d",
        _ => "Linear",
    }
}

/// A part of a model, for sums that people read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ModelPart {
    /// Tables of tokens and positions, the first layer of a vision transformer.
    Embeddings,
    /// Queries, keys, values and what follows them.
    Attention,
    /// The feed-forward layers of transformers.
    Mlp,
    /// Convolutions.
    Convolutions,
    /// Scales, shifts and statistics of normalisations.
    Norms,
    /// Output heads and poolers.
    Heads,
    /// Everything else.
    Other,
}

impl ModelPart {
    /// All parts, in the order in which they are shown.
    pub const ALL: [ModelPart; 7] =
        [ModelPart::Embeddings, ModelPart::Attention, ModelPart::Mlp, ModelPart::Convolutions, ModelPart::Norms, ModelPart::Heads, ModelPart::Other];

    /// Its name.
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

/// The first of these that a name holds says what part it is of.
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

/// What part of a model a weight belongs to, judged by its name and shape, for any checkpoint.
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
            "model.visual.blocks.0.attn.qkv.weight",
            "mtp.fc.weight",
            "model.layers.0.linear_attn.in_proj_a.weight",
        ];
        let linear = [
            "model.layers.0.mixer.experts.0.up.weight",
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
            "5 output heads (the first: `lm_head.weight`), 5 routers (the first: `layers.0.moe.gate.weight`), the linear attention gate `model.layers.0.linear_attn.in_proj_a.weight`, the vision layer `model.visual.blocks.0.attn.qkv.weight`, the multi-token prediction layer `mtp.fc.weight`"
        );
    }

    #[test]
    fn names_of_all_families_say_the_part() {
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
