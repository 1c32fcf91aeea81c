//! A run, from an opened model to a folder with a report.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::carry::{self, carry_over, write_text};
use super::further::compress_further;
use super::running::write_graph;
use super::{Pipeline, verdict};
use crate::error::{Error, Result};
use crate::evaluation::{Accuracy, Compute, Continued, Latency, MeasuredFidelity};
use crate::export::{Exported, SizeForecast};
use crate::files::{self, LocalNames};
use crate::model::Model;
use crate::output::{Replace, Staging, Workplace};
use crate::recipe::Recipe;
use crate::report::{self, Layer, ModelId, OutputFile, PassReport, Report, Size, Sizes, Tool, Totals, Verified, WARNING, WeightHistogram};
use crate::run_state::RunState;
use crate::store::writer::{Made, WeightMeasurement, input_hash};
use crate::store::{Affine, Encoding, Origin, Weight};
use crate::work::{Event, ProgressUnit, Work};

/// Where the description of what a model computes stands, which a pass may change.
const GRAPH: &str = "graph.json";

/// What was found by running the models.
#[derive(Debug, Default)]
pub(super) struct Measured {
    pub compute: Option<Compute>,
    pub accuracy: Option<Accuracy>,
    pub fidelity: Option<MeasuredFidelity>,
    pub continuations: Vec<Continued>,
    pub latency: Option<Latency>,
    pub notes: Vec<String>,
}

/// Runs a pipeline; what parts have `made`, with the time of each pass, is not made again.
pub(super) fn run(pipeline: &Pipeline, mut model: Model, output: &Path, made: Option<(&Made, &[Duration])>) -> Result<Report> {
    let start = Instant::now();
    let mut peak = pipeline.watch()?;
    let (pipeline, file) = pipeline.writing(output)?;
    let alone = leave_beside(&mut model, file.as_deref());
    model.require_own_files()?;
    let (mut pipeline, mut after, mut state) = pipeline.settled(&model)?;
    // A student from another folder brings its own files.
    let alone = leave_beside(&mut after, file.as_deref()).or(alone);
    after.require_own_files()?;
    (state.file, state.data_file) = (file.clone(), file.as_ref().map(|name| format!("{name}.data")));
    let of_samples = pipeline.open_samples(&model)?;
    let pipeline = &pipeline;
    let work = pipeline.work();
    let forecasts: Vec<SizeForecast> = pipeline.export.iter().map(|e| e.format().forecast(&after, &state)).collect::<Result<_>>()?;
    let staging = Staging::new(output, Replace::with_force(pipeline.force), pipeline.inputs(&model))?;
    state.data_file = staging.data_name().map(str::to_owned);
    let folder = staging.path().to_owned();
    // What an interrupted run has kept is there already.
    let kept = if pipeline.resume { 0 } else { state.kept_bytes };
    let linked = made.map_or(Ok(0), |(made, _)| pipeline.export.iter().map(|e| e.format().linked_bytes(&after, &state, made)).sum::<Result<u64>>())?;
    let forecasts: Vec<SizeForecast> =
        forecasts.into_iter().zip(&pipeline.export).filter(|(_, e)| !(staging.destination().is_away() && e.format().streams())).map(|(f, _)| f).collect();
    require_space(&staging, &forecasts, carry::size(&after, state.file.is_some())?.saturating_add(kept), linked)?;
    let workplace = pipeline.keeps_work().then(|| Workplace::open(staging.target(), pipeline.resume, pipeline.force)).transpose()?;
    if workplace.is_some() {
        // Checkpoints outlive a run whose input turns out to be damaged.
        model.check_contents(&work)?;
    }
    if let Some(done) = pipeline.perform(&model, workplace.as_ref().map(Workplace::path), &mut peak)? {
        (after, state) = done;
        leave_beside(&mut after, file.as_deref());
        (state.file, state.data_file) = (file, staging.data_name().map(str::to_owned));
    }
    match made {
        Some((_, times)) => state.history.iter().zip(times).for_each(|(applied, time)| applied.meter.add(*time)),
        None => drop(state.prepare(&work)?),
    }
    let mut exports = Vec::with_capacity(pipeline.export.len());
    for export in &pipeline.export {
        let exported = export.format().write(&after, &state, staging.destination(), made.map(|(made, _)| made), &work)?;
        require_finite(pipeline, &after, &exported)?;
        exports.push((export.format().name(), exported));
    }
    if after.changed_graph.is_some() || exports.iter().all(|(format, _)| *format != "onnx") {
        after.beside.leave_runtime();
    }
    let writing = peak.lap().rss_bytes;
    let config = exports.iter().find_map(|(_, exported)| exported.config.as_ref()).unwrap_or(&after.config);
    let resized = after.resized_modules(&after.path)?;
    carry_over(&after, config, &resized, &folder, state.file.is_some(), &work)?;
    let left_out = write_graph(&after, &folder)?;
    // What a format has rounded is measured as it is in the file.
    let held = exports.first_mut().and_then(|(_, exported)| exported.held.take()).map(|weights| after.holding(weights)).transpose()?;
    let measured = pipeline.measure([&model, held.as_ref().unwrap_or(&after)], &folder, state.file.as_deref(), &mut exports, start)?;
    let ruined = measured.fidelity.as_ref().and_then(|fidelity| verdict::ruined(fidelity, measured.accuracy.as_ref(), pipeline, &state));
    let Some((_, first)) = exports.first() else { return Err(Error::option("export", "nothing to write")) };
    let mut sizes = sizes(&model, &after, first)?;
    let written: Vec<PathBuf> = first.files.iter().filter(|f| !f.name.ends_with(".json")).map(|f| staging.destination().place(&f.name)).collect();
    compress_further(&mut sizes, &model.weight_files, &written, &work)?;
    let recipe = pipeline.recipe(&model);
    // A file has the folder of its report.
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
        details: names.value(&(applied.details)()),
    });
    let environment = pipeline.environment(measured.fidelity.is_some())?;
    let stated = |path: &PathBuf| files::content_hash(path).is_ok_and(|hash| hash.is_some());
    let unchecked = (made.is_some() && model.weight_files.iter().any(stated))
        .then(|| "the parts read only some ranges of the input, which were not compared with the SHA-256 that its server states".to_owned());
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
            ruined.map(|reason| format!("{WARNING}{reason}")).into_iter().collect(),
            after.beside.notes(&after.path),
            left_out.into_iter().chain(alone).chain(unchecked).collect(),
            staging.notes().to_vec(),
            notes(&after, &state, &exports),
            of_samples,
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
    let written = |name: &str| name == GRAPH || state.attached.contains_key(name) || resized.contains_key(Path::new(name));
    report.carried = carry::list(&folder, &after, &report.outputs, written, &work)?;
    let highest = peak.highest();
    report.totals = Totals { seconds: start.elapsed().as_secs_f64(), peak_rss_bytes: highest.rss_bytes, peak_vram_bytes: highest.vram_bytes };
    write_text(&folder.join(report::FILE), &report.to_json())?;
    write_text(&folder.join("report.md"), &report.to_markdown())?;
    write_text(&folder.join("report.html"), &report.to_html())?;
    work.cancel.check()?;
    if made.is_none() {
        [&model, &after].into_iter().try_for_each(|model| model.check_contents(&work))?;
    }
    commit(staging, &work)?;
    workplace.map_or(Ok(()), Workplace::remove)?;
    Ok(report)
}

