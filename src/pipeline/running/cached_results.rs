//! Persistent cache of the results of passes that run the model. The [key of a pass](super::pass_keys) is
//! extended by the settings of the recipe, the device and the CPU.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::{Error, Result};
use crate::export::{Format, Safetensors};
use crate::files::Destination;
use crate::ir::GraphFile;
use crate::model::Model;
use crate::pass::PASSES;
use crate::run_state::{Applied, RunState};
use crate::store::content_key::entries;
use crate::store::writer::{self, FileLayout, Item, Written};
use crate::store::{Artifact, ArtifactStore, Checkpoint, Origin, Role, StorageFormat, Weight, Weights, ZeroOrigin};
use crate::work::Work;

/// Maximum size of the cache in bytes; the least recently used results are removed first.
const MAX_BYTES: u64 = 20 << 30;
const ATTACHED: &str = "attached";
const MASTERS: &str = "masters";

/// A folder of cached results.
#[derive(Debug, Clone)]
pub struct ResultCache {
    store: ArtifactStore,
    /// Results of passes that took less time are not cached.
    min_duration: Duration,
}

/// A cached result.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct CachedResult {
    /// Hash of everything that the result depends on.
    pub key: String,
    /// The last pass that was applied.
    pub pass: String,
    /// Path of the input model.
    pub model: PathBuf,
    /// Bytes on disk.
    pub bytes: u64,
    /// Time that the pass took, in seconds.
    pub seconds: f64,
    /// Seconds since it was written or last used.
    pub age: u64,
}

/// State of a model and of its run that the files of weights do not contain.
#[derive(Serialize, Deserialize)]
struct State {
    model: PathBuf,
    /// The folder of another model, such as a student, that replaced the input.
    replaced_by: Option<PathBuf>,
    history: Vec<AppliedRecord>,
    weights: BTreeMap<String, WeightState>,
    signed_activations: bool,
    notes: Vec<String>,
}

/// Properties of a weight that its file does not contain.
#[derive(Serialize, Deserialize)]
enum WeightState {
    /// The input's weight, which no pass has changed. It is taken from the input, so that it still
    /// compares equal to it.
    Input,
    Changed {
        origin: Origin,
        zero_origin: Option<ZeroOrigin>,
        role: Option<Role>,
        readers: Vec<String>,
        /// Tensors of the original files, and their bytes. A pass can have renamed the weight.
        stored: (Vec<String>, u64),
        master: Option<MasterState>,
    },
}

/// The source of the values that a weight was rounded from. Later passes train those.
#[derive(Serialize, Deserialize)]
enum MasterState {
    Input,
    /// In a file of the folder [`MASTERS`].
    Stored,
}

impl WeightState {
    fn new(name: &str, weight: &Weight, input: &Model) -> WeightState {
        let is_input = |weight: &Weight| input.weights.by_name.get(name).is_some_and(|before| is_same(before, weight));
        if is_input(weight) {
            return WeightState::Input;
        }
        let master = weight.source().unrounded().map(|master| if is_input(master) { MasterState::Input } else { MasterState::Stored });
        WeightState::Changed {
            origin: weight.origin,
            zero_origin: weight.zero_origin,
            role: weight.role,
            readers: weight.readers.clone(),
            stored: (weight.stored_as.clone(), weight.stored_bytes),
            master,
        }
    }
}

/// Whether two weights have the same source and properties.
fn is_same(a: &Weight, b: &Weight) -> bool {
    Arc::ptr_eq(&a.source(), &b.source()) && properties(a) == properties(b)
}

/// The properties of a weight, without its values.
fn properties(weight: &Weight) -> impl PartialEq + '_ {
    let stored = (&weight.stored_as, weight.stored_bytes);
    (weight.dtype, &weight.shape, &weight.encoding, weight.origin, weight.zero_origin, weight.role, &weight.readers, stored)
}

/// Serialized form of an [`Applied`].
#[derive(Serialize, Deserialize)]
struct AppliedRecord {
    name: String,
    options: Value,
    tensors: BTreeSet<String>,
    parameters: u64,
    unselected: Vec<String>,
    previous_names: BTreeMap<String, String>,
    rule: String,
    seconds: f64,
    peak_rss_bytes: Option<u64>,
    #[serde(default)]
    peak_vram_bytes: Option<u64>,
    details: Value,
    notes: Vec<String>,
    zeroes: bool,
}

