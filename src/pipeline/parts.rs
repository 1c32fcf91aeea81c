//! Distributed runs: independent processes each write a part of the weights, and a final process merges
//! the parts.
//!
//! The parts share the folder `OUT.parts`. It contains a folder for each part, which appears atomically,
//! and the counts from which thresholds over all weights are computed.

// Parses files written by other processes.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use serde_json::Value;

use super::Pipeline;
use super::part_manifest::{MANIFEST, PartManifest, WeightRecord};
use super::run::{require_finite, require_space, run};
use crate::error::{Error, Result, counted};
use crate::export::SizeForecast;
use crate::files::File;
use crate::model::Model;
use crate::output::{Replace, Staging, require_local};
use crate::recipe::Recipe;
use crate::report::{Report, Tool};
use crate::run_state::{Part, PartIndex};
use crate::store::DataFile;
use crate::store::hash::hash_file;
use crate::store::writer::{Prebuilt, PrebuiltFile};
use crate::store::{Block, Checkpoint, ContentKey, Weight};

/// Outcome of running a part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum PartOutcome {
    /// The part was written.
    Written,
    /// The part had already been written.
    Found,
    /// The part has written its counts for a threshold over all weights, and waits for those of other parts.
    Counted,
}

/// The folder that contains the parts of an output.
pub fn parts_folder(output: &Path) -> PathBuf {
    let mut name = output.file_name().unwrap_or_default().to_owned();
    name.push(".parts");
    output.with_file_name(name)
}

/// Reason for which the output of a run in parts must be local.
const NEEDS_LOCAL: &str = "parts are exchanged through a folder next to the output";

/// Folders of the finished parts.
fn finished_parts(output: &Path) -> Result<BTreeMap<PartIndex, PathBuf>> {
    let folder = parts_folder(output);
    let entries = crate::store::content_key::entries(&folder)?;
    let index = |path: &PathBuf| {
        let (number, count) = path.file_name()?.to_str()?.split_once("-of-")?;
        let index = PartIndex::new(number.parse().ok()?, count.parse().ok()?).ok()?;
        (path.join(MANIFEST).is_file()).then_some(index)
    };
    Ok(entries.into_iter().filter_map(|path| Some((index(&path)?, path))).collect())
}

/// The recipe of the parts of an output.
///
/// # Errors
/// No part is finished, or a manifest cannot be read.
pub fn recipe_from_parts(output: &Path) -> Result<Recipe> {
    require_local(output, NEEDS_LOCAL)?;
    let folder = parts_folder(output);
    if let Some(merged) = output.to_str().and_then(|name| name.trim_end_matches('/').strip_suffix(".parts")).filter(|_| output.is_dir()) {
        return Err(Error::Output {
            path: output.to_owned(),
            reason: "is the folder of the parts, not the output".into(),
            hint: format!("specify the output: `{merged}`"),
        });
    }
    let Some((_, first)) = finished_parts(output)?.into_iter().next() else {
        return Err(Error::Output {
            path: folder,
            reason: "has no finished part".into(),
            hint: "run every part first, `part` 1/N to `part` N/N, with the same output".into(),
        });
    };
    Recipe::parse(&PartManifest::open(&first)?.recipe, &first.join(MANIFEST))
}