/// Gives the folder its name, telling how much of it is on its way where that takes time.
fn commit(staging: Staging, work: &Work) -> Result<()> {
    let total = staging.uploads()?;
    if total == 0 {
        return staging.commit();
    }
    work.progress.on(Event::Begin { stage: "Uploading", total, unit: ProgressUnit::Bytes });
    let done = staging.commit_telling(&|bytes| work.advance(bytes).is_ok());
    work.progress.on(Event::End);
    done
}

/// Of an output that is a single file, nothing is carried over: returns a note that names what stays behind.
fn leave_beside(model: &mut Model, file: Option<&str>) -> Option<String> {
    let file = file?;
    model.beside.not_carried.append(&mut model.beside.files);
    let first = model.beside.not_carried.first()?;
    Some(format!(
        "{} files of the input's folder are not carried over, since {file} is a file and no folder (the first: {})",
        model.beside.not_carried.len(),
        first.display()
    ))
}

/// What to do where a disk is too small.
const HERE: &str = "free some space, or choose a folder on another disk";
const ELSEWHERE: &str = "it is made on this machine first: set TMPDIR to a folder on a larger disk";

/// Refuses before the first byte what cannot fit.
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
        reason: format!("needs {needed}, and {free} are free on this disk"),
        hint: if staging.destination().is_away() { ELSEWHERE } else { HERE }.to_owned(),
    })
}

pub(super) fn require_finite(pipeline: &Pipeline, after: &Model, exported: &Exported) -> Result<()> {
    if pipeline.allow_nonfinite {
        return Ok(());
    }
    // Graphs of ONNX compute with infinities: only what a pass has made must be finite.
    let meant = |name: &str| after.onnx.is_some() && after.weights.by_name.get(name).is_some_and(|weight| !after.changes(name, weight));
    match exported.weights.iter().find(|(name, seen)| seen.nonfinite > 0 && !meant(name)) {
        None => Ok(()),
        Some((name, seen)) => Err(Error::NotFinite { name: name.clone(), count: seen.nonfinite }),
    }
}

