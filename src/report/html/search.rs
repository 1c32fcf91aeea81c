//! The front of a search over formats.

use maud::{Markup, html};

use super::chart::{Axis, Frame, dot, short};
use super::{section, table};
use crate::report::Report;
use crate::report::format::{bytes, figure, milliseconds};
use crate::report::search::{FormatSearch, SearchLoss, SearchPoint};

/// Units with the largest expected losses that are listed.
const UNITS: usize = 24;

pub(super) fn section_of(report: &Report) -> Markup {
    let Some(search) = &report.search else { return html! {} };
    let noun = search.loss.noun();
    let lead = format!(
        "Mixtures of formats that {} loads. The line is the predicted front: no mixture of this {} has less expected {noun} ({}). {}{}{}",
        search.runtime,
        if search.times.is_some() { "latency" } else { "size" },
        search.loss,
        if search.loss == SearchLoss::WeightError {
            "Without calibration samples, it is the sum of the squared errors of the weights relative to their squares, and nothing is measured.".to_owned()
        } else {
            let samples = search.measured_on.as_ref().map_or_else(String::new, |samples| format!(", on {samples}"));
            format!("Dots are measured with weights rounded to nearest{samples}.")
        },
        search.metric.as_ref().map_or_else(String::new, |metric| {
            format!(" The {} of the original model is {}, on {}.", metric.name, figure(metric.original), metric.measured_on)
        }),
        search.times.as_ref().map_or_else(String::new, |times| format!(" {}", times.description()))
    );
    let larger = search.larger.as_ref().map(|point| {
        let count = search.units.iter().filter(|unit| unit.larger.is_some()).count();
        format!(
            "With 5 % more {} ({}), {count} of {} units get other formats, and the expected {noun} falls from {} to {}.",
            cost(search),
            search.cost_of(point),
            search.units.len(),
            short(search.chosen.predicted),
            short(point.predicted)
        )
    });
    let content = html! {
        (front(search))
        (points(search))
        (methods(search))
        @if let Some(text) = larger { p { (text) } }
        (units(search))
    };
    let what = if search.times.is_some() { "Latency" } else { "Size" };
    section("search", &format!("{what} and {noun}"), &lead, &content)
}

/// Unit of the cost of a mixture.
fn cost(search: &FormatSearch) -> &'static str {
    if search.times.is_some() { "time" } else { "bytes" }
}

fn front(search: &FormatSearch) -> Markup {
    let all = || search.front.iter().chain(&search.points).chain([&search.chosen]);
    let has_times = search.times.is_some();
    let horizontal = |point: &SearchPoint| point.milliseconds().filter(|_| has_times).unwrap_or(point.bytes as f64 / 1e6);
    let x = Axis::over(all().map(horizontal), 5);
    let y = Axis::logarithmic(all().flat_map(|point| [point.predicted].into_iter().chain(point.measured)).filter(|value| *value > 1e-9));
    let position = |point: &SearchPoint, value: f64| (x.x(horizontal(point)), y.y(value));
    let mut path = String::new();
    for point in search.front.iter().filter(|point| point.predicted > 1e-9) {
        let (left, top) = position(point, point.predicted);
        path += &format!("{}{left:.1} {top:.1}", if path.is_empty() { "M" } else { "L" });
    }
    let noun = search.loss.noun();
    let tip = |point: &SearchPoint, what: &str, value: f64| format!("{what}: {}, {:.3} bits, {noun} {}", search.cost_of(point), point.bits, short(value));
    let mark = |point: &SearchPoint, class: &str, what: &str, value: f64| {
        let (left, top) = position(point, value);
        html! { g.mark transform=(format!("translate({left:.1} 0)")) data-tip=(tip(point, what, value)) { path.dot.large.(class) d=(dot(0.0, top)) {} } }
    };
    let predicted = search.loss == SearchLoss::WeightError;
    let marks = html! {
        path.front d=(path) {}
        @for point in &search.points {
            @if let Some(value) = point.measured.or(predicted.then_some(point.predicted)) {
                (mark(point, if point.name.is_some() { "beaten" } else { "after" }, point.name.as_deref().unwrap_or("mixture"), value))
            }
        }
        (mark(&search.chosen, "before", "chosen, predicted", search.chosen.predicted))
    };
    let size = |value: f64| if has_times { milliseconds(value) } else { bytes((value * 1e6) as u64) };
    let title = format!("{} against {noun}", if has_times { "latency" } else { "size" });
    let frame = Frame { height: 320, title: &title, x: Some((&x, &size)), y: Some((&y, &|value| short(value))), nearest: true };
    html! {
        figure.pareto {
            (frame.draw(&marks))
            figcaption { span.key.before {} " chosen " span.key.after {} " mixtures " span.key.beaten {} " fixed recipes" }
        }
    }
}

fn points(search: &FormatSearch) -> Markup {
    let row = |point: &SearchPoint, name: &str| {
        let measured = point.measured.map_or_else(|| "\u{2013}".to_owned(), short);
        let score = search.metric.iter().map(|_| point.score.map_or_else(|| "\u{2013}".to_owned(), figure));
        let cells = vec![
            html! { (name) },
            html! { (format!("{:.3}", point.bits)) },
            html! { (bytes(point.bytes)) },
            html! { (short(point.predicted)) },
            html! { (measured) },
        ];
        let time = |value: Option<f64>| value.map_or_else(|| "\u{2013}".to_owned(), milliseconds);
        let times = search.times.iter().flat_map(|_| [point.predicted_ms, point.measured_ms]).map(time);
        cells.into_iter().chain(score.chain(times).map(|text| html! { (text) })).collect()
    };
    let mut rows: Vec<Vec<Markup>> = search.points.iter().map(|point| row(point, point.name.as_deref().unwrap_or("mixture"))).collect();
    rows.push(row(&search.chosen, "chosen"));
    let titles = ["predicted", "measured"].map(|what| format!("{what} {}", search.loss.noun()));
    let titles = ["", "bits", "size"].into_iter().chain(titles.iter().map(String::as_str)).chain(search.metric.as_ref().map(|metric| metric.name.as_str()));
    let titles = titles.chain(search.times.iter().flat_map(|_| ["predicted latency", "measured latency"]));
    table(&titles.collect::<Vec<_>>(), &rows)
}

