//! A model: configuration, weights, and auxiliary files.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

pub mod adapter;
mod adjacent;
mod bits_and_bytes;
mod chat_templates;
mod config;
mod diff;
mod exclusion_reason;
mod files;
mod fp8;
pub mod gguf;
#[cfg(feature = "run")]
mod graph;
#[cfg(not(feature = "run"))]
#[path = "model/no_graph.rs"]
mod graph;
mod modelopt;
mod modules;
mod processor;
mod python_numbers;
mod quantization;
mod roles;
mod schemes;
mod ties;

use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

pub use chat_templates::{DEFAULT_TEMPLATE, chat_templates};
pub use config::{Config, OWN_METHOD};
pub use diff::{Diff, WeightDiff, diff};
pub use exclusion_reason::ExclusionReason;
use files::PREPROCESSING;
pub use files::{AuxiliaryFiles, SynthesizedFiles, auxiliary_path, open_auxiliary_config, preprocessing_folder, read_auxiliary_text};
pub use processor::processor_settings;
use processor::processor_template;
pub use python_numbers::{parse_config, parse_json, render_python};
pub use roles::{
    LINEAR_RULE, LogitKind, ModelPart, PRUNABLE_RULE, class, exempt_layers, is_convolution, is_embedding, is_linear, is_prunable, no_single_label, part,
    stacked_experts,
};

use crate::arch;
use crate::error::{Error, Result, redact_path};
use crate::files as names;
use crate::store::checkpoint::INDEX;
use crate::store::gguf::{is_gguf, model_files};
use crate::store::{Checkpoint, DType, Encoding, Module, OriginalFormat, Weight, Weights, pytorch};
use crate::work::{Event, ProgressUnit, Work};

/// A model folder, or a single safetensors, PyTorch, GGUF or ONNX file. Opening it does not read tensors.
#[derive(Clone)]
pub struct Model {
    /// Path of the folder or file.
    #[doc(hidden)]
    pub path: PathBuf,
    /// `config.json`, without the description of weight encodings.
    #[doc(hidden)]
    pub config: Config,
    /// The weights, by name.
    #[doc(hidden)]
    pub weights: Weights,
    /// The weight files, or the ONNX file with its external data files.
    #[doc(hidden)]
    pub weight_files: Vec<PathBuf>,
    /// Other files of the folder.
    #[doc(hidden)]
    pub auxiliary: AuxiliaryFiles,
    /// The graph, if a pass has changed it.
    #[doc(hidden)]
    pub changed_graph: Option<Arc<graph::Graph>>,
    /// The ONNX file, if the model was opened from one.
    #[doc(hidden)]
    pub onnx: Option<Arc<graph::ModelFile>>,
    /// Whether quantized activations are int8 instead of uint8, as some runtimes require.
    #[doc(hidden)]
    pub signed_activations: bool,
    /// The ids in the original vocabulary of the remaining tokens, ascending, if a pass has removed tokens.
    /// Their positions are the new ids.
    #[doc(hidden)]
    pub retained_tokens: Option<Arc<Vec<usize>>>,
    /// The format to which `cast` converts all floats, which GGUF files then have instead of F16.
    #[doc(hidden)]
    pub float_type: Option<DType>,
    /// Height and width of images in texts, if the model is run with its vision tower.
    #[doc(hidden)]
    pub image_size: Arc<OnceLock<[usize; 2]>>,
}

impl fmt::Debug for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Model").field("path", &self.path).field("weights", &self.weights.by_name.len()).finish_non_exhaustive()
    }
}

/// Extensions of model files, which names on the Hub lack.
const FILES: [&str; 9] = ["safetensors", "onnx", "gguf", "bin", "pt", "pth", "json", "yaml", "yml"];

