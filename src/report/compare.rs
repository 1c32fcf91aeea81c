//! Several runs side by side.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::Value;

use super::Report;
use super::format::{bytes, milliseconds, runtime_name, seconds};
use crate::evaluation::lower_is_better;

/// Runs, what tells their recipes apart, and which of them no other one beats.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Comparison {
    /// The runs, in the order given.
    pub runs: Vec<Summary>,
    /// Options that are not the same in all recipes.
    pub differing: Vec<Differing>,
    /// What `value` of the runs is, where it is the same for all: a metric, or the cosine to the original's answers.
    pub metric: Option<String>,
}

/// The figures of one run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Summary {
    /// What it is called here.
    pub name: String,
    /// Bytes of the output.
    pub bytes: u64,
    /// Bytes of the input.
    pub bytes_before: u64,
    /// Bytes before for each byte after.
    pub ratio: f64,
    /// How good the answers are, by the comparison's metric.
    pub value: Option<f64>,
    /// The same of the input.
    pub value_before: Option<f64>,
    /// How much worse than the input's.
    pub drop: Option<f64>,
    /// Mean cosine to the input's answers.
    pub cosine: Option<f64>,
    /// Median time of a batch.
    pub latency_ms: Option<f64>,
    /// Who ran the batches.
    pub runtime: Option<String>,
    /// Median before for the median after.
    pub speedup: Option<f64>,
    /// Time of the run.
    pub seconds: f64,
    /// Peak memory of the run.
    pub peak_rss_bytes: Option<u64>,
    /// Whether no other run is as small and better, or as good and smaller; sizes within a thousandth of each other are equal.
    pub front: bool,
}

/// An option with its value in each run; none where the recipe does not have it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Differing {
    /// Its name, as `--set` takes it.
    pub option: String,
    /// Its values, in the order of the runs.
    pub values: Vec<Option<Value>>,
}

impl Comparison {
    /// Compares named reports.
    pub fn of(reports: &[(String, Report)]) -> Comparison {
        let metric = common_metric(reports);
        let mut runs: Vec<Summary> = reports.iter().map(|(name, report)| summary(name, report, metric.as_deref())).collect();
        let lower = metric.as_deref().is_some_and(lower_is_better);
        let places: Vec<(u64, f64)> = runs.iter().filter_map(|run| Some((run.bytes, run.value?))).map(|(b, v)| (b, if lower { -v } else { v })).collect();
        for run in &mut runs {
            let Some(value) = run.value.map(|v| if lower { -v } else { v }) else { continue };
            run.front = !places.iter().any(|(b, v)| !smaller(run.bytes, *b) && *v >= value && (smaller(*b, run.bytes) || *v > value));
        }
        Comparison { runs, differing: differing(reports), metric }
    }

    /// Names of the columns.
    fn head(&self) -> Vec<String> {
        let mut head = vec!["run".to_owned(), "size".into(), "smaller".into()];
        head.extend(self.metric.clone());
        head.extend(["drop", "cosine", "median time", "as fast", "run time", "peak memory"].map(str::to_owned));
        head
    }

    /// The runs as words; what nobody measured is a dash.
    fn rows(&self) -> Vec<Vec<String>> {
        let dash = || "-".to_owned();
        let number = |value: Option<f64>| value.map_or_else(dash, |v| format!("{v:.4}"));
        let runtimes: std::collections::BTreeSet<_> = self.runs.iter().filter_map(|run| run.runtime.as_deref()).collect();
        let time = |run: &Summary| match (run.latency_ms, &run.runtime) {
            (Some(time), Some(runtime)) if runtimes.len() > 1 => format!("{} ({})", milliseconds(time), runtime_name(runtime)),
            (Some(time), _) => milliseconds(time),
            (None, _) => dash(),
        };
        let row = |run: &Summary| {
            let mut row = vec![run.name.clone(), bytes(run.bytes), format!("{:.2} x", run.ratio)];
            if self.metric.is_some() {
                row.push(number(run.value));
            }
            row.extend([number(run.drop), number(run.cosine), time(run)]);
            row.extend([run.speedup.map_or_else(dash, |s| format!("{s:.2} x")), seconds(run.seconds), run.peak_rss_bytes.map_or_else(dash, bytes)]);
            row
        };
        self.runs.iter().map(row).collect()
    }

