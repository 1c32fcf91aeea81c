//! Software bill of materials of a model (ML-BOM) in the JSON format of CycloneDX 1.6
//! (<https://cyclonedx.org/docs/1.6/json/>): files with hashes, base model, data sets and measurements.
//! Everything is taken from the report.

// Parses untrusted input.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{Hashes, crypto, hash_files};
use crate::error::{Error, Result, counted};
use crate::evaluation::{Accuracy, Fidelity};
use crate::files;
use crate::output::SBOM;
use crate::report::Report;
use crate::work::Work;

/// Kinds of components.
const FILE: &str = "file";
const MODEL: &str = "machine-learning-model";
/// Algorithms of hashes.
const SHA256: &str = "SHA-256";
const BLAKE3: &str = "BLAKE3";

/// The contents of a bill of materials.
pub(crate) struct Bill<'a> {
    /// Name of the model.
    pub name: &'a str,
    /// The report, which lists all files except itself and the bill.
    pub report: &'a Report,
    /// Models that passes read in addition to the input.
    pub models: &'a BTreeSet<PathBuf>,
    /// Hashes of these files.
    pub hashes: &'a Hashes,
}

fn property(name: &str, value: impl ToString) -> Value {
    json!({ "name": format!("compress:{name}"), "value": value.to_string() })
}

impl Bill<'_> {
    /// The bill as JSON.
    pub fn render(&self) -> Result<String> {
        let (files, data) = (self.files(), self.data());
        let parts: Vec<&Value> = files.iter().chain(&data).filter_map(|component| component.get("bom-ref")).collect();
        let commit = self.report.tool.commit.iter().map(|commit| property("commit", commit));
        let tool = &self.report.tool;
        let mut bill = json!({
            "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
            "bomFormat": "CycloneDX",
            "specVersion": "1.6",
            "version": 1,
            "metadata": {
                "timestamp": timestamp(SystemTime::now()),
                "lifecycles": [{ "phase": "build" }],
                "tools": { "components": [{ "type": "application", "name": tool.name, "version": tool.version, "properties": commit.collect::<Vec<_>>() }] },
                "component": self.model(&data),
            },
            "dependencies": [{ "ref": "model", "dependsOn": parts }],
            "components": files.iter().chain(&data).collect::<Vec<_>>(),
        });
        // The identifier of a bill is derived from its contents.
        if let Some(bill) = bill.as_object_mut() {
            bill.insert("serialNumber".into(), serial_number(&Value::Object(bill.clone())).into());
        }
        serde_json::to_string_pretty(&bill).map(|text| text + "\n").map_err(|e| Error::malformed(Path::new(SBOM), e))
    }

    /// The output as a component.
    fn model(&self, data: &[Value]) -> Value {
        let report = self.report;
        let size = &report.size.after;
        let passes = report.passes.iter().map(|pass| property("pass", json!({ pass.name.as_str(): pass.options })));
        let sizes = [("parameters", size.parameters), ("nonzero", size.nonzero), ("bytes", size.bytes), ("seed", report.seed)];
        let properties: Vec<Value> = sizes.into_iter().map(|(name, value)| property(name, value)).chain(passes).collect();
        let mut references = vec![json!({ "type": "build-meta", "url": crate::report::FILE })];
        references.extend(report.carried.iter().filter(|file| file.path == "README.md").map(|file| json!({ "type": "model-card", "url": file.path })));
        let names: Vec<&str> = report.passes.iter().map(|pass| pass.name.as_str()).collect();
        let notes = if names.is_empty() { "written in another format".to_owned() } else { format!("passes: {}", names.join(", ")) };
        let sets: Vec<Value> = data.iter().filter_map(|set| Some(json!({ "ref": set.get("bom-ref")? }))).collect();
        let mut parameters = architecture(report);
        parameters.extend((!sets.is_empty()).then(|| ("datasets".to_owned(), sets.into())));
        let others = self.models.iter().zip(1..).map(|(path, number)| {
            let source = path.to_string_lossy();
            input_model(&format!("input-model:{number}"), &source, Map::new(), &[property("source", &source)])
        });
        let ancestors: Vec<Value> = [base_model(report)].into_iter().chain(others).collect();
        json!({
            "type": MODEL,
            "bom-ref": "model",
            "name": self.name,
            "pedigree": { "ancestors": ancestors, "notes": notes },
            "externalReferences": references,
            "modelCard": model_card(parameters, measurements(report, 1)),
            "properties": properties,
        })
    }

    fn files(&self) -> Vec<Value> {
        let file = |(name, bytes, blake3): (&str, u64, &str)| {
            let sha256 = self.hashes.get(name).map(|hash| json!({ "alg": SHA256, "content": hash }));
            let hashes: Vec<Value> = sha256.into_iter().chain([json!({ "alg": BLAKE3, "content": blake3 })]).collect();
            json!({ "type": FILE, "bom-ref": format!("file:{name}"), "name": name, "hashes": hashes, "properties": [property("bytes", bytes)] })
        };
        self.report.files().map(file).collect()
    }

    /// The data sets of the recipe.
    fn data(&self) -> Vec<Value> {
        let sets = self.report.recipe.get("data").and_then(Value::as_object);
        let set = |(role, options): (&String, &Value)| {
            let name = ["text", "images", "arrays", "source"].iter().find_map(|key| options.get(key)?.as_str()).unwrap_or(role);
            json!({
                "type": "data",
                "bom-ref": format!("data:{role}"),
                "name": name,
                "description": format!("{role} data"),
                "data": [{ "type": "dataset", "name": name }],
                "properties": [property("data", options)],
            })
        };
        sets.into_iter().flatten().map(set).collect()
    }
}

