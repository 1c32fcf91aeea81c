//! Comparison of several runs.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};

use serde::Serialize;
use serde_json::Value;

use super::Report;
use super::format::{bytes, milliseconds, runtime_name, seconds};
use crate::error::counted;
use crate::evaluation::{SamplesFrom, lower_is_better};

/// Summaries of runs, the differences of their recipes, and the Pareto front. Serialized, it has the keys
/// of `compress report --json`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Comparison {
    /// The runs, in the order given.
    pub(crate) runs: Vec<Summary>,
    /// Options that differ between the recipes.
    pub(crate) differing: Vec<OptionDifference>,
    /// Meaning of `value`, if it is the same for all runs: a metric, or the cosine similarity to the
    /// original outputs.
    pub(crate) metric: Option<String>,
    /// Why the runs are not ranked although they have the same metric.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) note: Option<String>,
}

/// Summary of one run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Summary {
    /// Name of the run.
    pub name: String,
    /// Bytes of the output.
    pub bytes: u64,
    /// Bytes of the input.
    pub bytes_before: u64,
    /// Size of the input divided by the size of the output.
    pub ratio: f64,
    /// Quality by the metric of the comparison.
    pub value: Option<f64>,
    /// Quality of the input by the same metric.
    pub value_before: Option<f64>,
    /// Drop of the score.
    pub drop: Option<f64>,
    /// Mean cosine similarity of the outputs to the input model's.
    pub cosine: Option<f64>,
    /// Median latency of a batch in milliseconds.
    pub latency_ms: Option<f64>,
    /// Runtime in which the latency was measured.
    pub runtime: Option<String>,
    /// Shape of the first input with which the latency was measured.
    pub latency_batch: Option<Vec<usize>>,
    /// Threads with which the latency was measured.
    pub latency_threads: Option<usize>,
    /// Median latency of the input divided by that of the output.
    pub speedup: Option<f64>,
    /// Duration of the run in seconds.
    pub seconds: f64,
    /// Peak memory of the run.
    pub peak_rss_bytes: Option<u64>,
    /// Whether the run is on the Pareto front: no other run is as small and better, or as good and
    /// smaller. Sizes within 0.1 % count as equal.
    pub front: bool,
}

impl Summary {
    /// The runtime, the batch and the threads of the latency, which is comparable if they are the same.
    fn latency_conditions(&self) -> Option<[String; 3]> {
        let shape = self.latency_batch.as_ref()?.iter().map(usize::to_string).collect::<Vec<_>>();
        Some([runtime_name(self.runtime.as_deref()?).to_owned(), shape.join(" x "), counted(self.latency_threads?, "thread")])
    }
}

/// An option that differs between recipes.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct OptionDifference {
    /// Its name, as for `--set`.
    pub option: String,
    /// Its value in each run; `None` if the recipe does not have the option.
    pub values: Vec<Option<Value>>,
}

impl Comparison {
    /// Compares named reports.
    pub fn new(reports: &[(String, Report)]) -> Comparison {
        let metric = common_metric(reports);
        let note = metric.as_deref().and_then(|metric| different_samples(reports, metric));
        let metric = metric.filter(|_| note.is_none());
        let mut runs: Vec<Summary> = reports.iter().map(|(name, report)| summary(name, report, metric.as_deref())).collect();
        let lower = metric.as_deref().is_some_and(lower_is_better);
        let points: Vec<(u64, f64)> = runs.iter().filter_map(|run| Some((run.bytes, run.value?))).map(|(b, v)| (b, if lower { -v } else { v })).collect();
        for run in &mut runs {
            let Some(value) = run.value.map(|v| if lower { -v } else { v }) else { continue };
            run.front = !points.iter().any(|(b, v)| !is_smaller(run.bytes, *b) && *v >= value && (is_smaller(*b, run.bytes) || *v > value));
        }
        Comparison { runs, differing: differing(reports), metric, note }
    }

    /// Headings of the columns.
    fn head(&self) -> Vec<String> {
        let mut head = vec!["run".to_owned(), "size".into(), "smaller".into()];
        head.extend(self.own_metric().map(str::to_owned));
        head.extend(["drop", "cosine", "median latency", "speed-up", "run time", "peak memory"].map(str::to_owned));
        head
    }

