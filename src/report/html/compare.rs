//! Comparison of several runs as an HTML page.

use maud::{Markup, html};

use super::chart::{Axis, Frame, SIZE, dot};
use super::{page, section, table};
use crate::evaluation::lower_is_better;
use crate::report::compare::{Comparison, Summary};
use crate::report::format::{bytes, cell_text};

impl Comparison {
    /// Beginning of the title of [`to_html`](Comparison::to_html).
    pub(crate) const TITLE: &str = "Comparison of ";

    /// The comparison as an HTML page.
    pub fn to_html(&self) -> String {
        let title = format!("{}{} runs", Self::TITLE, self.runs.len());
        let body = html! {
            header {
                p.eyebrow { "compress " (env!("CARGO_PKG_VERSION")) " \u{b7} comparison" }
                h1 { (title) }
            }
            main {
                (plot(self))
                (runs(self))
                (differing(self))
            }
        };
        page(&title, &body)
    }
}

/// `A`, `B`, … `Z`, `A1`, …
fn letter(index: usize) -> String {
    let letter = char::from(b'A' + (index % 26) as u8);
    if index < 26 { letter.to_string() } else { format!("{letter}{}", index / 26) }
}

fn runs(comparison: &Comparison) -> Markup {
    let (head, rows) = comparison.cells();
    let rows: Vec<Vec<Markup>> = rows
        .into_iter()
        .zip(&comparison.runs)
        .enumerate()
        .map(|(index, (row, run))| {
            let mut cells: Vec<Markup> = row.into_iter().map(|cell| html! { (cell.replace(" x", "\u{d7}")) }).collect();
            cells[0] = html! { span.letter.front[run.front].beaten[comparison.metric.is_some() && !run.front] { (letter(index)) } (run.name) };
            cells
        })
        .collect();
    let lead = match (&comparison.metric, &comparison.note) {
        (Some(_), _) => "",
        (None, Some(note)) => note,
        (None, None) => {
            "These runs have no common quality metric. With `data: { evaluation: \u{2026} }` in the recipes, this page contains a plot of quality against size."
        }
    };
    section("runs", "Runs", lead, &table(&head.iter().map(String::as_str).collect::<Vec<_>>(), &rows))
}

fn differing(comparison: &Comparison) -> Markup {
    if comparison.differing.is_empty() {
        return html! {};
    }
    let letters: Vec<String> = (0..comparison.runs.len()).map(letter).collect();
    let head: Vec<&str> = std::iter::once("option").chain(letters.iter().map(String::as_str)).collect();
    let rows: Vec<Vec<Markup>> = comparison
        .differing
        .iter()
        .map(|option| {
            std::iter::once(html! { code { (option.option) } }).chain(option.values.iter().map(|value| html! { (cell_text(value.as_ref())) })).collect()
        })
        .collect();
    section("options", "Differences of the recipes", "Options that are not the same in all recipes.", &table(&head, &rows))
}

/// Label of one or more points; labels that would overlap are merged.
struct Label {
    x: f64,
    y: f64,
    text: String,
    front: bool,
}

