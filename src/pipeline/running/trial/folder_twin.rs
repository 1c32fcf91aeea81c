//! Twins of safetensors folders.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use serde_json::{Map, Value, json};

use super::layers::Layers;
use super::scratch::Scratch;
use super::{Candidate, Scope, Trial, is_full, without_twin};
use crate::arch::{self, LAYER_PATTERN};
use crate::error::{Error, Result};
use crate::files;
use crate::model::parse_config;
use crate::store::checkpoint::{INDEX, SINGLE};
use crate::store::header::Header;
use crate::store::{Checkpoint, RawTensor};
use crate::work::{Event, ProgressUnit, Work};

/// Extensions of files that a twin has in addition to the weights: configuration, tokenizer, chat template.
const COPIED: [&str; 5] = ["json", "jinja", "txt", "model", "tiktoken"];
/// Files with these extensions that describe other contents of the folder.
const NOT_COPIED: [&str; 5] = [INDEX, "config.json", "report.json", "modules.json", "adapter_config.json"];
/// Largest copied file in bytes.
const LARGEST_FILE: u64 = 256 << 20;
/// The part of a configuration that describes a language model with other towers.
const TEXT: &str = "text_config";
/// Number of layers in configurations of families without a graph.
const COUNT: &str = "num_hidden_layers";
/// Numbers of layers after which attention repeats.
const PERIODS: [&str; 4] = ["sliding_window_pattern", "global_attn_every_n_layers", "no_rope_layer_interval", "full_attention_interval"];
/// Lists that describe something else than layers even if they have as many elements.
const OTHER_LISTS: [&str; 2] = ["architectures", "pos_att_type"];
/// Keys of backbones, whose outputs are numbered like layers.
const STAGES: [&str; 2] = ["stage_names", "out_features"];
/// Bytes that are copied at once.
const CHUNK: u64 = 1 << 20;

/// The parts of a folder from which a twin is made.
struct Source {
    checkpoint: Checkpoint,
    config: Map<String, Value>,
}

impl Source {
    fn open(path: &Path) -> Result<Source> {
        let file = path.join("config.json");
        let text = files::read_to_string(&file).map_err(Error::io("read", &file))?;
        let config = parse_config(&text).map_err(|e| Error::malformed(&file, format!("not a JSON object: {e}")))?;
        Ok(Source { checkpoint: Checkpoint::open(path)?, config })
    }

    fn size(&self) -> u64 {
        self.checkpoint.tensors.values().map(RawTensor::bytes).fold(0, u64::saturating_add)
    }

    /// The part of a configuration that describes the layers, if it is not the configuration itself.
    fn text(&self) -> Option<&Map<String, Value>> {
        self.config.get(TEXT).and_then(Value::as_object).filter(|text| text.contains_key(COUNT) || arch::listed_layers(|key| text.get(key)).is_some())
    }

    /// The values that describe the layers.
    fn described(&self) -> &Map<String, Value> {
        self.text().unwrap_or(&self.config)
    }

    /// The key of the number of layers.
    fn count_key(&self) -> &'static str {
        let name = self.described().get("model_type").and_then(Value::as_str).unwrap_or("");
        arch::layers_key(name).unwrap_or(COUNT)
    }

    /// The layers, or the reason why the model has no single stack of layers.
    fn layers(&self) -> std::result::Result<Layers, String> {
        if !self.checkpoint.strided.is_empty() || self.checkpoint.files.iter().any(|file| file.extension().is_none_or(|e| e != "safetensors")) {
            return Err("its weights are not in safetensors files".to_owned());
        }
        if let Some(key) = STAGES.iter().find(|key| self.described().contains_key(**key)) {
            return Err(format!("`{key}` in config.json numbers outputs of layers"));
        }
        let key = self.count_key();
        let count = self.described().get(key).and_then(Value::as_u64).and_then(|count| usize::try_from(count).ok());
        let count = count.or_else(|| arch::listed_layers(|key| self.described().get(key)));
        let count = count.ok_or_else(|| format!("config.json has no `{key}`"))?;
        Layers::find(self.checkpoint.tensors.keys().map(String::as_str), count)
    }

    /// The lists of `config.json` with an element for each layer.
    fn lists(&self, count: usize) -> impl Iterator<Item = (&String, &Vec<Value>)> {
        let is_other = |key: &str| OTHER_LISTS.contains(&key) || key.ends_with("_token_id");
        let lists = self.described().iter().filter_map(|(key, value)| Some((key, value.as_array()?)));
        lists.filter(move |(key, list)| list.len() == count && !is_other(key))
    }

    /// The letters of the kinds of all layers, if `config.json` has them.
    fn pattern(&self, count: usize) -> Option<&str> {
        self.described().get(LAYER_PATTERN).and_then(Value::as_str).filter(|pattern| pattern.chars().count() == count)
    }

    /// The number of first layers that includes each kind of layer.
    fn first(&self, layers: &Layers) -> usize {
        let tensors = self.checkpoint.tensors.iter().filter_map(|(name, tensor)| {
            let (number, rest) = layers.split(name)?;
            Some((number, format!("{rest} {} {:?}", tensor.dtype, tensor.shape)))
        });
        let lists = self.lists(layers.count).flat_map(|(key, list)| list.iter().enumerate().map(move |(number, value)| (number, format!("{key} {value}"))));
        // The last layer of a period differs from the previous ones.
        let periods = PERIODS.iter().filter_map(|key| {
            let period = usize::try_from(self.described().get(*key)?.as_u64()?).ok()?.min(layers.count);
            Some((period.checked_sub(1)?, (*key).to_owned()))
        });
        let letters = self.pattern(layers.count).into_iter().flat_map(|pattern| pattern.chars().map(|letter| letter.to_string()).enumerate());
        layers.first(tensors.chain(lists).chain(periods).chain(letters))
    }

    /// The configuration of a model of the first layers.
    fn config(&self, layers: &Layers, first: usize) -> Map<String, Value> {
        let count = Some(self.count_key()).filter(|key| self.described().contains_key(*key));
        let mut changed: Vec<(String, Value)> = count.map(|key| (key.to_owned(), json!(first))).into_iter().collect();
        changed.extend(self.lists(layers.count).map(|(key, list)| (key.clone(), list.iter().take(first).cloned().collect())));
        changed.extend(self.pattern(layers.count).map(|pattern| (LAYER_PATTERN.to_owned(), pattern.chars().take(first).collect::<String>().into())));
        let mut config = self.config.clone();
        let values = if self.text().is_some() { config.get_mut(TEXT).and_then(Value::as_object_mut) } else { Some(&mut config) };
        if let Some(values) = values {
            values.extend(changed);
        }
        config
    }

    /// Writes the tensors with these names.
    fn write(&self, file: &Path, is_kept: impl Fn(&str) -> bool, work: &Work) -> Result<()> {
        let kept = self.checkpoint.tensors.iter().filter(|(name, _)| is_kept(name));
        let described = kept.map(|(name, tensor)| (name.clone(), tensor.dtype, tensor.shape.clone()));
        let header = Header::layout(described, self.checkpoint.metadata.clone()).map_err(|name| Error::tensor(&name, "is too large", ""))?;
        let tensors = header.tensors.iter().filter_map(|entry| self.checkpoint.tensors.get(&entry.name));
        write(file, &header.to_bytes(), tensors.map(|tensor| (tensor, 0)), header.data_bytes(), work)
    }
}