impl Pipeline {
    /// Runs one part: writes its share of the weights to a folder such as `OUT.parts/00002-of-00016`. A
    /// part that already exists is not written again. If a pass has a threshold over all weights, each
    /// part first writes its counts, and must be run again after all parts have done so.
    ///
    /// # Errors
    /// As [`run`](Pipeline::run), or if a pass runs the model, the output is not safetensors, or the
    /// existing part belongs to another run.
    pub fn run_part(&self, mut model: Model, output: impl AsRef<Path>, index: PartIndex) -> Result<PartOutcome> {
        let output = output.as_ref();
        require_local(output, NEEDS_LOCAL)?;
        if self.provenance.key.is_some() {
            return Err(Error::option("sign", "a part is not signed: specify the key when the parts are merged"));
        }
        model.require_own_files()?;
        let (mut pipeline, mut after, mut state) = self.resolved(&model)?;
        pipeline.require_parts(&model, output)?;
        pipeline.check_planned(&after, &state, Some(output))?;
        // Only the merge copies them.
        [&mut model, &mut after].into_iter().for_each(|model| model.auxiliary.files.clear());
        self.check_output(&model, output)?;
        let key = pipeline.part_key(&model, index.count)?;
        let folder = parts_folder(output).join(index.name());
        if folder.exists() {
            match pipeline.check_part(&model, &folder, &key) {
                checked if !self.force => return checked.map(|()| PartOutcome::Found),
                Ok(()) => {}
                // Otherwise a merge could mistake the old part for one of this run before the new one is
                // written.
                Err(_) => std::fs::remove_dir_all(&folder).map_err(Error::io("remove", &folder))?,
            }
        }
        // Reports errors in the evaluation data now instead of at the merge.
        pipeline.open_samples(&model)?;
        let pipeline = &pipeline;
        let counts = parts_folder(output).join(counts_name(&key));
        let [export] = pipeline.export.as_slice() else {
            return Err(Error::option("part", "several formats cannot be written in parts: export only safetensors"));
        };
        let Some(files) = export.format().weights_by_file(&after, &state)? else {
            return Err(Error::option("part", format!("`{}` writes a single file, which cannot be written in parts", export.format().name())));
        };
        state.part = Some(Arc::new(Part::new(index, files, pipeline.min_split_bytes, counts)));
        let work = pipeline.work();
        if !state.prepare(&work)? {
            return Ok(PartOutcome::Counted);
        }
        let staging = Staging::new(&folder, if self.force { Replace::Work(MANIFEST) } else { Replace::Never }, &*model.path)?;
        let path = staging.path().join(MANIFEST);
        let forecast: SizeForecast = export.format().forecast(&after, &state)?;
        require_space(&staging, &[forecast], 0, 0)?;
        let mut peak = self.watch_memory()?;
        let exported = export.format().write(&after, &state, staging.destination(), None, &work)?;
        require_finite(pipeline, &after, &exported)?;
        let manifest = PartManifest {
            key,
            version: Tool::default().version,
            part: index.number,
            parts: index.count,
            recipe: pipeline.recipe(&model).to_yaml(),
            seconds: state.history.iter().map(|applied| applied.meter.total().as_secs_f64()).collect(),
            peak_rss_bytes: peak.highest().rss_bytes,
            files: exported.files.iter().map(|file| (file.name.clone(), file.bytes, file.blake3.to_string())).collect(),
            weights: exported.weights.iter().map(|(name, measured)| WeightRecord::new(name, measured)).collect(),
        };
        std::fs::write(&path, serde_json::to_string(&manifest).map_err(|e| Error::malformed(&path, e))?).map_err(Error::io("write", &path))?;
        work.cancel.check()?;
        staging.commit()?;
        Ok(PartOutcome::Written)
    }

