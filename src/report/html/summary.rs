//! The top of the page: the model, the key figures, notes, and size by part of the model.

use maud::{Markup, html};

use super::{prose, section, table};
use crate::evaluation::Runtime;
use crate::model::{ModelPart, part};
use crate::report::Report;
use crate::report::format::{bytes, count, milliseconds, percent, seconds, size_change};
use crate::report::measured::macs_label;

/// Name of the model: the last component of its path.
pub(super) fn name(report: &Report) -> String {
    let source = &report.model.source;
    source.file_name().map_or_else(|| source.to_string_lossy(), |name| name.to_string_lossy()).into_owned()
}

pub(super) fn header(report: &Report, name: &str) -> Markup {
    html! {
        header {
            p.eyebrow { (report.tool.name) " " (report.tool.version) " \u{b7} compression report" }
            h1 { (name) }
            p.lead {
                @if let Some(architecture) = &report.model.architecture { (architecture) ", " }
                (count(report.size.before.parameters)) " parameters"
                @for pass in &report.passes { " " span.chip { (pass.name) } }
            }
        }
    }
}

/// A card with a key figure.
fn card(label: &str, from: Option<String>, to: &str, delta: &Markup) -> Markup {
    html! {
        div.card {
            p.card-label { (label) }
            p.figure { (to) }
            p.from { @if let Some(from) = from { "from " (from) } @else { "\u{a0}" } }
            p.delta { (delta) }
        }
    }
}

pub(super) fn headline(report: &Report) -> Markup {
    let size = &report.size;
    html! {
        div.cards {
            (card("Size", Some(bytes(size.before.bytes)), &bytes(size.after.bytes), &html! { strong { (size_change(size.ratio, '\u{d7}')) } }))
            (accuracy(report))
            (speed(report))
            (card("This run", None, &seconds(report.totals.seconds), &html! {
                @if let Some(peak) = report.totals.peak_rss_bytes { strong { (bytes(peak)) } " peak memory" }
            }))
        }
    }
}

fn accuracy(report: &Report) -> Markup {
    let Some(accuracy) = &report.accuracy else {
        return card("Accuracy", None, "\u{2013}", &html! { "not measured: add " code { "data: { evaluation: \u{2026} }" } });
    };
    let cosine = accuracy.fidelity.as_ref().map(|fidelity| fidelity.cosine);
    let first = |values: &std::collections::BTreeMap<Runtime, f64>| values.values().next().copied();
    match (first(&accuracy.before), first(&accuracy.after)) {
        (Some(before), Some(after)) => {
            let drop = accuracy.drop.unwrap_or(before - after);
            let label = capital(accuracy.metric.as_deref().unwrap_or("score"));
            let delta = match drop {
                d if d.abs() < 5e-5 => html! { strong { "no change" } },
                d if d > 0.0 => html! { strong { (score(d)) } " worse" },
                d => html! { strong { (score(-d)) } " better" },
            };
            card(&label, Some(score(before)), &score(after), &delta)
        }
        (None, Some(after)) => {
            card(&capital(accuracy.metric.as_deref().unwrap_or("score")), None, &score(after), &html! { "the original has no score: it has other classes" })
        }
        _ => card("Output similarity", None, &cosine.map_or("\u{2013}".into(), |c| format!("{c:.4}")), &html! { "mean cosine similarity to the original" }),
    }
}

fn speed(report: &Report) -> Markup {
    match &report.latency {
        Some(latency) => card(
            "Latency, median",
            Some(milliseconds(latency.before_ms.p50)),
            &milliseconds(latency.after_ms.p50),
            &html! {
                strong { (format!("{:.2}\u{d7}", latency.speedup)) } " speed-up"
                @if let Some([low, high]) = latency.speedup_quartiles { (format!(" ({low:.2} to {high:.2})")) }
            },
        ),
        None => card("Latency", None, "\u{2013}", &html! { "not measured: add " code { "evaluate: { latency: true }" } }),
    }
}

/// A score with enough digits to distinguish models.
fn score(value: f64) -> String {
    if value.abs() < 2.0 { format!("{value:.4}") } else { format!("{value:.2}") }
}

fn capital(word: &str) -> String {
    let mut letters = word.chars();
    letters.next().map_or(String::new(), |first| first.to_uppercase().chain(letters).collect())
}