/// Writes a file from a header, and tensors with the number of padding bytes after each. `total`: their
/// bytes.
pub(super) fn write<'t>(path: &Path, header: &[u8], tensors: impl Iterator<Item = (&'t RawTensor, u64)>, total: u64, work: &Work) -> Result<()> {
    work.progress.on(Event::Begin { stage: "Writing the twin", total, done: 0, unit: ProgressUnit::Bytes });
    let written = copy_tensors(path, header, tensors, work);
    work.progress.on(Event::End);
    written
}

fn copy_tensors<'t>(path: &Path, header: &[u8], tensors: impl Iterator<Item = (&'t RawTensor, u64)>, work: &Work) -> Result<()> {
    let mut file = BufWriter::new(File::create(path).map_err(Error::io("create", path))?);
    file.write_all(header).map_err(Error::io("write", path))?;
    let mut buffer = Vec::new();
    for (tensor, padding) in tensors {
        let mut at = 0u64;
        while at < tensor.bytes() {
            let count = tensor.bytes().saturating_sub(at).min(CHUNK);
            buffer.resize(usize::try_from(count).unwrap_or_default(), 0);
            tensor.read_at(at, &mut buffer)?;
            file.write_all(&buffer).map_err(Error::io("write", path))?;
            work.advance(count)?;
            at = at.saturating_add(count);
        }
        buffer.clear();
        buffer.resize(usize::try_from(padding).unwrap_or_default(), 0);
        file.write_all(&buffer).map_err(Error::io("write", path))?;
    }
    file.flush().map_err(Error::io("write", path))
}

/// Copies configuration, tokenizer and chat template.
fn copy_files(from: &Path, to: &Path) -> Result<()> {
    for file in files::files(from).map_err(Error::io("list", from))? {
        let (Some(name), Some(extension)) = (file.file_name().and_then(|name| name.to_str()), file.extension().and_then(|e| e.to_str())) else { continue };
        let is_copied = COPIED.contains(&extension) && !NOT_COPIED.contains(&name) && !name.ends_with(".index.json");
        if is_copied && files::length(&file).is_ok_and(|length| length <= LARGEST_FILE) {
            let target = to.join(name);
            files::copy(&file, &target).map_err(Error::io("copy", &target))?;
        }
    }
    Ok(())
}

/// The folder to run: the output itself, or its twin or local copy in a temporary folder. The error is a
/// trial that states why the output cannot be run.
pub(super) fn candidate(path: &Path, scope: Scope, scratch: &Scratch, work: &Work) -> Result<std::result::Result<Candidate, Trial>> {
    let source = Source::open(path)?;
    let is_full_output = is_full(scope, source.size());
    if is_full_output && !files::is_remote(path) {
        return Ok(Ok(Candidate::full(path)));
    }
    let folder = scratch.path().join("twin");
    std::fs::create_dir(&folder).map_err(Error::io("create", &folder))?;
    let (config, scope) = if is_full_output {
        source.write(&folder.join(SINGLE), |_| true, work)?;
        (source.config.clone(), "the output".to_owned())
    } else {
        let layers = match source.layers() {
            Ok(layers) => layers,
            Err(reason) => return Ok(Err(without_twin(source.size(), &reason))),
        };
        let first = source.first(&layers);
        source.write(&folder.join(SINGLE), |name| layers.is_kept(name, first), work)?;
        (source.config(&layers, first), layers.describe(first))
    };
    copy_files(path, &folder)?;
    let file = folder.join("config.json");
    std::fs::write(&file, format!("{:#}\n", Value::Object(config))).map_err(Error::io("write", &file))?;
    Ok(Ok(Candidate { path: folder, scope }))
}
