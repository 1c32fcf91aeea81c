//! Runs a pipeline: from an opened model to an output with a report.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::Pipeline;
use super::carry::{self, carry_over, write_text};
use super::quality_gate::quality_note;
use super::running::write_graph;
use super::zstd_size::measure_zstd_sizes;
use crate::error::{Error, Result, counted};
use crate::evaluation::{Accuracy, Compute, Continuation, Latency, MeasuredFidelity};
use crate::export::{Exported, SizeForecast};
use crate::files::{self, LocalNames};
use crate::model::Model;
use crate::output::{Replace, ResumeFolder, Staging};
use crate::recipe::Recipe;
use crate::report::{self, Layer, ModelId, OutputFile, PassReport, Report, Size, Sizes, Tool, Totals, Verified, WARNING, WeightHistogram};
use crate::run_state::RunState;
use crate::store::writer::{Prebuilt, WeightMeasurement, input_hash};
use crate::store::{Encoding, Origin, QuantizationSpec, Weight};
use crate::work::{Event, ProgressUnit, Work};

/// File name of the model's graph, which a pass may change.
const GRAPH: &str = "graph.json";

/// Results of running the input and output models.
#[derive(Debug, Default)]
pub(super) struct Measured {
    pub compute: Option<Compute>,
    pub accuracy: Option<Accuracy>,
    pub fidelity: Option<MeasuredFidelity>,
    pub continuations: Vec<Continuation>,
    pub latency: Option<Latency>,
    pub notes: Vec<String>,
}

