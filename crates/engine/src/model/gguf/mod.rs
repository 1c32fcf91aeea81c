//! Models in GGUF files: weights with the names of Hugging Face checkpoints, and `config.json` and
//! tokenizer from the metadata.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

mod arrangement;
mod config;
mod describe;
mod expert_groups;
mod layer_patterns;
mod long_rope;
mod pre_tokenizer;
mod reader;
mod recurrent;
mod single_parts;
mod token_types;
mod tokenizer;
mod values;
mod vocabulary;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Map, Value as Json};

pub use self::arrangement::Arrangement;
pub use self::describe::{Metadata, describe};
use self::values::Values;
pub use self::vocabulary::vocabulary;
use super::{AuxiliaryFiles, Config, ExclusionReason, Model, add_modules};
use crate::arch::{self, GgufFamily};
use crate::error::{Error, Result};
use crate::files;
use crate::store::gguf::{GgufFile, RowPermutation, joined_experts, joined_latent};
use crate::store::{Checkpoint, Weight, Weights};

#[doc(hidden)]
impl Model {
    /// Opens a GGUF file; `path` is the file itself or its folder.
    pub(super) fn open_gguf(path: &Path, file: &Path) -> Result<Model> {
        let (mut opened, mut weight_files) = GgufFile::open_all_parts(file)?;
        let mut modules = Checkpoint::default();
        let unlisted = add_modules(&mut modules, path)?;
        weight_files.append(&mut modules.files);
        let mut values = Values::new(file, std::mem::take(&mut opened.values))?;
        let family = GgufFamily::from_architecture(&values.architecture, values.traits());
        let Some((model_type, family)) = family else {
            return Err(Error::Unsupported {
                what: format!("{}: the architecture `{}`", file.display(), values.architecture),
                hint: format!("supported: {}", GgufFamily::architectures()),
            });
        };
        let config = config::config((model_type, family), &mut values, &opened.tensors)?;
        let tokenizer = tokenizer::tokenizer(&mut values, &config)?;
        let (metadata, unused) = values.into_metadata()?;
        let mut by_name = weights(family, opened, &config)?;
        let module_weights = Weights::from_checkpoint(modules)?;
        by_name.extend(module_weights.by_name);
        let mut auxiliary = if files::is_dir(path) { AuxiliaryFiles::scan(path, &weight_files)? } else { AuxiliaryFiles::default() };
        for (name, json) in tokenizer.files {
            // Files in the folder take precedence: they were written by the model's authors.
            if !auxiliary.files.iter().any(|other| other == Path::new(name)) {
                auxiliary.synthesized.insert(PathBuf::from(name), Arc::new(format!("{json:#}\n")));
            }
        }
        if files::is_file(&path.join("config.json")) {
            auxiliary.left.push((PathBuf::from("config.json"), ExclusionReason::Described));
        }
        let location = file.display();
        auxiliary.in_weight_files.extend(
            tokenizer.missing.filter(|_| !auxiliary.files.iter().any(|file| file == Path::new("tokenizer.json"))).map(|reason| format!("{location}: {reason}")),
        );
        auxiliary.in_weight_files.extend(unlisted);
        if !unused.is_empty() {
            auxiliary.in_weight_files.push(format!("not carried over from {location}: {}", unused.join(", ")));
        }
        let weights = Weights { by_name, metadata, folders: module_weights.folders, ..Weights::default() };
        let mut model = Model::new(path, Config::from_values(config), weights, weight_files, auxiliary);
        arch::mark_roles(&mut model.weights.by_name, model.config.values());
        model.require_widths()?;
        // llama.cpp adds all biases that a file contains.
        model.require_used_biases(model.weights.by_name.keys().map(String::as_str))?;
        Ok(model)
    }
}

/// Maximum number of expert tensors over all layers.
const MAX_EXPERTS: usize = 1 << 18;

/// The tensors of a file, with fused expert tensors split into one tensor per expert.
fn split_experts(family: &GgufFamily, file: &mut GgufFile, config: &Map<String, Json>) -> Result<BTreeMap<String, Weight>> {
    let Some(experts) = &family.experts else { return Ok(std::mem::take(&mut file.tensors)) };
    let count = config.get(experts.count).and_then(Json::as_u64).and_then(|count| usize::try_from(count).ok()).unwrap_or(0);
    let is_split = |name: &String| !family.has_stacked_experts() && GgufFamily::is_fused_tensor(name);
    let names: Vec<String> = file.tensors.keys().filter(|name| is_split(name)).cloned().collect();
    if names.len().saturating_mul(count) > MAX_EXPERTS {
        return Err(Error::malformed(&file.path, format!("has {count} experts in {} tensors, more than are supported", names.len())));
    }
    let mut all = BTreeMap::new();
    for name in names {
        let shape = file.tensors.get(&name).map(|weight| weight.shape.clone()).unwrap_or_default();
        // Checked before allocating, since the count is untrusted.
        let slices = if shape.len() == 3 && shape.first() == Some(&count) { file.slices(&name)? } else { None };
        let slices = slices.ok_or_else(|| {
            Error::tensor(&name, format!("has the shape {shape:?}, but there are {count} experts"), "the tensors do not match the metadata of the file")
        })?;
        let module = name.strip_suffix(".weight").unwrap_or(&name);
        all.extend(slices.into_iter().enumerate().map(|(expert, weight)| (format!("{module}.{expert}.weight"), weight)));
        file.tensors.remove(&name);
    }
    all.append(&mut file.tensors);
    // GGUF stores a matrix with one row as a vector.
    for (_, weight) in all.iter_mut().filter(|(name, weight)| name.ends_with(".ffn_gate_inp_shexp.weight") && weight.shape.len() == 1) {
        weight.shape.insert(0, 1);
    }
    Ok(all)
}

