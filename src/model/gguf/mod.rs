//! Models in GGUF files: weights under the names of Hugging Face, `config.json` and the tokenizer from what the file says.

// What is read here, anybody may have written.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

mod config;
mod describe;
mod family;
mod tokenizer;
mod values;
mod vocabulary;
mod words;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Map, Value as Json};

pub(crate) use self::describe::{Described, describe};
use self::family::FAMILIES;
pub(crate) use self::family::Family;
use self::values::Values;
pub(crate) use self::vocabulary::vocabulary;
use super::files::Reason;
use super::{Beside, Config, Model, add_modules};
use crate::error::{Error, Result};
use crate::files;
use crate::store::gguf::{Arranged, GgufFile};
use crate::store::{Checkpoint, Weight, Weights};

impl Model {
    /// Opens a GGUF file; `path` is the file itself or its folder.
    pub(super) fn open_gguf(path: &Path, file: &Path) -> Result<Model> {
        let (mut opened, mut weight_files) = GgufFile::open_whole(file)?;
        let mut modules = Checkpoint::default();
        let unlisted = add_modules(&mut modules, path)?;
        weight_files.append(&mut modules.files);
        let mut values = Values::new(file, std::mem::take(&mut opened.values))?;
        let Some(family) = Family::of_architecture(&values.architecture, values.has_experts()) else {
            let known = FAMILIES.iter().map(|family| family.architecture).collect::<Vec<_>>().join(", ");
            return Err(Error::Unsupported {
                what: format!("{}: the architecture `{}`", file.display(), values.architecture),
                hint: format!("known: {known}"),
            });
        };
        let config = config::config(family, &mut values, &opened.tensors)?;
        let tokenizer = tokenizer::tokenizer(&mut values, &config)?;
        let (metadata, named) = values.rest()?;
        let mut by_name = weights(family, opened, &config)?;
        let of_modules = Weights::from_checkpoint(modules)?;
        by_name.extend(of_modules.by_name);
        let mut beside = if files::is_dir(path) { Beside::of(path, &weight_files)? } else { Beside::default() };
        for (name, json) in tokenizer.files {
            // What lies in the folder was written by the model's authors.
            if !beside.files.iter().any(|other| other == Path::new(name)) {
                beside.made.insert(PathBuf::from(name), Arc::new(format!("{json:#}\n")));
            }
        }
        if files::is_file(&path.join("config.json")) {
            beside.left.push((PathBuf::from("config.json"), Reason::Described));
        }
        let here = file.display();
        beside
            .in_weight_files
            .extend(tokenizer.missing.filter(|_| !beside.files.iter().any(|file| file == Path::new("tokenizer.json"))).map(|why| format!("{here}: {why}")));
        beside.in_weight_files.extend(unlisted);
        if !named.is_empty() {
            beside.in_weight_files.push(format!("not carried over from {here}: {}", named.join(", ")));
        }
        let model = Model {
            path: path.to_owned(),
            config: Config::of(config),
            weights: Weights { by_name, metadata, folders: of_modules.folders },
            weight_files,
            beside,
            changed_graph: None,
            onnx: None,
            signed_activations: false,
        };
        model.require_widths()?;
        Ok(model)
    }
}

/// Most experts of all layers, each part of one counted.
const MOST_EXPERTS: usize = 1 << 18;

/// The tensors of a file, those of all experts as one for each.
fn one_by_one(family: &Family, file: &mut GgufFile, config: &Map<String, Json>) -> Result<BTreeMap<String, Weight>> {
    let Some(experts) = &family.experts else { return Ok(std::mem::take(&mut file.tensors)) };
    let count = config.get(experts.count).and_then(Json::as_u64).and_then(|count| usize::try_from(count).ok()).unwrap_or(0);
    let names: Vec<String> = file.tensors.keys().filter(|name| Family::holds_all(name)).cloned().collect();
    if names.len().saturating_mul(count) > MOST_EXPERTS {
        return Err(Error::malformed(&file.path, format!("has {count} experts in {} tensors, more than are read", names.len())));
    }
    let mut all = BTreeMap::new();
    for name in names {
        let shape = file.tensors.get(&name).map(|weight| weight.shape.clone()).unwrap_or_default();
        // What a file says may be more than memory holds.
        let slices = if shape.len() == 3 && shape.first() == Some(&count) { file.slices(&name)? } else { None };
        let slices = slices
            .ok_or_else(|| Error::tensor(&name, format!("has the shape {shape:?}, where there are {count} experts"), "the file does not hold what it says"))?;
        let module = name.strip_suffix(".weight").unwrap_or(&name);
        all.extend(slices.into_iter().enumerate().map(|(expert, weight)| (format!("{module}.{expert}.weight"), weight)));
        file.tensors.remove(&name);
    }
    all.append(&mut file.tensors);
    // A matrix of one row is a vector in files.
    for (_, weight) in all.iter_mut().filter(|(name, weight)| name.ends_with(".ffn_gate_inp_shexp.weight") && weight.shape.len() == 1) {
        weight.shape.insert(0, 1);
    }
    Ok(all)
}

/// The weights of a family, by the names of checkpoints.
fn weights(family: &Family, mut opened: GgufFile, config: &Map<String, Json>) -> Result<BTreeMap<String, Weight>> {
    let (file, tensors) = (opened.path.clone(), one_by_one(family, &mut opened, config)?);
    let size = |key: &str| config.get(key).and_then(Json::as_u64).and_then(|size| usize::try_from(size).ok());
    let heads = |key: &str| size(key).filter(|count| *count > 0);
    let mut weights = BTreeMap::new();
    let mut layers = BTreeSet::new();
    for (name, weight) in tensors {
        if name == config::FACTORS {
            continue;
        }
        let Some(there) = family.to_checkpoint(&name) else {
            let what = format!("{}: tensor `{name}`", file.display());
            return Err(Error::Unsupported { what, hint: format!("it belongs to no module of the architecture `{}` that is known here", family.architecture) });
        };
        if let Some(layer) = there.strip_prefix("model.layers.").and_then(|rest| rest.split('.').next()) {
            layers.insert(layer.to_owned());
        }
        let added = if family.norms_from_zero && Family::is_norm(&there) { -1.0 } else { 0.0 };
        let count = match there.rsplit('.').nth(1) {
            Some("q_proj") => heads("num_attention_heads"),
            Some("k_proj") => heads("num_key_value_heads"),
            _ => None,
        };
        let order = count.filter(|_| family.neighbours).map(|count| {
            let rows = weight.filled_rows();
            rows.checked_div(count).filter(|head| head.is_multiple_of(2) && head.checked_mul(count) == Some(rows) && *head > 0)
        });
        let weight = match order {
            Some(None) => return Err(Error::tensor(&name, "has rows that are no whole heads with two halves", "the file does not hold what it says")),
            None if added == 0.0 => weight,
            order => Arranged { upstream: weight, order: order.flatten().map(Arranged::apart), added, name: name.clone() }.weight()?,
        };
        weights.insert(there, weight);
    }
    if size("num_hidden_layers") != Some(layers.len()) {
        let said = size("num_hidden_layers").unwrap_or(0);
        return Err(Error::malformed(&file, format!("says that it has {said} layers, and holds tensors of {}", layers.len())));
    }
    Ok(weights)
}