    /// Merges the parts of a run into the output, verifies it, and writes the report. The output is
    /// identical to that of a run by one process. `OUT.parts` is removed unless `keep` is set.
    ///
    /// # Errors
    /// As [`run`](Pipeline::run), or if a part is missing, damaged, or of another recipe, model or version.
    pub fn merge(&self, model: Model, output: impl AsRef<Path>, keep: bool) -> Result<Report> {
        let output = output.as_ref();
        let folder = parts_folder(output);
        require_local(output, NEEDS_LOCAL)?;
        self.check_output(&model, output)?;
        let (pipeline, ..) = self.resolved(&model)?;
        pipeline.require_parts(&model, output)?;
        let (key, parts) = pipeline.all_parts(&model, output)?;
        let mut split = BTreeSet::new();
        let (count, mut merged, mut peak_bytes) = (parts.len(), vec![folder.join(counts_name(&key))], 0);
        let work = self.work();
        let mut prebuilt = Prebuilt::default();
        let mut seconds: Vec<f64> = Vec::new();
        for (path, manifest) in parts {
            split.extend(manifest.weights.iter().filter(|record| record.is_split()).map(|record| record.name.clone()));
            for (name, bytes, blake3) in &manifest.files {
                let file = path.join(name);
                let length = std::fs::metadata(&file).map_err(Error::io("open", &file))?.len();
                let hash = hash_file(&file, &work)?;
                if length != *bytes || hash.to_string() != *blake3 {
                    let part = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                    return Err(Error::Verification {
                        path: file,
                        reason: format!("was changed or damaged: remove the folder {part}, and run its part again"),
                    });
                }
                // Files are linked into the output only if the parts are removed, so that kept parts
                // share no files with it.
                if !keep && name.ends_with(".safetensors") {
                    prebuilt.files.push(PrebuiltFile { header: DataFile::open(&file)?.1, path: file, name: name.clone(), blake3: hash });
                }
            }
            peak_bytes = peak_bytes.max(manifest.peak_rss_bytes.unwrap_or(0));
            seconds.resize(manifest.seconds.len(), 0.0);
            seconds.iter_mut().zip(&manifest.seconds).for_each(|(sum, seconds)| *sum += seconds);
            // All weights of a part may be in subfolders.
            let has_root_files = manifest.files.iter().any(|(name, ..)| !name.contains('/'));
            let mut checkpoint = if has_root_files { Checkpoint::open(&path)? } else { Checkpoint::default() };
            for folder in manifest.files.iter().filter_map(|(name, ..)| Some(name.rsplit_once('/')?.0)) {
                checkpoint.add_folder(&path, folder)?;
            }
            checkpoint.tensors.into_iter().for_each(|(name, tensor)| prebuilt.tensors.entry(name).or_default().push(tensor));
            for record in manifest.weights {
                let name = record.name.clone();
                let measured = record.measurement().ok_or_else(|| Error::malformed(&path.join(MANIFEST), format!("a hash of `{name}` is malformed")))?;
                prebuilt.items.entry(name).or_default().push(measured);
            }
            merged.push(path);
        }
        let from_slices = if split.is_empty() { String::new() } else { format!(", {} from slices", counted(split.len(), "tensor")) };
        let mut pipeline = self.clone();
        pipeline.start.notes.push(format!(
            "merged from {count} parts{from_slices}, each of which needed at most {} of memory; the time of a pass is the sum over all threads of all parts",
            crate::report::format::bytes(peak_bytes)
        ));
        let seconds: Vec<Duration> = seconds.into_iter().map(|seconds| Duration::try_from_secs_f64(seconds).unwrap_or_default()).collect();
        let report = run(&pipeline, model, output, Some((&prebuilt, &seconds)))?;
        if !keep {
            for path in merged.iter().filter(|path| path.exists()) {
                std::fs::remove_dir_all(path).map_err(Error::io("remove", path))?;
            }
            // Fails if the folder contains other files, which are kept.
            let _ = std::fs::remove_dir(&folder);
        }
        Ok(report)
    }

