//! A model: configuration, weights, the files around them, and what has been done to it.

// What is read here, anybody may have written.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

mod config;
mod diff;
mod files;
#[cfg(feature = "run")]
mod graph;
mod quantization;
mod roles;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::Value;

pub use config::{Config, OWN_METHOD};
pub use diff::{Diff, WeightDiff, diff};
pub use files::{Beside, Reason};
pub use roles::{LINEAR_RULE, ModelPart, PRUNABLE_RULE, class, is_embedding, is_linear, is_prunable, part};

use crate::error::{Error, Result};
use crate::store::checkpoint::INDEX;
use crate::store::{Checkpoint, Encoding, Weights};
use crate::work::{Meter, Work};

/// Work that must be over before the weights can be written: a reading of data that several of them share.
pub trait Prepare: Send + Sync {
    /// Input bytes that it reads, all readings together.
    fn bytes(&self) -> u64;
    /// Does it; afterwards it need not be done again.
    ///
    /// # Errors
    /// Reading fails, or the work is cancelled.
    fn prepare(&self, work: &Work) -> Result<()>;
}

/// A pass that was applied.
#[derive(Clone)]
pub struct Applied {
    /// The pass's name.
    pub name: &'static str,
    /// Its options, defaults written out.
    pub options: Value,
    /// Weights that it changes.
    pub tensors: BTreeSet<String>,
    /// How the weights were chosen, in plain words.
    pub rule: String,
    /// Time spent in it.
    pub meter: Arc<Meter>,
    /// The most memory that was resident while it ran; nothing for passes that take part in writing.
    pub peak_rss_bytes: Option<u64>,
    /// The most memory of a GPU that was taken while it ran; nothing where none was used.
    pub peak_vram_bytes: Option<u64>,
    /// What only the work itself can tell; asked for when everything is written.
    pub details: Arc<dyn Fn() -> Value + Send + Sync>,
    /// Plain words for the report.
    pub notes: Vec<String>,
    /// Whether it sets weights to zero.
    pub zeroes: bool,
}

impl Applied {
    /// A pass of which nothing more is known yet.
    pub fn new(name: &'static str, options: Value) -> Applied {
        Applied {
            name,
            options,
            tensors: BTreeSet::new(),
            rule: String::new(),
            meter: Arc::new(Meter::default()),
            peak_rss_bytes: None,
            peak_vram_bytes: None,
            details: Arc::new(|| Value::Null),
            notes: Vec::new(),
            zeroes: false,
        }
    }
}

/// A model folder, or a single file, opened but not read.
#[derive(Clone)]
pub struct Model {
    /// Where it was opened.
    pub path: PathBuf,
    /// `config.json`, without what describes the encoding of the weights.
    pub config: Config,
    /// The weights, by name.
    pub weights: Weights,
    /// The safetensors files that it was opened from.
    pub weight_files: Vec<PathBuf>,
    /// What lies around them.
    pub beside: Beside,
    /// What was done, in order.
    pub history: Vec<Applied>,
    /// What must be done before writing.
    pub preparations: Vec<Arc<dyn Prepare>>,
    /// What it computes, where a pass has changed that.
    #[cfg(feature = "run")]
    pub changed_graph: Option<Arc<crate::ir::Graph>>,
    /// Whether quantized activations are meant for runtimes that want them as int8, and not uint8.
    pub signed_activations: bool,
    /// Whether the sizes of weights are a guess, since only the work itself can tell.
    pub estimated: bool,
    /// Memory that passes need beyond what weights take on their way, in bytes, as far as it is known beforehand.
    pub memory: u64,
    /// Small files that a pass has made, by name.
    pub attached: BTreeMap<String, Arc<Vec<u8>>>,
    /// Plain words for the report.
    pub notes: Vec<String>,
}

impl Model {
    /// Name of the file in which a cached run keeps the hash of what it was made from.
    pub const KEY: &str = "inputs.blake3";

