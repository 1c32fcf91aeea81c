//! Scores in the form that the Hub reads (hub-docs: `eval-results`).

use serde::Serialize;

use crate::error::counted;
use crate::evaluation::Benchmark;
use crate::report::Report;

/// Folder of the scores.
const FOLDER: &str = ".eval_results";

/// A score of a file.
#[derive(Serialize)]
struct Entry<'a> {
    dataset: DataSet<'a>,
    value: f64,
    notes: String,
}

#[derive(Serialize)]
struct DataSet<'a> {
    id: &'a str,
    task_id: &'a str,
}

/// The name and the contents of the file with the score of the output on a benchmark. `None` without a
/// score.
pub(crate) fn eval_results(report: &Report, benchmark: &Benchmark) -> Option<(String, String)> {
    let accuracy = report.accuracy.as_ref()?;
    let metric = accuracy.metric.as_deref()?;
    let (runtime, value) = accuracy.after.first_key_value()?;
    let before = accuracy.before.get(runtime).map(|before| format!(", {before:.4} before compression")).unwrap_or_default();
    let notes = format!("{metric} on {} in {runtime}{before}", counted(accuracy.samples, "sample"));
    let entry = Entry { dataset: DataSet { id: &benchmark.dataset, task_id: &benchmark.task }, value: *value, notes };
    let text = serde_saphyr::to_string(&[entry]).ok()?;
    let (_, name) = benchmark.dataset.split_once('/')?;
    Some((format!("{FOLDER}/{name}.yaml"), text.trim_end().to_owned() + "\n"))
}
