//! The front of a search over formats.

use maud::{Markup, html};

use super::chart::{Axis, Frame, dot, short};
use super::{section, table};
use crate::report::Report;
use crate::report::format::{bytes, figure};
use crate::report::search::{FormatSearch, SearchPoint};

/// Units with the largest expected losses that are listed.
const UNITS: usize = 24;

pub(super) fn section_of(report: &Report) -> Markup {
    let Some(search) = &report.search else { return html! {} };
    let noun = search.loss.noun();
    let lead = format!(
        "Mixtures of formats that {} loads. The line is the predicted front: no mixture of this size has less expected {noun} ({}). Dots are measured with weights rounded to nearest{}.{}",
        search.runtime,
        search.loss,
        search.measured_on.as_ref().map_or_else(String::new, |samples| format!(", on {samples}")),
        search.metric.as_ref().map_or_else(String::new, |metric| {
            format!(" The {} of the original model is {}, on {}.", metric.name, figure(metric.original), metric.measured_on)
        })
    );
    let larger = search.larger.as_ref().map(|point| {
        let count = search.units.iter().filter(|unit| unit.larger.is_some()).count();
        format!(
            "With 5 % more bytes ({}), {count} of {} units get other formats, and the expected {noun} falls from {} to {}.",
            bytes(point.bytes),
            search.units.len(),
            short(search.chosen.predicted),
            short(point.predicted)
        )
    });
    let content = html! {
        (front(search))
        (points(search))
        @if let Some(text) = larger { p { (text) } }
        (units(search))
    };
    section("search", &format!("Size and {noun}"), &lead, &content)
}

fn front(search: &FormatSearch) -> Markup {
    let all = || search.front.iter().chain(&search.points).chain([&search.chosen]);
    let x = Axis::over(all().map(|point| point.bytes as f64 / 1e6), 5);
    let y = Axis::logarithmic(all().flat_map(|point| [point.predicted].into_iter().chain(point.measured)).filter(|value| *value > 1e-9));
    let position = |bytes: u64, value: f64| (x.x(bytes as f64 / 1e6), y.y(value));
    let mut path = String::new();
    for point in search.front.iter().filter(|point| point.predicted > 1e-9) {
        let (left, top) = position(point.bytes, point.predicted);
        path += &format!("{}{left:.1} {top:.1}", if path.is_empty() { "M" } else { "L" });
    }
    let noun = search.loss.noun();
    let tip = |point: &SearchPoint, what: &str, value: f64| format!("{what}: {}, {:.3} bits, {noun} {}", bytes(point.bytes), point.bits, short(value));
    let mark = |point: &SearchPoint, class: &str, what: &str, value: f64| {
        let (left, top) = position(point.bytes, value);
        html! { g.mark transform=(format!("translate({left:.1} 0)")) data-tip=(tip(point, what, value)) { path.dot.large.(class) d=(dot(0.0, top)) {} } }
    };
    let marks = html! {
        path.front d=(path) {}
        @for point in &search.points {
            @if let Some(measured) = point.measured {
                (mark(point, if point.name.is_some() { "beaten" } else { "after" }, point.name.as_deref().unwrap_or("mixture"), measured))
            }
        }
        (mark(&search.chosen, "before", "chosen, predicted", search.chosen.predicted))
    };
    let size = |value: f64| bytes((value * 1e6) as u64);
    let frame = Frame { height: 320, title: &format!("size against {noun}"), x: Some((&x, &size)), y: Some((&y, &|value| short(value))), nearest: true };
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
        cells.into_iter().chain(score.map(|score| html! { (score) })).collect()
    };
    let mut rows: Vec<Vec<Markup>> = search.points.iter().map(|point| row(point, point.name.as_deref().unwrap_or("mixture"))).collect();
    rows.push(row(&search.chosen, "chosen"));
    let titles = ["predicted", "measured"].map(|what| format!("{what} {}", search.loss.noun()));
    let titles = ["", "bits", "size"].into_iter().chain(titles.iter().map(String::as_str)).chain(search.metric.as_ref().map(|metric| metric.name.as_str()));
    table(&titles.collect::<Vec<_>>(), &rows)
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
            (table(&["unit", "format", "size", &format!("expected {noun}"), "with 5 % more bytes"], &rows))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::search::SearchUnit;

    #[test]
    fn measured_points_and_the_front_are_drawn() {
        let point = |name: Option<&str>, bytes: u64, predicted: f64, measured: Option<f64>| SearchPoint {
            name: name.map(str::to_owned),
            bits: 4.5,
            bytes,
            predicted,
            measured,
            score: None,
        };
        let search = FormatSearch {
            runtime: "llama.cpp".to_owned(),
            measured_on: Some("8 windows of text".to_owned()),
            chosen: point(None, 60, 0.02, None),
            larger: Some(point(None, 63, 0.015, None)),
            points: vec![point(Some("Q4_K_M"), 61, 0.03, Some(0.031)), point(None, 62, 0.017, Some(0.018))],
            front: (50..70u32).map(|bytes| point(None, bytes.into(), 1.0 / f64::from(bytes), None)).collect(),
            units: vec![SearchUnit { name: "blk.0.attn_q".into(), format: "Q4_K".into(), bytes: 5, loss: 0.01, larger: Some("Q5_K".into()) }],
            ..FormatSearch::default()
        };
        let page = html! { (front(&search)) (points(&search)) (units(&search)) }.into_string();
        assert_eq!(page.matches("dot large").count(), 3, "{page}");
        assert!(page.contains("Q4_K_M: 61 B, 4.500 bits, divergence 0.0310"), "{page}");
        assert!(page.contains("<td>chosen</td>") && page.contains("Q5_K") && page.contains("expected divergence"), "{page}");
        let metric = Some(crate::report::SearchMetric { name: "spearman".to_owned(), original: 0.8203, measured_on: "pairs".to_owned() });
        let chosen = SearchPoint { score: Some(0.8194), ..search.chosen.clone() };
        let page = points(&FormatSearch { loss: crate::report::SearchLoss::CosineDistance, metric, chosen, ..search }).into_string();
        assert!(page.contains("measured distance") && page.contains("spearman") && page.contains("0.8194"), "{page}");
    }
}