fn plot(comparison: &Comparison) -> Markup {
    let mut points: Vec<(usize, &Summary, f64)> = comparison.runs.iter().enumerate().filter_map(|(i, run)| Some((i, run, run.value?))).collect();
    // Points on the Pareto front are drawn last, on top of the others.
    points.sort_by_key(|(index, run, _)| (run.front, *index));
    let Some(metric) = comparison.metric.as_ref().filter(|_| !points.is_empty()) else { return html! {} };
    let original = points.iter().find_map(|(_, run, _)| Some((run.bytes_before, run.value_before?)));
    let x = Axis::over(points.iter().map(|(_, run, _)| run.bytes).chain(original.map(|o| o.0)).chain([0]).map(|b| b as f64 / 1e6), 4);
    let y = Axis::over(points.iter().map(|(_, _, value)| *value).chain(original.map(|o| o.1)), 4);
    let position = |size: u64, value: f64| (x.x(size as f64 / 1e6), y.y(value));
    let mut front: Vec<(f64, f64)> = points.iter().filter(|(_, run, _)| run.front).map(|(_, run, value)| position(run.bytes, *value)).collect();
    front.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut labels: Vec<Label> = Vec::new();
    for (index, run, value) in &points {
        let (left, top) = position(run.bytes, *value);
        match labels.iter_mut().find(|label| (label.x - left).abs() < SIZE * 0.05 && (label.y - top).abs() < SIZE * 0.08) {
            Some(label) => {
                label.text += &format!(" {}", letter(*index));
                label.front |= run.front;
            }
            None => labels.push(Label { x: left, y: top, text: letter(*index), front: run.front }),
        }
    }
    let tip = |name: &str, size: u64, value: f64| format!("{name}: {}, {metric} {value:.4}", bytes(size));
    let marks = html! {
        path.front d=(stairs(&front)) {}
        @if let Some((size, value)) = original {
            @let (left, top) = position(size, value);
            g.mark transform=(format!("translate({left:.1} 0)")) data-tip=(tip("original", size, value)) { path.dot.large.before d=(dot(0.0, top)) {} }
        }
        @for (index, run, value) in &points {
            @let (left, top) = position(run.bytes, *value);
            g.mark transform=(format!("translate({left:.1} 0)")) data-tip=(tip(&letter(*index), run.bytes, *value)) {
                path.dot.large.(if run.front { "after" } else { "beaten" }) d=(dot(0.0, top)) {}
            }
        }
    };
    let size = |v: f64| bytes((v * 1e6) as u64);
    let frame = Frame { height: 300, title: "size against quality", x: Some((&x, &size)), y: Some((&y, &|v| y.plain(v))), nearest: true };
    let better = if lower_is_better(metric) { "lower" } else { "higher" };
    let lead = format!(
        "Further left is smaller; a {better} {metric} is better. No run is both smaller and better than a run on the line (Pareto front). Sizes within 0.1 % count as equal."
    );
    let content = html! {
        figure.pareto {
            (frame.draw_with(&marks, &html! {
                @for label in &labels {
                    span.point.front[label.front] style=(format!("left:{:.2}%;top:{:.2}%", label.x / 10.0, label.y / 10.0)) { (label.text) }
                }
            }))
            figcaption { @if original.is_some() { span.key.before {} " the original " } span.key.after {} " Pareto front " span.key.beaten {} " dominated" }
        }
    };
    section("pareto", &format!("Size and {metric}"), &lead, &content)
}

/// The Pareto front as a step line from the smallest run to the best.
fn stairs(front: &[(f64, f64)]) -> String {
    let mut path = String::new();
    for (index, (x, y)) in front.iter().enumerate() {
        path += &if index == 0 { format!("M{x:.1} {y:.1}") } else { format!("H{x:.1}V{y:.1}") };
    }
    path
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(name: &str, bytes: u64, value: f64, front: bool) -> Summary {
        Summary {
            name: name.to_owned(),
            bytes,
            bytes_before: 100,
            ratio: 1.0,
            value: Some(value),
            value_before: Some(1.0),
            drop: None,
            cosine: None,
            latency_ms: None,
            runtime: None,
            latency_batch: None,
            latency_threads: None,
            speedup: None,
            seconds: 1.0,
            peak_rss_bytes: None,
            front,
        }
    }

    #[test]
    fn latencies_state_the_conditions_that_differ() {
        let timed = |ms: f64, batch: &[usize], threads: usize| Summary {
            latency_ms: Some(ms),
            runtime: Some("candle".into()),
            latency_batch: Some(batch.to_vec()),
            latency_threads: Some(threads),
            ..run("a", 50, 0.9, true)
        };
        let times = |runs: Vec<Summary>| {
            let (head, rows) = Comparison { runs, differing: Vec::new(), metric: None, note: None }.cells();
            let column = head.iter().position(|name| name == "median latency").unwrap();
            rows.into_iter().map(|mut row| row.remove(column)).collect::<Vec<_>>()
        };
        assert_eq!(times(vec![timed(4.4, &[32, 8], 2), run("b", 1, 1.0, true), timed(1.05, &[7, 8], 2)]), ["4.40 ms (32 x 8)", "-", "1.05 ms (7 x 8)"]);
        assert_eq!(times(vec![timed(4.4, &[7, 8], 2), timed(1.05, &[7, 8], 1)]), ["4.40 ms (2 threads)", "1.05 ms (1 thread)"]);
        assert_eq!(times(vec![timed(4.4, &[7, 8], 2), timed(1.05, &[7, 8], 2)]), ["4.40 ms", "1.05 ms"]);
    }

    #[test]
    fn runs_of_the_front_are_drawn_on_top() {
        let runs = vec![run("a", 50, 0.9, true), run("b", 51, 0.9, false), run("c", 40, 0.8, true), run("d", 60, 0.8, false)];
        let page = Comparison { runs, differing: Vec::new(), metric: Some("accuracy".into()), note: None }.to_html();
        let (beaten, front) = (page.rfind("dot large beaten").unwrap(), page.find("dot large after").unwrap());
        assert!(beaten < front, "{page}");
    }
}
