//! Low-rank corrections of quantized layers, stored as a LoRA adapter of PEFT in a subfolder. `config.json`
//! names the folder, so that adapters for other purposes are not applied.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde_json::{Value, json};

use super::{Config, Model};
use crate::error::{Error, Result};
use crate::files;
use crate::store::checkpoint::{ADAPTER, ADAPTER_PREFIX, Checkpoint};
use crate::store::{Corrected, Role, Weights};

/// Folder of the adapter.
pub const FOLDER: &str = "adapter";
/// File name of its configuration.
pub const CONFIG: &str = "adapter_config.json";
/// Key of `config.json` with the folder.
pub const KEY: &str = "low_rank_correction";
/// Names of the factors, in the order in which they are applied.
const FACTORS: [&str; 2] = ["lora_A", "lora_B"];

/// Names of the factors of the correction of a weight: `[rank, in]` and `[out, rank]`.
pub fn factor_names(weight: &str) -> [String; 2] {
    let module = module(weight);
    FACTORS.map(|factor| format!("{FOLDER}/{ADAPTER_PREFIX}{module}.{factor}.weight"))
}

fn module(weight: &str) -> &str {
    weight.strip_suffix(".weight").unwrap_or(weight)
}

/// The module that a factor corrects, and whether it is the first factor; `None` for other weights.
fn corrected(name: &str) -> Option<(&str, bool)> {
    let name = name.strip_prefix(FOLDER)?.strip_prefix('/')?.strip_prefix(ADAPTER_PREFIX)?;
    let (module, factor) = name.strip_suffix(".weight")?.rsplit_once('.')?;
    FACTORS.contains(&factor).then_some((module, factor == FACTORS[0]))
}

/// Adds the tensors of the adapter that `config.json` names. Fails if it is missing or is not a plain LoRA
/// adapter with a factor of one.
pub(super) fn add(config: &Config, checkpoint: &mut Checkpoint, path: &Path) -> Result<()> {
    let Some(folder) = config.get(KEY) else { return Ok(()) };
    let unsupported = |what: String| Error::Unsupported {
        what: format!("{}: {what}", path.display()),
        hint: format!("remove `{KEY}` from config.json to open the model without its correction"),
    };
    if folder.as_str() != Some(FOLDER) {
        return Err(unsupported(format!("`{KEY}` of {folder} in config.json (not \"{FOLDER}\")")));
    }
    // Cached results store all weights in one file.
    if checkpoint.tensors.keys().any(|name| corrected(name).is_some()) {
        return Ok(());
    }
    let file = path.join(FOLDER).join(CONFIG);
    let text = files::read_to_string(&file).map_err(Error::io("read", &file))?;
    let adapter = Config::parse(&file, text)?;
    let is_true = |key: &&str| adapter.get(key).and_then(Value::as_bool) == Some(true);
    let (rank, alpha) = (adapter.get("r").and_then(Value::as_f64), adapter.get("lora_alpha").and_then(Value::as_f64));
    if rank.is_none() || rank != alpha {
        return Err(unsupported(format!("{CONFIG} with a `lora_alpha` that differs from `r`")));
    }
    // Weights stored as `[in, out]` have factors of the same shapes.
    let is_unsupported = |key: &&str| is_true(key) && !(*key == "fan_in_fan_out" && config.has_conv1d());
    if let Some(key) = ["use_dora", "use_rslora", "fan_in_fan_out", "lora_bias"].into_iter().find(is_unsupported) {
        return Err(unsupported(format!("{CONFIG} with `{key}`")));
    }
    checkpoint.add_folder(path, FOLDER)?;
    let is_other = |name: &&String| name.starts_with(&format!("{FOLDER}/")) && corrected(name).is_none();
    if let Some(name) = checkpoint.tensors.keys().find(is_other) {
        return Err(unsupported(format!("the tensor `{name}`, which is not a factor of a layer")));
    }
    match checkpoint.tensors.keys().any(|name| corrected(name).is_some()) {
        true => Ok(()),
        false => Err(Error::malformed(&path.join(FOLDER).join(ADAPTER), format!("is missing or empty, although config.json has `{KEY}`"))),
    }
}

/// Sets the role of factors, so that passes do not select them by default.
pub(super) fn mark(weights: &mut Weights) {
    weights.by_name.iter_mut().filter(|(name, _)| corrected(name).is_some()).for_each(|(_, weight)| weight.role = Some(Role::Other));
}

#[doc(hidden)]
impl Model {
    /// Whether layers have low-rank corrections.
    pub fn is_corrected(&self) -> bool {
        self.onnx.is_none() && self.config.get(KEY).is_some()
    }

    /// Declares the factors among the weights, named by [`factor_names`], as corrections.
    pub fn declare_corrections(&mut self) {
        if !self.is_corrected() {
            self.config.set(KEY, json!(FOLDER));
        }
        self.restore_adapter_folder();
        mark(&mut self.weights);
    }

