//! Requirements of PEFT on the adapters that passes write, and how runtimes load them.

use crate::arch::{self, Sizes};
use crate::contract::facts::vllm_adapter_rank;
use crate::error::Result;
use crate::model::{Model, class};
use crate::pass::targets::is_expert;

/// The requirement of PEFT that a model does not meet, as the predicate of a sentence about an adapter.
pub(super) fn unmet_requirement(model: &Model) -> Option<&'static str> {
    let model_type = model.config.model_type();
    // Modules of models with a vision tower have other names in transformers than in published files.
    if model.onnx.is_some() || model_type.is_empty() || arch::has_tower(model_type) {
        Some("requires a model that PEFT can load an adapter for: a folder of a transformers model without a vision tower (`extract-language-model`)")
    } else if has_other_prefix(model) {
        Some("requires tensors with the names of the modules in transformers, to which adapters of PEFT refer: load the model with transformers, and save it")
    } else {
        None
    }
}

/// Whether the names of the tensors lack the prefix of the model class, or have one although the class has
/// none: transformers adds or removes it when it loads the model.
fn has_other_prefix(model: &Model) -> bool {
    let class = model.config.class();
    let sizes = arch::family(model.config.model_type()).and_then(|family| family.sizes);
    let Some(&Sizes { prefixes: [full, _, ..], hidden: (_, table, _), .. }) = sizes.filter(|_| !class.is_empty()) else { return false };
    let stored = sizes.into_iter().flat_map(|sizes| sizes.prefixes).find(|prefix| model.weights.by_name.contains_key(&format!("{prefix}{table}")));
    let is_base = class.ends_with("Model") && !class.contains("Head");
    stored.is_some_and(|prefix| is_base == (prefix == full || !full.ends_with(prefix)))
}

/// Why PEFT cannot load an adapter for a weight, as the predicate of a sentence about several weights.
///
/// # Errors
/// The model has no such weight.
pub(super) fn obstacle(name: &str, model: &Model) -> Result<Option<&'static str>> {
    let (weight, model_type) = (model.weights.get(name)?, model.config.model_type());
    let module = name.strip_suffix(".weight");
    Ok(if is_expert(name) {
        Some("belong to experts, which loaders stack in one tensor")
    } else if module.is_some_and(|module| arch::module_spellings(model_type, module).len() > 1) {
        Some("have other names in transformers")
    } else if model_type == "mamba2" && module.is_some_and(|module| module.ends_with(".out_proj")) {
        Some("are output projections of Mamba layers, for which PEFT refuses adapters")
    } else if class(name, weight) != "Linear" || module.is_none() || model.weights.folder(name).is_some() {
        Some("are not weights of linear layers of the transformer")
    } else {
        None
    })
}

/// How vLLM loads an adapter of this rank and kind as a model with this name, or why it does not.
pub(super) fn vllm_note(rank: usize, is_dora: bool, name: &str) -> std::result::Result<String, String> {
    let limit = vllm_adapter_rank(rank as u64, is_dora)?;
    Ok(format!("In vLLM: `--enable-lora --max-lora-rank {limit} --lora-modules {name}=FOLDER/adapter`, and requests for the model `{name}`"))
}
