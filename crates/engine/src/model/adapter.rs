//! Low-rank corrections of quantized layers and trained adapters, stored as a LoRA or DoRA adapter of PEFT
//! in a subfolder. `config.json` names the folder, so that adapters for other purposes are not applied.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde_json::{Value, json};

use super::{Config, Model};
use crate::error::{Error, Result};
use crate::files;
use crate::store::checkpoint::{ADAPTER, ADAPTER_PREFIX, Checkpoint};
use crate::store::{Computed, Corrected, DType, Normalized, Role, Weight, Weights, output_norms};

/// Folder of the adapter.
pub const FOLDER: &str = "adapter";
/// File name of its configuration.
pub const CONFIG: &str = "adapter_config.json";
/// Key of `config.json` with the folder.
pub const KEY: &str = "low_rank_correction";
/// Keys of its configuration that do not change the result of a trained adapter, or are read, in PEFT 0.21.
/// Other keys, such as `rank_pattern` and `use_qalora`, are supported only with values without an effect.
const SUPPORTED: [&str; 26] = [
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "fan_in_fan_out",
    "inference_mode",
    "init_lora_weights",
    "layers_pattern",
    "loftq_config",
    "lora_alpha",
    "lora_dropout",
    "lora_ga_config",
    "megatron_config",
    "megatron_core",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "r",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
    "use_dora",
    "velora_config",
];
/// Values of `init_lora_weights` with which PEFT leaves the weights of the model unchanged.
const INITIALIZATIONS: [&str; 4] = ["gaussian", "eva", "orthogonal", "mica"];
/// Names of the factors, in the order in which they are applied.
const FACTORS: [&str; 2] = ["lora_A", "lora_B"];
/// End of the names of DoRA's trained norms.
const MAGNITUDE: &str = "lora_magnitude_vector";

/// Names of the factors of the correction of a weight: `[rank, in]` and `[out, rank]`.
pub fn factor_names(weight: &str) -> [String; 2] {
    let module = module(weight);
    FACTORS.map(|factor| format!("{FOLDER}/{ADAPTER_PREFIX}{module}.{factor}.weight"))
}

/// Name of the norms that the weights of each output of a layer get with DoRA.
pub fn magnitude_name(weight: &str) -> String {
    format!("{FOLDER}/{ADAPTER_PREFIX}{}.{MAGNITUDE}", module(weight))
}

/// Name of the norms of a weight with its factors, a parameter that is computed from these.
fn norm_name(weight: &str) -> String {
    format!("{}/norm", magnitude_name(weight))
}

fn module(weight: &str) -> &str {
    weight.strip_suffix(".weight").unwrap_or(weight)
}

/// A tensor of an adapter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    /// The factor that is applied first.
    Inner,
    /// The factor that is applied last.
    Outer,
    /// The norms of DoRA.
    Magnitude,
}

/// The module that a tensor of the adapter changes; `None` for other weights.
fn part(name: &str) -> Option<(&str, Part)> {
    let name = name.strip_prefix(FOLDER)?.strip_prefix('/')?.strip_prefix(ADAPTER_PREFIX)?;
    if let Some(module) = name.strip_suffix(MAGNITUDE).and_then(|module| module.strip_suffix('.')) {
        return Some((module, Part::Magnitude));
    }
    let (module, factor) = name.strip_suffix(".weight")?.rsplit_once('.')?;
    let parts = FACTORS.into_iter().zip([Part::Inner, Part::Outer]);
    parts.into_iter().find(|(name, _)| *name == factor).map(|(_, part)| (module, part))
}

