//! What a weight is for, judged by its name and shape, for any checkpoint.

use crate::store::Weight;

/// Parts of names that mark matrices which are not the weights of a linear layer, or which are known to need
/// full precision: embeddings, output heads, routers of mixtures of experts, norms, position biases.
const NOT_LINEAR: [&str; 12] = [
    "embed",
    "wte.",
    "wpe.",
    "shared.weight",
    "lm_head",
    "cls.predictions",
    "output_projection",
    "router",
    "mlp.gate.weight",
    "norm",
    "position",
    "relative_attention_bias",
];

/// The rule that [`is_linear`] follows, for plans and reports.
pub const LINEAR_RULE: &str = "matrices named *.weight, but no embedding, output head, router, norm or position bias";
/// The rule for pruning: linear weights and convolutions.
pub const PRUNABLE_RULE: &str = "tensors of two or more dimensions named *.weight, but no embedding, output head, router, norm or position bias";

/// Whether a name and a weight look like a linear layer's.
pub fn is_linear(name: &str, weight: &Weight) -> bool {
    weight.shape.len() == 2 && is_prunable(name, weight)
}

/// Whether a name and a weight look like those of a linear layer or a convolution.
pub fn is_prunable(name: &str, weight: &Weight) -> bool {
    weight.shape.len() >= 2 && name.ends_with(".weight") && weight.is_float() && weight.elements() > 0 && !NOT_LINEAR.iter().any(|part| name.contains(part))
}

/// Whether a name and a weight look like an embedding table's.
pub fn is_embedding(name: &str, weight: &Weight) -> bool {
    let named = ["embed", "wte.", "wpe.", "shared.weight"].iter().any(|part| name.contains(part));
    weight.shape.len() == 2 && name.ends_with(".weight") && weight.is_float() && weight.elements() > 0 && named
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
pub enum Part {
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

impl Part {
    /// All parts, in the order in which they are shown.
    pub const ALL: [Part; 7] = [Part::Embeddings, Part::Attention, Part::Mlp, Part::Convolutions, Part::Norms, Part::Heads, Part::Other];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Part::Embeddings => "embeddings",
            Part::Attention => "attention",
            Part::Mlp => "mlp",
            Part::Convolutions => "convolutions",
            Part::Norms => "norms",
            Part::Heads => "heads",
            Part::Other => "other",
        }
    }
}

/// The first of these that a name holds says what part it is of.
const PARTS: [(Part, &[&str]); 6] = [
    (Part::Norms, &["norm", ".ln_", ".bn", "running_mean", "running_var"]),
    (Part::Heads, &["lm_head", "cls.", "classifier", "pooler", "vocab_", "predictions", "score.", "qa_outputs", "sentence_head"]),
    (Part::Embeddings, &["embeddings", "embed_", "wte.", "wpe.", "shared.weight", "cls_token", "pos_embed", "patch_embed"]),
    (Part::Attention, &["attention", "attn", "q_proj", "k_proj", "v_proj", "o_proj"]),
    (Part::Mlp, &["mlp", "ffn", "feed_forward", "intermediate", "output.dense", "experts", "gate_proj", "up_proj", "down_proj", "lin1", "lin2", "c_fc"]),
    (Part::Convolutions, &["conv"]),
];

/// What part of a model a weight belongs to, judged by its name and shape, for any checkpoint.
pub fn part(name: &str, shape: &[usize]) -> Part {
    let name = name.to_ascii_lowercase();
    let named = PARTS.iter().find(|(_, parts)| parts.iter().any(|part| name.contains(part))).map(|(part, _)| *part);
    match named {
        Some(part) => part,
        None if shape.len() > 2 => Part::Convolutions,
        None if name.starts_with("fc.") => Part::Heads,
        None if name.starts_with("bn") => Part::Norms,
        None => Part::Other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_all_families_say_the_part() {
        for (name, dimensions, expected) in [
            ("bert.embeddings.word_embeddings.weight", 2, Part::Embeddings),
            ("embeddings.LayerNorm.weight", 1, Part::Norms),
            ("encoder.layer.0.attention.output.dense.weight", 2, Part::Attention),
            ("encoder.layer.0.output.dense.weight", 2, Part::Mlp),
            ("cls.predictions.transform.dense.weight", 2, Part::Heads),
            ("transformer.layer.0.attention.q_lin.weight", 2, Part::Attention),
            ("transformer.layer.0.ffn.lin1.weight", 2, Part::Mlp),
            ("transformer.h.3.attn.c_attn.weight", 2, Part::Attention),
            ("transformer.h.3.mlp.c_proj.weight", 2, Part::Mlp),
            ("transformer.h.3.ln_1.weight", 1, Part::Norms),
            ("transformer.wte.weight", 2, Part::Embeddings),
            ("model.embed_tokens.weight", 2, Part::Embeddings),
            ("model.layers.0.self_attn.q_proj.weight", 2, Part::Attention),
            ("model.layers.0.mlp.gate_proj.weight", 2, Part::Mlp),
            ("model.layers.0.input_layernorm.weight", 1, Part::Norms),
            ("lm_head.weight", 2, Part::Heads),
            ("vit.embeddings.patch_embeddings.projection.weight", 4, Part::Embeddings),
            ("resnet.embedder.embedder.convolution.weight", 4, Part::Convolutions),
            ("resnet.encoder.stages.0.layers.0.layer.0.normalization.weight", 1, Part::Norms),
            ("layer1.0.conv1.weight", 4, Part::Convolutions),
            ("layer1.0.bn1.weight", 1, Part::Norms),
            ("layer2.0.downsample.0.weight", 4, Part::Convolutions),
            ("bn1.running_mean", 1, Part::Norms),
            ("features.1.conv.0.0.weight", 4, Part::Convolutions),
            ("fc.weight", 2, Part::Heads),
            ("classifier.1.bias", 1, Part::Heads),
            ("something.weight", 2, Part::Other),
        ] {
            assert_eq!(part(name, &vec![2; dimensions]), expected, "{name}");
        }
    }
}
