//! Table rows of the measurements from running the models: label, value before, value after.

use std::collections::{BTreeMap, BTreeSet};

use super::Report;
use super::format::{bytes, count, decibels, figure, milliseconds, runtime_name};
use crate::evaluation::{Accuracy, Compute, Fidelity, OutputFidelity, Runtime};

/// All rows; empty if the models were not run.
pub(super) fn rows(report: &Report) -> Vec<[String; 3]> {
    let mut rows = quality_rows(report);
    if let Some(latency) = &report.latency {
        let sizes = latency.batch.iter().map(usize::to_string).collect::<Vec<_>>().join(" x ");
        let what = format!("{}, batch {sizes}, {} threads", runtime_name(&latency.runtime), latency.threads);
        rows.push([format!("median time, {what}"), milliseconds(latency.before_ms.p50), milliseconds(latency.after_ms.p50)]);
        rows.push(["95th percentile".into(), milliseconds(latency.before_ms.p95), milliseconds(latency.after_ms.p95)]);
        rows.push(["speed-up".into(), "1.00".into(), latency.describe_speedup()]);
    }
    rows.extend(report.compute.iter().flat_map(compute_rows));
    rows
}

/// Rows of the scores, or of the fidelity without scores.
pub(super) fn quality_rows(report: &Report) -> Vec<[String; 3]> {
    match (&report.accuracy, &report.fidelity) {
        (Some(accuracy), _) => accuracy_rows(accuracy),
        (None, Some(measured)) => fidelity_rows(&measured.fidelity),
        (None, None) => Vec::new(),
    }
}

/// Rows of the cost of one forward pass.
pub(super) fn compute_rows(compute: &Compute) -> [[String; 3]; 2] {
    [
        [macs_label(compute), count(compute.before.macs), count(compute.after.macs)],
        ["activation memory".into(), bytes(compute.before.activation_bytes), bytes(compute.after.activation_bytes)],
    ]
}

/// Label of the multiply-accumulates, with the input sizes at which they were counted.
pub(super) fn macs_label(compute: &Compute) -> String {
    let sizes: Vec<String> = compute.sizes.iter().map(|(name, size)| format!("{name} {size}")).collect();
    format!("multiply-accumulates at {}", if sizes.is_empty() { "the sizes of the inputs".to_owned() } else { sizes.join(", ") })
}

/// Rows of the scores.
pub(super) fn accuracy_rows(accuracy: &Accuracy) -> Vec<[String; 3]> {
    let mut rows = Vec::new();
    let metric = accuracy.metric.as_deref().unwrap_or("");
    // The input has no score if the labels belong to a new head.
    let runtimes: BTreeSet<_> = accuracy.before.keys().chain(accuracy.after.keys()).collect();
    for runtime in runtimes {
        let value = |side: &BTreeMap<Runtime, f64>| side.get(runtime).map_or("-".to_owned(), |value| format!("{value:.4}"));
        rows.push([format!("{metric}, {}", runtime_name(&runtime.to_string())), value(&accuracy.before), value(&accuracy.after)]);
    }
    if let Some([before, after]) = accuracy.ci95 {
        let interval = |[low, high]: [f64; 2]| format!("{low:.4} .. {high:.4}");
        rows.push([format!("{metric}, 95 % interval"), interval(before), interval(after)]);
    }
    for (name, [before, after]) in accuracy.more.iter().filter(|(_, [before, after])| before.fract() != 0.0 || before != after) {
        rows.push([name.replace('_', " "), figure(*before), figure(*after)]);
    }
    rows.extend(accuracy.fidelity.iter().flat_map(fidelity_rows));
    rows
}

/// Maximum number of outputs that are listed separately.
const MAX_OUTPUTS: usize = 8;

/// Rows of the fidelity: of the worst output, and of each output if there are several.
pub(super) fn fidelity_rows(fidelity: &Fidelity) -> Vec<[String; 3]> {
    let output = if fidelity.outputs.len() > 1 { format!("the worst of {} outputs", fidelity.outputs.len()) } else { format!("`{}`", fidelity.output) };
    // Only outputs with classes have these figures.
    let mut with_classes = fidelity.outputs.iter().filter(|(_, output)| output.kl.or(output.label_kl).is_some()).map(|(name, _)| format!("`{name}`"));
    let predicting = with_classes.next().filter(|_| with_classes.next().is_none()).unwrap_or_else(|| output.clone());
    let mut rows = Vec::new();
    let mut add = |name: &str, output: &str, value: String| rows.push([format!("{name} of {output}"), "-".into(), value]);
    add("cosine, mean", &output, format!("{:.4}", fidelity.cosine));
    add("cosine, minimum", &output, format!("{:.4}", fidelity.cosine_min));
    add("SQNR", &output, decibels(fidelity.sqnr_db));
    if let Some(kl) = fidelity.kl {
        add("KL divergence", &predicting, format!("{kl:.4}"));
    }
    if let Some(kl) = fidelity.label_kl {
        add("KL divergence per label", &predicting, format!("{kl:.4}"));
    }
    if let Some(top1) = fidelity.top1_agreement {
        add("same top class", &predicting, format!("{:.1} %", 100.0 * top1));
    }
    rows.extend(output_rows(fidelity).into_iter().map(|[name, value]| [name, "-".into(), value]));
    rows
}

/// One row per output if there are several, the worst first, followed by outputs without a comparison.
pub(crate) fn output_rows(fidelity: &Fidelity) -> Vec<[String; 2]> {
    let mut outputs: Vec<_> = fidelity.outputs.iter().filter(|_| fidelity.outputs.len() > 1).collect();
    outputs.sort_by(|a, b| a.1.cosine.total_cmp(&b.1.cosine));
    let more = outputs.len().saturating_sub(MAX_OUTPUTS);
    let row = |(name, output): (&String, &OutputFidelity)| {
        [format!("`{name}`: cosine, mean and minimum; SQNR"), format!("{:.4}, {:.4}; {}", output.cosine, output.cosine_min, decibels(output.sqnr_db))]
    };
    let mut rows: Vec<[String; 2]> = outputs.into_iter().take(MAX_OUTPUTS).map(row).collect();
    if more > 0 {
        rows.push([format!("{more} more outputs"), "more similar".into()]);
    }
    rows.extend(fidelity.equal.iter().map(|(name, part)| [format!("`{name}`: equal values"), format!("{:.2} %", 100.0 * part)]));
    rows.extend(fidelity.not_compared.iter().map(|(name, reason)| [format!("`{name}`: not compared"), reason.clone()]));
    rows
}
