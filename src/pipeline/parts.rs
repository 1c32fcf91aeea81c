//! A run in parts, by processes that know of each other only what lies in a folder: each makes the weights of its part, and one joins them.
//!
//! `OUT.parts` has a folder for each part, which appears whole or not at all, and what parts count before thresholds over all weights are known.

// What is read here, other processes have written.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;

use super::Pipeline;
use super::run::{require_finite, require_space, run};
use super::told::{Seen, TOLD, Told};
use crate::error::{Error, Result};
use crate::export::SizeForecast;
use crate::files::File;
use crate::model::Model;
use crate::output::{Replace, Staging, require_here};
use crate::recipe::Recipe;
use crate::report::{Report, Tool};
use crate::run_state::{Part, Share};
use crate::store::checkpoint::DataFile;
use crate::store::hash::hash_of;
use crate::store::writer::{Made, MadeFile};
use crate::store::{Checkpoint, ContentKey};

/// What became of a part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum PartOutcome {
    /// It is written.
    Written,
    /// It was there already.
    Found,
    /// It has counted what thresholds over all weights need, and other parts have not.
    Counted,
}

/// The folder of the parts of an output.
pub fn parts_folder(output: &Path) -> PathBuf {
    let mut name = output.file_name().unwrap_or_default().to_owned();
    name.push(".parts");
    output.with_file_name(name)
}

/// Why parts need a folder of their own.
const MEET: &str = "parts meet in a folder beside the output";

/// Folders of the parts that there are.
fn there(output: &Path) -> Result<BTreeMap<Share, PathBuf>> {
    let folder = parts_folder(output);
    let entries = crate::store::content_key::entries(&folder)?;
    let share = |path: &PathBuf| {
        let (number, count) = path.file_name()?.to_str()?.split_once("-of-")?;
        let share = Share::new(number.parse().ok()?, count.parse().ok()?).ok()?;
        (path.join(TOLD).is_file()).then_some(share)
    };
    Ok(entries.into_iter().filter_map(|path| Some((share(&path)?, path))).collect())
}

/// The recipe whose parts lie beside an output.
///
/// # Errors
/// There are none, or what they say cannot be read.
pub fn recipe_of_parts(output: &Path) -> Result<Recipe> {
    require_here(output, MEET)?;
    let folder = parts_folder(output);
    let Some((_, first)) = there(output)?.into_iter().next() else {
        return Err(Error::Output {
            path: folder,
            reason: "has no finished part".into(),
            hint: "run every part first, with `--part 1/N` to `--part N/N` and the same output".into(),
        });
    };
    Recipe::parse(&Told::open(&first)?.recipe, &first.join(TOLD))
}

impl Pipeline {
    /// Makes one part of a run: `OUT.parts/00002-of-00016`. A part that is there already is left alone. Where thresholds are over all
    /// weights, parts count first, and are run again when all have.
    ///
    /// # Errors
    /// As [`run`](Pipeline::run); a pass runs the model, the output is not safetensors, or the part that is there is another run's.
    pub fn run_part(&self, mut model: Model, output: impl AsRef<Path>, share: Share) -> Result<PartOutcome> {
        let output = output.as_ref();
        require_here(output, MEET)?;
        model.require_own_files()?;
        model.beside.files.clear();
        let (mut pipeline, after, mut state) = self.settled(&model)?;
        pipeline.require_parts(&model, output)?;
        self.check_output(&model, output)?;
        let key = pipeline.part_key(&model, share.count)?;
        let folder = parts_folder(output).join(share.name());
        if folder.exists() {
            match found_part(&folder, &key) {
                found if !self.force => return found.map(|()| PartOutcome::Found),
                Ok(()) => {}
                // Until this part is written, nobody is to take it for one of this run.
                Err(_) => std::fs::remove_dir_all(&folder).map_err(Error::io("remove", &folder))?,
            }
        }
        // What cannot be evaluated is said before the join.
        pipeline.open_samples(&model)?;
        let pipeline = &pipeline;
        let counts = parts_folder(output).join(counts_name(&key));
        let [export] = pipeline.export.as_slice() else {
            return Err(Error::option("--part", "several formats cannot be written in parts: name safetensors alone"));
        };
        let Some(files) = export.format().weights_by_file(&after, &state)? else {
            return Err(Error::option("--part", format!("`{}` is one file, and cannot be written in parts", export.format().name())));
        };
        state.part = Some(Arc::new(Part::new(share, files, pipeline.least_cut, counts)));
        let work = pipeline.work();
        if !state.prepare(&work)? {
            return Ok(PartOutcome::Counted);
        }
        let staging = Staging::new(&folder, if self.force { Replace::Work(TOLD) } else { Replace::Nothing }, &*model.path)?;
        let place = staging.path().to_owned();
        let forecast: SizeForecast = export.format().forecast(&after, &state)?;
        require_space(&staging, &[forecast], 0, 0)?;
        let mut peak = self.watch()?;
        let exported = export.format().write(&after, &state, staging.destination(), None, &work)?;
        require_finite(pipeline, &after, &exported)?;
        let told = Told {
            key,
            version: Tool::default().version,
            part: share.number,
            parts: share.count,
            recipe: pipeline.recipe(&model).to_yaml(),
            seconds: state.history.iter().map(|applied| applied.meter.total().as_secs_f64()).collect(),
            peak_rss_bytes: peak.highest().rss_bytes,
            files: exported.files.iter().map(|file| (file.name.clone(), file.bytes, file.blake3.to_string())).collect(),
            weights: exported.weights.iter().map(|(name, seen)| Seen::of(name, seen)).collect(),
        };
        let path = place.join(TOLD);
        std::fs::write(&path, serde_json::to_string(&told).map_err(|e| Error::malformed(&path, e))?).map_err(Error::io("write", &path))?;
        work.cancel.check()?;
        staging.commit()?;
        Ok(PartOutcome::Written)
    }