impl Model {
    /// Opens a folder, or a safetensors, PyTorch, GGUF or ONNX file. Headers, ONNX messages and
    /// `config.json` are read, tensors are not. In a folder without safetensors and without
    /// `pytorch_model.bin`, opens an ONNX or GGUF file.
    ///
    /// # Errors
    /// A file is missing, malformed or not supported.
    pub fn open(path: impl AsRef<Path>) -> Result<Model> {
        let path = path.as_ref();
        names::require_no_page(path)?;
        let kind = names::kind(path).map_err(|e| missing(path, e))?;
        if kind == names::Kind::Folder
            && let Some(reason) = names::unfinished_reason(path)
        {
            return Err(Error::run(redact_path(path).display(), reason, "wait until that run has ended, or use another copy of the model"));
        }
        if let Some(file) = only_file(path, "onnx", |path| has_extension(path, "onnx"), |files| files.to_vec())? {
            return Model::open_onnx(path, &file);
        }
        if let Some(file) = only_file(path, "gguf", is_gguf, model_files)? {
            return Model::open_gguf(path, &file);
        }
        if let Some(file) = onnx_of_hub(path)? {
            return Model::open_onnx(path, &file);
        }
        let mut checkpoint = Checkpoint::open(path)?;
        let folder = names::is_dir(path);
        let unlisted = add_modules(&mut checkpoint, path)?;
        let mut config = if folder { Config::open(&path.join("config.json"))? } else { Config::default() };
        adapter::add(&config, &mut checkpoint, path)?;
        let weight_files = checkpoint.files.clone();
        ties::name_tied_originals(&config, &mut checkpoint);
        ties::store_tied_once(&config, &mut checkpoint);
        let mut notes = std::mem::take(&mut checkpoint.notes);
        notes.extend(unlisted);
        let schemes = config.take_quantization(path)?;
        (checkpoint.gptq, checkpoint.fp8, checkpoint.nvfp4) = (schemes.gptq, schemes.fp8, schemes.nvfp4);
        if schemes.fp8.is_some() || schemes.nvfp4.is_some() {
            modelopt::require_plain_layers(&checkpoint.tensors)?;
        }
        let class_of = |name: &str| if arch::is_embedding_table(config.model_type(), name) { "Embedding" } else { "Linear" };
        let mut weights = Weights::from_checkpoint_with(checkpoint, &|name| schemes.encoding(name.strip_suffix(".weight").unwrap_or(name), class_of(name)))?;
        let is_transposed = |(_, weight): &(&String, &Weight)| config.has_conv1d() && matches!(weight.original_format, Some(OriginalFormat::Bits(_)));
        if let Some((name, _)) = weights.by_name.iter().find(is_transposed) {
            let reason = "is stored as [out, in] by bitsandbytes, but layers of this family are [in, out], which is not supported";
            return Err(Error::tensor(name, reason, "start from the original checkpoint"));
        }
        adapter::complete(&config, &mut weights);
        arch::mark_roles(&mut weights.by_name, config.values());
        let mut auxiliary = if folder { AuxiliaryFiles::scan(path, &weight_files)? } else { AuxiliaryFiles::default() };
        auxiliary.in_weight_files = notes;
        for (name, weight) in &mut weights.by_name {
            let class = class(name, weight);
            match &mut weight.encoding {
                Encoding::Quantized(affine) if !affine.codes.is_palette() => schemes.describe(name.strip_suffix(".weight").unwrap_or(name), class, affine)?,
                _ => schemes.require_scales(name, class_of(name), weight)?,
            }
        }
        schemes.require_quantized(&weights).map_err(quantization::unsupported(&path.join("config.json")))?;
        if let Some(described) = config.original_quantization()
            && !weights.by_name.values().any(|weight| weight.original_format.is_some())
        {
            let method = described.get("quant_method").unwrap_or(&serde_json::Value::Null);
            return Err(Error::Unsupported {
                what: format!("{}: `quant_method` of {method} in a model without weights in this format", path.join("config.json").display()),
                hint: "remove `quantization_config` if the weights are meant to be floats; otherwise download the checkpoint again".into(),
            });
        }
        for (alias, original) in config.tied_names(|name| weights.by_name.contains_key(name)) {
            // A head that shares the integers of the embedding has a copy of its scales and zero points (see
            // `export::safetensors`).
            if weights.by_name.get(original).is_some_and(|w| w.encoding != Encoding::Dense) {
                for suffix in ["_scale", "_zero_point"] {
                    weights.by_name.remove(&format!("{alias}{suffix}"));
                }
            }
        }
        let model = Model::new(path, config, weights, weight_files, auxiliary);
        model.require_widths()?;
        Ok(model)
    }

    /// A model that no pass has changed.
    fn new(path: &Path, config: Config, weights: Weights, weight_files: Vec<PathBuf>, auxiliary: AuxiliaryFiles) -> Model {
        Model {
            path: path.to_owned(),
            config,
            weights,
            weight_files,
            auxiliary,
            changed_graph: None,
            onnx: None,
            signed_activations: false,
            retained_tokens: None,
            float_type: None,
            image_size: Arc::default(),
        }
    }
}

#[doc(hidden)]
impl Model {
    /// Opens a model that is run on the same samples: if this one reads texts with images, and the other
    /// has a tower too, on images of the same size.
    pub fn open_like(&self, path: impl AsRef<Path>) -> Result<Model> {
        let model = Model::open(path)?;
        let has_tower = arch::tower(model.config.values()).is_some();
        Ok(if has_tower { Model { image_size: Arc::clone(&self.image_size), ..model } } else { model })
    }

