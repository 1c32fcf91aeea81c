//! The model card of an output folder: `README.md`, with metadata in the form of the Hugging Face Hub.
//!
//! The card depends on the source, the recipe and the results, but not on times, on the machine or on the
//! number of threads, so that the same run writes the same card.

// Source folders are untrusted.
#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

mod eval_results;
mod loading;
mod metadata;
mod source;
mod steps;
mod tasks;

use std::collections::BTreeSet;
use std::fmt::Write;

use serde_json::{Map, Value};

pub(crate) use self::eval_results::eval_results;
pub(crate) use self::source::{Source, is_own};
use super::escape::{markdown, markdown_code};
use super::format::{bytes, size_change};
use super::markdown::{escaped, list, measured_on, parameter_row, table, zero_row};
use super::measured::{compute_rows, quality_rows};
use super::{OutputFile, Report};
use crate::contract::Target;

/// File name of the card.
pub(crate) const FILE: &str = "README.md";

/// Marks cards that this program has written.
const MARKER: &str = "<!-- This model card was written by compress. -->";
/// Heading of the section that lists the passes.
const STEPS: &str = "## Compression";
/// Address of the Hub.
const HUB: &str = "https://huggingface.co";

/// Everything that a card describes.
pub(crate) struct Card<'a> {
    /// The report of the run, without the copied files and the totals.
    pub report: &'a Report,
    /// The model from which the output was made.
    pub source: &'a Source,
    /// `config.json` of the output.
    pub config: &'a Map<String, Value>,
    /// Names of the files in the output folder.
    pub files: &'a BTreeSet<String>,
    /// Runtimes whose rules the output complies with; `None` if they were not checked.
    pub loaded_by: Option<&'a [Target]>,
    /// Data sets on the Hub that were used for calibration and training.
    pub data_sets: &'a [String],
}

impl Card<'_> {
    /// Contents of the file.
    pub fn render(&self) -> String {
        let mut out = String::new();
        // Writing into a string cannot fail.
        let _ = self.write(&mut out);
        out
    }

    fn write(&self, out: &mut String) -> std::fmt::Result {
        let Card { report, source, .. } = self;
        let title = markdown(&source.name).replace('#', "\\#");
        writeln!(out, "---\n{}---\n{MARKER}\n\n# {title}, compressed\n", metadata::yaml(self))?;
        self.write_origin(out)?;
        writeln!(out, "{STEPS}\n")?;
        let steps = self.steps();
        steps.iter().zip(1..).try_for_each(|(step, number)| writeln!(out, "{number}. {step}"))?;
        writeln!(out, "{}", if steps.is_empty() { "No pass was applied: the weights are those of the source.\n" } else { "" })?;
        let mut rows = quality_rows(report);
        rows.extend(report.compute.iter().flat_map(compute_rows));
        if !rows.is_empty() {
            writeln!(out, "## Quality\n")?;
            measured_on(report, out)?;
            if let Some(folder) = source.earlier_result() {
                writeln!(out, "Compared with {}, not with the original model.\n", markdown_code(folder))?;
            }
            table(out, &["", "before", "after"], &escaped(rows))?;
        }
        list(out, "Warnings", &report.warnings_and_notes().0)?;
        writeln!(out, "## Size\n")?;
        let (before, after) = (&report.size.before, &report.size.after);
        let size = ["weights".into(), bytes(before.bytes), bytes(after.bytes)];
        table(out, &["", "before", "after"], &[size, parameter_row(report), zero_row(report)])?;
        let file = |file: &OutputFile| [markdown_code(&file.path), markdown(&file.format), bytes(file.bytes)];
        table(out, &["file", "format", "size"], &report.outputs.iter().map(file).collect::<Vec<_>>())?;
        writeln!(out, "## Use\n")?;
        loading::write(self, out)?;
        self.write_reproduction(out)
    }

    /// The passes and formats as sentences. Passes of earlier runs precede those of this run.
    fn steps(&self) -> Vec<String> {
        let earlier = self.source.earlier_steps.iter().cloned();
        earlier.chain(self.report.passes.iter().map(steps::of_pass)).chain(steps::of_formats(&self.report.recipe)).collect()
    }

    /// A sentence about the source and the sizes.
    fn write_origin(&self, out: &mut String) -> std::fmt::Result {
        let Card { report, source, .. } = self;
        let link = |id: &String| format!("[{}]({HUB}/{id})", markdown(id));
        let base: Vec<String> = source.base_models.iter().map(link).collect();
        let folder = markdown_code(&source.folder);
        let origin = match (&source.repository, base.as_slice()) {
            (Some(repository), [link]) if repository.revision == "main" => link.clone(),
            (Some(repository), [link]) => format!("{link} (revision {})", markdown_code(&repository.revision)),
            (None, []) if source.is_own => format!("{folder}, an earlier result"),
            (None, links) if source.is_own => format!("{folder}, an earlier result from {}", links.join(", ")),
            (_, []) => markdown_code(&source.name),
            (_, links) => format!("{}, which is based on {}", markdown_code(&source.name), links.join(", ")),
        };
        let (before, after) = (bytes(report.size.before.bytes), bytes(report.size.after.bytes));
        let (tool, change) = (&report.tool, size_change(report.size.ratio, '×'));
        writeln!(out, "Made with {} {} from {origin}: {before} → {after}, {change}.\n", tool.name, tool.version)?;
        if source.repository.is_some() || (source.is_own && !base.is_empty()) {
            writeln!(out, "The card of the original model describes its purpose, its training and its limitations.\n")
        } else if source.has_card && !source.is_own {
            writeln!(out, "The {} of the source describes its purpose, its training and its limitations.\n", markdown_code(FILE))
        } else {
            Ok(())
        }
    }

    fn write_reproduction(&self, out: &mut String) -> std::fmt::Result {
        let Card { report, source, .. } = self;
        writeln!(out, "## Reproduction\n")?;
        writeln!(out, "[`recipe.yaml`](recipe.yaml) contains all options, with seed {}:\n", report.seed)?;
        writeln!(out, "```sh\ncompress run recipe.yaml -o out\n```\n")?;
        let model = source.earlier_result().map_or_else(|| "the source".to_owned(), markdown_code);
        if source.repository.is_none() {
            writeln!(out, "Set `model` in it to the path of {model}.")?;
        }
        writeln!(out, "The BLAKE3 hash of the weights of {model} is `{}`.", report.model.blake3)?;
        writeln!(out, "[`report.html`](report.html) and [`report.json`](report.json) have all measurements and the hash of each file;")?;
        writeln!(out, "`compress verify` compares the files with it.")
    }
}
