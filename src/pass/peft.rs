//! Requirements of PEFT on the adapters that passes write, and how runtimes load them.

use crate::arch;
use crate::contract::facts::vllm_adapter_rank;
use crate::error::Result;
use crate::model::{Model, class};
use crate::pass::targets::is_expert;

/// The requirement on a model for which PEFT loads an adapter.
pub(super) const REQUIREMENT: &str =
    "requires a model that PEFT can load an adapter for: a folder of a transformers model without a vision tower (`extract-language-model`)";

/// Whether PEFT can load adapters for layers of a model.
pub(super) fn can_adapt(model: &Model) -> bool {
    // Modules of models with a vision tower have other names in transformers than in published files.
    let has_tower = arch::has_tower(model.config.model_type());
    model.onnx.is_none() && !model.config.model_type().is_empty() && !has_tower
}

/// Why PEFT cannot load an adapter for a weight, as the predicate of a sentence about several weights.
///
/// # Errors
/// The model has no such weight.
pub(super) fn obstacle(name: &str, model: &Model) -> Result<Option<&'static str>> {
    let weight = model.weights.get(name)?;
    Ok(if is_expert(name) {
        Some("belong to experts, which loaders stack in one tensor")
    } else if class(name, weight) != "Linear" || !name.ends_with(".weight") || model.weights.folder(name).is_some() {
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
