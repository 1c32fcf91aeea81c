//! Which weights a pass takes when nobody says so: judged by name and shape, for any checkpoint.

use std::collections::BTreeSet;

use crate::error::{Error, Result};
use crate::store::{Encoding, Pattern, Selection, Weight, Weights};

/// Parts of names that mark matrices which are not the weights of a linear layer, or which are known to need
/// full precision: embeddings, output heads, routers of mixtures of experts, norms, position biases.
const NOT_LINEAR: [&str; 12] = [
    "embed", "wte.", "wpe.", "shared.weight", "lm_head", "cls.predictions", "output_projection", "router", "mlp.gate.weight", "norm", "position", "relative_attention_bias",
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

/// The weights that a pass takes, and how they were chosen.
pub struct Chosen<'a> {
    /// Names.
    pub names: BTreeSet<&'a str>,
    /// In plain words.
    pub rule: String,
}

/// Resolves a selection.
///
/// # Errors
/// A pattern matches nothing, or nothing at all is selected.
pub fn choose<'a>(pass: &str, weights: &'a Weights, targets: &[Pattern], ignore: &[Pattern], rule: &str, eligible: impl Fn(&str, &Weight) -> bool) -> Result<Chosen<'a>> {
    let selection = Selection { targets, ignore };
    let names = selection.resolve(weights.by_name.keys(), |name| weights.by_name.get(name).is_some_and(|w| eligible(name, w)))?;
    if names.is_empty() {
        return Err(Error::option(pass, format!("no weight is selected ({rule}); name some in `targets`, `compress inspect` lists them")));
    }
    let list = |patterns: &[Pattern]| patterns.iter().map(Pattern::as_str).collect::<Vec<_>>().join(", ");
    let mut rule = if targets.is_empty() { rule.to_owned() } else { list(targets) };
    if !ignore.is_empty() {
        rule = format!("{rule}; without {}", list(ignore));
    }
    Ok(Chosen { names, rule })
}

/// Holds a selected weight to what a pass of floats can take.
///
/// # Errors
/// It is quantized already, empty, or not of a float type.
pub fn require_float(pass: &str, name: &str, weight: &Weight) -> Result<()> {
    if weight.encoding != Encoding::Dense {
        return Err(Error::tensor(name, format!("is {} already, {pass} works on floats", weight.describe()), "quantize last, run `compress densify` first, or add the tensor to `ignore`"));
    }
    if !weight.is_float() {
        return Err(Error::tensor(name, format!("is {}, {pass} works on F16, BF16, F32 and F64", weight.dtype), "add it to `ignore`"));
    }
    if weight.elements() == 0 {
        return Err(Error::tensor(name, format!("is empty, shape {:?}", weight.shape), "add it to `ignore`"));
    }
    Ok(())
}
