//! A run, from an opened model to a folder with a report.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use super::Pipeline;
use crate::error::{Error, Result};
use crate::evaluation::{Accuracy, Compute, Latency};
use crate::export::{Exported, SizeForecast};
use crate::model::{Config, Model};
use crate::report::{self, Environment, Layer, ModelId, OutputFile, PassReport, Peak, Report, Size, Sizes, Tool, Totals, Verified, WeightHistogram};
use crate::store::Encoding;
use crate::store::staging::Staging;
use crate::store::writer::{WeightMeasurement, input_hash};
use crate::store::{Origin, Sweep, Weight};

/// What was found by running the models.
#[derive(Debug, Default)]
pub(super) struct Measured {
    pub compute: Option<Compute>,
    pub accuracy: Option<Accuracy>,
    pub latency: Option<Latency>,
    pub notes: Vec<String>,
}

pub(super) fn run(pipeline: &Pipeline, model: Model, output: &Path) -> Result<Report> {
    let start = Instant::now();
    let mut peak = Peak::start();
    let sweep = pipeline.sweep();
    model.require_own_files()?;
    let mut after = pipeline.apply(&model)?;
    #[cfg(feature = "run")]
    pipeline.check_data(&model)?;
    let forecasts: Vec<SizeForecast> = pipeline.export.iter().map(|e| e.format().forecast(&after)).collect::<Result<_>>()?;
    let staging = Staging::new(output, pipeline.force, &model.path)?;
    require_space(staging.path(), staging.target(), &forecasts)?;
    let workplace = workplace(staging.target());
    require_no_rest(pipeline, &workplace)?;
    if let Some(done) = pipeline.perform(&model, &workplace, &mut peak)? {
        after = done;
    }
    after.prepare(&sweep)?;
    let mut exports = Vec::with_capacity(pipeline.export.len());
    for export in &pipeline.export {
        let exported = export.format().write(&after, staging.path(), &sweep)?;
        require_finite(pipeline, &exported)?;
        exports.push((export.format().name(), exported));
    }
    let writing = peak.lap();
    let config = exports.iter().find_map(|(_, exported)| exported.config.as_ref()).unwrap_or(&after.config);
    carry_over(&model, config, staging.path())?;
    #[cfg(feature = "run")]
    write_graph(&after, staging.path())?;
    #[cfg(feature = "run")]
    let measured = super::evaluate::Run { pipeline, before: &model, after: &after, folder: staging.path(), sweep }.measure(&mut exports)?;
    #[cfg(not(feature = "run"))]
    let measured = Measured::default();
    let Some((_, first)) = exports.first() else { return Err(Error::option("export", "nothing to write")) };
    #[cfg_attr(not(feature = "zstd"), allow(unused_mut))]
    let mut sizes = sizes(&model, &after, first)?;
    #[cfg(feature = "zstd")]
    {
        let written: Vec<PathBuf> = first.files.iter().filter(|f| !f.name.ends_with(".json")).map(|f| staging.path().join(&f.name)).collect();
        compress_further(&mut sizes, &model.weight_files, &written, &sweep)?;
    }
    let recipe = pipeline.recipe(&model);
    let passes = after.history.iter().map(|applied| PassReport {
        name: applied.name.into(),
        options: applied.options.clone(),
        seconds: applied.meter.total().as_secs_f64(),
        peak_rss_bytes: applied.peak_rss_bytes.or(writing),
        peak_vram_bytes: Some(0),
        tensors_changed: applied.tensors.len(),
        details: (applied.details)(),
    });
    let mut report = Report {
        schema: report::SCHEMA,
        tool: Tool::default(),
        environment: Environment::detect(),
        model: ModelId {
            source: recipe.model.clone(),
            architecture: Some(model.config.model_type().to_owned()).filter(|t| !t.is_empty()),
            blake3: model_hash(&model, &after, first, &sweep)?,
        },
        seed: pipeline.seed,
        recipe: serde_json::to_value(&recipe).unwrap_or_default(),
        passes: passes.collect(),
        size: sizes,
        compute: measured.compute,
        accuracy: measured.accuracy,
        latency: measured.latency,
        layers: layers(&model, &after, first),
        histograms: Vec::new(),
        outputs: exports.iter().flat_map(|(format, exported)| outputs(format, exported)).collect(),
        notes: notes(&after, &exports).into_iter().chain(measured.notes).collect(),
        totals: Totals::default(),
    };
    report.histograms = histograms(&report, first);
    write_text(&staging.path().join("recipe.yaml"), &recipe.to_yaml())?;
    report.totals = Totals { seconds: start.elapsed().as_secs_f64(), peak_rss_bytes: peak.highest() };
    write_text(&staging.path().join(report::FILE), &report.to_json())?;
    write_text(&staging.path().join("report.md"), &report.to_markdown())?;
    write_text(&staging.path().join("report.html"), &report.to_html())?;
    for (name, bytes) in &after.attached {
        let path = staging.path().join(name);
        fs::write(&path, bytes.as_slice()).map_err(Error::io("write", &path))?;
    }
    sweep.cancel.check()?;
    staging.commit()?;
    if workplace.exists() {
        fs::remove_dir_all(&workplace).map_err(Error::io("remove", &workplace))?;
    }
    Ok(report)
}

