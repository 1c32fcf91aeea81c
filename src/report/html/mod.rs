//! The report as a self-contained HTML page without external resources.
//!
//! Text is escaped by `maud`, and names are never inserted into scripts or styles.

mod chart;
mod compare;
mod layers;
mod passes;
mod provenance;
mod quality;
mod search;
mod summary;
mod training;
mod values;

use maud::{DOCTYPE, Markup, PreEscaped, html};

use super::Report;
use super::escape::display;

const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");
/// Content security policy that prevents all network requests.
const POLICY: &str = include_str!("policy.txt");

/// Renders `report.html`.
pub(super) fn render(report: &Report) -> String {
    let name = summary::name(report);
    let body = html! {
        (summary::header(report, &name))
        main {
            (summary::headline(report))
            (summary::notes(report))
            (summary::parts(report))
            (quality::accuracy(report))
            (quality::continuations(report))
            (quality::latency(report))
            (quality::draft(report))
            (search::section_of(report))
            (layers::section(report))
            (values::section(report))
            (passes::sensitivity(report))
            (training::section(report))
            (passes::section(report))
            (provenance::recipe(report))
            (provenance::section(report))
        }
    };
    page(&format!("{name}: compression report"), &body)
}

/// A complete page.
fn page(title: &str, body: &Markup) -> String {
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                meta http-equiv="Content-Security-Policy" content=(POLICY.trim_end());
                title { (title) }
                style { (PreEscaped(STYLE)) }
            }
            body {
                (body)
                script { (PreEscaped(SCRIPT)) }
            }
        }
    };
    display(&page.into_string()).into_owned()
}

/// A section with a heading and an explanation; empty if the content is empty.
fn section(id: &str, title: &str, lead: &str, content: &Markup) -> Markup {
    if content.0.is_empty() {
        return html! {};
    }
    html! {
        section #(id) {
            h2 { (title) }
            @if !lead.is_empty() { p.lead { (prose(lead)) } }
            (content)
        }
    }
}

/// A table with horizontal scrolling. Columns after the first are right-aligned.
fn table(head: &[&str], rows: &[Vec<Markup>]) -> Markup {
    html! {
        div.scroll {
            table {
                thead { tr { @for cell in head { th { (cell) } } } }
                tbody { @for row in rows { tr { @for cell in row { td { (cell) } } } } }
            }
        }
    }
}

/// A name that may be broken after separators.
fn breakable(name: &str) -> Markup {
    html! {
        @for part in name.split_inclusive(['.', '/', '_']) { (part) wbr; }
    }
}

/// Text with code between backticks.
fn prose(text: &str) -> Markup {
    html! {
        @for (index, part) in text.split('`').enumerate() {
            @if index % 2 == 1 { code { (part) } } @else { (part) }
        }
    }
}