impl AppliedRecord {
    fn new(applied: &Applied) -> AppliedRecord {
        AppliedRecord {
            name: applied.name.to_owned(),
            options: applied.options.clone(),
            tensors: applied.tensors.clone(),
            parameters: applied.parameters,
            unselected: applied.unselected.clone(),
            previous_names: applied.previous_names.clone(),
            rule: applied.rule.clone(),
            seconds: applied.meter.total().as_secs_f64(),
            peak_rss_bytes: applied.peak_rss_bytes,
            peak_vram_bytes: applied.peak_vram_bytes,
            details: applied.details.clone(),
            notes: applied.notes.clone(),
            zeroes: applied.zeroes,
        }
    }

    /// The pass; `None` if this version has no pass of this name.
    fn restore(&self) -> Option<Applied> {
        let mut applied = Applied::new(PASSES.iter().find(|name| **name == self.name)?, self.options.clone());
        applied.meter.add(Duration::try_from_secs_f64(self.seconds).ok()?);
        (applied.peak_rss_bytes, applied.peak_vram_bytes) = (self.peak_rss_bytes, self.peak_vram_bytes);
        (applied.tensors, applied.rule, applied.details) = (self.tensors.clone(), self.rule.clone(), self.details.clone());
        (applied.parameters, applied.unselected, applied.previous_names) = (self.parameters, self.unselected.clone(), self.previous_names.clone());
        (applied.notes, applied.zeroes) = (self.notes.clone(), self.zeroes);
        Some(applied)
    }
}

impl ResultCache {
    /// A cache in a folder for results of passes that take at least `min_duration`.
    pub fn new(folder: impl Into<PathBuf>, min_duration: Duration) -> ResultCache {
        ResultCache { store: ArtifactStore::new(folder), min_duration }
    }

    /// The cache in the user's cache folder, for passes that take ten seconds or more. `None` if the
    /// user has none.
    pub fn in_user_cache() -> Option<ResultCache> {
        crate::cache::folder(crate::cache::variable).map(|folder| ResultCache::new(folder.join("passes"), Duration::from_secs(10)))
    }

    /// The folder of the cache.
    #[doc(hidden)]
    pub fn folder(&self) -> &Path {
        self.store.folder()
    }

    /// All results, the most recently used first.
    ///
    /// # Errors
    /// The folder cannot be read.
    #[doc(hidden)]
    pub fn entries(&self) -> Result<Vec<CachedResult>> {
        let result = |Artifact { key, metadata: State { model, history, .. }, bytes, age, .. }| {
            let (pass, seconds) = history.into_iter().next_back().map_or_else(Default::default, |applied| (applied.name, applied.seconds));
            CachedResult { key, pass, model, bytes, seconds, age }
        };
        Ok(self.store.list()?.into_iter().map(result).collect())
    }

    /// Removes the results whose keys start with `prefix`, or all if it is empty. Returns the number of
    /// bytes freed.
    ///
    /// # Errors
    /// A result cannot be removed.
    #[doc(hidden)]
    pub fn clear(&self, prefix: &str) -> Result<u64> {
        self.store.clear(prefix)
    }

    /// Restores a result, as if the passes had been applied to `model` now. Damaged results are removed.
    pub(super) fn get(&self, key: &str, model: &Model, work: &Work) -> Result<Option<(Model, RunState)>> {
        let Some((folder, state)) = self.store.get::<State>(key, Some(work))? else { return Ok(None) };
        let restored = state.restore(&folder, model).ok().flatten();
        if restored.is_none() {
            self.store.discard(key);
        }
        Ok(restored)
    }