/// Removes the tensors that are parts of one tensor in checkpoints, and returns the whole ones by their names
/// in checkpoints.
fn join_parts(family: &GgufFamily, file: &mut GgufFile) -> Result<BTreeMap<String, Weight>> {
    let mut parts: BTreeMap<String, Vec<(usize, String)>> = BTreeMap::new();
    for name in file.tensors.keys() {
        if let Some((checkpoint, position)) = family.joined_name(name) {
            parts.entry(checkpoint).or_default().push((position, name.clone()));
        }
    }
    let mut joined = BTreeMap::new();
    for (checkpoint, mut names) in parts {
        names.sort();
        // The parts of each expert or head.
        let mut matrices: Vec<Vec<Weight>> = Vec::new();
        for (_, name) in &names {
            let slices = file.slices(name)?.unwrap_or_default();
            if matrices.is_empty() {
                matrices.resize_with(slices.len().min(MAX_EXPERTS), Vec::new);
            }
            if matrices.len() != slices.len() {
                matrices.clear();
                break;
            }
            matrices.iter_mut().zip(slices).for_each(|(parts, slice)| parts.push(slice));
        }
        let is_incomplete = matrices.iter().any(|parts| parts.len() != names.len());
        if matrices.is_empty() || is_incomplete || family.joined_tensors(&checkpoint).is_none_or(|all| all.len() != names.len()) {
            let reason = "is stored in parts that are missing or do not have the same number of matrices";
            return Err(Error::tensor(&checkpoint, reason, "the tensors do not match the metadata of the file"));
        }
        let is_latent = family.latent_tensors(&checkpoint).is_some();
        let whole = if is_latent {
            joined_latent(matrices, &checkpoint)?
        } else {
            joined_experts(matrices, family.experts.is_some_and(|experts| experts.alternates), &checkpoint)?
        };
        joined.insert(checkpoint, whole);
        names.iter().for_each(|(_, name)| drop(file.tensors.remove(name)));
    }
    Ok(joined)
}

/// The weights of a file, by their names in Hugging Face checkpoints.
fn weights(family: &'static GgufFamily, mut opened: GgufFile, config: &Map<String, Json>) -> Result<BTreeMap<String, Weight>> {
    let mut joined = Arrangement::new(family, config).read_gguf(&mut opened)?;
    joined.append(&mut join_parts(family, &mut opened)?);
    let (file, tensors) = (opened.path.clone(), split_experts(family, &mut opened, config)?);
    let size = |key: &str| config.get(key).and_then(Json::as_u64).and_then(|size| usize::try_from(size).ok());
    let heads = |key: &str| size(key).filter(|count| *count > 0);
    let mut weights = BTreeMap::new();
    let mut layers = BTreeSet::new();
    for (name, mut weight) in tensors {
        if GgufFamily::is_filter(&name) && weight.shape.len() == 2 {
            weight.shape.insert(1, 1);
        }
        if name == config::FACTORS || long_rope::TENSORS.iter().any(|(tensor, _)| name == *tensor) {
            continue;
        }
        let Some(checkpoint_name) = family.to_checkpoint(&name) else {
            let what = format!("{}: tensor `{name}`", file.display());
            return Err(Error::Unsupported { what, hint: format!("the architecture `{}` has no such tensor", family.architecture) });
        };
        layers.extend(GgufFamily::layer(&checkpoint_name));
        let added = if family.norms_plus_one && GgufFamily::is_norm(&checkpoint_name) { -1.0 } else { 0.0 };
        let count = match checkpoint_name.rsplit('.').nth(1) {
            Some("q_proj") => heads("num_attention_heads"),
            Some("k_proj") => heads("num_key_value_heads"),
            _ => None,
        };
        let order = count.filter(|_| family.interleaved_rope).map(|count| {
            let rows = weight.filled_rows();
            rows.checked_div(count).filter(|head| head.is_multiple_of(2) && head.checked_mul(count) == Some(rows) && *head > 0)
        });
        let weight = match order {
            Some(None) => {
                return Err(Error::tensor(
                    &name,
                    "has a number of rows that is not divisible into heads of even width",
                    "the tensors do not match the metadata of the file",
                ));
            }
            None if added == 0.0 => weight,
            order => RowPermutation { upstream: weight, order: order.flatten().map(RowPermutation::deinterleave), added, name: name.clone() }.weight()?,
        };
        weights.insert(checkpoint_name, weight);
    }
    weights.extend(joined);
    if size("num_hidden_layers") != Some(layers.len()) {
        let expected = size("num_hidden_layers").unwrap_or(0);
        return Err(Error::malformed(&file, format!("specifies {expected} layers, but has tensors of {}", layers.len())));
    }
    Ok(weights)
}
