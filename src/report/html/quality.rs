//! Accuracy, fidelity and latency.

use maud::{Markup, html};

use super::chart::{Axis, Track, dot, tracks};
use super::{section, table};
use crate::error::counted;
use crate::report::format::{milliseconds, runtime_name};
use crate::report::{DraftQuality, Report, measured};

pub(super) fn accuracy(report: &Report) -> Markup {
    let Some(accuracy) = &report.accuracy else { return fidelity(report) };
    let metric = accuracy.metric.as_deref().unwrap_or("");
    let mut points = Vec::new();
    for (index, (runtime, before)) in accuracy.before.iter().enumerate() {
        let interval = accuracy.ci95.filter(|_| index == 0);
        points.push((format!("before, {}", runtime_name(&runtime.to_string())), "before", *before, interval.map(|i| i[0])));
        if let Some(after) = accuracy.after.get(runtime) {
            points.push((format!("after, {}", runtime_name(&runtime.to_string())), "after", *after, interval.map(|i| i[1])));
        }
    }
    let axis = Axis::over(points.iter().flat_map(|p| p.3.unwrap_or([p.2; 2]).into_iter().chain([p.2])), 4);
    let lines: Vec<Track> = points
        .iter()
        .map(|(label, class, value, interval)| Track {
            label: html! { (label) },
            marks: html! {
                @if let Some([low, high]) = interval { path.interval.(class) d=(format!("M{:.1} 500H{:.1}", axis.x(*low), axis.x(*high))) {} }
                path.dot.(class) d=(dot(axis.x(*value), 500.0)) {}
            },
            value: format!("{value:.4}"),
        })
        .collect();
    let rows = cells(measured::accuracy_rows(accuracy));
    let lead = format!("{} on {} of {}. Lines are 95 % intervals.", accuracy.task, counted(accuracy.samples, "sample"), accuracy.data);
    let content = html! {
        @if !lines.is_empty() { (tracks(metric, &axis, &|v| axis.plain(v), &lines)) }
        (table(&["", "before", "after"], &rows))
    };
    section("accuracy", "Accuracy", &lead, &content)
}

/// Fidelity of the outputs, if the report has no scores.
fn fidelity(report: &Report) -> Markup {
    let Some(measured) = &report.fidelity else { return html! {} };
    let lead = format!("Outputs of the compressed model compared with those of the input on {}.", measured.describe());
    section("fidelity", "Fidelity", &lead, &table(&["", "before", "after"], &cells(measured::fidelity_rows(&measured.fidelity))))
}

/// Continuations of prompts before and after.
pub(super) fn continuations(report: &Report) -> Markup {
    if report.continuations.is_empty() {
        return html! {};
    }
    let rows: Vec<Vec<Markup>> =
        report.continuations.iter().map(|text| [&text.prompt, &text.before, &text.after].map(|part| html! { (part) }).to_vec()).collect();
    section("continuations", "Continuations", "Greedy continuations of held-out texts.", &table(&["text", "before", "after"], &rows))
}

/// Speculative decoding with the output as a draft.
pub(super) fn draft(report: &Report) -> Markup {
    let Some(draft) = &report.draft else { return html! {} };
    let lead = format!("The output proposes tokens, and the input verifies them: {}.", draft.measured_on());
    let content = html! {
        (table(&DraftQuality::TITLES, &cells(draft.rows())))
        @if let Some(text) = draft.recommendation() { p { (text) } }
    };
    section("draft", "Speculative decoding", &lead, &content)
}

fn cells<const N: usize>(rows: Vec<[String; N]>) -> Vec<Vec<Markup>> {
    rows.into_iter().map(|row| row.into_iter().map(|cell| super::prose(&cell)).collect()).collect()
}

pub(super) fn latency(report: &Report) -> Markup {
    let Some(latency) = &report.latency else { return html! {} };
    let axis = Axis::over([0.0, latency.before_ms.p95, latency.after_ms.p95, latency.before_ms.p50, latency.after_ms.p50], 4);
    let track = |label: &str, times: &crate::evaluation::Quantiles| Track {
        label: html! { (label) },
        marks: html! {
            path.beam.faint.(label) d=(format!("M0 500H{:.1}", axis.x(times.p95))) {}
            path.beam.(label) d=(format!("M0 500H{:.1}", axis.x(times.p50))) {}
        },
        value: format!("{}, p95 {}", milliseconds(times.p50), milliseconds(times.p95)),
    };
    let sizes = latency.batch.iter().map(usize::to_string).collect::<Vec<_>>().join(" \u{d7} ");
    let lead = format!(
        "One batch of {sizes} in {} on {} threads, {} alternating runs of each model: the median, and the 95th percentile in a lighter color.",
        runtime_name(&latency.runtime),
        latency.threads,
        latency.runs
    );
    let words = |v: f64| format!("{} ms", axis.plain(v));
    let lines = [track("before", &latency.before_ms), track("after", &latency.after_ms)];
    section("latency", &format!("Latency: speed-up {}", latency.describe_speedup()), &lead, &tracks("latency", &axis, &words, &lines))
}