    /// Stores a result, if the pass took long enough and the result can be restored completely.
    pub(super) fn put(&self, key: &str, took: Duration, (input, after): (&Model, &Model), run: &mut RunState, work: &Work) -> Result<()> {
        // Files of weights do not contain blocks of GGUF files.
        if took < self.min_duration || after.weights.by_name.values().any(|weight| weight.exact_blocks().is_some()) {
            return Ok(());
        }
        // A damaged download must not be reused by later runs.
        after.check_contents(work)?;
        run.prepare(work)?;
        let draft = self.store.begin(key, &*after.path)?;
        let folder = draft.staging().path();
        // All weights are stored in one folder, with their encoding.
        let mut stored = after.clone();
        stored.weights.folders.clear();
        let exported = Safetensors::default().write(&stored, run, draft.staging().destination(), None, work)?;
        let config = exported.config.as_ref().unwrap_or(&after.config);
        if let Some(text) = config.render() {
            write(&folder.join("config.json"), text.as_bytes())?;
        }
        if let Some(graph) = &after.changed_graph {
            let text = serde_json::to_string(&GraphFile::from(&**graph)).map_err(|e| Error::graph(GraphFile::NAME, e.to_string()))?;
            write(&folder.join(GraphFile::NAME), text.as_bytes())?;
        }
        for (name, bytes) in &run.attached {
            let path = folder.join(ATTACHED).join(name);
            path.parent().map_or(Ok(()), fs::create_dir_all).map_err(Error::io("create", &path))?;
            write(&path, bytes)?;
        }
        let state = State {
            model: input.path.clone(),
            replaced_by: (after.path != input.path).then(|| after.path.clone()),
            history: run.history.iter().map(AppliedRecord::new).collect(),
            weights: after.weights.by_name.iter().map(|(name, weight)| (name.clone(), WeightState::new(name, weight, input))).collect(),
            signed_activations: after.signed_activations,
            notes: run.notes.clone(),
        };
        let mut files: Vec<Written> = exported.files.into_iter().filter(|file| !file.name.ends_with(".json")).collect();
        let masters = state.masters(after);
        if !masters.is_empty() {
            let folder = folder.join(MASTERS);
            fs::create_dir(&folder).map_err(Error::io("create", &folder))?;
            let layout = FileLayout::new(&masters, &BTreeMap::new(), &[], u64::MAX)?;
            let (written, _) = writer::write(&Destination::local(folder), &masters, &layout, None, &work.quiet())?;
            files.extend(written.into_iter().map(|file| Written { name: format!("{MASTERS}/{}", file.name), ..file }));
        }
        let differs = match state.restore(folder, input)? {
            Some((restored, _)) => difference(after, &restored),
            None => Some("a pass".into()),
        };
        if let Some(what) = differs {
            return Err(Error::malformed(&after.path, format!("{what} would not be restored unchanged")));
        }
        draft.publish(state, &files, work)?;
        self.store.evict(MAX_BYTES)
    }
}

impl State {
    /// The weights that [`MasterState::Stored`] refers to.
    fn masters(&self, after: &Model) -> Vec<Item> {
        let stored = |(name, weight): (&String, &Weight)| match self.weights.get(name) {
            Some(WeightState::Changed { master: Some(MasterState::Stored), .. }) => weight.source().unrounded().cloned(),
            _ => None,
        };
        let masters = after.weights.by_name.iter().filter_map(|found| Some((found.0.clone(), stored(found)?)));
        masters.map(|(name, weight)| Item { name, storage_format: StorageFormat::Plain, weight }).collect()
    }

