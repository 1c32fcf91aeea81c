//! The passes with their options and details, and the sensitivity of each layer.

use maud::{Markup, html};
use serde_json::Value;

use super::chart::{Axis, Track, dot, short, tracks};
use super::{breakable, section as section_of, table};
use crate::report::format::{bytes, seconds};
use crate::report::{PassReport, Report, Timing};

/// Maximum number of layers in the sensitivity plot.
const MAX_LAYERS: usize = 24;
/// Maximum number of entries of a list.
const MAX_ENTRIES: usize = 200;
/// Maximum number of entries of a single-line list.
const MAX_INLINE: usize = 8;
/// Maximum length of a number that is not rounded.
const MAX_DIGITS: usize = 7;
/// Keys of details with charts.
const CHARTS: [&str; 3] = ["training", "memory", "sensitivity"];

pub(super) fn section(report: &Report) -> Markup {
    if report.passes.is_empty() {
        return html! {};
    }
    let content = html! {
        div.steps { @for (index, pass) in report.passes.iter().enumerate() { (step(index + 1, pass)) } }
        @if let Some(timing) = &report.timing {
            (table(&Timing::TITLES, &timing.rows().into_iter().map(|row| row.map(|cell| html! { (cell) }).into()).collect::<Vec<_>>()))
        }
    };
    let lead = "In the order of execution. Times are summed over threads; reading and writing are included only in the total.";
    section_of("passes", "Passes", lead, &content)
}

fn step(number: usize, pass: &PassReport) -> Markup {
    let details: Vec<(&String, &Value)> =
        pass.details.as_object().into_iter().flatten().filter(|(key, value)| !value.is_null() && !CHARTS.contains(&key.as_str())).collect();
    html! {
        article.step {
            h3 { span.number { (number) } (pass.name) }
            dl.facts {
                div { dt { "time" } dd { (seconds(pass.seconds)) } }
                div { dt { "weights" } dd { (pass.tensors_changed) } }
                @if let Some(peak) = pass.peak_rss_bytes { div { dt { "peak memory" } dd { (bytes(peak)) } } }
                @if let Some(peak) = pass.peak_vram_bytes.filter(|peak| *peak > 0) { div { dt { "device memory" } dd { (bytes(peak)) } } }
            }
            @if let Some(options) = pass.options.as_object().filter(|options| !options.is_empty()) {
                h4 { "Options" }
                (facts(options.iter()))
            }
            @if !pass.rule.is_empty() {
                h4 { "Weights" }
                p { (pass.rule) }
                @if !pass.unselected.is_empty() {
                    details {
                        summary { "unchanged weights (" (pass.unselected.len()) ")" }
                        (list(&pass.unselected.iter().map(|name| Value::from(name.as_str())).collect::<Vec<_>>()))
                    }
                }
            }
            @if !details.is_empty() {
                h4 { "Details" }
                (described(&details))
            }
        }
    }
}

/// Details as nested lists: scalars first, then lists and maps, each with a heading.
fn described(entries: &[(&String, &Value)]) -> Markup {
    let deep = |value: &Value| value.is_object() || value.as_array().is_some_and(|list| list.iter().any(Value::is_object) || list.len() > MAX_INLINE);
    html! {
        (facts(entries.iter().filter(|(_, value)| !deep(value)).copied()))
        @for (key, value) in entries.iter().filter(|(_, value)| deep(value)) {
            @match value {
                Value::Array(rows) => details { summary { (words(key)) " (" (rows.len()) ")" } (list(rows)) },
                Value::Object(map) => { h4 { (words(key)) } (described(&map.iter().collect::<Vec<_>>())) },
                _ => {},
            }
        }
    }
}

fn facts<'v>(entries: impl Iterator<Item = (&'v String, &'v Value)>) -> Markup {
    let mut entries = entries.peekable();
    html! {
        @if entries.peek().is_some() {
            dl.facts { @for (key, value) in entries { div { dt { (words(key)) } dd { (scalar(value)) } } } }
        }
    }
}