/// Adds the tensors of the adapter that `config.json` names. Fails if it is missing or is not a LoRA or DoRA
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
    if checkpoint.tensors.keys().any(|name| part(name).is_some()) {
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
    let is_neutral = |value: &Value| match value {
        Value::Null | Value::Bool(false) => true,
        Value::String(text) => text == "none",
        Value::Array(items) => items.is_empty(),
        Value::Object(items) => items.is_empty(),
        _ => false,
    };
    let has_effect = |key: &str, value: &Value| match key {
        "fan_in_fan_out" => value.as_bool() == Some(true) && !config.has_conv1d(),
        "init_lora_weights" => value.as_str().is_some_and(|name| !INITIALIZATIONS.contains(&name)),
        "peft_type" => value.as_str() != Some("LORA"),
        _ => !SUPPORTED.contains(&key) && !is_neutral(value),
    };
    if let Some((key, value)) = adapter.values().iter().find(|(key, value)| has_effect(key, value)) {
        return Err(unsupported(format!("{CONFIG} with `{key}: {value}`")));
    }
    checkpoint.add_folder(path, FOLDER)?;
    let has_norms = is_true(&"use_dora");
    let is_known = |name: &str| part(name).is_some_and(|(_, part)| part != Part::Magnitude || has_norms);
    let is_other = |name: &&String| name.starts_with(&format!("{FOLDER}/")) && !is_known(name);
    if let Some(name) = checkpoint.tensors.keys().find(is_other) {
        return Err(unsupported(format!("the tensor `{name}`, which is not a factor of a layer")));
    }
    let malformed = |what: String| Error::malformed(&path.join(FOLDER).join(ADAPTER), what);
    let of = |wanted: Part| checkpoint.tensors.keys().filter_map(move |name| part(name).filter(|(_, part)| *part == wanted)).map(|(module, _)| module);
    let [layers, outer, norms] = [Part::Inner, Part::Outer, Part::Magnitude].map(|wanted| of(wanted).collect::<BTreeSet<&str>>());
    if let Some(module) = layers.symmetric_difference(&outer).next() {
        return Err(malformed(format!("has only one of the factors {FACTORS:?} of `{module}`: the file is incomplete")));
    }
    if let Some(module) = layers.iter().find(|module| !is_target(&adapter, module)) {
        return Err(unsupported(format!(
            "{CONFIG} whose `target_modules` and `exclude_modules` do not select `{module}`, although {ADAPTER} has factors of it"
        )));
    }
    let of_rank = |shape: &[usize]| shape.first().map(|inner| *inner as f64) == rank;
    if let Some((name, tensor)) =
        checkpoint.tensors.iter().find(|(name, tensor)| part(name).is_some_and(|(_, part)| part == Part::Inner) && !of_rank(&tensor.shape))
    {
        return Err(unsupported(format!("{CONFIG} with `r: {}`, although `{name}` has the shape {:?}", rank.unwrap_or(0.0), tensor.shape)));
    }
    match layers.symmetric_difference(&norms).find(|_| has_norms) {
        Some(module) => Err(malformed(format!("has {FACTORS:?} or `{MAGNITUDE}` of `{module}`, but not both, although {CONFIG} has `use_dora`"))),
        None if layers.is_empty() => Err(malformed(format!("is missing or empty, although config.json has `{KEY}`"))),
        None => Ok(()),
    }
}

/// Whether PEFT applies the factors of a module: lists contain names or the ends of names. Patterns are not
/// compared.
fn is_target(adapter: &Config, module: &str) -> bool {
    let lists = |key: &str| {
        let names = adapter.get(key).and_then(Value::as_array)?.iter().filter_map(Value::as_str);
        Some(names.into_iter().any(|name| module.strip_suffix(name).is_some_and(|before| before.is_empty() || before.ends_with('.'))))
    };
    lists("target_modules") != Some(false) && lists("exclude_modules") != Some(true)
}

/// Sets the role of the tensors of the adapter, so that passes do not select them by default, and adds the
/// norms of DoRA, which are computed from them.
pub(super) fn complete(config: &Config, weights: &mut Weights) {
    weights.by_name.iter_mut().filter(|(name, _)| part(name).is_some()).for_each(|(_, weight)| weight.role = Some(Role::Other));
    weights.derived = norms(config, weights);
}