/// Runs a pipeline. With `prebuilt`, it merges the weights that parts have written; the durations are
/// those of each pass.
pub(super) fn run(pipeline: &Pipeline, mut model: Model, output: &Path, prebuilt: Option<(&Prebuilt, &[Duration])>) -> Result<Report> {
    let start = Instant::now();
    let mut peak = pipeline.watch_memory()?;
    let (pipeline, file) = pipeline.for_output(output)?;
    let excluded = exclude_auxiliary(&mut model, file.as_deref());
    model.require_own_files()?;
    let (mut pipeline, mut after, mut state) = pipeline.resolved(&model)?;
    // A student from another folder has its own files.
    let excluded = exclude_auxiliary(&mut after, file.as_deref()).or(excluded);
    after.require_own_files()?;
    (state.file, state.data_file) = (file.clone(), file.as_ref().map(|name| format!("{name}.data")));
    let sample_notes = pipeline.open_samples(after.for_samples(&model))?;
    let pipeline = &pipeline;
    let work = pipeline.work();
    let forecasts: Vec<SizeForecast> = pipeline.export.iter().map(|e| e.format().forecast(&after, &state)).collect::<Result<_>>()?;
    let staging = Staging::new(output, Replace::with_force(pipeline.force), pipeline.protected(&model))?;
    state.data_file = staging.data_name().map(str::to_owned);
    let folder = staging.path().to_owned();
    // When resuming, the checkpoints already exist.
    let checkpoints = state.checkpoint_bytes().filter(|_| !pipeline.resume).unwrap_or(0);
    let linked =
        prebuilt.map_or(Ok(0), |(prebuilt, _)| pipeline.export.iter().map(|e| e.format().linked_bytes(&after, &state, prebuilt)).sum::<Result<u64>>())?;
    let forecasts: Vec<SizeForecast> =
        forecasts.into_iter().zip(&pipeline.export).filter(|(_, e)| !(staging.destination().is_remote() && e.format().streams())).map(|(f, _)| f).collect();
    require_space(&staging, &forecasts, carry::size(&after, state.file.is_some())?.saturating_add(checkpoints), linked)?;
    let work_dir = state.checkpoint_bytes().map(|_| ResumeFolder::open(staging.target(), pipeline.resume, pipeline.force)).transpose()?;
    if work_dir.is_some() {
        // Checkpoints are kept if a run fails, so they must not be computed from a damaged input.
        model.check_contents(&work)?;
    }
    if let Some(applied) = pipeline.apply_passes(&model, work_dir.as_ref().map(ResumeFolder::path), &mut peak)? {
        (after, state) = applied;
        exclude_auxiliary(&mut after, file.as_deref());
        (state.file, state.data_file) = (file, staging.data_name().map(str::to_owned));
    }
    match prebuilt {
        Some((_, times)) => state.history.iter().zip(times).for_each(|(applied, time)| applied.meter.add(*time)),
        None => drop(state.prepare(&work)?),
    }
    let mut exports = Vec::with_capacity(pipeline.export.len());
    for export in &pipeline.export {
        let exported = export.format().write(&after, &state, staging.destination(), prebuilt.map(|(prebuilt, _)| prebuilt), &work)?;
        require_finite(pipeline, &after, &exported)?;
        exports.push((export.format().name(), exported));
    }
    if after.changed_graph.is_some() || exports.iter().all(|(format, _)| *format != "onnx") {
        after.auxiliary.exclude_runtime_config();
    }
    let writing = peak.lap().rss_bytes;
    let config = exports.iter().find_map(|(_, exported)| exported.config.as_ref()).unwrap_or(&after.config);
    let resized = after.resized_modules(&after.path)?;
    carry_over(&after, config, &resized, &folder, state.file.is_some(), &work)?;
    let graph_note = write_graph(&after, &folder)?;
    // If a format rounds weights, the rounded values are measured.
    let rounded = exports.first_mut().and_then(|(_, exported)| exported.stored_weights.take()).map(|weights| after.with_weights(weights)).transpose()?;
    let measured = pipeline.measure([&model, rounded.as_ref().unwrap_or(&after)], &folder, state.file.as_deref(), &mut exports, start)?;
    let quality = quality_note(&measured, pipeline, &state);
    let Some((_, first)) = exports.first() else { return Err(Error::option("export", "nothing to write")) };
    let mut sizes = sizes(&model, &after, first)?;
    let written: Vec<PathBuf> = first.files.iter().filter(|f| !f.name.ends_with(".json")).map(|f| staging.destination().location(&f.name)).collect();
    measure_zstd_sizes(&mut sizes, &model.weight_files, &written, &work)?;
    let recipe = pipeline.recipe(&model);
    // If the output is a file, its report has a separate folder.
    let target = state.file.as_ref().map_or_else(|| staging.target().to_owned(), |_| crate::output::report_folder(staging.target()));
    let recipe = serde_json::to_value(&recipe).unwrap_or_default();
    let names = LocalNames::new(&recipe, Some(&target));
    let recipe = names.value(&recipe);
    let published: Recipe = serde_json::from_value(recipe.clone()).map_err(|e| Error::option("recipe", e))?;
    let passes = state.history.iter().map(|applied| PassReport {
        name: applied.name.into(),
        options: names.value(&applied.options),
        seconds: applied.meter.total().as_secs_f64(),
        peak_rss_bytes: applied.peak_rss_bytes.or(writing),
        peak_vram_bytes: applied.peak_vram_bytes,
        tensors_changed: applied.tensors.len(),
        rule: applied.rule.clone(),
        unselected: applied.unselected(&model.weights),
        details: names.value(&applied.details),
    });
    let environment = pipeline.environment(measured.fidelity.is_some())?;
    let has_hash = |path: &PathBuf| files::content_hash(path).is_ok_and(|hash| hash.is_some());
    let unchecked = (prebuilt.is_some() && model.weight_files.iter().any(has_hash))
        .then(|| "the parts read only ranges of the input files, so the files were not compared with the SHA-256 that their server states".to_owned());
    let mut report = Report {
        schema: report::SCHEMA,
        tool: Tool::default(),
        environment,
        model: ModelId {
            source: published.model.clone(),
            architecture: Some(model.config.model_type().to_owned()).filter(|t| !t.is_empty()),
            blake3: model_hash(&model, &after, first, &work)?,
        },
        seed: pipeline.seed,
        recipe,
        passes: passes.collect(),
        size: sizes,
        compute: measured.compute,
        accuracy: measured.accuracy.map(|accuracy| Accuracy { data: names.text(&accuracy.data), ..accuracy }),
        fidelity: measured.fidelity.map(|fidelity| MeasuredFidelity { data: fidelity.data.as_deref().map(|data| names.text(data)), ..fidelity }),
        continuations: measured.continuations,
        latency: measured.latency,
        layers: layers(&model, &after, first),
        histograms: Vec::new(),
        outputs: exports.iter().flat_map(|(format, exported)| outputs(format, exported)).collect(),
        carried: Vec::new(),
        notes: [
            quality.into_iter().collect(),
            after.auxiliary.notes(&after.path),
            graph_note.into_iter().chain(excluded).chain(unchecked).chain(missing_input_files(&model, &after)).collect(),
            staging.notes().to_vec(),
            notes(&after, &state, &exports),
            sample_notes,
            measured.notes,
        ]
        .concat()
        .iter()
        .map(|note| names.text(note))
        .collect(),
        totals: Totals::default(),
    };
    report.notes.sort_by_key(|note| !note.starts_with(WARNING));
    report.histograms = histograms(&report, first);
    write_text(&folder.join("recipe.yaml"), &published.to_yaml())?;
    for (name, bytes) in &state.attached {
        let path = folder.join(name);
        fs::write(&path, bytes.as_slice()).map_err(Error::io("write", &path))?;
    }
    let is_replaced = |name: &str| name == GRAPH || state.attached.contains_key(name) || resized.contains_key(Path::new(name));
    report.carried = carry::list(&folder, &after, &report.outputs, is_replaced, &work)?;
    let highest = peak.highest();
    report.totals = Totals { seconds: start.elapsed().as_secs_f64(), peak_rss_bytes: highest.rss_bytes, peak_vram_bytes: highest.vram_bytes };
    write_text(&folder.join(report::FILE), &report.to_json())?;
    write_text(&folder.join("report.md"), &report.to_markdown())?;
    write_text(&folder.join("report.html"), &report.to_html())?;
    work.cancel.check()?;
    if prebuilt.is_none() {
        [&model, &after].into_iter().try_for_each(|model| model.check_contents(&work))?;
    }
    commit(staging, &work)?;
    work_dir.map_or(Ok(()), ResumeFolder::remove)?;
    Ok(report)
}