    /// The model for texts without images.
    #[must_use]
    pub fn on_texts(&self) -> Model {
        Model { image_size: Arc::default(), ..self.clone() }
    }

    /// Name of the file with the hash of the inputs of a cached run.
    pub const KEY: &str = "inputs.blake3";

    /// Whether a tensor has the name of a scale of keys or values, whether or not config.json describes a
    /// quantized KV cache.
    pub fn has_cache_scale_name(name: &str) -> bool {
        [".k_scale", ".v_scale"].iter().any(|suffix| name.ends_with(suffix))
    }

    /// Whether a tensor is the scale of the keys or values of a quantized KV cache.
    pub fn is_cache_scale(&self, name: &str) -> bool {
        Self::has_cache_scale_name(name) && self.config.cache().is_ok_and(|format| format.is_some())
    }

    /// Whether a pass gave this model other classes than those of the input, or a new classification head
    /// for the same classes.
    pub fn has_new_classes(&self, input: &Model) -> bool {
        let differs = |key: &str| self.config.get(key) != input.config.get(key);
        // A draft head reads hidden states of the input, which the samples of the input determine.
        let is_draft_head = arch::is_draft_head(self.config.model_type());
        self.path == input.path && !is_draft_head && (differs("id2label") || differs("architectures") || self.has_added_head(input))
    }

    /// Whether a pass has renumbered the input's tokens, so that the same ids are other tokens.
    pub fn has_renumbered_tokens(&self, input: &Model) -> bool {
        self.path == input.path && self.retained_tokens != input.retained_tokens
    }

    /// The model that samples must fit: the input, or this one if it has new classes, another vocabulary, or
    /// comes from another folder, whose preprocessing then applies to all passes.
    pub fn for_samples<'m>(&'m self, input: &'m Model) -> &'m Model {
        if self.path != input.path || self.has_new_classes(input) || self.has_renumbered_tokens(input) { self } else { input }
    }

    /// Every file that a run reads: weights, configuration, and the files next to them, whether they are
    /// carried over or only determine how weights are unpacked and texts are tokenized. Each is listed once.
    pub fn inputs(&self) -> Vec<PathBuf> {
        let described = ["config.json", INDEX, pytorch::INDEX].map(|name| self.path.join(name)).into_iter();
        let folder = self.preprocessing_folder();
        let preprocessing = PREPROCESSING.map(|name| auxiliary_path(&folder, name)).into_iter().filter(|path| path.parent() != Some(self.path.as_path()));
        let described = described.chain(preprocessing).filter(|path| names::is_file(path));
        let all = described.chain(self.weight_files.iter().cloned()).chain(self.auxiliary.read().map(|file| self.path_of(file)));
        let mut listed = BTreeSet::new();
        all.filter(|path| listed.insert(names::absolute(path))).collect()
    }

    /// Folder of the tokenizer and of other files that specify how samples are prepared; see
    /// [`preprocessing_folder`].
    fn preprocessing_folder(&self) -> PathBuf {
        let file = self.weight_files.first().filter(|_| self.onnx.is_some());
        file.map_or_else(|| self.path.clone(), |file| preprocessing_folder(file))
    }

    /// Folder and configuration that specify how samples are prepared.
    pub fn preprocessing(&self) -> Result<(PathBuf, Config)> {
        let folder = self.preprocessing_folder();
        let is_own = self.onnx.is_none() || !self.config.values().is_empty();
        let config = if is_own { self.config.clone() } else { Config::open(&auxiliary_path(&folder, "config.json"))? };
        Ok((folder, config))
    }

    /// [`check_contents`](Model::check_contents) of the model at `path`, if that is on another machine.
    pub fn check_remote(path: &Path, work: &Work) -> Result<()> {
        if names::is_remote(path) { Model::open(path)?.check_contents(work) } else { Ok(()) }
    }

    /// Compares the weight files of other machines with the hashes that their servers state (SHA-256 or the
    /// git hash on the Hub); see [`files::check_content`](crate::files::check_content). Fails if the contents
    /// of a file differ from the stated hash.
    pub fn check_contents(&self, work: &Work) -> Result<()> {
        let mut remote = self.weight_files.iter().filter(|path| names::is_remote(path)).peekable();
        if remote.peek().is_none() {
            return Ok(());
        }
        work.progress.on(Event::Begin { stage: "Hashing", total: 0, done: 0, unit: ProgressUnit::Bytes });
        let checked = remote.try_for_each(|path| {
            names::check_content(path, &|bytes| work.advance(bytes).is_ok()).map_err(|e| match e.kind() {
                std::io::ErrorKind::Interrupted => Error::Cancelled,
                _ => Error::io("read", path)(e),
            })
        });
        work.progress.on(Event::End);
        checked
    }

