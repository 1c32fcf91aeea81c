//! The weights: a chart of signal-to-noise ratio and bytes, and a sortable table that determines the
//! order of the chart.

use maud::{Markup, html};

use super::breakable;
use super::chart::{Axis, Frame, SIZE, dot};
use crate::model::part;
use crate::report::format::{bytes, decibels, natural, percent, shape};
use crate::report::{Layer, Report};

/// Maximum number of rows. If there are more weights, the most changed ones are listed, then the largest.
const MAX_ROWS: usize = 3000;
/// Maximum number of rows in print.
const MAX_PRINTED: usize = 40;
/// Number of marks from which they are drawn thin.
const THIN_MARKS: usize = 150;

fn listed(report: &Report) -> (Vec<&Layer>, usize) {
    let mut layers: Vec<&Layer> = report.layers.iter().collect();
    let left = layers.len().saturating_sub(MAX_ROWS);
    if left > 0 {
        layers.sort_by(|a, b| {
            let noise = |layer: &Layer| layer.sqnr_db.unwrap_or(f64::INFINITY);
            noise(a).total_cmp(&noise(b)).then(b.bytes_before.cmp(&a.bytes_before))
        });
        layers.truncate(MAX_ROWS);
    }
    layers.sort_by(|a, b| natural(&a.name, &b.name));
    (layers, left)
}

pub(super) fn section(report: &Report) -> Markup {
    let (layers, left) = listed(report);
    if layers.is_empty() {
        return html! {};
    }
    let changed = layers.iter().filter(|layer| layer.sqnr_db.is_some()).count();
    let lead = format!(
        "{} weights, the values of {changed} of them changed. Each dot is a weight that changed or has two or more dimensions. Hover over a dot to see its name; sort the chart and the table by a column.",
        report.layers.len()
    );
    let content = html! {
        (chart(&layers))
        div.tools {
            input type="search" placeholder="Filter by name" aria-label="Filter by name" data-filter="weights";
            span.tools-label { "Order" }
            @for (column, label) in [(0, "model"), (6, "SQNR"), (4, "size"), (5, "zeros")] {
                button type="button" data-order=(column) aria-pressed=(if column == 0 { "true" } else { "false" }) { (label) }
            }
        }
        (rows(&layers))
        @if left > 0 { p.lead { (left) " smaller weights with smaller changes are only in report.json." } }
    };
    super::section("weights", "Weights", &lead, &content)
}

/// Two charts, of the signal-to-noise ratio and of the bytes before and after. The marks are in the
/// order of the table.
fn chart(layers: &[&Layer]) -> Markup {
    // Unchanged vectors are omitted, since they would be most of the marks.
    let drawn: Vec<(usize, &Layer)> = layers.iter().copied().enumerate().filter(|(_, layer)| layer.shape.len() > 1 || layer.sqnr_db.is_some()).collect();
    let step = SIZE / drawn.len().max(1) as f64;
    let transform = |index: usize| format!("translate({:.2} 0)", (index as f64 + 0.5) * step);
    let class = |layer: &Layer| format!("part-{}", part(&layer.name, &layer.shape).name());
    let noise = Axis::over(drawn.iter().filter_map(|(_, layer)| layer.sqnr_db), 4);
    let size = Axis::logarithmic(drawn.iter().flat_map(|(_, layer)| [layer.bytes_before as f64, layer.bytes_after as f64]));
    let dots = html! {
        @for (at, (row, layer)) in drawn.iter().enumerate() {
            @if let Some(db) = layer.sqnr_db {
                g.mark.(class(layer)) data-row=(row) transform=(transform(at)) { path.dot d=(dot(0.0, noise.y(db))) {} }
            }
        }
    };
    let sizes = html! {
        @for (at, (row, layer)) in drawn.iter().enumerate() {
            g.mark.(class(layer)) data-row=(row) transform=(transform(at)) {
                path.stem d=(format!("M0 {:.1}V{:.1}", size.y(layer.bytes_before as f64), size.y(layer.bytes_after as f64))) {}
                path.dot.before d=(dot(0.0, size.y(layer.bytes_before as f64))) {}
                path.dot d=(dot(0.0, size.y(layer.bytes_after as f64))) {}
            }
        }
    };
    let (in_decibels, in_bytes) = (|v: f64| noise.plain(v), |v: f64| bytes(v as u64));
    let above = Frame { height: 150, title: "signal-to-noise ratio of each weight", x: None, y: Some((&noise, &in_decibels)), nearest: true };
    let below = Frame { height: 140, title: "bytes of each weight", x: None, y: Some((&size, &in_bytes)), nearest: true };
    html! {
        figure.weights.many[drawn.len() > THIN_MARKS] {
            @if layers.iter().any(|layer| layer.sqnr_db.is_some()) {
                figcaption { "Signal-to-noise ratio in dB: higher is closer to the original" }
                (above.draw(&dots))
            }
            figcaption { "Bytes: " span.key.before {} " before, " span.key.after {} " after, colored by part of the model" }
            (below.draw(&sizes))
        }
    }
}

fn rows(layers: &[&Layer]) -> Markup {
    // Columns are sorted by the numeric values in `data-value`.
    let mut worst: Vec<usize> = (0..layers.len()).collect();
    worst.sort_by(|a, b| layers[*a].sqnr_db.unwrap_or(f64::MAX).total_cmp(&layers[*b].sqnr_db.unwrap_or(f64::MAX)));
    let mut printed = vec![false; layers.len()];
    worst.iter().take(MAX_PRINTED).for_each(|index| printed[*index] = true);
    html! {
        div.scroll.tall {
            table.sortable #weights-table {
                thead { tr {
                    @for (column, head) in ["weight", "shape", "encoding", "before", "after", "zeros", "SQNR"].iter().enumerate() {
                        th { button type="button" data-column=(column) { (head) } }
                    }
                } }
                tbody {
                    @for (index, layer) in layers.iter().enumerate() {
                        @let elements = layer.shape.iter().fold(1u64, |product, size| product.saturating_mul(*size as u64));
                        tr.unprinted[!printed[index]] data-index=(index) {
                            td { (breakable(&layer.name)) }
                            td data-value=(elements) { (shape(&layer.shape)) }
                            td { (layer.encoding) }
                            td data-value=(layer.bytes_before) { (bytes(layer.bytes_before)) }
                            td data-value=(layer.bytes_after) { (bytes(layer.bytes_after)) }
                            td data-value=(format!("{:.6}", layer.zeros as f64 / elements.max(1) as f64)) { (percent(layer.zeros, elements)) }
                            td data-value=[layer.sqnr_db.map(|db| format!("{db:.3}"))] { (decibels(layer.sqnr_db)) }
                        }
                    }
                }
            }
        }
        @if layers.len() > MAX_PRINTED { p.paper { "In print, only the " (MAX_PRINTED) " weights that changed most are listed." } }
    }
}