/// Moves the staging directory to its final location, and reports progress if files are uploaded.
fn commit(staging: Staging, work: &Work) -> Result<()> {
    let total = staging.uploads()?;
    if total == 0 {
        return staging.commit();
    }
    work.progress.on(Event::Begin { stage: "Uploading", total, unit: ProgressUnit::Bytes });
    let committed = staging.commit_with_progress(&|bytes| work.advance(bytes).is_ok());
    work.progress.on(Event::End);
    committed
}

/// If the output is a single file, excludes the auxiliary files from it, and returns a note that names them.
fn exclude_auxiliary(model: &mut Model, file: Option<&str>) -> Option<String> {
    let file = file?;
    model.auxiliary.not_carried.append(&mut model.auxiliary.files);
    let first = model.auxiliary.not_carried.first()?;
    Some(format!(
        "{} of the input's folder not copied, because the output {file} is a file and not a folder (the first: {})",
        counted(model.auxiliary.not_carried.len(), "file"),
        first.display()
    ))
}

/// If the weights come from another folder, a note that names the files of the input that are missing
/// from the output.
fn missing_input_files(input: &Model, written: &Model) -> Option<String> {
    if written.path == input.path {
        return None;
    }
    let is_written = |file: &&PathBuf| written.auxiliary.files.contains(file) || written.auxiliary.synthesized.contains_key(*file);
    let files = input.auxiliary.files.iter().chain(input.auxiliary.synthesized.keys());
    let missing: Vec<String> = files.filter(|file| !is_written(file)).map(|file| file.display().to_string()).collect();
    let from = written.path.display();
    (!missing.is_empty())
        .then(|| format!("not copied from the input: {} (the weights are those of {from}, so its files are copied instead)", missing.join(", ")))
}

/// Hints for outputs that do not fit on a disk.
const LOCAL_HINT: &str = "free some space, or choose a folder on another disk";
const REMOTE_HINT: &str = "the output is written to a local disk before it is uploaded: set TMPDIR to a folder on a larger disk";

/// Checks before anything is written that the output fits on the disk.
pub(super) fn require_space(staging: &Staging, forecasts: &[SizeForecast], carried: u64, linked: u64) -> Result<()> {
    let written = forecasts.iter().filter(|f| f.exact).map(|f| f.bytes).sum::<u64>();
    let needed = carried + written.saturating_sub(linked);
    let Ok(space) = rustix::fs::statvfs(staging.path()) else { return Ok(()) };
    let free = space.f_bavail.saturating_mul(space.f_frsize);
    if needed <= free {
        return Ok(());
    }
    let (needed, free) = (report::format::bytes(needed), report::format::bytes(free));
    Err(Error::Output {
        path: staging.target().to_owned(),
        reason: format!("needs {needed}, but only {free} are free on this disk"),
        hint: if staging.destination().is_remote() { REMOTE_HINT } else { LOCAL_HINT }.to_owned(),
    })
}