    /// Joins the parts of a run, whose bytes are then those of a run by one process, verifies them, and writes the report of the whole.
    /// `OUT.parts` is removed, unless it is to be kept.
    ///
    /// # Errors
    /// A part is missing, damaged, or of another recipe, model or version; or as [`run`](Pipeline::run).
    pub fn merge(&self, model: Model, output: impl AsRef<Path>, keep: bool) -> Result<Report> {
        let output = output.as_ref();
        let folder = parts_folder(output);
        require_here(output, MEET)?;
        self.check_output(&model, output)?;
        let (pipeline, ..) = self.settled(&model)?;
        pipeline.require_parts(&model, output)?;
        let (key, parts) = pipeline.all_parts(&model, output)?;
        let mut cut = BTreeSet::new();
        let (count, mut joined, mut most) = (parts.len(), vec![folder.join(counts_name(&key))], 0);
        let work = self.work();
        let mut made = Made::default();
        let mut seconds: Vec<f64> = Vec::new();
        for (path, told) in parts {
            cut.extend(told.weights.iter().filter(|seen| seen.is_cut()).map(|seen| seen.name.clone()));
            for (name, bytes, blake3) in &told.files {
                let file = path.join(name);
                let length = std::fs::metadata(&file).map_err(Error::io("open", &file))?.len();
                let hash = hash_of(&file, &work)?;
                if length != *bytes || hash.to_string() != *blake3 {
                    let part = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                    return Err(Error::Verification {
                        path: file,
                        reason: format!("was changed or damaged: remove the folder {part}, and run its part again"),
                    });
                }
                // Parts that are kept share nothing with the output.
                if !keep && name.ends_with(".safetensors") {
                    made.files.push(MadeFile { header: DataFile::open(&file)?.1, path: file, name: name.clone(), blake3: hash });
                }
            }
            most = most.max(told.peak_rss_bytes.unwrap_or(0));
            seconds.resize(told.seconds.len(), 0.0);
            seconds.iter_mut().zip(&told.seconds).for_each(|(sum, seconds)| *sum += seconds);
            // A part may have weights of folders alone.
            let beside = told.files.iter().any(|(name, ..)| !name.contains('/'));
            let mut held = if beside { Checkpoint::open(&path)? } else { Checkpoint::default() };
            for folder in told.files.iter().filter_map(|(name, ..)| Some(name.rsplit_once('/')?.0)) {
                held.add_folder(&path, folder)?;
            }
            held.tensors.into_iter().for_each(|(name, tensor)| made.tensors.entry(name).or_default().push(tensor));
            for seen in told.weights {
                let name = seen.name.clone();
                let found = seen.measurement().ok_or_else(|| Error::malformed(&path.join(TOLD), format!("what it tells of `{name}` is not whole")))?;
                made.items.entry(name).or_default().push(found);
            }
            joined.push(path);
        }
        let pieces = if cut.is_empty() { String::new() } else { format!(", {} of the tensors from pieces", cut.len()) };
        let mut pipeline = self.clone();
        pipeline.start.notes.push(format!(
            "made in {count} parts, each in {} of memory at most, and joined{pieces}; the time of a pass is that of all parts, on all their threads",
            crate::report::format::bytes(most)
        ));
        let seconds: Vec<Duration> = seconds.into_iter().map(|seconds| Duration::try_from_secs_f64(seconds).unwrap_or_default()).collect();
        let report = run(&pipeline, model, output, Some((&made, &seconds)))?;
        if !keep {
            for path in joined.iter().filter(|path| path.exists()) {
                std::fs::remove_dir_all(path).map_err(Error::io("remove", path))?;
            }
            // Unless something else lies there.
            let _ = std::fs::remove_dir(&folder);
        }
        Ok(report)
    }

