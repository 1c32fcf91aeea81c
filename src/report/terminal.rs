//! The report as tables for a terminal.

mod table;

use comfy_table::{ContentArrangement, presets};

use super::escape::display_line;
use super::format::{bytes, cell_text, count, decibels, percent, seconds, shape, size_change};
use super::{Comparison, DraftQuality, Report, SamplesFrom, Size, Timing, WARNING};
use crate::error::counted;

pub use self::table::Table;

/// A table without rules. The first column is left-aligned, the others are right-aligned.
pub fn table(head: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> Table {
    let mut table = Table::new(head);
    rows.into_iter().for_each(|row| table.add_row(row.iter().map(|cell| display_line(cell))));
    table
}

/// A table of names and values, both left-aligned.
pub fn facts(rows: impl IntoIterator<Item = (&'static str, String)>) -> comfy_table::Table {
    let mut facts = comfy_table::Table::new();
    facts.load_style(presets::NOTHING).add_rows(rows.into_iter().map(|(name, value)| [name.to_owned(), value]));
    facts
}

/// A table with the width of a terminal and wrapped cells.
pub fn wrapped<const N: usize>(head: &[&str; N], rows: impl IntoIterator<Item = [String; N]>, columns: u16) -> comfy_table::Table {
    let mut table = comfy_table::Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Dynamic).set_width(columns).set_header(head).add_rows(rows);
    table
}

/// Formats a note or a warning as a line.
pub fn note_line(note: &str) -> String {
    let label = if note.starts_with(WARNING) { "" } else { "note: " };
    format!(" {label}{}\n", display_line(note))
}

/// Number of listed weights with the lowest signal-to-noise ratio.
const WORST: usize = 5;

impl DraftQuality {
    /// The measurements as a table, with the recommendation.
    pub(crate) fn text(&self) -> String {
        let recommendation = self.recommendation().map_or(String::new(), |text| format!(" {text}\n"));
        format!("\n{}\n {}\n{recommendation}", table(&Self::TITLES, self.rows().into_iter().map(Vec::from)), self.measured_on())
    }
}

impl Report {
    /// Summary for a terminal: sizes, measurements, passes, the most changed weights, and notes.
    pub fn to_terminal(&self) -> String {
        let (before, after) = (&self.size.before, &self.size.after);
        let mut out =
            format!("{} -> {}: {}, in {}\n\n", bytes(before.bytes), bytes(after.bytes), size_change(self.size.ratio, 'x'), seconds(self.totals.seconds));
        let zstd = |size: &Size| size.bytes_zstd.map_or("-".into(), |b| format!("{}{}", if size.bytes_zstd_sampled { "~" } else { "" }, bytes(b)));
        let zeros = |size: &Size| percent(size.parameters - size.nonzero, size.parameters);
        let pair = |name: &str, f: &dyn Fn(&Size) -> String| vec![name.to_owned(), f(before), f(after)];
        let sizes = table(
            &["size", "before", "after"],
            [
                pair("bytes", &|s| bytes(s.bytes)),
                pair("bytes, zstd", &zstd),
                pair("parameters", &|s| count(s.parameters)),
                pair("zeros", &zeros),
                pair("tensors", &|s| s.tensors.to_string()),
            ],
        );
        out += &format!("{sizes}\n");
        let measured = super::measured::rows(self);
        if !measured.is_empty() {
            out += &format!("\n{}\n", table(&["measured", "before", "after"], measured.into_iter().map(Vec::from)));
        }
        if let Some(accuracy) = &self.accuracy {
            out += &format!(" {} of {}\n", counted(accuracy.samples, "sample"), accuracy.data);
        } else if let Some(measured) = &self.fidelity {
            let estimated = if measured.samples_from == SamplesFrom::Synthetic { ": a rough estimate; `--eval FILE` measures on your data" } else { "" };
            out += &format!(" fidelity on {}{estimated}\n", measured.describe());
        }
        if let Some(draft) = &self.draft {
            out += &draft.text();
        }
        if !self.passes.is_empty() {
            let rows =
                self.passes.iter().map(|p| vec![p.name.clone(), p.tensors_changed.to_string(), seconds(p.seconds), p.peak_rss_bytes.map_or("-".into(), bytes)]);
            out += &format!("\n{}\n", table(&["pass", "tensors", "time", "peak memory"], rows));
        }
        if let Some(timing) = &self.timing {
            out += &format!("\n{}\n", table(&Timing::TITLES, timing.rows().into_iter().map(Vec::from)));
        }
        let worst = self.most_changed();
        if !worst.is_empty() {
            let rows = worst.iter().take(WORST).map(|l| {
                let elements = l.shape.iter().product::<usize>() as u64;
                vec![l.name.clone(), shape(&l.shape), l.encoding.clone(), percent(l.zeros, elements), decibels(l.sqnr_db)]
            });
            let changed = worst.len();
            out += &format!("\n{}\n", table(&["weights that changed most", "shape", "encoding", "zeros", "SQNR"], rows));
            if changed > WORST {
                out += &format!(" {} changed; all are in report.html\n", counted(changed, "weight"));
            }
        }
        if !self.loads.is_empty() {
            out += &format!("\n complies with {} (a static check: no runtime was run)\n", self.checked_rules());
        }
        if !self.notes.is_empty() {
            out += "\n";
        }
        for note in &self.notes {
            out += &note_line(note);
        }
        out
    }
}

impl Comparison {
    /// Tables for a terminal. Runs on the Pareto front of size and quality are marked by a star.
    pub fn to_terminal(&self) -> String {
        let (head, mut rows) = self.cells();
        for (row, run) in rows.iter_mut().zip(&self.runs) {
            row[0] = format!("{} {}", if run.front { "*" } else { " " }, row[0]);
        }
        let mut out = format!("{}\n", table(&head.iter().map(String::as_str).collect::<Vec<_>>(), rows));
        if let Some(metric) = &self.metric {
            out += &format!("\n * no other run is both smaller and better by {metric}\n");
        }
        if let Some(note) = &self.note {
            out += &format!("\n{}", note_line(note));
        }
        if !self.differing.is_empty() {
            let head: Vec<&str> = std::iter::once("option").chain(self.runs.iter().map(|run| run.name.as_str())).collect();
            let rows = self.differing.iter().map(|d| std::iter::once(d.option.clone()).chain(d.values.iter().map(|v| cell_text(v.as_ref()))).collect());
            out += &format!("\n{}\n", table(&head, rows));
        }
        out
    }
}