    /// Names of columns, and the runs; columns in which nobody measured anything are left out.
    pub(super) fn cells(&self) -> (Vec<String>, Vec<Vec<String>>) {
        let (head, rows) = (self.head(), self.rows());
        let told: Vec<bool> = (0..head.len()).map(|column| rows.iter().any(|row| row[column] != "-")).collect();
        let keep = |cells: Vec<String>| cells.into_iter().zip(&told).filter(|(_, told)| **told).map(|(cell, _)| cell).collect();
        (keep(head), rows.into_iter().map(keep).collect())
    }

    /// The page that shows the comparison.
    pub fn to_html(&self) -> String {
        super::html::render_comparison(self)
    }
}

/// Whether a size is smaller by more than a thousandth: a file with a longer recipe in its metadata is as large as another one.
fn smaller(a: u64, b: u64) -> bool {
    a.saturating_add(b / 1000) < b
}

/// A value in a cell.
pub(super) fn words(value: Option<&Value>) -> String {
    match value {
        None => "-".into(),
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
    }
}

/// The metric that all runs were measured by, or else the cosine where all have one.
fn common_metric(reports: &[(String, Report)]) -> Option<String> {
    let metric = |report: &Report| report.accuracy.as_ref().and_then(|accuracy| accuracy.metric.clone().filter(|_| !accuracy.after.is_empty()));
    let (_, first) = reports.first()?;
    let same = metric(first).filter(|name| reports.iter().all(|(_, report)| metric(report).as_ref() == Some(name)));
    let cosine = || reports.iter().all(|(_, report)| fidelity(report).is_some()).then(|| "cosine".to_owned());
    same.or_else(cosine)
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
        speedup: report.latency.as_ref().map(|latency| latency.speedup),
        seconds: report.totals.seconds,
        peak_rss_bytes: report.totals.peak_rss_bytes,
        front: false,
    }
}

fn differing(reports: &[(String, Report)]) -> Vec<Differing> {
    let flat: Vec<BTreeMap<String, Value>> = reports.iter().map(|(_, report)| options(&report.recipe)).collect();
    let mut names: Vec<&String> = flat.iter().flat_map(BTreeMap::keys).collect();
    names.sort();
    names.dedup();
    let values = |name: &String| flat.iter().map(|options| options.get(name).cloned()).collect::<Vec<_>>();
    let differ = |values: &[Option<Value>]| values.iter().any(|value| Some(value) != values.first());
    // Of a pass that some recipes lack, only options that differ among the others tell more than that it is there.
    let entry = |name: &str| name.rsplit_once('.').and_then(|(parent, _)| flat.iter().position(|options| options.get(parent) == Some(&Value::Bool(true))));
    let told = |(name, values): &(&String, Vec<Option<Value>>)| {
        let held: Vec<Option<Value>> = values.iter().filter(|value| value.is_some()).cloned().collect();
        differ(values) && (entry(name).is_none() || differ(&held))
    };
    names.into_iter().map(|name| (name, values(name))).filter(told).map(|(name, values)| Differing { option: name.clone(), values }).collect()
}

/// The options of a recipe by the names that `--set` takes: a pass stands for its entry, unless it comes twice.
fn options(recipe: &Value) -> BTreeMap<String, Value> {
    let mut flat = BTreeMap::new();
    for (key, value) in recipe.as_object().into_iter().flatten().filter(|(key, _)| *key != "output") {
        match (key.as_str(), value) {
            ("passes" | "export", Value::Array(entries)) => {
                for (index, entry) in entries.iter().enumerate() {
                    for (name, options) in entry.as_object().into_iter().flatten() {
                        let twice = entries.iter().filter(|other| other.get(name).is_some()).count() > 1;
                        let name = if twice { format!("{key}.{index}.{name}") } else { name.clone() };
                        // That it is there at all is an option, too.
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
        assert!(!smaller(1_000_000, 1_000_003) && !smaller(1_000_003, 1_000_000) && !smaller(5, 5));
        assert!(smaller(900_000, 1_000_000) && !smaller(1_000_000, 900_000) && smaller(0, 1));
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