/// Where a run keeps what it can go on from, beside the output folder.
pub(super) fn workplace(output: &Path) -> PathBuf {
    let mut name = output.file_name().unwrap_or_default().to_owned();
    name.push(".unfinished");
    output.with_file_name(name)
}

/// Refuses to begin over what an interrupted run has left.
fn require_no_rest(pipeline: &Pipeline, workplace: &Path) -> Result<()> {
    if pipeline.resume || !workplace.exists() {
        return Ok(());
    }
    if pipeline.force {
        return fs::remove_dir_all(workplace).map_err(Error::io("remove", workplace));
    }
    Err(Error::Output {
        path: workplace.to_owned(),
        reason: "is what an interrupted run has left".into(),
        hint: "go on with it by --resume, or begin again with --force".into(),
    })
}

/// Refuses before the first byte what cannot fit.
fn require_space(folder: &Path, target: &Path, forecasts: &[SizeForecast]) -> Result<()> {
    let needed: u64 = forecasts.iter().filter(|f| f.exact).map(|f| f.bytes).sum();
    let Ok(space) = rustix::fs::statvfs(folder) else { return Ok(()) };
    let free = space.f_bavail.saturating_mul(space.f_frsize);
    if needed <= free {
        return Ok(());
    }
    let (needed, free) = (report::format::bytes(needed), report::format::bytes(free));
    Err(Error::Output {
        path: target.to_owned(),
        reason: format!("needs {needed}, and {free} are free on this disk"),
        hint: "free some space, or choose a folder on another disk".into(),
    })
}

fn require_finite(pipeline: &Pipeline, exported: &Exported) -> Result<()> {
    if pipeline.allow_nonfinite {
        return Ok(());
    }
    match exported.weights.iter().find(|(_, seen)| seen.nonfinite > 0) {
        None => Ok(()),
        Some((name, seen)) => Err(Error::NotFinite { name: name.clone(), count: seen.nonfinite }),
    }
}

fn carry_over(model: &Model, config: &Config, folder: &Path) -> Result<()> {
    for file in &model.files {
        let (from, to) = (model.path.join(file), folder.join(file));
        if let Some(parent) = to.parent() {
            fs::create_dir_all(parent).map_err(Error::io("create", parent))?;
        }
        fs::copy(&from, &to).map_err(Error::io("copy", &from))?;
    }
    match config.render() {
        Some(text) => write_text(&folder.join("config.json"), &text),
        None => Ok(()),
    }
}

/// Describes what the model computes where `config.json` cannot.
#[cfg(feature = "run")]
fn write_graph(after: &Model, folder: &Path) -> Result<()> {
    use crate::ir::GraphFile;
    let path = folder.join(GraphFile::NAME);
    match (&after.changed_graph, after.graph_file()?) {
        (None, _) => Ok(()),
        (Some(_), Some(file)) => write_text(&path, &format!("{:#}\n", serde_json::to_value(&file).unwrap_or_default())),
        (Some(_), None) if path.exists() => fs::remove_file(&path).map_err(Error::io("remove", &path)),
        (Some(_), None) => Ok(()),
    }
}

