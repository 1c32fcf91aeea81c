//! What a weight is for, judged by its name and shape, for any checkpoint.

use crate::store::{Role, Weight};

/// Parts of names that mark matrices which are not the weights of a linear layer, or which are known to need
/// full precision: embeddings, output heads, routers of mixtures of experts, norms, position biases.
const NOT_LINEAR: [&str; 14] = [
    "embed",
    "wte.",
    "wpe.",
    "shared.weight",
    "lm_head",
    "cls.predictions",
    "output_projection",
    "router",
    "mlp.gate.weight",
    "block_sparse_moe.gate.weight",
    "shared_expert_gate",
    "norm",
    "position",
    "relative_attention_bias",
];

/// The rule that [`is_linear`] follows, for plans and reports.
pub const LINEAR_RULE: &str =
    "matrices named *.weight, but no embedding, output head, router, norm or position bias; of an .onnx model, matrices of MatMul and Gemm";
/// The rule for pruning: linear weights and convolutions.
pub const PRUNABLE_RULE: &str = "tensors of two or more dimensions named *.weight, but no embedding, output head, router, norm or position bias; of an .onnx model, weights of MatMul, Gemm and Conv";

/// Whether a name and a weight look like a linear layer's.
pub fn is_linear(name: &str, weight: &Weight) -> bool {
    weight.shape.len() == 2 && weight.role.is_none_or(|role| role == Role::Matrix) && is_prunable(name, weight)
}

/// Whether a name and a weight look like those of a linear layer or a convolution.
pub fn is_prunable(name: &str, weight: &Weight) -> bool {
    let named = match weight.role {
        Some(role) => matches!(role, Role::Matrix | Role::Kernel),
        None => name.ends_with(".weight") && !NOT_LINEAR.iter().any(|part| name.contains(part)),
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