    /// The model and the run that were stored. `None` if this version lacks one of the passes.
    fn restore(&self, folder: &Path, input: &Model) -> Result<Option<(Model, RunState)>> {
        let Model { config, weights, .. } = Model::open(folder)?;
        let mut model = self.replaced_by.as_ref().map_or_else(|| Ok(input.clone()), |path| input.open_like(path))?;
        let graph = folder.join(GraphFile::NAME);
        if graph.is_file() {
            model.changed_graph = Some(Arc::new(GraphFile::open(&graph)?.with_functions(&|| model.graph())?.build(&weights)?));
        }
        if config.values() != model.config.values() || config.carried_quantization() != model.config.carried_quantization() {
            model.config = config;
        }
        model.restore_adapter_folder();
        let masters = folder.join(MASTERS);
        let masters = if masters.is_dir() { Weights::from_checkpoint(Checkpoint::open(&masters)?)? } else { Weights::default() };
        let originals = std::mem::take(&mut model.weights.by_name);
        for (name, now) in weights.by_name {
            let unchanged = input.weights.by_name.get(&name);
            let weight = match (self.weights.get(&name), unchanged) {
                (Some(WeightState::Input), Some(unchanged)) => unchanged.clone(),
                (Some(WeightState::Changed { origin, zero_origin, role, readers, stored, master }), unchanged) => {
                    let before = original(&originals, &name, &stored.0);
                    let mut weight = before.map_or_else(|| now.clone(), |before| before.restored(&name, now.clone()));
                    (weight.origin, weight.zero_origin, weight.role, weight.readers) = (*origin, *zero_origin, *role, readers.clone());
                    (weight.stored_as, weight.stored_bytes) = stored.clone();
                    match master {
                        Some(MasterState::Input) => unchanged.map(|master| weight.with_master(master.clone())),
                        Some(MasterState::Stored) => masters.by_name.get(&name).map(|master| weight.with_master(master.clone())),
                        None => Some(weight),
                    }
                    .ok_or_else(|| Error::malformed(folder, format!("`{name}` lacks its master weight")))?
                }
                _ => return Ok(None),
            };
            model.weights.by_name.insert(name, weight);
        }
        let history: Vec<Applied> = self.history.iter().filter_map(AppliedRecord::restore).collect();
        let is_complete = history.len() == self.history.len();
        let mut run = RunState { history, notes: self.notes.clone(), ..RunState::default() };
        for path in entries(&folder.join(ATTACHED))? {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            run.attached.insert(name, Arc::new(fs::read(&path).map_err(Error::io("read", &path))?));
        }
        model.signed_activations = self.signed_activations;
        model.update_norms();
        Ok(is_complete.then_some((model, run)))
    }
}

/// The weight of the original files that a weight was derived from. If several weights are parts of one
/// tensor, the ends of their names must agree.
fn original<'w>(originals: &'w BTreeMap<String, Weight>, name: &str, stored_as: &[String]) -> Option<&'w Weight> {
    let is_original = |weight: &&Weight| weight.stored_as == stored_as && !stored_as.is_empty();
    let end = |name: &str| name.rsplit('.').take(2).map(str::to_owned).collect::<Vec<_>>();
    originals.get(name).filter(is_original).or_else(|| {
        let mut found: Vec<_> = originals.iter().filter(|(_, weight)| is_original(weight)).collect();
        if found.len() > 1 {
            found.retain(|(other, _)| end(other) == end(name));
        }
        found.first().map(|(_, weight)| *weight)
    })
}

/// The first difference between a model and its restored copy that a pass could observe. Values are
/// compared by their hashes.
fn difference(after: &Model, restored: &Model) -> Option<String> {
    let graph = |model: &Model| model.changed_graph.as_ref().map(|graph| serde_json::to_string(&GraphFile::from(&**graph)).ok());
    let onnx = |model: &Model| model.onnx.as_ref().map(Arc::as_ptr);
    let parts = [
        ("the folder", after.path == restored.path && after.auxiliary == restored.auxiliary && after.weight_files == restored.weight_files),
        ("the configuration", after.config.values() == restored.config.values()),
        ("the description of the quantization", after.config.carried_quantization() == restored.config.carried_quantization()),
        ("the graph", graph(after) == graph(restored)),
        ("the ONNX file", onnx(after) == onnx(restored)),
        ("the metadata", after.weights.metadata == restored.weights.metadata && after.weights.folders == restored.weights.folders),
    ];
    if let Some((what, _)) = parts.into_iter().find(|(_, same)| !same) {
        return Some(what.into());
    }
    let is_restored = |name: &String, weight: &Weight| {
        let found = restored.weights.by_name.get(name)?;
        let masters = [weight, found].map(|weight| weight.source().unrounded().map(|master| (master.dtype, master.shape.clone())));
        (properties(weight) == properties(found) && masters[0] == masters[1]).then_some(())
    };
    let differing = after.weights.by_name.iter().find(|(name, weight)| is_restored(name, weight).is_none()).map(|(name, _)| name);
    let added = || restored.weights.by_name.keys().find(|name| !after.weights.by_name.contains_key(*name));
    differing.or_else(added).map(|name| format!("`{name}`"))
}

fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    fs::write(path, bytes).map_err(Error::io("write", path))
}