fn write_text(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).map_err(Error::io("write", path))
}

/// What a general compressor would make of the files.
#[cfg(feature = "zstd")]
fn compress_further(sizes: &mut Sizes, before: &[PathBuf], after: &[PathBuf], sweep: &crate::store::Sweep) -> Result<()> {
    for (size, files) in [(&mut sizes.before, before), (&mut sizes.after, after)] {
        let found = crate::store::compressed::compressed_size(files, sweep)?;
        (size.bytes_zstd, size.bytes_zstd_sampled) = (Some(found.bytes), found.sampled);
    }
    Ok(())
}

fn sizes(model: &Model, after: &Model, exported: &Exported) -> Result<Sizes> {
    let mut bytes_before = 0;
    for path in &model.weight_files {
        bytes_before += fs::metadata(path).map_err(Error::io("open", path))?.len();
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
fn model_hash(model: &Model, after: &Model, exported: &Exported, sweep: &Sweep) -> Result<String> {
    let whole = |name: &str, weight: &Weight| after.weights.by_name.get(name).is_some_and(|now| now.origin == Origin::File && now.shape == weight.shape);
    let mut hashes: BTreeMap<&str, blake3::Hash> = exported
        .weights
        .iter()
        .filter(|(name, _)| model.weights.by_name.get(name).is_some_and(|weight| whole(name, weight)))
        .filter_map(|(name, seen)| Some((name.as_str(), seen.input_hash?)))
        .collect();
    let rest: Vec<(&String, &Weight)> = model.weights.by_name.iter().filter(|(name, _)| !hashes.contains_key(name.as_str())).collect();
    let found = sweep.quiet().run("Hashing", &rest, |(_, weight)| weight.stored_bytes, |(_, weight)| input_hash(weight))?;
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

/// Below this a quantized weight has lost more than int8 should cost: 40 dB is usual for a scale per channel.
const LOW_SQNR_DB: f64 = 20.0;

/// From this part on, a pruned weight hardly does anything any more.
const NEARLY_EMPTY: f64 = 0.95;

fn notes(after: &Model, exports: &[(&str, Exported)]) -> Vec<String> {
    let mut notes = after.notes.clone();
    notes.extend(after.history.iter().flat_map(|applied| applied.notes.clone()));
    let (mut low, mut empty) = (BTreeMap::new(), BTreeMap::new());
    for (name, seen) in exports.iter().flat_map(|(_, e)| &e.weights) {
        let Some(weight) = after.weights.by_name.get(name).filter(|_| seen.changed) else { continue };
        let elements = weight.elements() as f64;
        let (before, now) = (seen.difference.zeros_before as f64 / elements, seen.difference.zeros_after as f64 / elements);
        if now >= NEARLY_EMPTY && before < NEARLY_EMPTY {
            empty.insert(name.as_str(), -now);
        } else if let Some(db) = seen
            .difference
            .sqnr_db()
            .filter(|db| weight.origin == Origin::File && weight.encoding != Encoding::Dense && now < before + 0.1 && *db < LOW_SQNR_DB)
        {
            low.insert(name.as_str(), db);
        }
    }
    let least = |found: &BTreeMap<&str, f64>| found.iter().min_by(|a, b| a.1.total_cmp(b.1)).map(|(name, value)| ((*name).to_owned(), *value));
    if let Some((name, db)) = least(&low) {
        notes.push(format!(
            "{} of the quantized weights keep less than {LOW_SQNR_DB:.0} dB of signal to noise (least: `{name}`, {db:.1} dB); a scale per channel or group, observer: mse, or `ignore` helps",
            low.len()
        ));
    }
    if let Some((name, part)) = least(&empty) {
        notes.push(format!(
            "{} of the pruned weights are nearly or all zero (`{name}`: {:.1} %): give them a rule with a smaller amount, or prune with scope: tensor",
            empty.len(),
            -100.0 * part
        ));
    }
    notes.extend(exports.iter().flat_map(|(_, e)| e.notes.clone()));
    notes
}
