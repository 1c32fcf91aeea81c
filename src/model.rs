//! A model: configuration, weights, and the files around them.

// What is read here, anybody may have written.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

mod config;
mod diff;
mod files;
pub(crate) mod gguf;
#[cfg(feature = "run")]
mod graph;
#[cfg(not(feature = "run"))]
#[path = "model/no_graph.rs"]
mod graph;
mod module_renames;
mod modules;
mod quantization;
mod roles;

use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use config::{Config, OWN_METHOD};
pub use diff::{Diff, WeightDiff, diff};
use files::PREPROCESSING;
pub use files::{Beside, Made, Reason, config_beside, preprocessing_folder, text_beside};
pub use module_renames::module_name;
pub use roles::{LINEAR_RULE, ModelPart, PRUNABLE_RULE, class, exempt_layers, is_embedding, is_linear, is_prunable, part, stacked_experts};

use crate::error::{Error, Result};
use crate::files as names;
use crate::model::roles::{class_of, mark_routers};
use crate::store::checkpoint::INDEX;
use crate::store::gguf::{continues, is_gguf};
use crate::store::{Checkpoint, Encoding, Module, Weight, Weights, pytorch};
use crate::work::{Event, ProgressUnit, Work};

/// A model folder, or a single file of safetensors, PyTorch, GGUF or ONNX, opened but not read.
#[derive(Clone)]
pub struct Model {
    /// Where it was opened.
    pub path: PathBuf,
    /// `config.json`, without what describes the encoding of the weights.
    pub config: Config,
    /// The weights, by name.
    pub weights: Weights,
    /// The files of weights that it was opened from, or the ONNX file and those beside it that hold tensors of it.
    pub weight_files: Vec<PathBuf>,
    /// What lies around them.
    pub beside: Beside,
    /// What it computes, where a pass has changed that.
    pub changed_graph: Option<Arc<graph::Graph>>,
    /// The ONNX file that it was opened from.
    pub onnx: Option<Arc<graph::ModelFile>>,
    /// Whether quantized activations are meant for runtimes that want them as int8, and not uint8.
    pub signed_activations: bool,
}

impl Model {
    /// Name of the file in which a cached run keeps the hash of what it was made from.
    pub const KEY: &str = "inputs.blake3";

    /// Opens a folder, a `.safetensors` file, a file of PyTorch, a `.gguf` file or an `.onnx` file. Headers, messages and `config.json` are
    /// read, tensors are not. Of a folder without safetensors and without `pytorch_model.bin`, an ONNX file is opened, or one of GGUF.
    ///
    /// # Errors
    /// Anything about the folder that is missing, malformed or not supported, by name.
    pub fn open(path: impl AsRef<Path>) -> Result<Model> {
        let path = path.as_ref();
        names::kind(path).map_err(Error::io("open", path))?;
        if let Some(file) = only_file(path, "onnx", |path| ends(path, "onnx"), |_| false)? {
            return Model::open_onnx(path, &file);
        }
        if let Some(file) = only_file(path, "gguf", is_gguf, continues)? {
            return Model::open_gguf(path, &file);
        }
        let mut checkpoint = Checkpoint::open(path)?;
        let folder = names::is_dir(path);
        let unlisted = add_modules(&mut checkpoint, path)?;
        let weight_files = checkpoint.files.clone();
        let mut config = if folder { Config::open(&path.join("config.json"))? } else { Config::default() };
        store_tied_once(&config, &mut checkpoint);
        let mut notes = std::mem::take(&mut checkpoint.notes);
        notes.extend(unlisted);
        let schemes = config.take_quantization(path)?;
        checkpoint.words = schemes.words;
        let mut weights = Weights::from_checkpoint_with(checkpoint, &|name| schemes.encoding(name.strip_suffix(".weight").unwrap_or(name), class_of(name)))?;
        let mut beside = if folder { Beside::of(path, &weight_files)? } else { Beside::default() };
        beside.in_weight_files = notes;
        for (name, weight) in &mut weights.by_name {
            let class = class(name, weight);
            if let Encoding::Affine(affine) = &mut weight.encoding
                && !affine.codes.is_palette()
            {
                schemes.describe(name.strip_suffix(".weight").unwrap_or(name), class, affine)?;
            }
        }
        mark_routers(&mut weights.by_name);
        for (alias, original) in config.tied_names(|name| weights.by_name.contains_key(name)) {
            // A head that shares the integers of the embedding has a copy of its scales (see `export::safetensors`).
            if weights.by_name.get(original).is_some_and(|w| w.encoding != Encoding::Dense) {
                weights.by_name.remove(&format!("{alias}_scale"));
            }
        }
        let model = Model { path: path.to_owned(), config, weights, weight_files, beside, changed_graph: None, onnx: None, signed_activations: false };
        model.require_widths()?;
        Ok(model)
    }