    /// The key of a run of this pipeline, and the folders and manifests of all its parts.
    fn all_parts(&self, model: &Model, output: &Path) -> Result<(String, Vec<(PathBuf, PartManifest)>)> {
        let error = |reason: String, hint: &str| Error::Output { path: parts_folder(output), reason, hint: hint.into() };
        let finished = finished_parts(output)?;
        let counts: BTreeSet<usize> = finished.keys().map(|index| index.count).collect();
        let (Some(count), None) = (counts.first(), counts.iter().nth(1)) else {
            let found: Vec<String> = counts.iter().map(usize::to_string).collect();
            return Err(error(format!("has parts of runs in {} parts", found.join(" and ")), "remove the parts of other runs"));
        };
        let missing: Vec<String> = PartIndex { number: 1, count: *count }.all().filter(|s| !finished.contains_key(s)).map(|s| s.number.to_string()).collect();
        if let [first, ..] = missing.as_slice() {
            let listed = missing.iter().take(10).cloned().collect::<Vec<_>>().join(", ");
            let reason = format!("{} of {count} parts are missing: {listed}{}", missing.len(), if missing.len() > 10 { ", …" } else { "" });
            return Err(error(reason, &format!("run them with the same recipe and output, like `part` {first}/{count}")));
        }
        let key = self.part_key(model, *count)?;
        let parts = finished.into_values().map(|path| PartManifest::open(&path).map(|manifest| (path, manifest))).collect::<Result<Vec<_>>>()?;
        match parts.iter().find(|(_, manifest)| manifest.key != key) {
            None => Ok((key, parts)),
            Some((path, manifest)) => Err(self.other_run(model, path, manifest)),
        }
    }

    /// Checks that the run can be divided into parts.
    fn require_parts(&self, model: &Model, output: &Path) -> Result<()> {
        if crate::output::file_name(output).is_some() {
            return Err(Error::option("part", format!("{} is a file, but parts are merged into a folder: choose a folder as the output", output.display())));
        }
        if let Some((name, _)) = self.model_runs().next() {
            return Err(Error::option("part", format!("{name} runs the model and cannot be run in parts: only passes over weights can")));
        }
        if model.onnx.is_some() {
            return Err(Error::option("part", "an .onnx file cannot be written in parts: only folders of safetensors can"));
        }
        Ok(())
    }

    /// Hash of everything that the parts of a run have in common, with the contents of the files that passes
    /// read and of the tokenizer. Of the weights it covers headers and samples: reading all weights for each
    /// part would take longer than the part.
    fn part_key(&self, model: &Model, count: usize) -> Result<String> {
        let mut recipe = self.recipe(model);
        recipe.model.clear();
        recipe.memory = None;
        let work = self.work();
        let mut key = ContentKey::new(&work);
        let tool = Tool::default();
        key.line(&format!("{} {:?} {count} {}", tool.version, tool.commit, self.min_split_bytes));
        key.line(&serde_json::to_string(&recipe).unwrap_or_default());
        key.line(&serde_json::to_string(model.config.values()).unwrap_or_default());
        for step in &self.steps {
            step.pass().reads().iter().try_for_each(|path| key.files([path], path.parent().unwrap_or(path)))?;
        }
        key.files(model.preprocessing_files(), &model.path)?;
        for (name, weight) in &model.weights.by_name {
            key.line(&format!("{name} {} {:?} {} {}", weight.describe(), weight.shape, weight.stored_bytes, ends(weight)?));
        }
        for path in &model.weight_files {
            key.line(&sampled_hash(path)?);
        }
        Ok(key.name())
    }

    /// Checks that a folder contains a finished part of the run with this key, whose files have the
    /// recorded sizes.
    fn check_part(&self, model: &Model, folder: &Path, key: &str) -> Result<()> {
        let manifest = PartManifest::open(folder)?;
        if manifest.key != key {
            return Err(self.other_run(model, folder, &manifest));
        }
        let is_incomplete = |(name, bytes, _): &&(String, u64, String)| !std::fs::metadata(folder.join(name)).is_ok_and(|found| found.len() == *bytes);
        match manifest.files.iter().find(is_incomplete) {
            Some((name, bytes, _)) => Err(rewritable(folder, format!("is not complete: {name} does not have {bytes} bytes"))),
            None => Ok(()),
        }
    }