    /// Bytes of the stored tensors.
    pub fn stored_bytes(&self) -> u64 {
        self.weights.by_name.values().map(|w| w.stored_bytes).sum()
    }
}

/// Adds the weights of modules in subfolders. If the list of modules cannot be parsed, returns a note;
/// the list and the modules are then carried over unchanged.
fn add_modules(checkpoint: &mut Checkpoint, path: &Path) -> Result<Option<String>> {
    match Module::try_list(path)? {
        Ok(modules) => modules.iter().filter(|module| module.has_weights()).try_for_each(|module| checkpoint.add_folder(path, &module.folder)).map(|()| None),
        Err(e) => Ok(Some(format!("{e}: it is carried over unchanged, the weights of modules are left unchanged, and the model cannot be run"))),
    }
}

/// An error for a path that cannot be opened. One with the form of a name on the Hub is probably meant as
/// such.
fn missing(path: &Path, error: std::io::Error) -> Error {
    let is_file = path.extension().is_some_and(|extension| FILES.iter().any(|known| extension.eq_ignore_ascii_case(known)));
    let has_folder = path.parent().is_some_and(Path::exists);
    match path.to_str().filter(|name| error.kind() == std::io::ErrorKind::NotFound && !is_file && !has_folder && names::is_repository_id(name)) {
        Some(name) => Error::run(
            format!("cannot open {name}"),
            "the folder does not exist",
            format!("for the model on the Hugging Face Hub, write `hf:{name}`; otherwise check the name, which is relative to the working directory"),
        ),
        None => Error::io("open", path)(error),
    }
}

fn has_extension(path: &Path, extension: &str) -> bool {
    path.extension().is_some_and(|e| e == extension)
}

/// The file of a format to open: the path itself, or the only file that `models` selects of the files with
/// the extension in a folder without safetensors.
fn only_file(
    path: &Path,
    extension: &str,
    has_format: impl Fn(&Path) -> bool,
    models: impl for<'p> Fn(&[&'p PathBuf]) -> Vec<&'p PathBuf>,
) -> Result<Option<PathBuf>> {
    if !names::is_dir(path) {
        return Ok(has_format(path).then(|| path.to_owned()));
    }
    let files = names::files(path).map_err(Error::io("list", path))?;
    if has_checkpoint(&files) {
        return Ok(None);
    }
    let candidates: Vec<&PathBuf> = files.iter().filter(|file| has_extension(file, extension)).collect();
    let mut found = models(&candidates);
    if found.is_empty() {
        found.extend(candidates.first());
    }
    match found.as_slice() {
        [] => Ok(None),
        [file] => Ok(Some((*file).clone())),
        [first, ..] => Err(Error::malformed(
            path,
            format!("has {} .{extension} files and no safetensors: specify the file to open, for example {}", found.len(), first.display()),
        )),
    }
}

/// Whether a folder has weights in other files than ONNX files.
pub fn has_other_weights_than_onnx(folder: &Path) -> bool {
    names::files(folder).is_ok_and(|files| has_checkpoint(&files) || files.iter().any(|file| has_extension(file, "gguf")))
}

/// Whether files of a folder are a checkpoint in safetensors or PyTorch files.
fn has_checkpoint(files: &[PathBuf]) -> bool {
    let is_pytorch = |file: &Path| file.ends_with(pytorch::SINGLE) || file.ends_with(pytorch::INDEX);
    files.iter().any(|file| has_extension(file, "safetensors") || file.ends_with(INDEX) || is_pytorch(file))
}

/// The ONNX file of a folder in the layout of the Hub, without other weights: `onnx/model.onnx`, or the only
/// file in the folder `onnx`. The configuration and the tokenizer are in the folder itself.
fn onnx_of_hub(path: &Path) -> Result<Option<PathBuf>> {
    let folder = path.join("onnx");
    if !names::is_dir(path) || !names::is_dir(&folder) {
        return Ok(None);
    }
    let is_checkpoint = |file: &PathBuf| ["bin", "pt", "pth", "ckpt"].iter().any(|extension| has_extension(file, extension));
    let files = names::files(path).map_err(Error::io("list", path))?;
    if has_checkpoint(&files) || files.iter().any(is_checkpoint) {
        return Ok(None);
    }
    let preferred = folder.join("model.onnx");
    if names::is_file(&preferred) { Ok(Some(preferred)) } else { only_file(&folder, "onnx", |_| false, |files| files.to_vec()) }
}