/// The input model as a component.
fn base_model(report: &Report) -> Value {
    let source = report.model.source.to_string_lossy();
    let before = &report.size.before;
    let properties = [
        property("source", &source),
        property("parameters", before.parameters),
        property("bytes", before.bytes),
        property("tensors:blake3", &report.model.blake3),
    ];
    let card = Map::from_iter([("modelCard".to_owned(), model_card(architecture(report), measurements(report, 0)))]);
    input_model("base-model", &source, card, &properties)
}

/// A model that a run reads, as a component with further values.
fn input_model(reference: &str, source: &str, more: Map<String, Value>, properties: &[Value]) -> Value {
    let mut base = json!({ "type": MODEL, "bom-ref": reference, "properties": properties });
    let Some(component) = base.as_object_mut() else { return base };
    component.extend(more);
    if let Some((repository, revision)) = source.strip_prefix("hf:").and_then(repository) {
        component.insert("name".into(), repository.clone().into());
        // The version of a package URL is a commit.
        let commit = revision.as_deref().filter(|revision| revision.len() == 40 && revision.bytes().all(|b| b.is_ascii_hexdigit()));
        let version = commit.map_or(String::new(), |commit| format!("@{}", commit.to_lowercase()));
        component.insert("purl".into(), format!("pkg:huggingface/{repository}{version}").into());
        component.extend(revision.map(|revision| ("version".to_owned(), revision.into())));
        let page = format!("https://huggingface.co/{repository}");
        component.insert("externalReferences".into(), json!([{ "type": "distribution", "url": page }]));
        return base;
    }
    let last = source.trim_end_matches('/').rsplit('/').next().filter(|name| !name.is_empty() && *name != "." && *name != "..");
    component.insert("name".into(), last.unwrap_or("model").into());
    if source.contains("://") {
        component.insert("externalReferences".into(), json!([{ "type": "distribution", "url": source }]));
    }
    base
}

/// The repository and the revision of `org/name@revision/file`.
fn repository(name: &str) -> Option<(String, Option<String>)> {
    let (org, rest) = name.split_once('/')?;
    let (name, revision) = match rest.split_once('@') {
        Some((name, rest)) => (name, rest.split('/').next()),
        None => (rest.split('/').next()?, None),
    };
    Some((format!("{org}/{name}"), revision.map(str::to_owned)))
}

fn architecture(report: &Report) -> Map<String, Value> {
    report.model.architecture.iter().map(|name| ("modelArchitecture".to_owned(), name.as_str().into())).collect()
}

fn model_card(parameters: Map<String, Value>, metrics: Vec<Value>) -> Value {
    let mut card = Map::new();
    card.extend((!parameters.is_empty()).then(|| ("modelParameters".to_owned(), parameters.into())));
    card.extend((!metrics.is_empty()).then(|| ("quantitativeAnalysis".to_owned(), json!({ "performanceMetrics": metrics }))));
    card.into()
}

/// The measured figures of the input (`side` 0) or the output (`side` 1).
fn measurements(report: &Report, side: usize) -> Vec<Value> {
    let mut metrics = Vec::new();
    if let Some(accuracy) = &report.accuracy {
        metrics.extend(scores(accuracy, side));
    }
    if side == 0 {
        return metrics;
    }
    let evaluated = report.accuracy.as_ref().and_then(|accuracy| Some((accuracy.fidelity.as_ref()?, &accuracy.data)));
    if let Some((fidelity, data)) = evaluated {
        metrics.extend(fidelity_metrics(fidelity, data));
    } else if let Some(measured) = &report.fidelity {
        metrics.extend(fidelity_metrics(&measured.fidelity, measured.data.as_deref().unwrap_or("synthetic samples")));
    }
    metrics
}