    /// Every file that a run reads: weights, configuration, and the files next to them, whether they are carried over or only determine
    /// how weights are unpacked and texts are tokenized.
    pub fn inputs(&self) -> Vec<PathBuf> {
        let described = ["config.json", INDEX, pytorch::INDEX].map(|name| self.path.join(name)).into_iter();
        let folder = Some(self.preprocessing_folder()).filter(|folder| *folder != self.path);
        let preprocessing = folder.into_iter().flat_map(|folder| PREPROCESSING.map(|name| folder.join(name)));
        let described = described.chain(preprocessing).filter(|path| names::is_file(path));
        described.chain(self.weight_files.iter().cloned()).chain(self.beside.read().map(|file| self.path.join(file))).collect()
    }

    /// Folder of the tokenizer and of other files that specify how samples are prepared; see [`preprocessing_folder`].
    fn preprocessing_folder(&self) -> PathBuf {
        let file = self.weight_files.first().filter(|_| self.onnx.is_some());
        file.map_or_else(|| self.path.clone(), |file| preprocessing_folder(file))
    }

    /// Folder and configuration that specify how samples are prepared.
    ///
    /// # Errors
    /// The `config.json` of an ONNX file cannot be read.
    pub fn preprocessing(&self) -> Result<(PathBuf, Config)> {
        let folder = self.preprocessing_folder();
        let config = if folder == self.path { self.config.clone() } else { Config::open(&folder.join("config.json"))? };
        Ok((folder, config))
    }

    /// [`check_contents`](Model::check_contents) of the model at `path`, if that is on another machine.
    ///
    /// # Errors
    /// As there, or the model cannot be opened.
    pub fn check_remote(path: &Path, work: &Work) -> Result<()> {
        if names::is_remote(path) { Model::open(path)?.check_contents(work) } else { Ok(()) }
    }

    /// Compares the weight files of other machines with the hashes that their servers state (SHA-256 on the Hub); see
    /// [`files::check_content`](crate::files::check_content).
    ///
    /// # Errors
    /// The contents of a file differ from the stated hash, a file cannot be read, or the work is cancelled.
    pub fn check_contents(&self, work: &Work) -> Result<()> {
        let mut stated = Vec::new();
        for path in &self.weight_files {
            if names::content_hash(path).map_err(Error::io("open", path))?.is_some() {
                stated.push(path);
            }
        }
        if stated.is_empty() {
            return Ok(());
        }
        work.progress.on(Event::Begin { stage: "Hashing", total: 0, unit: ProgressUnit::Bytes });
        let checked = stated.into_iter().try_for_each(|path| {
            names::check_content(path, &|bytes| work.advance(bytes).is_ok()).map_err(|e| match e.kind() {
                std::io::ErrorKind::Interrupted => Error::Cancelled,
                _ => Error::io("read", path)(e),
            })
        });
        work.progress.on(Event::End);
        checked
    }

    /// Pairs (alias, original) of names that are tied: the alias need not be stored.
    pub fn tied_names(&self) -> Vec<(&'static str, &'static str)> {
        self.config.tied_names(|name| self.weights.by_name.contains_key(name))
    }

    /// Bytes of the checkpoint's tensors as they are stored.
    pub fn stored_bytes(&self) -> u64 {
        self.weights.by_name.values().map(|w| w.stored_bytes).sum()
    }

    /// Holds tied weights to one treatment, once a pass has changed one of them. A head that is stored and differs from the table is a weight of
    /// its own, as transformers 5 reads it: the configuration says so from then on. One that is the same and was left out of a change is dropped,
    /// so that the loader ties them again. Notes say which.
    ///
    /// # Errors
    /// A pass changes an alias alone that is the same, or one of two tables that differ where the family has one.
    pub fn settle_ties(&mut self, input: &Model) -> Result<Vec<String>> {
        let mut notes = Vec::new();
        for (alias, original) in input.tied_names() {
            let changed = |name: &str| match (self.weights.by_name.get(name), input.weights.by_name.get(name)) {
                (Some(now), Some(before)) => Some(!Arc::ptr_eq(&now.source(), &before.source())),
                _ => None,
            };
            let (Some(a), Some(b)) = (changed(alias), changed(original)) else { continue };
            let always = input.config.shares_table();
            if (always && a == b) || !(a || b) {
                continue;
            }
            match (input.same_bytes(alias, original)?, always) {
                (false, false) => notes.push(self.untie(alias, original)),
                (false, true) => {
                    return Err(Error::tensor(
                        alias,
                        format!("is `{original}` in this family, both are stored with different values, and a pass changes only one of them"),
                        "the family has one table for both: leave the wrong one out of the checkpoint",
                    ));
                }
                (true, _) if a == b => {}
                (true, _) if a => {
                    return Err(Error::tensor(
                        alias,
                        format!("is tied to `{original}` by config.json, but a pass changes only this one"),
                        if always {
                            "name both in `targets`: the family has one table for both"
                        } else {
                            "name both in `targets`, or set \"tie_word_embeddings\": false in config.json to untie them"
                        },
                    ));
                }
                (true, _) => {
                    self.weights.by_name.remove(alias);
                    notes.push(format!("`{alias}` is tied to `{original}` and has the same values: it is stored once"));
                }
            }
        }
        Ok(notes)
    }