/// Checks that all written weights are finite, unless the pipeline allows others.
pub(super) fn require_finite(pipeline: &Pipeline, after: &Model, exported: &Exported) -> Result<()> {
    if pipeline.allow_nonfinite {
        return Ok(());
    }
    // ONNX graphs may contain infinities on purpose: only weights that a pass has changed must be finite.
    let is_original = |name: &str| after.onnx.is_some() && after.weights.by_name.get(name).is_some_and(|weight| !after.changes(name, weight));
    match exported.weights.iter().find(|(name, measured)| measured.nonfinite > 0 && !is_original(name)) {
        None => Ok(()),
        Some((name, measured)) => Err(Error::NotFinite { name: name.clone(), count: measured.nonfinite }),
    }
}

fn sizes(model: &Model, after: &Model, exported: &Exported) -> Result<Sizes> {
    let mut bytes_before = 0;
    for path in &model.weight_files {
        bytes_before += files::length(path).map_err(Error::io("open", path))?;
    }
    let zeros = |model: &Model, count: fn(&WeightMeasurement) -> u64| {
        exported.weights.iter().filter(|(name, _)| model.weights.by_name.contains_key(name)).map(|(_, measured)| count(measured)).sum::<u64>()
    };
    let mut zeros_before = zeros(model, |s| s.difference.zeros_before);
    // Aliases of tied weights that are no longer stored were not measured during writing.
    for (_, weight) in model.weights.by_name.iter().filter(|(name, _)| !after.weights.by_name.contains_key(*name)) {
        weight.visit(1, &mut |block| {
            zeros_before += block.now.zeros();
            Ok(())
        })?;
    }
    let (parameters_before, parameters) = (model.weights.parameters(), after.weights.parameters());
    let before = Size {
        parameters: parameters_before,
        nonzero: parameters_before - zeros_before.min(parameters_before),
        tensors: model.weights.by_name.values().map(|w| w.stored_as.len()).sum(),
        bytes: bytes_before,
        bytes_zstd: None,
        bytes_zstd_sampled: false,
    };
    let after = Size {
        parameters,
        nonzero: parameters - zeros(after, |s| s.difference.zeros_after).min(parameters),
        tensors: exported.tensors,
        bytes: exported.files.iter().filter(|f| !f.name.ends_with(".json")).map(|f| f.bytes).sum(),
        bytes_zstd: None,
        bytes_zstd_sampled: false,
    };
    let ratio = before.bytes as f64 / after.bytes.max(1) as f64;
    Ok(Sizes { before, after, ratio })
}

/// Hash of all weights of the input. Weights that were read completely while writing were hashed then;
/// the others, which passes have resized or recomputed, are read again.
fn model_hash(model: &Model, after: &Model, exported: &Exported, work: &Work) -> Result<String> {
    let is_hashed = |name: &str, weight: &Weight| after.weights.by_name.get(name).is_some_and(|now| now.origin == Origin::File && now.shape == weight.shape);
    let mut hashes: BTreeMap<&str, blake3::Hash> = exported
        .weights
        .iter()
        .filter(|(name, _)| model.weights.by_name.get(name).is_some_and(|weight| is_hashed(name, weight)))
        .filter_map(|(name, measured)| Some((name.as_str(), measured.input_hash?)))
        .collect();
    let rest: Vec<(&String, &Weight)> = model.weights.by_name.iter().filter(|(name, _)| !hashes.contains_key(name.as_str())).collect();
    let found = work.quiet().run("Hashing", &rest, |(_, weight)| weight.stored_bytes, |(_, weight)| input_hash(weight))?;
    hashes.extend(rest.iter().map(|(name, _)| name.as_str()).zip(found));
    let mut hasher = blake3::Hasher::new();
    for (name, weight) in &model.weights.by_name {
        if let Some(hash) = hashes.get(name.as_str()) {
            hasher.update(format!("{name} {} {:?} {hash}\n", weight.describe(), weight.shape).as_bytes());
        }
    }
    Ok(hasher.finalize().to_string())
}