    /// The error for a part of another run, with the differences to this one.
    fn other_run(&self, model: &Model, folder: &Path, manifest: &PartManifest) -> Error {
        let options = |recipe: Recipe| serde_json::to_value(Recipe { model: PathBuf::new(), memory: None, ..recipe }).unwrap_or_default();
        let (own, other) = (options(self.recipe(model)), Recipe::parse(&manifest.recipe, &folder.join(MANIFEST)).map(options).unwrap_or_default());
        let keys: BTreeSet<&String> = [&own, &other].into_iter().filter_map(Value::as_object).flat_map(|options| options.keys()).collect();
        let changed: Vec<String> = keys.into_iter().filter(|key| own.get(key) != other.get(key)).map(|key| format!("`{key}`")).collect();
        let version = Tool::default().version;
        let difference = match changed.as_slice() {
            _ if manifest.version != version => format!("it was written by compress {} instead of {version}", manifest.version),
            [] => "its recipe is the same, but the model, a file that a pass reads, or the build of compress differs".to_owned(),
            changed => format!("its recipe differs in {}", changed.join(", ")),
        };
        rewritable(folder, format!("is a part of another run: {difference}"))
    }
}

/// Name of the folder with the counts of the parts of a run.
fn counts_name(key: &str) -> String {
    format!("counts-{}", key.get(..16).unwrap_or_default())
}

/// Maximum size of a row for which the ends of a weight are hashed, in bytes.
const MAX_ROW: u64 = 1 << 20;
/// Size up to which all values of a weight are hashed, such as those of a norm.
const MAX_SMALL: u64 = 64 << 10;

/// Hash of the values of a small weight, or of the first and the last rows of another one.
fn ends(weight: &Weight) -> Result<String> {
    let (mut hasher, source, bytes) = (blake3::Hasher::new(), weight.source(), weight.value_bytes());
    let mut add = |block: Block| {
        hasher.update(block.now.values);
        Ok(())
    };
    let rows = weight.shape.first().map_or(0, |rows| *rows as u64);
    let row_bytes = bytes.checked_div(rows).unwrap_or(bytes).max(1);
    if bytes <= MAX_SMALL {
        source.visit(1, &mut add)?;
    } else if row_bytes <= MAX_ROW {
        let few = usize::try_from((SAMPLE as u64).div_ceil(row_bytes)).unwrap_or(1);
        let rows = usize::try_from(rows).unwrap_or(usize::MAX);
        let parts = [0..few.min(rows), rows.saturating_sub(few)..rows];
        parts.iter().filter_map(|rows| source.rows(rows, 1)).try_for_each(|rows| rows.source.visit(1, &mut add))?;
    }
    Ok(hasher.finalize().to_string())
}

/// Minimum number of samples of a file.
const MIN_SAMPLES: u64 = 16;
/// Maximum distance between samples, in bytes.
const MAX_STRIDE: u64 = 16 << 20;
/// Length of a sample in bytes.
const SAMPLE: usize = 4096;

/// Hash of the length of a file and of samples at regular distances.
fn sampled_hash(path: &Path) -> Result<String> {
    let file = File::open(path).map_err(Error::io("open", path))?;
    let length = file.length();
    let mut hasher = blake3::Hasher::new();
    hasher.update(&length.to_le_bytes());
    let stride = MAX_STRIDE.min(length.div_ceil(MIN_SAMPLES)).max(1);
    let mut buffer = vec![0; SAMPLE];
    for offset in (0..length).step_by(usize::try_from(stride).unwrap_or(usize::MAX)) {
        buffer.resize(usize::try_from(length.saturating_sub(offset)).unwrap_or(SAMPLE).min(SAMPLE), 0);
        file.sample_exact_at(&mut buffer, offset).map_err(Error::io("read", path))?;
        hasher.update(&buffer);
    }
    Ok(hasher.finalize().to_string())
}

fn rewritable(folder: &Path, reason: String) -> Error {
    Error::Output { path: folder.to_owned(), reason, hint: "write it again with `force`, remove it, or choose another output folder".into() }
}
