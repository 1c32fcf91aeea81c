//! Curves of training metrics and of memory, from the details of passes.

use maud::{Markup, html};
use serde_json::Value;

use super::chart::{Axis, Frame, dot, line, short};
use super::{section as section_of, table};
use crate::report::Report;
use crate::report::format::{bytes, seconds};

/// Maximum number of points of a curve; longer curves are subsampled.
const MAX_POINTS: usize = 400;
/// Keys and titles of the training curves.
const CURVES: [(&str, &str); 3] = [("loss", "loss"), ("learning_rate", "learning rate"), ("samples_per_second", "samples per second")];

/// Categories of memory with their colors, from the bottom to the top of the stacked chart.
const STACK: [(&str, &str); 6] = [
    ("weights", "part-embeddings"),
    ("optimizer", "part-norms"),
    ("teacher", "part-convolutions"),
    ("data", "part-other"),
    ("gradients", "part-mlp"),
    ("activations", "part-attention"),
];

/// Units of time, the largest first.
const UNITS: [(f64, &str); 3] = [(3600.0, "h"), (60.0, "min"), (1.0, "s")];

/// A named curve of points.
struct Curve {
    title: String,
    points: Vec<(f64, f64)>,
}

pub(super) fn section(report: &Report) -> Markup {
    html! {
        @for pass in &report.passes {
            (section_of("training", &format!("Training: {}", pass.name), "Hover over a curve to see its values.", &training(&pass.details)))
            (section_of("memory", &format!("Memory: {}", pass.name), "", &memory(&pass.details)))
        }
    }
}

fn numbers(list: &[Value], x: &str, y: &str) -> Vec<(f64, f64)> {
    let points: Vec<(f64, f64)> = list.iter().filter_map(|point| Some((point.get(x)?.as_f64()?, point.get(y)?.as_f64()?))).collect();
    let every = points.len().div_ceil(MAX_POINTS).max(1);
    let last = points.len().saturating_sub(1);
    points.into_iter().enumerate().filter(|(index, _)| index % every == 0 || *index == last).map(|(_, point)| point).collect()
}

fn array<'v>(details: &'v Value, pointer: &str) -> &'v [Value] {
    details.pointer(pointer).and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

fn training(details: &Value) -> Markup {
    let curve = array(details, "/training/curve");
    let mut curves: Vec<Curve> = CURVES.iter().map(|(key, title)| Curve { title: (*title).to_owned(), points: numbers(curve, "step", key) }).collect();
    let evaluations = array(details, "/training/evaluations");
    let mut metrics: Vec<&str> = evaluations.iter().filter_map(|e| e.get("metric")?.as_str()).collect();
    metrics.sort_unstable();
    metrics.dedup();
    for metric in metrics {
        let points: Vec<Value> = evaluations.iter().filter(|e| e.get("metric").and_then(Value::as_str) == Some(metric)).cloned().collect();
        curves.push(Curve { title: format!("{metric} on evaluation data"), points: numbers(&points, "step", "value") });
    }
    curves.retain(|curve| !curve.points.is_empty());
    if curves.is_empty() {
        return html! {};
    }
    html! { div.curves { @for curve in &curves { (drawn(curve)) } } }
}

fn drawn(curve: &Curve) -> Markup {
    let x = Axis::over(curve.points.iter().map(|p| p.0), 4);
    let y = Axis::over(curve.points.iter().map(|p| p.1), 3);
    let marks = html! {
        path.curve d=(line(curve.points.iter().map(|p| (x.x(p.0), y.y(p.1))))) {}
        @for (step, value) in &curve.points {
            g.mark.hidden transform=(format!("translate({:.1} 0)", x.x(*step))) data-tip={ "step " (short_step(*step)) ": " (short(*value)) } { path.dot d=(dot(0.0, y.y(*value))) {} }
        }
    };
    let frame = Frame { height: 150, title: &curve.title, x: Some((&x, &short_step)), y: Some((&y, &|v| y.plain(v))), nearest: true };
    html! { figure { figcaption { (curve.title) } (frame.draw(&marks)) } }
}

fn short_step(step: f64) -> String {
    if step.fract() == 0.0 && step.abs() < 1e15 { format!("{step:.0}") } else { short(step) }
}

/// Memory over time, and the predicted and measured memory of each phase.
fn memory(details: &Value) -> Markup {
    let timeline = array(details, "/memory/timeline");
    let host = numbers(timeline, "seconds", "rss_bytes");
    let device: Vec<(f64, f64)> = numbers(timeline, "seconds", "device_bytes");
    let device = if device.iter().any(|p| p.1 > 0.0) { device } else { Vec::new() };
    let phases = array(details, "/memory/phases");
    let figure = |phase: &Value, key: &str| phase.get(key).and_then(Value::as_u64).map_or("\u{2013}".into(), bytes);
    let rows: Vec<Vec<Markup>> = phases
        .iter()
        .map(|phase| {
            let name = phase.get("name").and_then(Value::as_str).unwrap_or("");
            let part = |key: &str| phase.get(key).and_then(Value::as_f64);
            let ratio = part("measured_bytes").zip(part("predicted_bytes").filter(|p| *p > 0.0)).map_or("\u{2013}".into(), |(m, p)| format!("{:.2}", m / p));
            vec![html! { (name) }, html! { (figure(phase, "predicted_bytes")) }, html! { (figure(phase, "measured_bytes")) }, html! { (ratio) }]
        })
        .collect();
    html! {
        @if !host.is_empty() || !device.is_empty() { (lines(timeline, &host, &device)) }
        (stack(array(details, "/memory/peak_step")))
        @if !rows.is_empty() { (table(&["phase", "predicted", "measured", "ratio"], &rows)) }
    }
}

