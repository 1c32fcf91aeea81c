//! Opens checkpoints of safetensors or PyTorch: one file, a folder with one file, or shards with an
//! index. Only headers are read.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::header::Entry;
use super::raw_tensor::{DataFile, RawTensor};
use super::{Fp8Config, GptqConfig, Nvfp4Config, Weight, no_model, pytorch, shard_name};
use crate::error::{Error, Result};
use crate::files::{self, Kind};

/// Hint for tensors that do not fit each other.
pub(super) const INCOMPLETE: &str = "the checkpoint is incomplete or damaged; download it again";
/// File name of an unsharded checkpoint.
pub const SINGLE: &str = "model.safetensors";
/// File name of the index of a sharded checkpoint.
pub const INDEX: &str = "model.safetensors.index.json";
/// File name of a LoRA adapter in the format of PEFT.
pub const ADAPTER: &str = "adapter_model.safetensors";
/// Prefix of the tensor names in such a file.
pub const ADAPTER_PREFIX: &str = "base_model.model.";

/// All tensors of a checkpoint, by name.
#[derive(Default)]
pub struct Checkpoint {
    /// By name.
    pub tensors: BTreeMap<String, RawTensor>,
    /// Tensors that are not contiguous in row-major order.
    pub strided: BTreeMap<String, Weight>,
    /// Metadata of all files. If shards disagree, the first value is used.
    pub metadata: BTreeMap<String, String>,
    /// The files, in order.
    pub files: Vec<PathBuf>,
    /// Notes on contents other than tensors.
    pub notes: Vec<String>,
    /// GPTQ and AWQ settings of the configuration.
    pub gptq: GptqConfig,
    /// FP8 settings of the configuration, if it specifies `quant_method: fp8`.
    pub fp8: Option<Fp8Config>,
    /// NVFP4 settings of the configuration of ModelOpt.
    pub nvfp4: Option<Nvfp4Config>,
    /// Subfolders with separate weight files. The names of their tensors start with the folder and a
    /// slash.
    pub folders: Vec<String>,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Checkpoint {
    /// Opens a `.safetensors` or PyTorch file, or a folder with `model.safetensors`, with an index and
    /// shards, with `pytorch_model.bin` or its index and shards, or with exactly one file of another
    /// name. Fails if no weights were found or the index does not match its shards.
    pub fn open(path: &Path) -> Result<Checkpoint> {
        let mut checkpoint = Checkpoint::default();
        if files::kind(path).map_err(Error::io("open", path))? != Kind::Folder {
            checkpoint.add(path, None)?;
            return Ok(checkpoint);
        }
        for (single, index) in [(SINGLE, INDEX), (pytorch::SINGLE, pytorch::INDEX)].map(|(single, index)| (path.join(single), path.join(index))) {
            if files::is_file(&single) {
                checkpoint.add(&single, None)?;
            } else if files::is_file(&index) {
                checkpoint.add_shards(path, &index)?;
            } else {
                continue;
            }
            return Ok(checkpoint);
        }
        checkpoint.add(&only_file(path)?, None)?;
        Ok(checkpoint)
    }

    /// Adds the tensors of a subfolder's weight file, if there is one. Fails if a tensor name is not unique.
    pub fn add_folder(&mut self, path: &Path, folder: &str) -> Result<()> {
        let mut candidates = [SINGLE, pytorch::SINGLE, ADAPTER].map(|name| path.join(folder).join(name)).into_iter().filter(|file| files::is_file(file));
        let Some(file) = candidates.next() else { return Ok(()) };
        let mut inside = Checkpoint::default();
        inside.add(&file, None)?;
        let name = |name: String| format!("{folder}/{name}");
        for (tensor, stored) in inside.tensors {
            self.tensors.insert(self.unused(name(tensor), &file)?, stored);
        }
        for (tensor, stored) in inside.strided {
            self.strided.insert(self.unused(name(tensor), &file)?, stored);
        }
        for (key, value) in inside.metadata {
            self.metadata.entry(key).or_insert(value);
        }
        self.files.append(&mut inside.files);
        self.notes.append(&mut inside.notes);
        self.folders.push(folder.to_owned());
        Ok(())
    }

    fn unused(&self, name: String, file: &Path) -> Result<String> {
        if self.tensors.contains_key(&name) || self.strided.contains_key(&name) {
            return Err(Error::tensor(&name, format!("is also the name of a tensor in {}", file.display()), "rename one of the two"));
        }
        Ok(name)
    }

    fn add_shards(&mut self, folder: &Path, index: &Path) -> Result<()> {
        let text = files::read_to_string(index).map_err(Error::io("read", index))?;
        let map: Index = serde_json::from_str(&text).map_err(|e| Error::malformed(index, format!("not an index of shards: {e}")))?;
        if map.weight_map.is_empty() {
            return Err(Error::malformed(index, "its `weight_map` lists no tensor; download the model again"));
        }
        let mut shards: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        for (tensor, shard) in &map.weight_map {
            let plain = Path::new(shard).file_name().is_some_and(|name| name == shard.as_str());
            if !plain || shard.contains(['/', '\\']) {
                return Err(Error::malformed(index, format!("tensor `{tensor}` points outside the folder: `{shard}`")));
            }
            shards.entry(shard).or_default().insert(tensor);
        }
        shards.keys().for_each(|shard| files::prefetch(&folder.join(shard)));
        for (shard, tensors) in &shards {
            let path = folder.join(shard);
            if !files::is_file(&path) {
                return Err(Error::malformed(index, format!("lists the shard `{shard}`, which does not exist; download the model again")));
            }
            self.add(&path, Some((index, tensors)))?;
        }
        require_listed(folder, index, &shards.keys().copied().collect())
    }

    fn add(&mut self, path: &Path, expected: Option<(&Path, &BTreeSet<&str>)>) -> Result<()> {
        let (tensors, strided) = if pytorch::is_pytorch(path) {
            let found = pytorch::open(path)?;
            self.notes.extend(found.notes);
            (found.plain, found.strided)
        } else if has_extension(path, &pytorch::EXTENSIONS) {
            return Err(Error::malformed(path, pytorch::unrecognized(path)));
        } else {
            let (file, header) = DataFile::open(path)?;
            for (key, value) in header.metadata {
                self.metadata.entry(key).or_insert(value);
            }
            let tensor = |Entry { name, dtype, shape, begin, end }| (name, RawTensor::within(&file, dtype, shape, begin, end.saturating_sub(begin)));
            (header.tensors.into_iter().map(tensor).collect(), BTreeMap::new())
        };
        if let Some((index, names)) = expected {
            let found: BTreeSet<&str> = tensors.keys().chain(strided.keys()).map(String::as_str).collect();
            if let Some(name) = names.difference(&found).next() {
                return Err(Error::malformed(index, format!("tensor `{name}` is not in its shard {}", path.display())));
            }
            if let Some(name) = found.difference(names).next() {
                return Err(Error::malformed(path, format!("tensor `{name}` is not listed for this shard in {}", index.display())));
            }
        }
        self.tensors.extend(tensors);
        self.strided.extend(strided);
        self.files.push(path.to_owned());
        Ok(())
    }
}

fn has_extension(path: &Path, extensions: &[&str]) -> bool {
    path.extension().is_some_and(|e| extensions.iter().any(|extension| e == *extension))
}

/// Prefixes of PyTorch files that training programs write in addition to weights.
const NO_WEIGHTS: [&str; 4] = ["optimizer", "rng_state", "scheduler", "training_args"];

/// Base name, file number and number of files of a shard.
fn shard_of(path: &Path) -> Option<(&str, u64, u64)> {
    ["safetensors", "bin"].iter().find_map(|extension| shard_name::parse(path, extension))
}

/// Fails if a folder contains a shard of the same set as the listed ones that the index does not list.
fn require_listed(folder: &Path, index: &Path, listed: &BTreeSet<&str>) -> Result<()> {
    let set = |path: &Path| shard_of(path).map(|(name, _, count)| (name.to_owned(), count, path.extension().map(ToOwned::to_owned)));
    let sets: BTreeSet<_> = listed.iter().filter_map(|shard| set(Path::new(shard))).collect();
    let all = files::files(folder).map_err(Error::io("list", folder))?;
    let mut named = all.iter().filter(|path| set(path).is_some_and(|set| sets.contains(&set))).filter_map(|path| path.file_name()?.to_str());
    match named.find(|name| !listed.contains(name)) {
        Some(shard) => Err(Error::malformed(index, format!("does not list the shard `{shard}`, which is in its folder"))),
        None => Ok(()),
    }
}

fn only_file(folder: &Path) -> Result<PathBuf> {
    let all = files::files(folder).map_err(Error::io("list", folder))?;
    let state = |path: &Path| path.file_name().is_some_and(|name| NO_WEIGHTS.iter().any(|start| name.to_string_lossy().starts_with(start)));
    let of_pytorch = |path: &&PathBuf| has_extension(path, &pytorch::EXTENSIONS) && !state(path) && pytorch::is_pytorch(path);
    let safetensors: Vec<&PathBuf> = all.iter().filter(|path| has_extension(path, &["safetensors"])).collect();
    let (found, kind) = if safetensors.is_empty() { (all.iter().filter(of_pytorch).collect(), "PyTorch") } else { (safetensors, ".safetensors") };
    match found.as_slice() {
        [path] if let Some((_, number, count)) = shard_of(path).filter(|(.., count)| *count > 1) => {
            let index = if kind == "PyTorch" { pytorch::INDEX } else { INDEX };
            Err(Error::malformed(folder, format!("has file {number} of the {count} of a model, but neither the others nor {index}; complete the download")))
        }
        [path] => Ok((*path).clone()),
        [] => Err(Error::malformed(
            folder,
            format!(
                "no {SINGLE}, no {INDEX} and no other .safetensors or PyTorch weight file in this folder; {}",
                no_model::folder_advice(folder, &[SINGLE, INDEX])
            ),
        )),
        _ => Err(Error::malformed(folder, format!("several {kind} files and no {INDEX}; specify the file to open"))),
    }
}