fn words(key: &str) -> String {
    key.replace('_', " ")
}

/// Short text of a value.
fn scalar(value: &Value) -> String {
    let joined = |parts: Vec<String>| if parts.is_empty() { "none".to_owned() } else { parts.join(", ") };
    match value {
        Value::Null => "\u{2013}".into(),
        Value::Bool(value) => if *value { "yes" } else { "no" }.into(),
        Value::String(text) => text.clone(),
        Value::Number(number) => {
            let text = number.to_string();
            if text.len() <= MAX_DIGITS || !number.is_f64() { text } else { number.as_f64().map_or(text, short) }
        }
        Value::Array(values) => joined(values.iter().map(scalar).collect()),
        Value::Object(map) => joined(map.iter().map(|(key, value)| format!("{} {}", words(key), scalar(value))).collect()),
    }
}

/// A list as a table if its entries are objects, otherwise as lines.
fn list(values: &[Value]) -> Markup {
    let keys: Vec<&String> = values.first().and_then(Value::as_object).map(|first| first.keys().collect()).unwrap_or_default();
    let shown = &values[..values.len().min(MAX_ENTRIES)];
    let head: Vec<String> = keys.iter().map(|key| words(key)).collect();
    let rows: Vec<Vec<Markup>> =
        shown.iter().map(|value| keys.iter().map(|key| html! { (scalar(value.get(key.as_str()).unwrap_or(&Value::Null))) }).collect()).collect();
    html! {
        @if keys.is_empty() {
            ul { @for value in shown { li { (scalar(value)) } } }
        } @else {
            (table(&head.iter().map(String::as_str).collect::<Vec<_>>(), &rows))
        }
        @if values.len() > shown.len() { p.lead { (values.len() - shown.len()) " more are in report.json." } }
    }
}

/// Chart of the sensitivity to quantizing each single layer, if a pass has measured it.
pub(super) fn sensitivity(report: &Report) -> Markup {
    let found = report.passes.iter().find_map(|pass| Some((pass, pass.details.get("sensitivity")?.as_array()?)));
    let Some((pass, layers)) = found else { return html! {} };
    let loss = |layer: &Value| Some((layer.get("name")?.as_str()?.to_owned(), 1.0 - layer.get("quantized")?.as_f64()?));
    let mut damages: Vec<(String, f64)> = layers.iter().filter_map(loss).collect();
    damages.sort_by(|a, b| b.1.total_cmp(&a.1));
    let all = damages.len();
    damages.truncate(MAX_LAYERS);
    if damages.is_empty() {
        return html! {};
    }
    let in_floats: Vec<&str> =
        pass.details.pointer("/accuracy_goal/in_floats").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str).collect();
    let axis = Axis::over(damages.iter().map(|(_, lost)| *lost).chain([0.0]), 4);
    let lines: Vec<Track> = damages
        .iter()
        .map(|(name, lost)| {
            let class = if in_floats.contains(&name.as_str()) { "kept" } else { "after" };
            Track {
                label: html! { code { (breakable(name)) } },
                marks: html! {
                    path.beam.thin.(class) d=(format!("M{:.1} 500H{:.1}", axis.x(0.0), axis.x(*lost))) {}
                    path.dot.(class) d=(dot(axis.x(*lost), 500.0)) {}
                },
                value: format!("{lost:.2e}").replace('-', "\u{2212}"),
            }
        })
        .collect();
    let lead = format!(
        "1 \u{2212} the mean cosine similarity of the outputs to the original's when only one layer is quantized: the {} most sensitive of {all} layers.{}",
        damages.len(),
        if in_floats.is_empty() { "" } else { " Layers in the second color were not quantized." }
    );
    section_of("sensitivity", "Sensitivity", &lead, &tracks("loss of similarity", &axis, &|v| axis.plain(v), &lines))
}