/// Stacked chart of the memory within the training step with the highest peak.
fn stack(points: &[Value]) -> Markup {
    let figure = |point: &Value, key: &str| point.get(key).and_then(Value::as_f64).filter(|v| v.is_finite() && *v >= 0.0);
    // Time of a point, and the cumulative bytes up to each category.
    let heights = |point: &Value| {
        let mut sum = 0.0;
        let tops: Vec<f64> = [0.0]
            .into_iter()
            .chain(STACK.map(|(name, _)| figure(point, name).unwrap_or(0.0)))
            .map(|part| {
                sum += part;
                sum / 1e6
            })
            .collect();
        Some((figure(point, "milliseconds")?, tops))
    };
    let drawn: Vec<(&Value, f64, Vec<f64>)> = points.iter().filter_map(|point| heights(point).map(|(time, tops)| (point, time, tops))).collect();
    let top = |tops: &[f64]| tops.last().copied().unwrap_or(0.0);
    if drawn.len() < 2 {
        return html! {};
    }
    let x = Axis::over([0.0].into_iter().chain(drawn.iter().map(|(_, time, _)| *time)), 3);
    let y = Axis::over([0.0].into_iter().chain(drawn.iter().map(|(.., tops)| top(tops))), 3);
    let area = |at: usize| {
        let upper = drawn.iter().map(|(_, time, tops)| (x.x(*time), y.y(tops[at + 1])));
        let lower = drawn.iter().rev().map(|(_, time, tops)| (x.x(*time), y.y(tops[at])));
        line(upper.chain(lower)) + "Z"
    };
    let used = |name: &str| points.iter().any(|point| figure(point, name).is_some_and(|bytes| bytes > 0.0));
    let parts: Vec<(usize, &str, &str)> =
        STACK.into_iter().enumerate().map(|(at, (name, class))| (at, name, class)).filter(|(_, name, _)| used(name)).collect();
    let words =
        |point: &Value| parts.iter().map(|(_, name, _)| format!("{name} {}", bytes(figure(point, name).unwrap_or(0.0) as u64))).collect::<Vec<_>>().join(", ");
    let marks = html! {
        @for (at, _, class) in &parts { path.stack.(class) d=(area(*at)) {} }
        @for (point, time, tops) in &drawn {
            g.mark.hidden transform=(format!("translate({:.1} 0)", x.x(*time))) data-tip={ (short(*time)) " ms, " (point.get("phase").and_then(Value::as_str).unwrap_or("")) ": " (bytes((top(tops) * 1e6) as u64)) ": " (words(point)) } {
                path.dot d=(dot(0.0, y.y(top(tops)))) {}
            }
        }
    };
    let frame = Frame {
        height: 220,
        title: "memory within the step with the highest peak",
        x: Some((&x, &|v| format!("{} ms", x.plain(v)))),
        y: Some((&y, &|v| bytes((v * 1e6) as u64))),
        nearest: true,
    };
    html! {
        figure {
            figcaption { "step with the highest peak: " @for (_, name, class) in &parts { span.swatch.(class) {} (name) " " } }
            (frame.draw(&marks))
        }
    }
}

fn lines(timeline: &[Value], host: &[(f64, f64)], device: &[(f64, f64)]) -> Markup {
    let all = || host.iter().chain(device);
    let last = all().map(|p| p.0).fold(0.0, f64::max);
    let (unit, name) = UNITS.into_iter().find(|(unit, _)| last > 3.0 * unit).unwrap_or((1.0, "s"));
    let x = Axis::over([0.0, last / unit], 5);
    let time = |v: f64| format!("{} {name}", x.plain(v));
    let y = Axis::over(all().map(|p| p.1 / 1e6).chain([0.0]), 3);
    let phases: Vec<(f64, &str)> = timeline.iter().filter_map(|entry| Some((entry.get("seconds")?.as_f64()?, entry.get("phase")?.as_str()?))).collect();
    let phase_at = |at: f64| {
        let next = phases.partition_point(|(time, _)| *time <= at);
        next.checked_sub(1).map_or(String::new(), |last| format!(", {}", phases[last].1))
    };
    let position = |point: &(f64, f64)| (x.x(point.0 / unit), y.y(point.1 / 1e6));
    let marks = html! {
        @for (class, words, points) in [("after", "memory", host), ("device", "device memory", device)] {
            path.curve.(class) d=(line(points.iter().map(position))) {}
            @for point in points {
                g.mark.hidden.(class) transform=(format!("translate({:.1} 0)", position(point).0)) data-tip={ (seconds(point.0)) ": " (words) " " (bytes(point.1 as u64)) (phase_at(point.0)) } {
                    path.dot d=(dot(0.0, position(point).1)) {}
                }
            }
        }
    };
    let frame = Frame { height: 180, title: "memory over time", x: Some((&x, &time)), y: Some((&y, &|v| bytes((v * 1e6) as u64))), nearest: true };
    html! {
        figure {
            figcaption {
                @if !host.is_empty() { span.key.after {} " memory of the process " }
                @if !device.is_empty() { span.key.device {} " device memory" }
            }
            (frame.draw(&marks))
        }
    }
}
