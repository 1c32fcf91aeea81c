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
