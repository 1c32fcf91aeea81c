//! The report as Markdown.

use std::fmt::Write;

use super::escape::{markdown, markdown_code};
use super::format::{bytes, count, decibels, percent, seconds, shape, size_change};
use super::{DraftQuality, Report, Timing};
use crate::error::counted;

/// Renders `report.md`.
pub(super) fn render(report: &Report) -> String {
    let mut out = String::new();
    // Writing into a string cannot fail.
    let _ = write(report, &mut out);
    out
}

fn write(report: &Report, out: &mut String) -> std::fmt::Result {
    let (before, after) = (&report.size.before, &report.size.after);
    let about = |sampled: bool| if sampled { "about " } else { "" };
    let zstd = |size: &super::Size| size.bytes_zstd.map_or("-".into(), |b| format!("{}{}", about(size.bytes_zstd_sampled), bytes(b)));
    writeln!(out, "# {} → {}, {}\n", bytes(before.bytes), bytes(after.bytes), size_change(report.size.ratio, '×'))?;
    writeln!(
        out,
        "{}{}, BLAKE3 `{}`\n",
        markdown_code(&report.model.source.display().to_string()),
        report.model.architecture.as_ref().map_or(String::new(), |a| format!(" ({})", markdown(a))),
        report.model.blake3
    )?;
    table(
        out,
        &["", "before", "after"],
        &[
            ["bytes".into(), bytes(before.bytes), bytes(after.bytes)],
            ["bytes, zstd".into(), zstd(before), zstd(after)],
            parameter_row(report),
            zero_row(report),
            ["tensors".into(), before.tensors.to_string(), after.tensors.to_string()],
        ],
    )?;
    let (warnings, notes) = report.warnings_and_notes();
    list(out, "Warnings", &warnings)?;
    let measured = escaped(super::measured::rows(report));
    if !measured.is_empty() {
        writeln!(out, "## Measured\n")?;
        measured_on(report, out)?;
        table(out, &["", "before", "after"], &measured)?;
    }
    if !report.continuations.is_empty() {
        writeln!(out, "## Continuations\n")?;
        let line = |text: &String| markdown(&text.split_whitespace().collect::<Vec<_>>().join(" "));
        let rows: Vec<[String; 3]> = report.continuations.iter().map(|text| [&text.prompt, &text.before, &text.after].map(line)).collect();
        table(out, &["text", "before", "after"], &rows)?;
    }
    if let Some(draft) = &report.draft {
        writeln!(out, "## Speculative decoding\n\n{}.\n", markdown(&draft.measured_on()))?;
        table(out, &DraftQuality::TITLES, &escaped(draft.rows()))?;
        draft.recommendation().map_or(Ok(()), |text| writeln!(out, "{text}\n"))?;
    }
    writeln!(out, "## Passes\n")?;
    let passes: Vec<_> = report
        .passes
        .iter()
        .map(|p| {
            [
                markdown_code(&p.name),
                p.tensors_changed.to_string(),
                seconds(p.seconds),
                p.peak_rss_bytes.map_or("-".into(), bytes),
                markdown_code(&p.options.to_string()),
            ]
        })
        .collect();
    table(out, &["pass", "tensors", "time", "peak memory", "options"], &passes)?;
    if let Some(timing) = &report.timing {
        table(out, &Timing::TITLES, &escaped(timing.rows()))?;
    }
    list(out, "Notes", &notes)?;
    writeln!(out, "## Files\n")?;
    let files: Vec<_> = report
        .outputs
        .iter()
        .map(|f| [markdown_code(&f.path), bytes(f.bytes), format!("`{}`", f.blake3), if f.verified.ok { "yes".into() } else { "**no**".into() }])
        .collect();
    table(out, &["file", "size", "BLAKE3", "verified"], &files)?;
    if !report.loads.is_empty() {
        writeln!(out, "The files comply with {} (a static check: no runtime was run).\n", markdown(&report.checked_rules()))?;
    }
    writeln!(out, "## Weights\n")?;
    let layers: Vec<_> = report
        .layers
        .iter()
        .map(|l| {
            let elements = l.shape.iter().product::<usize>() as u64;
            [
                markdown_code(&l.name),
                shape(&l.shape),
                l.encoding.clone(),
                bytes(l.bytes_before),
                bytes(l.bytes_after),
                percent(l.zeros, elements),
                decibels(l.sqnr_db),
            ]
        })
        .collect();
    table(out, &["weight", "shape", "encoding", "before", "after", "zeros", "SQNR"], &layers)?;
    let env = &report.environment;
    writeln!(
        out,
        "{} {} on {}, {} cores, {}: {} in total{}.",
        report.tool.name,
        report.tool.version,
        markdown(env.cpu.as_deref().unwrap_or("an unknown processor")),
        env.cores,
        env.simd,
        seconds(report.totals.seconds),
        report.totals.peak_rss_bytes.map_or(String::new(), |b| format!(", peak memory {}", bytes(b)))
    )
}

/// A sentence about the samples on which the quality was measured.
pub(super) fn measured_on(report: &Report, out: &mut String) -> std::fmt::Result {
    match (&report.accuracy, &report.fidelity) {
        (Some(accuracy), _) => {
            let (task, samples) = (markdown(&accuracy.task.to_string()), counted(accuracy.samples, "sample"));
            writeln!(out, "{task} on {samples} of {}.\n", markdown_code(&accuracy.data.to_string()))
        }
        (None, Some(measured)) => writeln!(out, "Fidelity on {}.\n", markdown(&measured.describe())),
        (None, None) => Ok(()),
    }
}

/// Number of parameters before and after.
pub(super) fn parameter_row(report: &Report) -> [String; 3] {
    ["parameters".into(), count(report.size.before.parameters), count(report.size.after.parameters)]
}

/// Fraction of zeros before and after.
pub(super) fn zero_row(report: &Report) -> [String; 3] {
    let zeros = |size: &super::Size| percent(size.parameters - size.nonzero, size.parameters);
    ["zeros".into(), zeros(&report.size.before), zeros(&report.size.after)]
}

/// Rows with cells as Markdown.
pub(super) fn escaped<const N: usize>(rows: Vec<[String; N]>) -> Vec<[String; N]> {
    rows.into_iter().map(|row| row.map(|cell| markdown(&cell))).collect()
}

pub(super) fn list(out: &mut String, title: &str, items: &[&str]) -> std::fmt::Result {
    if items.is_empty() {
        return Ok(());
    }
    writeln!(out, "## {title}\n")?;
    items.iter().try_for_each(|item| writeln!(out, "- {}", markdown(item)))?;
    writeln!(out)
}

pub(super) fn table<const N: usize>(out: &mut String, head: &[&str; N], rows: &[[String; N]]) -> std::fmt::Result {
    writeln!(out, "| {} |", head.join(" | "))?;
    writeln!(out, "|{}|", head.iter().enumerate().map(|(i, _)| if i == 0 { " --- " } else { " ---: " }).collect::<Vec<_>>().join("|"))?;
    for row in rows {
        writeln!(out, "| {} |", row.iter().map(|cell| cell.replace('|', "\\|")).collect::<Vec<_>>().join(" | "))?;
    }
    writeln!(out)
}