fn metric(name: &str, value: f64, slice: &str) -> Value {
    json!({ "type": name, "value": value.to_string(), "slice": slice })
}

/// The scores on evaluation data.
fn scores(accuracy: &Accuracy, side: usize) -> Vec<Value> {
    let values = if side == 0 { &accuracy.before } else { &accuracy.after };
    let name = accuracy.metric.as_deref().unwrap_or(&accuracy.task);
    let mut metrics: Vec<Value> = values.iter().map(|(runtime, value)| metric(name, *value, &format!("{}, {runtime}", accuracy.data))).collect();
    // The interval is that of the first runtime.
    let interval = accuracy.ci95.as_ref().and_then(|intervals| intervals.get(side));
    if let (Some([low, high]), Some(Value::Object(first))) = (interval, metrics.first_mut()) {
        first.insert("confidenceInterval".into(), json!({ "lowerBound": low.to_string(), "upperBound": high.to_string() }));
    }
    metrics.extend(accuracy.more.iter().filter_map(|(name, values)| Some(metric(name, *values.get(side)?, &accuracy.data))));
    metrics
}

/// The fidelity of the outputs to those of the base model.
fn fidelity_metrics(fidelity: &Fidelity, slice: &str) -> Vec<Value> {
    let figures = [
        ("cosine similarity to the base model", Some(fidelity.cosine)),
        ("lowest cosine similarity to the base model", Some(fidelity.cosine_min)),
        ("signal to quantization noise ratio in dB", fidelity.sqnr_db),
        ("KL divergence from the base model in nats", fidelity.kl),
        ("KL divergence per label from the base model in nats", fidelity.label_kl),
        ("agreement of the top class with the base model", fidelity.top1_agreement),
    ];
    figures.into_iter().filter_map(|(name, value)| Some(metric(name, value?, slice))).collect()
}

/// A UUID of version 8 from the hash of a value.
fn serial_number(value: &Value) -> String {
    let hash = blake3::hash(value.to_string().as_bytes());
    let mut uuid = "urn:uuid:".to_owned();
    for (at, byte) in hash.as_bytes().iter().take(16).enumerate() {
        let byte = match at {
            6 => byte & 0x0f | 0x80,
            8 => byte & 0x3f | 0x80,
            _ => *byte,
        };
        uuid += if [4, 6, 8, 10].contains(&at) { "-" } else { "" };
        uuid += &format!("{byte:02x}");
    }
    uuid
}

/// A time in the format of RFC 3339, in UTC.
fn timestamp(time: SystemTime) -> String {
    let seconds = time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let mut days = seconds / 86_400;
    let is_leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let (mut year, mut month) = (1970u64, 1u32);
    let length = |year: u64| if is_leap(year) { 366 } else { 365 };
    while let Some(rest) = days.checked_sub(length(year)) {
        (days, year) = (rest, year.saturating_add(1));
    }
    for length in [31, if is_leap(year) { 29 } else { 28 }, 31, 30, 31, 30, 31, 31, 30, 31, 30] {
        let Some(rest) = days.checked_sub(length) else { break };
        (days, month) = (rest, month.saturating_add(1));
    }
    let [hour, minute, second] = [seconds / 3600 % 24, seconds / 60 % 60, seconds % 60];
    format!("{year:04}-{month:02}-{:02}T{hour:02}:{minute:02}:{second:02}Z", days.saturating_add(1))
}

/// The part of a bill that is checked.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Stored {
    bom_format: String,
    #[serde(default)]
    components: Vec<Component>,
}

#[derive(Deserialize)]
struct Component {
    #[serde(rename = "type")]
    kind: String,
    name: String,
    #[serde(default)]
    hashes: Vec<Hash>,
}

#[derive(Deserialize)]
struct Hash {
    alg: String,
    content: String,
}