    /// Says that a head is a weight of its own. Its bias is stored by both of its names then: transformers 5 reads one of them, 4 the other.
    fn untie(&mut self, alias: &str, original: &str) -> String {
        self.config.set("tie_word_embeddings", false.into());
        let weights = &mut self.weights.by_name;
        if let Some(module) = alias.strip_suffix("decoder.weight") {
            let [own, shared] = [format!("{module}decoder.bias"), format!("{module}bias")];
            if let Some(shared_bias) = weights.get(&shared).cloned() {
                let bias = weights.entry(own).or_insert(shared_bias).clone();
                weights.insert(shared, bias);
            }
        }
        format!("`{alias}` differs from `{original}`, to which config.json ties it: it is a weight of its own, and \"tie_word_embeddings\" becomes false")
    }

    /// Whether two weights hold the same values in the same format.
    pub(crate) fn same_bytes(&self, a: &str, b: &str) -> Result<bool> {
        let [first, second] = [self.weights.get(a)?.dense(a), self.weights.get(b)?.dense(b)];
        if (first.dtype, &first.shape) != (second.dtype, &second.shape) {
            return Ok(false);
        }
        let hash = |weight: &Weight| -> Result<_> {
            let mut hasher = blake3::Hasher::new();
            weight.visit(1, &mut |block| {
                hasher.update(block.now.values);
                Ok(())
            })?;
            Ok(hasher.finalize())
        };
        Ok(hash(&first)? == hash(&second)?)
    }
}

/// Adds the weights of modules that have folders of their own. A list of modules that cannot be understood is told: it goes over as it is, and
/// whatever it speaks of with it.
fn add_modules(checkpoint: &mut Checkpoint, path: &Path) -> Result<Option<String>> {
    match Module::listed(path)? {
        Ok(modules) => modules.iter().filter(|module| module.has_weights()).try_for_each(|module| checkpoint.add_folder(path, &module.folder)).map(|()| None),
        Err(e) => Ok(Some(format!("{e}: it is carried over as it is, weights of modules are left as they are, and the model cannot be run"))),
    }
}

/// Leaves out tensors that are others of the same file, where the configuration ties them: loaders tie them again. Others are told.
fn store_tied_once(config: &Config, checkpoint: &mut Checkpoint) {
    let sharing = |checkpoint: &Checkpoint| {
        let mut places: Vec<_> = checkpoint.tensors.iter().filter(|(_, tensor)| tensor.bytes() > 0).map(|(name, tensor)| (tensor.place(), name)).collect();
        places.sort();
        let pairs = places
            .windows(2)
            .filter_map(|pair| if let [(a, first), (b, second)] = pair { (a == b).then(|| [first, second].map(|name| (*name).clone())) } else { None });
        pairs.collect::<Vec<_>>()
    };
    for [first, second] in sharing(checkpoint) {
        for (alias, original) in [(&first, &second), (&second, &first)] {
            let ties = config.tied_names(|name| name != alias && checkpoint.tensors.contains_key(name));
            if ties.contains(&(alias.as_str(), original.as_str())) {
                checkpoint.tensors.remove(alias);
            }
        }
    }
    let told = sharing(checkpoint);
    checkpoint.notes.extend(told.iter().map(|[first, second]| format!("`{first}` and `{second}` share their elements in the input; each is stored by itself")));
}

fn ends(path: &Path, extension: &str) -> bool {
    path.extension().is_some_and(|e| e == extension)
}

/// The file of another format that a path stands for: itself, or the only one of a folder without safetensors, but for those that go on with
/// what it begins.
fn only_file(path: &Path, extension: &str, is: impl Fn(&Path) -> bool, continues: impl Fn(&Path) -> bool) -> Result<Option<PathBuf>> {
    if !names::is_dir(path) {
        return Ok(is(path).then(|| path.to_owned()));
    }
    let files = names::files(path).map_err(Error::io("list", path))?;
    let of_pytorch = |file: &Path| file.ends_with(pytorch::SINGLE) || file.ends_with(pytorch::INDEX);
    if files.iter().any(|file| ends(file, "safetensors") || file.ends_with(INDEX) || of_pytorch(file)) {
        return Ok(None);
    }
    let of_format: Vec<&PathBuf> = files.iter().filter(|file| ends(file, extension)).collect();
    let mut found: Vec<&PathBuf> = of_format.iter().copied().filter(|file| !continues(file)).collect();
    if found.is_empty() {
        found.extend(of_format.first());
    }
    match found.as_slice() {
        [] => Ok(None),
        [file] => Ok(Some((*file).clone())),
        [first, ..] => {
            Err(Error::malformed(path, format!("{} .{extension} files and no safetensors: name the file to open, like {}", found.len(), first.display())))
        }
    }
}