    /// The metric, unless it is the cosine similarity, which has a column of its own.
    fn own_metric(&self) -> Option<&str> {
        self.metric.as_deref().filter(|metric| *metric != "cosine")
    }

    /// One row per run; missing values are dashes.
    fn rows(&self) -> Vec<Vec<String>> {
        let dash = || "-".to_owned();
        let number = |value: Option<f64>| value.map_or_else(dash, |v| format!("{v:.4}"));
        // Only conditions that differ between the runs.
        let differs = |at: &usize| self.runs.iter().filter_map(Summary::latency_conditions).map(|all| all[*at].clone()).collect::<BTreeSet<_>>().len() > 1;
        let differing: Vec<usize> = (0..3).filter(differs).collect();
        let time = |run: &Summary| {
            let (Some(time), Some(conditions)) = (run.latency_ms, run.latency_conditions()) else { return dash() };
            let shown: Vec<&str> = differing.iter().map(|at| conditions[*at].as_str()).collect();
            if shown.is_empty() { milliseconds(time) } else { format!("{} ({})", milliseconds(time), shown.join(", ")) }
        };
        let row = |run: &Summary| {
            let mut row = vec![run.name.clone(), bytes(run.bytes), format!("{:.2} x", run.ratio)];
            if self.own_metric().is_some() {
                row.push(number(run.value));
            }
            row.extend([number(run.drop), number(run.cosine), time(run)]);
            row.extend([run.speedup.map_or_else(dash, |s| format!("{s:.2} x")), seconds(run.seconds), run.peak_rss_bytes.map_or_else(dash, bytes)]);
            row
        };
        self.runs.iter().map(row).collect()
    }

    /// Headings and rows, without columns that have no values.
    pub(super) fn cells(&self) -> (Vec<String>, Vec<Vec<String>>) {
        let (head, rows) = (self.head(), self.rows());
        let has_values: Vec<bool> = (0..head.len()).map(|column| rows.iter().any(|row| row[column] != "-")).collect();
        let keep = |cells: Vec<String>| cells.into_iter().zip(&has_values).filter(|(_, has_values)| **has_values).map(|(cell, _)| cell).collect();
        (keep(head), rows.into_iter().map(keep).collect())
    }
}

/// Whether a size is smaller by more than 0.1 %. Smaller differences can result from recipes in the
/// metadata of files.
fn is_smaller(a: u64, b: u64) -> bool {
    a.saturating_add(b / 1000) < b
}

/// The metric of all runs if they have the same one, otherwise `cosine` if all runs have a fidelity.
fn common_metric(reports: &[(String, Report)]) -> Option<String> {
    let metric = |report: &Report| report.accuracy.as_ref().and_then(|accuracy| accuracy.metric.clone().filter(|_| !accuracy.after.is_empty()));
    let (_, first) = reports.first()?;
    let same = metric(first).filter(|name| reports.iter().all(|(_, report)| metric(report).as_ref() == Some(name)));
    let cosine = || reports.iter().all(|(_, report)| fidelity(report).is_some()).then(|| "cosine".to_owned());
    same.or_else(cosine)
}

/// Options of evaluation data that do not change the samples, or whose effect is compared otherwise.
const NOT_COMPARED: [&str; 6] = ["text", "images", "arrays", "labels", "batch_size", "samples"];