/// Compares the bill of materials of an output with its files, if the report lists one: every file must be
/// listed with its SHA-256, and with the BLAKE3 of the report. `locate` returns the path of a file. Returns
/// the name of the bill, whether it is correct (`None` if hashes cannot be compared), and a description of
/// the result.
pub(crate) fn check(report: &Report, locate: impl Fn(&str) -> PathBuf, work: &Work) -> Result<Option<(String, Option<bool>, String)>> {
    if !report.carried.iter().any(|file| file.path == SBOM) {
        return Ok(None);
    }
    if !crypto::AVAILABLE {
        return Ok(Some((SBOM.into(), None, format!("its hashes were not compared: {}", crypto::MISSING))));
    }
    let (ok, finding) = match compare(report, locate, work) {
        Ok(files) => (true, format!("the hashes of {} are correct", counted(files, "file"))),
        Err(Error::Cancelled) => return Err(Error::Cancelled),
        Err(Error::Malformed { reason, .. }) => (false, reason),
        Err(error) => (false, error.to_string()),
    };
    Ok(Some((SBOM.into(), Some(ok), finding)))
}

/// Returns the number of files whose hashes are correct.
fn compare(report: &Report, locate: impl Fn(&str) -> PathBuf, work: &Work) -> Result<usize> {
    let path = locate(SBOM);
    let invalid = |reason: String| Error::malformed(&path, reason);
    let text = files::read_to_string(&path).map_err(Error::io("read", &path))?;
    let stored: Stored = serde_json::from_str(&text).map_err(|e| invalid(format!("is not a bill of materials of CycloneDX: {e}")))?;
    if stored.bom_format != "CycloneDX" {
        return Err(invalid(format!("is of the format `{}` instead of CycloneDX", stored.bom_format)));
    }
    let files: Vec<&Component> = stored.components.iter().filter(|component| component.kind == FILE).collect();
    let listed: BTreeMap<&str, &Component> = files.iter().map(|file| (file.name.as_str(), *file)).collect();
    let reported: BTreeMap<&str, &str> = report.files().filter(|(name, ..)| *name != SBOM).map(|(name, _, blake3)| (name, blake3)).collect();
    if let Some(name) = listed.keys().find(|name| !reported.contains_key(*name)) {
        return Err(invalid(format!("lists `{name}`, which the report does not list")));
    }
    if let Some(name) = reported.keys().find(|name| !listed.contains_key(*name)) {
        return Err(invalid(format!("does not list `{name}`")));
    }
    if listed.len() != files.len() {
        return Err(invalid("lists a file twice".into()));
    }
    // Names of the report are inside the output, which the comparison with the report has checked.
    let paths: Vec<(String, PathBuf)> = listed.keys().map(|name| ((*name).to_owned(), locate(name))).collect();
    let found = hash_files(&paths, work)?;
    for (name, component) in &listed {
        let is = |alg: &str, expected: Option<&str>| {
            let stored = component.hashes.iter().find(|hash| hash.alg == alg).map(|hash| hash.content.to_ascii_lowercase());
            stored.is_some() && stored.as_deref() == expected
        };
        if !is(SHA256, found.get(*name).map(String::as_str)) || !is(BLAKE3, reported.get(name).copied()) {
            return Err(invalid(format!("states other hashes of `{name}` than the file has")));
        }
    }
    Ok(listed.len())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn times_are_dates_in_utc() {
        let at = |seconds| timestamp(UNIX_EPOCH + Duration::from_secs(seconds));
        let expected = [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (951_868_800, "2000-03-01T00:00:00Z"),
            (1_798_761_599, "2026-12-31T23:59:59Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ];
        expected.into_iter().for_each(|(seconds, text)| assert_eq!(at(seconds), text));
    }

    #[test]
    fn repositories_are_parsed() {
        let parsed = |name: &str| repository(name).map(|(name, revision)| (name, revision.unwrap_or_default()));
        assert_eq!(parsed("org/name"), Some(("org/name".into(), String::new())));
        assert_eq!(parsed("org/name@v1.0"), Some(("org/name".into(), "v1.0".into())));
        assert_eq!(parsed("org/name@v1.0/inner/file.onnx"), Some(("org/name".into(), "v1.0".into())));
        assert_eq!(parsed("org/name/onnx/file.onnx"), Some(("org/name".into(), String::new())));
        assert_eq!(parsed("name"), None);
    }

    #[test]
    fn serial_numbers_are_uuids_of_the_contents() {
        let number = serial_number(&json!({ "a": 1 }));
        let uuid = number.strip_prefix("urn:uuid:").unwrap();
        let lengths: Vec<usize> = uuid.split('-').map(str::len).collect();
        assert_eq!(lengths, [8, 4, 4, 4, 12]);
        assert!(uuid.split('-').nth(2).unwrap().starts_with('8') && "89ab".contains(uuid.split('-').nth(3).unwrap().chars().next().unwrap()));
        assert_ne!(number, serial_number(&json!({ "a": 2 })));
        assert_eq!(number, serial_number(&json!({ "a": 1 })));
    }
}