fn layers(model: &Model, after: &Model, exported: &Exported) -> Vec<Layer> {
    let layer = |((name, measured), encoding): (&(String, WeightMeasurement), &String)| Layer {
        name: name.clone(),
        shape: after.weights.by_name.get(name).map(|w| w.shape.clone()).unwrap_or_default(),
        encoding: encoding.clone(),
        bytes_before: model.weights.by_name.get(name).map_or(0, |w| w.stored_bytes),
        bytes_after: measured.bytes,
        zeros: measured.difference.zeros_after,
        sqnr_db: if measured.changed && !after.weights.by_name.get(name).is_some_and(|w| w.origin == Origin::Rescaled) {
            measured.difference.sqnr_db()
        } else {
            None
        },
    };
    let stored = exported.weights.iter().zip(&exported.encodings);
    stored.filter(|((name, _), _)| after.weights.by_name.contains_key(name)).map(layer).collect()
}

/// Number of weights whose histograms are in the report.
const HISTOGRAMS: usize = 8;

fn histograms(report: &Report, exported: &Exported) -> Vec<WeightHistogram> {
    let measurements: BTreeMap<&str, &WeightMeasurement> = exported.weights.iter().map(|(name, measured)| (name.as_str(), measured)).collect();
    let histogram = |layer: &&Layer| {
        let found = measurements.get(layer.name.as_str())?.histogram.clone()?;
        Some(WeightHistogram { name: layer.name.clone(), low: found.low, high: found.high, before: found.before, after: found.after })
    };
    let others = report.layers.iter().filter(|layer| layer.sqnr_db.is_none() && layer.shape.len() > 1);
    report.most_changed().into_iter().chain(others).filter_map(|layer| histogram(&layer)).take(HISTOGRAMS).collect()
}

fn outputs(format: &str, exported: &Exported) -> Vec<OutputFile> {
    let verified = Verified { how: exported.how.clone(), max_abs_error: exported.max_abs_error, ok: true };
    let file = |f: &crate::store::writer::Written| OutputFile {
        format: format.to_owned(),
        path: f.name.clone(),
        bytes: f.bytes,
        blake3: f.blake3.to_string(),
        verified: verified.clone(),
    };
    exported.files.iter().map(file).collect()
}

/// Signal-to-quantization-noise ratio in dB below which the report warns. Typical values are 40 dB for
/// int8 with a scale per channel, and 20 dB for int4 in groups of 128.
fn low_sqnr(quantization: &QuantizationSpec) -> f64 {
    if quantization.codes.bits() < 8 { 12.0 } else { 20.0 }
}

/// Fraction of zeros from which a pruned weight contributes almost nothing.
const NEARLY_ZERO: f64 = 0.95;

fn notes(after: &Model, state: &RunState, exports: &[(&str, Exported)]) -> Vec<String> {
    let mut notes = state.notes.clone();
    notes.extend(state.history.iter().flat_map(|applied| applied.notes.clone()));
    let (mut low, mut empty, mut least_db) = (BTreeMap::new(), BTreeMap::new(), 0f64);
    for (name, measured) in exports.iter().flat_map(|(_, e)| &e.weights) {
        let Some(weight) = after.weights.by_name.get(name).filter(|_| measured.changed) else { continue };
        let elements = weight.elements() as f64;
        let (before, now) = (measured.difference.zeros_before as f64 / elements, measured.difference.zeros_after as f64 / elements);
        if now >= NEARLY_ZERO && before < NEARLY_ZERO {
            empty.insert(name.as_str(), -now);
        } else if let (Encoding::Quantized(quantization), Some(db)) = (&weight.encoding, measured.difference.sqnr_db())
            && weight.origin == Origin::File
            && now < before + 0.1
            && db < low_sqnr(quantization)
        {
            least_db = least_db.max(low_sqnr(quantization));
            low.insert(name.as_str(), db);
        }
    }
    let least = |found: &BTreeMap<&str, f64>| found.iter().min_by(|a, b| a.1.total_cmp(b.1)).map(|(name, value)| ((*name).to_owned(), *value));
    if let Some((name, db)) = least(&low) {
        notes.push(format!(
            "{WARNING}{} of the quantized weights have a signal-to-noise ratio below {least_db:.0} dB (lowest: `{name}`, {db:.1} dB); use a scale per channel or group, `observer: mse`, or `ignore` these weights",
            low.len()
        ));
    }
    if let Some((name, part)) = least(&empty) {
        notes.push(format!(
            "{WARNING}{} of the pruned weights are entirely or almost entirely zero (`{name}`: {:.1} %): add a rule with a smaller amount for them, or prune with `scope: tensor`",
            empty.len(),
            -100.0 * part
        ));
    }
    notes.extend(exports.iter().flat_map(|(_, e)| e.notes.clone()));
    notes
}