/// The warnings, and the other notes in a collapsed section.
pub(super) fn notes(report: &Report) -> Markup {
    let (warnings, notes) = report.warnings_and_notes();
    let list = |notes: &[&str]| html! { ul.notes { @for note in notes { li { (prose(note)) } } } };
    html! {
        @if !warnings.is_empty() { (section("warnings", "Warnings", "", &list(&warnings))) }
        @if !notes.is_empty() {
            (section("notes", "Notes", "", &html! { details { summary { (notes.len()) @if notes.len() == 1 { " note" } @else { " notes" } } (list(&notes)) } }))
        }
    }
}

/// Bytes by part of the model, as bars on one scale.
pub(super) fn parts(report: &Report) -> Markup {
    let mut sums: Vec<(ModelPart, u64, u64)> = ModelPart::ALL.into_iter().map(|part| (part, 0, 0)).collect();
    for layer in &report.layers {
        let layer_part = part(&layer.name, &layer.shape);
        if let Some(sum) = sums.iter_mut().find(|sum| sum.0 == layer_part) {
            (sum.1, sum.2) = (sum.1 + layer.bytes_before, sum.2 + layer.bytes_after);
        }
    }
    sums.retain(|(_, before, after)| before + after > 0);
    let total = |pick: fn(&(ModelPart, u64, u64)) -> u64| sums.iter().map(pick).sum::<u64>();
    let (before, after) = (total(|sum| sum.1), total(|sum| sum.2));
    let most = before.max(after).max(1) as f64;
    let bar = |label: &str, pick: &dyn Fn(&(ModelPart, u64, u64)) -> u64, total: u64| {
        let width = |value: u64| format!("width:{:.3}%", 100.0 * value as f64 / most);
        html! {
            div.bar-label { (label) }
            div.bar {
                @for sum in sums.iter().filter(|sum| pick(sum) > 0) {
                    span.segment.{ "part-" (sum.0.name()) } style=(width(pick(sum))) data-tip={ (sum.0.name()) ", " (label) ": " (bytes(pick(sum))) ", " (percent(pick(sum), total)) } {}
                }
            }
            div.bar-value { (bytes(total)) }
        }
    };
    let rows: Vec<Vec<Markup>> = sums
        .iter()
        .map(|(part, b, a)| {
            vec![
                html! { span.swatch.{ "part-" (part.name()) } {} (part.name()) },
                html! { (bytes(*b)) },
                html! { (bytes(*a)) },
                html! { (percent(*a, after)) },
                html! { (if *a > 0 { format!("{:.2}\u{d7}", *b as f64 / *a as f64) } else { "\u{2013}".into() }) },
            ]
        })
        .collect();
    let content = html! {
        div.bars {
            (bar("before", &|sum| sum.1, before))
            (bar("after", &|sum| sum.2, after))
        }
        (table(&["part of the model", "before", "after", "share after", "smaller"], &rows))
        (sizes(report))
    };
    section("size", "Size by part of the model", "Stored bytes of the weights, including scales and masks.", &content)
}

/// Sizes of the whole model.
fn sizes(report: &Report) -> Markup {
    let (before, after) = (&report.size.before, &report.size.after);
    let zstd = |size: &crate::report::Size| {
        size.bytes_zstd.map_or("\u{2013}".into(), |b| format!("{}{}", if size.bytes_zstd_sampled { "about " } else { "" }, bytes(b)))
    };
    let row = |name: &str, before: String, after: String| vec![html! { (name) }, html! { (before) }, html! { (after) }];
    let zeros = |size: &crate::report::Size| percent(size.parameters - size.nonzero.min(size.parameters), size.parameters);
    let mut rows = vec![
        row("files", bytes(before.bytes), bytes(after.bytes)),
        row("files after zstd", zstd(before), zstd(after)),
        row("parameters", count(before.parameters), count(after.parameters)),
        row("zeros", zeros(before), zeros(after)),
        row("tensors", before.tensors.to_string(), after.tensors.to_string()),
    ];
    if let Some(compute) = &report.compute {
        rows.push(row(&macs_label(compute), count(compute.before.macs), count(compute.after.macs)));
        rows.push(row("activation memory", bytes(compute.before.activation_bytes), bytes(compute.after.activation_bytes)));
    }
    table(&["the whole model", "before", "after"], &rows)
}
