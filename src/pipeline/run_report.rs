//! The report of a run.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use serde_json::Value;

use super::carry::{self, write_text};
use super::measured::Measured;
use super::quality_gate::{limit_note, quality_note};
use super::run::{Run, Written};
use super::zstd_size::measure_zstd_sizes;
use crate::error::{Error, Result};
use crate::export::Exported;
use crate::files::{self, LocalNames};
use crate::model::Model;
use crate::output::Staging;
use crate::recipe::Recipe;
use crate::report::{self, DraftQuality, Layer, ModelId, OutputFile, PassReport, Peak, Report, Size, Sizes, Tool, Totals, Verified, WARNING, WeightHistogram};
use crate::run_state::{Applied, RunState};
use crate::store::writer::{WeightMeasurement, input_hash};
use crate::store::{Encoding, Origin, QuantizationSpec, Weight, ZeroOrigin};
use crate::work::Work;

/// File name of the model's graph, which a pass may change.
const GRAPH: &str = "graph.json";

impl Run<'_> {
    /// The report of a written model, without the copied files and the totals.
    pub fn report(&self, staging: &Staging, written: &Written, mut measured: Measured) -> Result<Report> {
        let Run { pipeline, input, after, state, .. } = self;
        let (work, exports) = (pipeline.work(), &written.exports);
        let Some((_, first)) = exports.first() else { return Err(Error::option("export", "nothing to write")) };
        let quality: Vec<String> = quality_note(&measured, pipeline, state).into_iter().chain(limit_note(&measured, pipeline)).collect();
        let mut size = sizes(input, after, state, first)?;
        let weights: Vec<PathBuf> = first.files.iter().filter(|f| !f.name.ends_with(".json")).map(|f| staging.destination().location(&f.name)).collect();
        measure_zstd_sizes(&mut size, &input.weight_files, &weights, &work)?;
        // If the output is a file, its report has a separate folder.
        let target = state.file.as_ref().map_or_else(|| staging.target().to_owned(), |_| crate::output::report_folder(staging.target()));
        let mut recipe = pipeline.recipe(input);
        if let (Some(_), Some(name)) = (&state.file, staging.target().file_name()) {
            recipe.output = Some(Path::new("..").join(name));
        }
        let recipe = serde_json::to_value(recipe).unwrap_or_default();
        // The staging folder does not exist after the run.
        let names = LocalNames::new(&recipe, Some(&target)).with(staging.path(), Path::new("."));
        let names = pipeline.enclosed.iter().fold(names, |names, path| names.with(path, path.file_name().map_or(path, Path::new)));
        let recipe = names.value(&recipe);
        let environment = pipeline.environment(measured.fidelity.is_some())?;
        let notes = [
            quality,
            after.auxiliary.notes(&after.path),
            carry::damaged(after)?,
            written.graph_note.iter().chain(&self.excluded).cloned().chain(self.unchecked_note()).chain(missing_input_files(input, after)).collect(),
            carry::stale_config(after, state).into_iter().collect(),
            staging.notes().to_vec(),
            notes(after, state, exports),
            self.start_notes.clone(),
            measured.notes,
        ];
        measured.accuracy.iter_mut().for_each(|accuracy| accuracy.data = names.text(&accuracy.data));
        measured.fidelity.iter_mut().filter_map(|fidelity| fidelity.data.as_mut()).for_each(|data| *data = names.text(data));
        let mut report = Report {
            schema: report::SCHEMA,
            tool: Tool::default(),
            environment,
            model: ModelId {
                source: published_recipe(&recipe)?.model,
                architecture: Some(input.config.model_type().to_owned()).filter(|t| !t.is_empty()),
                blake3: model_hash(input, after, state, first, &work)?,
            },
            seed: pipeline.seed,
            recipe,
            passes: self.passes(&names, written.peak_rss_bytes),
            size,
            compute: measured.compute,
            accuracy: measured.accuracy,
            fidelity: measured.fidelity,
            continuations: measured.continuations,
            latency: measured.latency,
            search: pipeline.search.as_deref().cloned(),
            draft: measured.draft.map(|draft| DraftQuality { prompts_from: names.text(&draft.prompts_from), ..draft }),
            loads: written.loads.clone(),
            layers: layers(input, after, state, first),
            histograms: Vec::new(),
            outputs: exports.iter().flat_map(|(format, exported)| outputs(format, exported)).collect(),
            carried: Vec::new(),
            signature: pipeline.provenance.signature(),
            notes: notes.concat().iter().map(|note| names.text(note)).collect(),
            timing: None,
            totals: Totals::default(),
        };
        report.notes.sort_by_key(|note| !note.starts_with(WARNING));
        report.histograms = histograms(&report, after, first);
        Ok(report)
    }

    /// Writes the recipe, the files of passes, the model card, the records of provenance, and the report, to
    /// which it adds the copied files and the totals.
    pub fn write_records(&self, staging: &Staging, written: &Written, report: &mut Report, (start, peak): (Instant, &mut Peak)) -> Result<()> {
        let folder = staging.path();
        write_text(&folder.join("recipe.yaml"), &published_recipe(&report.recipe)?.to_yaml())?;
        for (name, bytes) in &self.state.attached {
            let path = folder.join(name);
            fs::write(&path, bytes.as_slice()).map_err(Error::io("write", &path))?;
        }
        self.write_card(folder, report)?;
        let is_replaced = |name: &str| name == GRAPH || self.state.attached.contains_key(name) || written.resized.contains_key(Path::new(name));
        report.carried = carry::list(folder, &self.after, &report.outputs, is_replaced, &self.pipeline.work())?;
        let highest = peak.highest();
        // A GPU that was opened, but on which nothing ran, is not the device of the report.
        let peak_vram_bytes = highest.vram_bytes.filter(|_| report.environment.device.as_deref() != Some("cpu"));
        report.totals = Totals { seconds: start.elapsed().as_secs_f64(), peak_rss_bytes: highest.rss_bytes, peak_vram_bytes };
        let [json, markdown, html] = report::FILES;
        for (name, text) in [(markdown, report.to_markdown()), (html, report.to_html())] {
            report.carried.push(carry::write_listed(folder, name, &text)?);
        }
        let hashes = self.write_sbom(staging, report)?;
        write_text(&folder.join(json), &report.to_json())?;
        self.write_signature(staging, report, hashes)
    }

    /// The records of the passes. `writing` is the peak memory of passes that are executed during writing.
    fn passes(&self, names: &LocalNames, writing: Option<u64>) -> Vec<PassReport> {
        let record = |applied: &Applied| PassReport {
            name: applied.name.into(),
            options: names.value(&applied.options),
            seconds: applied.meter.total().as_secs_f64(),
            peak_rss_bytes: applied.peak_rss_bytes.or(writing),
            peak_vram_bytes: applied.peak_vram_bytes,
            macs: applied.counted_macs,
            tensors_changed: applied.tensors.len(),
            rule: applied.rule.clone(),
            unselected: applied.unselected.clone(),
            details: names.value(&applied.details),
        };
        self.state.history.iter().map(record).collect()
    }

    /// A note on remote files that parts could not compare with their hashes.
    fn unchecked_note(&self) -> Option<String> {
        let has_hash = |path: &PathBuf| files::content_hash(path).is_ok_and(|hash| hash.is_some());
        (self.parts.is_some() && self.input.weight_files.iter().any(has_hash))
            .then(|| "the parts read only ranges of the input files, so the files were not compared with the SHA-256 that their server states".to_owned())
    }
}