/// A note if runs were measured on different samples, or relative to different models, by which they cannot
/// be ranked.
fn different_samples(reports: &[(String, Report)], metric: &str) -> Option<String> {
    let mut models: Vec<&str> = reports.iter().map(|(_, report)| report.model.blake3.as_str()).collect();
    models.dedup();
    if metric == "cosine" && models.len() > 1 {
        return Some("not ranked by cosine: the runs have different input models".to_owned());
    }
    let evaluated = |report: &'_ Report| report.accuracy.clone().filter(|accuracy| accuracy.metric.as_deref() == Some(metric) || accuracy.fidelity.is_some());
    let all_hashed = reports.iter().all(|(_, report)| evaluated(report).is_none_or(|accuracy| accuracy.data_blake3.is_some()));
    let all_identified = reports.iter().all(|(_, report)| report.fidelity.as_ref().is_none_or(|measured| measured.first_sample.is_some()));
    let measured_on = |report: &Report| match (evaluated(report), &report.fidelity) {
        (Some(accuracy), _) => {
            let hash = accuracy.data_blake3.filter(|_| all_hashed);
            let digits = hash.as_ref().map_or_else(String::new, |hash| format!(" (BLAKE3 {})", hash.get(..8).unwrap_or(hash)));
            let described = format!("{} of {}{digits}", counted(accuracy.samples, "sample"), accuracy.data);
            let mut options = options(&report.recipe);
            options.retain(|name, _| name.strip_prefix("data.evaluation.").is_some_and(|name| !NOT_COMPARED.contains(&name)));
            ((hash.unwrap_or(accuracy.data), Some(accuracy.samples), options), described)
        }
        // The number of other samples depends on the size of the model.
        (None, Some(measured)) => {
            let seed = if measured.samples_from == SamplesFrom::Synthetic { format!(" of seed {}", report.seed) } else { String::new() };
            let data = measured.data.as_deref().map(without_detours);
            let first = measured.first_sample.as_ref().filter(|_| all_identified);
            let digits = first.map_or_else(String::new, |hash| format!(" (hash of the first: {})", hash.get(..8).unwrap_or(hash)));
            ((format!("{:?} {data:?}{seed}{digits}", measured.samples_from), None, BTreeMap::new()), measured.describe() + &seed + &digits)
        }
        (None, None) => ((String::new(), None, BTreeMap::new()), String::new()),
    };
    let measured: Vec<_> = reports.iter().map(|(name, report)| (name, measured_on(report))).collect();
    let (_, (first, _)) = measured.first()?;
    if measured.iter().all(|(_, (samples, _))| samples == first) {
        return None;
    }
    if measured.iter().all(|(_, ((data, samples, _), _))| (data, samples) == (&first.0, &first.1)) {
        return Some(format!("not ranked by {metric}: the options of `data.evaluation` differ"));
    }
    let described: Vec<String> = measured.iter().map(|(name, (_, described))| format!("`{name}` on {described}")).collect();
    Some(format!("not ranked by {metric}: the runs were measured on different samples, {}", described.join(", ")))
}

/// Names of files without folders that `..` leaves again, as in recipes next to an output.
fn without_detours(names: &str) -> String {
    let short = |name: &str| {
        Path::new(name).components().fold(PathBuf::new(), |mut short, part| {
            match part {
                Component::ParentDir if matches!(short.components().next_back(), Some(Component::Normal(_))) => drop(short.pop()),
                Component::CurDir => {}
                part => short.push(part),
            }
            short
        })
    };
    names.split(", ").map(|name| short(name).display().to_string()).collect::<Vec<_>>().join(", ")
}

fn fidelity(report: &Report) -> Option<f64> {
    let evaluated = report.accuracy.as_ref().and_then(|accuracy| accuracy.fidelity.as_ref());
    evaluated.or(report.fidelity.as_ref().map(|measured| &measured.fidelity)).map(|fidelity| fidelity.cosine)
}

fn summary(name: &str, report: &Report, metric: Option<&str>) -> Summary {
    let accuracy = report.accuracy.as_ref();
    let scored = metric.is_some() && metric == accuracy.and_then(|accuracy| accuracy.metric.as_deref());
    let cosine = fidelity(report);
    let (value, value_before) = if scored {
        (accuracy.and_then(|a| a.after.values().next().copied()), accuracy.and_then(|a| a.before.values().next().copied()))
    } else {
        (metric.and(cosine), metric.and(cosine).map(|_| 1.0))
    };
    Summary {
        name: name.to_owned(),
        bytes: report.size.after.bytes,
        bytes_before: report.size.before.bytes,
        ratio: report.size.ratio,
        value,
        value_before,
        drop: accuracy.and_then(|a| a.drop),
        cosine,
        latency_ms: report.latency.as_ref().map(|latency| latency.after_ms.p50),
        runtime: report.latency.as_ref().map(|latency| latency.runtime.clone()),
        latency_batch: report.latency.as_ref().map(|latency| latency.batch.clone()),
        latency_threads: report.latency.as_ref().map(|latency| latency.threads),
        speedup: report.latency.as_ref().map(|latency| latency.speedup),
        seconds: report.totals.seconds,
        peak_rss_bytes: report.totals.peak_rss_bytes,
        front: false,
    }
}