    /// The key of a run of this pipeline, and all its parts, with what they tell.
    fn all_parts(&self, model: &Model, output: &Path) -> Result<(String, Vec<(PathBuf, Told)>)> {
        let refuse = |reason: String, hint: &str| Error::Output { path: parts_folder(output), reason, hint: hint.into() };
        let there = there(output)?;
        let counts: std::collections::BTreeSet<usize> = there.keys().map(|share| share.count).collect();
        let (Some(count), None) = (counts.first(), counts.iter().nth(1)) else {
            let found: Vec<String> = counts.iter().map(usize::to_string).collect();
            return Err(refuse(format!("has parts of runs in {} parts", found.join(" and ")), "remove those that are not meant"));
        };
        let missing: Vec<String> = Share { number: 1, count: *count }.all().filter(|s| !there.contains_key(s)).map(|s| s.number.to_string()).collect();
        if let [first, ..] = missing.as_slice() {
            let some = missing.iter().take(10).cloned().collect::<Vec<_>>().join(", ");
            let reason = format!("{} of {count} parts are missing: {some}{}", missing.len(), if missing.len() > 10 { ", …" } else { "" });
            return Err(refuse(reason, &format!("run them with the same recipe and output, like `--part {first}/{count}`")));
        }
        let key = self.part_key(model, *count)?;
        let told = there.into_values().map(|path| Told::open(&path).map(|told| (path, told))).collect::<Result<Vec<_>>>()?;
        match told.iter().find(|(_, told)| told.key != key) {
            None => Ok((key, told)),
            Some((path, told)) => Err(other_run(path, &told.version)),
        }
    }

    /// Refuses what cannot be made in parts.
    fn require_parts(&self, model: &Model, output: &Path) -> Result<()> {
        if crate::output::file_name(output).is_some() {
            return Err(Error::option("--part", format!("{} is a file, and parts are joined to a folder: name one with -o", output.display())));
        }
        if let Some((name, _)) = self.runs().next() {
            return Err(Error::option("--part", format!("{name} works on the whole model, and cannot be done in parts: passes over weights can")));
        }
        if model.onnx.is_some() {
            return Err(Error::option("--part", "an .onnx file is one piece: parts are for folders of safetensors"));
        }
        Ok(())
    }

    /// Names everything that parts of one run have in common. Of the weights, their headers and samples: reading all of them for each part
    /// would cost more than the parts do.
    fn part_key(&self, model: &Model, count: usize) -> Result<String> {
        let mut recipe = self.recipe(model);
        recipe.model.clear();
        recipe.memory = None;
        let work = self.work();
        let mut key = ContentKey::new(&work);
        let tool = Tool::default();
        key.line(&format!("{} {:?} {count} {}", tool.version, tool.commit, self.least_cut));
        key.line(&serde_json::to_string(&recipe).unwrap_or_default());
        key.line(&serde_json::to_string(model.config.values()).unwrap_or_default());
        for (name, weight) in &model.weights.by_name {
            key.line(&format!("{name} {} {:?} {}", weight.describe(), weight.shape, weight.stored_bytes));
        }
        for path in &model.weight_files {
            key.line(&sampled(path)?);
        }
        Ok(key.name())
    }
}

/// Whether a folder holds a part of a run, whole by the sizes of its files.
fn found_part(folder: &Path, key: &str) -> Result<()> {
    let told = Told::open(folder)?;
    let whole = |(name, bytes, _): &(String, u64, String)| std::fs::metadata(folder.join(name)).is_ok_and(|found| found.len() == *bytes);
    if told.key == key && told.files.iter().all(whole) { Ok(()) } else { Err(other_run(folder, &told.version)) }
}

/// Name of the folder of what the parts of a run have counted.
fn counts_name(key: &str) -> String {
    format!("counts-{}", key.get(..16).unwrap_or_default())
}

/// Samples of a file at least.
const SAMPLES: u64 = 16;
/// Bytes from one sample to the next at most.
const STRIDE: u64 = 16 << 20;
/// Bytes of a sample.
const SAMPLE: usize = 4096;

fn sampled(path: &Path) -> Result<String> {
    let file = File::open(path).map_err(Error::io("open", path))?;
    let length = file.length();
    let mut hasher = blake3::Hasher::new();
    hasher.update(&length.to_le_bytes());
    let stride = STRIDE.min(length.div_ceil(SAMPLES)).max(1);
    let mut buffer = vec![0; SAMPLE];
    for place in (0..length).step_by(usize::try_from(stride).unwrap_or(usize::MAX)) {
        buffer.resize(usize::try_from(length.saturating_sub(place)).unwrap_or(SAMPLE).min(SAMPLE), 0);
        file.sample_exact_at(&mut buffer, place).map_err(Error::io("read", path))?;
        hasher.update(&buffer);
    }
    Ok(hasher.finalize().to_string())
}

fn other_run(folder: &Path, version: &str) -> Error {
    Error::Output {
        path: folder.to_owned(),
        reason: format!("is a part of another run (another recipe, model or number of parts, or compress {version} where this is {})", Tool::default().version),
        hint: "make it again with --force, remove it, or choose another output folder with -o".into(),
    }
}