fn sizes(model: &Model, after: &Model, exported: &Exported) -> Result<Sizes> {
    let mut bytes_before = 0;
    for path in &model.weight_files {
        bytes_before += files::length(path).map_err(Error::io("open", path))?;
    }
    let zeros = |of: &Model, pick: fn(&WeightMeasurement) -> u64| {
        exported.weights.iter().filter(|(name, _)| of.weights.by_name.contains_key(name)).map(|(_, seen)| pick(seen)).sum::<u64>()
    };
    let mut zeros_before = zeros(model, |s| s.difference.zeros_before);
    // A tied weight that is stored once now was not gone over with the others.
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

/// The hash of all weights of the input, whatever the passes took of them. What was read on the way was hashed on the way; the rest,
/// weights that were cut or computed anew, is read once more.
fn model_hash(model: &Model, after: &Model, exported: &Exported, work: &Work) -> Result<String> {
    let whole = |name: &str, weight: &Weight| after.weights.by_name.get(name).is_some_and(|now| now.origin == Origin::File && now.shape == weight.shape);
    let mut hashes: BTreeMap<&str, blake3::Hash> = exported
        .weights
        .iter()
        .filter(|(name, _)| model.weights.by_name.get(name).is_some_and(|weight| whole(name, weight)))
        .filter_map(|(name, seen)| Some((name.as_str(), seen.input_hash?)))
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
    let layer = |((name, seen), encoding): (&(String, WeightMeasurement), &String)| Layer {
        name: name.clone(),
        shape: after.weights.by_name.get(name).map(|w| w.shape.clone()).unwrap_or_default(),
        encoding: encoding.clone(),
        bytes_before: model.weights.by_name.get(name).map_or(0, |w| w.stored_bytes),
        bytes_after: seen.bytes,
        zeros: seen.difference.zeros_after,
        sqnr_db: if seen.changed && !after.weights.by_name.get(name).is_some_and(|w| w.origin == Origin::Rescaled) { seen.difference.sqnr_db() } else { None },
    };
    let stored = exported.weights.iter().zip(&exported.encodings);
    stored.filter(|((name, _), _)| after.weights.by_name.contains_key(name)).map(layer).collect()
}

/// Weights whose values are pictured.
const PICTURED: usize = 8;

fn histograms(report: &Report, exported: &Exported) -> Vec<WeightHistogram> {
    let seen: BTreeMap<&str, &WeightMeasurement> = exported.weights.iter().map(|(name, seen)| (name.as_str(), seen)).collect();
    let picture = |layer: &&Layer| {
        let found = seen.get(layer.name.as_str())?.histogram.clone()?;
        Some(WeightHistogram { name: layer.name.clone(), low: found.low, high: found.high, before: found.before, after: found.after })
    };
    let others = report.layers.iter().filter(|layer| layer.sqnr_db.is_none() && layer.shape.len() > 1);
    report.most_changed().into_iter().chain(others).filter_map(|layer| picture(&layer)).take(PICTURED).collect()
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

/// Below this, in decibels, a quantized weight has lost more than its width should cost: of int8 with a scale per channel 40 are usual,
/// of int4 in groups of 128 about 20.
fn low_sqnr(affine: &Affine) -> f64 {
    if affine.codes.bits() < 8 { 12.0 } else { 20.0 }
}

/// From this part on, a pruned weight hardly does anything any more.
const NEARLY_EMPTY: f64 = 0.95;

fn notes(after: &Model, state: &RunState, exports: &[(&str, Exported)]) -> Vec<String> {
    let mut notes = state.notes.clone();
    notes.extend(state.history.iter().flat_map(|applied| applied.notes.clone()));
    let (mut low, mut empty, mut least_db) = (BTreeMap::new(), BTreeMap::new(), 0f64);
    for (name, seen) in exports.iter().flat_map(|(_, e)| &e.weights) {
        let Some(weight) = after.weights.by_name.get(name).filter(|_| seen.changed) else { continue };
        let elements = weight.elements() as f64;
        let (before, now) = (seen.difference.zeros_before as f64 / elements, seen.difference.zeros_after as f64 / elements);
        if now >= NEARLY_EMPTY && before < NEARLY_EMPTY {
            empty.insert(name.as_str(), -now);
        } else if let (Encoding::Affine(affine), Some(db)) = (&weight.encoding, seen.difference.sqnr_db())
            && weight.origin == Origin::File
            && now < before + 0.1
            && db < low_sqnr(affine)
        {
            least_db = least_db.max(low_sqnr(affine));
            low.insert(name.as_str(), db);
        }
    }
    let least = |found: &BTreeMap<&str, f64>| found.iter().min_by(|a, b| a.1.total_cmp(b.1)).map(|(name, value)| ((*name).to_owned(), *value));
    if let Some((name, db)) = least(&low) {
        notes.push(format!(
            "{WARNING}{} of the quantized weights keep less than {least_db:.0} dB of signal to noise (least: `{name}`, {db:.1} dB); a scale per channel or group, observer: mse, or `ignore` helps",
            low.len()
        ));
    }
    if let Some((name, part)) = least(&empty) {
        notes.push(format!(
            "{WARNING}{} of the pruned weights are nearly or all zero (`{name}`: {:.1} %): give them a rule with a smaller amount, or prune with scope: tensor",
            empty.len(),
            -100.0 * part
        ));
    }
    notes.extend(exports.iter().flat_map(|(_, e)| e.notes.clone()));
    notes
}