/// The norms of the weights of each output of layers with DoRA.
fn norms(config: &Config, weights: &Weights) -> BTreeMap<String, Weight> {
    let magnitudes = weights.by_name.iter().filter_map(|(name, weight)| Some((part(name).filter(|(_, part)| *part == Part::Magnitude)?.0, weight)));
    let norms = magnitudes.filter_map(|(module, magnitude)| {
        let name = format!("{module}.weight");
        let [inner, outer] = factor_names(&name).map(|factor| weights.by_name.get(&factor).cloned());
        let (upstream, inner, outer) = (weights.by_name.get(&name)?.dense(&name), inner?, outer?);
        let (shape, input_major) = (magnitude.shape.clone(), config.has_conv1d());
        let (outputs, derived) = (magnitude.elements(), norm_name(&name));
        let values = move || {
            let sum = Corrected { name: name.clone(), upstream: upstream.clone(), inner: inner.clone(), outer: outer.clone() };
            let sum = if input_major { sum.input_major() } else { sum };
            let norms = output_norms(&name, &sum.weight_as(DType::F32)?, input_major)?;
            if norms.len() != outputs {
                let reason = format!("has {} outputs, but its `{MAGNITUDE}` has {outputs} elements", norms.len());
                return Err(Error::tensor(&name, reason, "use the adapter that was written with these weights"));
            }
            // Outputs without weights stay zero: they are divided by the norm, in 16 bits too.
            Ok(norms.into_iter().map(|norm| (norm as f32).max(2f32.powi(-14))).collect())
        };
        let mut norm = Computed { values }.weight(shape);
        norm.role = Some(Role::Other);
        Some((derived, norm))
    });
    norms.collect()
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
        self.update_norms();
    }

    /// Computes the norms of DoRA from the present weights.
    pub fn update_norms(&mut self) {
        if self.is_corrected() {
            complete(&self.config, &mut self.weights);
        }
    }

    /// The model with other weights, without changes of the graph.
    pub(super) fn replace_weights(&self, weights: Weights) -> Model {
        let mut model = Model { weights, ..self.clone() };
        model.update_norms();
        model
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
        let modules = self.weights.by_name.keys().filter_map(|name| part(name)).filter(|(_, part)| *part == Part::Inner);
        modules.map(|(module, _)| format!("{module}.weight")).map(|weight| (weight.clone(), factor_names(&weight))).collect()
    }

    /// The names of the trained norms, and of the norms of the weight with its factors, of each layer with
    /// DoRA, by the name of the weight.
    pub fn corrected_norms(&self) -> BTreeMap<String, [String; 2]> {
        let names = self.corrections().into_keys().map(|weight| (weight.clone(), [magnitude_name(&weight), norm_name(&weight)]));
        names.filter(|(_, [magnitude, _])| self.weights.by_name.contains_key(magnitude)).collect()
    }

    /// The configuration for a folder without the adapter.
    pub fn config_without_corrections(&self) -> Config {
        let mut config = self.config.clone();
        config.remove(KEY);
        config
    }

    /// Adds the corrections of these layers to their weights, which must be dense, and removes the tensors
    /// of the adapter; with the last ones, also the adapter. A graph that passes have changed must not read
    /// them.
    ///
    /// # Errors
    /// A factor is missing, or the shapes of factors do not fit.
    pub fn fold_corrections(&mut self, layers: &BTreeSet<String>) -> Result<()> {
        let corrections = self.corrections();
        if let Some(name) = corrections.keys().find(|name| !self.weights.by_name.contains_key(*name)) {
            return Err(Error::tensor(name, "is missing, although the adapter has factors of it", "use the adapter that was written with these weights"));
        }
        let folded: Vec<_> = corrections.iter().filter(|(name, _)| layers.contains(*name)).collect();
        for (name, factors) in &folded {
            let [inner, outer] = factors.each_ref().map(|factor| self.weights.get(factor).cloned());
            let sum = Corrected { name: (*name).clone(), upstream: self.weights.get(name)?.clone(), inner: inner?, outer: outer? };
            let (dtype, input_major) = (sum.upstream.dtype, self.config.has_conv1d());
            let sum = if input_major { sum.input_major() } else { sum };
            let folded = match self.weights.by_name.remove(&magnitude_name(name)) {
                None => sum.weight()?,
                Some(norms) => Normalized { name: (*name).clone(), upstream: sum.weight_as(DType::F32)?, norms, input_major }.weight(dtype),
            };
            self.weights.by_name.insert((*name).clone(), folded);
            factors.iter().for_each(|factor| drop(self.weights.by_name.remove(factor)));
        }
        self.weights.derived = norms(&self.config, &self.weights);
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
        let mut config = json!({
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
        if !self.corrected_norms().is_empty() {
            config.as_object_mut().into_iter().for_each(|config| drop(config.insert("use_dora".into(), Value::Bool(true))));
        }
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
        assert_eq!(part(&names[0]), Some(("model.layers.0.mlp.up_proj", Part::Inner)));
        assert_eq!(part(&names[1]), Some(("model.layers.0.mlp.up_proj", Part::Outer)));
        assert_eq!(part("model.layers.0.mlp.up_proj.weight"), None);
        let magnitude = magnitude_name("model.layers.0.mlp.up_proj.weight");
        assert_eq!(magnitude, "adapter/base_model.model.model.layers.0.mlp.up_proj.lora_magnitude_vector");
        assert_eq!(part(&magnitude), Some(("model.layers.0.mlp.up_proj", Part::Magnitude)));
        assert_eq!(part(&norm_name("model.layers.0.mlp.up_proj.weight")), None);
    }

    #[test]
    fn modules_are_selected_as_in_peft() {
        let is_target = |adapter: Value| is_target(&Config::from_values(adapter.as_object().unwrap().clone()), "model.layers.0.self_attn.q_proj");
        for adapter in [
            json!({ "target_modules": ["k_proj", "q_proj"] }),
            json!({ "target_modules": ["model.layers.0.self_attn.q_proj"] }),
            json!({ "target_modules": "all-linear", "exclude_modules": ["proj"] }),
            json!({ "target_modules": null }),
        ] {
            assert!(is_target(adapter.clone()), "{adapter}");
        }
        for adapter in [
            json!({ "target_modules": ["proj", "k_proj"] }),
            json!({ "target_modules": ["layers.1.self_attn.q_proj"] }),
            json!({ "target_modules": ["q_proj"], "exclude_modules": ["layers.0.self_attn.q_proj"] }),
        ] {
            assert!(!is_target(adapter.clone()), "{adapter}");
        }
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
        for (key, value) in [
            ("use_rslora", json!(true)),
            ("fan_in_fan_out", json!(true)),
            ("alpha_pattern", json!({ "q_proj": 4 })),
            ("layers_to_transform", json!(0)),
            ("use_qalora", json!(true)),
            ("use_bdlora", json!({ "nblocks": 2 })),
            ("kasa_config", json!({ "beta": 1e-4 })),
            ("bias", json!("all")),
            ("init_lora_weights", json!("pissa_niter_4")),
            ("peft_type", json!("ADALORA")),
            ("a_later_key", json!(2)),
        ] {
            let error = error(json!(FOLDER), &json!({ "r": 8, "lora_alpha": 8, key: value }).to_string());
            assert!(error.contains(&format!("adapter_config.json with `{key}: {value}`")), "{error}");
        }
        // The values of `LoraConfig(r=8).to_dict()` of PEFT 0.21.2, and some with an effect on the training
        // only.
        let neutral = r#"{"alora_invocation_tokens": null, "alpha_pattern": {}, "arrow_config": null, "auto_mapping": null,
            "base_model_name_or_path": null, "bias": "none", "corda_config": null, "ensure_weight_tying": false, "eva_config": null,
            "exclude_modules": null, "fan_in_fan_out": false, "inference_mode": true, "init_lora_weights": "gaussian", "kasa_config": null,
            "layer_replication": null, "layers_pattern": null, "layers_to_transform": null, "loftq_config": {}, "lora_alpha": 8,
            "lora_bias": false, "lora_dropout": 0.1, "lora_ga_config": null, "megatron_config": null, "megatron_core": "megatron.core",
            "modules_to_save": null, "monteclora_config": null, "peft_type": "LORA", "peft_version": "0.21.2", "qalora_group_size": 16,
            "r": 8, "rank_pattern": {}, "revision": null, "target_modules": ["q_proj"], "target_parameters": null, "task_type": "CAUSAL_LM",
            "trainable_token_indices": null, "use_bdlora": null, "use_dora": false, "use_qalora": false, "use_rslora": false, "velora_config": null}"#;
        assert!(error(json!(FOLDER), neutral).contains("is missing or empty"));
    }
}