    /// Opens a folder or a `.safetensors` file. Headers and `config.json` are read, tensors are not.
    ///
    /// # Errors
    /// Anything about the folder that is missing, malformed or not supported, by name.
    pub fn open(path: impl AsRef<Path>) -> Result<Model> {
        let path = path.as_ref();
        let checkpoint = Checkpoint::open(path)?;
        let weight_files = checkpoint.files.clone();
        let folder = path.is_dir();
        let mut config = if folder { Config::open(&path.join("config.json"))? } else { Config::default() };
        let mut weights = Weights::from_checkpoint(checkpoint)?;
        let beside = if folder { Beside::of(path, &weight_files)? } else { Beside::default() };
        let schemes = config.take_quantization(path)?;
        for (name, weight) in &mut weights.by_name {
            let (class, row) = (class(name, weight), weight.row());
            if let Encoding::Affine(affine) = &mut weight.encoding {
                schemes.describe(name.strip_suffix(".weight").unwrap_or(name), class, row, affine)?;
            }
        }
        for (alias, original) in config.tied_names(|name| weights.by_name.contains_key(name)) {
            // A head that shares the integers of the embedding has a copy of its scales (see `export::safetensors`).
            if weights.by_name.get(original).is_some_and(|w| w.encoding != Encoding::Dense) {
                weights.by_name.remove(&format!("{alias}_scale"));
            }
        }
        Ok(Model {
            path: path.to_owned(),
            config,
            weights,
            weight_files,
            beside,
            history: Vec::new(),
            preparations: Vec::new(),
            #[cfg(feature = "run")]
            changed_graph: None,
            signed_activations: false,
            estimated: false,
            memory: 0,
            attached: BTreeMap::new(),
            notes: Vec::new(),
        })
    }

    /// Every file that a run reads: weights, configuration, and what is carried over.
    pub fn inputs(&self) -> Vec<PathBuf> {
        let described = [Path::new("config.json"), Path::new(INDEX)].map(|name| self.path.join(name)).into_iter().filter(|path| path.is_file());
        described.chain(self.weight_files.iter().cloned()).chain(self.beside.files.iter().map(|file| self.path.join(file))).collect()
    }

    /// Pairs (alias, original) of names that are tied: the alias need not be stored.
    pub fn tied_names(&self) -> Vec<(&'static str, &'static str)> {
        self.config.tied_names(|name| self.weights.by_name.contains_key(name))
    }

    /// Bytes of the checkpoint's tensors as they are stored.
    pub fn stored_bytes(&self) -> u64 {
        self.weights.by_name.values().map(|w| w.stored_bytes).sum()
    }

    /// Runs what the passes left to be done before writing.
    ///
    /// # Errors
    /// Reading fails, or the work is cancelled.
    pub fn prepare(&mut self, work: &Work) -> Result<()> {
        for preparation in std::mem::take(&mut self.preparations) {
            preparation.prepare(work)?;
        }
        Ok(())
    }

    /// Holds tied weights to one treatment: an alias that is stored beside its original and was left out of a
    /// change is dropped when both were the same, so that the loader ties them again.
    ///
    /// # Errors
    /// They differ, and only one of them was changed.
    pub fn settle_ties(&mut self, input: &Model) -> Result<()> {
        for (alias, original) in input.tied_names() {
            let changed = |name: &str| match (self.weights.by_name.get(name), input.weights.by_name.get(name)) {
                (Some(now), Some(before)) => Some(!Arc::ptr_eq(&now.source(), &before.source())),
                _ => None,
            };
            let (Some(a), Some(b)) = (changed(alias), changed(original)) else { continue };
            if a == b {
                continue;
            }
            if !same_bytes(input, alias, original)? {
                return Err(Error::tensor(
                    alias,
                    format!("config.json ties it to `{original}`, both are stored with different values, and a pass changes only one of them"),
                    "name both in `targets` or both in `ignore`, or set \"tie_word_embeddings\": false in config.json",
                ));
            }
            if a {
                return Err(Error::tensor(
                    alias,
                    format!("is tied to `{original}` by config.json, but a pass changes only this one"),
                    "name both in `targets`, or set \"tie_word_embeddings\": false in config.json to untie them",
                ));
            }
            self.weights.by_name.remove(alias);
            self.notes.push(format!("`{alias}` is tied to `{original}` and held the same values: it is stored once"));
        }
        Ok(())
    }
}

fn same_bytes(model: &Model, a: &str, b: &str) -> Result<bool> {
    let hash = |name: &str| -> Result<_> {
        let weight = model.weights.get(name)?;
        let mut hasher = blake3::Hasher::new();
        weight.visit(1, &mut |block| {
            hasher.update(block.now.values);
            Ok(())
        })?;
        Ok((weight.dtype, weight.shape.clone(), hasher.finalize()))
    };
    Ok(hash(a)? == hash(b)?)
}