    /// Marks the folder of the adapter as one with separate weights.
    pub fn restore_adapter_folder(&mut self) {
        if self.is_corrected() && !self.weights.folders.iter().any(|folder| folder == FOLDER) {
            self.weights.folders.push(FOLDER.to_owned());
        }
    }

    /// The names of the factors of each corrected layer, by the name of its weight.
    pub fn corrections(&self) -> BTreeMap<String, [String; 2]> {
        if !self.is_corrected() {
            return BTreeMap::new();
        }
        let modules = self.weights.by_name.keys().filter_map(|name| corrected(name)).filter(|(_, is_first)| *is_first);
        modules.map(|(module, _)| format!("{module}.weight")).map(|weight| (weight.clone(), factor_names(&weight))).collect()
    }

    /// The configuration for a folder without the adapter.
    pub fn config_without_corrections(&self) -> Config {
        let mut config = self.config.clone();
        config.remove(KEY);
        config
    }

    /// Adds the corrections of these layers to their weights, which must be dense, and removes the factors;
    /// with the last ones, also the adapter. A graph that passes have changed must not read the factors.
    ///
    /// # Errors
    /// A factor is missing, or the shapes of factors do not fit.
    pub fn fold_corrections(&mut self, layers: &BTreeSet<String>) -> Result<()> {
        let corrections = self.corrections();
        let folded: Vec<_> = corrections.iter().filter(|(name, _)| layers.contains(*name)).collect();
        for (name, factors) in &folded {
            let [inner, outer] = factors.each_ref().map(|factor| self.weights.get(factor).cloned());
            let sum = Corrected { name: (*name).clone(), upstream: self.weights.get(name)?.clone(), inner: inner?, outer: outer? };
            let sum = if self.config.has_conv1d() { sum.input_major() } else { sum };
            self.weights.by_name.insert((*name).clone(), sum.weight()?);
            factors.iter().for_each(|factor| drop(self.weights.by_name.remove(factor)));
        }
        if !folded.is_empty() && folded.len() == corrections.len() {
            self.weights.folders.retain(|folder| folder != FOLDER);
            self.config.remove(KEY);
        }
        Ok(())
    }

    /// The content of `adapter_config.json`; `None` without corrections.
    pub fn adapter_config(&self) -> Option<String> {
        let corrections = self.corrections();
        let (_, [first, _]) = corrections.first_key_value()?;
        let rank = *self.weights.by_name.get(first)?.shape.first()?;
        let is_causal = ["ForCausalLM", "LMHeadModel"].iter().any(|end| self.config.class().ends_with(end));
        let config = json!({
            "base_model_name_or_path": null,
            "bias": "none",
            "fan_in_fan_out": self.config.has_conv1d(),
            "inference_mode": true,
            "lora_alpha": rank,
            "lora_dropout": 0.0,
            "modules_to_save": null,
            "peft_type": "LORA",
            "r": rank,
            "target_modules": corrections.keys().map(|weight| module(weight)).collect::<Vec<_>>(),
            "task_type": is_causal.then_some("CAUSAL_LM"),
        });
        Some(format!("{config:#}\n"))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn factors_have_the_names_of_peft() {
        let names = factor_names("model.layers.0.mlp.up_proj.weight");
        assert_eq!(names[0], "adapter/base_model.model.model.layers.0.mlp.up_proj.lora_A.weight");
        assert_eq!(corrected(&names[0]), Some(("model.layers.0.mlp.up_proj", true)));
        assert_eq!(corrected(&names[1]), Some(("model.layers.0.mlp.up_proj", false)));
        assert_eq!(corrected("model.layers.0.mlp.up_proj.weight"), None);
    }

    #[test]
    fn other_adapters_are_rejected() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join(FOLDER)).unwrap();
        let error = |key: Value, adapter: &str| {
            fs::write(folder.path().join(FOLDER).join(CONFIG), adapter).unwrap();
            let config = Config::from_values([(KEY.to_owned(), key)].into_iter().collect());
            add(&config, &mut Checkpoint::default(), folder.path()).unwrap_err().to_string()
        };
        assert!(error(json!("other"), "{}").contains("`low_rank_correction` of \"other\""));
        assert!(error(json!(FOLDER), "[").contains("not a JSON object"));
        assert!(error(json!(FOLDER), r#"{"r": 8, "lora_alpha": 16}"#).contains("`lora_alpha` that differs"));
        assert!(error(json!(FOLDER), r#"{"r": 8, "lora_alpha": 8, "use_dora": true}"#).contains("`use_dora`"));
        assert!(error(json!(FOLDER), r#"{"r": 8, "lora_alpha": 8}"#).contains("is missing or empty"));
    }
}