/// The options that differ between recipes.
fn differing(reports: &[(String, Report)]) -> Vec<OptionDifference> {
    let flat: Vec<BTreeMap<String, Value>> = reports.iter().map(|(_, report)| options(&report.recipe)).collect();
    let mut names: Vec<&String> = flat.iter().flat_map(BTreeMap::keys).collect();
    names.sort();
    names.dedup();
    let values = |name: &String| flat.iter().map(|options| options.get(name).cloned()).collect::<Vec<_>>();
    let differ = |values: &[Option<Value>]| values.iter().any(|value| Some(value) != values.first());
    // Options of a pass that some recipes lack are listed only if they differ between the recipes that
    // have it.
    let entry = |name: &str| name.rsplit_once('.').and_then(|(parent, _)| flat.iter().position(|options| options.get(parent) == Some(&Value::Bool(true))));
    let is_listed = |(name, values): &(&String, Vec<Option<Value>>)| {
        let present: Vec<Option<Value>> = values.iter().filter(|value| value.is_some()).cloned().collect();
        differ(values) && (entry(name).is_none() || differ(&present))
    };
    names.into_iter().map(|name| (name, values(name))).filter(is_listed).map(|(name, values)| OptionDifference { option: name.clone(), values }).collect()
}

/// The options of a recipe by their names for `--set`. A pass or format that occurs once is named
/// without its index.
fn options(recipe: &Value) -> BTreeMap<String, Value> {
    let mut flat = BTreeMap::new();
    for (key, value) in recipe.as_object().into_iter().flatten().filter(|(key, _)| *key != "output") {
        match (key.as_str(), value) {
            ("passes" | "export", Value::Array(entries)) => {
                for (index, entry) in entries.iter().enumerate() {
                    for (name, options) in entry.as_object().into_iter().flatten() {
                        let is_repeated = entries.iter().filter(|other| other.get(name).is_some()).count() > 1;
                        let name = if is_repeated { format!("{key}.{index}.{name}") } else { name.clone() };
                        // The presence of the entry counts as an option.
                        flat.insert(name.clone(), Value::Bool(true));
                        flatten(&name, options, &mut flat);
                    }
                }
            }
            _ => flatten(key, value, &mut flat),
        }
    }
    flat
}

fn flatten(name: &str, value: &Value, flat: &mut BTreeMap<String, Value>) {
    match value {
        Value::Object(map) => map.iter().for_each(|(key, value)| flatten(&format!("{name}.{key}"), value, flat)),
        other => drop(flat.insert(name.to_owned(), other.clone())),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn sizes_that_differ_by_metadata_are_equal() {
        assert!(!is_smaller(1_000_000, 1_000_003) && !is_smaller(1_000_003, 1_000_000) && !is_smaller(5, 5));
        assert!(is_smaller(900_000, 1_000_000) && !is_smaller(1_000_000, 900_000) && is_smaller(0, 1));
    }

    #[test]
    fn options_have_the_names_that_set_takes() {
        let recipe = json!({
            "model": "m", "seed": 1, "output": "o", "data": { "evaluation": { "text": "t" } },
            "passes": [{ "cast": { "to": "f16" } }, { "prune-unstructured": { "amount": 0.5 } }, { "cast": { "to": "f32" } }],
        });
        let names: Vec<String> = options(&recipe).into_keys().collect();
        let expected = [
            "data.evaluation.text",
            "model",
            "passes.0.cast",
            "passes.0.cast.to",
            "passes.2.cast",
            "passes.2.cast.to",
            "prune-unstructured",
            "prune-unstructured.amount",
            "seed",
        ];
        assert_eq!(names, expected);
    }
}