/// Methods that were tried for the chosen mixture.
fn methods(search: &FormatSearch) -> Markup {
    let rows: Vec<Vec<Markup>> = search
        .methods
        .iter()
        .map(|method| {
            let measured = method.measured.map_or_else(|| method.without_loss(), short);
            let chosen = if method.chosen { "written" } else { "" };
            vec![html! { code { (method.method) } }, html! { (measured) }, html! { (format!("{:.0} s", method.seconds)) }, html! { (chosen) }]
        })
        .collect();
    html! {
        @if !rows.is_empty() { (table(&["method", &format!("measured {}", search.loss.noun()), "time", ""], &rows)) }
    }
}

fn units(search: &FormatSearch) -> Markup {
    let mut sorted: Vec<_> = search.units.iter().collect();
    sorted.sort_by(|a, b| b.loss.total_cmp(&a.loss));
    let cell = |unit: &crate::report::search::SearchUnit| {
        let larger = unit.larger.as_deref().unwrap_or("");
        vec![html! { code { (unit.name) } }, html! { (unit.format) }, html! { (bytes(unit.bytes)) }, html! { (short(unit.loss)) }, html! { (larger) }]
    };
    let rows: Vec<Vec<Markup>> = sorted.into_iter().take(UNITS).map(cell).collect();
    let noun = search.loss.noun();
    let title = format!("The {} units with the largest expected {noun}, of {}", rows.len(), search.units.len());
    html! {
        details {
            summary { (title) }
            (table(&["unit", "format", "size", &format!("expected {noun}"), &format!("with 5 % more {}", cost(search))], &rows))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::search::{SearchMethod, SearchUnit};

    #[test]
    fn measured_points_and_the_front_are_drawn() {
        let point = |name: Option<&str>, bytes: u64, predicted: f64, measured: Option<f64>| SearchPoint {
            name: name.map(str::to_owned),
            bits: 4.5,
            bytes,
            predicted,
            measured,
            ..SearchPoint::default()
        };
        let search = FormatSearch {
            runtime: "llama.cpp".to_owned(),
            measured_on: Some("8 windows of text".to_owned()),
            chosen: point(None, 60, 0.02, None),
            larger: Some(point(None, 63, 0.015, None)),
            points: vec![point(Some("Q4_K_M"), 61, 0.03, Some(0.031)), point(None, 62, 0.017, Some(0.018))],
            front: (50..70u32).map(|bytes| point(None, bytes.into(), 1.0 / f64::from(bytes), None)).collect(),
            units: vec![SearchUnit {
                name: "blk.0.attn_q".into(),
                format: "Q4_K".into(),
                bytes: 5,
                loss: 0.01,
                larger: Some("Q5_K".into()),
                milliseconds: None,
            }],
            ..FormatSearch::default()
        };
        assert_eq!(methods(&search).into_string(), "");
        let tried = |method: &str, measured: Option<f64>| SearchMethod {
            method: method.to_owned(),
            measured,
            seconds: 12.3,
            chosen: measured.is_some(),
            ..SearchMethod::default()
        };
        let search = FormatSearch { methods: vec![tried("gptq", Some(0.019)), tried("autoround", None)], ..search };
        let page = methods(&search).into_string();
        assert!(page.contains("<td>0.0190</td><td>12 s</td><td>written</td>") && page.contains("not finished in time"), "{page}");
        let page = html! { (front(&search)) (points(&search)) (units(&search)) }.into_string();
        assert_eq!(page.matches("dot large").count(), 3, "{page}");
        assert!(page.contains("Q4_K_M: 61 B, 4.500 bits, divergence 0.0310"), "{page}");
        assert!(page.contains("<td>chosen</td>") && page.contains("Q5_K") && page.contains("expected divergence"), "{page}");
        let metric = Some(crate::report::search::SearchMetric { name: "spearman".to_owned(), original: 0.8203, measured_on: "pairs".to_owned() });
        let chosen = SearchPoint { score: Some(0.8194), ..search.chosen.clone() };
        let page = points(&FormatSearch { loss: SearchLoss::CosineDistance, metric, chosen, ..search.clone() }).into_string();
        assert!(page.contains("measured distance") && page.contains("spearman") && page.contains("0.8194"), "{page}");
        let timed = |point: SearchPoint| SearchPoint { predicted_ms: Some(point.bytes as f64 / 10.0), measured_ms: None, ..point };
        let chosen = SearchPoint { measured_ms: Some(4.25), ..timed(search.chosen.clone()) };
        let [all, line] = [&search.points, &search.front].map(|points| points.iter().cloned().map(timed).collect::<Vec<_>>());
        let times = Some(crate::report::search::LatencyTable { original_ms: 9.0, ..Default::default() });
        let search = FormatSearch { times, chosen, points: all, front: line, ..search };
        let page = html! { (front(&search)) (points(&search)) (units(&search)) }.into_string();
        assert!(page.contains("Q4_K_M: 6.10 ms, 4.500 bits, divergence 0.0310"), "{page}");
        assert!(page.contains("measured latency") && page.contains("<td>4.25 ms</td>") && page.contains("with 5 % more time"), "{page}");
    }
}