/// The recipe for the output folder, parsed from its value in the report.
fn published_recipe(recipe: &Value) -> Result<Recipe> {
    serde_json::from_value(recipe.clone()).map_err(|e| Error::option("recipe", e))
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

fn sizes(model: &Model, after: &Model, state: &RunState, exported: &Exported) -> Result<Sizes> {
    let mut bytes_before = 0;
    for path in &model.weight_files {
        bytes_before += files::length(path).map_err(Error::io("open", path))?;
    }
    let is_derived = |name: &str| after.weights.by_name.get(name).is_some_and(|weight| !is_new(weight));
    let derived: BTreeSet<&str> = after.weights.by_name.keys().filter(|name| is_derived(name)).map(|name| state.original_name(name)).collect();
    let measured = exported.weights.iter().filter(|(name, _)| is_derived(name) && model.weights.by_name.contains_key(state.original_name(name)));
    let mut zeros_before: u64 = measured.map(|(_, measured)| measured.difference.zeros_before).sum();
    // Weights that new ones replace, and aliases of tied weights that are no longer stored, were not
    // measured during writing.
    for (_, weight) in model.weights.by_name.iter().filter(|(name, _)| !derived.contains(name.as_str())) {
        weight.visit(1, &mut |block| {
            zeros_before += block.now.zeros();
            Ok(())
        })?;
    }
    let measured = exported.weights.iter().filter(|(name, _)| after.weights.by_name.contains_key(name));
    let zeros_after: u64 = measured.map(|(_, measured)| measured.difference.zeros_after).sum();
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
        nonzero: parameters - zeros_after.min(parameters),
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
fn model_hash(model: &Model, after: &Model, state: &RunState, exported: &Exported, work: &Work) -> Result<String> {
    let is_hashed = |name: &str, weight: &Weight| after.weights.by_name.get(name).is_some_and(|now| now.origin == Origin::File && now.shape == weight.shape);
    let originals = exported.weights.iter().map(|(name, measured)| (name, state.original_name(name), measured));
    let mut hashes: BTreeMap<&str, blake3::Hash> = originals
        .filter(|(name, original, _)| model.weights.by_name.get(*original).is_some_and(|weight| is_hashed(name, weight)))
        .filter_map(|(_, original, measured)| Some((original, measured.input_hash?)))
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

/// Whether a weight was not derived from a tensor of a file, such as the weights of a new head. Its values
/// are not compared with its initial ones, which a cached result does not contain.
fn is_new(weight: &Weight) -> bool {
    weight.stored_as.is_empty() && weight.origin != Origin::File
}

fn layers(model: &Model, after: &Model, state: &RunState, exported: &Exported) -> Vec<Layer> {
    let is_compared = |name: &str| !after.weights.by_name.get(name).is_some_and(|w| w.origin == Origin::Rescaled || is_new(w));
    let layer = |((name, measured), encoding): (&(String, WeightMeasurement), &String)| Layer {
        name: name.clone(),
        shape: after.weights.by_name.get(name).map(|w| w.shape.clone()).unwrap_or_default(),
        encoding: encoding.clone(),
        bytes_before: if state.original_name(name) == name { model } else { after }.weights.by_name.get(name).map_or(0, |w| w.stored_bytes),
        bytes_after: measured.bytes,
        zeros: measured.difference.zeros_after,
        sqnr_db: if measured.changed && is_compared(name) { measured.difference.sqnr_db() } else { None },
    };
    let stored = exported.weights.iter().zip(&exported.encodings);
    stored.filter(|((name, _), _)| after.weights.by_name.contains_key(name)).map(layer).collect()
}

/// Number of weights whose histograms are in the report.
const HISTOGRAMS: usize = 8;

fn histograms(report: &Report, after: &Model, exported: &Exported) -> Vec<WeightHistogram> {
    let measurements: BTreeMap<&str, &WeightMeasurement> = exported.weights.iter().map(|(name, measured)| (name.as_str(), measured)).collect();
    let histogram = |layer: &&Layer| {
        let found = measurements.get(layer.name.as_str())?.histogram.clone()?;
        Some(WeightHistogram { name: layer.name.clone(), low: found.low, high: found.high, before: found.before, after: found.after })
    };
    let is_derived = |layer: &&Layer| !after.weights.by_name.get(&layer.name).is_some_and(is_new);
    let others = report.layers.iter().filter(|layer| layer.sqnr_db.is_none() && layer.shape.len() > 1).filter(is_derived);
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
    let (mut low, mut pruned, mut empty, mut least_db) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new(), 0f64);
    for (name, measured) in exports.iter().flat_map(|(_, e)| &e.weights) {
        let Some(weight) = after.weights.by_name.get(name).filter(|_| measured.changed) else { continue };
        let elements = weight.elements() as f64;
        let (before, now) = (measured.difference.zeros_before as f64 / elements, measured.difference.zeros_after as f64 / elements);
        if now >= NEARLY_ZERO && before < NEARLY_ZERO {
            let found = if weight.zero_origin == Some(ZeroOrigin::Pruning) { &mut pruned } else { &mut empty };
            found.insert(name.as_str(), -now);
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
    for (found, what, advice) in [
        (&pruned, "the pruned weights are", "add a rule with a smaller amount for them, or prune with `scope: tensor`"),
        (&empty, "the changed weights became", "most of their values are too small for the new format; `ignore` these weights"),
    ] {
        if let Some((name, part)) = least(found) {
            let (count, percent) = (found.len(), -100.0 * part);
            notes.push(format!("{WARNING}{count} of {what} entirely or almost entirely zero (`{name}`: {percent:.1} %): {advice}"));
        }
    }
    notes.extend(exports.iter().flat_map(|(_, e)| e.notes.clone()));
    notes
}
